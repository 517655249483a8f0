"""Whether a tensor has the bytes that it had, by the checksum of :mod:`fp4engine.reference.checksum`, on the device.

The first kernel reads the tensor once. Each of its programs takes every ``programs``-th tile and leaves the sum of what
it has read, so that the number of sums does not grow with the tensor. The second one compares these sums with earlier
ones. Where they differ, it says so in a flag, and fills buffers that were made of the tensor with 0xFF, which is NaN in
every format of scales and amaxes: what multiplies by them is not finite then, long before the host looks at the flag.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import CHECKSUM_FACTORS, CHECKSUM_STEP
from fp4engine.kernels.launch import Launch, LaunchBuilder, TensorMeta, meta_of, resolver

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


@triton.jit(do_not_specialize=["programs"])
def checksum_kernel(x_ptr, checksums_ptr, numel, programs, BITS: tl.constexpr, TILE: tl.constexpr):
    """``x_ptr``: ``numel`` contiguous elements of 8, 16 or 32 bits; ``checksums_ptr``: int64 [programs]."""
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
    tl.store(checksums_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count", "left_bytes", "right_bytes"])
def compare_kernel(
    checksums_ptr, first_ptr, broken_ptr, count, left_ptr, left_bytes, right_ptr, right_bytes, TILE: tl.constexpr
):
    """One program, which compares ``count`` <= TILE checksums.

    ``checksums_ptr``, ``first_ptr``: int64 [count]; ``broken_ptr``: int32 [1], set to 1 or left alone; ``left_ptr``,
    ``right_ptr``: uint8 [bytes] or None, filled with 0xFF or left alone.
    """
    place = tl.arange(0, TILE)
    now = tl.load(checksums_ptr + place, mask=place < count, other=0)
    differs = now != tl.load(first_ptr + place, mask=place < count, other=0)
    if tl.max(differs.to(tl.int32), axis=0) != 0:
        tl.store(broken_ptr, 1)
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
    _add_checksum(builder, x)
    return builder.launch()


@resolver
def resolve_comparison(x: TensorMeta, spoiled: tuple[TensorMeta, ...], device: torch.device) -> Launch:
    """``(x, sums, first, broken, *spoiled)``; writes ``sums``, and perhaps ``broken`` and ``spoiled``."""
    builder = LaunchBuilder(device, inputs=4 + len(spoiled))
    _add_checksum(builder, x)
    _, sums, first, broken, *places = builder.inputs
    filled = [each for place, its in zip(places, spoiled, strict=True) for each in (place, its.shape[0])]
    filled += [None, 0] * (MOST_SPOILED - len(spoiled))
    builder.step(compare_kernel, 1, sums, first, broken, programs_of(x.shape[0]), *filled, MOST_PROGRAMS, num_warps=4)
    return builder.launch()


def _add_checksum(builder: LaunchBuilder, x: TensorMeta) -> None:
    numel, programs = x.shape[0], programs_of(x.shape[0])
    builder.step(
        checksum_kernel, programs, *builder.inputs[:2], numel, programs, 8 * x.dtype.itemsize, TILE, num_warps=4
    )


def checksums(x: Tensor) -> Tensor:
    """int64 [programs], whose sum is the checksum of ``x``: contiguous elements of at most 32 bits."""
    flat = x.view(-1)
    sums = torch.empty(programs_of(flat.numel()), dtype=torch.int64, device=x.device)
    resolve_checksum(meta_of(flat), x.device)(flat, sums)
    return sums


def compare(x: Tensor, first: Tensor, broken: Tensor, spoiled: list[Tensor]) -> None:
    """Set ``broken`` and fill ``spoiled`` if the :func:`checksums` of ``x`` are not ``first``.

    Args:
        broken: int32 [1].
        spoiled: at most two, uint8 [bytes], contiguous.
    """
    flat = x.view(-1)
    launch = resolve_comparison(meta_of(flat), tuple(meta_of(each) for each in spoiled), x.device)
    launch(flat, torch.empty_like(first), first, broken, *spoiled)
