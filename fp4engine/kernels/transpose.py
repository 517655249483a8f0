"""Both operands of FP4 codes that come with one scale per tile, written to memory that is there, in one launch.

    scale_inv[n, b]            = scales[n / height, b]
    columnwise_codes[k, n]     = codes[n, k]                 nibbles, the even column in the low one
    columnwise_scale_inv[k, t] = scales[t, k / height]

A program takes a tile of 128 x 128. A thread holds words of eight codes, eight of them from eight rows at a time, whose
8 x 8 nibbles it transposes in registers: halves of words change places, then bytes, then nibbles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.launch import Draft, Facts, Launch, facts, resolver

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


@resolver
def resolve_transpose(tensors: tuple[Facts | None, ...], device: torch.device, key: str, cols: int) -> Launch:
    """``(codes, scales, scale_inv, columnwise_codes, columnwise_scale_inv)``, of which the last three are written.

    The last two are None where the transposed operand is not asked for.

    Args:
        tensors: facts of the five; contiguous.
        key: of the spec.
        cols: of the matrix without its padding.
    """
    codes, _, scale_inv, col_codes, col_scale_inv = tensors
    assert codes is not None and scale_inv is not None
    rows, words = codes.shape[0], codes.shape[1] // 4
    out_words, tiles = 0, 0
    draft = Draft(device, inputs=5)
    places = list(draft.inputs)
    if col_codes is None or col_scale_inv is None:
        places[3:] = [None, None]
    else:
        out_words, tiles = col_codes.shape[1] // 4, col_scale_inv.shape[1]
    programs = -(-rows // TILE) * -(-words * 8 // TILE)
    numbers = (rows, cols, words, scale_inv.shape[1], out_words, tiles)
    draft.step(transpose_kernel, programs, *places, *numbers, *CastSpec.from_key(key).block, TILE, num_warps=4)
    return draft.launch()


def transpose(
    codes: Tensor,
    scales: Tensor,
    key: str,
    cols: int,
    scale_inv: Tensor,
    columnwise_codes: Tensor | None,
    columnwise_scale_inv: Tensor | None,
) -> None:
    """Write the last three, of which the last two may be missing; see :func:`fp4engine.ops.spread_tiles`."""
    if scale_inv.dtype == torch.float8_e8m0fnu:  # Triton has no type for it
        scale_inv = scale_inv.view(torch.uint8)
        columnwise_scale_inv = None if columnwise_scale_inv is None else columnwise_scale_inv.view(torch.uint8)
    tensors = (codes, scales, scale_inv, columnwise_codes, columnwise_scale_inv)
    resolve_transpose(tuple(map(facts, tensors)), codes.device, key, cols)(*tensors)
