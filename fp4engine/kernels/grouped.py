"""The casts of many matrices that lie below each other in one tensor, with their row counts on the device.

Expert e owns rows ``offsets[e]`` to ``offsets[e + 1]`` of x and gets the bytes that :mod:`fp4engine.kernels.quantize`
gives for those rows alone: its own outer amax, its own draw, blocks and random counters from its own first row. The
host knows how many rows and experts there are, never the counts, so grids and outputs have the sizes of the worst case:

- Tiles of T rows: e's first tile has the index ``offsets[e] // T + e``. The next expert's is far enough behind for n
  rows, since ``ceil(n / T) <= (r + n) // T + 1`` for any r >= 0; at most one index per expert is idle.
- Columnwise operands: by the same argument with T = 16, e's blocks start at row ``16 (offsets[e] // 16 + e)``.

Rows that no expert owns count as one more expert's, which the casts skip and the products fill with NaN.

Legend: x is [M, K], G experts; a columnwise operand is [K, P] with ``P = padded_rows(M, G)``, one expert after another,
each a contiguous [K, its rows padded to 16].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.kernels.amax import add_zeros, bits_of_largest, store_amax
from fp4engine.kernels.cast import Side, products_stay_normal
from fp4engine.kernels.encode import NAN, block_amax, operand_amax
from fp4engine.kernels.launch import Launch, LaunchBuilder, Place, TensorMeta, device_facts, meta_of, resolver
from fp4engine.kernels.load import load_blocks, load_rows, unknown
from fp4engine.kernels.quantize import (
    cast_columnwise,
    cast_rowwise,
    data_of,
    scales_of,
    tile_shape,
)


@triton.jit(do_not_specialize=["rows", "groups"])
def offsets_kernel(counts_ptr, offsets_ptr, rows, groups, GROUPS: tl.constexpr):
    """``offsets = [0, counts[0], counts[0] + counts[1], ..., sum, rows]``; impossible counts: 0 but the last."""
    index = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + index, mask=index < groups, other=0).to(tl.int64)
    within = tl.minimum(tl.maximum(counts, 0), rows + 1)  # their sum does not overflow, and shows what was cut
    impossible = (tl.sum((counts != within).to(tl.int32), axis=0) > 0) | (tl.sum(within, axis=0) > rows)
    ends = tl.where(impossible, 0, tl.cumsum(within, axis=0))
    tl.store(offsets_ptr + index + 1, tl.where(index < groups, ends, rows), mask=index <= groups)
    tl.store(offsets_ptr + index, tl.zeros_like(ends), mask=index == 0)


@triton.jit
def find(offsets_ptr, tile, groups, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """``(expert, its first row, its rows, the tile's first row among them)`` of any tile; of an idle one: past them."""
    index = tl.arange(0, GROUPS)
    firsts = tl.load(offsets_ptr + index, mask=index <= groups, other=0) // TILE + index
    expert = tl.sum(((firsts <= tile) & (index <= groups)).to(tl.int32), axis=0) - 1
    first = tl.load(offsets_ptr + expert)
    rows = tl.load(offsets_ptr + expert + 1) - first
    return expert, first, rows.to(tl.int32), ((tile - first // TILE - expert) * TILE).to(tl.int32)


@triton.jit(do_not_specialize=["groups", "parts"])
def grouped_amax_kernel(
    x_ptr, offsets_ptr, row_amax_ptr, col_amax_ptr, K, stride_m, groups, parts,
    ROW: tl.constexpr, COL: tl.constexpr, GROUPS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Each program takes every ``parts``-th of the tiles beside each other. Rowwise operands are not rotated."""
    expert, first, rows, row0 = find(offsets_ptr, tl.program_id(0) // parts, groups, GROUPS, TILE_M)
    if (row0 >= rows) | (expert == groups):
        return
    x_ptr += first * stride_m
    row_amax = tl.zeros([TILE_M // 16, TILE_K], tl.float32)
    col_amax = tl.zeros([TILE_M // 16, TILE_K], tl.float32)
    for step in tl.range(0, tl.cdiv(tl.cdiv(K, TILE_K), parts)):
        col0 = (tl.program_id(0) % parts + step * parts) * TILE_K
        x = load_rows(x_ptr, stride_m, 1, rows, unknown(K), row0, col0, TILE_M, TILE_K, False)
        if ROW is not None:
            row_amax = tl.maximum(row_amax, block_amax(x), propagate_nan=NAN)
        if COL is not None:
            block = operand_amax(x, COL, x_ptr.dtype.element_ty, HARDWARE)
            col_amax = tl.maximum(col_amax, block, propagate_nan=NAN)
    if ROW is not None:
        store_amax(row_amax_ptr + expert, bits_of_largest(row_amax))
    if COL is not None:
        store_amax(col_amax_ptr + expert, bits_of_largest(col_amax))


@triton.jit(do_not_specialize=["groups", "stream"])
def grouped_quantize_kernel(
    x_ptr, offsets_ptr, row_amax_ptr, row_out_ptr, row_scale_ptr, col_amax_ptr, col_out_ptr, col_scale_ptr, rng_ptr,
    K, stride_m, groups, stream,
    ROW: tl.constexpr, COL: tl.constexpr, GROUPS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """:func:`fp4engine.kernels.quantize.quantize_kernel` on the rows of each expert, whose draw is in ``rng[e]``."""
    tiles = tl.cdiv(K, TILE_K)
    expert, first, rows, row0 = find(offsets_ptr, tl.program_id(0) // tiles, groups, GROUPS, TILE_M)
    if (row0 >= rows) | (expert == groups):
        return
    col0 = (tl.program_id(0) % tiles) * TILE_K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptr += first * stride_m
    if rng_ptr is not None:
        rng_ptr += 2 * expert
    if ROW is not None:
        block = first * tl.cdiv(K, 16)
        out_ptr = row_out_ptr.to(tl.pointer_type(tl.uint32)) + block * ROW.words
        scale_ptr = row_scale_ptr.to(tl.pointer_type(tl.uint8)) + block
        x = load_blocks(x_ptr, stride_m, 1, rows, unknown(K), row0, col0, TILE_M, TILE_K, False)
        amax = tl.load(row_amax_ptr + expert)
        if products_stay_normal(amax, ROW, dtype):
            cast_rowwise(x, amax, out_ptr, scale_ptr, rng_ptr, stream, rows, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, True, False, HARDWARE)  # fmt: skip
        else:
            cast_rowwise(x, amax, out_ptr, scale_ptr, rng_ptr, stream, rows, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, False, False, HARDWARE)  # fmt: skip
    if COL is not None:
        block = (first // 16 + expert) * K
        out_ptr = col_out_ptr.to(tl.pointer_type(tl.uint32)) + block * COL.words
        scale_ptr = col_scale_ptr.to(tl.pointer_type(tl.uint8)) + block
        x = load_rows(x_ptr, stride_m, 1, rows, unknown(K), row0, col0, TILE_M, TILE_K, False)
        amax = tl.load(col_amax_ptr + expert)
        if products_stay_normal(amax, COL, dtype):
            cast_columnwise(x, amax, out_ptr, scale_ptr, rng_ptr, stream, rows, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, True, False, HARDWARE)  # fmt: skip
        else:
            cast_columnwise(x, amax, out_ptr, scale_ptr, rng_ptr, stream, rows, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, False, False, HARDWARE)  # fmt: skip


def padded_rows(rows: int, groups: int) -> int:
    """Columns of the columnwise operands together: room for every expert's rows padded to 16, whatever the counts."""
    return rows // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE * groups


def vector_size(groups: int) -> int:
    """GROUPS: a power of two for the experts and the rows of none."""
    return 1 << groups.bit_length()


def max_tiles(rows: int, groups: int, tile: int) -> int:
    """Tiles of ``tile`` rows that the experts' rows and the rows of none can take."""
    return rows // tile + groups + 1


@resolver
def resolve_offsets(counts: TensorMeta, device: torch.device, rows: int) -> Launch:
    """``(counts) -> offsets``."""
    (groups,) = counts.shape
    builder = LaunchBuilder(device, inputs=1)
    out = builder.buffer((groups + 2,), torch.int64)
    builder.step(offsets_kernel, 1, *builder.inputs, out, rows, groups, vector_size(groups), num_warps=4)
    return builder.launch(out)


def offsets(counts: Tensor, rows: int) -> Tensor:
    """int64 [G + 2]: where each expert's rows start, then where the rows of no expert start, then ``rows``.

    Args:
        counts: integers [G] of any width; negative ones, or a sum above ``rows``, make every expert empty.
        rows: of x.
    """
    (out,) = resolve_offsets(meta_of(counts), counts.device, rows)(counts)
    return out


@resolver
def resolve_grouped_cast(
    x: TensorMeta,
    rng: TensorMeta | None,
    device: torch.device,
    groups: int,
    keys: tuple[str, str],
    forms: tuple[str, str],
    stream: int,
) -> Launch:
    """``(x, offsets, rng) -> (data[, scale_inv], amax)`` of each side whose spec's key is given."""
    rows, cols = x.shape
    builder = LaunchBuilder(device, inputs=3)
    x_place, offsets_place, rng_place = builder.inputs
    shapes = ((rows, cols), (cols, padded_rows(rows, groups)))
    row, col = sides = [Side.of_key(key, form, bit) for bit, (key, form) in enumerate(zip(keys, forms, strict=True))]
    amaxes: list[Place | None] = []
    targets: list[Place | None] = []
    outputs: list[Place] = []
    for side, form, shape in zip(sides, forms, shapes, strict=True):
        if side is None:
            amaxes.append(None)
            targets += [None, None, None]
            continue
        data, scale_inv = builder.buffer(*data_of(side, *shape)), builder.buffer(*scales_of(*shape))
        amax = builder.buffer((groups,), torch.float32)
        amaxes.append(amax)
        targets += [amax, data, scale_inv]
        outputs += [data, scale_inv, amax] if form == "codes" else [data, amax]
    add_zeros(builder, amaxes, [groups if amax else 0 for amax in amaxes])
    hardware, multiprocessors = device_facts(device)
    size = vector_size(groups)
    tile_m, tile_k = 128, 64
    tiles = max_tiles(rows, groups, tile_m)
    parts = max(1, min(-(-cols // tile_k), 8 * multiprocessors // tiles))
    builder.step(
        grouped_amax_kernel, tiles * parts, x_place, offsets_place, *amaxes, cols, x.strides[0], groups, parts,
        row, col, size, tile_m, tile_k, hardware, num_warps=4,
    )  # fmt: skip
    tile_m, tile_k = tile_shape(row, col)
    builder.step(
        grouped_quantize_kernel, max_tiles(rows, groups, tile_m) * -(-cols // tile_k), x_place, offsets_place, *targets,
        rng_place if rng else None, cols, x.strides[0], groups, stream, row, col, size, tile_m, tile_k,
        hardware, num_warps=4,
    )  # fmt: skip
    return builder.launch(*outputs)


def grouped_cast(
    x: Tensor, offsets: Tensor, keys: tuple[str, str], forms: tuple[str, str], rng: Tensor | None, stream: int
) -> list[Tensor]:
    """As :func:`fp4engine.kernels.casts.cast`, for each expert's rows; every side returns its amaxes.

    Args:
        x: [M, K] BF16, FP16 or FP32, contiguous along K.
        offsets: of :func:`offsets`.
        keys: of specs with one outer scale per tensor, rowwise without a rotation.
        rng: int64 [G, 2]: ``(key, draw)`` of each expert.

    Returns:
        Operands [M, K] and [K, P], amaxes FP32 [G]: 0 without rows. What is no expert's is not written.
    """
    launch = resolve_grouped_cast(meta_of(x), meta_of(rng), x.device, len(offsets) - 2, keys, forms, stream)
    return launch(x, offsets, rng)
