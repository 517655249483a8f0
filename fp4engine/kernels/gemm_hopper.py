"""The GEMM of :mod:`fp4engine.kernels.gemm` for large outputs on sm_90, warp-specialized by hand.

    y[m, n] = round_out(fl(fl(alpha * sum_k left[m, k] * right[n, k]) + bias[n]) (+ out[m, n]))

A program walks over output tiles of 128x256, see :func:`programs_for`. A producer warp keeps a ring of K steps full
through the copy engine; two consumer warpgroups own 64 rows of the tile each. They share the ring and nothing else, so
one may finish and store its half while the other already multiplies the next tile: the epilogue hides behind the
tensor cores. That is worth 2-7% over the same tile written as one pipelined loop, and the kernel runs at 0.97-1.05x the
rate of cuBLAS in BF16 (H200, 8,192 tokens, Llama-3 shapes; ``benchmarks/results/gemm.json``).

The operands are values of BF16 or FP16, or both of FP8. FP8 tensor cores keep about 14 bits of a sum, so there each K
step of 128 terms is a sum of its own, which FP32 adds to the rest. For that a consumer holds two accumulators, and a
tile is 128x128.

Dims: M rows of left, N rows of right, K the contracted (last) axis of both.
"""

from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp4engine.constants import FP8_TILE
from fp4engine.kernels.gemm_launch import Product, block_of
from fp4engine.kernels.launch import Block, LaunchBuilder, Matrix

# Triton 3.6 to 3.8 know the copies by their older names, which 3.9 has taken away.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

TILE_M, TILE_N, TILE_K = 128, 256, 64
HALF_M, HALF_N = TILE_M // 2, TILE_N // 2
"""A consumer's rows, and the columns that it stages for one store."""

BLOCKS = ((HALF_M, TILE_K), (TILE_N, TILE_K), (HALF_M, HALF_N))
FP8_BLOCKS = ((HALF_M, FP8_TILE), (FP8_TILE, FP8_TILE), (HALF_M, FP8_TILE // 2))
"""What the copy engine moves at once, of left, right and the output."""

GROUP_M = 16
"""Tile rows walked together; 4, 8 and 16 are within 1% of each other at Llama shapes."""

TERMS = 8192
"""Terms of one output's sum that a program adds up, in as many tiles as that takes: some 80 us on an H200."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Per thread: 128 for the accumulator and room for the epilogue; the producer only counts."""


@gluon.jit
def walk(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    band = GROUP * tiles_n
    first = (index // band) * GROUP
    height = min(tiles_m - first, GROUP)
    return first + (index % band) % height, (index % band) // height


@gluon.jit
def produce(
    left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TILE_M: gl.constexpr = 2 * left_desc.block_shape[0]
    TILE_N: gl.constexpr = right_desc.block_shape[0]
    TILE_K: gl.constexpr = right_desc.block_shape[1]
    tiles_m = gl.cdiv(M, TILE_M)
    tiles_n = gl.cdiv(N, TILE_N)
    steps = gl.cdiv(K, TILE_K)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            slot = count % STAGES
            # An empty ring counts as drained once already: the first lap must not wait.
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes)
            row = tile_m * TILE_M
            k = step * TILE_K
            load_tile(left_desc, [row, k], ready, left_ring.index(2 * slot))
            load_tile(left_desc, [row + TILE_M // 2, k], ready, left_ring.index(2 * slot + 1))
            load_tile(right_desc, [tile_n * TILE_N, k], ready, right_ring.index(slot))
            count += 1


@gluon.jit
def _epilogue(
    acc, row, col, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    if LEFT_ROWS:
        left = gl.load(left_amax_ptr + rows, mask=rows < M, other=0.0).expand_dims(1)
    else:
        left = gl.load(left_amax_ptr)
    if RIGHT_ROWS:
        right = gl.load(right_amax_ptr + cols, mask=cols < N, other=0.0).expand_dims(0)
    else:
        right = gl.load(right_amax_ptr)
    result = acc * gl.div_rn(left * right, numerator)
    if HAS_BIAS:
        result += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32).expand_dims(0)
    return result


@gluon.jit
def store_part(
    acc, row, col, out_desc, staging, arrived, phase, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    result = _epilogue(
        acc, row, col, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS
    )
    tma.store_wait(0)  # the previous half has left the staging tile
    if ACCUMULATE:
        fence_async_shared()
        mbarrier.expect(arrived, out_desc.block_type.nbytes)
        load_tile(out_desc, [row, col], arrived, staging)
        mbarrier.wait(arrived, phase)
        result += staging.load(acc.type.layout).to(gl.float32)
    staging.store(result.to(out_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, [row, col], staging)


@gluon.jit
def _consume(
    PART: gl.constexpr, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TILE_M: gl.constexpr = 2 * left_ring.shape[1]
    TILE_N: gl.constexpr = right_ring.shape[1]
    TILE_K: gl.constexpr = right_ring.shape[2]
    FP8: gl.constexpr = left_ring.dtype.is_fp8()
    # The tensor cores' own layouts of 64 rows by a whole tile's columns, and by half of them, for 32 bytes of a row.
    DEPTH: gl.constexpr = 32 if FP8 else 16  # pyright: ignore[reportAssignmentType]
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, DEPTH]))
    half_layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N // 2, DEPTH]))
    tiles_m = gl.cdiv(M, TILE_M)
    tiles_n = gl.cdiv(N, TILE_N)
    steps = gl.cdiv(K, TILE_K)
    staging = stagings.index(PART)
    arrived = arrivals.index(PART)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros((TILE_M // 2, TILE_N), gl.float32, layout)
        if FP8:
            for _ in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                part = warpgroup_mma(
                    left_ring.index(2 * slot + PART), right_ring.index(slot).permute((1, 0)),
                    gl.zeros((TILE_M // 2, TILE_N), gl.float32, layout), use_acc=False, is_async=True,
                )  # fmt: skip
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(slot), count=1)
                acc += part
                count += 1
        else:
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            token = warpgroup_mma(
                left_ring.index(2 * slot + PART),
                right_ring.index(slot).permute((1, 0)),
                acc,
                use_acc=False,
                is_async=True,
            )
            acc = warpgroup_mma_wait(1, deps=(token,))
            count += 1
            for _ in range(1, steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                following = warpgroup_mma(
                    left_ring.index(2 * slot + PART), right_ring.index(slot).permute((1, 0)), acc, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=(following,))
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                count += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        low, high = acc.reshape((TILE_M // 2, 2, TILE_N // 2)).permute((0, 2, 1)).split()
        row = tile_m * TILE_M + PART * (TILE_M // 2)
        col = tile_n * TILE_N
        store_part(
            gl.convert_layout(low, half_layout, assert_trivial=True), row, col, out_desc, staging, arrived, 0,
            left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
        )  # fmt: skip
        store_part(
            gl.convert_layout(high, half_layout, assert_trivial=True), row, col + TILE_N // 2,
            out_desc, staging, arrived, 1,
            left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def gemm_hopper_kernel(
    left_desc, right_desc, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, K,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = left_desc.block_shape[0]
    TILE_N: gl.constexpr = right_desc.block_shape[0]
    TILE_K: gl.constexpr = right_desc.block_shape[1]
    left_ring = gl.allocate_shared_memory(left_desc.dtype, [2 * STAGES, ROWS, TILE_K], left_desc.layout)
    right_ring = gl.allocate_shared_memory(right_desc.dtype, [STAGES, TILE_N, TILE_K], right_desc.layout)
    stagings = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, out_desc.block_shape[1]], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrivals = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for part in gl.static_range(2):
        mbarrier.init(arrivals.index(part), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES,
        )),
        (_consume, (
            1, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES,
        )),
        (produce, (
            left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, GROUP, STAGES,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


_GLUON_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@cache
def layout_of(shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """How a block of ``shape`` lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), _GLUON_DTYPES[dtype])


def stages_for(dtype: torch.dtype, out_dtype: torch.dtype) -> int:
    """K steps in the ring beside two staging halves, within 227 KiB.

    A step has 48 KiB and a half 8,192 elements; of FP8, 32 KiB and 4,096 elements.
    """
    if dtype.itemsize == 1:
        return 6
    return 3 if out_dtype == torch.float32 else 4


class Descriptor(TensorDescriptor):
    """Gluon's view of a matrix for the copy engine, without its checks: ``Matrix.is_aligned`` has made them."""

    def __post_init__(self) -> None:
        pass


def programs_for(tiles: int, k: int, multiprocessors: int) -> int:
    """Whole waves of a program per multiprocessor, each with about :data:`TERMS` terms in its tiles, or with one tile.

    While another kernel, such as a collective, has some multiprocessors, programs wait for them, and few tiles with
    each. A program costs the time to fill its ring.
    """
    together = -(-TERMS // max(k, 1))
    waves = -(-tiles // (multiprocessors * together))
    return min(tiles, waves * multiprocessors)


def add_hopper(builder: LaunchBuilder, product: Product, multiprocessors: int) -> None:
    """Multiply matrices that are aligned for the copy engine, none of them empty."""
    m, n, k = product.shape
    dtype = product.left.meta.dtype
    left, right, out = BLOCKS if dtype.itemsize > 1 else FP8_BLOCKS
    tiles = -(-m // TILE_M) * -(-n // right[0])
    programs = programs_for(tiles, k if dtype.itemsize > 1 else k // 4, multiprocessors)
    builder.step(
        gemm_hopper_kernel, programs, block(product.left, left), block(product.right, right),
        block(product.out, out), *product.scales, m, n, k, *product.flags, GROUP_M,
        stages_for(dtype, product.out.meta.dtype), PRODUCER_REGISTERS, CONSUMER_REGISTERS, num_warps=4,
    )  # fmt: skip


def block(matrix: Matrix, shape: tuple[int, int]) -> Block:
    """``matrix`` in blocks of ``shape``, as Gluon describes them to the copy engine."""
    return block_of(matrix, *shape, Descriptor, layout_of(shape, matrix.meta.dtype))
