"""The GEMM of :mod:`fp4engine.kernels.gemm_factors` for large outputs on sm_90, warp-specialized by hand.

    y[m, n] = round(alpha[m, n] * sum over groups g of (F_left[g, m] * F_right[g, n]) * partial_g[m, n] + bias[n])

The roles are those of :mod:`fp4engine.kernels.gemm_hopper`, the tiles 128x128, since a consumer holds two accumulators:
the tensor cores' of one group, and the sum. While one consumer puts factors on the one and adds it to the other, the
other consumer's product keeps the tensor cores busy.

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
    CONSUMER_REGISTERS,
    GROUP_M,
    HALF_M,
    LEFT_BLOCK,
    OUT_BLOCK,
    PRODUCER_REGISTERS,
    TILE_K,
    block,
    produce,
    programs_for,
    store_part,
    walk,
)
from fp4engine.kernels.gemm_launch import Product
from fp4engine.kernels.launch import Draft, Place

TILE_M, TILE_N = 2 * HALF_M, OUT_BLOCK[1]
RIGHT_BLOCK = (TILE_N, TILE_K)
STAGES = 4
"""Steps in the ring: 32 KiB each beside two staging tiles of at most 32 KiB. What is left is L1's, for the factors."""


@gluon.jit
def _factors(factor_ptr, index, term, stride, GROUP: gl.constexpr):
    """Of the group that begins at ``term``, those of rows ``index``; ones for an operand without."""
    if GROUP:
        return gl.load(factor_ptr + (term // GROUP) * stride + index)
    else:
        return (index * 0 + 1).to(gl.float32)


@gluon.jit
def _add(acc, partial, left, right):
    """``acc + partial * left * right``, with the factors of rows and of columns."""
    return gl.fma(partial * left.expand_dims(1), right.expand_dims(0) + gl.zeros_like(acc), acc)


@gluon.jit
def _consume(
    PART: gl.constexpr, out_desc, left_factor_ptr, right_factor_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    left_ring, right_ring, stagings, full, empty, arrivals, M, N, K, stride_left, stride_right,
    LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr, TERMS: gl.constexpr,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = left_ring.shape[1]
    TILE_N: gl.constexpr = right_ring.shape[1]
    TILE_K: gl.constexpr = right_ring.shape[2]
    # A group is several steps of the ring, or a step is several groups.
    STEPS: gl.constexpr = (TERMS + TILE_K - 1) // TILE_K
    SLICE: gl.constexpr = TERMS if TERMS < TILE_K else TILE_K
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16]))
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(N, TILE_N)
    staging = stagings.index(PART)
    arrived = arrivals.index(PART)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * (2 * ROWS) + PART * ROWS
        col = tile_n * TILE_N
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, TILE_N, gl.SliceLayout(0, layout))
        acc = gl.zeros((ROWS, TILE_N), gl.float32, layout)
        # Factors are read one group ahead, while a product runs.
        left_factors = _factors(left_factor_ptr, rows, 0, stride_left, LEFT_GROUP)
        right_factors = _factors(right_factor_ptr, cols, 0, stride_right, RIGHT_GROUP)
        for term in range(0, K, STEPS * TILE_K):
            partial = gl.zeros((ROWS, TILE_N), gl.float32, layout)
            for step in gl.static_range(STEPS):
                slot = (count + step) % STAGES
                mbarrier.wait(full.index(slot), ((count + step) // STAGES) & 1)
                left = left_ring.index(2 * slot + PART)
                right = right_ring.index(slot)
                if SLICE == TILE_K:
                    partial = warpgroup_mma(left, right.permute((1, 0)), partial, use_acc=step > 0, is_async=True)
                else:
                    for first in gl.static_range(0, TILE_K, SLICE):
                        product = warpgroup_mma(
                            left.slice(first, SLICE, 1), right.slice(first, SLICE, 1).permute((1, 0)), partial,
                            use_acc=False, is_async=True,
                        )  # fmt: skip
                        following = term + first + SLICE
                        next_left = _factors(left_factor_ptr, rows, following, stride_left, LEFT_GROUP)
                        next_right = _factors(right_factor_ptr, cols, following, stride_right, RIGHT_GROUP)
                        product = warpgroup_mma_wait(0, deps=(product,))
                        acc = _add(acc, product, left_factors, right_factors)
                        left_factors, right_factors = next_left, next_right
            if SLICE == TILE_K:
                following = term + STEPS * TILE_K
                next_left = _factors(left_factor_ptr, rows, following, stride_left, LEFT_GROUP)
                next_right = _factors(right_factor_ptr, cols, following, stride_right, RIGHT_GROUP)
                partial = warpgroup_mma_wait(0, deps=(partial,))
                for step in gl.static_range(STEPS):
                    mbarrier.arrive(empty.index((count + step) % STAGES), count=1)
                acc = _add(acc, partial, left_factors, right_factors)
                left_factors, right_factors = next_left, next_right
            else:
                mbarrier.arrive(empty.index(count % STAGES), count=1)
            count += STEPS
        store_part(
            acc, row, col, out_desc, staging, arrived, (tile // gl.num_programs(0)) & 1, left_amax_ptr, right_amax_ptr,
            bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def factored_hopper_kernel(
    left_desc, right_desc, out_desc, left_factor_ptr, right_factor_ptr, left_amax_ptr, right_amax_ptr, bias_ptr,
    numerator, M, N, K, stride_left, stride_right,
    LEFT_GROUP: gl.constexpr, RIGHT_GROUP: gl.constexpr, TERMS: gl.constexpr,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``TERMS``: of a group whose factors are the same in both operands. K: a multiple of it and of a step's.

    Factors are [groups + 1, stride], their strides multiples of a tile's rows and columns; the last is read, not used.
    """
    ROWS: gl.constexpr = left_desc.block_shape[0]
    TILE_N: gl.constexpr = right_desc.block_shape[0]
    TILE_K: gl.constexpr = right_desc.block_shape[1]
    left_ring = gl.allocate_shared_memory(left_desc.dtype, [2 * STAGES, ROWS, TILE_K], left_desc.layout)
    right_ring = gl.allocate_shared_memory(right_desc.dtype, [STAGES, TILE_N, TILE_K], right_desc.layout)
    stagings = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, TILE_N], out_desc.layout)
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
            0, out_desc, left_factor_ptr, right_factor_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K, stride_left, stride_right,
            LEFT_GROUP, RIGHT_GROUP, TERMS, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES,
        )),
        (_consume, (
            1, out_desc, left_factor_ptr, right_factor_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K, stride_left, stride_right,
            LEFT_GROUP, RIGHT_GROUP, TERMS, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES,
        )),
        (produce, (
            left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, GROUP, STAGES,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def padded_terms(k: int, groups: tuple[int, int]) -> int:
    """``k`` rounded up to whole groups of both operands and whole steps of the ring."""
    multiple = max(TILE_K, *groups)
    return -(-k // multiple) * multiple


def add_factored(
    draft: Draft,
    product: Product,
    factors: tuple[Place | None, Place | None],
    groups: tuple[int, int],
    strides: tuple[int, int],
    multiprocessors: int,
) -> None:
    """Multiply matrices that are aligned for the copy engine, none of them empty.

    Args:
        factors: FP32 [groups + 1, stride] of left and right, divided by their numerators; None for an operand without.
        groups: terms that share a factor, 0 for an operand without; one is a multiple of the other.
        strides: elements from one group's factors to the next group's, multiples of a tile's rows or columns.
    """
    m, n, k = product.shape
    programs = programs_for(-(-m // TILE_M) * -(-n // TILE_N), k, multiprocessors)
    terms = min(group for group in groups if group)
    draft.step(
        factored_hopper_kernel, programs, block(product.left, LEFT_BLOCK), block(product.right, RIGHT_BLOCK),
        block(product.out, OUT_BLOCK), *factors, *product.scales, m, n, padded_terms(k, groups), *strides, *groups,
        terms, *product.flags, GROUP_M, STAGES, PRODUCER_REGISTERS, CONSUMER_REGISTERS, num_warps=4,
    )  # fmt: skip
