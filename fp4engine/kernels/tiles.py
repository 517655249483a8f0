"""FP4 codes that come with one scale per tile, in parts (:class:`fp4engine.formats.tiles.Part`): casts to them, and
what products read.

    scale_inv[n, b]            = scales[n / height, b]
    columnwise_codes[k, n]     = codes[n, k]                 nibbles, the even column in the low one
    columnwise_scale_inv[k, t] = scales[t, k / height]

A program that spreads takes a tile of 128 x 128 of one part. A thread holds words of eight codes, eight of them from
eight rows at a time, whose 8 x 8 nibbles it transposes in registers: halves of words change places, then bytes, then
nibbles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import ALIGNMENT
from fp4engine.formats import CastSpec
from fp4engine.formats.tiles import Part
from fp4engine.kernels import quantize
from fp4engine.kernels.cast import Side
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, meta_of, resolver
from fp4engine.kernels.load import Reading

TILE = 128
"""Rows and columns of a program: 64 bytes of each row are read, and 64 of each column written."""

PICKED = 1024
"""Scales of tiles that a program picks."""


@triton.jit
def pick_kernel(scale_ptr, out_ptr, amax_ptr, amax_out_ptr, blocks, count, HEIGHT: tl.constexpr, PICKED: tl.constexpr):
    """The ``count`` scales of tiles, which are those of each tile's first row, and a copy of the outer amax."""
    if tl.program_id(0) == 0:
        tl.store(amax_out_ptr, tl.load(amax_ptr))
    index = tl.program_id(0) * PICKED + tl.arange(0, PICKED)
    inside = index < count
    source = (index // blocks).to(tl.int64) * (HEIGHT * blocks) + index % blocks
    scale = tl.load(scale_ptr.to(tl.pointer_type(tl.uint8)) + source, mask=inside, other=0)
    tl.store(out_ptr.to(tl.pointer_type(tl.uint8)) + index, scale, mask=inside)


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
def spread_kernel(
    packed_ptr, scale_ptr, row_out_ptr, row_scale_ptr, col_out_ptr, col_scale_ptr, rows, cols, words, blocks,
    part_lines, part_groups, part_tiles, out_words, tiles,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of each row, or of each column; what has no pointer is not written.

    ``scale_ptr``: scales [rows, blocks] of an operand, whose codes are one part; None where the scales are a tile's.
    A part has ``rows`` rows of ``words`` words and ``blocks`` scales, in all ``part_lines`` times 16 bytes. It makes
    ``part_groups`` of the ``out_words`` words of a column, and ``part_tiles`` of its ``tiles`` scales.
    """
    SCALES: tl.constexpr = TILE // WIDTH
    across = tl.cdiv(words * 8, TILE)
    programs = across * tl.cdiv(rows, TILE)
    part = tl.program_id(0) // programs
    row0 = (tl.program_id(0) % programs // across) * TILE
    col0 = (tl.program_id(0) % across) * TILE
    codes_ptr = packed_ptr.to(tl.pointer_type(tl.uint32)) + part.to(tl.int64) * part_lines * 4
    if scale_ptr is None:
        LINES: tl.constexpr = 1  # pyright: ignore[reportAssignmentType]
        scales_ptr = (codes_ptr + rows.to(tl.int64) * words).to(tl.pointer_type(tl.uint8))
    else:
        LINES: tl.constexpr = HEIGHT  # pyright: ignore[reportAssignmentType]
        scales_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
    line = tl.arange(0, TILE)[:, None]
    GROUPS: tl.constexpr = TILE // 8
    first = row0 + tl.arange(0, GROUPS)[:, None] * 8
    word = col0 // 8 + tl.arange(0, GROUPS)[None, :]
    offsets = first.to(tl.int64) * words + word
    held = ()
    for r in tl.static_range(8):
        held = held + (tl.load(codes_ptr + (offsets + r * words), mask=(first + r < rows) & (word < words), other=0),)
    if row_out_ptr is not None:
        row_out_ptr = row_out_ptr.to(tl.pointer_type(tl.uint32)) + part.to(tl.int64) * rows * words
        for r in tl.static_range(8):
            tl.store(row_out_ptr + (offsets + r * words), held[r], mask=(first + r < rows) & (word < words))
        row_scale_ptr = row_scale_ptr.to(tl.pointer_type(tl.uint8)) + part.to(tl.int64) * rows * blocks
        row = row0 + line
        block = col0 // WIDTH + tl.arange(0, SCALES)[None, :]
        inside = (row < rows) & (block < blocks)
        scale = tl.load(scales_ptr + ((row // HEIGHT).to(tl.int64) * blocks + block), mask=inside, other=0)
        tl.store(row_scale_ptr + (row.to(tl.int64) * blocks + block), scale, mask=inside)
    if col_out_ptr is not None:
        held = swap(swap(swap(held, 4, 16, 0xFFFF), 2, 8, 0x00FF00FF), 1, 4, 0x0F0F0F0F)
        even = tl.join(tl.join(held[0], held[4]), tl.join(held[2], held[6]))
        odd = tl.join(tl.join(held[1], held[5]), tl.join(held[3], held[7]))
        # [group of rows, word, column of the word] to [column, group of rows]
        joined = tl.reshape(tl.join(even, odd), [GROUPS, GROUPS * 8])
        col = col0 + line
        group = row0 // 8 + tl.arange(0, GROUPS)[None, :]
        col_out_ptr = col_out_ptr.to(tl.pointer_type(tl.uint32)) + part * part_groups
        target = col_out_ptr + (col.to(tl.int64) * out_words + group)
        tl.store(target, tl.trans(joined), mask=(col < cols) & (group < part_groups))
        tile = row0 // HEIGHT + tl.arange(0, SCALES)[None, :]
        inside = (col < cols) & (tile < part_tiles)
        scale = tl.load(scales_ptr + (tile.to(tl.int64) * (LINES * blocks) + col // HEIGHT), mask=inside, other=0)
        col_scale_ptr = col_scale_ptr.to(tl.pointer_type(tl.uint8)) + part * part_tiles
        tl.store(col_scale_ptr + (col.to(tl.int64) * tiles + tile), scale, mask=inside)


def supports(spec: CastSpec) -> tuple[bool, str]:
    """Whether the kernels read the codes of ``spec``'s casts, and if not, why."""
    height, width = spec.block
    if spec.element.storage_bits != 4 or spec.scale.torch_dtype.itemsize != 1:
        return False, f"the kernels for tiles do not read {spec.label}"
    if width not in (16, 32) or height not in (1, width):
        return False, f"the kernels for tiles do not read blocks of {height}x{width}"
    return True, ""


class Tiles(NamedTuple):
    """A matrix [rows, cols] of codes with a scale of each tile in a launch, in ``parts`` parts, cast by ``spec``."""

    packed: Place
    spec: CastSpec
    rows: int
    cols: int
    parts: int

    @property
    def part(self) -> Part:
        """How each part lies in memory."""
        return Part.of(self.spec, self.rows // self.parts, self.cols)

    def amax(self, builder: LaunchBuilder) -> Place:
        """The outer amax."""
        return builder.part(self.packed, self.part.amax, (1,), torch.float32)


def add_spread(builder: LaunchBuilder, tiles: Tiles, transposed: bool) -> tuple[Matrix, Matrix]:
    """Codes and block scales of the operand [rows, cols], with each tile's scale for all its rows.

    If ``transposed``, of the operand [cols, rows]. Scales are bytes: Triton has no type for E8M0.
    """
    (_, spec, rows, cols, parts), part = tiles, tiles.part
    shape = (cols, rows) if transposed else (rows, cols)
    data = builder.matrix((shape[0], spec.padded_cols(shape[1]) // 2), torch.uint8)
    scale_inv = builder.matrix((shape[0], spec.num_blocks(shape[1])), torch.uint8)
    target = data.place, scale_inv.place
    words, width = spec.padded_cols(cols) // 8, (spec.padded_cols(rows) // 8, spec.num_blocks(rows))
    of_part = (part.rows // 8, part.rows // spec.block[0]) if parts > 1 else width
    programs = parts * -(-part.rows // TILE) * -(-words * 8 // TILE)
    targets = (None, None, *target) if transposed else (*target, None, None)
    builder.step(
        spread_kernel, programs, tiles.packed, None, *targets, part.rows, cols, words, spec.num_blocks(cols),
        part.size // ALIGNMENT, *of_part, *width, *spec.block, TILE, num_warps=4,
    )  # fmt: skip
    return data, scale_inv


def add_transposed(
    builder: LaunchBuilder, codes: Place, scale_inv: Place, spec: CastSpec, rows: int, cols: int
) -> tuple[Matrix, Matrix]:
    """Codes and block scales of the operand [cols, rows], from an operand [rows, cols] in square blocks."""
    data = builder.matrix((cols, spec.padded_cols(rows) // 2), torch.uint8)
    made = builder.matrix((cols, spec.num_blocks(rows)), torch.uint8)
    words, width = spec.padded_cols(cols) // 8, (spec.padded_cols(rows) // 8, spec.num_blocks(rows))
    builder.step(
        spread_kernel, -(-rows // TILE) * -(-words * 8 // TILE), codes, scale_inv, None, None, data.place, made.place,
        rows, cols, words, spec.num_blocks(cols), 0, *width, *width, *spec.block, TILE, num_warps=4,
    )  # fmt: skip
    return data, made


@resolver
def resolve_spread(
    packed: TensorMeta, device: torch.device, key: str, rows: int, cols: int, parts: int, transposed: bool
) -> Launch:
    """``packed -> data, scale_inv`` of the operand [rows, cols], or of the transposed one; scales as bytes."""
    builder = LaunchBuilder(device, inputs=1)
    made = add_spread(builder, Tiles(*builder.inputs, CastSpec.from_key(key), rows, cols, parts), transposed)
    return builder.launch(*[matrix.place for matrix in made])


def spread_tiles(packed: Tensor, key: str, rows: int, cols: int, parts: int, transposed: bool) -> list[Tensor]:
    """See :class:`fp4engine.ops.TiledOperand`; scales of what it returns have the dtype of the spec's."""
    data, scale_inv = resolve_spread(meta_of(packed), packed.device, key, rows, cols, parts, transposed)(packed)
    return [data, scale_inv.view(CastSpec.from_key(key).scale.torch_dtype)]  # Triton has no type for E8M0


@resolver
def resolve_tiles(
    tensors: tuple[TensorMeta, ...], amaxes: tuple[TensorMeta, ...], device: torch.device, keys: tuple[str, ...]
) -> Launch:
    """``(x, amax, x, amax, ...) -> packed, packed, ...``: rowwise casts of many matrices, each to one part.

    Args:
        tensors, amaxes: metadata of both, as many; an amax is one number.
        keys: of specs that :func:`fp4engine.kernels.casts.fuses` and draw nothing.
    """
    builder, outputs = LaunchBuilder(device, inputs=2 * len(tensors)), list[Place]()
    for index, (x, key) in enumerate(zip(tensors, keys, strict=True)):
        place, amax = builder.inputs[2 * index : 2 * index + 2]
        spec, (rows, cols) = CastSpec.from_key(key), x.shape
        part, height = Part.of(spec, rows, cols), spec.block[0]
        packed = builder.buffer((part.size,), torch.uint8)
        outputs.append(packed)
        codes = builder.part(packed, 0, (part.codes,), torch.uint8)
        scales = builder.part(packed, part.codes, (part.scales,), torch.uint8)
        scale_inv = scales if height == 1 else builder.buffer(*quantize.scales_of(rows, cols))
        target = quantize.Target(Side.of(spec, "codes", 0), amax, True, codes, scale_inv)
        quantize.add_cast(builder, Reading(x, None, place), target, None, None, 0)
        picked = part.scales if height > 1 else 0
        told = scale_inv, scales, amax, Tiles(packed, spec, rows, cols, 1).amax(builder), spec.num_blocks(cols), picked
        builder.step(pick_kernel, max(-(-picked // PICKED), 1), *told, height, PICKED, num_warps=4)
    return builder.launch(*outputs)
