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


class Configuration(NamedTuple):
    """Arguments of an operator that are neither tensors nor sizes.

    An operator takes them as one string, since every argument costs up to a microsecond in PyTorch's dispatcher.

    Attributes:
        parts: of how many parts a weight consists that comes as tiles; 0 for another weight.
        dtypes: of the input and of the weight.
        rank: whose random bits are drawn; None for this process's.
        groups: the names of the groups whose ranks share amaxes: in forward those of the input and of the weight, in
            backward those of the gradient.
    """

    plan: LinearPlan
    needs: Needs
    parts: int
    dtypes: tuple[torch.dtype, torch.dtype]
    rank: int | None
    groups: tuple[str, ...]

    def encode(self) -> str:
        """The string; it is valid in other processes too."""
        fields = self.plan.key, *self.needs[:2], self.parts, *self.dtypes, self.rank, *self.groups
        return "|".join([f"{field}" for field in fields])

    @staticmethod
    def decode(encoded: str) -> "Configuration":
        """Inverse of :meth:`encode`."""
        key, dgrad, wgrad, parts, dtype, weight_dtype, rank, *groups = encoded.split("|")
        dtypes = getattr(torch, dtype.removeprefix("torch.")), getattr(torch, weight_dtype.removeprefix("torch."))
        needs, whose = Needs(dgrad == "True", wgrad == "True"), None if rank == "None" else int(rank)
        return Configuration(plan_of(key), needs, int(parts), dtypes, whose, tuple(groups))


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
    groups, given, token = ("", ""), None, None
    if shards is not None:
        given = shards.weight_amaxes
        groups = _names(shards.input), "" if given is not None else _names(shards.weight)
        if any(groups):
            token = order_token(x.device, "forward")
    parts = 0 if tiles is None else tiles.parts
    y, kept = torch.ops.fp4engine.linear_forward(
        x.detach(),
        (weight if tiles is None else tiles.packed).detach(),
        None if bias is None else bias.detach(),
        given,
        token,
        Configuration(call.plan, call.needs, parts, (x.dtype, weight.dtype), None, groups).encode(),
        weight.shape[0],
    )
    tensors = [kept] if call.needs.wgrad or (call.needs.dgrad and tiles is None) else []
    if tiles is not None and call.needs.dgrad:
        tensors.append(tiles.packed)
    return y, tensors, ByOperator(parts)


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
            Configuration(plan, needs, layout.parts, call.dtypes[:2], rank, (groups,)).encode(),
            call.cols,
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
    configuration: str,
    outs: int,
) -> tuple[Tensor, Tensor]:
    """The output, and what backward needs in one tensor, which is empty if it needs nothing.

    The operator waits for ranks that share amaxes; the tensor of :func:`fp4engine.ops.operator_order.order_token` keeps
    such operators in one order.

    Args:
        weight: [N, K]; or the tiles of a :class:`~fp4engine.ops.TiledOperand`.
        given: the weight's amaxes, see :attr:`fp4engine.functional.shards.Shards.weight_amaxes`.
        configuration: an encoded :class:`Configuration`.
        outs: N.
    """
    rows, cols = x.shape
    own, call, layout, size = _prepared(configuration, rows, outs, cols)
    cast = None
    if bias is not None:
        call = call._replace(dtypes=(*own.dtypes, bias.dtype))
    if own.parts:
        spec = own.plan.weight.rowwise_spec
        assert spec is not None
        tiles = TiledOperand(spec, outs, cols, own.parts, weight)
        cast = CastWeight(tiles, tiles if own.needs.dgrad else None, None)
    if any(own.groups) or given is not None:
        of_input, of_weight = map(_shard, own.groups)
        call = call._replace(shards=Shards(of_input, of_weight, weight_amaxes=given))
    y, kept, found = call.forward(x, weight, bias, cast)
    if found.slots == layout.slots:
        return y.contiguous(), kept[0] if size else x.new_empty(0, dtype=torch.uint8)
    return y.contiguous(), _joined(restored(found.slots, kept), layout, x, size)


def _linear_backward(
    grad_output: Tensor,
    kept: Sequence[Tensor],
    state: Tensor | None,
    token: Tensor | None,
    configuration: str,
    cols: int,
    place: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight; one that is not needed is an empty tensor. Writes to ``state``.

    Args:
        kept: what the forward operator keeps, and behind it the weight's tiles, if there are any.
        state: of the random stream that stochastic casts draw from.
        configuration: an encoded :class:`Configuration`.
        place: row and column at which the gradient begins in the whole matrix; None if it is whole.
    """
    rows, outs = grad_output.shape
    own, call, layout, _ = _prepared(configuration, rows, outs, cols)
    if any(own.groups) or own.rank is not None or place is not None:
        call = call._replace(shards=Shards(grad_output=_shard(own.groups[0], place), rank=own.rank))
    grad_input, grad_weight, _ = call.backward(layout, grad_output, kept, own.needs, state)
    made = grad_input, grad_weight
    dgrad, wgrad = [grad_output.new_empty(0) if grad is None else grad.contiguous() for grad in made]
    return dgrad, wgrad


_NOBODY = ExecutedGemms()
"""Nobody counts products of compiled code."""


@lru_cache(maxsize=MOST_QUESTIONS)
def _prepared(encoded: str, rows: int, outs: int, cols: int) -> tuple[Configuration, Call, Layout, int]:
    """The configuration, the call without shards and bias, and layout and size of what the forward operator keeps."""
    own = Configuration.decode(encoded)
    call = Call(own.plan, _NOBODY, None, None, None, own.needs, None, cols, (*own.dtypes, None))
    return own, call, *_layout(own, rows, outs, cols)


def _layout(own: Configuration, rows: int, outs: int, cols: int) -> tuple[Layout, int]:
    """The layout of what the forward operator keeps in one tensor, whose bytes it tells, and of the tiles behind it.

    Of each operand that is codes, block scales and amax.
    """
    plan, needs, parts = own.plan, own.needs, own.parts
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


def _joined(record: Kept, layout: Layout, like: Tensor, size: int) -> Tensor:
    """The tensors of a record in one of ``size`` bytes, as ``layout`` has them."""
    joined = like.new_empty(size, dtype=torch.uint8)
    for slot, tensor in zip(leaves(layout.slots), leaves(record), strict=True):
        if slot.shape:  # all but tiles, which are saved by themselves
            restored(slot, [joined]).copy_(tensor)
    return joined


def _linear_forward_outputs(x: Tensor, configuration: str, outs: int) -> list[Output]:
    rows, cols = x.shape
    _, size = _layout(Configuration.decode(configuration), rows, outs, cols)  # sizes may be symbols here
    return [Output((rows, outs), x.dtype), Output((size,), torch.uint8)]


def _linear_backward_outputs(grad_output: Tensor, configuration: str, cols: int) -> list[Output]:
    (rows, outs), own, absent = grad_output.shape, Configuration.decode(configuration), Output((0,), grad_output.dtype)
    return [
        Output((rows, cols), own.dtypes[0]) if own.needs.dgrad else absent,
        Output((outs, cols), own.dtypes[1]) if own.needs.wgrad else absent,
    ]


define(_linear_forward, _linear_forward_outputs, mutates_args=("token",), any_strides=True)
define(_linear_backward, _linear_backward_outputs, mutates_args=("state", "token"), any_strides=True)
