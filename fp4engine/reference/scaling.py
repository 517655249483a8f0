"""Two-level scaling: outer amax ``A``, encode scales and stored block scales.

    S_enc = min(numerator / A, FLT_MAX), 1 where A == 0 or S_enc == 0
    s     = E4M3(min(b * (S_enc * (1 / target)), 448))                            or UE5M3, and 114,688
    enc   = min(1 / (s * (1 / S_enc)), FLT_MAX)

Every operation is one FP32 rounding, and their order is the contract.

Source: TransformerEngine ``custom_recipes/reference_nvfp4.py``, ``_quantize_blockwise_reference``.
"""

import torch
from torch import Tensor

from fp4engine.constants import E4M3_MAX, FLT_MAX
from fp4engine.formats import UE5M3, CastSpec, ElementFormat, Outer, RoundingMode
from fp4engine.reference import rounding

_LEAST_EXPONENT = -127
"""The least exponent of a power of two whose inverse FP32 holds."""


def divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """One correctly rounded FP32 division on every device; at least one argument is a tensor.

    PyTorch multiplies by a reciprocal for ``scalar / tensor``, and on CUDA for ``tensor / scalar`` too; both round
    twice, so a scalar becomes a tensor first.
    """
    if isinstance(denominator, Tensor):
        if not isinstance(numerator, Tensor):
            numerator = torch.full_like(denominator, numerator)
    else:
        assert isinstance(numerator, Tensor)
        denominator = torch.full_like(numerator, denominator)
    return torch.div(numerator, denominator)


def outer_amax(x: Tensor, spec: CastSpec) -> Tensor:
    """Largest magnitude per outer group, FP32, NaN where the group holds a NaN.

    Args:
        x: FP32 [rows, cols].

    Returns:
        [1] per tensor, [rows] per row or for each of 128 rows, [rows, cols / 128] per 1x128 block; 0 for an empty
        group. Without an outer scale [1], the constant that stands for it.
    """
    if spec.outer is Outer.NONE:
        return torch.full((1,), spec.constant_amax, dtype=torch.float32, device=x.device)
    if spec.outer is Outer.BLOCK128:
        return _amax(x.reshape(x.shape[0], x.shape[1] // 128, 128))
    if spec.outer is Outer.ROWS128:
        return block_amax(_amax(x)[:, None], (128, 1))[:, 0]
    return round_outer_amax(_amax(x if spec.outer is Outer.ROW else x.reshape(1, x.numel())), spec)


def round_outer_amax(amax: Tensor, spec: CastSpec) -> Tensor:
    """``amax`` itself, or rounded up to ``numerator * 2^k`` where the outer scale is to be a power of two.

    ``k`` is at least -127, so that ``2^-k`` is an FP32 number. Where ``numerator * 2^k`` or ``amax / numerator`` is
    none, ``amax`` stays.
    """
    if spec.block[1] or not spec.scale_rule.is_power_of_two:
        return amax
    quotient = divide(amax, spec.numerator)
    fraction, exponent = torch.frexp(quotient)
    exponent = torch.where(fraction == 0, _LEAST_EXPONENT, exponent - (fraction == 0.5).to(exponent.dtype))
    rounded = torch.ldexp(torch.full_like(amax, spec.numerator), exponent.clamp(min=_LEAST_EXPONENT))
    return torch.where((amax == 0) | ~quotient.isfinite() | ~rounded.isfinite(), amax, rounded)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude along the last axis, NaN if there is one, 0 where that is empty.

    Bit patterns of magnitudes are ordered as they are, NaN last, and integers are compared faster than floats.
    """
    return x.abs().view(torch.int32).amax(-1).view(torch.float32) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def neighbour_sum(t: Tensor) -> Tensor:
    """Sum over the last axis as a binary tree over neighbours: the order is part of the contract."""
    while t.shape[-1] > 1:
        t = torch.nn.functional.pad(t, (0, t.shape[-1] % 2))
        t = t[..., 0::2] + t[..., 1::2]
    return t[..., 0]


def per_block(amax: Tensor, spec: CastSpec, blocks: int) -> Tensor:
    """``amax`` laid out so that it broadcasts against block scales [rows, blocks]."""
    if spec.outer is Outer.BLOCK128:
        return amax.repeat_interleave(128 // spec.block[1], dim=-1)
    return amax.view(-1, 1)


def encode_scale(amax: Tensor, numerator: float) -> Tensor:
    """``S_enc`` of outer groups whose largest magnitude is ``amax``."""
    scale = divide(numerator, amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude per block of FP32 ``x`` [rows, cols], repeated for each row: [rows, cols / block cols].

    A last tile may have fewer rows than ``block``.
    """
    height, width = block
    rows, cols = x.shape
    if height == 1:
        return _amax(x.view(rows, cols // width, width))
    # Rows of a tile first: whole rows are compared many columns at once, and a sixteenth is left for the slow axis.
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % height)) if rows % height else x
    count = -(-rows // height)
    columns = padded.abs().view(count, height, cols).amax(1)
    tiles = _amax(columns.view(count, cols // width, width))
    return tiles.repeat_interleave(height, dim=0)[:rows]


def to_stored(scale: Tensor, stored: ElementFormat) -> Tensor:
    """Nearest E4M3 or UE5M3 (ties to even) of a non-negative FP32 ``scale``, saturating; one NaN pattern."""
    if stored == UE5M3:
        return torch.where(scale.isnan(), 0xFF, rounding.encode(scale, UE5M3, RoundingMode.EVEN, None, 0))
    codes = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.where(scale.isnan(), 0x7F, codes.view(torch.uint8)).view(torch.float8_e4m3fn)


def from_stored(scale_inv: Tensor, stored: ElementFormat) -> Tensor:
    """FP32 values of stored block scales."""
    if stored == UE5M3:
        return torch.where(scale_inv == 0xFF, torch.nan, rounding.decode(scale_inv, UE5M3))
    return scale_inv.float()


def element_encode_scale(stored: Tensor, outer_encode_scale: Tensor) -> Tensor:
    """``enc``: what the elements of a block are multiplied by, from the FP32 value of its STORED scale."""
    decode = stored * divide(1.0, outer_encode_scale)
    return divide(1.0, decode).clamp(max=FLT_MAX)
