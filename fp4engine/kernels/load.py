"""Device functions that read a tile of x as blocks: 16 tensors, one per position along the contracted axis.

Legend: x is [M, K]; the tile's first element is ``(row0, col0)``; elements outside x read as 0.
"""

import triton
import triton.language as tl

from fp4engine.kernels.encode import unstack8


@triton.jit
def load_rows(
    x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr
):
    """Blocks down the columns: tensors [TILE_M / 16, TILE_K], the i-th holding row i of every group of 16 rows."""
    row = tl.arange(0, TILE_M // 16)[:, None] * 16
    col = tl.arange(0, TILE_K)[None, :]
    x_ptr += row0.to(tl.int64) * stride_m + col0.to(tl.int64) * stride_k
    offsets = row * stride_m + col * stride_k
    x = ()
    for i in tl.static_range(16):
        if EVEN:
            x = x + (tl.load(x_ptr + (offsets + i * stride_m)),)
        else:
            mask = (col < K - col0) & (row + i < M - row0)
            x = x + (tl.load(x_ptr + (offsets + i * stride_m), mask=mask, other=0.0),)
    return x


@triton.jit
def load_blocks(
    x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr
):
    """Blocks along the rows: tensors [TILE_M * TILE_K / 16], blocks in row-major order.

    Two 16-byte loads (for 16-bit dtypes) give one thread a whole block.
    """
    BLOCKS: tl.constexpr = TILE_K // 16
    index = tl.arange(0, TILE_M * BLOCKS)[:, None]
    j = tl.arange(0, 8)[None, :]
    row = index // BLOCKS
    col = (index % BLOCKS) * 16 + j
    x_ptr += row0.to(tl.int64) * stride_m + col0.to(tl.int64) * stride_k
    low = x_ptr + (row * stride_m + col * stride_k)
    high = low + 8 * stride_k
    if EVEN:
        return unstack8(tl.load(low)) + unstack8(tl.load(high))
    else:
        inside = row < M - row0
        low_x = tl.load(low, mask=inside & (col < K - col0), other=0.0)
        high_x = tl.load(high, mask=inside & (col + 8 < K - col0), other=0.0)
        return unstack8(low_x) + unstack8(high_x)
