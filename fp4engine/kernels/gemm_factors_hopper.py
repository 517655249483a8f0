"""The GEMM of :mod:`fp4engine.kernels.gemm_factors` for large outputs on sm_90, warp-specialized by hand.

    y[m, n] = round(alpha[m, n] * sum over groups g of (F_left[g, m] * F_right[g, n]) * partial_g[m, n] + bias[n])

The roles are those of :mod:`fp4engine.kernels.gemm_hopper`, and a third one: two warps bring factors into shared
memory, where both consumers read them. A consumer has no registers for the partial sums of a tile's 256 columns beside
its sums, so it multiplies the terms of a group with 128 columns at a time. Where a step of the ring is several groups,
the tile has no other columns.

Dims: M rows of left, N rows of right, K the contracted (last) axis of both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp4engine.kernels.gemm_hopper import (
    BLOCKS,
    CONSUMER_REGISTERS,
    GROUP_M,
    HALF_M,
    PRODUCER_REGISTERS,
    TILE_K,
    TILE_M,
    TILE_N,
    block,
    produce,
    programs_for,
    store_part,
    walk,
)
from fp4engine.kernels.gemm_launch import Product
from fp4engine.kernels.launch import LaunchBuilder, Place

STAGES = 4
"""Steps in the ring, up to 48 KiB each. What is left holds factors and two staging tiles."""

WIDTH = TILE_N // 2
"""Columns that a consumer multiplies at a time."""
OUT_BLOCK = (HALF_M, WIDTH // 2)
LOADER_WARPS = 2


def right_block(terms: int) -> tuple[int, int]:
    """Rows of the right operand and terms that a step has, where groups have ``terms``."""
    return (TILE_N if terms >= TILE_K else WIDTH), TILE_K


@gluon.jit
def _load_factors(
    left_factor_ptr, right_factor_ptr, left_factors, right_factors, full, empty, M, N, K, stride_left, stride_right,
    LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr, TERMS: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Bring the factors of a tile's rows and columns, those of the groups of a step or of one group of more terms.

    They are stored as soon as both consumers have read those before.
    """
    GROUPS: gl.constexpr = left_factors.shape[0]
    TILE_M: gl.constexpr = left_factors.shape[1]
    TILE_N: gl.constexpr = right_factors.shape[1]
    row_layout: gl.constexpr = gl.constexpr(gl.BlockedLayout([TILE_M // (32 * WARPS)], [32], [WARPS], [0]))
    col_layout: gl.constexpr = gl.constexpr(gl.BlockedLayout([TILE_N // (32 * WARPS)], [32], [WARPS], [0]))
    tiles_m = gl.cdiv(M, TILE_M)
    tiles_n = gl.cdiv(N, TILE_N)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        rows = tile_m * TILE_M + gl.arange(0, TILE_M, row_layout)
        cols = tile_n * TILE_N + gl.arange(0, TILE_N, col_layout)
        for first in range(0, K, GROUPS * TERMS):
            left, right = (), ()
            for group in gl.static_range(GROUPS):
                term = first + group * TERMS
                if LEFT_GROUP:
                    left += (gl.load(left_factor_ptr + (term // LEFT_GROUP) * stride_left + rows),)
                if RIGHT_GROUP:
                    right += (gl.load(right_factor_ptr + (term // RIGHT_GROUP) * stride_right + cols),)
            mbarrier.wait(empty, (count & 1) ^ 1)
            for group in gl.static_range(GROUPS):
                if LEFT_GROUP:
                    left_factors.index(group).store(left[group])
                if RIGHT_GROUP:
                    right_factors.index(group).store(right[group])
            mbarrier.arrive(full, count=1)
            count += 1


@gluon.jit
def _halves(x):
    """The left and the right half of the columns; nothing moves between threads."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    left, right = x.reshape((ROWS, 2, WIDTH)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _add(acc, partial, left, right, LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr):
    """``acc + partial * left * right``, with the factors of rows and of columns; an operand without has none."""
    if LEFT_GROUP and RIGHT_GROUP:
        return gl.fma(partial * left.expand_dims(1), right.expand_dims(0) + gl.zeros_like(acc), acc)
    elif LEFT_GROUP:
        return acc + partial * left.expand_dims(1)
    else:
        return acc + partial * right.expand_dims(0)


@gluon.jit
def _consume(
    PART: gl.constexpr, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, left_ring, right_ring, stagings,
    full, empty, left_factors, right_factors, factors_full, factors_empty, arrivals, M, N, K,
    LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr, TERMS: gl.constexpr,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Rows ``PART`` of a tile, ``WIDTH`` columns at a time."""
    ROWS: gl.constexpr = left_ring.shape[1]
    TILE_N: gl.constexpr = right_ring.shape[1]
    TILE_K: gl.constexpr = right_ring.shape[2]
    HALVES: gl.constexpr = TILE_N // WIDTH
    # A group is several steps of the ring, or a step is several groups.
    STEPS: gl.constexpr = (TERMS + TILE_K - 1) // TILE_K
    SLICE: gl.constexpr = TERMS if TERMS < TILE_K else TILE_K
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(N, TILE_N)
    staging = stagings.index(PART)
    arrived = arrivals.index(PART)
    count = 0
    brought = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        low = gl.zeros((ROWS, WIDTH), gl.float32, layout)
        high = gl.zeros((ROWS, WIDTH), gl.float32, layout)
        for _ in range(0, K, STEPS * TILE_K):
            for first in gl.static_range(0, TILE_K, SLICE):
                for half in gl.static_range(HALVES):
                    partial = gl.zeros((ROWS, WIDTH), gl.float32, layout)
                    for step in gl.static_range(STEPS):
                        slot = (count + step) % STAGES
                        if first == 0 and half == 0:
                            mbarrier.wait(full.index(slot), ((count + step) // STAGES) & 1)
                        left = left_ring.index(2 * slot + PART).slice(first, SLICE, 1)
                        right = right_ring.index(slot).slice(half * WIDTH, WIDTH, 0).slice(first, SLICE, 1)
                        partial = warpgroup_mma(left, right.permute((1, 0)), partial, use_acc=step > 0, is_async=True)
                    if first == 0 and half == 0:
                        mbarrier.wait(factors_full, brought & 1)
                    if half == 0:
                        left_f = left_factors.index(first // SLICE).slice(PART * ROWS, ROWS, 0)
                        left_f = left_f.load(gl.SliceLayout(1, layout))
                    partial = warpgroup_mma_wait(0, deps=(partial,))
                    if first + SLICE == TILE_K and half + 1 == HALVES:
                        for step in gl.static_range(STEPS):
                            mbarrier.arrive(empty.index((count + step) % STAGES), count=1)
                    right_f = right_factors.index(first // SLICE).slice(half * WIDTH, WIDTH, 0)
                    right_f = right_f.load(gl.SliceLayout(0, layout))
                    if half == 0:
                        low = _add(low, partial, left_f, right_f, LEFT_GROUP, RIGHT_GROUP)
                    else:
                        high = _add(high, partial, left_f, right_f, LEFT_GROUP, RIGHT_GROUP)
            mbarrier.arrive(factors_empty, count=1)
            brought += 1
            count += STEPS
        row = tile_m * 2 * ROWS + PART * ROWS
        col = tile_n * TILE_N
        for half in gl.static_range(HALVES):
            pieces = _halves(low if half == 0 else high)
            for i in gl.static_range(2):
                store_part(
                    pieces[i], row, col + half * WIDTH + i * out_desc.block_shape[1], out_desc, staging, arrived, i,
                    left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS,
                    ACCUMULATE,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def factored_hopper_kernel(
    left_desc, right_desc, out_desc, left_factor_ptr, right_factor_ptr, left_amax_ptr, right_amax_ptr, bias_ptr,
    numerator, M, N, K, stride_left, stride_right,
    LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr, TERMS: gl.constexpr,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, LOADER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``TERMS``: of a group whose factors are the same in both operands. K: a multiple of it and of a step's.

    Factors are [groups, stride], their strides multiples of a tile's rows and columns.
    """
    ROWS: gl.constexpr = left_desc.block_shape[0]
    TILE_N: gl.constexpr = right_desc.block_shape[0]
    TILE_K: gl.constexpr = right_desc.block_shape[1]
    GROUPS: gl.constexpr = (TILE_K + TERMS - 1) // TERMS
    plain: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
    left_ring = gl.allocate_shared_memory(left_desc.dtype, [2 * STAGES, ROWS, TILE_K], left_desc.layout)
    right_ring = gl.allocate_shared_memory(right_desc.dtype, [STAGES, TILE_N, TILE_K], right_desc.layout)
    stagings = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, out_desc.block_shape[1]], out_desc.layout)
    left_factors = gl.allocate_shared_memory(gl.float32, [GROUPS, 2 * ROWS], plain)
    right_factors = gl.allocate_shared_memory(gl.float32, [GROUPS, TILE_N], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    factors_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    factors_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    arrivals = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    mbarrier.init(factors_full, count=1)
    mbarrier.init(factors_empty, count=2)
    for part in gl.static_range(2):
        mbarrier.init(arrivals.index(part), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, left_ring, right_ring, stagings,
            full, empty, left_factors, right_factors, factors_full, factors_empty, arrivals, M, N, K,
            LEFT_GROUP, RIGHT_GROUP, TERMS, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES, WIDTH,
        )),
        (_consume, (
            1, out_desc, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, left_ring, right_ring, stagings,
            full, empty, left_factors, right_factors, factors_full, factors_empty, arrivals, M, N, K,
            LEFT_GROUP, RIGHT_GROUP, TERMS, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES, WIDTH,
        )),
        (produce, (
            left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, GROUP, STAGES,
        )),
        (_load_factors, (
            left_factor_ptr, right_factor_ptr, left_factors, right_factors, factors_full, factors_empty, M, N, K,
            stride_left, stride_right, LEFT_GROUP, RIGHT_GROUP, TERMS, GROUP, LOADER_WARPS,
        )),
    ], [4, 1, LOADER_WARPS], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def padded_terms(k: int, groups: tuple[int, int]) -> int:
    """``k`` rounded up to whole groups of both operands and whole steps of the ring."""
    multiple = max(TILE_K, *groups)
    return -(-k // multiple) * multiple


def add_factored(
    builder: LaunchBuilder,
    product: Product,
    factors: tuple[Place | None, Place | None],
    groups: tuple[int, int],
    strides: tuple[int, int],
    multiprocessors: int,
) -> None:
    """Multiply matrices that are aligned for the copy engine, none of them empty.

    Args:
        factors: FP32 [groups, stride] of left and right, divided by their numerators; None for an operand without.
        groups: terms that share a factor, 0 for an operand without; one is a multiple of the other.
        strides: elements from one group's factors to the next group's, multiples of a tile's rows or columns.
    """
    m, n, k = product.shape
    terms = min(group for group in groups if group)
    right = right_block(terms)
    programs = programs_for(-(-m // TILE_M) * -(-n // right[0]), k, multiprocessors)
    builder.step(
        factored_hopper_kernel, programs, block(product.left, BLOCKS[0]), block(product.right, right),
        block(product.out, OUT_BLOCK), *factors, *product.scales, m, n, padded_terms(k, groups), *strides, *groups,
        terms, *product.flags, GROUP_M, STAGES, WIDTH, LOADER_WARPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
