"""A layer's forward, and its backward, as one operator each: for code that ``torch.compile`` traces.

An operator costs the host more time than a launch, so a small layer is one operator in each direction. It runs what
eager code runs, and decides when it runs by which builder; so a graph depends neither on the number of rows nor on the
kernels that there are. What a forward keeps is one tensor of bytes, in an order that depends on the casts alone.

Layers whose plan has no :attr:`~fp4engine.functional.plan.LinearPlan.key`, and large ones, are traced operation by
operation instead: there the GPU is the limit, and the compiler casts an input that several layers share once.

Legend: x is [M, K], weight [N, K].
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.constants import MOST_QUESTIONS
from fp4engine.formats import CastSpec
from fp4engine.formats.one_buffer import offsets
from fp4engine.functional.call import Call
from fp4engine.functional.plan import ExecutedGemms, LinearPlan, plan_of
from fp4engine.functional.program import CastWeight, Kept, Needs
from fp4engine.functional.record import Layout, Slot, leaves, restored
from fp4engine.functional.shards import Shard, Shards
from fp4engine.ops import Operand, TiledOperand
from fp4engine.ops.cast import amax_shape, codes_outputs
from fp4engine.ops.operation import PLAIN, Output, define
from fp4engine.ops.operator_order import order_token
from fp4engine.ops.reduce import groups_named, names_of

LARGE = 64 << 20
"""Bytes of the values of a weight, both operands together, from which on a layer is traced operation by operation."""


def take(call: Call, weight: Tensor) -> bool:
    """Whether a layer that is traced is an operator in each direction."""
    plan, rows, cols = call.plan, *weight.shape
    if not plan.key or call.function is not None or call.main_grad is not None or 2 * rows * cols > LARGE:
        return False
    if call.shards is not None and not plan.shares_amaxes:
        return False
    if call.weight_cache is None:
        return type(weight) in PLAIN
    return call.shards is None and call.weight_cache.tiles(weight) is not None


class ByOperator(NamedTuple):
    """The layout of what an operator keeps.

    Attributes:
        parts: of how many parts a weight consists that came as tiles, which are then saved too; 0 for another weight.
    """

    parts: int


def run_forward(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor], ByOperator]:
    """The output [M, N], and what is saved for backward: what the operator keeps, and a weight's tiles."""
    shards, tiles = call.shards, None
    if call.weight_cache is not None:
        tiles = call.weight_cache.tiles(weight)
        assert tiles is not None
    groups_of_input = groups_of_weight = ""
    given = token = None
    if shards is not None:
        given = shards.weight_amaxes
        groups_of_input = _names(shards.input)
        groups_of_weight = "" if given is not None else _names(shards.weight)
        if groups_of_input or groups_of_weight:
            token = order_token(x.device, "forward")
    y, kept = torch.ops.fp4engine.linear_forward(
        x.detach(),
        (weight if tiles is None else tiles.packed).detach(),
        None if bias is None else bias.detach(),
        given,
        token,
        call.plan.key,
        call.needs.dgrad,
        call.needs.wgrad,
        weight.shape[0],
        weight.dtype,
        0 if tiles is None else tiles.parts,
        groups_of_input,
        groups_of_weight,
    )
    tensors = [kept] if call.needs.wgrad or (call.needs.dgrad and tiles is None) else []
    if tiles is not None and call.needs.dgrad:
        tensors.append(tiles.packed)
    return y, tensors, ByOperator(0 if tiles is None else tiles.parts)


def run_backward(
    call: Call, layout: ByOperator, grad_output: Tensor, kept: Sequence[Tensor], needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; the bias has an operator of its own."""
    plan, shards, device = call.plan, call.shards, grad_output.device
    grad_input = grad_weight = grad_bias = None
    if needs.dgrad or needs.wgrad:
        groups, rank, place, stream = "", None, None, ""
        if shards is not None:
            groups, rank, stream = _names(shards.grad_output), shards.rank, shards.stream("backward")
            place = None if shards.grad_output.place is None else list(shards.grad_output.place)
        grad_input, grad_weight = torch.ops.fp4engine.linear_backward(
            grad_output.detach(),
            list(kept),
            ops.state_of(device, stream) if plan.draws_in_backward else None,
            order_token(device, "backward") if groups else None,
            plan.key,
            needs.dgrad,
            needs.wgrad,
            call.cols,
            call.dtypes[0],
            call.dtypes[1],
            layout.parts,
            groups,
            rank,
            place,
        )
    if needs.bgrad:
        assert call.dtypes[2] is not None
        grad_bias = call.eager(device).column_sum(grad_output, call.dtypes[2])
    return grad_input if needs.dgrad else None, grad_weight if needs.wgrad else None, grad_bias


def _names(shard: Shard) -> str:
    """The names of the groups that share a matrix."""
    return names_of(tuple([group for group, _ in shard.groups]))


def _shard(groups: str, place: Sequence[int] | None = None) -> Shard:
    """Inverse of :func:`_names`; along which axis ranks have parts matters to amaxes of rows alone."""
    whole = None if place is None else (place[0], place[1])
    return Shard(tuple([(group, 0) for group in groups_named(groups)]), whole)


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    given: Tensor | None,
    token: Tensor | None,
    plan: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    outs: int,
    weight_dtype: torch.dtype,
    parts: int,
    groups_of_input: str,
    groups_of_weight: str,
) -> tuple[Tensor, Tensor]:
    """The output, and what backward needs in one tensor, which is empty if it needs nothing.

    The operator waits for ranks that share amaxes; the tensor of :func:`fp4engine.ops.operator_order.order_token` keeps
    such operators in one order.

    Args:
        weight: [N, K]; or, where there are ``parts``, the tiles of a :class:`~fp4engine.ops.TiledOperand`.
        given: the weight's amaxes, see :attr:`fp4engine.functional.shards.Shards.weight_amaxes`.
        plan: a key of :func:`fp4engine.functional.plan.plan_of`.
        outs, weight_dtype: N, and the dtype of the weight.
    """
    own, needs, (rows, cols), cast = plan_of(plan), Needs(needs_dgrad, needs_wgrad), x.shape, None
    if parts:
        spec = own.weight.rowwise_spec
        assert spec is not None
        tiles = TiledOperand(spec, outs, cols, parts, weight)
        cast = CastWeight(tiles, tiles if needs_dgrad else None, None)
    shards = None
    if groups_of_input or groups_of_weight or given is not None:
        shards = Shards(_shard(groups_of_input), _shard(groups_of_weight), weight_amaxes=given)
    layout, size = _layout(own, rows, outs, cols, needs, parts)
    dtypes = x.dtype, weight_dtype, None if bias is None else bias.dtype
    call = Call(own, _NOBODY, shards, None, None, needs, None, cols, dtypes)
    y, kept, found = call.forward(x, weight, bias, cast)
    if found.slots == layout.slots:
        return y.contiguous(), kept[0] if size else x.new_empty(0, dtype=torch.uint8)
    return y.contiguous(), _joined(restored(found.slots, kept), layout, x, size)


def _linear_backward(
    grad_output: Tensor,
    kept: Sequence[Tensor],
    state: Tensor | None,
    token: Tensor | None,
    plan: str,
    needs_dgrad: bool,
    needs_wgrad: bool,
    cols: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    parts: int,
    groups: str,
    rank: int | None,
    place: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight; one that is not asked for is an empty tensor. Writes to ``state``.

    Args:
        kept: what the forward operator keeps, and behind it the weight's tiles, if there are ``parts``.
        state: of the random stream that stochastic casts draw from.
        groups: the names of the groups whose ranks share the amaxes of the gradient.
        rank: whose random bits are drawn; None for this process's.
        place: row and column at which the gradient begins in the whole matrix; None if it is whole.
    """
    own, (rows, outs) = plan_of(plan), grad_output.shape
    shards = None
    if groups or rank is not None or place is not None:
        shards = Shards(grad_output=_shard(groups, place), rank=rank)
    needs, dtypes = Needs(needs_dgrad, needs_wgrad), (dtype, weight_dtype, None)
    layout, _ = _layout(own, rows, outs, cols, needs, parts)
    call = Call(own, _NOBODY, shards, None, None, needs, None, cols, dtypes)
    grad_input, grad_weight, _ = call.backward(layout, grad_output, kept, needs, state)
    made = grad_input, grad_weight
    dgrad, wgrad = [grad_output.new_empty(0) if grad is None else grad.contiguous() for grad in made]
    return dgrad, wgrad


_NOBODY = ExecutedGemms()
"""Nobody counts products of compiled code."""


def _layout_of(plan: LinearPlan, rows: int, outs: int, cols: int, needs: Needs, parts: int) -> tuple[Layout, int]:
    """The layout of what the forward operator keeps in one tensor, whose bytes it tells, and of the tiles behind it.

    Of each operand that is codes, block scales and amax.
    """
    kept: list[tuple[CastSpec | None, int, int]] = []
    if needs.wgrad:
        kept.append((plan.input.columnwise_spec, cols, rows))
    if needs.dgrad and not parts:
        kept.append((plan.weight.columnwise_spec, cols, outs))
    outputs: list[Output] = []
    for spec, height, width in kept:
        assert spec is not None
        outputs += [*codes_outputs(spec, height, width), Output(amax_shape(spec, height, width), torch.float32)]
    starts, size = offsets([math.prod(shape) * dtype.itemsize for shape, dtype in outputs])
    slots = iter([Slot(0, start, *output) for start, output in zip(starts, outputs, strict=True)])
    operand: Any = Operand
    tiled: Any = TiledOperand
    operands = [operand(*made, *islice(slots, 3)) for made in kept]
    inp = operands.pop(0) if needs.wgrad else None
    if needs.dgrad and parts:
        operands.append(tiled(plan.weight.rowwise_spec, outs, cols, parts, Slot(int(needs.wgrad))))
    return Layout(Kept(inp, *operands)), size


_layout = lru_cache(maxsize=MOST_QUESTIONS)(_layout_of)


def _joined(record: Kept, layout: Layout, like: Tensor, size: int) -> Tensor:
    """The tensors of a record in one of ``size`` bytes, as ``layout`` has them."""
    joined = like.new_empty(size, dtype=torch.uint8)
    for slot, tensor in zip(leaves(layout.slots), leaves(record), strict=True):
        if slot.shape:  # all but tiles, which are saved by themselves
            restored(slot, [joined]).copy_(tensor)
    return joined


def _linear_forward_outputs(
    x: Tensor, plan: str, needs_dgrad: bool, needs_wgrad: bool, outs: int, parts: int
) -> list[Output]:
    rows, cols = x.shape
    # Sizes may be symbols here, which no cache takes.
    _, size = _layout_of(plan_of(plan), rows, outs, cols, Needs(needs_dgrad, needs_wgrad), parts)
    return [Output((rows, outs), x.dtype), Output((size,), torch.uint8)]


def _linear_backward_outputs(
    grad_output: Tensor, needs_dgrad: bool, needs_wgrad: bool, cols: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> list[Output]:
    (rows, outs), absent = grad_output.shape, Output((0,), grad_output.dtype)
    return [
        Output((rows, cols), dtype) if needs_dgrad else absent,
        Output((outs, cols), weight_dtype) if needs_wgrad else absent,
    ]


define(_linear_forward, _linear_forward_outputs, mutates_args=("token",))
define(_linear_backward, _linear_backward_outputs, mutates_args=("state", "token"))
