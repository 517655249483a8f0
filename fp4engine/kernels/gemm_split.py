"""TN GEMM of a small output and a long contraction, as in the weight gradient of a small layer: split K.

    part[s] = left[:, K_s] @ right[:, K_s].T        y = finish(part[0] + part[1] + ...)

An output of a few tiles keeps a few multiprocessors busy. So K is cut into parts that are multiplied at the same time,
in FP32, and added in their order: the same arguments give the same bytes, and these differ from an unsplit sum's in the
last bits.

Dims: M rows of left, N rows of right, K the contracted (last) axis of both.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.gemm_launch import Product, block_of
from fp4engine.kernels.launch import LaunchBuilder

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
GROUP_M = 8
SUM_M, SUM_N = 16, 128
SHORTEST_K = 16_384
"""Terms of a sum that is worth splitting: fewer, and the whole product takes microseconds."""
SHORTEST_PART = 2_048
"""Terms of a part, at least: reading and adding up the parts costs as much as some hundred terms."""


@triton.jit
def multiply_parts_kernel(
    left_desc, right_desc, parts_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Program ``pid``: one tile of one part, into ``parts_ptr`` FP32 [PARTS, M, N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, PARTS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(part * each, min(steps, part * each + each)):
        left = left_desc.load([row, step * BLOCK_K])
        right = right_desc.load([col, step * BLOCK_K])
        if INTERPRETED:  # the interpreter's dot multiplies BF16 bit patterns
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    target = parts_ptr + (part * M + rows).to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(target, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def sum_parts_kernel(
    parts_ptr, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The epilogue of every GEMM, on the sum of the parts in their order."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = parts_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.static_range(PARTS):
        acc += tl.load(source, mask=inside, other=0.0)
        source += M.to(tl.int64) * N
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
    )  # fmt: skip


@cache
def parts_for(m: int, n: int, k: int, multiprocessors: int) -> int:
    """In how many parts to compute an [m, n] product over k terms; 1 is not to split."""
    if k < SHORTEST_K:
        return 1
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    return max(1, min(multiprocessors // tiles, k // SHORTEST_PART))


def add_split(builder: LaunchBuilder, product: Product, parts: int, **options: Any) -> None:
    """Multiply matrices that are aligned for the copy engine in ``parts`` parts, at least 1.

    Args:
        options: ``num_warps`` and ``num_stages`` of the products.
    """
    m, n, k = product.shape
    buffer = builder.buffer((parts, m, n), torch.float32)
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    builder.step(
        multiply_parts_kernel, parts * tiles, block_of(product.left, BLOCK_M, BLOCK_K),
        block_of(product.right, BLOCK_N, BLOCK_K), buffer, m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, parts,
        builder.device.type != "cuda", **options,
    )  # fmt: skip
    builder.step(
        sum_parts_kernel, -(-m // SUM_M) * -(-n // SUM_N), buffer, product.out.place, *product.scales, m, n,
        product.out.meta.strides[0], *product.flags, SUM_M, SUM_N, parts, num_warps=4,
    )  # fmt: skip
