"""The oracle: any CastSpec, one operand, plain PyTorch, CPU or GPU.

    pad -> rotate -> outer amax -> block scales -> elements -> correction -> pack

Legend: an operand is ``[rows, cols]``, its last axis is contracted; ``blocks = padded cols / block cols``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import E4M3_MAX, FLT_MAX
from fp4engine.formats import E4M3, FP32, CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.reference import hadamard, philox, rounding, scaling
from fp4engine.reference.power_of_two import power_of_two_scale


class Cast(NamedTuple):
    """Codes and scales of one operand.

    Attributes:
        codes: uint8 [rows, padded cols / 2] for 4-bit elements, [rows, padded cols] for wider ones.
        scale_inv: [rows, blocks] in the spec's scale format; multiplies back.
        amax: FP32 outer amax, see :func:`scaling.outer_amax`; a scalar correction is folded in.
    """

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor


def prepare(x: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> Tensor:
    """``x`` [rows, cols], any float dtype and stride, as the FP32 [rows, padded cols] that is quantized."""
    cols = x.shape[1]
    values = torch.nn.functional.pad(x.float(), (0, spec.padded_cols(cols) - cols))
    if spec.rotation is None:
        return values.contiguous()
    signs = philox.rotation_signs(spec.rotation, rng, stream, x.device)
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    return hadamard.rotate(values, signs, dtype)


def amax(x: Tensor, spec: CastSpec, rng: Tensor | None = None, stream: int = 0) -> Tensor:
    """Phase one on its own: the outer amax of operand ``x`` [rows, cols] after rotation."""
    values = x if spec.outer is Outer.NONE else prepare(x, spec, rng, stream)
    return scaling.outer_amax(values, spec)


def quantize(
    x: Tensor, spec: CastSpec, *, amax: Tensor | None = None, rng: Tensor | None = None, stream: int = 0
) -> Cast:
    """Cast operand ``x`` [rows, cols] by ``spec``.

    Args:
        x: floating point, any stride; arithmetic is FP32 from its own values.
        amax: outer amax to use instead of the operand's own, in the shape that :func:`amax` gives.
        rng: int64 [2] ``(seed, draw)``; needed if ``spec.is_stochastic``.
        stream: stream id of role and side.
    """
    if spec.is_stochastic and rng is None:
        raise ValueError(f"a stochastic cast needs rng=(seed, draw), got None (spec {spec.key})")
    values = prepare(x, spec, rng, stream)
    if amax is None:
        amax = scaling.outer_amax(values, spec)
    if not spec.block[1]:
        scale_inv, codes = _outer_only(values, amax, spec, rng, stream)
    elif spec.scale_rule.is_power_of_two:
        scale_inv, codes = _power_of_two(values, spec, rng, stream)
    elif spec.scale_rule.is_four_over_six:
        scale_inv, codes = _four_over_six(values, amax, spec, rng, stream)
    else:
        scale_inv, codes = _two_level(values, amax, spec, rng, stream)
    if values.numel() and spec.correction is Correction.SCALAR:
        amax = amax * _shrinkage(values, codes, scale_inv, amax, spec, values.numel()).view(1)
    elif values.numel() and spec.correction is not Correction.NONE:
        scale_inv = _eden(values, codes, scale_inv, amax, spec, rng, stream)
    return Cast(rounding.pack(codes) if spec.element.storage_bits == 4 else codes, scale_inv, amax)


def _elements(values: Tensor, encode_scale: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> Tensor:
    """Codes of ``values`` [rows, cols] scaled by ``encode_scale``, see :func:`_multiply`."""
    scaled = _multiply(values, encode_scale, spec)
    random = None
    if spec.rounding is RoundingMode.STOCHASTIC:
        assert rng is not None
        random = philox.element_bits(values.shape[0], values.shape[1], rng, stream, spec.random_bits)
    return rounding.encode(scaled, spec.element, spec.rounding, random, spec.random_bits)


def _multiply(values: Tensor, block_scale: Tensor, spec: CastSpec) -> Tensor:
    """``values`` [rows, cols] times FP32 ``block_scale`` [rows, blocks], or [rows | 1, 1] without block scales."""
    if not spec.block[1]:
        return values * block_scale
    rows, cols = values.shape
    blocks = values.view(rows, cols // spec.block[1], spec.block[1])
    return (blocks * block_scale[..., None]).view(rows, cols)


def _decode_scale(scale_inv: Tensor, rows: int) -> Tensor:
    """Block scales as :func:`_multiply` takes them."""
    return scale_inv.float() if scale_inv.shape[1] else scale_inv.new_ones((rows, 1), dtype=torch.float32)


def _outer_only(values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """No block scales: ``code = element(x * S_enc)``; ``scale_inv`` is [rows, 0]."""
    encode_scale = scaling.encode_scale(amax, spec.numerator).view(-1, 1)
    scale_inv = torch.zeros((values.shape[0], 0), dtype=spec.scale.torch_dtype, device=values.device)
    return scale_inv, _elements(values, encode_scale, spec, rng, stream)


def _two_level(values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    block = scaling.block_amax(values, spec.block)
    if spec.scale == FP32:
        scale_inv = scaling.divide(block, spec.target)
        encode_scale = scaling.divide(1.0, scale_inv).clamp(max=FLT_MAX)
        return scale_inv, _elements(values, encode_scale, spec, rng, stream)
    outer = scaling.per_block(scaling.encode_scale(amax, spec.numerator), spec, block.shape[1])
    scale_inv = scaling.to_e4m3(block * (outer * (1.0 / spec.target)))
    encode_scale = scaling.element_encode_scale(scale_inv, outer)
    return scale_inv, _elements(values, encode_scale, spec, rng, stream)


def _four_over_six(
    values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int
) -> tuple[Tensor, Tensor]:
    """Try the block's amax on 6 and on 4; keep 4 where its error is strictly smaller.

    Source: arXiv 2512.02010; order of operations of TransformerEngine's
    ``_quantize_blockwise_4over6_reference``, which divides by 6 before it multiplies by the outer scale.
    """
    base = scaling.block_amax(values, spec.block)
    outer = scaling.per_block(scaling.encode_scale(amax, spec.numerator), spec, base.shape[1])
    base = scaling.divide(base, spec.target) * outer
    six, four = (_candidate(values, amax, scale, outer, spec, rng, stream) for scale in (base, base * 1.5))
    pick_four = four[2] < six[2]
    elements = pick_four.repeat_interleave(spec.block[1], dim=1)
    scale_inv = torch.where(pick_four, four[0].view(torch.uint8), six[0].view(torch.uint8)).view(torch.float8_e4m3fn)
    return scale_inv, torch.where(elements, four[1], six[1])


def _candidate(
    values: Tensor, amax: Tensor, scale: Tensor, outer: Tensor, spec: CastSpec, rng: Tensor | None, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Block scales, codes and per-block error of one candidate; sums run left to right, then over row halves."""
    rows, blocks = scale.shape
    scale_inv = scaling.to_e4m3(scale)
    codes = _elements(values, scaling.element_encode_scale(scale_inv, outer), spec, rng, stream)
    decoded = rounding.decode(codes, spec.element).view(rows, blocks, spec.block[1]) * scale_inv.float()[..., None]
    outer_amax = scaling.per_block(amax, spec, blocks)[..., None]
    difference = scaling.divide(decoded * outer_amax, spec.numerator) - values.view(rows, blocks, spec.block[1])
    mse = spec.scale_rule is ScaleRule.FOUR_OVER_SIX_MSE
    errors = difference * difference if mse else difference.abs()
    error = torch.zeros_like(scale)
    for column in range(spec.block[1]):
        error = error + errors[..., column]
    if spec.block[0] > 1:
        error = _sum_tile_rows(error, spec.block[0])
    return scale_inv, codes, error


def _sum_tile_rows(error: Tensor, height: int) -> Tensor:
    rows = error.shape[0]
    tiles = torch.nn.functional.pad(error, (0, 0, 0, -rows % height)).unflatten(0, (-(-rows // height), height))
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles.expand(-1, height, -1).flatten(0, 1)[:rows]


def _power_of_two(values: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    block = scaling.block_amax(values, spec.block)
    exponent = power_of_two_scale(block, spec.element, spec.scale_rule)
    encode_scale = torch.ldexp(torch.ones_like(block), 127 - exponent)
    encode_scale = torch.where(block.isnan(), block, encode_scale * (spec.target / spec.element.max_value))
    scale_inv = torch.where(block.isfinite(), exponent, 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale_inv, _elements(values, encode_scale, spec, rng, stream)


def _shrinkage(values: Tensor, codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, group: int) -> Tensor:
    """``<y,y> / <y,q>`` per ``group`` elements, FP32 from FP64 sums; 1 where the quotient is not finite."""
    block_scale = _decode_scale(scale_inv, values.shape[0])
    factor = scaling.divide(scaling.per_block(amax, spec, block_scale.shape[1]), spec.numerator)
    quantized = _multiply(_multiply(rounding.decode(codes, spec.element), block_scale, spec), factor, spec)
    y, q = values.double().reshape(-1, group), quantized.double().reshape(-1, group)
    ratio = ((y * y).sum(-1) / (y * q).sum(-1)).float()
    return torch.where(ratio.isfinite(), ratio, torch.ones_like(ratio))


def _eden(
    values: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    spec: CastSpec,
    rng: Tensor | None,
    stream: int,
) -> Tensor:
    """MS-EDEN: block scales times ``<y,y>/<y,q>``, rounded stochastically to E4M3.

    Source: arXiv 2601.22813, algorithm 1.
    """
    assert rng is not None
    rows, blocks = scale_inv.shape
    ratio = _shrinkage(values, codes, scale_inv, amax, spec, spec.correction.group)
    ratio = ratio.view(rows, values.shape[1] // spec.correction.group).repeat_interleave(
        spec.correction.group // spec.block[1], dim=1
    )
    random = philox.scale_bits(rows, blocks, rng, stream)
    corrected = rounding.encode(ratio * scale_inv.float(), E4M3, RoundingMode.STOCHASTIC, random, 16)
    corrected = torch.where(scale_inv.float() <= E4M3_MAX, corrected, 0x7F)
    return corrected.to(torch.uint8).view(torch.float8_e4m3fn)


def decode(codes: Tensor, scale_inv: Tensor, spec: CastSpec) -> Tensor:
    """``element * block scale`` without the outer factor: FP32 [rows, padded cols].

    For E2M1 with E4M3 scales at most 6 significant bits are set, so the values are exact in BF16.
    """
    if spec.element.storage_bits == 4:
        codes = rounding.unpack(codes)
    return _multiply(rounding.decode(codes, spec.element), _decode_scale(scale_inv, codes.shape[0]), spec)


def outer_factor(amax: Tensor, spec: CastSpec) -> Tensor:
    """``A / numerator``: FP32 [1, 1], [rows, 1] or, with 1x128 outer blocks, [rows, padded cols]."""
    factor = scaling.divide(amax, spec.numerator)
    return factor.repeat_interleave(128, dim=1) if spec.outer is Outer.BLOCK128 else factor.view(-1, 1)


def dequantize(codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype) -> Tensor:
    """``x_hat = element * block scale * (A / numerator)``, rounded once to ``dtype``: [rows, cols].

    A rotated operand is returned as it is stored: rotated, with its padded columns.
    """
    values = decode(codes, scale_inv, spec) * outer_factor(amax, spec)
    return values[:, : cols if spec.rotation is None else None].contiguous().to(dtype)
