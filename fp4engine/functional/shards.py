"""Operands of tensors that several ranks hold together: each rank casts its part as one process would cast the whole.

Two inputs of a cast depend on more than the rank's own part: the outer amax, which is the largest over all parts, and
the random bits, which belong to an element's place in the whole tensor.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.functional.program import Request
from fp4engine.quantizers import Quantizer
from fp4engine.roles import TENSOR_TYPES


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
        rank: the rank whose random bits all ranks that share the matrices draw; None if each rank draws its own.
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
        """A copy in which the amaxes of ``roles`` are also shared over the process group ``group``."""
        shared: dict[str, Any] = {}
        for role in roles:
            shard: Shard = getattr(self, role)
            shared[role] = shard._replace(groups=(*shard.groups, (group, 0)))
        return self._replace(**shared)

    def groups_of(self, role: str, quantizer: Quantizer) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The groups over which the outer amaxes of both sides of a tensor are reduced."""
        shard: Shard = getattr(self, role)
        return _groups(quantizer.rowwise_spec, shard, 1), _groups(quantizer.columnwise_spec, shard, 0)

    def with_place(self, request: Request) -> Request:
        """``request``, whose draw, if it has one, now tells where this rank's part lies in the whole tensor."""
        shard: Shard = getattr(self, request.role)
        if request.rng is None or shard.place is None:
            return request
        return request._replace(rng=ops.placed(request.rng, *shard.place))

    def stream(self, direction: ops.Direction) -> str:
        """The name of the random stream of a direction; empty for the process's stream."""
        return self.layer and f"{direction}/{self.layer}"

    def draw(self, device: torch.device, direction: ops.Direction, after: Tensor | None = None) -> Tensor:
        """The next draw for the forward or the backward pass, as :func:`fp4engine.ops.next_draw` returns it."""
        return ops.next_draw(device, 1, self.stream(direction), direction, after)


class Wholes(NamedTuple):
    """How the DTensors of ``inp @ weight.T + bias`` are spread over a mesh: their parts and, of parts, whole tensors.

    Attributes:
        mesh: the mesh on which all of them lie.
        shards: this rank's parts of the matrices.
        shapes: shapes of input, weight, bias and output.
        placements: placements of the gradients of input, weight and bias, and of the output.
        of_grad: placements of the output's gradient, of which no rank has a part of a sum.
    """

    mesh: Any
    shards: Shards
    shapes: tuple[torch.Size, ...]
    placements: tuple[tuple[Any, ...], ...]
    of_grad: tuple[Any, ...]

    def parts(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """This rank's parts of input, weight and bias, connected by autograd to the DTensors."""
        wholes: tuple[Any, ...] = tensors
        return [
            None if whole is None else whole.to_local(grad_placements=placements)
            for whole, placements in zip(wholes, self.placements, strict=False)
        ]

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a DTensor, without autograd; waits for a collective that still writes it."""
        whole: Any = tensor
        local = whole.to_local()
        return local.wait() if hasattr(local, "wait") else local

    def part_of_grad(self, grad_output: Tensor) -> Tensor:
        """The rank's part of the output's gradient, which is first spread over the ranks as the output is."""
        whole: Any = grad_output
        return self.part(whole if whole.placements == self.of_grad else whole.redistribute(placements=self.of_grad))

    def output(self, part: Tensor) -> Tensor:
        """The whole output."""
        return self._whole(part, -1)

    def gradients(self, *parts: Tensor | None) -> list[Tensor | None]:
        """The whole gradients of input, weight and bias."""
        return [None if part is None else self._whole(part, index) for index, part in enumerate(parts)]

    def _whole(self, part: Tensor, index: int) -> Any:
        """The DTensor whose part on this rank is ``part``: the output, or by ``index`` another tensor's gradient."""
        from torch.distributed.tensor import DTensor

        shape = self.shapes[index]
        stride = tuple([prod(shape[i + 1 :]) for i in range(len(shape))])
        return DTensor.from_local(part, self.mesh, self.placements[index], run_check=False, shape=shape, stride=stride)


def shared_amaxes(requests: Sequence[Request], shards: Shards) -> list[Tensor | None]:
    """The outer amaxes that ranks share: two for each request, of its rowwise and then of its columnwise operand.

    One all-reduce per group carries the amaxes of all requests. An entry is None where no rank shares the amax, so that
    the cast finds it in its own tensor.

    Args:
        requests: as :meth:`Shards.with_place` returns them.
    """
    amaxes: list[Tensor | None] = []
    groups: list[tuple[Any, ...]] = []
    for role, quantizer, tensor, rowwise, columnwise, rng, _ in requests:
        reduced = shards.groups_of(role, quantizer)
        if role == "weight" and shards.weight_amaxes is not None and rowwise:
            reduced = (), ()
            amaxes += shards.weight_amaxes[:, :1].unbind()
        elif any(reduced):
            rank = {} if rng is None or shards.rank is None else {"rank": shards.rank}
            amaxes += quantizer.amax(tensor, rowwise=rowwise, columnwise=columnwise, rng=rng, **rank)
        else:
            amaxes += None, None
        groups += reduced
    _reduce(amaxes, groups)
    return amaxes


def _groups(spec: CastSpec | None, shard: Shard, contracted: int) -> tuple[Any, ...]:
    """The groups over which an operand's outer amax has to be reduced.

    The amax of a whole tensor is reduced over all groups. The amax of rows is reduced only over the groups that split
    a row, which lies along the ``contracted`` axis.
    """
    if spec is None or not (spec.outer is Outer.TENSOR or spec.outer.is_by_rows):
        return ()
    return tuple(group for group, axis in shard.groups if spec.outer is Outer.TENSOR or axis == contracted)


def _reduce(amaxes: list[Tensor | None], groups: list[tuple[Any, ...]]) -> None:
    """Replace each amax by the largest over its groups, in one collective for each group.

    Amaxes of whole tensors are packed as in the operators of compiled layers, since another rank may run those for its
    part of the same layer.
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
