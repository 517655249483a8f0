"""Operands of tensors that several ranks hold together: cast on each rank as one process would cast the whole.

Two things of a cast depend on more than the rank's own part: the outer amax, which is the largest of all parts, and the
random bits, which belong to an element's place in the whole tensor.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import QuantizedTensor

Role = Literal["input", "weight", "grad_output"]


class Shard(NamedTuple):
    """One rank's part of a matrix.

    Attributes:
        groups: pairs of a process group, and the axis of the matrix along which its ranks hold different parts.
        place: row and column of the whole matrix at which the part begins; None where they are not known, and each rank
            draws as if its part were the whole.
    """

    groups: tuple[tuple[Any, int], ...] = ()
    place: tuple[int, int] | None = None


class Shards(NamedTuple):
    """What a rank has of the three matrices of a linear transformation.

    Attributes:
        input, weight, grad_output: of the matrices [M, K], [N, K] and [M, N].
        rank: the rank in whose name all ranks that share the matrices draw; None: each in its own.
        adds_bias: False where another rank adds the bias to its part of a sum.
    """

    input: Shard
    weight: Shard
    grad_output: Shard
    rank: int | None = None
    adds_bias: bool = True

    @staticmethod
    def over(group: Any) -> "Shards":
        """Rows of input and gradient are spread over ``group``, nobody knows in which order; it has one weight."""
        rows = Shard(((group, 0),))
        return Shards(rows, rows, rows)

    def and_over(self, group: Any) -> "Shards":
        """The same, and amaxes are shared with the ranks of ``group`` beside."""
        inp, weight, grad = (shard._replace(groups=(*shard.groups, (group, 0))) for shard in self[:3])
        return self._replace(input=inp, weight=weight, grad_output=grad)


class Part(NamedTuple):
    """One matrix to be cast: by which quantizer, and how :meth:`~fp4engine.quantizers.Quantizer.quantize` is asked."""

    role: Role
    quantizer: Quantizer
    matrix: Tensor
    arguments: dict[str, Any]


def quantize_parts(parts: Sequence[Part], shards: Shards) -> list[QuantizedTensor]:
    """Quantize each part as a part of its whole matrix; outer amaxes of all of them travel together."""
    names: dict[str, Any] = {} if shards.rank is None else {"rank": shards.rank}
    asked: list[dict[str, Any]] = []
    amaxes: list[tuple[Tensor | None, Tensor | None]] = []
    for part in parts:
        arguments = part.arguments | names
        rng = arguments.pop("rng", None)
        if rng is None and any(spec is not None and spec.is_stochastic for spec in _specs(part)):
            rng = ops.next_draw(part.matrix.device)
        place = getattr(shards, part.role).place
        if rng is not None:
            arguments["rng"] = rng if place is None else placed(rng, place)
        asked.append(arguments)
        sides = {name: arguments[name] for name in ("rowwise", "columnwise", "rng", "rank") if name in arguments}
        amaxes.append((None, None) if part.quantizer.is_identity else part.quantizer.amax(part.matrix, **sides))
    found = [
        (groups, amax)
        for part, sides in zip(parts, amaxes, strict=True)
        for groups, amax in zip(_groups(part, getattr(shards, part.role)), sides, strict=True)
    ]
    shared = iter(_reduced((groups, amax) for groups, amax in found))
    return [
        part.quantizer.quantize(part.matrix, rowwise_amax=next(shared), columnwise_amax=next(shared), **arguments)
        for part, arguments in zip(parts, asked, strict=True)
    ]


def placed(rng: Tensor, place: tuple[int, int]) -> Tensor:
    """``rng`` [2] with the place of a shard: int64 [4], made on the device."""
    return torch.cat([rng, *(rng.new_full((1,), index) for index in place)])


def _specs(part: Part) -> tuple[CastSpec | None, CastSpec | None]:
    """Specs of the sides that are asked for."""
    rowwise, columnwise = (part.arguments.get(side, True) for side in ("rowwise", "columnwise"))
    quantizer = part.quantizer
    return quantizer.rowwise_spec if rowwise else None, quantizer.columnwise_spec if columnwise else None


def _groups(part: Part, shard: Shard) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The groups over which each side's outer amax is the largest of all ranks'."""
    row, col = part.quantizer.rowwise_spec, part.quantizer.columnwise_spec
    return _reducing(row, shard.groups, 1), _reducing(col, shard.groups, 0)


def _reducing(spec: CastSpec | None, groups: Iterable[tuple[Any, int]], contracted: int) -> tuple[Any, ...]:
    """An amax of the tensor is every rank's; that of a row is, where the row is split along the contracted axis."""
    if spec is None or spec.outer not in (Outer.TENSOR, Outer.ROW):
        return ()
    return tuple(group for group, axis in groups if spec.outer is Outer.TENSOR or axis == contracted)


def _reduced(found: Iterable[tuple[tuple[Any, ...], Tensor | None]]) -> list[Tensor | None]:
    """The amaxes, each the largest over its groups: one collective for each group."""
    pairs = list(found)
    amaxes = [amax for _, amax in pairs]
    for group in dict.fromkeys(group for groups, amax in pairs if amax is not None for group in groups):
        chosen = [i for i, (groups, amax) in enumerate(pairs) if amax is not None and group in groups]
        packed = torch.cat([amaxes[i].view(-1) for i in chosen])  # pyright: ignore[reportOptionalMemberAccess]
        ops.all_reduce_amax(packed, group)
        sizes = [amaxes[i].numel() for i in chosen]  # pyright: ignore[reportOptionalMemberAccess]
        for i, amax in zip(chosen, packed.split(sizes), strict=True):
            amaxes[i] = amax
    return amaxes
