"""A linear layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

An operator decides when it runs how many launches it makes (:mod:`fp4engine.ops.linear.choice`), so that a graph does
not depend on the number of rows. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import AMAX_STRIDE
from fp4engine.formats import CastSpec
from fp4engine.ops.cast import amax_shape, codes_outputs
from fp4engine.ops.grouped import column_sums
from fp4engine.ops.linear.by_fp8 import LinearByFP8, unscaled
from fp4engine.ops.linear.by_operations import LinearByOperations
from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.choice import LinearAtOnce, covering, way_of
from fp4engine.ops.linear.way import Kept, LayerCasts, Memories, Share, both, shares_amaxes
from fp4engine.ops.operation import Output, define
from fp4engine.ops.operator_order import order_token
from fp4engine.ops.reduce import groups_named, share_amaxes
from fp4engine.ops.rng import placed
from fp4engine.ops.tiles import TiledOperand
from fp4engine.tracing import constant_when_traced


class LinearByOperators(NamedTuple):
    """By two operators, one for each direction.

    Attributes:
        casts: the key of the layer's casts.
        weight_dtype: dtype of the weight.
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
        groups: str = "",
        given: Tensor | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`.

        Args:
            shared: for x and for weight, whether the amaxes are to be found and reduced over ``groups``.
            groups: names of process groups, with a space between them; empty if nothing is to be reduced.
            given: amaxes of the weight, see :class:`fp4engine.ops.linear.Share`.
        """
        x, bias = x.detach(), bias if bias is None else bias.detach()
        if isinstance(weight, TiledOperand):
            y, *kept = torch.ops.fp4engine.tiled_linear_forward(
                x, *weight.tensors, bias, self.casts, self.weight_dtype, needs_wgrad
            )
            return y, both([*kept, *weight.tensors * needs_dgrad], needs_dgrad, needs_wgrad)
        asked = x, weight.detach(), bias, self.casts, needs_dgrad, needs_wgrad
        if groups or given is not None:
            token = order_token(x.device, "forward") if groups else None
            y, *codes, own, amaxes = torch.ops.fp4engine.linear_share_forward(*asked, token, groups, *shared, given)
            kept = []
            if needs_wgrad:
                kept += *codes[:2], amaxes[1, :1] if shared[0] else own
            if needs_dgrad:
                of_weight = given if given is not None else amaxes if shared[1] else None
                kept += *codes[2:], own if of_weight is None else of_weight[-1, :1]
            return y, both(kept, needs_dgrad, needs_wgrad)
        y, *kept = torch.ops.fp4engine.linear_forward(*asked)
        if len(kept) == 2 * (needs_dgrad + needs_wgrad):
            kept = unscaled(kept)
        return y, both(kept, needs_dgrad, needs_wgrad)

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
        groups: str = "",
        is_tiled: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As :meth:`LinearByValues.backward`, followed by the gradient of a bias of ``bias_dtype``, None without one.

        Args:
            place: row and column at which ``grad_output`` begins in the whole matrix, if it is a part of one.
            rank: the rank whose random bits are drawn.
            groups: names of the process groups whose ranks share the amaxes of ``grad_output``, with a space between
                them.
        """
        inp, weight = kept[0], kept[3]
        if is_tiled and weight is not None:
            tiled = (grad_output.detach(), *kept, rng, self.casts, ins, *dtypes, bias_dtype)
            gradients = iter(torch.ops.fp4engine.tiled_linear_backward(*tiled))
        else:
            asked = (grad_output.detach(), *kept, rng, self.casts, *dtypes, bias_dtype)
            if groups or place is not None or rank is not None:
                token = order_token(grad_output.device, "backward") if groups else None
                dx, dw, db = torch.ops.fp4engine.linear_share_backward(*asked, token, groups, place, rank)
                return None if weight is None else dx, None if inp is None else dw, None if bias_dtype is None else db
            gradients = iter(torch.ops.fp4engine.linear_backward(*asked))
        dx = None if weight is None else next(gradients)
        dw = None if inp is None else next(gradients)
        return dx, dw, None if bias_dtype is None else next(gradients)


def bias_gradient(grad_output: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """``db[N] = sum of dy[M, N] over M``: in FP32 in the order of the reference, or in FP64 if dy is FP64."""
    if grad_output.dtype == torch.float64:
        return grad_output.sum(0).to(dtype)
    return column_sums(grad_output, backend=backend)[0].to(dtype)


def is_bound_by_host(weight: Tensor) -> bool:
    """Whether a compiled layer is one operator each way: it must be small with any number of rows, which may change."""
    return LinearByValues.takes(weight.shape[0], *weight.shape)


@constant_when_traced
def key_of(casts: LayerCasts) -> str:
    """The key of ``casts``, for code that may be traced."""
    return casts.key


@constant_when_traced
def weight_amaxes_for(casts: LayerCasts, groups: str) -> str:
    """A key for the amaxes of a weight: the casts and the names of the groups for which they are found, sorted."""
    return " ".join([*casts.weight, *sorted(groups.split(" "))])


@constant_when_traced
def can_share(casts: LayerCasts) -> bool:
    """As :func:`fp4engine.ops.linear.way.shares_amaxes`, for code that may be traced."""
    return shares_amaxes(casts)


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> list[Tensor]:
    (rows, ins), outs = x.shape, weight.shape[0]
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), x.dtype, weight.dtype, x.device)
    y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad)
    return [y.contiguous(), *_there(kept)]


def _linear_share_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    token: Tensor | None,
    groups: str,
    shared_inp: bool,
    shared_weight: bool,
    given: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y``, codes and block scales of x^T and of w^T, the amax that is this rank's, and those reduced, [sides, any].

    An output that does not exist is an empty tensor. If there are groups, the operator waits for the other ranks; the
    tensor of :func:`fp4engine.ops.operator_order.order_token` keeps such operators in one order.
    """
    (rows, ins), outs = x.shape, weight.shape[0]
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), x.dtype, weight.dtype, x.device)
    assert isinstance(way, LinearByValues | LinearByOperations), "what shares amaxes passes shares_amaxes"
    reduced: list[Tensor] = []

    def reduce(amaxes: Tensor) -> None:
        share_amaxes(amaxes, groups_named(groups))
        reduced.append(amaxes)

    share = Share((shared_inp, shared_weight), reduce, given)
    y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad, None, share)
    inp, inp_scale_inv, inp_amax, codes, scale_inv, amax = kept
    own = inp_amax if not shared_inp else amax if given is None and not shared_weight else None
    inp, inp_scale_inv, codes, scale_inv, own, amaxes = (
        _or_empty(tensor, x) for tensor in (inp, inp_scale_inv, codes, scale_inv, own, *(reduced or (None,)))
    )
    return y.contiguous(), inp, inp_scale_inv, codes, scale_inv, own, amaxes


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
) -> list[Tensor]:
    kept, dtypes = (inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax), (dtype, weight_dtype)
    way, ins = _way_back(casts, grad_output, kept, dtypes)
    return _all_gradients(way, grad_output, kept, ins, rng, dtypes, bias_dtype)


def _linear_share_backward(
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
    token: Tensor | None,
    groups: str,
    place: Sequence[int] | None,
    rank: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; one that is not asked for is an empty tensor.

    If there are groups, waits as :func:`_linear_share_forward` does.
    """
    kept, dtypes = (inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax), (dtype, weight_dtype)
    way, ins = _way_back(casts, grad_output, kept, dtypes)
    assert isinstance(way, LinearByValues | LinearByOperations), "what has shards passes shares_amaxes"
    share = Share((True, True), partial(share_amaxes, groups=groups_named(groups))) if groups else None
    drawn = rng if rng is None or place is None else placed(rng, *place)
    dx, dw = way.backward(grad_output, kept, ins, drawn, dtypes, rank=rank, share=share)
    db = None if bias_dtype is None else bias_gradient(grad_output, bias_dtype, way.casts.backend)
    dx, dw, db = (_or_empty(gradient, grad_output) for gradient in (dx, dw, db))
    return dx.contiguous(), dw.contiguous(), db.contiguous()


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _way_back(
    casts: str, grad_output: Tensor, kept: Kept, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[LinearAtOnce | LinearByOperations, int]:
    """What computes the gradients, and K."""
    rows, outs = grad_output.shape
    ins = next(codes.shape[0] for codes in (kept[0], kept[3]) if codes is not None)
    return way_of(LayerCasts.from_key(casts), (rows, outs, ins), *dtypes, grad_output.device), ins


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
    """Gradients of x and of weight, if the operand for them was kept, and of a bias of ``bias_dtype``, if it is given.

    Args:
        told: further arguments of the way's ``backward``.
    """
    gradients: list[Tensor | None] = [*way.backward(grad_output, kept, ins, rng, dtypes, **told)]
    if bias_dtype is not None:
        gradients.append(bias_gradient(grad_output, bias_dtype, way.casts.backend))
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _linear_forward_outputs(
    x: Tensor, weight: Tensor, casts: str, needs_dgrad: bool, needs_wgrad: bool
) -> list[Output]:
    own, (rows, cols), outs = LayerCasts.from_key(casts), x.shape, weight.shape[0]
    by_fp8 = isinstance(covering(own, x.dtype, weight.dtype, x.device), LinearByFP8)
    outputs = [Output((rows, outs), x.dtype)]
    for key, length, needed in ((own.inp[1], rows, needs_wgrad), (own.weight[1], outs, needs_dgrad)):
        if needed:
            outputs += _kept_outputs(CastSpec.from_key(key), cols, length, by_fp8)
    return outputs


def _linear_share_forward_outputs(
    x: Tensor,
    weight: Tensor,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    shared_inp: bool,
    shared_weight: bool,
    given: Tensor | None,
) -> list[Output]:
    y, *of_inp, inp_amax, codes, scale_inv, amax = _linear_forward_outputs(x, weight, casts, True, True)
    own = None
    if not shared_inp:
        own = inp_amax if needs_wgrad else None
    elif given is None and not shared_weight:
        own = amax if needs_dgrad else None
    sides = (1 + needs_wgrad) * shared_inp + (1 + needs_dgrad) * shared_weight
    absent = Output((0,), x.dtype)
    return [
        y,
        *(of_inp if needs_wgrad else [absent, absent]),
        *([codes, scale_inv] if needs_dgrad else [absent, absent]),
        absent if own is None else own,
        Output((sides, AMAX_STRIDE), torch.float32) if sides else absent,
    ]


def _kept_outputs(spec: CastSpec, rows: int, cols: int, by_fp8: bool = False) -> list[Output]:
    """The tensors of an operand [rows, cols] that backward needs; FP8 products take codes without block scales."""
    codes = codes_outputs(spec, rows, cols)
    if by_fp8:
        codes = [Output((rows, spec.padded_cols(cols)), spec.element.torch_dtype)]
    return [*codes, Output(amax_shape(spec, rows, cols), torch.float32)]


def _linear_backward_outputs(
    grad_output: Tensor,
    inp: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Output]:
    ins = None if weight is None else weight.shape[0]
    return _gradient_outputs(grad_output, inp, ins, dtype, weight_dtype, bias_dtype)


def _linear_share_backward_outputs(
    grad_output: Tensor,
    inp: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Output]:
    rows, outs = grad_output.shape
    absent = Output((0,), grad_output.dtype)
    return [
        absent if weight is None else Output((rows, weight.shape[0]), dtype),
        absent if inp is None else Output((outs, inp.shape[0]), weight_dtype),
        absent if bias_dtype is None else Output((outs,), bias_dtype),
    ]


def _gradient_outputs(
    grad_output: Tensor,
    inp: Tensor | None,
    ins: int | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Output]:
    """What :func:`_all_gradients` returns; ``ins`` is K, or None if the gradient of x is not asked for."""
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
    own, (rows, ins), outs = LayerCasts.from_key(casts), x.shape, codes.shape[0]
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
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    kept = inp, inp_scale_inv, inp_amax, codes, scales, amax
    return _all_gradients(way, grad_output, kept, ins, rng, (dtype, weight_dtype), bias_dtype, is_tiled=True)


def _tiled_linear_forward_outputs(x: Tensor, codes: Tensor, casts: str, needs_wgrad: bool) -> list[Output]:
    rows, cols = x.shape
    kept = _kept_outputs(CastSpec.from_key(LayerCasts.from_key(casts).inp[1]), cols, rows) if needs_wgrad else []
    return [Output((rows, codes.shape[0]), x.dtype), *kept]


define(_linear_forward, _linear_forward_outputs)
define(_linear_backward, _linear_backward_outputs)
define(_linear_share_forward, _linear_share_forward_outputs, mutates_args=("token",))
define(_linear_share_backward, _linear_share_backward_outputs, mutates_args=("token",))
define(_tiled_linear_forward, _tiled_linear_forward_outputs)
define(_tiled_linear_backward, _gradient_outputs)
