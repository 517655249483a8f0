"""A linear layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

How many launches a direction takes is decided when it runs (:mod:`fp4engine.ops.linear`), so that a graph knows nothing
of the number of rows. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import AMAX_STRIDE
from fp4engine.formats import CastSpec
from fp4engine.ops.cast import amax_shape, codes_outputs
from fp4engine.ops.grouped import column_sums
from fp4engine.ops.linear import (
    Casts,
    Kept,
    LinearAtOnce,
    LinearByFP8,
    LinearByOperations,
    LinearByValues,
    Memories,
    both,
    covering,
    given_amaxes,
    shares_amaxes,
    unscaled,
    way_of,
)
from fp4engine.ops.operation import Output, define
from fp4engine.ops.rng import placed
from fp4engine.ops.tiles import TiledOperand
from fp4engine.tracing import constant_when_traced


class LinearByOperators(NamedTuple):
    """By two operators, one for each direction.

    Attributes:
        casts: their key.
        weight_dtype: of the weight.
    """

    casts: str
    weight_dtype: torch.dtype

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
        shared: tuple[bool, bool] = (False, False),
        amaxes: Tensor | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`; of x and of weight, those that are ``shared`` are cast by ``amaxes``."""
        x, bias = x.detach(), bias if bias is None else bias.detach()
        if isinstance(weight, TiledOperand):
            y, *kept = torch.ops.fp4engine.tiled_linear_forward(
                x, *weight.tensors, bias, self.casts, self.weight_dtype, needs_wgrad
            )
            return y, both([*kept, *weight.tensors * needs_dgrad], needs_dgrad, needs_wgrad)
        told = () if amaxes is None else (amaxes, *shared)
        y, *kept = torch.ops.fp4engine.linear_forward(
            x, weight.detach(), bias, self.casts, needs_dgrad, needs_wgrad, *told
        )
        if amaxes is not None:  # which are not returned; FP4's codes have scales
            _, x_t, _, w_t = given_amaxes(amaxes, self.forward_keys(needs_dgrad, needs_wgrad), _twice(*shared))
            if x_t is not None:
                kept = [*kept[:2], x_t, *kept[2:]]
            if w_t is not None:
                kept = [*kept, w_t]
        if len(kept) == 2 * (needs_dgrad + needs_wgrad):
            kept = unscaled(kept)
        return y, both(kept, needs_dgrad, needs_wgrad)

    def forward_keys(self, needs_dgrad: bool, needs_wgrad: bool) -> tuple[str, str, str, str]:
        """As :meth:`LinearByValues.forward_keys`."""
        return _forward_keys(self.casts, needs_dgrad, needs_wgrad)

    def amaxes(
        self,
        tensors: Sequence[Tensor],
        keys: tuple[str, ...],
        rng: Tensor | None = None,
        place: tuple[int, int] | None = None,
        rank: int | None = None,
    ) -> Tensor:
        """As :meth:`LinearByValues.amaxes`, of a gradient that lies at ``place`` of the whole."""
        detached = [tensor.detach() for tensor in tensors]
        return torch.ops.fp4engine.linear_amaxes(detached, rng, place, rank, " ".join(keys), self.casts)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        bias_dtype: torch.dtype | None,
        place: tuple[int, int] | None = None,
        rank: int | None = None,
        amaxes: Tensor | None = None,
        is_tiled: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As :meth:`LinearByValues.backward`; last the gradient of a bias of ``bias_dtype``, None without one.

        Args:
            place: of ``grad_output`` in the whole, if it is part of one.
            rank: in whose name to draw.
            amaxes: of ``grad_output``, if they are shared.
        """
        inp, weight = kept[0], kept[3]
        if is_tiled and weight is not None:
            tiled = (grad_output.detach(), *kept, rng, self.casts, ins, *dtypes, bias_dtype)
            gradients = iter(torch.ops.fp4engine.tiled_linear_backward(*tiled))
        else:
            asked = (grad_output.detach(), *kept, rng, self.casts, *dtypes, bias_dtype, amaxes, place, rank)
            gradients = iter(torch.ops.fp4engine.linear_backward(*asked))
        dx = None if weight is None else next(gradients)
        dw = None if inp is None else next(gradients)
        return dx, dw, None if bias_dtype is None else next(gradients)


def _twice(inp: bool, weight: bool) -> tuple[bool, bool, bool, bool]:
    """Of x, x^T, w and w^T what is true of x and w."""
    return inp, inp, weight, weight


def bias_gradient(grad_output: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """``db[N] = sum of dy[M, N] over M``, in FP32, or FP64 as it came, and in the order of the reference."""
    if grad_output.dtype == torch.float64:
        return grad_output.sum(0).to(dtype)
    return column_sums(grad_output, backend=backend)[0].to(dtype)


def is_bound_by_host(weight: Tensor) -> bool:
    """Whether a compiled layer is to be one operator each way: small with any number of rows, which may be dynamic."""
    return LinearByValues.takes(weight.shape[0], *weight.shape)


@constant_when_traced
def key_of(casts: Casts) -> str:
    """The key of ``casts``, for code that may be traced."""
    return casts.key


@constant_when_traced
def _forward_keys(casts: str, needs_dgrad: bool, needs_wgrad: bool) -> tuple[str, str, str, str]:
    return LinearByOperations(Casts.from_key(casts)).forward_keys(needs_dgrad, needs_wgrad)


@constant_when_traced
def can_share(casts: Casts) -> bool:
    """As :func:`fp4engine.ops.linear.shares_amaxes`, for code that may be traced."""
    return shares_amaxes(casts)


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    amaxes: Tensor | None = None,
    shared_inp: bool = False,
    shared_weight: bool = False,
) -> list[Tensor]:
    (rows, ins), outs = x.shape, weight.shape[0]
    way = way_of(Casts.from_key(casts), (rows, outs, ins), x.dtype, weight.dtype, x.device)
    if amaxes is None:
        y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad)
        return [y.contiguous(), *_there(kept)]
    assert isinstance(way, LinearByValues | LinearByOperations), "who shares amaxes has asked shares_amaxes"
    given = given_amaxes(amaxes, way.forward_keys(needs_dgrad, needs_wgrad), _twice(shared_inp, shared_weight))
    y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad, None, given)
    told = {id(amax) for amax in given}  # who has given them has them
    return [y.contiguous(), *(tensor for tensor in _there(kept) if id(tensor) not in told)]


def _linear_amaxes(
    tensors: Sequence[Tensor], rng: Tensor | None, place: Sequence[int] | None, rank: int | None, keys: str, casts: str
) -> Tensor:
    own, x = Casts.from_key(casts), tensors[0]
    way = covering(own, x.dtype, tensors[-1].dtype, x.device)
    asked = tensors, tuple(keys.split(" "))
    if isinstance(way, LinearByValues):  # which covers no cast that draws before its amax is known
        return way.amaxes(*asked)
    way, drawn = LinearByOperations(own), rng if rng is None or place is None else placed(rng, *place)
    return way.amaxes(*asked, drawn, way.backward_stream(rng, rank))


def _there(kept: Kept) -> list[Tensor]:
    return [tensor for tensor in kept if tensor is not None]


def _linear_backward(
    grad_output: Tensor,
    inp: Tensor | None,
    inp_scale_inv: Tensor | None,
    inp_amax: Tensor | None,
    weight: Tensor | None,
    weight_scale_inv: Tensor | None,
    weight_amax: Tensor | None,
    rng: Tensor | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    amaxes: Tensor | None = None,
    place: Sequence[int] | None = None,
    rank: int | None = None,
) -> list[Tensor]:
    rows, outs = grad_output.shape
    ins = next(codes.shape[0] for codes in (inp, weight) if codes is not None)
    way = way_of(Casts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    kept = inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax
    dtypes = dtype, weight_dtype
    if amaxes is None and rank is None and place is None:
        return _all_gradients(way, grad_output, kept, ins, rng, dtypes, bias_dtype)
    assert isinstance(way, LinearByValues | LinearByOperations), "who has a shard has asked shares_amaxes"
    row, col = way.casts.grad_output
    given = given_amaxes(amaxes, (row * (weight is not None), col * (inp is not None)), (True, True))
    drawn = rng if rng is None or place is None else placed(rng, *place)
    return _all_gradients(way, grad_output, kept, ins, drawn, dtypes, bias_dtype, rank=rank, given=given)


def _all_gradients(
    way: LinearAtOnce | LinearByOperations,
    grad_output: Tensor,
    kept: Kept,
    ins: int,
    rng: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
    **told: Any,
) -> list[Tensor]:
    """Gradients of x and of weight, as far as what they need was kept, and of a bias of ``bias_dtype``.

    Args:
        told: what else the way is told: rank and amaxes, for a part of what several ranks have; of tiles.
    """
    gradients: list[Tensor | None] = [*way.backward(grad_output, kept, ins, rng, dtypes, **told)]
    if bias_dtype is not None:
        gradients.append(bias_gradient(grad_output, bias_dtype, way.casts.backend))
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _linear_forward_outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    amaxes: Tensor | None = None,
    shared_inp: bool = False,
    shared_weight: bool = False,
) -> list[Output]:
    own, (rows, cols), outs = Casts.from_key(casts), x.shape, weight.shape[0]
    by_fp8 = isinstance(covering(own, x.dtype, weight.dtype, x.device), LinearByFP8)
    outputs = [Output((rows, outs), x.dtype)]
    for key, length, needed, is_shared in (
        (own.inp[1], rows, needs_wgrad, shared_inp),
        (own.weight[1], outs, needs_dgrad, shared_weight),
    ):
        if needed:
            made = _kept_outputs(CastSpec.from_key(key), cols, length, by_fp8)
            outputs += made[:-1] if is_shared else made
    return outputs


def _linear_amaxes_output(
    tensors: Sequence[Tensor], rng: Tensor | None, place: Sequence[int] | None, rank: int | None, keys: str, casts: str
) -> list[Output]:
    return [Output((sum(map(bool, keys.split(" "))), AMAX_STRIDE), torch.float32)]


def _kept_outputs(spec: CastSpec, rows: int, cols: int, by_fp8: bool = False) -> list[Output]:
    """The tensors of an operand [rows, cols] that backward needs; FP8 products take codes without block scales."""
    codes = codes_outputs(spec, rows, cols)
    if by_fp8:
        codes = [Output((rows, spec.padded_cols(cols)), spec.element.torch_dtype)]
    return [*codes, Output(amax_shape(spec, rows, cols), torch.float32)]


def _linear_backward_outputs(
    grad_output: Tensor,
    inp: Tensor | None,
    inp_scale_inv: Tensor | None,
    inp_amax: Tensor | None,
    weight: Tensor | None,
    weight_scale_inv: Tensor | None,
    weight_amax: Tensor | None,
    rng: Tensor | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    amaxes: Tensor | None = None,
    place: Sequence[int] | None = None,
    rank: int | None = None,
) -> list[Output]:
    ins = None if weight is None else weight.shape[0]
    return _gradient_outputs(grad_output, ins, inp, dtype, weight_dtype, bias_dtype)


def _gradient_outputs(
    grad_output: Tensor,
    ins: int | None,
    inp: Tensor | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Output]:
    """What :func:`_all_gradients` returns; ``ins`` is K if the gradient of x is among it."""
    rows, outs = grad_output.shape
    outputs: list[Output] = []
    if ins is not None:
        outputs.append(Output((rows, ins), dtype))
    if inp is not None:
        outputs.append(Output((outs, inp.shape[0]), weight_dtype))
    if bias_dtype is not None:
        outputs.append(Output((outs,), bias_dtype))
    return outputs


def _tiled_linear_forward(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    bias: Tensor | None,
    casts: str,
    weight_dtype: torch.dtype,
    needs_wgrad: bool,
) -> list[Tensor]:
    own, (rows, ins), outs = Casts.from_key(casts), x.shape, codes.shape[0]
    weight = TiledOperand(CastSpec.from_key(own.weight[0]), outs, ins, codes, scales, amax)
    way = way_of(own, (rows, outs, ins), x.dtype, weight_dtype, x.device)
    y, kept = way.forward(x, weight, bias, False, needs_wgrad)
    return [y.contiguous(), *_there(kept)]


def _tiled_linear_backward(
    grad_output: Tensor,
    inp: Tensor | None,
    inp_scale_inv: Tensor | None,
    inp_amax: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    rng: Tensor | None,
    casts: str,
    ins: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    rows, outs = grad_output.shape
    way = way_of(Casts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    kept = inp, inp_scale_inv, inp_amax, codes, scales, amax
    return _all_gradients(way, grad_output, kept, ins, rng, (dtype, weight_dtype), bias_dtype, is_tiled=True)


def _tiled_linear_forward_outputs(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    bias: Tensor | None,
    casts: str,
    weight_dtype: torch.dtype,
    needs_wgrad: bool,
) -> list[Output]:
    rows, cols = x.shape
    kept = _kept_outputs(CastSpec.from_key(Casts.from_key(casts).inp[1]), cols, rows) if needs_wgrad else []
    return [Output((rows, codes.shape[0]), x.dtype), *kept]


def _tiled_linear_backward_outputs(
    grad_output: Tensor,
    inp: Tensor | None,
    inp_scale_inv: Tensor | None,
    inp_amax: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    rng: Tensor | None,
    casts: str,
    ins: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Output]:
    return _gradient_outputs(grad_output, ins, inp, dtype, weight_dtype, bias_dtype)


define(_linear_forward, _linear_forward_outputs)
define(_linear_backward, _linear_backward_outputs)
define(_linear_amaxes, _linear_amaxes_output)
define(_tiled_linear_forward, _tiled_linear_forward_outputs)
define(_tiled_linear_backward, _tiled_linear_backward_outputs)
