"""A linear layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

An operator decides when it runs how many launches it makes (:mod:`fp4engine.ops.linear.choice`), so that a graph does
not depend on the number of rows. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops.linear.at_site import backward_at_site, forward_at_site, tiled_forward_at_site
from fp4engine.ops.linear.by_operations import LinearByOperations
from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.choice import covering, way_of
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, Gradients, Kept, LayerCasts, shares_amaxes
from fp4engine.ops.operation import Output, define
from fp4engine.ops.operator_order import order_token
from fp4engine.ops.reduce import groups_named, names_of
from fp4engine.ops.tiles import TiledOperand
from fp4engine.tracing import constant_when_traced


class LinearByOperators(NamedTuple):
    """The way of traced code: two operators, one for each direction.

    Attributes:
        casts: the key of the layer's casts.
        weight_dtype: dtype of the weight.
    """

    casts: str
    weight_dtype: torch.dtype

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        """As :meth:`Way.forward`."""
        x, bias = x.detach(), bias if bias is None else bias.detach()
        if isinstance(weight, TiledOperand):
            y, *kept = torch.ops.fp4engine.tiled_linear_forward(
                x, weight.packed, bias, self.casts, self.weight_dtype, asked.needs_wgrad, weight.rows, weight.parts
            )
            return y, [*kept, weight.packed] if asked.needs_dgrad else kept
        needs_dgrad, needs_wgrad, shared, groups, given, _ = asked
        told = x, weight.detach(), bias, self.casts, needs_dgrad, needs_wgrad, given
        if groups:
            token = order_token(x.device, "forward")
            y, kept = torch.ops.fp4engine.linear_share_forward(*told, token, names_of(groups), *shared)
            return y, [kept] if needs_dgrad or needs_wgrad else []
        y, *kept = torch.ops.fp4engine.linear_forward(*told)
        return y, kept

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        """As :meth:`Way.backward`."""
        needs_dgrad, needs_wgrad, ins, dtypes, state, rank, place, groups, parts, _ = asked
        token = order_token(grad_output.device, "backward") if groups else None
        told = (grad_output.detach(), list(kept), needs_dgrad, needs_wgrad, ins, state, self.casts, *dtypes)
        dx, dw = torch.ops.fp4engine.linear_backward(*told, rank, place, token, names_of(groups), parts)
        return dx if needs_dgrad else None, dw if needs_wgrad else None


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
    """``y``, and what backward needs."""
    asked = ForwardPass(needs_dgrad, needs_wgrad, given=given)
    return _forward(x, weight, bias, LayerCasts.from_key(casts), weight.dtype, asked)


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
) -> tuple[Tensor, Tensor]:
    """As :func:`_linear_forward`; what backward needs is one tensor, and empty if it needs nothing.

    The operator waits for the other ranks; the tensor of :func:`fp4engine.ops.operator_order.order_token` keeps such
    operators in one order.
    """
    asked = ForwardPass(needs_dgrad, needs_wgrad, (shared_inp, shared_weight), groups_named(groups), given)
    outputs = _forward(x, weight, bias, LayerCasts.from_key(casts), weight.dtype, asked)
    y, kept = outputs if len(outputs) > 1 else (*outputs, x.new_empty(0, dtype=torch.uint8))
    return y, kept


def _tiled_linear_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    casts: str,
    weight_dtype: torch.dtype,
    needs_wgrad: bool,
    outs: int,
    parts: int,
) -> list[Tensor]:
    """As :func:`_linear_forward`, of a weight that comes as tiles: the caller keeps those for backward."""
    own = LayerCasts.from_key(casts)
    weight = TiledOperand(CastSpec.from_key(own.weight[0]), outs, x.shape[1], parts, packed)
    return _forward(x, weight, bias, own, weight_dtype, ForwardPass(False, needs_wgrad))


def _forward(
    x: Tensor,
    weight: Tensor | TiledOperand,
    bias: Tensor | None,
    casts: LayerCasts,
    weight_dtype: torch.dtype,
    asked: ForwardPass,
) -> list[Tensor]:
    (rows, ins), outs = x.shape, weight.rows if isinstance(weight, TiledOperand) else weight.shape[0]
    way = way_of(casts, (rows, outs, ins), x.dtype, weight_dtype, x.device)
    y, kept = way.forward(x, weight, bias, asked)
    return [y.contiguous(), *kept]


def _linear_backward(
    grad_output: Tensor,
    kept: Sequence[Tensor],
    needs_dgrad: bool,
    needs_wgrad: bool,
    ins: int,
    state: Tensor | None,
    casts: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rank: int | None,
    place: Sequence[int] | None,
    token: Tensor | None,
    groups: str,
    parts: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; one that is not asked for is an empty tensor.

    Writes to ``state``, from which it draws. If there are groups, waits as :func:`_linear_share_forward` does.
    """
    own, (rows, outs) = LayerCasts.from_key(casts), grad_output.shape
    way = way_of(own, (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    whole = None if place is None else (place[0], place[1])
    shards = rank, whole, groups_named(groups), parts
    asked = BackwardPass(needs_dgrad, needs_wgrad, ins, (dtype, weight_dtype), state, *shards)
    dx, dw = way.backward(grad_output, kept, asked)
    dx, dw = (grad_output.new_empty(0) if gradient is None else gradient for gradient in (dx, dw))
    return dx.contiguous(), dw.contiguous()


def _forward_outputs(
    x: Tensor, outs: int, weight_dtype: torch.dtype, casts: str, needs_dgrad: bool, needs_wgrad: bool
) -> list[Output]:
    own, (rows, ins) = LayerCasts.from_key(casts), x.shape
    way = covering(own, x.dtype, weight_dtype, x.device) or LinearByOperations(own, in_one_buffer=True)
    return [Output((rows, outs), x.dtype), *way.kept_outputs((rows, outs, ins), needs_dgrad, needs_wgrad)]


def _linear_forward_outputs(
    x: Tensor, weight: Tensor, casts: str, needs_dgrad: bool, needs_wgrad: bool
) -> list[Output]:
    return _forward_outputs(x, weight.shape[0], weight.dtype, casts, needs_dgrad, needs_wgrad)


def _linear_share_forward_outputs(
    x: Tensor, weight: Tensor, casts: str, needs_dgrad: bool, needs_wgrad: bool
) -> list[Output]:
    y, *kept = _linear_forward_outputs(x, weight, casts, needs_dgrad, needs_wgrad)
    return [y, *(kept or [Output((0,), torch.uint8)])]


def _tiled_linear_forward_outputs(
    x: Tensor, outs: int, casts: str, weight_dtype: torch.dtype, needs_wgrad: bool
) -> list[Output]:
    return _forward_outputs(x, outs, weight_dtype, casts, False, needs_wgrad)


def _linear_backward_outputs(
    grad_output: Tensor,
    needs_dgrad: bool,
    needs_wgrad: bool,
    ins: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> list[Output]:
    (rows, outs), absent = grad_output.shape, Output((0,), grad_output.dtype)
    return [
        Output((rows, ins), dtype) if needs_dgrad else absent,
        Output((outs, ins), weight_dtype) if needs_wgrad else absent,
    ]


define(_linear_forward, _linear_forward_outputs, at_site=forward_at_site)
define(_linear_share_forward, _linear_share_forward_outputs, mutates_args=("token",))
define(_tiled_linear_forward, _tiled_linear_forward_outputs, at_site=tiled_forward_at_site)
define(_linear_backward, _linear_backward_outputs, mutates_args=("state", "token"), at_site=backward_at_site)
