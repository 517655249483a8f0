"""Any cast into block scales, of one operand: what the reference does, tile by tile.

    x -> rotate -> block maxima -> block scales -> elements -> correction -> pack

A tile is [TILE_R, 128] of the operand, so that rotations, blocks, outer groups and corrections of up to 128 neighbours
lie inside; every operation is one on whole tensors. :mod:`fp4engine.kernels.quantize` casts E2M1 with E4M3 scales
faster, from the tensor instead of the operand; what it does not cover comes here.

Two passes read x where an outer scale is of the whole tensor or a row: the largest magnitude, then the cast. A third
kernel has the last word where something is known only after the last tile: block scales that are aligned with each
other, and the correction of the outer scale.

Legend: the operand is [R, C], contracted along C, at any strides; its codes are [R, WIDTH], padded.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.constants import BLOCK_SIZE, HADAMARD_SIGNS
from fp4engine.constants import GAUSSIAN_VARIANCE as _GAUSSIAN_VARIANCE
from fp4engine.formats import E2M1, E4M3, UE5M3, CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.kernels.amax import (
    FEW_PARTS,
    MOST_PARTS,
    add_zeros,
    bits_of_largest,
    largest_part,
    store_amax,
    store_amax_per_row,
    store_part,
)
from fp4engine.kernels.dequantize import Codes, add_decode
from fp4engine.kernels.element import Grid, decode_element, encode_element
from fp4engine.kernels.encode import (
    FLT_MAX,
    NAN,
    PAIRS,
    element_encode_scale,
    from_bits,
    from_e4m3,
    in_the_whole,
    outer_encode_scale,
    philox,
    quotient,
    random_words,
    reciprocal,
    round_bf16,
    to_bits,
    to_e4m3,
    unstack8,
    wide,
)
from fp4engine.kernels.launch import Block, Draft, Facts, Place, device_facts

TILE_C = 128
SUMS = 2048
"""Neighbours that a program of :func:`fold_kernel` adds up."""
SCALES_PER_PROGRAM = 1024
GAUSSIAN_VARIANCE = tl.constexpr(_GAUSSIAN_VARIANCE)


@dataclass(frozen=True, eq=False)
class BlockCast:
    """A CastSpec at compile time. Compared by identity, as from :meth:`of`.

    Attributes:
        grid: of the elements; scale_grid: of block scales in UE5M3, and in E4M3 that are rounded stochastically.
        packed: whether two codes share a byte; values: whether BF16 values are written, not codes.
        height, width: of a block.
        scale: format of the block scales: ``"e4m3"``, ``"ue5m3"``, ``"e8m0"`` or ``"fp32"``.
        rule: value of the scale rule.
        inverse_target: ``fl(1 / fl(target))``.
        turn, max_exponent, element_factor: of a power-of-two rule: a mantissa beyond this rounds up; exponent of the
            element's largest binade; what elements are multiplied by beside the power.
        outer, rounding, correction: values of the spec's.
        rotation: size, 0 for none.
        signs: ``"none"``, ``"fixed"``, ``"dgrad"`` or ``"wgrad"``; sixteen: those fixed for 16, set bits for minus.
        group: elements that share a correction, or one pair of partial sums of the scalar one.
        side: bit 0 of the stream.
        sharded: whether the random stream is told of the shard's place in a whole tensor.
    """

    grid: Grid
    scale_grid: Grid
    packed: bool
    values: bool
    height: int
    width: int
    scale: str
    rule: str
    numerator: float
    target: float
    inverse_target: float
    constant_amax: float
    turn: float
    max_exponent: int
    element_factor: float
    outer: str
    rounding: str
    random_bits: int
    rotation: int
    signs: str
    sixteen: int
    correction: str
    group: int
    side: int
    sharded: bool

    @staticmethod
    @cache
    def of(spec: CastSpec, form: str, side: int, sharded: bool = False) -> "BlockCast":
        """The cast by ``spec`` that writes ``form``, ``"codes"`` or ``"values"``."""
        rotation = spec.rotation
        scalar = spec.correction is Correction.SCALAR
        corrected = "scalar" if scalar else "eden" if spec.correction.group > 1 else "none"
        return BlockCast(
            grid=Grid.of(spec.element),
            scale_grid=Grid.of(UE5M3 if spec.scale == UE5M3 else E4M3),
            packed=spec.element.storage_bits == 4,
            values=form == "values",
            height=spec.block[0],
            width=spec.block[1],
            scale=spec.scale.name,
            rule=spec.scale_rule.value,
            numerator=spec.numerator,
            target=spec.target,
            inverse_target=_inverse(spec.target),
            constant_amax=spec.constant_amax,
            turn=_turn(spec),
            max_exponent=spec.element.max_exponent,
            element_factor=spec.target / spec.element.max_value,
            outer=spec.outer.value,
            rounding=spec.rounding.value,
            random_bits=spec.random_bits if spec.rounding is RoundingMode.STOCHASTIC else 0,
            rotation=rotation.size if rotation else 0,
            signs=rotation.signs.value if rotation else "none",
            sixteen=sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0),
            correction=corrected,
            group=spec.col_multiple if scalar else spec.correction.group,
            side=side,
            sharded=sharded,
        )


def _inverse(target: float) -> float:
    """``fl(1 / fl(target))``."""
    one = torch.ones((), dtype=torch.float32)
    return float(one / torch.tensor(target, dtype=torch.float32))


def _turn(spec: CastSpec) -> float:
    """The largest mantissa, in [1, 2), whose power of two is not rounded up; see the reference's ``power_of_two``."""
    element = spec.element
    largest = element.max_value / 2.0**element.max_exponent
    half = 2.0 ** -(element.mantissa_bits + 1)
    return {
        ScaleRule.MIDMAX: largest + half,
        ScaleRule.OPTION3: 2 - half - 2.0**-23,
        ScaleRule.TOPBINADE: largest,
        ScaleRule.CEIL: 1.0,
    }.get(spec.scale_rule, 2.0)


@triton.jit
def load_tile(x_ptr, R, C, stride_r, stride_c, row0, col0, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """FP32 [TILE_R, TILE_C]; 0 outside the operand."""
    row = tl.arange(0, TILE_R)[:, None]
    col = tl.arange(0, TILE_C)[None, :]
    x_ptr += row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    inside = (row < R - row0) & (col < C - col0)
    return wide(tl.load(x_ptr + (row * stride_r + col * stride_c), mask=inside, other=0.0))


@triton.jit
def signs_of(rng_ptr, stream, CAST: tl.constexpr, TILE_C: tl.constexpr):
    """+-1 for each column of a tile, FP32 [TILE_C]."""
    index = tl.arange(0, TILE_C) % CAST.rotation
    zero = (index * 0).to(tl.uint32)
    if CAST.signs == "fixed" and CAST.rotation == 16:
        word = zero + CAST.sixteen
    else:
        if CAST.signs == "fixed":
            w0, w1, w2, w3 = philox(tl.full([1], 0, tl.int64), zero, zero, zero, zero + 48)
        else:
            wgrad: tl.constexpr = 48 + (CAST.signs == "wgrad")
            draw = tl.load(rng_ptr + 1).to(tl.uint32)
            tag = (stream & ~0xFF) | wgrad
            w0, w1, w2, w3 = philox(tl.load(rng_ptr), zero, zero, zero + draw, zero + tag.to(tl.uint32))
        word = tl.where(index < 64, tl.where(index < 32, w0, w1), tl.where(index < 96, w2, w3))
    return 1.0 - 2.0 * ((word >> (index % 32).to(tl.uint32)) & 1).to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 ``x`` rounded to nearest even in ``dtype`` and widened again."""
    if dtype == tl.float32:
        return x
    elif dtype == tl.float16:
        return x.to(tl.float16).to(tl.float32)
    elif PAIRS & HARDWARE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return round_bf16(x)


@triton.jit
def rotate_tile(
    x, rng_ptr, stream, dtype: tl.constexpr, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """:func:`fp4engine.reference.hadamard.rotate` of each group of columns: butterflies of stride 1, 2, 4, ..."""
    LOG2: tl.constexpr = (CAST.rotation >= 32) + (CAST.rotation >= 64) + (CAST.rotation >= 128) + 4
    POWER: tl.constexpr = 2.0 ** -(LOG2 // 2)
    if CAST.signs == "none":
        y = x * POWER
    else:
        y = x * (signs_of(rng_ptr, stream, CAST, TILE_C) * POWER)[None, :]
    for stage in tl.static_range(LOG2):
        pairs = tl.reshape(y, [TILE_R * TILE_C >> (stage + 1), 2, 1 << stage])
        low, high = tl.split(tl.permute(pairs, [0, 2, 1]))
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [TILE_R, TILE_C])
    if LOG2 % 2:
        y = y * 0.7071067811865476
    return round_to(y, dtype, HARDWARE)


@triton.jit
def prepared(
    x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The tile that is quantized."""
    x = load_tile(x_ptr, R, C, stride_r, stride_c, row0, col0, TILE_R, TILE_C)
    if CAST.rotation:
        x = rotate_tile(x, rng_ptr, stream, x_ptr.dtype.element_ty, CAST, TILE_R, TILE_C, HARDWARE)
    return x


@triton.jit
def magnitudes(x):
    """Bits without the sign: their order as integers is that of the magnitudes, with NaN above infinity."""
    return (to_bits(x) & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def largest_of(bits, GROUP: tl.constexpr):
    """Maxima of ``GROUP`` neighbours of int32 [R, C], as FP32 [R, C / GROUP]."""
    R: tl.constexpr = bits.shape[0]
    most = tl.max(tl.reshape(bits, [R, bits.shape[1] // GROUP, GROUP]), axis=2)
    return from_bits(most.to(tl.uint32, bitcast=True))


@triton.jit
def over_rows(m, HEIGHT: tl.constexpr):
    """FP32 [R, N] of magnitudes: the largest of each ``HEIGHT`` rows, for each of them."""
    R: tl.constexpr = m.shape[0]
    N: tl.constexpr = m.shape[1]
    most = tl.max(tl.reshape(magnitudes(m), [R // HEIGHT, HEIGHT, N]), axis=1, keep_dims=True)
    return from_bits(tl.reshape(tl.broadcast_to(most, [R // HEIGHT, HEIGHT, N]), [R, N]).to(tl.uint32, bitcast=True))


@triton.jit
def repeated(t, TIMES: tl.constexpr):
    """[R, N] with each column ``TIMES`` times."""
    R: tl.constexpr = t.shape[0]
    N: tl.constexpr = t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], [R, N, TIMES]), [R, N * TIMES])


@triton.jit
def power_of_two(x, block, CAST: tl.constexpr):
    """E8M0 bits (uint8), their FP32 value, and what elements are multiplied by, of blocks and their maxima."""
    if CAST.rule == "std":
        exponent = exponent_of_deviation(x, block, CAST)
    else:
        exponent = exponent_of_largest(block, CAST)
    finite = block <= FLT_MAX
    encode_scale = tl.where(finite, two_to(254 - exponent) * CAST.element_factor, float("nan"))
    decode_scale = tl.where(finite, two_to(exponent), float("nan"))
    return tl.where(finite, exponent, 255).to(tl.uint8), decode_scale, encode_scale


@triton.jit
def exponent_of_deviation(x, block, CAST: tl.constexpr):
    """Biased, of the power of two under the rule "std": half the exponent of a variance."""
    squares, sums = dots(x, tl.zeros_like(x) + 1.0, CAST.width)
    mean = sums / CAST.width
    scaled = (squares / CAST.width - mean * mean) * GAUSSIAN_VARIANCE
    exponent = ((scaled.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    exponent = tl.minimum(tl.maximum((exponent >> 1) + 127, 0), 254)
    return tl.reshape(tl.where(scaled > 0, exponent, 0), block.shape)


@triton.jit
def exponent_of_largest(block, CAST: tl.constexpr):
    """Biased, of the power of two under the rules that ask for the largest magnitude."""
    small = block < 1.1754943508222875e-38
    normal = to_bits(tl.where(small, block * 8388608.0, block)).to(tl.int32, bitcast=True)
    mantissa = ((normal & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    exponent = (normal >> 23) - tl.where(small, 23, 0) - CAST.max_exponent + (mantissa > CAST.turn).to(tl.int32)
    return tl.where(block == 0, 0, tl.minimum(tl.maximum(exponent, 0), 254))


@triton.jit
def two_to(biased):
    """``2^(biased - 127)``, ``biased`` from 0 to 254."""
    return tl.where(biased == 0, 0x00400000, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def random_of_elements(rng_ptr, stream, row0, col0, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Random bits of every element of a tile, int32 [TILE_R, TILE_C]."""
    bits = random_bytes(rng_ptr, stream | CAST.side, row0, col0, CAST, TILE_R, TILE_C)
    if CAST.random_bits == 16:
        bits = (bits << 8) | random_bytes(rng_ptr, (stream | CAST.side) | 16, row0, col0, CAST, TILE_R, TILE_C)
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def random_bytes(rng_ptr, stream, row0, col0, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    GROUPS: tl.constexpr = TILE_C // 16
    row = row0 + tl.arange(0, TILE_R)[:, None]
    group = col0 // 16 + tl.arange(0, GROUPS)[None, :]
    if CAST.sharded:
        group, row = in_the_whole(rng_ptr, group, row, stream)
    w0, w1, w2, w3 = random_words(rng_ptr, group, row, stream, tl.zeros([TILE_R, GROUPS], tl.float32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE_R, GROUPS, 4, 1])
    shift = (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, None, :]
    return tl.reshape((words >> shift) & 0xFF, [TILE_R, TILE_C])


@triton.jit
def sixteenths(t):
    """Sixteen tensors [n], the i-th with element i of every sixteen neighbours of ``t``."""
    low, high = tl.split(tl.permute(tl.reshape(t, [t.numel // 16, 2, 8]), [0, 2, 1]))
    return unstack8(low) + unstack8(high)


@triton.jit
def left_to_right(e):
    """Sums of [R, N, 16] over the last axis, in its order: [R, N]."""
    columns = sixteenths(e)
    total = tl.zeros_like(columns[0])
    for i in tl.static_range(16):
        total = total + columns[i]
    return tl.reshape(total, [e.shape[0], e.shape[1]])


@triton.jit
def sum_tile_rows(e, HEIGHT: tl.constexpr):
    """Sums of [R, N] over each ``HEIGHT`` rows, for each of them: rows (0..7) + (8..15), and so on."""
    R: tl.constexpr = e.shape[0]
    N: tl.constexpr = e.shape[1]
    LOG2: tl.constexpr = (HEIGHT >= 32) + (HEIGHT >= 64) + (HEIGHT >= 128) + 4
    for stage in tl.static_range(LOG2):
        low, high = tl.split(tl.permute(tl.reshape(e, [R // HEIGHT, 2, (HEIGHT >> (stage + 1)) * N]), [0, 2, 1]))
        e = low + high
    return tl.reshape(tl.broadcast_to(tl.reshape(e, [R // HEIGHT, 1, N]), [R // HEIGHT, HEIGHT, N]), [R, N])


@triton.jit
def dots(y, q, GROUP: tl.constexpr):
    """``<y,y>`` and ``<y,q>`` of every ``GROUP`` neighbours, FP64, each a binary tree over neighbours: one axis."""
    ys = sixteenths(y)
    qs = sixteenths(q)
    yy = ()
    yq = ()
    for i in tl.static_range(16):
        wide_y = ys[i].to(tl.float64)
        yy = yy + (wide_y * wide_y,)
        yq = yq + (wide_y * qs[i].to(tl.float64),)
    return neighbour_sums(sum_of_16(yy), GROUP // 16), neighbour_sums(sum_of_16(yq), GROUP // 16)


@triton.jit
def sum_of_16(t):
    for stage in tl.static_range(4):
        halves = ()
        for i in tl.static_range(8 >> stage):
            halves = halves + (t[2 * i] + t[2 * i + 1],)
        t = halves
    return t[0]


@triton.jit
def neighbour_sums(t, GROUP: tl.constexpr):
    """Sums of ``GROUP`` neighbours of one axis, as a binary tree. A sum of two has no order: it is a reduction."""
    LOG2: tl.constexpr = (
        (GROUP >= 2) + (GROUP >= 4) + (GROUP >= 8) + (GROUP >= 16) + (GROUP >= 32) + (GROUP >= 64) + (GROUP >= 128)
        + (GROUP >= 256) + (GROUP >= 512) + (GROUP >= 1024) + (GROUP >= 2048)
    )  # fmt: skip
    COUNT: tl.constexpr = t.numel
    for stage in tl.static_range(LOG2):
        t = tl.sum(tl.reshape(t, [COUNT >> (stage + 1), 2]), axis=1)
    return t


@triton.jit
def shrinkage(yy, yq):
    """``<y,y> / <y,q>`` rounded to FP32, 1 where that is not finite."""
    ratio = (yy / yq).to(tl.float32)
    return tl.where(tl.abs(ratio) <= FLT_MAX, ratio, 1.0)


@triton.jit
def to_stored(scale, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits (uint8) of the nearest E4M3 or UE5M3 of ``scale >= 0``, saturating; NaN is the last code."""
    if CAST.scale == "ue5m3":
        GRID: tl.constexpr = CAST.scale_grid
        return tl.where(scale == scale, encode_element(scale, 0, GRID, "even", 0), 0xFF).to(tl.uint8)
    else:
        return to_e4m3(scale, HARDWARE)


@triton.jit
def from_stored(stored, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 values of stored block scales that are E4M3 or UE5M3."""
    if CAST.scale == "ue5m3":
        GRID: tl.constexpr = CAST.scale_grid
        return tl.where(stored == 0xFF, float("nan"), decode_element(stored.to(tl.uint32), GRID))
    else:
        return from_e4m3(stored, HARDWARE)


@triton.jit
def rounded_scale(scale, outer_scale, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Stored bits, their value and what elements are multiplied by, for unrounded block scales."""
    stored = to_stored(scale, CAST, HARDWARE)
    decode_scale = from_stored(stored, CAST, HARDWARE)
    return stored, decode_scale, element_encode_scale(decode_scale, reciprocal(outer_scale, HARDWARE), HARDWARE)


@triton.jit
def stochastic_e4m3(scale, is_number, rng_ptr, block, row, stream, CAST: tl.constexpr):
    """E4M3 bits of ``scale >= 0``, rounded with 16 random bits of the block's; NaN unless ``is_number``."""
    if CAST.sharded:
        block, row = in_the_whole(rng_ptr, block, row, stream | CAST.side)
    word, _, _, _ = random_words(rng_ptr, block, row, stream | CAST.side | 32, tl.abs(scale))
    random = (word & 0xFFFF).to(tl.int32, bitcast=True)
    GRID: tl.constexpr = CAST.scale_grid
    return tl.where(is_number, encode_element(scale, random, GRID, "stochastic", 16), 0x7F).to(tl.uint8)


@triton.jit
def encode_tile(v, random, CAST: tl.constexpr):
    """Codes of scaled elements, uint32."""
    GRID: tl.constexpr = CAST.grid  # Triton 3.6 hands a constant's attribute on as a plain object
    ROUNDING: tl.constexpr = CAST.rounding
    return encode_element(v, random, GRID, ROUNDING, CAST.random_bits)


@triton.jit
def decode_tile(codes, CAST: tl.constexpr):
    """What codes mean, FP32."""
    GRID: tl.constexpr = CAST.grid
    return decode_element(codes, GRID)


@triton.jit
def x_hat(codes, decode_scale, outer_amax, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """What a tile of codes stands for; ``value * A`` is divided as :func:`quotient` says."""
    value = decode_tile(codes, CAST) * decode_scale[:, :, None] * outer_amax[:, :, None]
    amaxes = tl.reshape(outer_amax, [outer_amax.numel])
    if (tl.min(amaxes) > 2.0**-80) & (tl.max(amaxes) < 2.0**116):
        return quotient(value, CAST.numerator, True, HARDWARE)
    else:
        return quotient(value, CAST.numerator, False, HARDWARE)


@triton.jit
def candidate(x, scale, outer_amax, outer_scale, random, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Stored scale, its value, codes and the block's error, of one unrounded block scale under 4over6."""
    stored, decode_scale, encode_scale = rounded_scale(scale, outer_scale, CAST, HARDWARE)
    codes = encode_tile(x * encode_scale[:, :, None], random, CAST)
    difference = x_hat(codes, decode_scale, outer_amax, CAST, HARDWARE) - x
    error = left_to_right(difference * difference if CAST.rule == "4over6_mse" else tl.abs(difference))
    if CAST.height > 1:
        error = sum_tile_rows(error, CAST.height)
    return stored, decode_scale, codes, error


@triton.jit
def outer_of(
    x, amax_ptr, whole_ptr, parts, row0, col0, R, groups, PARTS: tl.constexpr, CAST: tl.constexpr, BLOCKS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """The outer amax of every block of a tile, FP32 [TILE_R or 1, BLOCKS or 1]; written to ``whole_ptr`` if there."""
    if CAST.outer == "1x128":
        GROUPS: tl.constexpr = TILE_C // 128
        row = row0 + tl.arange(0, TILE_R)[:, None]
        group = col0 // 128 + tl.arange(0, GROUPS)[None, :]
        place = row.to(tl.int64) * groups + group
        inside = (row < R) & (group < groups)
        if amax_ptr is None:
            amax = largest_of(magnitudes(x), 128)
            tl.store(whole_ptr + place, amax, mask=inside)
        else:
            amax = tl.load(amax_ptr + place, mask=inside, other=0.0)
        return repeated(amax, BLOCKS // GROUPS)
    elif CAST.outer == "row":
        row = row0 + tl.arange(0, TILE_R)[:, None]
        return tl.load(amax_ptr + row, mask=row < R, other=0.0)
    else:
        if CAST.outer == "none" or CAST.rule == "aligned":  # aligned block scales find theirs later
            amax = tl.zeros([1, 1], tl.float32) + CAST.constant_amax
        elif PARTS:
            amax = tl.zeros([1, 1], tl.float32) + largest_part(amax_ptr, parts, PARTS)
        else:
            amax = tl.zeros([1, 1], tl.float32) + tl.load(amax_ptr)
        if whole_ptr is not None:
            if tl.program_id(0) == 0:
                tl.store(whole_ptr + tl.zeros([1, 1], tl.int32), amax)
        return amax


@triton.jit(do_not_specialize=["stream"])
def block_amax_kernel(
    x_ptr, amax_ptr, rng_ptr, R, C, stride_r, stride_c, stream, CAST: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row, or a part of the tensor's for each program."""
    tiles = tl.cdiv(C, TILE_C)
    most = tl.zeros([TILE_R, TILE_C], tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, TILE_R) * tiles, tl.num_programs(0)):
        row0 = (tile // tiles) * TILE_R
        col0 = (tile % tiles) * TILE_C
        x = prepared(x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST, TILE_R, TILE_C, HARDWARE)
        if CAST.outer == "row":
            store_amax_per_row(amax_ptr, row0 + tl.arange(0, TILE_R), x, R, 1)
        else:
            most = tl.maximum(most, magnitudes(x))
    if CAST.outer == "tensor":
        store_part(amax_ptr, tl.max(tl.reshape(most, [TILE_R * TILE_C]), axis=0))


@triton.jit(do_not_specialize=["stream", "parts"])
def block_cast_kernel(
    x_ptr, amax_ptr, whole_ptr, data_ptr, scale_ptr, sums_ptr, largest_ptr, rng_ptr, R, C, stride_r, stride_c, width,
    stream, parts, PARTS: tl.constexpr, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid``, tiles counted along the row first.

    Args:
        amax_ptr: outer amaxes, or ``PARTS`` room for ``parts`` of one; None where the tile finds them.
        whole_ptr: where the outer amaxes go if they are not given.
        data_ptr: codes, two to a byte if ``CAST.packed``, or BF16 values.
        scale_ptr: stored block scales; FP32 scales that :func:`align_kernel` will store if aligned.
        sums_ptr: under a scalar correction, FP64 ``<y,y>`` of each group and then ``<y,q>``.
        largest_ptr: the largest block scale, if aligned.
    """
    BLOCKS: tl.constexpr = TILE_C // CAST.width
    tiles = tl.cdiv(width, TILE_C)
    row0 = (tl.program_id(0) // tl.maximum(tiles, 1)) * TILE_R
    col0 = (tl.program_id(0) % tl.maximum(tiles, 1)) * TILE_C
    row = row0 + tl.arange(0, TILE_R)[:, None]
    x = prepared(x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST, TILE_R, TILE_C, HARDWARE)
    block = largest_of(magnitudes(x), CAST.width)
    if CAST.height > 1:
        block = over_rows(block, CAST.height)
    if CAST.outer == "none" and (CAST.scale == "e4m3" or CAST.scale == "ue5m3"):  # which saturate
        block = tl.where(block <= FLT_MAX, block, float("nan"))
    random = tl.zeros([1, 1, 1], tl.int32)
    if CAST.random_bits:
        random = random_of_elements(rng_ptr, stream, row0, col0, CAST, TILE_R, TILE_C)
        random = tl.reshape(random, [TILE_R, BLOCKS, CAST.width])
    outer_amax = outer_of(
        x, amax_ptr, whole_ptr, parts, row0, col0, R, width // 128, PARTS, CAST, BLOCKS, TILE_R, TILE_C
    )
    outer_scale = outer_encode_scale(outer_amax, CAST.numerator)
    x = tl.reshape(x, [TILE_R, BLOCKS, CAST.width])
    block_index = col0 // CAST.width + tl.arange(0, BLOCKS)[None, :]
    if CAST.rule == "4over6_mse" or CAST.rule == "4over6_mae":
        base = tl.div_rn(block, tl.zeros_like(block) + CAST.target) * outer_scale
        stored, decode_scale, codes, error6 = candidate(x, base, outer_amax, outer_scale, random, CAST, HARDWARE)
        stored4, decode4, codes4, error4 = candidate(x, base * 1.5, outer_amax, outer_scale, random, CAST, HARDWARE)
        four = error4 < error6
        stored = tl.where(four, stored4, stored)
        decode_scale = tl.where(four, decode4, decode_scale)
        codes = tl.where(four[:, :, None], codes4, codes)
    else:
        if CAST.rule == "aligned":
            decode_scale = from_bits(to_bits(block * CAST.inverse_target) & 0xFFF80000)
            encode_scale = tl.minimum(reciprocal(decode_scale, HARDWARE), FLT_MAX, propagate_nan=NAN)
            encode_scale = tl.where(decode_scale == 0, 0.0, encode_scale)
            stored = decode_scale
        elif CAST.scale == "e4m3" or CAST.scale == "ue5m3":
            scale = block * (outer_scale * (1.0 / CAST.target))
            stored, decode_scale, encode_scale = rounded_scale(scale, outer_scale, CAST, HARDWARE)
        elif CAST.scale == "fp32":
            decode_scale = tl.div_rn(block, tl.zeros_like(block) + CAST.target)
            encode_scale = tl.minimum(reciprocal(decode_scale, HARDWARE), FLT_MAX, propagate_nan=NAN)
            stored = decode_scale
        else:
            stored, decode_scale, encode_scale = power_of_two(x, block, CAST)
        v = x * encode_scale[:, :, None]
        codes = encode_tile(v, random, CAST)
    if CAST.correction == "eden":
        q = decode_tile(codes, CAST)
        if CAST.rule != "aligned":
            empty = decode_scale == 0
            whole = tl.where(empty, 1.0, decode_scale)
            unit = element_encode_scale(whole, reciprocal(outer_scale, HARDWARE), HARDWARE)
            v = x * unit[:, :, None]
            q = tl.where(empty[:, :, None], 0.0, q)
        vv, vq = dots(v, q, CAST.group)
        ratio = shrinkage(vv, vq)
        ratio = repeated(tl.reshape(ratio, [TILE_R, TILE_C // CAST.group]), CAST.group // CAST.width)
        if CAST.rule == "aligned":
            stored = decode_scale * ratio
        else:
            is_number = decode_scale <= 448.0
            stored = stochastic_e4m3(decode_scale * ratio, is_number, rng_ptr, block_index, row, stream, CAST)
            decode_scale = from_e4m3(stored, HARDWARE)
    if CAST.correction == "scalar":
        factor = tl.div_rn(outer_amax, tl.zeros_like(outer_amax) + CAST.numerator)
        q = decode_tile(codes, CAST) * decode_scale[:, :, None] * factor[:, :, None]
        yy, yq = dots(x, q, CAST.group)
        GROUPS: tl.constexpr = TILE_C // CAST.group
        groups = width // CAST.group
        group = col0 // CAST.group + tl.arange(0, GROUPS)[None, :]
        place = sums_ptr + (row.to(tl.int64) * groups + group)
        there = (row < R) & (group < groups)
        tl.store(place, tl.reshape(yy, [TILE_R, GROUPS]), mask=there)
        place = sums_ptr + ((row.to(tl.int64) + R) * groups + group)
        tl.store(place, tl.reshape(yq, [TILE_R, GROUPS]), mask=there)
    inside = (row < R) & (block_index * CAST.width < width)
    if CAST.rule == "aligned":
        stored = round_to(stored, tl.bfloat16, HARDWARE)
        if largest_ptr is not None:
            store_amax(largest_ptr, bits_of_largest(tl.where(inside, stored, 0.0)))
    if scale_ptr is not None:
        blocks = width // CAST.width
        tl.store(scale_ptr + (row.to(tl.int64) * blocks + block_index), stored, mask=inside)
    store_data(codes, decode_scale, data_ptr, R, width, row0, col0, CAST, TILE_R, TILE_C, HARDWARE)


@triton.jit
def store_data(
    codes, decode_scale, data_ptr, R, width, row0, col0, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes, or what they mean without the outer factor."""
    row = tl.arange(0, TILE_R)[:, None]
    SHARE: tl.constexpr = 2 if CAST.packed and not CAST.values else 1  # pyright: ignore[reportAssignmentType]
    if CAST.values:
        data = decode_tile(codes, CAST) * decode_scale[:, :, None]
        data = round_to(tl.reshape(data, [TILE_R, TILE_C]), tl.bfloat16, HARDWARE)
        data = (to_bits(data) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif CAST.packed:
        low, high = tl.split(tl.reshape(codes, [TILE_R, TILE_C // 2, 2]))
        data = (low | (high << 4)).to(tl.uint8)
    else:
        data = tl.reshape(codes, [TILE_R, TILE_C]).to(tl.uint8)
    col = tl.arange(0, TILE_C // SHARE)[None, :]
    stride = width // SHARE
    data_ptr += row0.to(tl.int64) * stride + col0 // SHARE
    tl.store(data_ptr + (row * stride + col), data, mask=(row < R - row0) & (col < stride - col0 // SHARE))


@triton.jit(do_not_specialize=["stream", "blocks", "rows"])
def align_kernel(
    scale_ptr, largest_ptr, whole_ptr, out_ptr, rng_ptr, rows, blocks, stream, CAST: tl.constexpr, BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """FP32 block scales into the range of E4M3, by an outer amax that is given in ``whole_ptr`` or found here."""
    if largest_ptr is None:
        amax = tl.load(whole_ptr)
    else:
        amax = tl.load(largest_ptr) * CAST.target
        if tl.program_id(0) == 0:
            tl.store(whole_ptr, amax)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows.to(tl.int64) * blocks
    scaled = tl.load(scale_ptr + index, mask=inside, other=0.0) * outer_encode_scale(amax, CAST.numerator)
    if CAST.correction == "eden":
        row = index // blocks
        is_number = tl.abs(scaled) <= FLT_MAX
        stored = stochastic_e4m3(scaled, is_number, rng_ptr, index - row * blocks, row, stream, CAST)
    else:
        stored = to_e4m3(scaled, HARDWARE)
    tl.store(out_ptr + index, stored, mask=inside)


@triton.jit(do_not_specialize=["count", "out_count"])
def fold_sums_kernel(sums_ptr, out_ptr, amax_ptr, count, out_count, SUMS: tl.constexpr):
    """Two vectors of ``count`` sums, one after the other, to a sum for each ``SUMS`` neighbours.

    The last program there is gives the amax times the correction instead, if ``amax_ptr`` is there.
    """
    index = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    yy = neighbour_sums(tl.load(sums_ptr + index, mask=index < count, other=0.0), SUMS)
    yq = neighbour_sums(tl.load(sums_ptr + count + index, mask=index < count, other=0.0), SUMS)
    one = tl.arange(0, 1)
    if amax_ptr is None:
        place = out_ptr + tl.program_id(0) + one
        tl.store(place, yy)
        tl.store(place + out_count, yq)
    else:
        tl.store(out_ptr + one, tl.load(amax_ptr + one) * shrinkage(yy, yq))


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether these kernels cover ``spec`` on inputs of ``x_dtype``, and if not, why."""
    aligned = spec.scale_rule is ScaleRule.ALIGNED
    four_over_six, scalar = spec.scale_rule.is_four_over_six, spec.correction is Correction.SCALAR
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.block[1] > 0, f"element={spec.element} per {spec.outer.value}, as it is cast here"),
        (spec.block[0] in (1, 16, 32, 64, 128), f"block={spec.block}"),
        (not four_over_six or spec.block[1] == BLOCK_SIZE, f"4over6 in blocks of {spec.block}"),
        (not aligned or (spec.element == E2M1 and spec.outer is Outer.TENSOR), f"aligned scales of {spec.label}"),
        (not scalar or (spec.outer is Outer.TENSOR and not aligned), f"a scalar correction of {spec.label}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the Triton kernels do not cover {what}"
    return True, ""


class Target(NamedTuple):
    """Where one operand of a cast goes.

    Attributes:
        spec: what :func:`supports`.
        form: ``"codes"`` or ``"values"``.
        side: bit 0 of the stream.
        sharded: whether ``rng`` tells of the operand's place in a whole tensor.
        given: the outer amax to cast by; None takes the operand's own.
        amax: where the outer amax is written that the cast has; None for one that is given and stays as it is.
        data: codes or values; scale_inv: block scales, None under ``"values"``.
    """

    spec: CastSpec
    form: str
    side: int
    sharded: bool
    given: Place | None
    amax: Place | None
    data: Place
    scale_inv: Place | None


def tile_rows(spec: CastSpec, of_amax: bool = False) -> int:
    """Rows of a cast's tile, or of that of its amax: a program keeps what it casts in registers, with 16 rows best."""
    return max(spec.block[0], 64 if of_amax else 16)


def warps_for(rows: int) -> int:
    """Warps of a program whose tile has so many rows."""
    return 4 if rows <= 32 else 8


def as_bytes(scale_inv: torch.Tensor) -> torch.Tensor:
    """Block scales as kernels see them: Triton has no type for E8M0."""
    return scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)


def add_cast(draft: Draft, x: Facts, place: Place, target: Target, rng: Place | None, stream: int) -> None:
    """Cast one operand: ``x`` of facts [R, C] at any strides."""
    spec = target.spec
    rows, cols = x.shape
    width = spec.padded_cols(cols)
    hardware, multiprocessors = device_facts(draft.device)
    aligned, scalar = spec.scale_rule is ScaleRule.ALIGNED, spec.correction is Correction.SCALAR
    scaled_by_all = spec.outer in (Outer.TENSOR, Outer.ROW) and not aligned
    cast = BlockCast.of(spec, "codes" if aligned else target.form, target.side, target.sharded)
    tile = (tile_rows(spec), TILE_C)
    tiles = -(-rows // tile[0]) * -(-width // TILE_C)
    amax, whole, parts, room = target.given, None, 0, 0
    if target.given is None and not aligned:
        whole = draft.scratch((1,), torch.float32) if scalar else target.amax
        amax = None
    if target.given is None and scaled_by_all:
        if spec.outer is Outer.ROW:
            assert whole is not None
            amax, whole = whole, None
            add_zeros(draft, [amax, None], [rows, 0])
            programs = min(tiles, 8 * multiprocessors)
        else:
            parts = programs = min(tiles, 8 * multiprocessors, MOST_PARTS)
            room = FEW_PARTS if parts <= FEW_PARTS else MOST_PARTS
            amax = draft.scratch((max(parts, 1),), torch.float32)
        draft.step(
            block_amax_kernel, programs, place, amax, rng, rows, cols, *x.strides, stream, cast,
            tile_rows(spec, of_amax=True), TILE_C, hardware, num_warps=8,
        )  # fmt: skip
    sums = largest = None
    unaligned: Place | None = None
    scales = Block(target.scale_inv, as_bytes) if target.scale_inv else None
    groups = rows * width // cast.group
    if scalar:
        sums = draft.scratch((2, max(groups, 1)), torch.float64)
    if aligned:
        scales = unaligned = draft.scratch((rows, width // spec.block[1]), torch.float32)
        if target.given is None:
            largest = draft.scratch((1,), torch.float32)
            add_zeros(draft, [largest, None], [1, 0])
    codes = draft.scratch((rows, width // 2), torch.uint8) if aligned and target.form == "values" else target.data
    draft.step(
        block_cast_kernel, max(tiles, 1), place, None if aligned else amax, whole, codes, scales, sums, largest, rng,
        rows, cols, *x.strides, width, stream, parts, room, cast, *tile, hardware, num_warps=warps_for(tile[0]),
    )  # fmt: skip
    if unaligned:
        _add_alignment(draft, target, cast, rows, width, unaligned, largest, codes, rng, stream)
    if sums:
        assert target.amax is not None
        source = whole if target.given is None else target.given
        assert source is not None
        add_correction(draft, sums, groups, source, target.amax)


def _add_alignment(
    draft: Draft,
    target: Target,
    cast: BlockCast,
    rows: int,
    width: int,
    scales: Place,
    largest: Place | None,
    codes: Place,
    rng: Place | None,
    stream: int,
) -> None:
    """Store the block scales, and the values if they are asked for."""
    blocks = width // cast.width
    hardware, _ = device_facts(draft.device)
    stored = target.scale_inv or draft.scratch((rows, blocks), torch.float8_e4m3fn)
    draft.step(
        align_kernel, max(-(-rows * blocks // SCALES_PER_PROGRAM), 1), scales, largest, target.given or target.amax,
        Block(stored, as_bytes), rng, rows, blocks, stream, cast, SCALES_PER_PROGRAM, hardware, num_warps=4,
    )  # fmt: skip
    if target.form == "values":
        add_decode(draft, [Codes(codes, stored, rows, blocks)], [target.data])


def add_correction(draft: Draft, sums: Place, count: int, source: Place, amax: Place) -> None:
    """``amax = source * <y,y> / <y,q>``, from sums [2, count]; ``source`` itself without any."""
    while count > SUMS:
        folded = -(-count // SUMS)
        out = draft.scratch((2, folded), torch.float64)
        draft.step(fold_sums_kernel, folded, sums, out, None, count, folded, SUMS, num_warps=4)
        sums, count = out, folded
    draft.step(fold_sums_kernel, 1, sums, amax, source, count, 1, SUMS, num_warps=4)
