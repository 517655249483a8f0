"""Statistics of a tensor: the largest magnitude of each channel, and sums over the tensor.

    x [R, C] -> maxima and sums of chunks of rows, 128 channels at a time -> maxima and sums of x

Legend: x is [R, C], at any strides; a channel is a column.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.kernels.block_cast import load_tile, magnitudes
from fp4engine.kernels.blocks import TILE_C
from fp4engine.kernels.launch import LaunchBuilder, Place, TensorMeta, device_facts

TILE_R = 32
PARTS = tl.constexpr(64)
"""Programs of the first kernel that one of the second reads at once."""
CHANNEL_PROGRAMS_PER_SM = 4


class Target(NamedTuple):
    """Where the figures of one tensor or operand go: the two vectors, and its first entry in each."""

    numbers: Place
    maxima: Place
    first: int
    first_maximum: int


@triton.jit
def channels_kernel(
    x_ptr, amax_ptr, sums_ptr, R, C, stride_r, stride_c, chunk, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """Of ``chunk`` rows of 128 columns: largest finite magnitudes FP32 [chunks, C], and sums FP64 [programs, 2]."""
    across = tl.cdiv(C, TILE_C)
    col0 = (tl.program_id(0) % across) * TILE_C
    first = (tl.program_id(0) // across) * chunk
    most = tl.zeros([TILE_R, TILE_C], tl.float32)
    squares = tl.zeros([TILE_R, TILE_C], tl.float32)
    nonfinite = tl.zeros([TILE_R, TILE_C], tl.int32)
    for step in range(0, tl.cdiv(tl.minimum(chunk, R - first), TILE_R)):
        x = load_tile(x_ptr, R, C, stride_r, stride_c, first + step * TILE_R, col0, TILE_R, TILE_C)
        is_finite = magnitudes(x) < 0x7F800000
        x = tl.where(is_finite, tl.abs(x), 0.0)
        most = tl.maximum(most, x)
        squares += x * x
        nonfinite += (~is_finite).to(tl.int32)
    col = col0 + tl.arange(0, TILE_C)
    tl.store(amax_ptr + (first // chunk).to(tl.int64) * C + col, tl.max(most, axis=0), mask=col < C)
    flat: tl.constexpr = TILE_R * TILE_C
    tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(tl.reshape(nonfinite, [flat])).to(tl.float64))
    tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(tl.reshape(squares, [flat]).to(tl.float64)))


@triton.jit(do_not_specialize=["first", "first_maximum"])
def fold_channels_kernel(
    amax_ptr, sums_ptr, out_ptr, maxima_ptr, first, first_maximum, C, chunks, programs, TILE_C: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Maxima of all chunks, FP64 [C]; the last program writes the two sums. Both have their place in a vector."""
    out_ptr += first
    maxima_ptr += first_maximum
    if tl.program_id(0) < tl.cdiv(C, TILE_C):
        col = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
        most = tl.zeros([TILE_C], tl.float32)
        amax_ptrs = amax_ptr + col
        for _ in range(0, chunks):
            most = tl.maximum(most, tl.load(amax_ptrs, mask=col < C, other=0.0))
            amax_ptrs += C
        tl.store(maxima_ptr + col, most.to(tl.float64), mask=col < C)
    else:
        entry = tl.arange(0, 2)[None, :]
        sums = tl.zeros([PARTS, 2], tl.float64)
        for start in range(0, programs, PARTS):
            program = start + tl.arange(0, PARTS)[:, None]
            sums += tl.load(sums_ptr + (2 * program + entry), mask=program < programs, other=0.0)
        tl.store(out_ptr + tl.arange(0, 2), tl.sum(sums, axis=0))


def add_channels(builder: LaunchBuilder, x: TensorMeta, place: Place, target: Target) -> None:
    """Count a tensor [R, C], neither 0."""
    rows, cols = x.shape
    _, multiprocessors = device_facts(builder.device)
    across = -(-cols // TILE_C)
    steps = -(-rows // TILE_R)
    chunks = min(steps, max(1, -(-CHANNEL_PROGRAMS_PER_SM * multiprocessors // across)))
    chunk = -(-steps // chunks) * TILE_R
    chunks = -(-rows // chunk)
    amax = builder.buffer((chunks, cols), torch.float32)
    sums = builder.buffer((chunks * across, 2), torch.float64)
    builder.step(
        channels_kernel, chunks * across, place, amax, sums, rows, cols, *x.strides, chunk, TILE_R, TILE_C, num_warps=8
    )
    builder.step(
        fold_channels_kernel, across + 1, amax, sums, *target, cols, chunks, chunks * across, TILE_C, int(PARTS),
        num_warps=4,
    )  # fmt: skip
