"""Outer amax of one or both sides in ONE read of x.

    A_row = max|x|        A_col = max|rotated x.T|        per tensor, or per row of the operand; NaN wins

Maxima are taken over FP32 bit patterns without the sign: their order as integers is the order of the magnitudes, with
NaN above infinity. So programs may meet in ``atomic_max`` and the result does not depend on their order.

Legend: x is [M, K]; rowwise operand [M, K], columnwise operand [K, M].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.cast import Side, widen
from fp4engine.kernels.encode import NAN, block_amax, rotate, to_bits
from fp4engine.kernels.launch import Launch, is_column_major
from fp4engine.kernels.load import load_blocks, load_rows


@triton.jit
def store_amax(amax_ptr, magnitude):
    bits = (to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    bits = tl.max(tl.reshape(bits, [magnitude.numel]), axis=0)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def store_amax_per_row(amax_ptr, index, magnitude, rows, AXIS: tl.constexpr):
    bits = tl.max((to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=AXIS)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + index, bits, mask=index < rows, sem="relaxed")


@triton.jit
def amax_rowwise(
    x_ptr, stride_m, stride_k, M, K, row0, col0,
    SIDE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Largest magnitude per block of the rowwise operand: [TILE_M, TILE_K / 16]."""
    x = load_blocks(x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
    wide = widen(x)
    if SIDE.signs is not None:
        wide = rotate(wide, SIDE, x[0].dtype, HARDWARE)
    return tl.reshape(block_amax(wide), [TILE_M, TILE_K // 16])


@triton.jit(do_not_specialize=["M", "K"])
def amax_kernel(
    x_ptr, row_amax_ptr, col_amax_ptr, M, K, stride_m, stride_k,
    ROW: tl.constexpr, COL: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Each program takes every ``num_programs``-th tile; a per-tensor amax stays in registers until its last one."""
    GROUPS: tl.constexpr = TILE_M // 16
    SHARED: tl.constexpr = (  # pyright: ignore[reportAssignmentType]
        ROW is not None and COL is not None and ROW.signs is None and not ROW.per_row
    )
    if SHARED:
        row_amax = tl.zeros([GROUPS, TILE_K], tl.float32)
    elif ROW is not None:
        row_amax = tl.zeros([TILE_M, TILE_K // 16], tl.float32)
    if COL is not None:
        col_amax = tl.zeros([GROUPS, TILE_K], tl.float32)
    tiles_k = tl.cdiv(K, TILE_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE_M) * tiles_k, tl.num_programs(0)):
        row0 = (tile // tiles_k) * TILE_M
        col0 = (tile % tiles_k) * TILE_K
        if ROW is not None and not SHARED:
            block = amax_rowwise(x_ptr, stride_m, stride_k, M, K, row0, col0, ROW, TILE_M, TILE_K, EVEN, HARDWARE)
            if ROW.per_row:
                store_amax_per_row(row_amax_ptr, row0 + tl.arange(0, TILE_M), block, M, 1)
            else:
                row_amax = tl.maximum(row_amax, block, propagate_nan=NAN)
        if COL is not None:
            x = load_rows(x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            wide = widen(x)
            if SHARED:
                row_amax = tl.maximum(row_amax, block_amax(wide), propagate_nan=NAN)
            if COL.signs is not None:
                wide = rotate(wide, COL, x[0].dtype, HARDWARE)
            block = block_amax(wide)
            if COL.per_row:
                store_amax_per_row(col_amax_ptr, col0 + tl.arange(0, TILE_K), block, K, 0)
            else:
                col_amax = tl.maximum(col_amax, block, propagate_nan=NAN)
    if ROW is not None and not ROW.per_row:
        store_amax(row_amax_ptr, row_amax)
    if COL is not None and not COL.per_row:
        store_amax(col_amax_ptr, col_amax)


def amax(x: Tensor, rowwise: CastSpec | None, columnwise: CastSpec | None) -> tuple[Tensor | None, Tensor | None]:
    """Outer amax of the sides whose spec is given, FP32: [1] per tensor, [operand rows] per row; 0 for an empty group.

    Args:
        x: [M, K] BF16, FP16 or FP32, any strides.
        rowwise, columnwise: what :func:`fp4engine.kernels.quantize.supports` covers.
    """
    if is_column_major(x):
        columnwise_amax, rowwise_amax = amax(x.T, columnwise, rowwise)
        return rowwise_amax, columnwise_amax
    rows, cols = x.shape
    row = Side.of(rowwise, "codes", 0) if rowwise else None
    col = Side.of(columnwise, "codes", 1) if columnwise else None
    row_amax = torch.empty(rows if row.per_row else 1, device=x.device) if row else None
    col_amax = torch.empty(cols if col.per_row else 1, device=x.device) if col else None
    torch._foreach_zero_([amax for amax in (row_amax, col_amax) if amax is not None])  # one launch
    if x.numel() and (row or col):
        launch = Launch.of(x, 8 * 16 if col else 8, 64 if col else 1024)
        programs = min(launch.tiles, 8 * launch.multiprocessors)
        launch(amax_kernel, programs, (x, row_amax, col_amax), (rows, cols, *x.stride()), (row, col))
    return row_amax, col_amax
