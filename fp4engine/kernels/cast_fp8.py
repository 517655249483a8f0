"""FP8 per tensor: one read of x writes both operands, since without blocks the columnwise codes are the transpose.

    code = fp8(clamp(x * S_enc, -max, max)),   S_enc = min(numerator / A, FLT_MAX)

Legend: x is [M, K]; rowwise codes [M, padded K], columnwise codes [K, padded M], padding zero.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.formats import E4M3, E5M2, CastSpec, Correction, Outer, RoundingMode
from fp4engine.kernels.amax import Maxima, add_amax, whole_amax
from fp4engine.kernels.amax_history import History, note, recall
from fp4engine.kernels.cast import Side
from fp4engine.kernels.encode import outer_encode_scale, to_bits
from fp4engine.kernels.launch import LaunchBuilder, Place
from fp4engine.kernels.load import Reading

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
def load_amax(amax_ptr, whole_ptr, parts, values_ptr, past_amax_ptr, scaled_by_ptr):
    """The amax that a side is scaled by: its own, which is there whole or in parts, or the one that the history gives.

    With a history, the first program notes the side's own amax in it.
    """
    if whole_ptr is None:
        return tl.load(amax_ptr)
    else:
        amax = whole_amax(amax_ptr, whole_ptr, parts)
        if past_amax_ptr is not None:
            current = amax
            amax = recall(past_amax_ptr, current)
            if tl.program_id(0) == 0:
                tl.store(scaled_by_ptr, amax)
                if values_ptr is not None:
                    note(values_ptr, current)
        return amax


@triton.jit
def cast_fp8_kernel(
    x_ptr, row_amax_ptr, row_whole_ptr, row_ptr, col_amax_ptr, col_whole_ptr, col_ptr,
    values_ptr, past_amax_ptr, scaled_by_ptr,
    M, K, stride_m, stride_k, row_width, col_width, tiles_k, parts,
    ROW: tl.constexpr, COL: tl.constexpr, SHARED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Tile ``pid`` of the padded matrix, tiles counted along K first.

    ``*_amax_ptr``: a side's outer amax; or, where ``*_whole_ptr`` is given, its parts, and the amax is written there.
    ``past_amax_ptr``: of a history, whose kernel of the amax came before; or None. ``values_ptr``: of it, or None where
    nothing is to be noted. ``scaled_by_ptr``: where what both sides are scaled by goes.
    ``SHARED``: the amax is the same for both sides; ``col_amax_ptr`` is not read.
    """
    row = (tl.program_id(0) // tiles_k) * TILE_M + tl.arange(0, TILE_M)[:, None]
    col = (tl.program_id(0) % tiles_k) * TILE_K + tl.arange(0, TILE_K)[None, :]
    offsets = row.to(tl.int64) * stride_m + col.to(tl.int64) * stride_k
    x = tl.load(x_ptr + offsets, mask=(row < M) & (col < K), other=0.0).to(tl.float32)
    if ROW is not None:
        amax = load_amax(row_amax_ptr, row_whole_ptr, parts, values_ptr, past_amax_ptr, scaled_by_ptr)
        code = encode_fp8(x, outer_encode_scale(amax, ROW.numerator), ROW)
        codes = row_ptr.to(tl.pointer_type(tl.uint8))
        tl.store(codes + (row.to(tl.int64) * row_width + col), code, mask=(row < M) & (col < row_width))
    if COL is not None:
        if ROW is None or not SHARED:
            amax = load_amax(col_amax_ptr, col_whole_ptr, parts, values_ptr, past_amax_ptr, scaled_by_ptr)
        if ROW is None or COL != ROW or not SHARED:
            code = encode_fp8(x, outer_encode_scale(amax, COL.numerator), COL)
        codes = col_ptr.to(tl.pointer_type(tl.uint8))
        target = codes + (tl.trans(col).to(tl.int64) * col_width + tl.trans(row))
        tl.store(target, tl.trans(code), mask=tl.trans((row < col_width) & (col < K)))


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether this kernel covers ``spec`` on inputs of ``x_dtype``, and if not, why."""
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.element in (E4M3, E5M2), f"element={spec.element}"),
        (spec.block == (0, 0), f"block={spec.block}"),
        (spec.outer is Outer.TENSOR, f"outer={spec.outer.value}"),
        (spec.rounding is RoundingMode.EVEN, f"rounding={spec.rounding.value}"),
        (spec.target == spec.element.max_value or not spec.scale_rule.is_power_of_two, f"target={spec.target}"),
        (spec.rotation is None, f"rotation={spec.rotation}"),
        (spec.correction is Correction.NONE, f"correction={spec.correction.value}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the FP8 kernel does not cover {what}"
    return True, ""


class Target(NamedTuple):
    """Where one side of a cast goes.

    Attributes:
        spec: what :func:`supports`.
        amax: of the tensor: given, or to be written.
        is_given: whether ``amax`` is there already.
        data: codes.
    """

    spec: CastSpec
    amax: Place
    is_given: bool
    data: Place


def add_cast(
    builder: LaunchBuilder, reading: Reading, row: Target | None, col: Target | None, history: History | None = None
) -> None:
    """Cast the sides that have a target; the largest magnitude of x, the same for both, is taken if one lacks it.

    With a history, both sides are scaled by the amax that it gives, which goes to the one place that they share.
    """
    rows, cols = reading.shape
    missing = [target.amax for target in (row, col) if target is not None and not target.is_given]  # one, if any
    own, maxima = None, Maxima(None, None, 0)
    if missing:
        own = missing[0] if history is None else builder.buffer((1,), torch.float32)
        source = reading if not reading.x.is_column_major else reading._replace(x=reading.x.transposed)
        maxima = add_amax(builder, source, Side.of(CastSpec(), "codes", 0), None, (own, None), None, history)
    past = (None, None, None) if history is None else (*history.places, missing[0])
    shared = row is not None and col is not None and row.amax == col.amax
    row_width = row.spec.padded_cols(cols) if row else 0
    col_width = col.spec.padded_cols(rows) if col else 0
    tiles_k = max(triton.cdiv(max(cols, row_width), TILE_K), 1)
    tiles = tiles_k * max(triton.cdiv(max(rows, col_width), TILE_M), 1)  # one writes the amax of an empty matrix
    targets: list[Any] = []
    for target in (row, col):
        if target is None:
            targets += [None] * 3
            continue
        whole = None if target.is_given or (shared and target is col) else own
        targets += [target.amax if target.is_given else maxima.row, whole, target.data]
    builder.step(
        cast_fp8_kernel, tiles, reading.place, *targets, *past, rows, cols, *reading.x.strides, row_width, col_width,
        tiles_k, maxima.parts, Grid.of(row.spec) if row else None, Grid.of(col.spec) if col else None,
        shared, TILE_M, TILE_K, num_warps=4,
    )  # fmt: skip
