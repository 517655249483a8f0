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
from fp4engine.kernels.cast import Side
from fp4engine.kernels.encode import NAN, block_amax, hadamard_amax, operand_amax, round_pair, to_bits
from fp4engine.kernels.launch import Launch, is_column_major
from fp4engine.kernels.load import Prologue, read_blocks, read_rows, store_blocks, store_rows
from fp4engine.kernels.overlap import let_next_begin, overlapping, wait_for_previous
from fp4engine.kernels.source import Source
from fp4engine.kernels.start import start
from fp4engine.kernels.tape import Tapes

INFINITY_BITS = tl.constexpr(0x7F800000)
CLEARED = 1024
"""Maxima that a program of :func:`clear_kernel` sets to zero."""


@triton.jit
def clear_kernel(row_amax_ptr, col_amax_ptr, rows, cols, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    """Zeros for :func:`amax_kernel` to start from.

    Every program waits for what came before and only then lets :func:`amax_kernel` begin, so x is complete by then.
    """
    wait_for_previous(HARDWARE)
    let_next_begin(HARDWARE)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if row_amax_ptr is not None:
        tl.store(row_amax_ptr + index, 0.0, mask=index < rows)
    if col_amax_ptr is not None:
        tl.store(col_amax_ptr + index, 0.0, mask=index < cols)


@triton.jit
def bits_of_largest(magnitude):
    """Scalar: the bits of the largest of a tensor's elements, each NaN or not negative."""
    bits = (to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    return tl.max(tl.reshape(bits, [magnitude.numel]), axis=0)


@triton.jit
def store_amax(amax_ptr, bits):
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def store_amax_per_row(amax_ptr, index, magnitude, rows, AXIS: tl.constexpr):
    bits = tl.max((to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=AXIS)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + index, bits, mask=index < rows, sem="relaxed")


@triton.jit
def block_largest(y, SIDE: tl.constexpr, dtype: tl.constexpr, EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    """Per block, a side's largest magnitude: rounded if ``EXACT``; otherwise before that, and right where finite."""
    if EXACT:
        return operand_amax(y, SIDE, dtype, HARDWARE)
    elif SIDE.signs is None:
        return block_amax(y)
    else:
        return hadamard_amax(y, SIDE)


@triton.jit
def largest(
    source, y_ptr, row_amax_ptr, col_amax_ptr, M, K, dtype: tl.constexpr, EXACT: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Bits of the program's largest values, rowwise and columnwise; 0 for a side that is left out or goes by rows.

    Each program takes every ``num_programs``-th tile; a per-tensor amax stays in registers until its last one.
    """
    GROUPS: tl.constexpr = TILE_M // 16
    SHARED: tl.constexpr = (  # pyright: ignore[reportAssignmentType]
        ROW is not None and COL is not None and ROW.signs is None and not ROW.per_row
    )
    row_amax = tl.zeros([GROUPS, TILE_K] if SHARED else [TILE_M, TILE_K // 16], tl.float32)
    col_amax = tl.zeros([GROUPS, TILE_K] if COL is not None else [1], tl.float32)
    tiles_k = tl.cdiv(K, TILE_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE_M) * tiles_k, tl.num_programs(0)):
        row0 = (tile // tiles_k) * TILE_M
        col0 = (tile % tiles_k) * TILE_K
        if ROW is not None and not SHARED:
            y = read_blocks(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
            if y_ptr is not None and COL is None:
                store_blocks(y_ptr, y, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            block = tl.reshape(block_largest(y, ROW, dtype, EXACT, HARDWARE), [TILE_M, TILE_K // 16])
            if ROW.per_row:
                store_amax_per_row(row_amax_ptr, row0 + tl.arange(0, TILE_M), block, M, 1)
            else:
                row_amax = tl.maximum(row_amax, block, propagate_nan=NAN)
        if COL is not None:
            y = read_rows(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
            if y_ptr is not None:
                store_rows(y_ptr, y, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            if SHARED:
                row_amax = tl.maximum(row_amax, block_amax(y), propagate_nan=NAN)
            block = block_largest(y, COL, dtype, EXACT, HARDWARE)
            if COL.per_row:
                store_amax_per_row(col_amax_ptr, col0 + tl.arange(0, TILE_K), block, K, 0)
            else:
                col_amax = tl.maximum(col_amax, block, propagate_nan=NAN)
    row_amax, _ = round_pair(row_amax, row_amax, dtype, HARDWARE)  # changes a rotated side only
    col_amax, _ = round_pair(col_amax, col_amax, dtype, HARDWARE)
    return bits_of_largest(row_amax), bits_of_largest(col_amax)


@triton.jit(do_not_specialize=["M", "K"])
def amax_kernel(
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr, y_ptr, row_amax_ptr, col_amax_ptr, M, K, stride_m, stride_k,
    ROW: tl.constexpr, COL: tl.constexpr, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Maxima of every tile.

    ``y_ptr``: where to write the matrix itself, row-major, or None. x is complete, the maxima may not be zero yet: see
    :mod:`fp4engine.kernels.overlap`.
    """
    let_next_begin(HARDWARE)
    PER_ROW: tl.constexpr = (ROW is not None and ROW.per_row) or (COL is not None and COL.per_row)  # pyright: ignore[reportAssignmentType]
    if PER_ROW:
        wait_for_previous(HARDWARE)
    dtype: tl.constexpr = x_ptr.dtype.element_ty if PROLOGUE is None else PROLOGUE.dtype
    source = (x_ptr, statistics_ptr, gamma_ptr, beta_ptr, stride_m, stride_k)
    ROTATED: tl.constexpr = (  # pyright: ignore[reportAssignmentType]
        (ROW is not None and ROW.signs is not None) or (COL is not None and COL.signs is not None)
    )
    EXACT: tl.constexpr = PER_ROW or dtype == tl.float32 or not ROTATED  # pyright: ignore[reportAssignmentType]
    row_bits, col_bits = largest(
        source, y_ptr, row_amax_ptr, col_amax_ptr, M, K, dtype, EXACT, ROW, COL, PROLOGUE, TILE_M, TILE_K, EVEN,
        HARDWARE,
    )  # fmt: skip
    if not EXACT:  # what is not finite may be another such value, or finite after all
        if tl.maximum(row_bits, col_bits) >= INFINITY_BITS:
            row_bits, col_bits = largest(
                source, None, row_amax_ptr, col_amax_ptr, M, K, dtype, True, ROW, COL, PROLOGUE, TILE_M, TILE_K, EVEN,
                HARDWARE,
            )  # fmt: skip
    if not PER_ROW:
        wait_for_previous(HARDWARE)
    if ROW is not None and not ROW.per_row:
        store_amax(row_amax_ptr, row_bits)
    if COL is not None and not COL.per_row:
        store_amax(col_amax_ptr, col_bits)


def tile_shape(col: Side | None, prologue: Prologue | None = None) -> tuple[int, int]:
    """Rows and columns of a tile; fewer columns where each has a gamma in registers."""
    if col is None:
        return 8, 1024
    return (64, 128) if prologue is None or not prologue.is_norm else (128, 64)


def _size(side: Side | None, rows: int) -> int:
    """Number of maxima of a side."""
    if side is None:
        return 0
    return rows if side.per_row else 1


def amax(
    x: Tensor | Source, rowwise: CastSpec | None, columnwise: CastSpec | None, *, out: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Outer amax of the sides whose spec is given, FP32: [1] per tensor, [operand rows] per row; 0 for an empty group.

    Args:
        x: [M, K] BF16, FP16 or FP32, any strides.
        rowwise, columnwise: what :func:`fp4engine.kernels.quantize.supports` covers.
        out: contiguous [M, K]; x is written to it on the way.
    """
    if not isinstance(x, Tensor) or out is not None:
        return _amax(rowwise, columnwise, x, out)[0]
    problem = (rowwise, columnwise)
    return _tapes.run(problem, (x,), _amax, problem)[0]


_tapes = Tapes(most=1024)


def _amax(
    rowwise: CastSpec | None, columnwise: CastSpec | None, x: Tensor | Source, out: Tensor | None = None
) -> tuple[tuple[Tensor | None, Tensor | None], None]:
    if isinstance(x, Tensor) and is_column_major(x):
        (columnwise_amax, rowwise_amax), _ = _amax(columnwise, rowwise, x.T)
        return (rowwise_amax, columnwise_amax), None
    source = Source.of(x)
    rows, cols = source.shape
    row = Side.of(rowwise, "codes", 0) if rowwise else None
    col = Side.of(columnwise, "codes", 1) if columnwise else None
    sizes = (_size(row, rows), _size(col, cols))
    row_amax = torch.empty(sizes[0], dtype=torch.float32, device=source.device) if row else None
    col_amax = torch.empty(sizes[1], dtype=torch.float32, device=source.device) if col else None
    if any(sizes):
        launch = Launch.of(source, *tile_shape(col, source.prologue))
        overlap = overlapping(launch.hardware)
        constants = (CLEARED, launch.hardware)
        start(clear_kernel, -(-max(sizes) // CLEARED), (row_amax, col_amax), sizes, constants, num_warps=4, **overlap)
        if launch.tiles:
            programs = min(launch.tiles, 8 * launch.multiprocessors)
            pointers = (*source.pointers, out, row_amax, col_amax)
            parts = (row, col, source.prologue)
            # 128 registers per thread: 4 programs live on an SM, and 8 take turns without a rest; SiLU would take 168.
            options = {"maxnreg": 128} if source.prologue is not None and source.x.element_size() == 2 else {}
            launch(amax_kernel, programs, pointers, (rows, cols, *source.x.stride()), parts, **options, **overlap)
    return (row_amax, col_amax), None
