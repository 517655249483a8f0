"""TN GEMM with the sum of ``accumulation="blackwell"``: groups of 64 terms, each rounded once, added toward zero.

    y[m, n] = round(alpha[m, n] * total[m, n] + bias[n])         total: see :mod:`fp4engine.reference.blackwell`

Operands are BF16 values, E2M1 elements times E4M3 block scales, as for :mod:`fp4engine.kernels.gemm`. Tensor cores sum
in FP32 with no rounding that anybody has promised, so a group goes through them in one product only where every sum is
exact. The proof is this. In row m of a group let q be the largest power of two that divides all 64 values, and

    bound[m] = sum over the group of (left[m, k] / q)^2          likewise for the rows of right, with their own q

Products of row m and row n are multiples of ``q_m q_n``, and by Cauchy and Schwarz their magnitudes add up to at most
``q_m q_n sqrt(bound[m] bound[n])``. If ``bound[m] bound[n] < 2^48``, every product, and every sum of some of them, is a
multiple of ``q_m q_n`` below ``2^24 q_m q_n``: an FP32 number. A tensor core that keeps 24 bits below the largest
exponent among its addends, as all that are known do, loses none. A tile takes the largest bounds of its rows.

Elsewhere a group is four products of 16 terms. These share two block scales, so each sum is below 2^20 of its smallest
unit: exact. Their sum, of at most 49 bits, is exact in FP64 and rounded once. A group whose halves are proved exact may
be two products of 32 terms, whose sum FP32 rounds once.

:mod:`fp4engine.kernels.gemm_blackwell_hopper` takes large outputs on sm_90.

Dims: M rows of left, N rows of right, K the contracted (last) axis of both.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.constants import SUM_GROUP as _SUM_GROUP
from fp4engine.kernels.encode import PAIRS, from_bits, to_bits, wide
from fp4engine.kernels.gemm import GROUP_M, INTERPRETED, Tiles, gluon_kernel, load_values, product_of
from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.gemm_launch import Matrix, Product
from fp4engine.kernels.launch import (
    Launch,
    LaunchBuilder,
    Place,
    TensorMeta,
    capability_of,
    device_facts,
    meta_of,
    resolver,
)

SUM_GROUP = tl.constexpr(_SUM_GROUP)
LARGE = tl.constexpr(2.0**100)
"""A power of two that divides no value but zero."""

STRIP, LEFT_STRIP, RIGHT_STRIP = 128, 64, 32
"""Rows that share a bound: of right, and the fewer rows of either for which there are three bounds."""
BOUNDS = tl.constexpr(4)
"""Numbers that such a strip has for each group: the bound of the whole, a bound for each half, and one unused."""

LIMIT = 0.99 * 2.0**48
"""Bounds whose product is below this prove a sum exact. They are computed in FP32 to one part in 100,000."""

LARGE_TILES = Tiles(64, 128, 64, 8, 3, 1.0)
SMALL_TILES = Tiles(32, 32, 64, 4, 3, 0.3)


@triton.jit
def bound_of(squares, unit):
    """``squares / unit^2``, where ``unit`` is a power of two; infinite for a NaN, which a maximum may pass over."""
    reciprocal = from_bits(0x7F000000 - to_bits(unit))
    bound = squares * reciprocal * reciprocal
    return tl.where(bound < 3.0e38, bound, float("inf"))


@triton.jit
def strip_bounds(
    values_ptr, bound_ptr, fine_ptr, strip, step, rows, K, stride, steps, STRIP: tl.constexpr, FINE: tl.constexpr
):
    row = strip * STRIP + tl.arange(0, STRIP)
    k = step * SUM_GROUP + tl.arange(0, SUM_GROUP)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    values = wide(tl.load(values_ptr + row.to(tl.int64)[:, None] * stride + k[None, :], mask=inside, other=0.0))
    bits = to_bits(values)
    significand = ((bits >> 16) & 0x7F) | 0x80  # of BF16; its lowest set bit is what the value is a multiple of
    lowest = (significand & (256 - significand)).to(tl.float32) * from_bits(bits & 0x7F800000) * 0.0078125
    units = tl.min(tl.reshape(tl.where(values == 0.0, LARGE, lowest), [STRIP, 2, SUM_GROUP // 2]), axis=2)
    squares = tl.sum(tl.reshape(values * values, [STRIP, 2, SUM_GROUP // 2]), axis=2)
    whole = bound_of(tl.sum(squares, axis=1), tl.min(units, axis=1))
    first, second = tl.split(bound_of(squares, units))
    MANY: tl.constexpr = STRIP // FINE
    fine = fine_ptr + ((strip * MANY + tl.arange(0, MANY)).to(tl.int64) * steps + step) * BOUNDS
    tl.store(fine, tl.max(tl.reshape(whole, [MANY, FINE]), axis=1))
    tl.store(fine + 1, tl.max(tl.reshape(first, [MANY, FINE]), axis=1))
    tl.store(fine + 2, tl.max(tl.reshape(second, [MANY, FINE]), axis=1))
    if bound_ptr is not None:
        tl.store(bound_ptr + strip.to(tl.int64) * steps + step, tl.max(whole, axis=0))


@triton.jit
def bounds_kernel(
    left_ptr, left_bound_ptr, right_ptr, right_bound_ptr, fine_bound_ptr, M, N, K, stride_left, stride_right, steps,
    left_programs, STRIP: tl.constexpr, LEFT_STRIP: tl.constexpr, RIGHT_STRIP: tl.constexpr,
):  # fmt: skip
    """The largest bounds of strips of rows: one program for 128 rows and a group, left's first.

    Of left and right FP32 [strips of few rows, steps, BOUNDS], of right [strips of 128 rows, steps] too.
    """
    program = tl.program_id(0)
    if program < left_programs:
        strip, step = program // steps, program % steps
        strip_bounds(left_ptr, None, left_bound_ptr, strip, step, M, K, stride_left, steps, STRIP, LEFT_STRIP)
    else:
        strip, step = (program - left_programs) // steps, (program - left_programs) % steps
        strip_bounds(
            right_ptr, right_bound_ptr, fine_bound_ptr, strip, step, N, K, stride_right, steps, STRIP, RIGHT_STRIP
        )


@triton.jit
def add_toward_zero(a, b, HARDWARE: tl.constexpr):
    """``a + b`` rounded toward zero; without PTX by the steps that the reference takes."""
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        too_far = ((error < 0) & (total > 0)) | ((error > 0) & (total < 0))
        return from_bits(to_bits(total) - too_far.to(tl.uint32))


@triton.jit
def load_terms(ptrs, inside, k, K, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """The ``WIDTH`` terms from ``k`` on."""
    terms = k + tl.arange(0, WIDTH)
    values = load_values(ptrs + terms[None, :], inside & (terms < K)[None, :])
    return values.to(tl.float32) if INTERPRETED else values  # the interpreter's dot multiplies BF16 bit patterns


@triton.jit
def blackwell_gemm_kernel(
    left_ptr, right_ptr, out_ptr, left_bound_ptr, right_bound_ptr, limit, left_amax_ptr, right_amax_ptr, bias_ptr,
    numerator, M, N, K, stride_left, stride_right, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, LEFT_STRIP: tl.constexpr,
    GROUP_M: tl.constexpr, HARDWARE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = (rows < M)[:, None]
    in_n = (cols < N)[:, None]
    left_ptrs = left_ptr + rows.to(tl.int64)[:, None] * stride_left
    right_ptrs = right_ptr + cols.to(tl.int64)[:, None] * stride_right
    steps = tl.cdiv(K, SUM_GROUP)
    left_bound_ptr += tile_m * BLOCK_M // LEFT_STRIP * steps * BOUNDS
    right_bound_ptr += tile_n * BLOCK_N // STRIP * steps
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        k = step * SUM_GROUP
        left = load_terms(left_ptrs, in_m, k, K, SUM_GROUP, INTERPRETED)
        right = load_terms(right_ptrs, in_n, k, K, SUM_GROUP, INTERPRETED)
        group = tl.dot(left, right.T, input_precision="ieee")  # in no branch, or its loads would not overlap others'
        is_exact = tl.load(left_bound_ptr + step * BOUNDS) * tl.load(right_bound_ptr + step) < limit
        if not is_exact:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
            for term in tl.static_range(0, SUM_GROUP, 16):
                few_left = load_terms(left_ptrs, in_m, k + term, K, 16, INTERPRETED)
                few_right = load_terms(right_ptrs, in_n, k + term, K, 16, INTERPRETED)
                total += tl.dot(few_left, few_right.T, input_precision="ieee").to(tl.float64)
            group = total.to(tl.float32)
        acc = add_toward_zero(acc, group, HARDWARE)
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, INTERPRETED,
    )  # fmt: skip


@resolver
def resolve_blackwell(
    tensors: tuple[TensorMeta | None, ...], device: torch.device, numerator: float, out_dtype: torch.dtype
) -> Launch:
    """``(*left, *right, bias, out) -> y``, or nothing where ``out`` is given.

    An operand is ``(data, scale_inv, amax)`` in NVFP4, laid out as :func:`fp4engine.kernels.gemm.resolve_product` says.
    """
    builder = LaunchBuilder(device, inputs=8)
    product = product_of(builder, tensors, numerator, out_dtype)
    add_blackwell(builder, product)
    return builder.launch(*([] if tensors[7] else [product.out.place]))


class Bounds(NamedTuple):
    """In a launch: of left's strips of few rows, of right's strips of 128, of right's strips of few."""

    left: Place
    right: Place
    fine: Place


def _add_bounds(builder: LaunchBuilder, left: Matrix, right: Matrix) -> Bounds:
    """Find the bounds of both operands."""
    (m, k), n = left.meta.shape, right.meta.shape[0]
    steps = -(-k // _SUM_GROUP)
    # Whole tiles of gemm_blackwell_hopper, 128 x 256: what lies beyond the operands has bounds of 0.
    strips = [-(-m // STRIP), 2 * -(-n // (2 * STRIP))]
    fine = [count * STRIP // rows for count, rows in zip(strips, (LEFT_STRIP, RIGHT_STRIP), strict=True)]
    bounds = Bounds(
        builder.buffer((fine[0], steps, BOUNDS.value), torch.float32),
        builder.buffer((strips[1], steps), torch.float32),
        builder.buffer((fine[1], steps, BOUNDS.value), torch.float32),
    )
    builder.step(
        bounds_kernel, steps * sum(strips), left.place, bounds.left, right.place, bounds.right, bounds.fine, m, n, k,
        left.meta.row_stride, right.meta.row_stride, steps, steps * strips[0], STRIP, LEFT_STRIP, RIGHT_STRIP,
        num_warps=4,
    )  # fmt: skip
    return bounds


@resolver
def resolve_bounds(left: TensorMeta, right: TensorMeta, device: torch.device) -> Launch:
    """``(left, right) -> bounds of left, of right, and of right's strips of few rows``."""
    builder = LaunchBuilder(device, inputs=2)
    return builder.launch(*_add_bounds(builder, Matrix(builder.inputs[0], left), Matrix(builder.inputs[1], right)))


def product_shares(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float, float, float]:
    """Which shares of a product's groups are one product of a tile's 64 x 128, one of 64 x 32, two and four.

    Args:
        left, right: BF16 values [M, K] and [N, K], contiguous along K, of whole strips.
    """
    own, coarse, fine = resolve_bounds(meta_of(left), meta_of(right), left.device)(left, right)
    own, fine = own[: -(-left.shape[0] // LEFT_STRIP), None], fine[None, : -(-right.shape[0] // RIGHT_STRIP)]
    whole = own[..., 0] * coarse.repeat_interleave(STRIP // RIGHT_STRIP, 0)[None, : fine.shape[1]] < LIMIT
    proved = own * fine < LIMIT
    one = (whole | proved[..., 0]).float().mean()
    few = (whole | proved[..., 0] | (proved[..., 1] & proved[..., 2])).float().mean()
    shares = torch.stack([whole.float().mean(), one, few, torch.ones_like(one)]).tolist()
    return shares[0], shares[1] - shares[0], shares[2] - shares[1], shares[3] - shares[2]


def add_blackwell(builder: LaunchBuilder, product: Product) -> None:
    """Bounds, then the product, by the first kernel that fits."""
    m, n, k = product.shape
    if 0 in (m, n):
        return
    strides = [matrix.meta.row_stride for matrix in (product.left, product.right, product.out)]
    bounds = _add_bounds(builder, product.left, product.right)
    hardware, multiprocessors = device_facts(builder.device)
    aligned = all(matrix.is_aligned for matrix in (product.left, product.right, product.out))
    if k and aligned and min(m, n) >= STRIP:
        hopper = gluon_kernel("gemm_blackwell_hopper", builder.device)
        if hopper is not None:
            return hopper.add_blackwell(builder, product, bounds, LIMIT, multiprocessors)
    tiles = LARGE_TILES if min(m, n) >= STRIP and capability_of(builder.device) != (0, 0) else SMALL_TILES
    programs = -(-m // tiles.block_m) * -(-n // tiles.block_n)
    builder.step(
        blackwell_gemm_kernel, programs, product.left.place, product.right.place, product.out.place, bounds.left,
        bounds.right, LIMIT, *product.scales, m, n, k, *strides, *product.flags, tiles.block_m, tiles.block_n, STRIP,
        LEFT_STRIP, GROUP_M, hardware, INTERPRETED, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
