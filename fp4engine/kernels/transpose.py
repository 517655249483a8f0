"""Both operands of FP4 codes that come with one scale per tile.

    scale_inv[n, b]            = scales[n / height, b]
    columnwise_codes[k, n]     = codes[n, k]                 nibbles, the even column in the low one
    columnwise_scale_inv[k, t] = scales[t, k / height]

A program takes a tile of 128 x 128. A thread holds words of eight codes, eight of them from eight rows at a time, whose
8 x 8 nibbles it transposes in registers: halves of words change places, then bytes, then nibbles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.launch import Draft, Facts, Launch, Place, facts, resolver

TILE = 128
"""Rows and columns of a program: 64 bytes of each row are read, and 64 of each column written."""


@triton.jit
def swap(words, DISTANCE: tl.constexpr, BITS: tl.constexpr, MASK: tl.constexpr):
    """Eight words after one step: ``BITS`` of every word change places with those of the one ``DISTANCE`` away."""
    swapped = ()
    for r in tl.static_range(8):
        if r & DISTANCE:
            swapped = swapped + (((words[r - DISTANCE] >> BITS) & MASK) | (words[r] & (MASK << BITS)),)
        else:
            swapped = swapped + ((words[r] & MASK) | ((words[r + DISTANCE] & MASK) << BITS),)
    return swapped


@triton.jit
def transpose_kernel(
    codes_ptr, tile_scale_ptr, row_scale_ptr, col_out_ptr, col_scale_ptr, rows, cols, words, blocks, out_words, tiles,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of ``words`` words and ``blocks`` scales; of the transposed matrix ``out_words`` and ``tiles``, or none."""
    SCALES: tl.constexpr = TILE // WIDTH
    across = tl.cdiv(words * 8, TILE)
    row0 = (tl.program_id(0) // across) * TILE
    col0 = (tl.program_id(0) % across) * TILE
    line = tl.arange(0, TILE)[:, None]
    scales_ptr = tile_scale_ptr.to(tl.pointer_type(tl.uint8))
    row = row0 + line
    block = col0 // WIDTH + tl.arange(0, SCALES)[None, :]
    inside = (row < rows) & (block < blocks)
    scale = tl.load(scales_ptr + ((row // HEIGHT).to(tl.int64) * blocks + block), mask=inside, other=0)
    tl.store(row_scale_ptr.to(tl.pointer_type(tl.uint8)) + (row.to(tl.int64) * blocks + block), scale, mask=inside)
    if col_out_ptr is not None:
        GROUPS: tl.constexpr = TILE // 8
        first = row0 + tl.arange(0, GROUPS)[:, None] * 8
        word = col0 // 8 + tl.arange(0, GROUPS)[None, :]
        source = codes_ptr.to(tl.pointer_type(tl.uint32)) + (first.to(tl.int64) * words + word)
        held = ()
        for r in tl.static_range(8):
            held = held + (tl.load(source + r * words, mask=(first + r < rows) & (word < words), other=0),)
        held = swap(swap(swap(held, 4, 16, 0xFFFF), 2, 8, 0x00FF00FF), 1, 4, 0x0F0F0F0F)
        even = tl.join(tl.join(held[0], held[4]), tl.join(held[2], held[6]))
        odd = tl.join(tl.join(held[1], held[5]), tl.join(held[3], held[7]))
        # [group of rows, word, column of the word] to [column, group of rows]
        joined = tl.reshape(tl.join(even, odd), [GROUPS, GROUPS * 8])
        col = col0 + line
        group = row0 // 8 + tl.arange(0, GROUPS)[None, :]
        target = col_out_ptr.to(tl.pointer_type(tl.uint32)) + (col.to(tl.int64) * out_words + group)
        tl.store(target, tl.trans(joined), mask=(col < cols) & (group < out_words))
        tile = row0 // HEIGHT + tl.arange(0, SCALES)[None, :]
        inside = (col < cols) & (tile < tiles)
        scale = tl.load(scales_ptr + (tile.to(tl.int64) * blocks + col // HEIGHT), mask=inside, other=0)
        tl.store(col_scale_ptr.to(tl.pointer_type(tl.uint8)) + (col.to(tl.int64) * tiles + tile), scale, mask=inside)


def supports(spec: CastSpec) -> tuple[bool, str]:
    """Whether the kernel reads the codes of ``spec``'s casts, and if not, why."""
    height, width = spec.block
    if spec.element.storage_bits != 4 or spec.scale.torch_dtype.itemsize != 1:
        return False, f"the transposing kernel does not read {spec.label}"
    if width not in (16, 32) or height not in (1, width):
        return False, f"the transposing kernel does not read blocks of {height}x{width}"
    return True, ""


class Tiles(NamedTuple):
    """Codes of a matrix [rows, cols] and one scale of each block in a launch."""

    codes: Place
    scales: Place
    rows: int
    cols: int


class Transposed(NamedTuple):
    """Where the transposed operand goes: codes, and block scales."""

    data: Place
    scale_inv: Place


def add_spread(draft: Draft, tiles: Tiles, spec: CastSpec, scale_inv: Place, transposed: Transposed | None) -> None:
    """Write each tile's scale for all its rows, and the transposed operand if it has a place."""
    rows, cols = tiles.rows, tiles.cols
    words = spec.padded_cols(cols) // 8
    width = spec.padded_cols(rows) // 8, spec.num_blocks(rows)
    if transposed is None:
        width = 0, 0
    programs = -(-rows // TILE) * -(-words * 8 // TILE)
    draft.step(
        transpose_kernel, programs, tiles.codes, tiles.scales, scale_inv, *(transposed or (None, None)), rows, cols,
        words, spec.num_blocks(cols), *width, *spec.block, TILE, num_warps=4,
    )  # fmt: skip


def add_transposed(draft: Draft, tiles: Tiles, spec: CastSpec, transposed: Transposed) -> None:
    """Write the transposed operand; the kernel writes the scales of the rows too, which nobody reads."""
    add_spread(draft, tiles, spec, draft.scratch((tiles.rows, spec.num_blocks(tiles.cols)), torch.uint8), transposed)


@resolver
def resolve_spread(tensors: tuple[Facts, Facts], device: torch.device, key: str, cols: int, transposed: bool) -> Launch:
    """``(codes, scales) -> scale_inv``, or codes and block scales of the transposed operand; scales as bytes.

    Args:
        tensors: facts of both; contiguous.
        key: of the spec.
        cols: of the matrix without its padding.
    """
    spec, rows = CastSpec.from_key(key), tensors[0].shape[0]
    draft = Draft(device, inputs=2)
    tiles = Tiles(*draft.inputs, rows, cols)
    if transposed:
        data = draft.output((cols, spec.padded_cols(rows) // 2), torch.uint8)
        add_transposed(draft, tiles, spec, Transposed(data, draft.output((cols, spec.num_blocks(rows)), torch.uint8)))
    else:
        add_spread(draft, tiles, spec, draft.output((rows, spec.num_blocks(cols)), torch.uint8), None)
    return draft.launch()


def spread_tiles(codes: Tensor, scales: Tensor, key: str, cols: int, transposed: bool) -> list[Tensor]:
    """See :class:`fp4engine.ops.TiledOperand`; scales of what it returns have the dtype of the spec's."""
    *data, scale_inv = resolve_spread((facts(codes), facts(scales)), codes.device, key, cols, transposed)(codes, scales)
    return [*data, scale_inv.view(CastSpec.from_key(key).scale.torch_dtype)]  # Triton has no type for E8M0
