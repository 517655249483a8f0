"""Block scales as PyTorch's FP8 products by block scales read them: FP32, and neighbours side by side.

    blocks of 1 x 128      [R, B] -> [B, R]           neighbouring rows
    blocks of 128 x 128    [R, B] -> [R / 128, W]     neighbouring blocks, padded by zeros to W, a multiple of four

Of 128 equal rows one is read. Legend: R rows and B blocks of an operand.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.block_cast import two_to
from fp4engine.kernels.blocks import as_bytes
from fp4engine.kernels.launch import Block, Launch, LaunchBuilder, Place, TensorMeta, meta_of, resolver

SCALES = 1024
"""Scales that a program writes."""


@triton.jit
def write_scales(scale_ptr, out_ptr, rows, blocks, width, tile, HEIGHT: tl.constexpr, SCALES: tl.constexpr):
    index = tile * SCALES + tl.arange(0, SCALES)
    if HEIGHT == 1:
        block = index // tl.maximum(rows, 1)
        place = (index - block * rows) * blocks + block
        inside = block < blocks
        is_padding = block < 0
    else:
        line = index // tl.maximum(width, 1)
        block = index - line * width
        place = line * HEIGHT * blocks + block
        inside = line * HEIGHT < rows
        is_padding = block >= blocks
    stored = tl.load(scale_ptr + place, mask=inside & (block < blocks), other=0)
    if scale_ptr.dtype.element_ty == tl.float32:
        scale = stored
    else:
        exponent = stored.to(tl.int32)
        scale = tl.where(exponent == 255, float("nan"), two_to(exponent))
    tl.store(out_ptr + index, tl.where(is_padding, 0.0, scale), mask=inside)


@triton.jit
def block_scales_kernel(
    left_ptr, left_out_ptr, right_ptr, right_out_ptr, left_rows, left_blocks, right_rows, right_blocks, right_width,
    HEIGHT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Programs of the left operand come first; ``HEIGHT`` is that of the right operand's blocks."""
    tile = tl.program_id(0)
    of_left = tl.cdiv(left_rows * left_blocks, SCALES)
    if tile < of_left:
        write_scales(left_ptr, left_out_ptr, left_rows, left_blocks, 0, tile, 1, SCALES)
    else:
        write_scales(right_ptr, right_out_ptr, right_rows, right_blocks, right_width, tile - of_left, HEIGHT, SCALES)


class Scales(NamedTuple):
    """Block scales in a launch, E8M0 or FP32, and how many rows and blocks they are."""

    scale_inv: Place
    rows: int
    blocks: int


def shape_of(rows: int, blocks: int, height: int) -> tuple[int, int]:
    """Shape of the FP32 scales as a product reads them."""
    return (blocks, rows) if height == 1 else (-(-rows // height), -(-blocks // 4) * 4)


def add_block_scales(builder: LaunchBuilder, left: Scales, right: Scales, height: int) -> tuple[Place, Place]:
    """Both operands' scales; blocks of the left one have one row, of the right ``height``."""
    (lines, width), blocks = shape_of(right.rows, right.blocks, height), right.blocks
    outs = builder.buffer((left.blocks, left.rows), torch.float32), builder.buffer((lines, width), torch.float32)
    programs = -(-left.rows * left.blocks // SCALES) + -(-lines * width // SCALES)
    builder.step(
        block_scales_kernel, programs, Block(left.scale_inv, as_bytes), outs[0], Block(right.scale_inv, as_bytes),
        outs[1], left.rows, left.blocks, right.rows, blocks, width, height, SCALES, num_warps=4,
    )  # fmt: skip
    return outs


@resolver
def resolve_block_scales(left: TensorMeta, right: TensorMeta, device: torch.device, height: int) -> Launch:
    """``(left_scale_inv, right_scale_inv) -> left_scales, right_scales``."""
    builder = LaunchBuilder(device, inputs=2)
    operands = (Scales(place, *tensor.shape) for place, tensor in zip(builder.inputs, (left, right), strict=True))
    return builder.launch(*add_block_scales(builder, *operands, height))


def block_scales(left: Tensor, right: Tensor, height: int) -> list[Tensor]:
    """FP32 scales of both operands of a product, from block scales [rows, blocks], E8M0 or FP32."""
    left, right = left.contiguous(), right.contiguous()
    return resolve_block_scales(meta_of(left), meta_of(right), left.device, height)(left, right)
