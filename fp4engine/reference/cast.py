"""The oracle: any CastSpec, one operand, plain PyTorch, CPU or GPU.

    pad -> rotate -> outer amax -> block scales -> elements -> correction -> pack

Legend: an operand is ``[rows, cols]``, its last axis is contracted; ``blocks = padded cols / block cols``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import E4M3_MAX, FLT_MAX
from fp4engine.formats import E4M3, FP32, CastSpec, Correction, Outer, OwnScaleRule, RoundingMode, ScaleRule
from fp4engine.reference import hadamard, philox, rounding, scaling
from fp4engine.reference.power_of_two import power_of_two_scale, std_scale


class Cast(NamedTuple):
    """Codes and scales of one operand.

    Attributes:
        codes: uint8 [rows, padded cols / 2] for 4-bit elements, [rows, padded cols] for wider ones.
        scale_inv: [rows, blocks] in the spec's scale format; multiplies back. UE5M3 as uint8 codes.
        amax: FP32 outer amax, see :func:`scaling.outer_amax`; a scalar correction is folded in.
    """

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor


def prepare(x: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> Tensor:
    """``x`` [rows, cols], any float dtype and stride, as the FP32 [rows, padded cols] that is quantized."""
    cols = x.shape[1]
    values = x.float()
    if missing := spec.padded_cols(cols) - cols:
        values = torch.nn.functional.pad(values, (0, missing))
    if spec.rotation is None:
        return values.contiguous()
    signs = philox.rotation_signs(spec.rotation, rng, stream, x.device)
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    return hadamard.rotate(values, signs, dtype)


def amax(x: Tensor, spec: CastSpec, rng: Tensor | None = None, stream: int = 0) -> Tensor:
    """Phase one on its own: the outer amax of operand ``x`` [rows, cols] after rotation."""
    values = x if spec.outer is Outer.NONE else prepare(x, spec, rng, stream)
    if spec.scale_rule is ScaleRule.ALIGNED:
        return _aligned_amax(_unaligned(values, spec, rng, stream)[0], spec)
    return scaling.outer_amax(values, spec)


def quantize(
    x: Tensor, spec: CastSpec, *, amax: Tensor | None = None, rng: Tensor | None = None, stream: int = 0
) -> Cast:
    """Cast operand ``x`` [rows, cols] by ``spec``.

    Args:
        x: floating point, any stride; arithmetic is FP32 from its own values.
        amax: outer amax to use instead of the operand's own, in the shape that :func:`amax` gives; without an outer
            scale it is not looked at.
        rng: int64 [2] ``(seed, draw)``, or [4] for a shard, see :mod:`philox`; needed if ``spec.is_stochastic``.
        stream: stream id of role and side.
    """
    if spec.is_stochastic and rng is None:
        raise ValueError(f"a stochastic cast needs rng=(seed, draw), got None (spec {spec.key})")
    values = prepare(x, spec, rng, stream)
    if spec.scale_rule is ScaleRule.ALIGNED:
        return _aligned(values, amax, spec, rng, stream)
    if amax is None or spec.outer is Outer.NONE:
        amax = scaling.outer_amax(values, spec)
    if not spec.block[1]:
        scale_inv, codes = _outer_only(values, amax, spec, rng, stream)
    elif spec.scale_rule.is_power_of_two:
        scale_inv, codes = _power_of_two(values, spec, rng, stream)
    elif spec.scale_rule.is_four_over_six:
        scale_inv, codes = _four_over_six(values, amax, spec, rng, stream)
    elif spec.scale_rule is ScaleRule.AMAX or isinstance(spec.scale_rule, OwnScaleRule):
        scale_inv, codes = _two_level(values, amax, spec, rng, stream)
    else:
        raise NotImplementedError(f"the reference has no block scales for scale_rule={spec.scale_rule.value}")
    if values.numel() and spec.correction is Correction.SCALAR:
        amax = amax * _shrinkage(values, codes, scale_inv, amax, spec)
    elif values.numel() and spec.correction is not Correction.NONE:
        scale_inv = _eden(values, codes, scale_inv, amax, spec, rng, stream)
    return Cast(_packed(codes, spec), scale_inv, amax)


def _packed(codes: Tensor, spec: CastSpec) -> Tensor:
    return rounding.pack(codes) if spec.element.storage_bits == 4 else codes


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


def _decode_scale(scale_inv: Tensor, spec: CastSpec, rows: int) -> Tensor:
    """Block scales as :func:`_multiply` takes them."""
    if scale_inv.shape[1]:
        return scaling.from_stored(scale_inv, spec.scale)
    return scale_inv.new_ones((rows, 1), dtype=torch.float32)


def _outer_only(values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """No block scales: ``code = element(x * S_enc)``; ``scale_inv`` is [rows, 0]."""
    encode_scale = scaling.encode_scale(amax, spec.numerator).view(-1, 1)
    scale_inv = torch.zeros((values.shape[0], 0), dtype=spec.scale.torch_dtype, device=values.device)
    return scale_inv, _elements(values, encode_scale, spec, rng, stream)


def _block_amax(values: Tensor, spec: CastSpec) -> Tensor:
    """Block maxima, or what an own rule takes for them; NaN for infinity where nothing else would tell of it."""
    block = scaling.block_amax(values, spec.block)
    if isinstance(spec.scale_rule, OwnScaleRule):
        block = torch.where(block.isfinite(), _own_magnitudes(values, spec.scale_rule, spec.block), block)
    if spec.outer is not Outer.NONE or spec.scale == FP32:
        return block
    return torch.where(block.isfinite(), block, torch.nan)


def _own_magnitudes(values: Tensor, rule: OwnScaleRule, block: tuple[int, int]) -> Tensor:
    """What ``rule`` says of the blocks of ``values`` [rows, cols], repeated for each row; a last tile gets zeros."""
    height, width = block
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % height))
    tiles = padded.view(padded.shape[0] // height, height, cols // width, width).transpose(1, 2).flatten(2)
    return rule.magnitudes(tiles).repeat_interleave(height, dim=0)[:rows]


def _two_level(values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    block = _block_amax(values, spec)
    if spec.scale == FP32:
        encode_scale = scaling.divide(spec.target, block).clamp(max=FLT_MAX)
        encode_scale = torch.where(block == 0, 1.0, encode_scale)
        return scaling.divide(1.0, encode_scale), _elements(values, encode_scale, spec, rng, stream)
    outer = scaling.per_block(scaling.encode_scale(amax, spec.numerator), spec, block.shape[1])
    scale_inv = scaling.to_stored(block * (outer * (1.0 / spec.target)), spec.scale)
    if spec.search:
        scale_inv = _searched(values, scale_inv, outer, spec)
    encode_scale = scaling.element_encode_scale(scaling.from_stored(scale_inv, spec.scale), outer)
    codes = _elements(values, encode_scale, spec, rng, stream)
    if spec.element.special:
        return _special(_multiply(values, encode_scale, spec), codes, scale_inv, spec)
    return scale_inv, codes


def _special(scaled: Tensor, codes: Tensor, scale_inv: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor]:
    """Block scales with the sign of the block's special value, and codes with the special one where that is nearest.

    ``reach - distance``, in units of ``4 * reach``, is the squared error that the special value saves an element. Sums
    of it are exact. A block that saves as much by either sign takes the negative: the source tries it first.

    Args:
        scaled: FP32 [rows, cols], what ``codes`` encode.
    """
    rows, blocks = scale_inv.shape
    height, reach = spec.block[0], spec.element.special_reach
    distance = (scaled.abs() - spec.element.special).abs()
    is_near, is_negative = distance <= reach, scaled < 0
    gains = torch.where(is_near, (reach - distance).copysign(scaled), 0.0).double()
    gains = torch.nn.functional.pad(gains.view(rows, blocks, spec.block[1]).sum(2), (0, 0, 0, -rows % height))
    gains = gains.unflatten(0, (-1, height)).sum(1).repeat_interleave(height, dim=0)[:rows]
    is_minus = (gains <= 0) & ~scale_inv.float().isnan()
    is_special = is_near & (is_negative == is_minus.repeat_interleave(spec.block[1], dim=1))
    signed = scale_inv.view(torch.uint8) | is_minus.to(torch.uint8) << 7
    return signed.view(torch.float8_e4m3fn), torch.where(is_special, 1 << spec.element.bits - 1, codes)


def _searched(values: Tensor, nominal: Tensor, outer: Tensor, spec: CastSpec) -> Tensor:
    """Of the E4M3 scale ``nominal`` [rows, blocks] and its neighbours the one with the least squared error.

    Errors are in units of the outer scale, ``element * scale - fl(x * S_enc)``.
    """
    rows, blocks = nominal.shape
    units = (values.view(rows, blocks, spec.block[1]) * outer.expand(rows, blocks)[..., None]).view_as(values)
    start = nominal.view(torch.uint8).int()
    best, least = start, torch.full_like(outer.expand(rows, blocks), torch.nan)
    for offset in (0, *spec.search):
        code = torch.where(start == 0x7F, start, (start + offset).clamp(0, 0x7E))
        scale = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
        codes = _elements(values, scaling.element_encode_scale(scale, outer), spec, None, 0)
        difference = _multiply(rounding.decode(codes, spec.element), scale, spec) - units
        error = _block_sums(difference * difference, spec)
        better = error < least if offset else torch.ones_like(error, dtype=torch.bool)
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    return best.to(torch.uint8).view(torch.float8_e4m3fn)


def _four_over_six(
    values: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int
) -> tuple[Tensor, Tensor]:
    """Try the block's amax on 6 and on 4; keep 4 where its error is strictly smaller.

    Source: arXiv 2512.02010; order of operations of TransformerEngine's
    ``_quantize_blockwise_4over6_reference``, which divides by 6 before it multiplies by the outer scale.
    """
    base = _block_amax(values, spec)
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
    scale_inv = scaling.to_stored(scale, spec.scale)
    codes = _elements(values, scaling.element_encode_scale(scale_inv.float(), outer), spec, rng, stream)
    decoded = rounding.decode(codes, spec.element).view(rows, blocks, spec.block[1]) * scale_inv.float()[..., None]
    outer_amax = scaling.per_block(amax, spec, blocks)[..., None]
    difference = scaling.divide(decoded * outer_amax, spec.numerator) - values.view(rows, blocks, spec.block[1])
    mse = spec.scale_rule is ScaleRule.FOUR_OVER_SIX_MSE
    errors = difference * difference if mse else difference.abs()
    return scale_inv, codes, _block_sums(errors.view_as(values), spec)


def _block_sums(errors: Tensor, spec: CastSpec) -> Tensor:
    """Sums over blocks, from left to right, then over row halves: [rows, blocks]."""
    rows, cols = errors.shape
    columns = errors.view(rows, cols // spec.block[1], spec.block[1])
    total = torch.zeros_like(columns[..., 0])
    for column in range(spec.block[1]):
        total = total + columns[..., column]
    return _sum_tile_rows(total, spec.block[0]) if spec.block[0] > 1 else total


def _sum_tile_rows(error: Tensor, height: int) -> Tensor:
    rows = error.shape[0]
    tiles = torch.nn.functional.pad(error, (0, 0, 0, -rows % height)).unflatten(0, (-(-rows // height), height))
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles.expand(-1, height, -1).flatten(0, 1)[:rows]


def _power_of_two(values: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    block = scaling.block_amax(values, spec.block)
    if spec.scale_rule is ScaleRule.STD:
        exponent = std_scale(values.view(*block.shape, spec.block[1]))
    else:
        exponent = power_of_two_scale(block, spec.element, spec.scale_rule)
    encode_scale = torch.ldexp(torch.ones_like(block), 127 - exponent)
    encode_scale = torch.where(block.isfinite(), encode_scale * (spec.target / spec.element.max_value), torch.nan)
    scale_inv = torch.where(block.isfinite(), exponent, 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale_inv, _elements(values, encode_scale, spec, rng, stream)


def _ratio(y: Tensor, q: Tensor, group: int) -> Tensor:
    """``<y,y> / <y,q>`` per ``group`` neighbours, FP32 from FP64 sums; 1 where the quotient is not finite."""
    y, q = y.double().reshape(-1, group), q.double().reshape(-1, group)
    ratio = (scaling.neighbour_sum(y * y) / scaling.neighbour_sum(y * q)).float()
    return torch.where(ratio.isfinite(), ratio, torch.ones_like(ratio))


def _shrinkage(values: Tensor, codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec) -> Tensor:
    """``<y,y> / <y,q>`` of the whole operand: FP32 [1]."""
    block_scale = _decode_scale(scale_inv, spec, values.shape[0])
    factor = scaling.divide(scaling.per_block(amax, spec, block_scale.shape[1]), spec.numerator)
    quantized = _multiply(_multiply(rounding.decode(codes, spec.element), block_scale, spec), factor, spec)
    return _ratio(values, quantized, values.numel())


def _eden(
    values: Tensor, codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, rng: Tensor | None, stream: int
) -> Tensor:
    """MS-EDEN: block scales times ``<v,v>/<v,q>``, rounded stochastically to E4M3.

    ``v`` are the elements as they meet their grid, each block in units of its own scale, and ``q`` what they became. A
    block whose scale underflowed has ``q = 0``, and ``v`` in units of the outer scale.

    Source: arXiv 2601.22813; IST-DASLab Quartet-II 8776a90, ``schemes/quartet_2.py``, ``eden_1x16s_fp4_kernel``.
    """
    rows, blocks = scale_inv.shape
    outer = scaling.per_block(scaling.encode_scale(amax, spec.numerator), spec, blocks)
    stored = scale_inv.float()
    empty = stored == 0
    encode_scale = scaling.element_encode_scale(torch.where(empty, 1.0, stored), outer)
    quantized = _multiply(rounding.decode(codes, spec.element), (~empty).float(), spec)
    ratio = _ratio(_multiply(values, encode_scale, spec), quantized, spec.correction.group)
    return _stochastic_e4m3(stored * _per_block(ratio, spec, rows), stored <= E4M3_MAX, rng, stream)


def _per_block(ratio: Tensor, spec: CastSpec, rows: int) -> Tensor:
    """Corrections per group laid out as block scales [rows, blocks]."""
    return ratio.view(rows, -1).repeat_interleave(spec.correction.group // spec.block[1], dim=1)


def _stochastic_e4m3(scale: Tensor, is_number: Tensor, rng: Tensor | None, stream: int) -> Tensor:
    assert rng is not None
    random = philox.scale_bits(scale.shape[0], scale.shape[1], rng, stream)
    codes = rounding.encode(scale, E4M3, RoundingMode.STOCHASTIC, random, 16)
    return torch.where(is_number, codes, 0x7F).to(torch.uint8).view(torch.float8_e4m3fn)


def _unaligned(values: Tensor, spec: CastSpec, rng: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """Corrected block scales before there is an outer scale, in BF16 precision, FP32 [rows, blocks]; and codes."""
    block = scaling.block_amax(values, spec.block)
    scale = block * scaling.divide(torch.ones_like(block), spec.target)
    scale = (scale.view(torch.int32) & -(1 << 19)).view(torch.float32)  # sign, exponent and four bits of mantissa
    encode_scale = torch.where(scale == 0, 0.0, scaling.divide(1.0, scale).clamp(max=FLT_MAX))
    codes = _elements(values, encode_scale, spec, rng, stream)
    if values.numel() and spec.correction.group > 1:
        ratio = _ratio(
            _multiply(values, encode_scale, spec), rounding.decode(codes, spec.element), spec.correction.group
        )
        scale = scale * _per_block(ratio, spec, values.shape[0])
    return scale.bfloat16().float(), codes


def _aligned_amax(scale: Tensor, spec: CastSpec) -> Tensor:
    """``A`` whose outer scale maps the largest of ``scale`` [rows, blocks] onto the bound."""
    return scaling.outer_amax(scale.repeat_interleave(spec.block[1], dim=1), spec) * spec.target


def _aligned(values: Tensor, amax: Tensor | None, spec: CastSpec, rng: Tensor | None, stream: int) -> Cast:
    """Elements first, by a block scale of their own; then all block scales into the range of E4M3 at once.

    Source: IST-DASLab Quartet-II 8776a90, ``kernels/csrc/had128_utils.cuh``, ``eden_rounding``, and
    ``group_transform_and_eden.cu``, ``eden_convert_scales_kernel``.
    """
    scale, codes = _unaligned(values, spec, rng, stream)
    if amax is None:
        amax = _aligned_amax(scale, spec)
    scaled = scale * scaling.per_block(scaling.encode_scale(amax, spec.numerator), spec, scale.shape[1])
    if spec.correction.group > 1:
        scale_inv = _stochastic_e4m3(scaled, scaled.isfinite(), rng, stream)
    else:
        scale_inv = scaling.to_stored(scaled, spec.scale)
    if values.numel() and spec.correction is Correction.SCALAR:
        amax = amax * _shrinkage(values, codes, scale_inv, amax, spec)
    return Cast(_packed(codes, spec), scale_inv, amax)


def decode(codes: Tensor, scale_inv: Tensor, spec: CastSpec) -> Tensor:
    """``element * block scale`` without the outer factor: FP32 [rows, padded cols].

    For E2M1 with E4M3 scales at most 6 significant bits are set, so the values are exact in BF16; 7 with special ones.
    """
    decoder = rounding.decode_packed if spec.element.storage_bits == 4 else rounding.decode
    elements, scale = decoder(codes, spec.element), _decode_scale(scale_inv, spec, codes.shape[0])
    if spec.element.special:  # the sign of the scale is theirs alone
        is_special = elements == spec.element.special
        return torch.where(is_special, _multiply(elements, scale, spec), _multiply(elements, scale.abs(), spec))
    return _multiply(elements, scale, spec)


def outer_factor(amax: Tensor, spec: CastSpec) -> Tensor:
    """``A / numerator``: FP32 [1, 1], [rows, 1] or, with 1x128 outer blocks, [rows, padded cols]."""
    factor = scaling.divide(amax, spec.numerator)
    return factor.repeat_interleave(128, dim=1) if spec.outer is Outer.BLOCK128 else factor.view(-1, 1)


def within_range(x: Tensor, cast: Cast, spec: CastSpec) -> Tensor:
    """Where operand ``x`` [rows, cols] did not saturate: it is 0, or below what the largest element stands for.

    Bool [rows, padded cols], of what was quantized: rotated where the cast rotates, by signs that are not fresh.
    """
    values = prepare(x, spec, None, 0)
    limit = _decode_scale(cast.scale_inv, spec, values.shape[0]).abs() * spec.element.max_value
    limit = _multiply(torch.ones_like(values), limit, spec) * outer_factor(cast.amax, spec)
    return (values == 0) | (values.abs() < limit)  # the scale of a block of zeros may be 0


def dequantize(codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype) -> Tensor:
    """``x_hat = element * block scale * (A / numerator)``, rounded once to ``dtype``: [rows, cols].

    A rotated operand is not rotated back, and keeps its padded columns.
    """
    values = decode(codes, scale_inv, spec) * outer_factor(amax, spec)
    return values[:, : cols if spec.rotation is None else None].contiguous().to(dtype)
