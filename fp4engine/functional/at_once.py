"""Forward and backward of a linear transformation in few launches each, for layers that allow it."""

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.call import Call
from fp4engine.functional.shards import AmaxGroups, Shards

LinearWay = ops.LinearAtOnce | ops.LinearByOperators


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
    """The output for a matrix ``x``, and what backward needs. If ranks share amaxes, one collective reduces them."""
    plan, shards = call.plan, call.shards
    shared, groups, given, memories = (False, False), (), None, None
    if shards is not None:
        shared, groups, _ = _amax_groups(shards)
        bias, given = bias if shards.adds_bias else None, shards.weight_amaxes
    if plan.is_stateful:
        memories = plan.input.recall(x.device), plan.weight.recall(x.device)
    asked = ops.ForwardPass(call.needs_dgrad, call.needs_wgrad, shared, groups, given, memories)
    return way.forward(x, weight if call.tiles is None else call.tiles, bias, asked)


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
    name, rank, place, groups = "", None, None, ()
    if shards is not None:
        name, rank, place = shards.stream("backward"), shards.rank, shards.grad_output.place
        groups = _amax_groups(shards).backward
    state = ops.state_of(device, name) if plan.draws_in_backward else None
    memory = plan.grad_output.recall(device) if plan.is_stateful else None
    needs, parts = (call.needs_dgrad, call.needs_wgrad), 0 if call.tiles is None else call.tiles.parts
    asked = ops.BackwardPass(*needs, ins, dtypes, state, rank, place, groups, parts, memory)
    return way.backward(grad_output, kept, asked)


def draw(call: Call, grad_output: Tensor) -> Tensor | None:
    """The draw for a backward pass; None if its casts need none."""
    if not call.plan.draws_in_backward:
        return None
    if call.shards is not None:
        return call.shards.draw(grad_output.device, "backward", grad_output)
    return ops.next_draw(grad_output.device, direction="backward", after=grad_output)


def _amax_groups(shards: Shards) -> AmaxGroups:
    groups = shards.amax_groups()
    assert groups is not None, "a layer goes this way only if one collective reduces all amaxes of a direction"
    return groups
