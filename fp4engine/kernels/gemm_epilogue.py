"""Device functions that every GEMM kernel shares: the order of tiles and the epilogue."""

import triton
import triton.language as tl

from fp4engine.kernels.encode import round_bf16


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """``(tile_m, tile_n)`` of a linear index, walking bands of GROUP_M tile rows, so that L2 serves neighbours."""
    band = GROUP_M * tiles_n
    first = (index // band) * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + (index % band) % height, (index % band) // height


@triton.jit
def scaled(
    acc, rows, cols, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """``fl(fl(fl(fl(A_left * A_right) / numerator) * acc) + bias)``, each step one FP32 rounding."""
    if LEFT_ROWS:
        left = tl.load(left_amax_ptr + rows, mask=rows < M, other=0.0)[:, None]
    else:
        left = tl.load(left_amax_ptr)
    if RIGHT_ROWS:
        right = tl.load(right_amax_ptr + cols, mask=cols < N, other=0.0)[None, :]
    else:
        right = tl.load(right_amax_ptr)
    result = acc * tl.div_rn(left * right, numerator)
    if HAS_BIAS:
        result += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def finish(
    acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr = False,
):  # fmt: skip
    """Scale a tile, add the buffer if accumulating, round once, store under a mask."""
    result = scaled(
        acc, rows, cols, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS
    )
    ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if ACCUMULATE:
        result += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if INTERPRETED and out_ptr.dtype.element_ty == tl.bfloat16:
        result = round_bf16(result)  # the interpreter's cast truncates
    tl.store(ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    acc, row, col, out_desc, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    TMA_STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As :func:`finish` for the tile at ``(row, col)``, through the copy engine where that can be.

    It cannot where rows of ``out`` are not 16-byte aligned, and does not when accumulating: reading the buffer
    through the copy engine needs a second staging tile, and shared memory is full.
    """
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    if TMA_STORE:
        tl.static_assert(not ACCUMULATE)
        result = scaled(
            acc, rows, cols, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, LEFT_ROWS, RIGHT_ROWS, HAS_BIAS
        )
        out_desc.store([row, col], result.to(out_desc.dtype))
    else:
        finish(
            acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
        )  # fmt: skip
