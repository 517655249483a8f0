"""Codes and block scales back to values: for the GEMM in BF16 without the outer factor, for users with it.

    values[r, c] = e2m1(code) * scale_inv                 exact in BF16
    x_hat[r, c]  = round(values * fl(A / numerator))

A thread takes a block of 16: two words of eight codes, one scale, 32 bytes of BF16. Everything is contiguous, so rows
matter only where the columns are cut or each row has its own factor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import CastSpec, Outer
from fp4engine.kernels.encode import from_bits, from_e4m3, to_bits
from fp4engine.kernels.gemm_launch import start
from fp4engine.kernels.launch import device_facts

BLOCKS = 512
"""Blocks of 16 per program: two per thread of four warps."""


@triton.jit
def element(words, position: tl.constexpr, scale):
    """FP32 value of the code at ``position`` of a word, times ``scale``."""
    shift: tl.constexpr = 22 - 4 * position
    code = (words << shift) if shift > 0 else (words >> -shift)
    y = from_bits((code & 0x01C00000) + 0x3F000000)
    # y is right from 1 up; below, 2 y - 1 turns 1/2, 3/4 into 0, 1/2.
    magnitude = tl.minimum(y, 2.0 * y - 1.0, propagate_nan=tl.PropagateNan.NONE) * scale
    return from_bits(to_bits(magnitude) ^ ((words << (28 - 4 * position)) & 0x80000000))


@triton.jit
def decode_kernel(codes_ptr, scale_ptr, out_ptr, blocks, PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    inside = block < blocks
    scale = from_e4m3(tl.load(scale_ptr.to(tl.pointer_type(tl.uint8)) + block, mask=inside, other=0), HARDWARE)
    half = tl.arange(0, 2)[None, :]
    words = tl.load(
        codes_ptr.to(tl.pointer_type(tl.uint32)) + (block[:, None] * 2 + half), mask=inside[:, None], other=0
    )
    pairs = ()
    for i in tl.static_range(0, 8, 2):
        low = to_bits(element(words, i, scale[:, None]))
        high = to_bits(element(words, i + 1, scale[:, None]))
        pairs = pairs + ((low >> 16) | (high & 0xFFFF0000),)
    four = tl.reshape(tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3])), [PER_PROGRAM, 8])
    target = out_ptr.to(tl.pointer_type(tl.uint32)) + (block[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(target, four, mask=inside[:, None])


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, amax_ptr, out_ptr, numerator, blocks, blocks_per_row, cols,
    PER_ROW: tl.constexpr, PER_PROGRAM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    inside = block < blocks
    row = block // blocks_per_row
    scale = from_e4m3(tl.load(scale_ptr.to(tl.pointer_type(tl.uint8)) + block, mask=inside, other=0), HARDWARE)
    half = tl.arange(0, 2)[None, :]
    words = tl.load(
        codes_ptr.to(tl.pointer_type(tl.uint32)) + (block[:, None] * 2 + half), mask=inside[:, None], other=0
    )
    if PER_ROW:
        amax = tl.load(amax_ptr + row, mask=inside, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr)
    factor = tl.div_rn(amax, tl.zeros_like(amax) + numerator)
    even = ()
    odd = ()
    for i in tl.static_range(0, 8, 2):
        even = even + (element(words, i, scale[:, None]) * factor,)
        odd = odd + (element(words, i + 1, scale[:, None]) * factor,)
    evens = tl.join(tl.join(even[0], even[2]), tl.join(even[1], even[3]))
    odds = tl.join(tl.join(odd[0], odd[2]), tl.join(odd[1], odd[3]))
    values = tl.reshape(tl.join(evens, odds), [PER_PROGRAM, 16])
    col = (block - row * blocks_per_row)[:, None] * 16 + tl.arange(0, 16)[None, :]
    target = out_ptr + (row[:, None] * cols + col)
    tl.store(target, round_to(values, out_ptr.dtype.element_ty), mask=inside[:, None] & (col < cols))


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """FP32 to ``dtype``, nearest even; BF16 by integers, which the interpreter rounds rightly too."""
    if dtype == tl.bfloat16:
        bits = to_bits(values)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


def decode(codes: Tensor, scale_inv: Tensor, spec: CastSpec, cols: int) -> Tensor:
    """Values without the outer factor: BF16 [rows, padded cols].

    Args:
        codes: uint8 [rows, padded cols / 2], contiguous.
        scale_inv: float8_e4m3fn [rows, padded cols / 16], contiguous.
        spec: what :func:`fp4engine.kernels.quantize.supports` covers; any rotation.
        cols: logical columns; the padding is decoded too.
    """
    rows, blocks = scale_inv.shape
    out = torch.empty(rows, blocks * BLOCK_SIZE, dtype=torch.bfloat16, device=codes.device)
    total = rows * blocks
    if total:
        pointers = (codes, scale_inv, out)
        constants = (BLOCKS, device_facts(codes.device)[0])
        start(decode_kernel, -(-total // BLOCKS), pointers, (total,), (*pointers, total), constants, num_warps=4)
    return out


def dequantize(codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype) -> Tensor:
    """``x_hat`` [rows, cols], or [rows, padded cols] as stored if ``spec`` rotates.

    Args:
        codes, scale_inv: as in :func:`decode`.
        amax: FP32 [1], or [rows] under ``Outer.ROW``.
        dtype: BF16, FP16, FP32; FP64 is widened from FP32.
    """
    if dtype == torch.float64:
        return dequantize(codes, scale_inv, amax, spec, cols, torch.float32).double()
    rows, blocks = scale_inv.shape
    width = cols if spec.rotation is None else blocks * BLOCK_SIZE
    out = torch.empty(rows, width, dtype=dtype, device=codes.device)
    total = rows * blocks
    if total and width:
        pointers = (codes, scale_inv, amax, out)
        shape = (spec.numerator, total, blocks, width)
        constants = (spec.outer is Outer.ROW, BLOCKS, device_facts(codes.device)[0])
        start(dequantize_kernel, -(-total // BLOCKS), pointers, shape, (*pointers, *shape), constants, num_warps=4)
    return out
