"""Block scales in the layout that block-scaled GEMMs read, in one pass.

    out[((r / 128) * col_tiles + c / 4) * 512 + (r % 32) * 16 + (r / 32 % 4) * 4 + c % 4] = scale[r, c]

Source: cuBLAS documentation, "1D block scaling factors layout"; :func:`fp4engine.reference.swizzle_scales`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.launch import Launch, LaunchBuilder, TensorMeta, meta_of, resolver

COL_TILES = 8
"""Tiles of 128 x 4 per program: 4 KiB, 32 bytes of each row read at once."""


@triton.jit
def swizzle_kernel(scale_ptr, out_ptr, rows, blocks, row_tiles, col_tiles, TILES: tl.constexpr):
    """Program ``pid``: ``TILES`` neighbouring tiles of one row of tiles, programs counted along the columns first."""
    programs = tl.cdiv(col_tiles, TILES)
    row_tile = tl.program_id(0) // programs
    col_tile = (tl.program_id(0) % programs) * TILES
    row = row_tile * 128 + tl.arange(0, 128)[:, None]
    col = col_tile * 4 + tl.arange(0, 4 * TILES)[None, :]
    scale = tl.load(
        scale_ptr.to(tl.pointer_type(tl.uint8)) + row.to(tl.int64) * blocks + col,
        mask=(row < rows) & (col < blocks),
        other=0,
    )
    # [quarter, 32 rows, tile, 4] to [tile, 32 rows, quarter, 4]
    tiles = tl.permute(tl.reshape(scale, [4, 32, TILES, 4]), [2, 1, 0, 3])
    offset = tl.arange(0, 512 * TILES)
    first = (row_tile.to(tl.int64) * col_tiles + col_tile) * 512
    target = out_ptr.to(tl.pointer_type(tl.uint8)) + first + offset
    tl.store(target, tl.reshape(tiles, [512 * TILES]), mask=offset < (col_tiles - col_tile) * 512)


@resolver
def resolve_swizzle(scales: TensorMeta, device: torch.device) -> Launch:
    """``(scales) -> swizzled``."""
    rows, blocks = scales.shape
    row_tiles, col_tiles = -(-rows // 128), -(-blocks // 4)
    builder = LaunchBuilder(device, inputs=1)
    out = builder.buffer((row_tiles * col_tiles * 512,), scales.dtype)
    programs = row_tiles * -(-col_tiles // COL_TILES)
    shape = (rows, blocks, row_tiles, col_tiles)
    builder.step(swizzle_kernel, programs, *builder.inputs, out, *shape, COL_TILES, num_warps=4)
    return builder.launch(out)


def swizzle_scales(scales: Tensor) -> Tensor:
    """[rows, blocks], contiguous, 8-bit -> 1-D of ``ceil(rows / 128) * ceil(blocks / 4) * 512``, padded with zeros."""
    (out,) = resolve_swizzle(meta_of(scales), scales.device)(scales)
    return out
