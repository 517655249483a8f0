"""TN GEMM of operands with an FP32 factor for every few terms of the sum: 1x128 outer scales, FP32 block scales.

    y[m, n] = round(alpha[m, n] * sum over groups g of (F_left[m, g] * F_right[n, g]) * partial_g[m, n] + bias[n])
    partial_g[m, n] = sum over k in g of left[m, k] * right[n, k]          F = factor / numerator

Values without their factors are exact in BF16, so tensor cores compute the partial sums, in FP32; factors multiply
these. An operand without factors has F = 1.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.kernels.gemm import GROUP_M, INTERPRETED, Tiles, gluon_kernel
from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.gemm_launch import Flags, Product
from fp4engine.kernels.launch import (
    Launch,
    LaunchBuilder,
    Matrix,
    Place,
    TensorMeta,
    capability_of,
    device_facts,
    resolver,
)

LARGE_TILES = Tiles(128, 128, 64, 8, 3, 1.0)
SMALL_TILES = Tiles(64, 64, 64, 4, 2, 0.5)
"""``block_k``: terms that one dot product adds up, where a group has as many."""


def tiles_for(capability: tuple[int, int], m: int, n: int) -> Tiles:
    """Large ones where shared memory has room for them, and the output enough rows and columns."""
    return LARGE_TILES if capability[0] in (9, 10) and min(m, n) >= 128 else SMALL_TILES


def fits_hopper(left: TensorMeta, right: TensorMeta, out: TensorMeta, device: torch.device) -> bool:
    """Whether the kernel for large outputs on sm_90 multiplies these matrices."""
    if min(*out.shape) < LARGE_TILES.block_m or 0 in (left.shape[1], right.shape[1]):
        return False
    aligned = all(Matrix(Place(0), matrix).is_aligned for matrix in (left, right, out))
    return aligned and gluon_kernel("gemm_factors_hopper", device) is not None


class Factors(NamedTuple):
    """What a kernel has to know of one operand's FP32 factors.

    Attributes:
        group: how many consecutive terms of the sum over K share a factor; 0 for an operand without factors.
        numerator: the constant that every factor is divided by (F = factor / numerator).
    """

    group: int
    numerator: float


@triton.jit
def factors_of(factor_ptr, index, limit, start, stride, numerator, GROUP: tl.constexpr):
    """The factors of rows ``index`` for the group that begins at term ``start``."""
    factor = tl.load(factor_ptr + index.to(tl.int64) * stride + start // GROUP, mask=index < limit, other=0.0)
    return tl.div_rn(factor, tl.zeros_like(factor) + numerator)


@triton.jit
def factored_gemm_kernel(
    left_ptr, left_factor_ptr, right_ptr, right_factor_ptr, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr,
    numerator, left_numerator, right_numerator, M, N, K, stride_left, stride_right, stride_left_factor,
    stride_right_factor, stride_out,
    LEFT_GROUP: tl.constexpr, RIGHT_GROUP: tl.constexpr, LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, STEP: tl.constexpr, GROUP_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``GROUP``: terms whose factors are the same in both operands, a multiple of ``STEP``."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, STEP)
    left_ptrs = left_ptr + rows.to(tl.int64)[:, None] * stride_left + k[None, :]
    right_ptrs = right_ptr + cols.to(tl.int64)[:, None] * stride_right + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, GROUP):
        partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.static_range(0, GROUP, STEP):
            in_k = k[None, :] < K - start - step
            left = tl.load(left_ptrs + start + step, mask=(rows < M)[:, None] & in_k, other=0.0)
            right = tl.load(right_ptrs + start + step, mask=(cols < N)[:, None] & in_k, other=0.0)
            if INTERPRETED:  # the interpreter's dot multiplies BF16 bit patterns
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            partial = tl.dot(left, right.T, partial, input_precision="ieee")
        if LEFT_GROUP and RIGHT_GROUP:
            left_f = factors_of(left_factor_ptr, rows, M, start, stride_left_factor, left_numerator, LEFT_GROUP)
            right_f = factors_of(right_factor_ptr, cols, N, start, stride_right_factor, right_numerator, RIGHT_GROUP)
            acc += partial * (left_f[:, None] * right_f[None, :])
        elif LEFT_GROUP:
            left_f = factors_of(left_factor_ptr, rows, M, start, stride_left_factor, left_numerator, LEFT_GROUP)
            acc += partial * left_f[:, None]
        else:
            right_f = factors_of(right_factor_ptr, cols, N, start, stride_right_factor, right_numerator, RIGHT_GROUP)
            acc += partial * right_f[None, :]
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, INTERPRETED,
    )  # fmt: skip


@triton.jit
def spread_kernel(
    factor_ptr, out_ptr, rows, groups, wanted, stride, numerator, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """Factors [rows, groups] to ``F`` [wanted, stride], transposed, divided by ``numerator``, and 0 beyond."""
    tiles = tl.cdiv(stride, ROWS)
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    group = (tl.program_id(0) // tiles) * GROUPS + tl.arange(0, GROUPS)
    there = (row < rows)[:, None] & (group < groups)[None, :]
    factor = tl.load(factor_ptr + row.to(tl.int64)[:, None] * groups + group[None, :], mask=there, other=0.0)
    factor = tl.div_rn(factor, tl.zeros_like(factor) + numerator)
    place = out_ptr + group.to(tl.int64)[:, None] * stride + row[None, :]
    tl.store(place, tl.trans(factor), mask=(group < wanted)[:, None] & (row < stride)[None, :])


SPREAD_ROWS, SPREAD_GROUPS = 256, 16


def _add_spread(
    builder: LaunchBuilder, factor: Place | None, meta: TensorMeta | None, factors: Factors, terms: int
) -> tuple[Place | None, int]:
    """``F`` of one operand whose sum has ``terms`` terms, and its stride; (None, 0) for none."""
    if factor is None or meta is None:
        return None, 0
    rows, groups = meta.shape
    wanted, stride = terms // factors.group, -(-rows // SPREAD_ROWS) * SPREAD_ROWS
    spread = builder.buffer((wanted, stride), torch.float32)
    builder.step(
        spread_kernel, stride // SPREAD_ROWS * -(-wanted // SPREAD_GROUPS), factor, spread, rows,
        groups, wanted, stride, factors.numerator, SPREAD_ROWS, SPREAD_GROUPS, num_warps=4,
    )  # fmt: skip
    return spread, stride


@resolver
def resolve_factored(
    tensors: tuple[TensorMeta | None, ...],
    device: torch.device,
    left_factors: Factors,
    right_factors: Factors,
    numerator: float,
    out_dtype: torch.dtype,
) -> Launch:
    """``(left, left factors, left_amax, right, right factors, right_amax, bias, out) -> y``, or nothing into ``out``.

    Args:
        tensors: values are BF16 and contiguous along K; what one has more there is padding. Factors are FP32
            [rows, groups], contiguous; None for an operand without.
    """
    left, left_f, left_amax, right, right_f, right_amax, bias, out = tensors
    assert left is not None and right is not None and left_amax is not None and right_amax is not None
    builder = LaunchBuilder(device, inputs=8)
    place = builder.inputs
    m, n, k = left.shape[0], right.shape[0], min(left.shape[1], right.shape[1])
    target: Place = place[7] if out else builder.buffer((m, n), out_dtype)
    flags = Flags(left_amax.shape[0] > 1, right_amax.shape[0] > 1, bias is not None, out is not None)
    made = out or TensorMeta((m, n), (n, 1), out_dtype, True)
    groups = left_factors.group, right_factors.group
    if fits_hopper(left, right, made, device):
        hopper = gluon_kernel("gemm_factors_hopper", device)
        terms = hopper.padded_terms(k, groups)
        left_spread, left_stride = _add_spread(builder, place[1], left_f, left_factors, terms)
        right_spread, right_stride = _add_spread(builder, place[4], right_f, right_factors, terms)
        matrices = Matrix(place[0], left), Matrix(place[3], right), Matrix(target, made)
        product = Product(*matrices, place[2], place[5], place[6] if bias else None, numerator, flags)
        hopper.add_factored(
            builder, product, (left_spread, right_spread), groups, (left_stride, right_stride), device_facts(device)[1]
        )
        return builder.launch(*([] if out else [target]))
    group = min(group for group in groups if group)
    tiles = tiles_for(capability_of(device), m, n)
    programs = -(-m // tiles.block_m) * -(-n // tiles.block_n)
    builder.step(
        factored_gemm_kernel, programs, place[0], place[1] if left_f else None, place[3], place[4] if right_f else None,
        target, place[2], place[5], place[6] if bias else None, numerator, left_factors.numerator,
        right_factors.numerator, m, n, k, left.row_stride, right.row_stride, left_f.shape[1] if left_f else 0,
        right_f.shape[1] if right_f else 0, out.row_stride if out else n, *groups, *flags, tiles.block_m,
        tiles.block_n, group, min(group, tiles.block_k), GROUP_M, INTERPRETED, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return builder.launch(*([] if out else [target]))
