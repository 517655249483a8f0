"""Codes of any cast back to values, tile by tile; :mod:`fp4engine.kernels.dequantize` reads NVFP4 faster.

values[r, c] = element(code) * block scale                   for a product, in BF16 or FP16
x_hat[r, c]  = round(values * fl(A / numerator))             for users, and for casts made of a saved operand
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import FP32, CastSpec
from fp4engine.kernels.block_cast import decode_tile, from_stored, times_scale, two_to
from fp4engine.kernels.blocks import TILE_C, BlockCast, as_bytes
from fp4engine.kernels.encode import narrow
from fp4engine.kernels.launch import (
    Block,
    Launch,
    LaunchBuilder,
    Matrix,
    Place,
    TensorMeta,
    device_facts,
    meta_of,
    resolver,
)
from fp4engine.kernels.rotate import round_to

TILE_R = 32


@triton.jit
def load_scales(scale_ptr, row, block, inside, blocks, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 values of stored block scales."""
    stored = tl.load(scale_ptr + (row.to(tl.int64) * blocks + block), mask=inside, other=0)
    if CAST.scale == "fp32":
        return stored
    elif CAST.scale == "e4m3" or CAST.scale == "ue5m3":
        return from_stored(stored, CAST, HARDWARE)
    else:
        return tl.where(stored == 255, float("nan"), two_to(stored.to(tl.int32)))


@triton.jit
def repeated(t, TIMES: tl.constexpr):
    """[R, N] with each column ``TIMES`` times."""
    R: tl.constexpr = t.shape[0]
    N: tl.constexpr = t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], [R, N, TIMES]), [R, N * TIMES])


@triton.jit
def load_codes(codes_ptr, row0, col0, R, width, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """A tile of codes [R, width]: uint32 [TILE_R, TILE_C]; 0 outside."""
    SHARE: tl.constexpr = 1 + CAST.packed  # codes in a byte
    local = tl.arange(0, TILE_R)[:, None]
    byte = tl.arange(0, TILE_C // SHARE)[None, :]
    stride = width // SHARE
    codes_ptr += row0.to(tl.int64) * stride + col0 // SHARE
    inside = (row0 + local < R) & (byte < stride - col0 // SHARE)
    codes = tl.load(codes_ptr + (local * stride + byte), mask=inside, other=0).to(tl.uint32)
    if CAST.packed:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [TILE_R, TILE_C])
    return codes


@triton.jit
def load_factor(amax_ptr, row, col0, R, width, CAST: tl.constexpr):
    """``A / numerator`` of a tile of 128 columns: FP32 [rows of the tile, 1], or [1, 1] where there is one amax."""
    if CAST.outer == "row" or CAST.outer == "rows128":
        amax = tl.load(amax_ptr + row, mask=row < R, other=0.0)
    elif CAST.outer == "1x128":
        amax = tl.load(amax_ptr + (row.to(tl.int64) * (width // 128) + col0 // 128), mask=row < R, other=0.0)
    else:
        amax = tl.load(amax_ptr + tl.zeros([1, 1], tl.int32))
    return tl.div_rn(amax, tl.zeros_like(amax) + CAST.numerator)


@triton.jit
def block_decode_kernel(
    codes_ptr, scale_ptr, amax_ptr, out_ptr, R, width, cols, CAST: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of codes [R, width], to ``cols`` columns of values; with the outer factor if there is an amax."""
    tiles = tl.cdiv(cols, TILE_C)
    row0 = (tl.program_id(0) // tiles) * TILE_R
    col0 = (tl.program_id(0) % tiles) * TILE_C
    local = tl.arange(0, TILE_R)[:, None]
    row = row0 + local
    values = decode_tile(load_codes(codes_ptr, row0, col0, R, width, CAST, TILE_R, TILE_C), CAST)
    if scale_ptr is not None:
        BLOCKS: tl.constexpr = TILE_C // CAST.width
        block = col0 // CAST.width + tl.arange(0, BLOCKS)[None, :]
        blocks = width // CAST.width
        scale = load_scales(scale_ptr, row, block, (row < R) & (block < blocks), blocks, CAST, HARDWARE)
        values = times_scale(values, repeated(scale, CAST.width), CAST)
    if amax_ptr is not None:
        values = values * load_factor(amax_ptr, row, col0, R, width, CAST)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    col = tl.arange(0, TILE_C)[None, :]
    out_ptr += row0.to(tl.int64) * cols + col0
    values = narrow(round_to(values, dtype, HARDWARE), dtype)
    tl.store(out_ptr + (local * cols + col), values, mask=(row < R) & (col < cols - col0))


def add_block_decode(
    builder: LaunchBuilder,
    codes: Matrix,
    scale_inv: Place,
    amax: Place | None,
    spec: CastSpec,
    cols: int,
    dtype: torch.dtype,
) -> Matrix:
    """Values [rows, cols] of codes, with the outer factor if there is an amax.

    Without, FP32 block scales are left out too: they are factors of a product, see ``gemm_factors.py``.
    """
    rows = codes.meta.shape[0]
    width = codes.meta.shape[1] * 8 // spec.element.storage_bits
    out = builder.matrix((rows, cols), dtype)
    scaled = spec.block[1] and (amax is not None or spec.scale != FP32)
    scales = Block(scale_inv, as_bytes) if scaled else None
    builder.step(
        block_decode_kernel, -(-rows // TILE_R) * -(-cols // TILE_C), codes.place, scales, amax, out.place, rows, width,
        cols, BlockCast.of(spec, "values", 0), TILE_R, TILE_C, device_facts(builder.device)[0], num_warps=4,
    )  # fmt: skip
    return out


@resolver
def resolve_block_decode(
    tensors: tuple[TensorMeta | None, ...], device: torch.device, key: str, cols: int, dtype: torch.dtype
) -> Launch:
    """``(codes, scale_inv, amax) -> values``."""
    codes, _, amax = tensors
    assert codes is not None
    builder = LaunchBuilder(device, inputs=3)
    place, scale_inv, outer = builder.inputs
    matrix, spec = Matrix(place, codes), CastSpec.from_key(key)
    return builder.launch(
        add_block_decode(builder, matrix, scale_inv, outer if amax else None, spec, cols, dtype).place
    )


def block_decode(codes: Tensor, scale_inv: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Values without their FP32 factors, outer or of blocks: [rows, padded cols], the padding decoded too.

    Args:
        dtype: which holds them exactly, BF16 or FP16.
    """
    width = codes.shape[1] * (2 if CastSpec.from_key(key).element.storage_bits == 4 else 1)
    tensors = (codes, scale_inv, None)
    launch = resolve_block_decode(tuple(map(meta_of, tensors)), codes.device, key, width, dtype)
    return launch(*tensors)[0]


def block_dequantize(codes: Tensor, scale_inv: Tensor, amax: Tensor, key: str, cols: int, dtype: torch.dtype) -> Tensor:
    """``x_hat`` [rows, cols], or [rows, padded cols] as stored if the spec rotates, in BF16, FP16, FP32 or FP64."""
    spec = CastSpec.from_key(key)
    tensors = (codes, scale_inv, amax)
    width = cols if spec.rotation is None else spec.padded_cols(cols)
    narrow_dtype = torch.float32 if dtype == torch.float64 else dtype
    launch = resolve_block_decode(tuple(map(meta_of, tensors)), codes.device, key, width, narrow_dtype)
    return launch(*tensors)[0].to(dtype)
