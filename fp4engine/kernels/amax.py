"""Outer amax of one or both sides in ONE read of x.

    A_row = max|x|        A_col = max|rotated x.T|        per tensor, or per row of the operand; NaN wins

Maxima are taken over FP32 bit patterns without the sign: their order as integers is the order of the magnitudes, with
NaN above infinity. An amax per tensor leaves :func:`add_amax` as parts, one for each program, so nothing has to be
cleared before. The first programs that need it take the largest part and leave it for those behind them
(:func:`whole_amax`); whoever writes it writes the same. Maxima per row are collected by ``atomic_max``, whose result
does not depend on the programs' order, in memory cleared before.

Legend: x is [M, K]; rowwise operand [M, K], columnwise operand [K, M].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.amax_history import History, choose
from fp4engine.kernels.cast import Side
from fp4engine.kernels.encode import NAN, block_amax, from_bits, hadamard_amax, operand_amax, round_pair, to_bits
from fp4engine.kernels.launch import (
    WIDTHS,
    Launch,
    LaunchBuilder,
    Place,
    TensorMeta,
    Tiles,
    device_facts,
    fitting,
    meta_of,
    resolver,
)
from fp4engine.kernels.load import Prologue, Reading, read_blocks, read_rows, store_blocks, store_rows
from fp4engine.kernels.overlap import let_next_begin, overlapping, wait_for_previous

INFINITY_BITS = tl.constexpr(0x7F800000)
CLEARED = 1024
"""Maxima that a program of :func:`clear_kernel` sets to zero."""
SHARED_ROWS = 128
"""Rows of an operand that share an amax under ``Outer.ROWS128``."""
MOST_PARTS = 1024
"""Parts of an amax per tensor."""


@triton.jit
def clear_kernel(row_amax_ptr, col_amax_ptr, rows, cols, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    """Zeros for maxima per row, or per expert, to start from."""
    let_next_begin(HARDWARE)
    wait_for_previous(HARDWARE)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if row_amax_ptr is not None:
        tl.store(row_amax_ptr + index, 0.0, mask=index < rows)
    if col_amax_ptr is not None:
        tl.store(col_amax_ptr + index, 0.0, mask=index < cols)


@triton.jit
def largest_part(parts_ptr, parts):
    """Bits of the amax of which ``parts`` parts are there, a scalar: int32; 0 without any.

    Parts are read 32 at a time, which every warp holds whole, so that no warp waits for another.
    """
    lane = tl.arange(0, 32)
    largest = tl.zeros([32], tl.int32)
    for first in tl.range(0, parts, 512):
        for step in tl.static_range(16):
            index = first + 32 * step + lane
            place = parts_ptr.to(tl.pointer_type(tl.int32)) + index
            largest = tl.maximum(largest, tl.load(place, mask=index < parts, other=0) & 0x7FFFFFFF)
    return tl.max(largest, axis=0)


@triton.jit
def whole_amax(parts_ptr, whole_ptr, parts):
    """The amax of which ``parts`` parts are there, a scalar; read at ``whole_ptr`` once a program has left it there.

    Bits with a sign say that none has. Warps of one program may find it and not find it: what they get is the same, and
    within the branch none waits for another.
    """
    whole = whole_ptr.to(tl.pointer_type(tl.int32))
    bits = tl.load(whole, cache_modifier=".cg")
    if bits < 0:
        bits = largest_part(parts_ptr, parts)
        tl.store(whole, bits)
    return from_bits(bits.to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["parts"])
def fold_kernel(row_parts_ptr, col_parts_ptr, row_amax_ptr, col_amax_ptr, parts, HARDWARE: tl.constexpr):
    """Parts to the amax itself, where nobody casts by it at once."""
    let_next_begin(HARDWARE)
    wait_for_previous(HARDWARE)
    if row_parts_ptr is not None:
        tl.store(row_amax_ptr.to(tl.pointer_type(tl.int32)), largest_part(row_parts_ptr, parts))
    if col_parts_ptr is not None:
        tl.store(col_amax_ptr.to(tl.pointer_type(tl.int32)), largest_part(col_parts_ptr, parts))


@triton.jit
def bits_of_largest(magnitude):
    """Scalar: the bits of the largest of a tensor's elements, each NaN or not negative."""
    bits = (to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    return tl.max(tl.reshape(bits, [magnitude.numel]), axis=0)


@triton.jit
def store_part(parts_ptr, whole_ptr, bits):
    """The program's part of an amax, of which :func:`whole_amax` is to know nothing yet."""
    tl.store(parts_ptr.to(tl.pointer_type(tl.int32)) + tl.program_id(0), bits)
    if whole_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(whole_ptr.to(tl.pointer_type(tl.int32)), -1)


@triton.jit
def store_amax(amax_ptr, bits):
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def store_amax_per_row(amax_ptr, index, magnitude, rows, AXIS: tl.constexpr):
    bits = tl.max((to_bits(magnitude) & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=AXIS)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + index, bits, mask=index < rows, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def share_rows_kernel(amax_ptr, rows, GROUP: tl.constexpr):
    """Of each ``GROUP`` rows the largest amax, for all of them; NaN among them."""
    index = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    place = amax_ptr.to(tl.pointer_type(tl.int32)) + index
    most = tl.max(tl.load(place, mask=index < rows, other=0), axis=0)
    tl.store(place, index * 0 + most, mask=index < rows)


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


@triton.jit(do_not_specialize=["M"])
def amax_kernel(
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr, y_ptr, row_amax_ptr, row_whole_ptr, col_amax_ptr, col_whole_ptr,
    values_ptr, past_amax_ptr, M, K, stride_m, stride_k, length, CHOICE: tl.constexpr, ROOM: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Maxima of every tile.

    ``values_ptr`` and what comes with it: of :func:`fp4engine.kernels.amax_history.choose`; None without a history.

    ``*_amax_ptr``: a part for each program, or zeros for each row of the operand.
    ``*_whole_ptr``: where :func:`whole_amax` will look for the amax of the tensor, or None.
    ``y_ptr``: where to write the matrix itself, row-major, or None.
    """
    let_next_begin(HARDWARE)
    wait_for_previous(HARDWARE)
    if values_ptr is not None:
        if tl.program_id(0) == 0:
            choose(values_ptr, past_amax_ptr, None, length, CHOICE, ROOM)
    PER_ROW: tl.constexpr = (ROW is not None and ROW.per_row) or (COL is not None and COL.per_row)  # pyright: ignore[reportAssignmentType]
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
    if ROW is not None and not ROW.per_row:
        store_part(row_amax_ptr, row_whole_ptr, row_bits)
    if COL is not None and not COL.per_row:
        store_part(col_amax_ptr, col_whole_ptr, col_bits)


def tile_shape(
    col: Side | None, prologue: Prologue | None = None, cols: int = WIDTHS[0], itemsize: int = 2
) -> tuple[int, int]:
    """Rows and columns of a tile of a matrix with ``cols`` columns, of elements of ``itemsize`` bytes.

    What is read as it lies, rowwise, and has 16 bits an element, is read in larger tiles, and a gated activation in
    smaller ones: it needs the registers. Where columns have a gamma in registers, there are fewer.
    """
    is_norm = prologue is not None and prologue.is_norm
    if prologue is not None and prologue.gated:
        size = 4096
    elif col is not None or prologue is not None or itemsize > 2:
        size = 8192
    else:
        size = 16384
    width = fitting(cols, *(WIDTHS if col is None else (64,) if is_norm else (128, 64)))
    return size // width, width


class Maxima(NamedTuple):
    """Where the outer amaxes of both sides are; None for a side that is not asked for.

    Attributes:
        row, col: parts of an amax per tensor, or the amaxes of each row themselves.
        parts: how many parts there are.
    """

    row: Place | None
    col: Place | None
    parts: int


Pair = tuple[Any | None, Any | None]
"""A place for each side, whole or a part of one."""


def add_amax(
    builder: LaunchBuilder,
    source: Reading,
    row: Side | None,
    col: Side | None,
    amaxes: Pair,
    y: Place | None = None,
    history: History | None = None,
) -> Maxima:
    """Take the maxima of the sides, and write the matrix to ``y`` on the way; begin a step of ``history``.

    Args:
        amaxes: where an amax for each row goes; one per tensor is left in parts, and :func:`whole_amax` puts it there.
    """
    rows, cols = source.shape
    hardware, multiprocessors = device_facts(builder.device)
    overlap = overlapping(hardware)
    tiles = Tiles.of(source.shape, builder.device, *tile_shape(col, source.prologue, cols, source.x.dtype.itemsize))
    # As many as run on a multiprocessor at once on sm_90, or twice as many: 5 of a gated activation, else 4.
    per_multiprocessor = 5 if source.prologue is not None and source.prologue.gated else 8
    programs = min(tiles.programs, per_multiprocessor * multiprocessors, MOST_PARTS)
    programs = max(programs, 1)  # one says that an empty matrix has 0
    sizes = [length if side is not None and side.per_row else 0 for side, length in ((row, rows), (col, cols))]
    if any(sizes):
        cleared = [amax if size else None for amax, size in zip(amaxes, sizes, strict=True)]
        add_zeros(builder, cleared, sizes)
    asked = ((row, amaxes[0]), (col, amaxes[1]))
    in_parts = [side is not None and not side.per_row for side, _ in asked]
    row_max, col_max = (
        builder.buffer((programs,), torch.float32) if parts else amax
        for parts, (_, amax) in zip(in_parts, asked, strict=True)
    )
    row_whole, col_whole = (amax if parts else None for parts, (_, amax) in zip(in_parts, asked, strict=True))
    places, constants = (history.places, history.constants) if history else ((None, None), (0, "", 1))
    builder.step(
        amax_kernel, programs, *source.places, y, row_max, row_whole, col_max, col_whole, *places, rows, cols,
        *source.x.strides, *constants, row, col, source.prologue, *tiles.constants, num_warps=4, **overlap,
    )  # fmt: skip
    for (side, amax), size in zip(asked, sizes, strict=True):
        if side is not None and side.shared_rows:
            add_sharing(builder, amax, size)
    return Maxima(row_max, col_max, programs)


def add_sharing(builder: LaunchBuilder, amax: Any, rows: int) -> None:
    """Let each 128 of the amaxes of ``rows`` rows be the largest of them."""
    builder.step(share_rows_kernel, -(-rows // SHARED_ROWS), amax, rows, SHARED_ROWS, num_warps=4)


def add_zeros(builder: LaunchBuilder, places: Sequence[Any | None], sizes: Sequence[int]) -> None:
    """Clear two FP32 vectors."""
    hardware, _ = device_facts(builder.device)
    programs = -(-max(sizes) // CLEARED)
    builder.step(clear_kernel, programs, *places, *sizes, CLEARED, hardware, num_warps=4, **overlapping(hardware))


def amax_size(side: Side | None, rows: int) -> int:
    """Number of outer amaxes of a side whose operand has that many rows."""
    if side is None:
        return 0
    return rows if side.per_row else 1


@resolver
def resolve_amax(x: TensorMeta, device: torch.device, rowwise: str, columnwise: str) -> Launch:
    """``(x) -> amaxes`` of the sides whose spec's key is given."""
    builder = LaunchBuilder(device, inputs=1)
    row, col = Side.of_key(rowwise, "codes", 0), Side.of_key(columnwise, "codes", 1)
    row_amax, col_amax = (
        builder.buffer((amax_size(side, length),), torch.float32) if side else None
        for side, length in zip((row, col), x.shape, strict=True)
    )
    add_folded_amax(builder, Reading(x, None, builder.inputs[0]), row, col, (row_amax, col_amax))
    return builder.launch(*[amax for amax in (row_amax, col_amax) if amax is not None])


def add_folded_amax(builder: LaunchBuilder, source: Reading, row: Side | None, col: Side | None, amaxes: Pair) -> None:
    """Take the maxima of the sides to ``amaxes``, where nobody casts by them at once: nothing is left in parts."""
    if 0 in source.shape:
        add_zeros(
            builder, amaxes, [amax_size(side, length) for side, length in zip((row, col), source.shape, strict=True)]
        )
        return
    if source.x.is_column_major:
        source, (row, col), amaxes = source._replace(x=source.x.transposed), (col, row), (amaxes[1], amaxes[0])
    maxima = add_amax(builder, source, row, col, amaxes)
    folded = [side is not None and not side.per_row for side in (row, col)]
    parts = [place if fold else None for place, fold in zip(maxima[:2], folded, strict=True)]
    add_fold(builder, parts, amaxes, maxima.parts)


def add_fold(builder: LaunchBuilder, parts: Sequence[Any | None], amaxes: Pair, count: int) -> None:
    """Take the largest of ``count`` parts to its place in ``amaxes``, for each side that has parts."""
    outs = [None if part is None else amax for part, amax in zip(parts, amaxes, strict=True)]
    if any(parts):
        hardware, _ = device_facts(builder.device)
        builder.step(fold_kernel, 1, *parts, *outs, count, hardware, num_warps=4, **overlapping(hardware))


def amax(x: Tensor, rowwise: CastSpec | None, columnwise: CastSpec | None) -> tuple[Tensor | None, Tensor | None]:
    """Outer amax of the sides whose spec is given, FP32: [1] per tensor, [operand rows] per row; 0 for an empty group.

    Args:
        x: [M, K] BF16, FP16 or FP32, any strides.
        rowwise, columnwise: what :func:`fp4engine.kernels.quantize.supports` covers.
    """
    keys = [spec.key if spec else "" for spec in (rowwise, columnwise)]
    outputs = iter(resolve_amax(meta_of(x), x.device, *keys)(x))
    return next(outputs) if rowwise else None, next(outputs) if columnwise else None
