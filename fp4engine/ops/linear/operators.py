"""A linear layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

An operator decides when it runs how many launches it makes (:mod:`fp4engine.ops.linear.choice`), so that a graph does
not depend on the number of rows. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        if groups:
            token = order_token(x.device, "forward")
            # Dynamo of PyTorch 2.11 takes the rest of an unpacking for a tuple, to which nothing can be assigned.
            y, *kept = torch.ops.fp4engine.linear_share_forward(*asked, given, token, groups, *shared)
            kept = kept[3 * (not needs_wgrad) : 3 + 3 * needs_dgrad]
            if given is not None and needs_dgrad:
                kept = [*kept[:-1], given[1, :1]]
            return y, both(kept, needs_dgrad, needs_wgrad)
        y, *kept = torch.ops.fp4engine.linear_forward(*asked, given)
        if given is not None:
            kept = [*kept, given[1, :1]] if needs_dgrad else kept
        elif len(kept) == 2 * (needs_dgrad + needs_wgrad):
            kept = unscaled(kept)
        return y, both(kept, needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        state: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        bias_dtype: torch.dtype | None,
        rank: int | None = None,
        place: tuple[int, int] | None = None,
        groups: str = "",
        is_tiled: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As :meth:`LinearByValues.backward`, followed by the gradient of a bias of ``bias_dtype``, None without one.

        Args:
            groups: names of the process groups whose ranks share the amaxes of ``grad_output``, with a space between
                them.
        """
        inp, weight = kept[0], kept[3]
        asked = (grad_output.detach(), *kept, state, self.casts, *dtypes, bias_dtype)
        if is_tiled and weight is not None:
            dx, dw, db = torch.ops.fp4engine.tiled_linear_backward(*asked, ins)
        else:
            token = order_token(grad_output.device, "backward") if groups else None
            dx, dw, db = torch.ops.fp4engine.linear_backward(*asked, rank, place, token, groups)
        return None if weight is None else dx, None if inp is None else dw, None if bias_dtype is None else db


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
    given: Tensor | None,
) -> list[Tensor]:
    """``y``, and what backward needs and the caller does not have."""
    return _there(_forward(x, weight, bias, casts, needs_dgrad, needs_wgrad, given, (False, False), ""))


def _linear_share_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    given: Tensor | None,
    token: Tensor,
    groups: str,
    shared_inp: bool,
    shared_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`_linear_forward`, but an output that does not exist is an empty tensor.

    The operator waits for the other ranks; the tensor of :func:`fp4engine.ops.operator_order.order_token` keeps such
    operators in one order.
    """
    shared = (shared_inp, shared_weight)
    outputs = _forward(x, weight, bias, casts, needs_dgrad, needs_wgrad, given, shared, groups)
    y, inp, inp_scale_inv, inp_amax, codes, scale_inv, amax = (_or_empty(tensor, x) for tensor in outputs)
    return y, inp, inp_scale_inv, inp_amax, codes, scale_inv, amax


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    given: Tensor | None,
    shared: tuple[bool, bool],
    groups: str,
) -> list[Tensor | None]:
    (rows, ins), outs = x.shape, weight.shape[0]
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), x.dtype, weight.dtype, x.device)
    if not groups and given is None:
        y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad)
    else:
        assert isinstance(way, LinearByValues | LinearByOperations), "what shares amaxes passes shares_amaxes"
        share = Share(shared, partial(share_amaxes, groups=groups_named(groups) if groups else ()), given)
        y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad, None, share)
    return [y.contiguous(), *kept]


def _there(tensors: Kept) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _linear_backward(
    grad_output: Tensor,
    inp: Tensor | None,
    inp_scale_inv: Tensor | None,
    inp_amax: Tensor | None,
    weight: Tensor | None,
    weight_scale_inv: Tensor | None,
    weight_amax: Tensor | None,
    state: Tensor | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    rank: int | None,
    place: Sequence[int] | None,
    token: Tensor | None,
    groups: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; one that is not asked for is an empty tensor.

    Writes to ``state``, from which it draws. If there are groups, waits as :func:`_linear_share_forward` does.
    """
    kept, dtypes = (inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax), (dtype, weight_dtype)
    rows, outs = grad_output.shape
    ins = next(codes.shape[0] for codes in (inp, weight) if codes is not None)
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    if not groups and rank is None and place is None:
        return _all_gradients(way, grad_output, kept, ins, state, dtypes, bias_dtype)
    assert isinstance(way, LinearByValues | LinearByOperations), "what has shards passes shares_amaxes"
    share = Share((True, True), partial(share_amaxes, groups=groups_named(groups))) if groups else None
    told = {"rank": rank, "place": None if place is None else (place[0], place[1]), "share": share}
    return _all_gradients(way, grad_output, kept, ins, state, dtypes, bias_dtype, **told)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _all_gradients(
    way: LinearAtOnce | LinearByOperations,
    grad_output: Tensor,
    kept: Kept,
    ins: int,
    state: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
    **told: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of weight, if the operand for them was kept, and of a bias of ``bias_dtype``, if it is given.

    Args:
        told: further arguments of the way's ``backward``.
    """
    dx, dw = way.backward(grad_output, kept, ins, state, dtypes, **told)
    db = None if bias_dtype is None else bias_gradient(grad_output, bias_dtype, way.casts.backend)
    dx, dw, db = (_or_empty(gradient, grad_output) for gradient in (dx, dw, db))
    return dx.contiguous(), dw.contiguous(), db.contiguous()


def _linear_forward_outputs(
    x: Tensor, weight: Tensor, casts: str, needs_dgrad: bool, needs_wgrad: bool, given: Tensor | None
) -> list[Output]:
    own, (rows, cols), outs = LayerCasts.from_key(casts), x.shape, weight.shape[0]
    by_fp8 = isinstance(covering(own, x.dtype, weight.dtype, x.device), LinearByFP8)
    outputs = [Output((rows, outs), x.dtype)]
    for key, length, needed in ((own.inp[1], rows, needs_wgrad), (own.weight[1], outs, needs_dgrad)):
        if needed:
            outputs += _kept_outputs(CastSpec.from_key(key), cols, length, by_fp8)
    return outputs[:-1] if needs_dgrad and given is not None else outputs


def _linear_share_forward_outputs(
    x: Tensor, weight: Tensor, casts: str, needs_dgrad: bool, needs_wgrad: bool, given: Tensor | None
) -> list[Output]:
    y, *kept = _linear_forward_outputs(x, weight, casts, True, True, None)
    needed = (needs_wgrad,) * 3 + (needs_dgrad,) * 2 + (needs_dgrad and given is None,)
    absent = Output((0,), x.dtype)
    return [y, *(output if is_needed else absent for output, is_needed in zip(kept, needed, strict=True))]


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
    absent = Output((0,), grad_output.dtype)
    return [
        absent if ins is None else Output((rows, ins), dtype),
        absent if inp is None else Output((outs, inp.shape[0]), weight_dtype),
        absent if bias_dtype is None else Output((outs,), bias_dtype),
    ]


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
    state: Tensor | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    ins: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, outs = grad_output.shape
    way = way_of(LayerCasts.from_key(casts), (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    kept = inp, inp_scale_inv, inp_amax, codes, scales, amax
    return _all_gradients(way, grad_output, kept, ins, state, (dtype, weight_dtype), bias_dtype, is_tiled=True)


def _tiled_linear_forward_outputs(x: Tensor, codes: Tensor, casts: str, needs_wgrad: bool) -> list[Output]:
    rows, cols = x.shape
    kept = _kept_outputs(CastSpec.from_key(LayerCasts.from_key(casts).inp[1]), cols, rows) if needs_wgrad else []
    return [Output((rows, codes.shape[0]), x.dtype), *kept]


define(_linear_forward, _linear_forward_outputs)
define(_linear_share_forward, _linear_share_forward_outputs, mutates_args=("token",))
define(_linear_backward, _linear_backward_outputs, mutates_args=("state", "token"))
define(_tiled_linear_forward, _tiled_linear_forward_outputs)
define(_tiled_linear_backward, _gradient_outputs, mutates_args=("state",))
