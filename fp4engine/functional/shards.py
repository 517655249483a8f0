"""Operands of tensors that several ranks hold together: each rank casts its part as one process would cast the whole.

Two inputs of a cast depend on more than the rank's own part: the outer amax, which is the largest over all parts, and
the random bits, which belong to an element's place in the whole tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.functional.plan import LinearPlan
from fp4engine.quantizers import Quantizer
from fp4engine.roles import TENSOR_TYPES, TensorType
from fp4engine.tensor import QuantizedTensor


class Shard(NamedTuple):
    """One rank's part of a matrix.

    Attributes:
        groups: pairs of a process group and the axis of the matrix along which the ranks of the group have different
            parts.
        place: row and column of the whole matrix at which the part begins; None if they are not known, and then each
            rank draws as if its part were the whole.
    """

    groups: tuple[tuple[Any, int], ...] = ()
    place: tuple[int, int] | None = None


class Shards(NamedTuple):
    """One rank's parts of the three matrices of a linear transformation, and the random bits by which it casts them.

    Attributes:
        input, weight, grad_output: the parts of the matrices [M, K], [N, K] and [M, N].
        rank: the rank whose random bits all ranks that share the matrices draw; None if each draws its own.
        adds_bias: False if the output is a sum over ranks and another rank adds the bias.
        layer: name of the layer's own random stream; empty to draw from the process's stream.
        weight_amaxes: outer amaxes of the whole weight, by :func:`fp4engine.ops.amaxes_of`, if all ranks have them
            already.
    """

    input: Shard = Shard()
    weight: Shard = Shard()
    grad_output: Shard = Shard()
    rank: int | None = None
    adds_bias: bool = True
    layer: str = ""
    weight_amaxes: Tensor | None = None

    def and_over(self, group: Any, roles: Sequence[str] = TENSOR_TYPES) -> "Shards":
        """The same, with the amaxes of ``roles`` shared over ``group`` as well."""
        shared: dict[str, Any] = {}
        for role in roles:
            shard: Shard = getattr(self, role)
            shared[role] = shard._replace(groups=(*shard.groups, (group, 0)))
        return self._replace(**shared)

    def needs_reduction(self, plan: LinearPlan) -> bool:
        """Whether the ranks have to reduce amaxes for a cast of ``plan``."""
        for role in TENSOR_TYPES:
            quantizer: Quantizer = getattr(plan, role)
            for contracted, spec in enumerate((quantizer.columnwise_spec, quantizer.rowwise_spec)):
                if _groups(spec, getattr(self, role), contracted):
                    return True
        return False

    def stream(self, direction: ops.Direction) -> str:
        """The name of the random stream of a direction; empty for the process's stream."""
        return self.layer and f"{direction}/{self.layer}"

    def draw(self, device: torch.device, direction: ops.Direction, after: Tensor | None = None) -> Tensor:
        """The next draw of a forward, or of a backward pass, as :func:`fp4engine.ops.next_draw`."""
        return ops.next_draw(device, 1, self.stream(direction), direction, after)

    def amax_groups(self) -> "AmaxGroups | None":
        """The groups over which amaxes are reduced, if each is of a whole tensor.

        None if the forward would need two collectives, since input and weight are shared over different groups.
        """
        of_input, of_weight, of_grad = (
            tuple([group for group, _ in shard.groups]) for shard in (self.input, self.weight, self.grad_output)
        )
        if self.weight_amaxes is not None:
            of_weight = ()
        if of_input and of_weight and of_input != of_weight:
            return None
        return AmaxGroups((len(of_input) > 0, len(of_weight) > 0), of_input or of_weight, of_grad)


class Wholes(Protocol):
    """Takes this rank's parts of whole tensors that ranks share, and makes whole tensors from parts."""

    def part(self, tensor: Tensor) -> Tensor:
        """The rank's part of a whole tensor."""
        ...

    def part_of_grad(self, grad_output: Tensor) -> Tensor:
        """The rank's part of the output's gradient, which is first spread over the ranks as the output is."""
        ...

    def output(self, part: Tensor) -> Tensor:
        """The whole output."""
        ...

    def gradients(self, *parts: Tensor | None) -> list[Tensor | None]:
        """The whole gradients of input, weight and bias."""
        ...


class AmaxGroups(NamedTuple):
    """The process groups over which outer amaxes are reduced, in one collective per group and direction.

    Attributes:
        shared: whether the input's, and whether the weight's, amaxes are reduced.
        forward, backward: the process groups of each direction.
    """

    shared: tuple[bool, bool]
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]


class Part(NamedTuple):
    """One matrix to be cast.

    Attributes:
        arguments: for :meth:`~fp4engine.quantizers.Quantizer.quantize`.
        given: outer amaxes of the whole matrix, see :func:`fp4engine.ops.amaxes_of`; None if they have to be found.
    """

    role: TensorType
    quantizer: Quantizer
    matrix: Tensor
    arguments: dict[str, Any]
    given: Tensor | None = None


def quantize_parts(parts: Sequence[Part], shards: Shards) -> list[QuantizedTensor]:
    """Quantize each part as a part of its whole matrix. The outer amaxes of all parts are reduced together."""
    asked: list[dict[str, Any]] = []
    amaxes: list[Tensor | None] = []
    groups: list[tuple[Any, ...]] = []
    for part in parts:
        shard: Shard = getattr(shards, part.role)
        arguments = _with_draw(part, shard, shards)
        sides = {name: arguments[name] for name in ("rowwise", "columnwise", "rng", "rank") if name in arguments}
        asked.append(arguments)
        reduced = _groups(part.quantizer.rowwise_spec, shard, 1), _groups(part.quantizer.columnwise_spec, shard, 0)
        if part.given is not None:
            reduced = (), ()
            amaxes += part.given[:, :1].unbind()
        else:
            amaxes += part.quantizer.amax(part.matrix, **sides) if any(reduced) else (None, None)
        groups += reduced
    _reduce(amaxes, groups)
    return [
        part.quantizer.quantize(part.matrix, rowwise_amax=row, columnwise_amax=col, **arguments)
        for part, arguments, row, col in zip(parts, asked, amaxes[::2], amaxes[1::2], strict=True)
    ]


def _with_draw(part: Part, shard: Shard, shards: Shards) -> dict[str, Any]:
    """The arguments of ``part``, with the draw that its amax and its cast both read, if they need one.

    A backward pass has taken its draw before, so a draw that is taken here belongs to a forward pass.
    """
    arguments = dict(part.arguments)
    rng = arguments.pop("rng", None)
    if part.quantizer.takes_draw(arguments.get("rowwise", True), arguments.get("columnwise", True)):
        rng = shards.draw(part.matrix.device, "forward") if rng is None else rng
        arguments["rng"] = rng if shard.place is None else ops.placed(rng, *shard.place)
        arguments |= {} if shards.rank is None else {"rank": shards.rank}
    return arguments


def _groups(spec: CastSpec | None, shard: Shard, contracted: int) -> tuple[Any, ...]:
    """The groups over which an operand's outer amax has to be reduced.

    The amax of a whole tensor is reduced over all groups. The amax of a row is reduced only over the groups that split
    the row, which lies along the ``contracted`` axis.
    """
    if spec is None or spec.outer not in (Outer.TENSOR, Outer.ROW):
        return ()
    return tuple(group for group, axis in shard.groups if spec.outer is Outer.TENSOR or axis == contracted)


def _reduce(amaxes: list[Tensor | None], groups: list[tuple[Any, ...]]) -> None:
    """Replace each amax by the largest over its groups, in one collective for each group.

    Amaxes of whole tensors are packed as in :mod:`fp4engine.functional.at_once`, since another rank may run that code
    for its part of the same layer.
    """
    for group in dict.fromkeys(group for several in groups for group in several):
        chosen = [(i, amax) for i, amax in enumerate(amaxes) if amax is not None and group in groups[i]]
        if chosen:
            several = [amax for _, amax in chosen]
            if all(amax.numel() == 1 for amax in several):
                packed = ops.packed_amaxes(several)
                reduced = packed[:, :1].unbind()
            else:
                packed = torch.cat([amax.view(-1) for amax in several])
                reduced = packed.split([amax.numel() for amax in several])
            ops.all_reduce_amax(packed, group)
            for (i, _), amax in zip(chosen, reduced, strict=True):
                amaxes[i] = amax
