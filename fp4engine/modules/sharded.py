"""Tensor parallelism: from the placements of DTensors to a rank's parts of the three products of a linear layer.

``parallelize_module`` makes the weight a DTensor, and passes the input as a DTensor. Along each dimension of the mesh,

    weight        input              output               it is
    Shard(0)      Replicate()        Shard(-1)            ColwiseParallel
    Shard(1)      Shard(-1)          Partial()            RowwiseParallel
    Replicate()   Shard(0)           Shard(0)             rows of the input on each rank
    Replicate()   Replicate()        Replicate()          the same on each rank

Every rank then casts its part as one process would cast the whole, see :mod:`fp4engine.functional.shards`.
"""

import sys
from collections.abc import Sequence
from math import lcm, prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import Correction, Outer
from fp4engine.functional import LinearPlan
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.shards import Shard, Shards, Wholes
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.ops.reduce import digest_of, ranges
from fp4engine.ops.rng import current_seed
from fp4engine.private import constant_when_traced
from fp4engine.quantizers import Quantizer

_PLAIN = (type(None), Tensor, torch.nn.Parameter, QuantizedWeight, FusedInput)


def is_distributed(*tensors: Tensor | FusedInput | None) -> bool:
    """Whether any of ``tensors`` is a DTensor."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN and not isinstance(tensor, QuantizedWeight):
            break
    else:
        return False
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors)


def fsdp_module() -> Any:
    """FSDP2's class of the modules that it shards, for ``isinstance``; no class while nobody has imported FSDP2."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def place_of(tensor: Tensor | FusedInput | None) -> tuple[Any, ...] | None:
    """Everything of a DTensor on which a layout depends; None for other tensors.

    This includes the process groups, since equal meshes may have different groups.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    groups = tuple([mesh.get_group(dim) for dim in range(mesh.ndim)])
    return mesh, groups, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype


def sharing_groups(weight: Any) -> tuple[Any, ...]:
    """The process groups over which a DTensor is sharded."""
    mesh = weight.device_mesh
    return tuple([mesh.get_group(dim) for dim, placement in enumerate(weight.placements) if placement.is_shard()])


class _Split(NamedTuple):
    """How an axis is spread over ranks.

    Attributes:
        group: the process group of the ranks.
        size: length of the whole axis.
        chunk: length of one rank's part; the parts of the last ranks may be shorter.
        first: index at which this rank's part begins.
    """

    group: Any
    size: int
    chunk: int
    first: int


_AXES = {"input": ("M", "K"), "weight": ("N", "K"), "grad_output": ("M", "N")}
"""The axes of each role's matrix, in the letters of :mod:`fp4engine.functional.linear`."""


def rows_in_order(plan: LinearPlan, group: Any, inp: Tensor | FusedInput, weight: Tensor, name: str) -> Shards:
    """The shards of a rank that has the whole weight, and its own rows of input and gradient.

    Every rank of ``group`` has the same number of rows, and the rows of the ranks follow each other in its order.

    Args:
        name: of the module, for errors.

    Raises:
        ValueError, NotImplementedError: as :func:`layout_of`.
    """
    rows = prod(inp.shape[:-1])
    shards = _shards(plan, {"M": _rows_split(group, rows)}, name)
    draws = plan.draws_in_forward or plan.draws_in_backward
    # With unequal numbers of rows, different rows would be rounded by the same random bits.
    rank = agreed_rank(plan, (group,), inp, weight, name, rows if draws else None)
    return Shards(*shards, rank)


def _rows_split(group: Any, rows: int) -> _Split:
    return _Split(group, rows * dist.get_world_size(group), rows, rows * dist.get_rank(group))


def layout_of(
    plan: LinearPlan, inp: Tensor, weight: Tensor, bias: Tensor | None, name: str, cp_group: Any = None
) -> Wholes:
    """How a linear transformation of DTensors by ``plan`` is spread over ranks, with this rank's parts.

    Args:
        name: of the module, for errors.
        cp_group: ranks that have equally many rows of every input, in addition to the axes that the mesh spreads.

    Raises:
        ValueError: only some of the tensors are DTensors, or they lie on two meshes; or ``cp_group`` is a group of
            their mesh; or a shard's edge would cut a block of the recipe's casts; or as :func:`agreed_rank`.
        NotImplementedError: placements that the table above does not have, or casts that need the whole tensor.
    """
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor import Shard as Sharded

    x, w, mesh = _on_one_mesh(inp, weight, bias, name)
    last = x.ndim - 1
    splits: dict[str, _Split] = {}
    outputs: list[Any] = []
    biases: list[Any] = []
    grads: list[tuple[Any, ...]] = []  # of input, weight and bias, along each dimension of the mesh
    adds_bias = True
    for dim, (placed, held) in enumerate(zip(x.placements, w.placements, strict=True)):
        axis = placed.dim % x.ndim if isinstance(placed, Sharded) else None
        if isinstance(held, Sharded) and held.dim == 0 and isinstance(placed, Replicate):
            split, inner = ("N", weight.shape[0]), 1
            output, gradients = Sharded(last), (Partial(), Sharded(0), Sharded(0))
        elif isinstance(held, Sharded) and held.dim == 1 and axis == last:
            split, inner = ("K", weight.shape[1]), 1
            output, gradients = Partial(), (Sharded(last), Sharded(1), Replicate())
            adds_bias = adds_bias and mesh.get_local_rank(dim) == 0
        elif isinstance(held, Replicate) and axis is not None and axis != last and prod(x.shape[:axis]) == 1:
            split, inner = ("M", x.shape[axis]), prod(x.shape[axis + 1 : last])
            output, gradients = Sharded(axis), (Sharded(axis), Partial(), Partial())
        elif isinstance(held, Replicate) and isinstance(placed, Replicate):
            split, inner = None, 1
            output, gradients = Replicate(), (Replicate(), Replicate(), Replicate())
        else:
            raise NotImplementedError(
                f"{name}: an input of shape {tuple(x.shape)} placed {x.placements} does not go with a weight placed "
                f"{w.placements}; a weight takes Shard(0) with a replicated input (ColwiseParallel), Shard(1) with an "
                "input that is sharded along its last dimension (RowwiseParallel), or Replicate() with an input that "
                "is sharded along its first; or leave the module out of parallelize_module"
            )
        if split is not None:
            letter, size = split
            if letter in splits:
                raise NotImplementedError(
                    f"{name}: {letter} is sharded along two dimensions of {mesh}, and may be sharded along one only"
                )
            splits[letter] = _split(mesh, dim, size, inner)
        outputs.append(output)
        biases.append(Sharded(0) if split is not None and split[0] == "N" else Replicate())
        grads.append(gradients)
    groups: tuple[Any, ...] = tuple([mesh.get_group(dim) for dim in range(mesh.ndim)])
    if cp_group is not None:
        if "M" in splits:
            raise NotImplementedError(f"{name}: rows are sharded on {mesh}, and cp_group spreads them too; use one")
        if _cross_twice(ops.names_of(groups), ops.names_of((cp_group,))):
            raise ValueError(
                f"{name}: cp_group says that its ranks have different rows, and several of them lie on {mesh}, where "
                "they have the same ones; give the group of another dimension of the mesh, such as "
                'mesh["cp"].get_group()'
            )
        splits["M"] = _rows_split(cp_group, prod(x.shape[:-1]))
        groups = (*groups, cp_group)
    parts = _shards(plan, splits, name)
    tensors: tuple[Any, ...] = (inp, weight, bias)
    if bias is not None and list(tensors[2].placements) != biases:
        raise NotImplementedError(
            f"{name}: a bias placed {tensors[2].placements} does not go with a weight placed {w.placements}; it has to "
            f"be placed {tuple(biases)}"
        )
    rank = agreed_rank(plan, groups, inp, weight, name)
    shards = Shards(*parts, rank, adds_bias)
    shapes = (x.shape, w.shape, w.shape[:1], torch.Size((*x.shape[:-1], w.shape[0])))
    placements = [tuple([gradients[i] for gradients in grads]) for i in range(3)]
    of_grad = tuple([Replicate() if placement.is_partial() else placement for placement in outputs])
    return Wholes(mesh, shards, shapes, (*placements, tuple(outputs)), of_grad)


def _on_one_mesh(inp: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> tuple[Any, Any, Any]:
    """Input and weight, typed as DTensors, and their mesh."""
    from torch.distributed.tensor import DTensor

    tensors = {"input": inp, "weight": weight, "bias": bias}
    plain = [role for role, tensor in tensors.items() if tensor is not None and not isinstance(tensor, DTensor)]
    if plain:
        others = [role for role, tensor in tensors.items() if isinstance(tensor, DTensor)]
        raise ValueError(
            f"{name}: {' and '.join(plain)} must be a DTensor as {' and '.join(others)} is; parallelize_module with "
            "ColwiseParallel or RowwiseParallel makes all of them DTensors"
        )
    x: Any = inp
    w: Any = weight
    if x.device_mesh != w.device_mesh:
        raise ValueError(f"{name}: input and weight must lie on one mesh, got {x.device_mesh} and {w.device_mesh}")
    return x, w, w.device_mesh


def _split(mesh: Any, dim: int, size: int, inner: int) -> _Split:
    """How an axis of ``size`` runs of ``inner`` neighbours is spread: whole runs, as ``torch.chunk`` spreads them."""
    chunk = -(-size // mesh.size(dim))
    first = min(chunk * mesh.get_local_rank(dim), size)
    return _Split(mesh.get_group(dim), size * inner, chunk * inner, first * inner)


def _shard(splits: dict[str, _Split], rows: str, cols: str) -> Shard:
    """This rank's part of the matrix [rows, cols]."""
    pair = splits.get(rows), splits.get(cols)
    groups = tuple((split.group, axis) for axis, split in enumerate(pair) if split is not None)
    place = tuple(0 if split is None else split.first for split in pair)
    return Shard(groups, (place[0], place[1]) if groups else None)


def _shards(plan: LinearPlan, splits: dict[str, _Split], name: str) -> tuple[Shard, Shard, Shard]:
    """This rank's parts of the three matrices; raises if a cast of ``plan`` needs more of one than a rank has."""
    for role, axes in _AXES.items():
        quantizer: Quantizer = getattr(plan, role)
        for axis, letter in enumerate(axes):
            split = splits.get(letter)
            if split is None or split.chunk == split.size:
                continue
            for spec in (quantizer.rowwise_spec, quantizer.columnwise_spec):
                if spec is not None and spec.correction is Correction.SCALAR:
                    raise NotImplementedError(
                        f"{name}: {role} is sharded, but its cast makes one correction from all elements "
                        f"({spec.label}); keep the module in high precision or leave it out of parallelize_module or "
                        "cp_group"
                    )
            multiple = _multiple(quantizer, axis)
            if split.chunk % multiple:
                ranks = -(-split.size // split.chunk)
                raise ValueError(
                    f"{name}: {letter}={split.size} is sharded into parts of {split.chunk}, which would cut the blocks "
                    f"of {multiple} that {role} is cast in; make it a multiple of {multiple * ranks}, or keep the "
                    "module in high precision (convert(keep_high_precision=...)), or leave it out of "
                    "parallelize_module or cp_group"
                )
    of_input, of_weight, of_grad = (_shard(splits, *axes) for axes in _AXES.values())
    return of_input, of_weight, of_grad


def _multiple(quantizer: Quantizer, axis: int) -> int:
    """A shard's rows (``axis`` 0) or columns (1) must be a multiple of this, so that no block, tile or word is cut."""
    sides = (quantizer.columnwise_spec, quantizer.rowwise_spec)
    along, across = sides[axis], sides[1 - axis]  # ``axis`` is contracted in the first, and not in the second
    multiple = 1
    if along is not None and (along.block[1] or along.rotation is not None or along.is_stochastic):
        multiple = lcm(multiple, along.col_multiple)
    if across is not None:
        multiple = lcm(multiple, max(across.block[0], 1), 128 if across.outer is Outer.ROWS128 else 1)
    return multiple


@constant_when_traced
def _cross_twice(names: str, other: str) -> bool:
    """Whether a group of ``names`` has more than one rank of the group ``other``, all given by their names."""
    (others,) = (set(dist.get_process_group_ranks(group)) for group in ops.groups_named(other))
    return any(len(others.intersection(dist.get_process_group_ranks(group))) > 1 for group in ops.groups_named(names))


_known: WeakKeyDictionary[Any, dict[tuple[Any, ...], int]] = WeakKeyDictionary()
"""``group -> what its ranks were found to have in common``. It goes with the group, whose name a new one may have."""


def agreed_rank(
    plan: LinearPlan,
    groups: tuple[Any, ...],
    inp: Tensor | FusedInput,
    weight: Tensor,
    name: str,
    rows: int | None = None,
) -> int:
    """The lowest rank of ``groups``, which cross each other and whose ranks hold the tensors of a layer together.

    The ranks compare the first layer that they run by these casts, in eager mode with its shape and ``rows``.

    Raises:
        ValueError: the ranks would cast one tensor differently: in other layers, by other recipes, or with random bits
            of other seeds.
    """
    draws = plan.draws_in_forward or plan.draws_in_backward
    return _agreed(ops.names_of(groups), inp.device.type, name, "", plan.described, _facts(inp, weight, rows), draws)


def require_same_layer(plan: LinearPlan, group: Any, inp: Tensor | FusedInput, weight: Tensor, name: str) -> None:
    """Compare a layer among the ranks of ``group``, which share amaxes, when it runs by these casts for the first time.

    Raises:
        ValueError: another rank runs another layer, or the same by another recipe.
    """
    layer = "" if torch.compiler.is_dynamo_compiling() else name  # what is traced for one layer may run for others
    _agreed(ops.names_of((group,)), inp.device.type, name, layer, plan.described, _facts(inp, weight), False)


def _facts(inp: Tensor | FusedInput, weight: Tensor, rows: int | None = None) -> tuple[Any, ...]:
    """What ranks that share a layer have in common; without sizes in code that is traced for many sizes."""
    if torch.compiler.is_dynamo_compiling():
        return weight.dtype, (), inp.dtype, None
    return weight.dtype, tuple(weight.shape), inp.dtype, rows


@constant_when_traced
def _agreed(names: str, device: str, name: str, layer: str, casts: str, facts: tuple[Any, ...], draws: bool) -> int:
    """The lowest rank of groups given by their names, since traced code cannot hold a process group.

    What the ranks do is compared once for the same ``layer`` and ``casts``. If a rank compared it again because its own
    has changed, it would wait forever for ranks whose own has not. So would a rank that compared layers one by one when
    it runs in eager mode what all have compiled.
    """
    groups = ops.groups_named(names)
    known = _known.setdefault(groups[0], {})
    key, compiled = (names, layer, casts, draws), (names, "", casts, draws)
    if key not in known and compiled not in known:
        seed = current_seed() if draws else 0
        does = digest_of((layer, casts, facts))
        (least_seed, seeds), (least, most), (rank, _) = ranges([seed, does, dist.get_rank()], groups, device)
        if least != most:
            weight, shape, inp, rows = facts
            counted = "" if rows is None else f" with {rows} rows"
            raise ValueError(
                f"{name}: the ranks {_ranks(groups)} share tensors or amaxes here, but not all of them run the same "
                f"layer by the same recipe, on as many rows. This rank has a weight of {weight} {list(shape)}, an "
                f"input of {inp}{counted}, and the casts: {casts}"
            )
        if least_seed != seeds:
            raise ValueError(
                f"the ranks {_ranks(groups)} share tensors, but their random streams have different seeds (here "
                f"{seed}); give all of them one seed, by torch.manual_seed or fp4engine.manual_seed"
            )
        known[key] = rank
    return known[key] if key in known else known[compiled]


def _ranks(groups: Sequence[Any]) -> list[int]:
    return sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
