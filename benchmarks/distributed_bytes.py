"""Whether several GPUs make the bytes of one: every operand of a small block under each layout, beside one process.

The recipe is the default one, with stochastic rounding and rotation. Codes, scales and amaxes are compared bit for bit,
outputs and gradients by their relative distance: only the order of FP32 sums may differ.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp4engine
from fp4engine import ops
from fp4engine.distributed import fp4_all_gather
from fp4engine.functional import eager
from fp4engine.functional.call import Call
from fp4engine.functional.eager import Eager
from fp4engine.ops import Operand
from fp4engine.recipe import NVFP4BlockScaling

WIDTH, HIDDEN, BATCH, SEQUENCE = 256, 1024, 2, 128
TOLERANCE = 1e-6
RECIPE = NVFP4BlockScaling()

Operands = list[tuple[str, Operand]]
"""Product and side, and what was multiplied."""

PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PARALLEL = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(nn.Module):
    """Some hidden features are the larger by far, so that the ranks' own amaxes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        with torch.no_grad():
            self.up.weight[-HIDDEN // 10 :] *= 3
            self.down.weight[:, -HIDDEN // 10 :] *= 2

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_block(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        block = Block()
    fp4engine.convert(block)
    return block


@contextmanager
def products() -> Generator[Operands]:
    """Region in which every operand of every product is noted, as codes."""
    product, operands = Eager.product, []

    def heard(b: Eager, name: str, left: Operand, right: Operand, *arguments: Any) -> Tensor:
        operands.extend(((f"{name} left", copied(left)), (f"{name} right", copied(right))))
        return product(b, name, left, right, *arguments)

    with (
        mock.patch.object(Call, "fuses", lambda *_: False),  # one operation after the other
        mock.patch.object(Eager, "product", heard),
        mock.patch.object(eager, "transient_form", lambda *_: "codes"),
    ):
        yield operands


def copied(operand: Operand) -> Operand:
    """``operand`` in memory of its own: FSDP2 frees what it has gathered."""
    data, scales, amax = (None if tensor is None else tensor.clone() for tensor in operand.tensors)
    assert data is not None
    return operand._replace(data=data, scale_inv=scales, amax=amax)


def train(
    block: nn.Module, device: str, data: int, part: Callable[[Tensor], Tensor], **region: Any
) -> tuple[list[Tensor], Operands]:
    """One step: output, gradient of the input and of every parameter; and the operands of all products.

    Args:
        region: what else ``fp4engine.autocast`` is told.
    """
    fp4engine.manual_seed(3)
    generator = torch.Generator().manual_seed(10 + data)
    whole, direction = torch.randn(2, BATCH, SEQUENCE, WIDTH, generator=generator).to(device).unbind()
    x = part(whole).clone().requires_grad_()
    with products() as operands, fp4engine.autocast(recipe=RECIPE, **region):
        y = block(x)
        y.backward(part(direction))
    return [y.detach(), x.grad, *(whole_of(parameter.grad) for parameter in block.parameters())], operands


def whole_of(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alone(device: str, data: int, rank: int) -> tuple[list[Tensor], Operands]:
    """The step of one process that draws in the name of ``rank``."""
    drawn = ops.rank_bits
    with mock.patch.object(ops, "rank_bits", lambda asked=None: drawn(rank if asked is None else asked)):
        return train(make_block(device), device, data, lambda tensor: tensor)


def differs(part: Operand, whole: Operand, index: int, ranks: int) -> bool:
    """Whether an operand is not, code by code, part ``index`` of the one that one process made."""
    rows = slice(None) if part.rows == whole.rows else slice(index * part.rows, (index + 1) * part.rows)
    expected = [tensor if len(tensor) == 1 else tensor[rows] for tensor in whole.tensors if tensor is not None]
    if part.cols != whole.cols:
        expected = [tensor.chunk(ranks, 1)[index] if tensor.ndim == 2 else tensor for tensor in expected]
    found = [tensor for tensor in part.tensors if tensor is not None]
    assert len(found) == len(expected) == 3, (part, whole)
    return not all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in zip(found, expected, strict=True))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def compare(device: str, block: nn.Module, dp: DeviceMesh | None, tp: DeviceMesh | None, shards_sequence: bool) -> Any:
    """What differs on this rank between a step of ``block``, which is parallel already, and that of one process."""
    index, ranks = (0, 1) if tp is None else (tp.get_local_rank(), tp.size())
    data, replicas = (0, 1) if dp is None else (dist.get_rank() // ranks, dist.get_world_size() // ranks)
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor.chunk(ranks, 1)[index] if shards_sequence else tensor
    results, parts = train(block, device, data, part)
    first = dist.get_rank() if tp is None else int(tp.mesh.min())
    expected, wholes = alone(device, data, first)
    y, dx, *gradients = expected
    for gradient in gradients if replicas > 1 else ():
        dist.all_reduce(gradient)  # over ranks that share a replica too, which all have the same
        gradient /= dist.get_world_size()
    return compared(parts, wholes, results, [part(y), part(dx), *gradients], index, ranks)


def compared(
    parts: Operands, wholes: Operands, results: list[Tensor], wanted: list[Tensor], index: int, ranks: int
) -> dict[str, Any]:
    """Which operands are not part ``index`` of ``ranks`` of the whole, and how far results are from those wanted."""
    assert [label for label, _ in parts] == [label for label, _ in wholes]
    wrong = [
        f"{label} of product {number // 2}"
        for number, ((label, mine), (_, whole)) in enumerate(zip(parts, wholes, strict=True))
        if differs(mine, whole, index, ranks)
    ]
    distances = [float((a - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)]
    return {"operands": len(parts), "different": wrong, "distance": max(distances)}


def layouts(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name, and what compares this rank under it."""
    kind, ranks = torch.device(device).type, dist.get_world_size()
    line = init_device_mesh(kind, (ranks,))

    def tensor_parallel(sequence: bool) -> Any:
        block = make_block(device)
        parallelize_module(block, line, SEQUENCE_PARALLEL if sequence else PARALLEL)
        return compare(device, block, None, line, sequence)

    def sharded(codes: bool, mesh: DeviceMesh = line) -> Any:
        block = make_block(device)
        if codes:
            assert not fp4_all_gather(block, RECIPE, mesh).in_high_precision
        return compare(device, fully_shard(block, mesh=mesh), mesh, None, False)

    def both(square: DeviceMesh) -> Any:
        block = make_block(device)
        parallelize_module(block, square["tp"], SEQUENCE_PARALLEL)
        fully_shard(block, mesh=square["dp"])
        return compare(device, block, square["dp"], square["tp"], True)

    def in_context() -> Any:
        """Each rank has the rows of one sequence that follow those of the ranks before it, and the whole weights."""
        rank, group = dist.get_rank(), line.get_group()
        part: Callable[[Tensor], Tensor] = lambda tensor: tensor.flatten(0, 1).chunk(ranks)[rank][None]
        (y, dx, *gradients), parts = train(make_block(device), device, 0, part, cp_group=group)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        (whole_y, whole_dx, *expected), wholes = alone(device, 0, 0)
        return compared(parts, wholes, [y, dx, *gradients], [part(whole_y), part(whole_dx), *expected], rank, ranks)

    yield f"TP={ranks}", lambda: tensor_parallel(False)
    yield f"TP={ranks} with SP", lambda: tensor_parallel(True)
    yield f"CP={ranks}", in_context
    yield f"FSDP2={ranks}, BF16 gather", lambda: sharded(False)
    yield f"FSDP2={ranks}, FP4 gather", lambda: sharded(True)
    if ranks >= 4:
        square = init_device_mesh(kind, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        yield f"FSDP2={ranks // 2} x TP=2 with SP", lambda: both(square)
        hybrid = init_device_mesh(kind, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        yield f"HSDP 2 x {ranks // 2}, FP4 gather", lambda: sharded(True, hybrid)
