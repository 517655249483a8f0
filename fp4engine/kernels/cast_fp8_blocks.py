"""FP8 in blocks of 128: one read of x writes both operands, whose blocks are 1x128 or 128x128.

    rowwise:    codes, scale_inv = cast(x)        columnwise:    codes, scale_inv = cast(x.T)

A program owns 128 rows and 128 columns of x, so that the blocks of both sides lie inside. It holds them as four tensors
[32, 128], the i-th with row i of every four rows. Four neighbours in a column are then elements of one thread, and four
neighbours in a row are too, since a thread reads eight columns at once. A word of either side is four codes of one
thread. Only the columnwise words are transposed, through shared memory, half as large as x.

:mod:`fp4engine.kernels.blocks` has what these casts share with others. Legend: x is [M, K]; rowwise codes
[M, padded K], columnwise codes [K, padded M].
"""

import triton
import triton.language as tl

from fp4engine.formats import E4M3 as E4M3_ELEMENT
from fp4engine.formats import E5M2, E8M0, FP32, Correction, Outer, RoundingMode
from fp4engine.kernels import blocks
from fp4engine.kernels.block_cast import inverse_scale, magnitudes
from fp4engine.kernels.blocks import BlockCast, Target, as_bytes
from fp4engine.kernels.element import encode_element
from fp4engine.kernels.encode import E4M3, NAN, from_bits, stack, wide
from fp4engine.kernels.launch import Block, LaunchBuilder, Place, TensorMeta, device_facts

TILE = 128
"""Rows and columns of a program, and of what a block spans."""
WARPS = 8


@triton.jit
def load_quads(x_ptr, M, K, stride_m, stride_k, row0, col0, TILE: tl.constexpr):
    """Four FP32 tensors [TILE / 4, TILE], the i-th with row i of every four rows; 0 outside x."""
    row = tl.arange(0, TILE // 4)[:, None] * 4
    col = tl.arange(0, TILE)[None, :]
    x_ptr += row0.to(tl.int64) * stride_m + col0.to(tl.int64) * stride_k
    y = ()
    for i in tl.static_range(4):
        inside = (row + i < M - row0) & (col < K - col0)
        y = y + (wide(tl.load(x_ptr + ((row + i) * stride_m + col * stride_k), mask=inside, other=0.0)),)
    return y


@triton.jit
def quarters(t):
    """Four tensors [rows, n / 4], the i-th with element i of every four neighbours of ``t`` [rows, n]."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], t.shape[1] // 4, 2, 2]))
    y0, y2 = tl.split(even)
    y1, y3 = tl.split(odd)
    return y0, y1, y2, y3


@triton.jit
def largest_of_quads(y):
    """The largest of four magnitudes, see :func:`fp4engine.kernels.block_cast.magnitudes`."""
    low = tl.maximum(tl.abs(y[0]), tl.abs(y[1]), propagate_nan=NAN)
    high = tl.maximum(tl.abs(y[2]), tl.abs(y[3]), propagate_nan=NAN)
    return magnitudes(tl.maximum(low, high, propagate_nan=NAN))


@triton.jit
def scale_of(most, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """What blocks whose largest magnitudes are ``most`` store as scale and multiply by, and whether they are finite.

    Powers of two are those of :func:`fp4engine.kernels.block_cast.power_of_two` for elements whose largest binade is
    above 1: a maximum below the normal numbers of FP32 needs no care then, as its power is the least one anyway.
    """
    is_finite = most < 0x7F800000
    if CAST.scale == "fp32":
        encode_scale, stored = inverse_scale(from_bits(most.to(tl.uint32, bitcast=True)), CAST, HARDWARE)
    else:
        exponent = tl.maximum(((most + CAST.carry) >> 23) - CAST.max_exponent, 0)
        encode_scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True) * CAST.element_factor
        stored = tl.where(is_finite, exponent, 255).to(tl.uint8)
    return stored, encode_scale, is_finite


@triton.jit
def encode_quads(y, encode_scale, is_finite, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of the codes of four neighbours; all codes of a block that is not finite are 0.

    Where the hardware converts to E4M3, an addition of 0 takes the sign from -0.0 before it.
    """
    GRID: tl.constexpr = CAST.grid  # Triton 3.6 hands a constant's attribute on as a plain object
    v = (y[0] * encode_scale, y[1] * encode_scale, y[2] * encode_scale, y[3] * encode_scale)
    if CAST.e4m3 and E4M3 & HARDWARE:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [v[0] + 0.0, v[1] + 0.0, v[2] + 0.0, v[3] + 0.0], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = encode_element(v[0], 0, GRID, "even", 0)
        for i in tl.static_range(1, 4):
            word = word | (encode_element(v[i], 0, GRID, "even", 0) << (8 * i))
    return tl.where(is_finite, word, 0)


@triton.jit
def in_rows(t):
    """Four tensors [n, ...], the i-th with row i of every four rows, as one tensor [4 n, ...]."""
    if len(t[0].shape) == 1:
        return tl.reshape(stack(t), [4 * t[0].shape[0]])
    else:
        return tl.reshape(tl.permute(stack(t), [0, 2, 1]), [4 * t[0].shape[0], t[0].shape[1]])


@triton.jit
def store_codes(words, stored, data_ptr, scale_ptr, rows, width, row0, col0, TILE: tl.constexpr):
    """Write words [TILE, TILE / 4] and scales [TILE], or the one that there is, of an operand [rows, width]."""
    row = tl.arange(0, TILE)
    word = tl.arange(0, TILE // 4)[None, :]
    inside = row < tl.where(col0 < width, rows - row0, 0)  # an empty operand has no columns
    data_ptr = data_ptr.to(tl.pointer_type(tl.uint32)) + (row0.to(tl.int64) * width + col0) // 4
    scale_ptr += row0.to(tl.int64) * (width // TILE) + col0 // TILE
    tl.store(data_ptr + (row[:, None] * (width // 4) + word), words, mask=inside[:, None])
    tl.store(scale_ptr + row * (width // TILE), stored, mask=inside)


@triton.jit
def cast_rowwise(
    y, amax_ptr, data_ptr, scale_ptr, M, width, row0, col0, CAST: tl.constexpr, TILE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks along the rows."""
    words = ()
    scales = ()
    if CAST.height > 1:
        stored, encode_scale, is_finite = scale_of(tl.max(largest_of_quads(y)), CAST, HARDWARE)
        for i in tl.static_range(4):
            words = words + (encode_quads(quarters(y[i]), encode_scale, is_finite, CAST, HARDWARE),)
    else:
        for i in tl.static_range(4):
            quads = quarters(y[i])
            stored, encode_scale, is_finite = scale_of(tl.max(largest_of_quads(quads), axis=1), CAST, HARDWARE)
            words = words + (encode_quads(quads, encode_scale[:, None], is_finite[:, None], CAST, HARDWARE),)
            scales = scales + (stored,)
        stored = in_rows(scales)
    store_codes(in_rows(words), stored, data_ptr, scale_ptr, M, width, row0, col0, TILE)
    note_amax(amax_ptr, CAST)


@triton.jit
def cast_columnwise(
    y, amax_ptr, data_ptr, scale_ptr, K, width, row0, col0, CAST: tl.constexpr, TILE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks down the columns."""
    if CAST.height > 1:
        stored, encode_scale, is_finite = scale_of(tl.max(largest_of_quads(y)), CAST, HARDWARE)
        words = encode_quads(y, encode_scale, is_finite, CAST, HARDWARE)
    else:
        stored, encode_scale, is_finite = scale_of(largest_of_columns(largest_of_quads(y)), CAST, HARDWARE)
        words = encode_quads(y, encode_scale[None, :], is_finite[None, :], CAST, HARDWARE)
    store_codes(tl.trans(words), stored, data_ptr, scale_ptr, K, width, col0, row0, TILE)
    note_amax(amax_ptr, CAST)


@triton.jit
def largest_of_columns(m):
    """Maxima of the columns of [rows, n]; in between, neighbours lie apart, so that warps do not meet in the banks."""
    ROWS: tl.constexpr = m.shape[0]
    APART: tl.constexpr = m.shape[1] // 8
    m = tl.reshape(tl.permute(tl.reshape(m, [ROWS, APART, 8]), [0, 2, 1]), [ROWS, 8 * APART])
    return tl.reshape(tl.trans(tl.reshape(tl.max(m, axis=0), [8, APART])), [8 * APART])


@triton.jit
def note_amax(amax_ptr, CAST: tl.constexpr):
    """The first program writes the constant that stands for an outer amax, where somebody asks for it."""
    if amax_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(amax_ptr + tl.arange(0, 1), tl.zeros([1], tl.float32) + CAST.constant_amax)


@triton.jit
def cast_fp8_blocks_kernel(
    x_ptr, row_amax_ptr, row_ptr, row_scale_ptr, col_amax_ptr, col_ptr, col_scale_ptr, M, K, stride_m, stride_k,
    row_width, col_width, tiles_k, ROW: tl.constexpr, COL: tl.constexpr, TILE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of the padded matrix, tiles counted along K first.

    ``*_amax_ptr``: where the constant goes that stands for a side's outer amax, or None. ``*_width``: padded.
    """
    row0 = (tl.program_id(0) // tiles_k) * TILE
    col0 = (tl.program_id(0) % tiles_k) * TILE
    y = load_quads(x_ptr, M, K, stride_m, stride_k, row0, col0, TILE)
    if ROW is not None:
        cast_rowwise(y, row_amax_ptr, row_ptr, row_scale_ptr, M, row_width, row0, col0, ROW, TILE, HARDWARE)
    if COL is not None:
        cast_columnwise(y, col_amax_ptr, col_ptr, col_scale_ptr, K, col_width, row0, col0, COL, TILE, HARDWARE)


def covers(target: Target) -> bool:
    """Whether this kernel casts a side that :func:`fp4engine.kernels.blocks.supports`."""
    spec = target.spec
    return (
        target.form == "codes"
        and spec.element in (E4M3_ELEMENT, E5M2)
        and spec.block in ((1, TILE), (TILE, TILE))
        and spec.scale in (E8M0, FP32)
        and spec.outer is Outer.NONE
        and spec.rounding is RoundingMode.EVEN
        and spec.rotation is None
        and spec.correction is Correction.NONE
    )


def add_casts(
    builder: LaunchBuilder,
    x: TensorMeta,
    place: Place,
    row: Target | None,
    col: Target | None,
    rng: Place | None,
    stream: int,
) -> None:
    """Cast the sides of x [M, K] that have a target, where ``row`` is the rowwise side and ``col`` the columnwise one.

    One start of this file's kernel casts all sides that it :func:`covers`. Any other side is cast by
    :func:`fp4engine.kernels.blocks.add_cast`, which reads x once more.
    """
    both: list[Target | None] = [None, None]
    for side, target in enumerate((row, col)):
        if target is None:
            continue
        if covers(target):
            both[side] = target
        else:
            blocks.add_cast(builder, x.transposed if side else x, place, target, rng, stream)
    if any(both):
        _add_cast(builder, x, place, *both)


def _add_cast(builder: LaunchBuilder, x: TensorMeta, place: Place, row: Target | None, col: Target | None) -> None:
    if x.is_column_major:
        x, row, col = x.transposed, col, row
    rows, cols = x.shape
    tiles_k = max(-(-cols // TILE), 1)
    tiles = tiles_k * max(-(-rows // TILE), 1)  # one writes the amax of an empty matrix
    targets: list[Place | Block | None] = []
    widths: list[int] = []
    casts: list[BlockCast | None] = []
    for target, length in ((row, cols), (col, rows)):
        if target is None:
            targets += [None, None, None]
            widths.append(0)
            casts.append(None)
        else:
            assert target.scale_inv is not None
            targets += [target.amax, target.data, Block(target.scale_inv, as_bytes)]
            widths.append(target.spec.padded_cols(length))
            casts.append(BlockCast.of(target.spec, "codes", 0))
    builder.step(
        cast_fp8_blocks_kernel, tiles, place, *targets, rows, cols, *x.strides, *widths, tiles_k, *casts, TILE,
        device_facts(builder.device)[0], num_warps=WARPS,
    )  # fmt: skip
