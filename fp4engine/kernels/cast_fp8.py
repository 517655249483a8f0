"""FP8 per tensor: one read of x writes both operands, since without blocks the columnwise codes are the transpose.

    code = fp8(clamp(x * S_enc, -max, max)),   S_enc = min(numerator / A, FLT_MAX)

Legend: x is [M, K]; rowwise codes [M, padded K], columnwise codes [K, padded M], padding zero.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import E4M3, E5M2, CastSpec, Outer, RoundingMode
from fp4engine.kernels.amax import amax as amax_of_tensor
from fp4engine.kernels.encode import outer_encode_scale, to_bits
from fp4engine.kernels.start import start

TILE_M, TILE_K = 64, 128


@dataclass(frozen=True, slots=True)
class Grid:
    """What one side is rounded to, as constants of the kernel.

    Attributes:
        numerator: of the outer scale.
        largest: the element's largest magnitude.
        shift: mantissa bits that FP32 has and the element has not.
        least: the element's smallest normal; least_code: FP32 bits of it, shifted, less its code.
        magic: adding this rounds what is below ``least``: its last place is the subnormal step; magic_bits: its bits.
    """

    numerator: float
    largest: float
    shift: int
    least: float
    least_code: int
    magic: float
    magic_bits: int

    @staticmethod
    def of(spec: CastSpec) -> "Grid":
        element = spec.element
        exponent = 1 - element.bias
        shift = 23 - element.mantissa_bits
        least_code = ((127 + exponent) << element.mantissa_bits) - (1 << element.mantissa_bits)
        magic_bits = (127 + exponent + shift) << 23
        return Grid(
            spec.numerator, element.max_value, shift, 2.0**exponent, least_code, 2.0 ** (exponent + shift), magic_bits
        )


@triton.jit
def encode_fp8(x, scale, GRID: tl.constexpr):
    """Codes of ``x * scale``, nearest even, saturating: uint8.

    NaN and -0.0 become code 0, a negative that rounds to zero keeps its sign. In integers on every target: the kernel
    is bound by bytes, and one way serves them all.
    """
    v = x * scale
    v = tl.where(v == v, v, 0.0)
    magnitude = tl.minimum(tl.abs(v), GRID.largest)
    bits = to_bits(magnitude)
    half: tl.constexpr = (1 << (GRID.shift - 1)) - 1
    normal = ((bits + half + ((bits >> GRID.shift) & 1)) >> GRID.shift) - GRID.least_code
    subnormal = to_bits(magnitude + GRID.magic) - GRID.magic_bits
    code = tl.where(magnitude < GRID.least, subnormal, normal)
    return (code | tl.where(v < 0, 0x80, 0).to(tl.uint32)).to(tl.uint8)


@triton.jit
def cast_fp8_kernel(
    x_ptr, amax_ptr, row_ptr, col_ptr, M, K, stride_m, stride_k, row_width, col_width, tiles_k,
    ROW: tl.constexpr, COL: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of the padded matrix, tiles counted along K first."""
    row = (tl.program_id(0) // tiles_k) * TILE_M + tl.arange(0, TILE_M)[:, None]
    col = (tl.program_id(0) % tiles_k) * TILE_K + tl.arange(0, TILE_K)[None, :]
    offsets = row.to(tl.int64) * stride_m + col.to(tl.int64) * stride_k
    x = tl.load(x_ptr + offsets, mask=(row < M) & (col < K), other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr)
    if ROW is not None:
        code = encode_fp8(x, outer_encode_scale(amax, ROW.numerator), ROW)
        tl.store(row_ptr + (row.to(tl.int64) * row_width + col), code, mask=(row < M) & (col < row_width))
    if COL is not None:
        if ROW is None or COL != ROW:
            code = encode_fp8(x, outer_encode_scale(amax, COL.numerator), COL)
        target = col_ptr + (tl.trans(col).to(tl.int64) * col_width + tl.trans(row))
        tl.store(target, tl.trans(code), mask=tl.trans((row < col_width) & (col < K)))


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether this kernel covers ``spec`` on inputs of ``x_dtype``, and if not, why."""
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.element in (E4M3, E5M2), f"element={spec.element}"),
        (spec.block == (0, 0), f"block={spec.block}"),
        (spec.outer is Outer.TENSOR, f"outer={spec.outer.value}"),
        (spec.rounding is RoundingMode.EVEN, f"rounding={spec.rounding.value}"),
        (spec.target == spec.element.max_value, f"target={spec.target}"),
        (spec.rotation is None, f"rotation={spec.rotation}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the FP8 kernel does not cover {what}"
    return True, ""


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of x [M, K], FP32 [1]; NaN if x holds one. The same for both sides."""
    largest = amax_of_tensor(x, CastSpec(), None)[0]
    assert largest is not None
    return largest


def cast_fp8(x: Tensor, amax: Tensor, rowwise: CastSpec | None, columnwise: CastSpec | None) -> list[Tensor | None]:
    """Codes of the sides whose spec is given: uint8 [M, padded K] and [K, padded M].

    Args:
        x: [M, K] BF16, FP16 or FP32, any strides.
        amax: FP32 [1], the outer amax of both sides.
        rowwise, columnwise: what :func:`supports` covers.
    """
    rows, cols = x.shape
    row_width = rowwise.padded_cols(cols) if rowwise else 0
    col_width = columnwise.padded_cols(rows) if columnwise else 0
    row = torch.empty(rows, row_width, dtype=torch.uint8, device=x.device) if rowwise else None
    col = torch.empty(cols, col_width, dtype=torch.uint8, device=x.device) if columnwise else None
    height, width = max(rows, col_width), max(cols, row_width)
    if x.numel():
        tiles = triton.cdiv(width, TILE_K) * triton.cdiv(height, TILE_M)
        shape = (rows, cols, *x.stride(), row_width, col_width, triton.cdiv(width, TILE_K))
        start(
            cast_fp8_kernel,
            tiles,
            (x, amax, row, col),
            shape,
            (Grid.of(rowwise) if rowwise else None, Grid.of(columnwise) if columnwise else None, TILE_M, TILE_K),
            num_warps=4,
        )
    return [row, col]
