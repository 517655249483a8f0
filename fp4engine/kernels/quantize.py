"""One pass over x that casts it rowwise, columnwise, or both.

    rowwise:    codes, scale_inv = cast(x)        columnwise:    codes, scale_inv = cast(x.T)

A program owns a tile of TILE_M rows and TILE_K columns, whole groups of 16 rows if there is a columnwise half
(:func:`tile_shape`). The rowwise half reads it as blocks along the columns, two 16-byte loads per block and one block
per thread; the columnwise half reads it again, from L1, as 16 row vectors per group of 16 rows, so that a thread holds
whole columns of blocks. Only the columnwise output is transposed, through shared memory and after packing, 8 times
smaller than x.

Legend: x is [M, K]; rowwise operand [M, K], columnwise operand [K, M].
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import E2M1, E4M3, CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.kernels.amax import Maxima, add_amax, add_zeros, amax_size, whole_amax
from fp4engine.kernels.cast import Side, cast_block, products_stay_normal
from fp4engine.kernels.encode import stack
from fp4engine.kernels.launch import WIDTHS, LaunchBuilder, Place, TensorMeta, Tiles, device_facts, fitting
from fp4engine.kernels.load import Prologue, Reading, read_blocks, read_rows
from fp4engine.kernels.overlap import let_next_begin, overlapping, wait_for_previous


@triton.jit
def load_amax(amax_ptr, whole_ptr, parts, index, limit, SIDE: tl.constexpr):
    """The outer amax of each row, or of the tensor; there whole, or in ``parts`` and then written to ``whole_ptr``."""
    if SIDE.per_row:
        return tl.load(amax_ptr + index, mask=index < limit, other=0.0)
    elif whole_ptr is None:
        return tl.load(amax_ptr)
    else:
        return whole_amax(amax_ptr, whole_ptr, parts)


@triton.jit
def cast_rowwise(
    x, amax, out_ptr, scale_ptr, rng_ptr, stream, M, K, row0, col0, DTYPE: tl.constexpr, SIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks that lie along the rows, each position a tensor [TILE_M * TILE_K / 16]."""
    BLOCKS: tl.constexpr = TILE_K // 16
    index = tl.arange(0, TILE_M * BLOCKS)
    row = index // BLOCKS
    block = index % BLOCKS
    scale, words = cast_block(
        x, amax, rng_ptr, col0 // 16 + block, row0 + row, stream, DTYPE, SIDE, TILE_M // 16, BLOCKS, FUSED, HARDWARE
    )
    blocks = (K + 15) // 16
    first = row0.to(tl.int64) * blocks + col0 // 16
    where = row * blocks + block
    word = tl.arange(0, SIDE.words)[None, :]
    target = out_ptr.to(tl.pointer_type(tl.uint32)) + first * SIDE.words + (where[:, None] * SIDE.words + word)
    scale_target = scale_ptr.to(tl.pointer_type(tl.uint8)) + first + where
    if EVEN:
        tl.store(target, stack(words))
        tl.store(scale_target, scale)
    else:
        inside = (row < M - row0) & (block * 16 < K - col0)
        tl.store(target, stack(words), mask=inside[:, None])
        tl.store(scale_target, scale, mask=inside)


@triton.jit
def cast_columnwise(
    x, amax, out_ptr, scale_ptr, rng_ptr, stream, M, K, row0, col0, DTYPE: tl.constexpr, SIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks that lie down the columns, each position a tensor [TILE_M / 16, TILE_K]."""
    GROUPS: tl.constexpr = TILE_M // 16
    group = tl.arange(0, GROUPS)[:, None]
    col = tl.arange(0, TILE_K)[None, :]
    scale, words = cast_block(
        x, amax, rng_ptr, row0 // 16 + group, col0 + col, stream, DTYPE, SIDE, GROUPS * TILE_K // 16, 1, FUSED, HARDWARE
    )
    groups = (M + 15) // 16
    first = col0.to(tl.int64) * groups + row0 // 16
    packed = tl.reshape(tl.permute(stack(words), [1, 0, 2]), [TILE_K, GROUPS * SIDE.words])
    out_col = tl.arange(0, TILE_K)[:, None]
    word = tl.arange(0, GROUPS * SIDE.words)[None, :]
    out_group = tl.arange(0, GROUPS)[None, :]
    target = out_ptr.to(tl.pointer_type(tl.uint32)) + first * SIDE.words + (out_col * (groups * SIDE.words) + word)
    scale_target = scale_ptr.to(tl.pointer_type(tl.uint8)) + first + (out_col * groups + out_group)
    if EVEN:
        tl.store(target, packed)
        tl.store(scale_target, tl.trans(scale))
    else:
        groups_left = groups - row0 // 16
        tl.store(target, packed, mask=(out_col < K - col0) & (word < groups_left * SIDE.words))
        tl.store(scale_target, tl.trans(scale), mask=(out_col < K - col0) & (out_group < groups_left))


@triton.jit(do_not_specialize=["M", "stream", "parts"])
def quantize_kernel(
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr,
    row_amax_ptr, row_whole_ptr, row_out_ptr, row_scale_ptr, col_amax_ptr, col_whole_ptr, col_out_ptr, col_scale_ptr,
    rng_ptr, M, K, stride_m, stride_k, stream, parts,
    ROW: tl.constexpr, COL: tl.constexpr, PROLOGUE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid``, tiles counted along K first so that neighbours complete each other's sectors of the scales."""
    let_next_begin(HARDWARE)
    wait_for_previous(HARDWARE)
    tiles = tl.cdiv(K, TILE_K)
    row0 = (tl.program_id(0) // tiles) * TILE_M
    col0 = (tl.program_id(0) % tiles) * TILE_K
    dtype: tl.constexpr = x_ptr.dtype.element_ty if PROLOGUE is None else PROLOGUE.dtype
    source = (x_ptr, statistics_ptr, gamma_ptr, beta_ptr, stride_m, stride_k)
    if ROW is not None:
        x = read_blocks(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
        row = row0 + tl.arange(0, TILE_M * TILE_K // 16) // (TILE_K // 16)
        amax = load_amax(row_amax_ptr, row_whole_ptr, parts, row, M, ROW)
        if products_stay_normal(amax, ROW, dtype):
            cast_rowwise(x, amax, row_out_ptr, row_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, True, EVEN, HARDWARE)  # fmt: skip
        else:
            cast_rowwise(x, amax, row_out_ptr, row_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, False, EVEN, HARDWARE)  # fmt: skip
    if COL is not None:
        x = read_rows(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
        col = col0 + tl.arange(0, TILE_K)[None, :]
        amax = load_amax(col_amax_ptr, col_whole_ptr, parts, col, K, COL)
        if products_stay_normal(amax, COL, dtype):
            cast_columnwise(x, amax, col_out_ptr, col_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, True, EVEN, HARDWARE)  # fmt: skip
        else:
            cast_columnwise(x, amax, col_out_ptr, col_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, False, EVEN, HARDWARE)  # fmt: skip


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether these kernels cover ``spec`` on inputs of ``x_dtype``, and if not, why."""
    rotation = spec.rotation
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.element == E2M1, f"element={spec.element}"),
        (spec.scale == E4M3, f"scale={spec.scale}"),
        (
            spec.scale_rule is ScaleRule.AMAX or spec.scale_rule.is_four_over_six,
            f"scale_rule={spec.scale_rule.value}",
        ),
        (spec.block in ((1, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE)), f"block={spec.block}"),
        (spec.rounding in (RoundingMode.EVEN, RoundingMode.STOCHASTIC), f"rounding={spec.rounding.value}"),
        (spec.outer in (Outer.TENSOR, Outer.ROW, Outer.ROWS128), f"outer={spec.outer.value}"),
        (rotation is None or (rotation.size == 16 and not rotation.signs.is_fresh), f"rotation={rotation}"),
        (spec.correction is Correction.NONE, f"correction={spec.correction.value}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the kernels that cast both sides at once do not cover {what}"
    return True, ""


def data_of(side: Side, rows: int, cols: int) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of the codes or values of an operand of ``rows`` by ``cols``."""
    blocks = -(-cols // BLOCK_SIZE)
    if side.words == 2:
        return (rows, blocks * BLOCK_SIZE // 2), torch.uint8
    return (rows, blocks * BLOCK_SIZE), torch.bfloat16


def scales_of(rows: int, cols: int) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of the block scales of an operand of ``rows`` by ``cols``."""
    return (rows, -(-cols // BLOCK_SIZE)), torch.float8_e4m3fn


def tile_shape(
    row: Side | None, col: Side | None, small: bool = False, prologue: Prologue | None = None, cols: int = WIDTHS[0]
) -> tuple[int, int]:
    """Rows and columns of a program's tile of a matrix with ``cols`` columns, whole 16x16 tiles where a side has them.

    512 blocks of 16 either way; 128, one per thread, in a ``small`` problem, where latency is all, and where several
    scales are tried, which takes registers. A prologue keeps a weight per column in registers, so it has few columns.
    """
    small = small or any(side is not None and (side.error or side.search) for side in (row, col))
    size, rows = (128 if small else 512) * BLOCK_SIZE, BLOCK_SIZE if row and row.tiled else 8
    if col:
        width = 64 if small or prologue is not None else fitting(cols, 128, 64)
    else:
        width = fitting(cols, *(width for width in WIDTHS if rows * width <= size))
    return size // width, width


class Target(NamedTuple):
    """Where one side of a cast goes.

    Attributes:
        side: what the kernel is to know of its spec.
        amax: of the tensor, or of each row of the operand; given, or to be written.
        is_given: whether ``amax`` is there already.
        data: codes or values.
        scale_inv: block scales.
    """

    side: Side
    amax: Place
    is_given: bool
    data: Place
    scale_inv: Place


def add_cast(
    builder: LaunchBuilder, reading: Reading, row: Target | None, col: Target | None, rng: Place | None, stream: int
) -> None:
    """Cast the sides that have a target, with the amaxes that are not given taken before."""
    if reading.x.is_column_major and reading.prologue is None:
        reading, row, col = reading._replace(x=reading.x.transposed), col, row
    row_side, col_side = (target.side if target else None for target in (row, col))
    missing = [target is not None and not target.is_given for target in (row, col)]
    maxima = Maxima(row.amax if row else None, col.amax if col else None, 0)
    if 0 in reading.shape:
        amaxes = [target.amax if target and gone else None for target, gone in zip((row, col), missing, strict=True)]
        if any(missing):
            sizes = [
                amax_size(s, n) if amax else 0
                for s, n, amax in zip((row_side, col_side), reading.shape, amaxes, strict=True)
            ]
            add_zeros(builder, amaxes, sizes)
        return
    if any(missing):
        asked = [target.side if target and gone else None for target, gone in zip((row, col), missing, strict=True)]
        is_activation = reading.prologue is not None and not reading.prologue.is_norm
        dtype = reading.dtype
        y = builder.buffer(reading.shape, dtype) if is_activation else None
        found = add_amax(builder, reading, asked[0], asked[1], (maxima.row, maxima.col), y)
        if y is not None:
            reading = Reading(TensorMeta(reading.shape, (reading.shape[1], 1), dtype, True), None, y)
        maxima = Maxima(found.row if missing[0] else maxima.row, found.col if missing[1] else maxima.col, found.parts)
    shape_of = partial(tile_shape, row_side, col_side, prologue=reading.prologue, cols=reading.shape[1])
    tiles = Tiles.of(reading.shape, builder.device, *shape_of())
    hardware, multiprocessors = device_facts(builder.device)
    if tiles.programs < multiprocessors:
        tiles = Tiles.of(reading.shape, builder.device, *shape_of(small=True))
    targets: list[Place | None] = []
    for target, amax, gone in ((row, maxima.row, missing[0]), (col, maxima.col, missing[1])):
        in_parts = target is not None and gone and not target.side.per_row
        targets += [amax, target.amax if target and in_parts else None]
        targets += [target.data, target.scale_inv] if target else [None, None]
    builder.step(
        quantize_kernel, tiles.programs, *reading.places, *targets, rng, *reading.shape, *reading.x.strides, stream,
        maxima.parts, row_side, col_side, reading.prologue, *tiles.constants[:-1], hardware,
        num_warps=4, **overlapping(hardware),
    )  # fmt: skip
