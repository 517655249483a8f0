"""FP8 per tensor: one read of x writes both operands, since without blocks the columnwise codes are the transpose.

    code = fp8(clamp(x * S_enc, -max, max)),   S_enc = min(numerator / A, FLT_MAX)

Legend: x is [M, K]; rowwise codes [M, padded K], columnwise codes [K, padded M], padding zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import E4M3, E5M2, CastSpec, Outer, RoundingMode
from fp4engine.kernels.amax import amax as amax_of_tensor
from fp4engine.kernels.encode import E4M3 as HARDWARE_E4M3
from fp4engine.kernels.encode import outer_encode_scale, to_bits, to_e4m3
from fp4engine.kernels.gemm_launch import start
from fp4engine.kernels.launch import device_facts

TILE_M, TILE_K = 64, 128


@triton.jit
def to_e5m2(x, HARDWARE: tl.constexpr):
    """Bits of the nearest E5M2 (ties to even) of ``x`` in [0, 57344]. uint8."""
    if HARDWARE_E4M3 & HARDWARE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = to_bits(x)
        normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
        # 2^7 has a last place of 2^-16, E5M2's subnormal step.
        subnormal = to_bits(x + 128.0) - 0x43000000
        return tl.where(x < 6.103515625e-05, subnormal, normal).to(tl.uint8)


@triton.jit
def encode_fp8(x, scale, LARGEST: tl.constexpr, IS_E5M2: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of ``x * scale``, saturating; NaN and -0.0 become code 0, a negative that rounds to zero keeps its sign."""
    v = x * scale
    v = tl.where(v == v, v, 0.0)
    magnitude = tl.minimum(tl.abs(v), LARGEST)
    code = to_e5m2(magnitude, HARDWARE) if IS_E5M2 else to_e4m3(magnitude, HARDWARE)
    return code | (v < 0).to(tl.uint8) << 7


@triton.jit
def cast_fp8_kernel(
    x_ptr, amax_ptr, row_ptr, col_ptr, M, K, stride_m, stride_k, row_width, col_width, tiles_k,
    ROW_NUMERATOR: tl.constexpr, ROW_LARGEST: tl.constexpr, COL_NUMERATOR: tl.constexpr, COL_LARGEST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of the padded matrix, tiles counted along K first."""
    row = (tl.program_id(0) // tiles_k) * TILE_M + tl.arange(0, TILE_M)[:, None]
    col = (tl.program_id(0) % tiles_k) * TILE_K + tl.arange(0, TILE_K)[None, :]
    offsets = row.to(tl.int64) * stride_m + col.to(tl.int64) * stride_k
    x = tl.load(x_ptr + offsets, mask=(row < M) & (col < K), other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr)
    if row_ptr is not None:
        scale = outer_encode_scale(amax, ROW_NUMERATOR)
        code = encode_fp8(x, scale, ROW_LARGEST, ROW_LARGEST > 448.0, HARDWARE)
        tl.store(row_ptr + (row.to(tl.int64) * row_width + col), code, mask=(row < M) & (col < row_width))
    if col_ptr is not None:
        if row_ptr is None or COL_NUMERATOR != ROW_NUMERATOR:
            scale = outer_encode_scale(amax, COL_NUMERATOR)
            code = encode_fp8(x, scale, COL_LARGEST, COL_LARGEST > 448.0, HARDWARE)
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
            (x, amax, row, col, *shape),
            (*_constants(rowwise), *_constants(columnwise), TILE_M, TILE_K, device_facts(x.device)[0]),
            num_warps=4,
        )
    return [row, col]


def _constants(spec: CastSpec | None) -> tuple[float, float]:
    return (spec.numerator, spec.element.max_value) if spec else (0.0, 0.0)
