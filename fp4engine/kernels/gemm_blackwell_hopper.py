"""The GEMM of :mod:`fp4engine.kernels.gemm_blackwell` for large outputs on sm_90, warp-specialized by hand.

The roles, the ring and the tile are those of :mod:`fp4engine.kernels.gemm_hopper`: a producer warp, and two consumer
warpgroups with 64 rows each. A step of the ring is one group of 64 terms. A consumer multiplies a group with
:data:`WIDTH` columns at a time, since it has no registers for the group's sums of all columns beside its own.

Where :func:`fp4engine.kernels.gemm_blackwell.is_exact` says that no rounding can take place, a group is one product.
Elsewhere it is four products of 16 terms, which tensor cores add exactly, and FP64 adds those. Converting FP32 to FP64
is slow on this GPU, so the sum is taken of numbers 2^896 times smaller, whose bits are FP32's, shifted: one integer
multiplication and one mask.

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

from fp4engine.kernels.gemm_blackwell import BOUNDS, RIGHT_STRIP, Bounds
from fp4engine.kernels.gemm_hopper import (
    BLOCKS,
    CONSUMER_REGISTERS,
    GROUP_M,
    HALF_M,
    PRODUCER_REGISTERS,
    TILE_M,
    TILE_N,
    block,
    produce,
    programs_for,
    store_part,
    walk,
)
from fp4engine.kernels.gemm_launch import Product
from fp4engine.kernels.launch import LaunchBuilder

STAGES = 4
"""Steps in the ring, 48 KiB each."""

WIDTH = 128
"""Columns that a consumer multiplies at a time where a group is one product."""
NARROW = RIGHT_STRIP
"""And where it may be more: 32 or 64."""
OUT_BLOCK = (HALF_M, WIDTH // 2)

_WIDEN = "mul.wide.s32 x, ${}, $5; mov.b64 {{lo, hi}}, x; and.b32 hi, hi, 0x8FFFFFFF; mov.b64 {}, {{lo, hi}};"
_ADD_FOUR = gl.constexpr(
    "{.reg .b64 x; .reg .b32 lo, hi; .reg .f64 a, b, c, d; "
    + " ".join(_WIDEN.format(position + 1, name) for position, name in enumerate("abcd"))
    + "add.f64 a, a, b; add.f64 c, c, d; add.f64 a, a, c; mul.f64 a, a, 0d77F0000000000000; cvt.rn.f32.f64 $0, a;}"
)


@gluon.jit
def _add_four(a, b, c, d, shift):
    """``a + b + c + d``, rounded once to nearest even.

    ``shift``: 2^29. It is no constant, since ptxas would make shifts of the multiplications, which take longer.
    """
    return gl.inline_asm_elementwise(
        _ADD_FOUR, "=r,r,r,r,r,r", [a, b, c, d, shift], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _add_toward_zero(a, b):
    return gl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float32, is_pure=True, pack=1)


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
def _side_by_side(left, right):
    """The inverse of :func:`_halves`."""
    ROWS: gl.constexpr = left.shape[0]
    WIDTH: gl.constexpr = 2 * left.shape[1]
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    both = gl.join(left, right).permute((0, 2, 1)).reshape((ROWS, WIDTH))
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _multiply(left, right, FIRST: gl.constexpr, TERMS: gl.constexpr):
    """The sums of ``TERMS`` terms from ``FIRST`` on; to be waited for."""
    ROWS: gl.constexpr = left.shape[0]
    COLS: gl.constexpr = right.shape[0]
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))
    nothing = gl.zeros((ROWS, COLS), gl.float32, layout)
    left = left.slice(FIRST, TERMS, 1)
    right = right.slice(FIRST, TERMS, 1).permute((1, 0))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_piece(acc, left, right, left_bounds, right_bounds, limit, shift):
    """``acc`` and a group of 64 terms, in as few products as its bounds allow: one, two of 32 terms, or four."""
    whole = gl.load(left_bounds) * gl.load(right_bounds)
    first_half = gl.load(left_bounds + 1) * gl.load(right_bounds + 1)
    second_half = gl.load(left_bounds + 2) * gl.load(right_bounds + 2)
    if whole < limit:
        acc = _add_toward_zero(acc, warpgroup_mma_wait(0, deps=(_multiply(left, right, 0, 64),)))
    elif (first_half < limit) & (second_half < limit):
        halves = _multiply(left, right, 0, 32), _multiply(left, right, 32, 32)
        first, second = warpgroup_mma_wait(0, deps=halves)
        acc = _add_toward_zero(acc, first + second)
    else:
        sums = ()
        for term in gl.static_range(0, 64, 16):
            sums += (_multiply(left, right, term, 16),)
        a, b, c, d = warpgroup_mma_wait(0, deps=sums)
        acc = _add_toward_zero(acc, _add_four(a, b, c, d, shift))
    return acc


@gluon.jit
def _add_pieces(acc, left, right, left_bounds, fine_bounds, stride, limit, shift, NARROW: gl.constexpr):
    """:func:`_add_piece` for ``NARROW`` columns after the other, 32 or 64 of 128."""
    pieces = _halves(acc)
    if NARROW == 32:
        pieces = _halves(pieces[0]) + _halves(pieces[1])
    added = ()
    for i in gl.static_range(len(pieces)):
        columns = right.slice(i * NARROW, NARROW, 0)
        added += (_add_piece(pieces[i], left, columns, left_bounds, fine_bounds + i * stride, limit, shift),)
    if NARROW == 32:
        added = _side_by_side(added[0], added[1]), _side_by_side(added[2], added[3])
    return _side_by_side(added[0], added[1])


@gluon.jit
def _consume(
    PART: gl.constexpr, out_desc, bounds, shift, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Rows ``PART`` of a tile, ``WIDTH`` columns at a time."""
    ROWS: gl.constexpr = left_ring.shape[1]
    TILE_N: gl.constexpr = right_ring.shape[1]
    TILE_K: gl.constexpr = right_ring.shape[2]
    left_bound_ptr, right_bound_ptr, fine_bound_ptr, limit = bounds
    layout: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    tiles_m = gl.cdiv(M, 2 * ROWS)
    tiles_n = gl.cdiv(N, TILE_N)
    steps = gl.cdiv(K, TILE_K)
    staging = stagings.index(PART)
    arrived = arrivals.index(PART)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = walk(tile, tiles_m, tiles_n, GROUP)
        low = gl.zeros((ROWS, WIDTH), gl.float32, layout)
        high = gl.zeros((ROWS, WIDTH), gl.float32, layout)
        left_bounds = left_bound_ptr + (2 * tile_m + PART) * steps * BOUNDS
        right_bounds = right_bound_ptr + 2 * tile_n * steps
        fine_bounds = fine_bound_ptr + tile_n * (TILE_N // NARROW) * steps * BOUNDS
        for _ in range(steps):
            slot = count % STAGES
            left_bound = gl.load(left_bounds)
            low_bound = left_bound * gl.load(right_bounds)
            high_bound = left_bound * gl.load(right_bounds + steps)
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            left = left_ring.index(2 * slot + PART)
            right = right_ring.index(slot)
            columns = right.slice(0, WIDTH, 0)
            if low_bound < limit:
                low = _add_toward_zero(low, warpgroup_mma_wait(0, deps=(_multiply(left, columns, 0, TILE_K),)))
            else:
                low = _add_pieces(low, left, columns, left_bounds, fine_bounds, steps * BOUNDS, limit, shift, NARROW)
            columns = right.slice(WIDTH, WIDTH, 0)
            if high_bound < limit:
                group = warpgroup_mma_wait(0, deps=(_multiply(left, columns, 0, TILE_K),))
                mbarrier.arrive(empty.index(slot), count=1)
                high = _add_toward_zero(high, group)
            else:
                fine = fine_bounds + (WIDTH // NARROW) * steps * BOUNDS
                high = _add_pieces(high, left, columns, left_bounds, fine, steps * BOUNDS, limit, shift, NARROW)
                mbarrier.arrive(empty.index(slot), count=1)
            left_bounds += BOUNDS
            right_bounds += 1
            fine_bounds += BOUNDS
            count += 1
        row = tile_m * 2 * ROWS + PART * ROWS
        col = tile_n * TILE_N
        for half in gl.static_range(2):
            total = low if half == 0 else high
            pieces = _halves(total + (total - total))  # _add_four makes an infinity of a NaN; no other sum is infinite
            for i in gl.static_range(2):
                store_part(
                    pieces[i], row, col + half * WIDTH + i * out_desc.block_shape[1], out_desc, staging, arrived, i,
                    left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS,
                    ACCUMULATE,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def blackwell_hopper_kernel(
    left_desc, right_desc, out_desc, left_bound_ptr, right_bound_ptr, fine_bound_ptr, limit, shift,
    left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, K,
    LEFT_ROWS: gl.constexpr, RIGHT_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, NARROW: gl.constexpr,
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
    bounds = left_bound_ptr, right_bound_ptr, fine_bound_ptr, limit
    gl.warp_specialize([
        (_consume, (
            0, out_desc, bounds, shift, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES, WIDTH, NARROW,
        )),
        (_consume, (
            1, out_desc, bounds, shift, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
            left_ring, right_ring, stagings, full, empty, arrivals, M, N, K,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, GROUP, STAGES, WIDTH, NARROW,
        )),
        (produce, (
            left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, GROUP, STAGES,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def add_blackwell(builder: LaunchBuilder, product: Product, bounds: Bounds, limit: float, multiprocessors: int) -> None:
    """Multiply matrices that are aligned for the copy engine, none of them empty."""
    m, n, k = product.shape
    programs = programs_for(-(-m // TILE_M) * -(-n // TILE_N), k, multiprocessors)
    builder.step(
        blackwell_hopper_kernel, programs, block(product.left, BLOCKS[0]), block(product.right, BLOCKS[1]),
        block(product.out, OUT_BLOCK), *bounds, limit, 1 << 29, *product.scales, m, n, k, *product.flags, GROUP_M,
        STAGES, WIDTH, NARROW, PRODUCER_REGISTERS, CONSUMER_REGISTERS, num_warps=4,
    )  # fmt: skip
