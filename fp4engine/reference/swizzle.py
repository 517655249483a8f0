"""Block scales in the layout that cuBLASLt's and CUTLASS's block-scaled GEMMs read.

Scales [rows, blocks] are cut into tiles of 128 x 4, each tile stored as 512 bytes: byte ``(r % 32) * 16 + (r // 32) * 4
+ c`` holds the scale of row r, column c of the tile. Tiles follow row-major; padding is zero.

Source: cuBLAS documentation, "1D block scaling factors layout".
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_ROWS, _COLS = 128, 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """[rows, blocks] of any 8-bit dtype -> 1-D of ``ceil(rows / 128) * ceil(blocks / 4) * 512`` elements."""
    rows, blocks = scales.shape
    data = pad(scales.view(torch.uint8), (0, -blocks % _COLS, 0, -rows % _ROWS))
    tiles = data.view(-(-rows // _ROWS), 4, 32, -(-blocks // _COLS), _COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Inverse of :func:`swizzle_scales`: [rows, blocks]."""
    row_tiles, col_tiles = -(-rows // _ROWS), -(-blocks // _COLS)
    tiles = swizzled.view(torch.uint8).view(row_tiles, col_tiles, 32, 4, _COLS)
    data = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * _ROWS, col_tiles * _COLS)
    return data[:rows, :blocks].contiguous().view(swizzled.dtype)
