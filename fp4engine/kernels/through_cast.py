"""Kernels of :mod:`fp4engine.ops.through_cast`: what a cast did not saturate, and gradients on their way back.

Legend: a matrix is [R, C]; its cast is WIDTH columns wide, padded. Tiles are held as in
:mod:`fp4engine.kernels.block_cast`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec, Rotation
from fp4engine.kernels import blocks
from fp4engine.kernels.block_cast import load_tile, prepared, repeat
from fp4engine.kernels.block_decode import load_factor, load_scales
from fp4engine.kernels.blocks import TILE_C, BlockCast, as_bytes
from fp4engine.kernels.encode import narrow, sixteenths, stack
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
from fp4engine.kernels.rotate import rotate_back, round_to

TILE_R = 16


@triton.jit
def within_kernel(
    x_ptr, scale_ptr, amax_ptr, bits_ptr, R, C, stride_r, stride_c, width, LARGEST: tl.constexpr, CAST: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of x to bits: uint16 [R, width / 16]. ``LARGEST``: what an element saturates at."""
    COLS: tl.constexpr = TILE_C // CAST.width
    tiles = tl.cdiv(width, TILE_C)
    row0 = (tl.program_id(0) // tiles) * TILE_R
    col0 = (tl.program_id(0) % tiles) * TILE_C
    y = prepared(x_ptr, None, R, C, stride_r, stride_c, row0, col0, row0, CAST, TILE_R, TILE_C, HARDWARE)
    index = tl.arange(0, TILE_R * COLS)
    row = row0 + index // COLS
    block = col0 // CAST.width + index % COLS
    blocks = width // CAST.width
    scale = load_scales(scale_ptr, row, block, (row < R) & (block < blocks), blocks, CAST, HARDWARE)
    factor = load_factor(amax_ptr, row0 + tl.arange(0, TILE_R)[:, None], col0, R, width, CAST)
    factor = repeat(tl.reshape(factor, [factor.numel]), TILE_C // 16)
    limit = repeat(tl.abs(scale) * LARGEST, CAST.width // 16) * factor
    word = tl.zeros([TILE_R * TILE_C // 16], tl.uint32)
    for i in tl.static_range(16):
        word = word | (((y[i] == 0) | (tl.abs(y[i]) < limit)).to(tl.uint32) << i)
    place, inside = _place(R, width, row0, col0, TILE_R, TILE_C)
    tl.store(bits_ptr.to(tl.pointer_type(tl.uint16)) + place, word.to(tl.uint16), mask=inside)


@triton.jit
def back_kernel(
    values_ptr, bits_ptr, out_ptr, R, C, width, cols, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of FP32 values [R, C] to [R, cols]: 0 where a bit is off, then rotated back if ``CAST`` says so."""
    tiles = tl.cdiv(cols, TILE_C)
    row0 = (tl.program_id(0) // tiles) * TILE_R
    col0 = (tl.program_id(0) % tiles) * TILE_C
    y = sixteenths(load_tile(values_ptr, R, C, C, 1, row0, col0, TILE_R, TILE_C))
    if bits_ptr is not None:
        place, inside = _place(R, width, row0, col0, TILE_R, TILE_C)
        word = tl.load(bits_ptr.to(tl.pointer_type(tl.uint16)) + place, mask=inside, other=0).to(tl.uint32)
        y = _masked(y, word)
    if CAST is not None:
        y = rotate_back(y, CAST)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    local = tl.arange(0, TILE_R)[:, None]
    col = tl.arange(0, TILE_C)[None, :]
    values = narrow(round_to(tl.reshape(stack(y), [TILE_R, TILE_C]), dtype, HARDWARE), dtype)
    out_ptr += row0.to(tl.int64) * cols + col0
    tl.store(out_ptr + (local * cols + col), values, mask=(row0 + local < R) & (col < cols - col0))


@triton.jit
def _place(R, width, row0, col0, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Where the bits of every 16 neighbours lie, and whether they are there."""
    index = tl.arange(0, TILE_R * TILE_C // 16)
    row = row0 + index // (TILE_C // 16)
    group = col0 // 16 + index % (TILE_C // 16)
    return row.to(tl.int64) * (width // 16) + group, (row < R) & (group < width // 16)


@triton.jit
def _masked(y, word):
    z = ()
    for i in tl.static_range(16):
        z = z + (y[i] * ((word >> i) & 1).to(tl.float32),)
    return z


def supports(key: str, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernel of :func:`within` reads what was cast by the spec of ``key``, and if not, why."""
    return blocks.supports(CastSpec.from_key(key), x_dtype)


def add_within(builder: LaunchBuilder, x: Matrix, scale_inv: Place, amax: Place, spec: CastSpec) -> Matrix:
    """The bits of :func:`within`."""
    rows, cols = x.meta.shape
    width = spec.padded_cols(cols)
    bits = builder.matrix((rows, width // 8), torch.uint8)
    builder.step(
        within_kernel, -(-rows // TILE_R) * -(-width // TILE_C), x.place, Block(scale_inv, as_bytes), amax, bits.place,
        rows, cols, *x.meta.strides, width, spec.element.max_value, BlockCast.of(spec, "codes", 0), TILE_R, TILE_C,
        device_facts(builder.device)[0], num_warps=4,
    )  # fmt: skip
    return bits


@resolver
def resolve_within(x: TensorMeta, device: torch.device, key: str) -> Launch:
    """``(x, scale_inv, amax) -> bits``."""
    builder = LaunchBuilder(device, inputs=3)
    place, scale_inv, amax = builder.inputs
    return builder.launch(add_within(builder, Matrix(place, x), scale_inv, amax, CastSpec.from_key(key)).place)


def within(x: Tensor, scale_inv: Tensor, amax: Tensor, key: str) -> Tensor:
    """See :func:`fp4engine.ops.through_cast.within_range`."""
    return resolve_within(meta_of(x), x.device, key)(x, scale_inv, amax)[0]


def add_back(
    builder: LaunchBuilder,
    values: Matrix,
    bits: Matrix | None,
    rotation: Rotation | None,
    cols: int,
    dtype: torch.dtype,
) -> Matrix:
    """The gradient of :func:`back`."""
    rows, width = values.meta.shape
    out = builder.matrix((rows, cols), dtype)
    rotated = None if rotation is None else BlockCast.of(CastSpec(rotation=rotation), "codes", 0)
    builder.step(
        back_kernel, -(-rows // TILE_R) * -(-cols // TILE_C), values.place, bits.place if bits else None, out.place,
        rows, width, bits.meta.shape[1] * 8 if bits else 0, cols, rotated, TILE_R, TILE_C,
        device_facts(builder.device)[0], num_warps=4,
    )  # fmt: skip
    return out


@resolver
def resolve_back(
    values: TensorMeta, bits: TensorMeta | None, device: torch.device, key: str, cols: int, dtype: torch.dtype
) -> Launch:
    """``(values, bits) -> gradient``."""
    builder = LaunchBuilder(device, inputs=2)
    place, mask = builder.inputs
    rotation = CastSpec.from_key(key).rotation if key else None
    within = None if bits is None else Matrix(mask, bits)
    return builder.launch(add_back(builder, Matrix(place, values), within, rotation, cols, dtype).place)


def back(values: Tensor, bits: Tensor | None, key: str, cols: int, dtype: torch.dtype) -> Tensor:
    """See :func:`fp4engine.ops.through_cast.back`."""
    return resolve_back(meta_of(values), meta_of(bits), values.device, key, cols, dtype)(values, bits)[0]
