"""Codes and block scales back to values: for the GEMM in BF16 without the outer factor, for users with it.

    values[r, c] = e2m1(code) * scale_inv                 exact in BF16
    x_hat[r, c]  = round(values * fl(A / numerator))

A thread takes a block of 16: two words of eight codes, one scale, 32 bytes of BF16. Everything is contiguous, so rows
matter only where the columns are cut or each row has its own factor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import ALIGNMENT, BLOCK_SIZE
from fp4engine.formats import E2M1, E4M3, CastSpec, Outer
from fp4engine.kernels.encode import PAIRS, from_bits, from_e4m3, round_bf16, to_bits
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, device_facts, meta_of, resolver
from fp4engine.kernels.tiles import Tiles

BLOCKS = 512
"""Blocks of 16 per program: two per thread of four warps."""


@triton.jit
def element(words, position: tl.constexpr, scale):
    """FP32 value of the code at ``position`` of a word, times ``scale``.

    The three magnitude bits, put where FP32 keeps the end of its exponent and the start of its mantissa, are the value
    times 2^-126, subnormals included. ``scale`` is the block's, times 2^118, so 2^8 is left; every product is exact.
    """
    top = (words << (28 - 4 * position)).to(tl.int32, bitcast=True)
    bits = (top >> 6).to(tl.uint32, bitcast=True) & 0x81C00000
    return from_bits(bits) * scale * 256.0


@triton.jit
def load_block(codes_ptr, scale_ptr, block, scale_of, inside, HARDWARE: tl.constexpr):
    """Two words of eight codes [n, 2], and the scale times 2^118 [n, 1], of blocks [n] whose scales are at [n]."""
    scale = from_e4m3(tl.load(scale_ptr.to(tl.pointer_type(tl.uint8)) + scale_of, mask=inside, other=0), HARDWARE)
    half = tl.arange(0, 2)[None, :]
    pointers = codes_ptr.to(tl.pointer_type(tl.uint32)) + (block.to(tl.int64)[:, None] * 2 + half)
    return tl.load(pointers, mask=inside[:, None], other=0), (scale * 3.3230699894622897e35)[:, None]


@triton.jit
def interleave(t0, t1, t2, t3):
    """Four tensors [n, 2] as [n, 8]: the second axis first, then the four."""
    joined = tl.join(tl.join(t0, t2), tl.join(t1, t3))
    return tl.reshape(joined, [t0.shape[0], 8])


@triton.jit
def decode_blocks(codes_ptr, scale_ptr, out_ptr, first, blocks, PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr):
    block = first * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    inside = block < blocks
    words, scale = load_block(codes_ptr, scale_ptr, block, block, inside, HARDWARE)
    store_values(out_ptr, block, words, scale, inside)


@triton.jit
def store_values(out_ptr, block, words, scale, inside):
    """Sixteen BF16 values per block."""
    pairs = ()
    for i in tl.static_range(0, 8, 2):
        low = to_bits(element(words, i, scale))
        high = to_bits(element(words, i + 1, scale))
        pairs = pairs + ((low >> 16) | (high & 0xFFFF0000),)
    store_words(out_ptr, block, interleave(pairs[0], pairs[1], pairs[2], pairs[3]), inside)


@triton.jit
def decode_tiles_kernel(
    packed_ptr, out_ptr, blocks, blocks_per_row, part_lines,
    HEIGHT: tl.constexpr, PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Values of a matrix of tiles, in parts of ``blocks`` blocks and ``part_lines`` times 16 bytes."""
    programs = tl.cdiv(blocks, PER_PROGRAM)
    part = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    inside = block < blocks
    codes_ptr = packed_ptr.to(tl.pointer_type(tl.uint32)) + part * part_lines * 4
    scale_ptr = codes_ptr + blocks.to(tl.int64) * 2
    tile = block // (blocks_per_row * HEIGHT) * blocks_per_row + block % blocks_per_row
    words, scale = load_block(codes_ptr, scale_ptr, block, tile, inside, HARDWARE)
    store_values(out_ptr.to(tl.pointer_type(tl.uint32)) + part * blocks * 8, block, words, scale, inside)


@triton.jit
def decode_kernel(
    codes_ptr, scale_ptr, out_ptr, other_codes_ptr, other_scale_ptr, other_out_ptr, blocks, other_blocks,
    PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Values of one operand, or of two."""
    programs = tl.cdiv(blocks, PER_PROGRAM)
    program = tl.program_id(0)
    if other_codes_ptr is None or program < programs:
        decode_blocks(codes_ptr, scale_ptr, out_ptr, program, blocks, PER_PROGRAM, HARDWARE)
    else:
        decode_blocks(
            other_codes_ptr, other_scale_ptr, other_out_ptr, program - programs, other_blocks, PER_PROGRAM, HARDWARE
        )


@triton.jit
def store_words(out_ptr, block, words, inside):
    """Eight words of two 16-bit values per block."""
    offsets = block.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr.to(tl.pointer_type(tl.uint32)) + offsets, words, mask=inside[:, None])


@triton.jit
def round_words(low, high, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Two FP32 values, each rounded to nearest even in ``dtype`` (16 bits), in one word."""
    if dtype == tl.float16:
        low_bits = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low_bits | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    elif PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (to_bits(round_bf16(low)) >> 16) | (to_bits(round_bf16(high)) & 0xFFFF0000)


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, amax_ptr, out_ptr, numerator, blocks, blocks_per_row, cols,
    PER_ROW: tl.constexpr, WORDS: tl.constexpr, PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``WORDS``: 16-bit values in whole blocks, written two to a word; else element by element, cut at ``cols``."""
    block = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    inside = block < blocks
    words, scale = load_block(codes_ptr, scale_ptr, block, block, inside, HARDWARE)
    if PER_ROW:
        amax = tl.load(amax_ptr + block // blocks_per_row, mask=inside, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr)
    factor = tl.div_rn(amax, tl.zeros_like(amax) + numerator)
    even = ()
    odd = ()
    for i in tl.static_range(0, 8, 2):
        even = even + (element(words, i, scale) * factor,)
        odd = odd + (element(words, i + 1, scale) * factor,)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if WORDS:
        pairs = ()
        for i in tl.static_range(4):
            pairs = pairs + (round_words(even[i], odd[i], dtype, HARDWARE),)
        store_words(out_ptr, block, interleave(pairs[0], pairs[1], pairs[2], pairs[3]), inside)
    else:
        evens = interleave(even[0], even[1], even[2], even[3])
        odds = interleave(odd[0], odd[1], odd[2], odd[3])
        values = tl.reshape(tl.join(evens, odds), [PER_PROGRAM, 16])
        if dtype == tl.bfloat16:
            values = round_bf16(values)
        row = block // blocks_per_row
        col = (block - row * blocks_per_row)[:, None] * 16 + tl.arange(0, 16)[None, :]
        target = out_ptr + (row.to(tl.int64)[:, None] * cols + col)
        tl.store(target, values.to(dtype), mask=inside[:, None] & (col < cols))


def supports(spec: CastSpec) -> tuple[bool, str]:
    """Whether these kernels read the codes of ``spec``'s casts, and if not, why."""
    if (spec.element, spec.scale) != (E2M1, E4M3) or spec.block[1] != BLOCK_SIZE:
        return False, f"the decode kernels do not read {spec.label}"
    if spec.outer not in (Outer.TENSOR, Outer.ROW, Outer.ROWS128):
        return False, f"the decode kernels do not read outer={spec.outer.value}"
    return True, ""


class Codes(NamedTuple):
    """Codes and block scales in a launch, and how many rows and blocks they are."""

    codes: Place
    scale_inv: Place
    rows: int
    blocks: int


def add_decode(builder: LaunchBuilder, operands: Sequence[Codes], outs: Sequence[Place]) -> None:
    """Write the values of one or two operands, without the outer factor and with the padding, to BF16 ``outs``."""
    arguments: list[Any] = [None] * 6
    counts = [0, 0]
    for which, (operand, out) in enumerate(zip(operands, outs, strict=True)):
        counts[which] = operand.rows * operand.blocks
        arguments[3 * which : 3 * which + 3] = (operand.codes, operand.scale_inv, out) if counts[which] else [None] * 3
    if not counts[0]:
        arguments, counts = arguments[3:] + arguments[:3], counts[::-1]
    programs = sum(-(-count // BLOCKS) for count in counts)
    hardware, _ = device_facts(builder.device)
    builder.step(decode_kernel, programs, *arguments, *counts, BLOCKS, hardware, num_warps=4)


def add_decode_tiles(builder: LaunchBuilder, tiles: Tiles, out: Place) -> None:
    """Write the values of the matrix, without the outer factor and with the padding, to BF16 ``out``."""
    part, spec = tiles.part, tiles.spec
    blocks = part.rows * spec.num_blocks(tiles.cols)
    hardware, _ = device_facts(builder.device)
    builder.step(
        decode_tiles_kernel, tiles.parts * -(-blocks // BLOCKS), tiles.packed, out, blocks,
        spec.num_blocks(tiles.cols), part.size // ALIGNMENT, spec.block[0], BLOCKS, hardware, num_warps=4,
    )  # fmt: skip


@resolver
def resolve_decode(operands: tuple[tuple[TensorMeta, TensorMeta], ...], device: torch.device) -> Launch:
    """``(codes, scale_inv, ...) -> values`` of one or two operands."""
    builder = LaunchBuilder(device, inputs=2 * len(operands))
    read, outs = [], []
    for index, (_, scale_inv) in enumerate(operands):
        rows, blocks = scale_inv.shape
        read.append(Codes(builder.inputs[2 * index], builder.inputs[2 * index + 1], rows, blocks))
        outs.append(builder.buffer((rows, blocks * BLOCK_SIZE), torch.bfloat16))
    add_decode(builder, read, outs)
    return builder.launch(*outs)


def decode(*tensors: Tensor) -> list[Tensor]:
    """Values without the outer factor of one or two operands: BF16 [rows, padded cols], the padding decoded too.

    Args:
        tensors: of each operand the codes, uint8 [rows, padded cols / 2], and the block scales, float8_e4m3fn
            [rows, padded cols / 16]; contiguous.
    """
    asked = tuple(map(meta_of, tensors))
    return resolve_decode(tuple(zip(asked[::2], asked[1::2], strict=True)), tensors[0].device)(*tensors)


def add_dequantize(
    builder: LaunchBuilder, codes: Matrix, scale_inv: Place, amax: Place, spec: CastSpec, cols: int, dtype: torch.dtype
) -> Matrix:
    """``x_hat`` of an operand of ``cols`` columns, see :func:`dequantize`."""
    rows = codes.meta.shape[0]
    blocks = spec.num_blocks(spec.padded_cols(cols))
    width = cols if spec.rotation is None else blocks * BLOCK_SIZE
    out = builder.matrix((rows, width), dtype)
    total = rows * blocks if width else 0
    words = dtype != torch.float32 and width == blocks * BLOCK_SIZE
    builder.step(
        dequantize_kernel, -(-total // BLOCKS), codes.place, scale_inv, amax, out.place, spec.numerator, total, blocks,
        width, spec.outer.is_by_rows, words, BLOCKS, device_facts(builder.device)[0], num_warps=4,
    )  # fmt: skip
    return out


@resolver
def resolve_dequantize(
    tensors: tuple[TensorMeta, TensorMeta, TensorMeta], device: torch.device, key: str, cols: int, dtype: torch.dtype
) -> Launch:
    """``(codes, scale_inv, amax) -> x_hat``."""
    builder = LaunchBuilder(device, inputs=3)
    codes, scale_inv, amax = builder.inputs
    made = add_dequantize(builder, Matrix(codes, tensors[0]), scale_inv, amax, CastSpec.from_key(key), cols, dtype)
    return builder.launch(made.place)


def dequantize(codes: Tensor, scale_inv: Tensor, amax: Tensor, key: str, cols: int, dtype: torch.dtype) -> Tensor:
    """``x_hat`` [rows, cols], or [rows, padded cols] as stored if the spec rotates.

    Args:
        codes, scale_inv: as in :func:`decode`.
        amax: FP32 [1], or [rows] where it is by rows.
        key: of the spec.
        dtype: BF16, FP16, FP32; FP64 is widened from FP32.
    """
    narrow = torch.float32 if dtype == torch.float64 else dtype
    tensors = (codes, scale_inv, amax)
    (out,) = resolve_dequantize(tuple(map(meta_of, tensors)), codes.device, key, cols, narrow)(*tensors)
    return out.to(dtype)
