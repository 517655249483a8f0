"""Whether a tensor has the bytes that it had, by the checksum of :mod:`fp4engine.reference.checksum`, on the device.

Either kernel reads the tensor once. Each of its programs takes every ``programs``-th tile and sums what it has read, so
that the number of sums does not grow with the tensor. The first kernel leaves the sums, and programs of the second one
compare theirs with these. A program that finds another sum says so in a flag, and fills buffers that were made of the
tensor with 0xFF, which is NaN in every format of scales and amaxes: what multiplies by them is not finite then, long
before the host looks at the flag.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import CHECKSUM_FACTORS, CHECKSUM_STEP
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, meta_of, resolver

STEP = tl.constexpr(CHECKSUM_STEP)
FIRST, SECOND = (tl.constexpr(factor) for factor in CHECKSUM_FACTORS)
TILE = 4096
"""Elements that a program reads at a time."""
MOST_PROGRAMS = 1024
MOST_SPOILED = 2
"""So many buffers can be filled: one for each direction of a cast."""


@triton.jit
def mix(word):
    """As the reference's, of uint32."""
    word ^= word >> 16
    word *= FIRST
    word ^= word >> 13
    word *= SECOND
    return word ^ (word >> 16)


@triton.jit
def sum_of_program(x_ptr, numel, programs, BITS: tl.constexpr, TILE: tl.constexpr):
    """An int64, of what this program reads of ``x_ptr``: ``numel`` contiguous elements of 8, 16 or 32 bits."""
    total = tl.zeros([], tl.int64)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    for _ in range(tl.program_id(0), tl.cdiv(numel, TILE), programs):
        x = tl.load(x_ptr + place, mask=place < numel, other=0)
        if BITS == 8:
            word = x.to(tl.uint8, bitcast=True).to(tl.uint32)
        elif BITS == 16:
            word = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            word = x.to(tl.uint32, bitcast=True)
        mixed = mix(word + place.to(tl.uint32) * STEP).to(tl.int64)
        total += tl.sum(tl.where(place < numel, mixed, 0))
        place += programs.to(tl.int64) * TILE
    return total


@triton.jit(do_not_specialize=["programs"])
def checksum_kernel(x_ptr, checksums_ptr, numel, programs, BITS: tl.constexpr, TILE: tl.constexpr):
    """``checksums_ptr``: int64 [programs]."""
    tl.store(checksums_ptr + tl.program_id(0), sum_of_program(x_ptr, numel, programs, BITS, TILE))


@triton.jit(do_not_specialize=["programs", "left_bytes", "right_bytes"])
def compare_kernel(
    x_ptr, first_ptr, broken_ptr, numel, programs, left_ptr, left_bytes, right_ptr, right_bytes,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``first_ptr``: int64 [programs]; ``broken_ptr``: int32 [1], set to 1 or left alone; ``left_ptr``,
    ``right_ptr``: uint8 [bytes] or None, filled with 0xFF or left alone.
    """
    if sum_of_program(x_ptr, numel, programs, BITS, TILE) != tl.load(first_ptr + tl.program_id(0)):
        tl.store(broken_ptr, 1)
        place = tl.arange(0, TILE)
        spoiled = tl.full([TILE], 0xFF, tl.uint8)
        if left_ptr is not None:
            for start in range(0, left_bytes, TILE):
                tl.store(left_ptr + start + place, spoiled, mask=start + place < left_bytes)
        if right_ptr is not None:
            for start in range(0, right_bytes, TILE):
                tl.store(right_ptr + start + place, spoiled, mask=start + place < right_bytes)


def programs_of(numel: int) -> int:
    """How many programs read a tensor of ``numel`` elements, and so how many sums it has."""
    return max(min(-(-numel // TILE), MOST_PROGRAMS), 1)


@resolver
def resolve_checksum(x: TensorMeta, device: torch.device) -> Launch:
    """``(x, sums)``; writes ``sums``."""
    builder = LaunchBuilder(device, inputs=2)
    numel, programs = x.shape[0], programs_of(x.shape[0])
    bits = 8 * x.dtype.itemsize
    builder.step(checksum_kernel, programs, *builder.inputs, numel, programs, bits, TILE, num_warps=4)
    return builder.launch()


def add_comparison(
    builder: LaunchBuilder, x: Place, meta: TensorMeta, first: Place, broken: Place, spoiled: Sequence[Matrix]
) -> None:
    """Set ``broken`` and fill ``spoiled`` if the :func:`checksums` of ``x`` are not ``first``.

    Args:
        broken: int32 [1].
        spoiled: at most two, uint8 [bytes], contiguous.
    """
    numel = math.prod(meta.shape)
    programs, bits = programs_of(numel), 8 * meta.dtype.itemsize
    filled = [each for matrix in spoiled for each in (matrix.place, matrix.shape[0])]
    filled += [None, 0] * (MOST_SPOILED - len(spoiled))
    builder.step(compare_kernel, programs, x, first, broken, numel, programs, *filled, bits, TILE, num_warps=4)


@resolver
def resolve_comparison(x: TensorMeta, spoiled: tuple[TensorMeta, ...], device: torch.device) -> Launch:
    """``(x, first, broken, *spoiled)``; writes perhaps ``broken`` and ``spoiled``."""
    builder = LaunchBuilder(device, inputs=3 + len(spoiled))
    place, first, broken, *places = builder.inputs
    add_comparison(builder, place, x, first, broken, [Matrix(*each) for each in zip(places, spoiled, strict=True)])
    return builder.launch()


def checksums(x: Tensor) -> Tensor:
    """int64 [programs], whose sum is the checksum of ``x``: contiguous elements of at most 32 bits."""
    flat = x.view(-1)
    sums = torch.empty(programs_of(flat.numel()), dtype=torch.int64, device=x.device)
    resolve_checksum(meta_of(flat), x.device)(flat, sums)
    return sums


def compare(x: Tensor, first: Tensor, broken: Tensor, spoiled: Sequence[Tensor]) -> None:
    """As :func:`add_comparison`, of tensors."""
    launch = resolve_comparison(meta_of(x), tuple(meta_of(each) for each in spoiled), x.device)
    launch(x, first, broken, *spoiled)
