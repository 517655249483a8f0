"""Forward and backward of a linear transformation in few launches each, for layers that allow it."""

from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.call import Call
from fp4engine.functional.shards import Shards, names_of

LinearWay = ops.LinearAtOnce | ops.LinearByOperators
SharingWay = ops.LinearByValues | ops.LinearByOperators


def at_once(x: Tensor, weight: Tensor, call: Call) -> LinearWay | None:
    """What computes forward and backward with few launches; None if single operations have to.

    Single operations are needed for a fused norm or activation, a weight cache, ``main_grad``, and amaxes that ranks
    share over different groups. In a compiled graph each direction is one operator, unless delayed scaling has to write
    amax histories, or the weight is large. For a large weight there are operators for the single operations, so that
    the compiler casts an input that several layers share only once.
    """
    plan, tiles = call.plan, call.tiles
    is_plain = call.function is None and (call.stored is None or tiles is not None) and call.main_grad is None
    if plan.casts is None or not is_plain:
        return None
    if call.shards is not None and (
        tiles is not None or not ops.can_share(plan.casts) or call.shards.amax_groups() is None
    ):
        return None
    if not torch.compiler.is_dynamo_compiling():
        found = ops.linear_at_once(plan.casts, x, weight, tiles)
        return found if call.shards is None or isinstance(found, ops.LinearByValues) else None
    is_taken = tiles is not None or type(weight) in (Tensor, torch.nn.Parameter)
    if plan.is_stateful or not is_taken or not ops.is_bound_by_host(weight):
        return None
    return ops.LinearByOperators(ops.key_of(plan.casts), weight.dtype)


def forward_at_once(
    way: LinearWay, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call
) -> tuple[Tensor, ops.Kept]:
    """The output for a matrix ``x``, and what backward needs."""
    plan, needs = call.plan, (call.needs_dgrad, call.needs_wgrad)
    if call.shards is not None:
        assert isinstance(way, SharingWay), "other ways share no amaxes"
        return _forward_share(way, x, weight, bias, needs, call.shards)
    if plan.is_stateful:
        assert isinstance(way, ops.LinearByFP8), "other ways remember nothing"
        return way.forward(x, weight, bias, *needs, (plan.input.recall(x.device), plan.weight.recall(x.device)))
    return way.forward(x, weight if call.tiles is None else call.tiles, bias, *needs)


def backward_at_once(
    way: LinearWay,
    grad_output: Tensor,
    kept: ops.Kept,
    ins: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    call: Call,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight."""
    plan, shards, device = call.plan, call.shards, grad_output.device
    name = "" if shards is None else shards.stream("backward")
    state = ops.state_of(device, name) if plan.draws_in_backward else None
    asked = grad_output, kept, call.needs_dgrad, call.needs_wgrad, ins, state, dtypes
    if not isinstance(way, SharingWay):
        assert shards is None and call.tiles is None, "other ways share no amaxes, and what comes as tiles is FP4"
        if plan.is_stateful:
            assert isinstance(way, ops.LinearByFP8), "other ways remember nothing"
            return way.backward(*asked, plan.grad_output.recall(device))
        return way.backward(*asked)
    groups: tuple[Any, ...] = ()
    place, rank, is_tiled = None, None, call.tiles is not None
    if shards is not None:
        reduced = shards.amax_groups()
        assert reduced is not None, "a layer goes this way only if one collective reduces all amaxes of a direction"
        groups, place, rank = reduced.backward, shards.grad_output.place, shards.rank
    if isinstance(way, ops.LinearByOperators):
        return way.backward(*asked, rank, place, names_of(groups), is_tiled)
    return way.backward(*asked, rank, place, ops.Share((True, True), groups) if groups else None, is_tiled)


def draw(call: Call, grad_output: Tensor) -> Tensor | None:
    """The draw for a backward pass; None if its casts need none."""
    if not call.plan.draws_in_backward:
        return None
    if call.shards is not None:
        return call.shards.draw(grad_output.device, "backward", grad_output)
    return ops.next_draw(grad_output.device, direction="backward", after=grad_output)


def _forward_share(
    way: SharingWay, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool], shards: Shards
) -> tuple[Tensor, ops.Kept]:
    """This rank's part of a forward: find amaxes, reduce them in one collective, then cast and multiply."""
    groups = shards.amax_groups()
    assert groups is not None, "a layer goes this way only if one collective reduces all amaxes of a direction"
    added, given = bias if shards.adds_bias else None, shards.weight_amaxes
    if isinstance(way, ops.LinearByOperators):
        return way.forward(x, weight, added, *needs, groups.shared, names_of(groups.forward), given)
    is_shared = len(groups.forward) > 0 or given is not None
    share = ops.Share(groups.shared, groups.forward, given) if is_shared else None
    return way.forward(x, weight, added, *needs, share)
