"""Statistics of the rows that a norm reads, in an order of addition that is the same on every device.

    rstd = 1 / sqrt(mean((x - m)^2) + eps)      m = mean(x) for LayerNorm, 0 for RMSNorm

Legend: x is [M, K]; statistics FP32 [2, M], ``rstd`` then ``m``. The oracle is :mod:`fp4engine.reference.norm`: a sum
over K adds the 512 columns of a chunk to those of the chunks before, then neighbours in pairs, nine times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.encode import wide
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, meta_of, resolver

ROWS, COLS = 2, 512
"""Rows of one program, and columns of a chunk."""


@triton.jit
def pairwise_sum(x, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    """[ROWS, COLS = 2^STEPS] -> [ROWS]: neighbours first."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [ROWS, COLS >> (step + 1), 2]), 2)
    return tl.reshape(x, [ROWS])


@triton.jit
def row_statistics_kernel(
    x_ptr, statistics_ptr, M, K, stride_m, EPS: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptr += row[:, None].to(tl.int64) * stride_m
    col = tl.arange(0, COLS)[None, :]
    inside = row[:, None] < M
    count = tl.zeros([ROWS], tl.float32) + K
    mean = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        total = tl.zeros([ROWS, COLS], tl.float32)
        for col0 in tl.range(0, K, COLS):
            total += wide(tl.load(x_ptr + (col0 + col), mask=inside & (col < K - col0), other=0.0))
        mean = tl.div_rn(pairwise_sum(total, ROWS, COLS, STEPS), count)
        tl.store(statistics_ptr + M + row, mean, mask=row < M)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for col0 in tl.range(0, K, COLS):
        x = wide(tl.load(x_ptr + (col0 + col), mask=inside & (col < K - col0), other=0.0))
        if CENTERED:
            x = tl.where(col < K - col0, x - mean[:, None], 0.0)
        total += x * x
    variance = tl.div_rn(pairwise_sum(total, ROWS, COLS, STEPS), count)
    rstd = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    tl.store(statistics_ptr + row, rstd, mask=row < M)


def add_row_statistics(builder: LaunchBuilder, x: Matrix, eps: float, centered: bool) -> Place:
    """FP32 [2, M] of x [M, K], see :func:`row_statistics`."""
    rows, cols = x.meta.shape
    statistics = builder.buffer((2, rows), torch.float32)
    builder.step(
        row_statistics_kernel, -(-rows // ROWS), x.place, statistics, rows, cols, x.meta.strides[0],
        eps, centered, ROWS, COLS, COLS.bit_length() - 1, num_warps=4,
    )  # fmt: skip
    return statistics


@resolver
def resolve_row_statistics(x: TensorMeta, device: torch.device, eps: float, centered: bool) -> Launch:
    """``(x) -> statistics``."""
    builder = LaunchBuilder(device, inputs=1)
    return builder.launch(add_row_statistics(builder, Matrix(*builder.inputs, x), eps, centered))


def row_statistics(x: Tensor, eps: float, centered: bool) -> Tensor:
    """FP32 [2, M] of x [M, K], whose rows have unit stride; the second row is left unset unless ``centered``."""
    (statistics,) = resolve_row_statistics(meta_of(x), x.device, eps, centered)(x)
    return statistics
