"""A linear layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

An operator decides when it runs how many launches it makes (:mod:`fp4engine.ops.linear.choice`), so that a graph does
not depend on the number of rows. Legend: x is [M, K], weight [N, K].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops.linear.by_operations import LinearByOperations
from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.choice import covering, way_of
from fp4engine.ops.linear.way import Gradients, Kept, LayerCasts, Share, shares_amaxes
from fp4engine.ops.operation import Output, define
from fp4engine.ops.operator_order import order_token
from fp4engine.ops.reduce import groups_named
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
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
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
            return y, [*kept, *weight.tensors] if needs_dgrad else kept
        asked = x, weight.detach(), bias, self.casts, needs_dgrad, needs_wgrad
        if groups:
            token = order_token(x.device, "forward")
            y, kept = torch.ops.fp4engine.linear_share_forward(*asked, given, token, groups, *shared)
            return y, [kept] if needs_dgrad or needs_wgrad else []
        y, *kept = torch.ops.fp4engine.linear_forward(*asked, given)
        return y, kept

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        needs_dgrad: bool,
        needs_wgrad: bool,
        ins: int,
        state: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        rank: int | None = None,
        place: tuple[int, int] | None = None,
        groups: str = "",
        is_tiled: bool = False,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`.

        Args:
            groups: names of the process groups whose ranks share the amaxes of ``grad_output``, with a space between
                them.
        """
        needs = needs_dgrad, needs_wgrad
        asked = (grad_output.detach(), list(kept), *needs, ins, state, self.casts, *dtypes)
        token = order_token(grad_output.device, "backward") if groups else None
        dx, dw = torch.ops.fp4engine.linear_backward(*asked, rank, place, token, groups, is_tiled)
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
    share = None if given is None else Share((False, False), (), given)
    return _forward(x, weight, bias, LayerCasts.from_key(casts), weight.dtype, needs_dgrad, needs_wgrad, share)


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
    share = Share((shared_inp, shared_weight), groups_named(groups), given)
    outputs = _forward(x, weight, bias, LayerCasts.from_key(casts), weight.dtype, needs_dgrad, needs_wgrad, share)
    y, kept = outputs if len(outputs) > 1 else (*outputs, x.new_empty(0, dtype=torch.uint8))
    return y, kept


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
    """As :func:`_linear_forward`, of a weight that comes as tiles: the caller keeps those for backward."""
    own = LayerCasts.from_key(casts)
    weight = TiledOperand(CastSpec.from_key(own.weight[0]), codes.shape[0], x.shape[1], codes, scales, amax)
    return _forward(x, weight, bias, own, weight_dtype, False, needs_wgrad)


def _forward(
    x: Tensor,
    weight: Tensor | TiledOperand,
    bias: Tensor | None,
    casts: LayerCasts,
    weight_dtype: torch.dtype,
    needs_dgrad: bool,
    needs_wgrad: bool,
    share: Share | None = None,
) -> list[Tensor]:
    (rows, ins), outs = x.shape, weight.rows if isinstance(weight, TiledOperand) else weight.shape[0]
    way = way_of(casts, (rows, outs, ins), x.dtype, weight_dtype, x.device)
    if share is None:
        y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad)
    else:
        assert isinstance(way, LinearByValues | LinearByOperations), "what shares amaxes passes shares_amaxes"
        y, kept = way.forward(x, weight, bias, needs_dgrad, needs_wgrad, share=share)
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
    is_tiled: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; one that is not asked for is an empty tensor.

    Writes to ``state``, from which it draws. If there are groups, waits as :func:`_linear_share_forward` does.
    """
    own, (rows, outs) = LayerCasts.from_key(casts), grad_output.shape
    way = way_of(own, (rows, outs, ins), dtype, weight_dtype, grad_output.device)
    told: dict[str, Any] = {}
    if groups or rank is not None or place is not None or is_tiled:
        assert isinstance(way, LinearByValues | LinearByOperations), "what has shards passes shares_amaxes"
        share = Share((True, True), groups_named(groups)) if groups else None
        place = None if place is None else (place[0], place[1])
        told = {"rank": rank, "place": place, "share": share, "is_tiled": is_tiled}
    dx, dw = way.backward(grad_output, kept, needs_dgrad, needs_wgrad, ins, state, (dtype, weight_dtype), **told)
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
    x: Tensor, codes: Tensor, casts: str, weight_dtype: torch.dtype, needs_wgrad: bool
) -> list[Output]:
    return _forward_outputs(x, codes.shape[0], weight_dtype, casts, False, needs_wgrad)


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


define(_linear_forward, _linear_forward_outputs)
define(_linear_share_forward, _linear_share_forward_outputs, mutates_args=("token",))
define(_tiled_linear_forward, _tiled_linear_forward_outputs)
define(_linear_backward, _linear_backward_outputs, mutates_args=("state", "token"))
