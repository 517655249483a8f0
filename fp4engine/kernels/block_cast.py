"""Device functions: a tile of an operand through any cast into block scales.

    x -> rotate -> block maxima -> block scales -> elements -> correction -> pack

A tile is [TILE_R, 128] of the operand, so that rotations, blocks, outer groups and corrections of up to 128 neighbours
lie inside. It is held as :func:`fp4engine.kernels.encode.sixteenths`: a tuple of 16 tensors [n], one per position in 16
neighbours, so that what belongs to neighbours stays in one thread. What belongs to blocks is a tensor [blocks], one
entry for each, in the order of the operand's rows; :func:`repeat` gives it back to every sixteenth of a block.

``CAST`` is a :class:`fp4engine.kernels.blocks.BlockCast`.
"""

import triton
import triton.language as tl

from fp4engine.constants import GAUSSIAN_VARIANCE as _GAUSSIAN_VARIANCE
from fp4engine.kernels.amax import bits_of_largest, store_amax, whole_amax
from fp4engine.kernels.dots import dots, shrinkage
from fp4engine.kernels.element import decode_element, encode_element, neighbour_scale
from fp4engine.kernels.encode import (
    FLT_MAX,
    NAN,
    PAIRS,
    block_amax,
    element_encode_scale,
    from_bits,
    from_e4m3,
    in_the_whole,
    outer_encode_scale,
    quotient,
    random_words,
    reciprocal,
    round_bf16,
    scaled,
    sixteenths,
    stack,
    to_bits,
    to_e4m3,
    wide,
)
from fp4engine.kernels.rotate import rotate_blocks, round_to

GAUSSIAN_VARIANCE = tl.constexpr(_GAUSSIAN_VARIANCE)
GAINS = tl.constexpr(2.0**21)
"""In one: what a special value gains is a whole number of last places of FP32 from 4 to 8."""


@triton.jit
def load_tile(x_ptr, R, C, stride_r, stride_c, row0, col0, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """FP32 [TILE_R, TILE_C]; 0 outside the operand."""
    row = tl.arange(0, TILE_R)[:, None]
    col = tl.arange(0, TILE_C)[None, :]
    x_ptr += row0.to(tl.int64) * stride_r + col0.to(tl.int64) * stride_c
    inside = (row < R - row0) & (col < C - col0)
    return wide(tl.load(x_ptr + (row * stride_r + col * stride_c), mask=inside, other=0.0))


@triton.jit
def prepared(
    x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The tile that is quantized, as sixteenths."""
    y = sixteenths(load_tile(x_ptr, R, C, stride_r, stride_c, row0, col0, TILE_R, TILE_C))
    if CAST.rotation:
        y = rotate_blocks(y, rng_ptr, stream, x_ptr.dtype.element_ty, CAST, HARDWARE)
    return y


@triton.jit
def magnitudes(x):
    """Bits without the sign: their order as integers is that of the magnitudes, with NaN above infinity."""
    return (to_bits(x) & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def repeat(t, TIMES: tl.constexpr):
    """[n * TIMES]: each entry ``TIMES`` times; a single one stays alone."""
    if t.numel == 1 or TIMES == 1:
        return t
    else:
        return tl.reshape(tl.broadcast_to(t[:, None], [t.numel, TIMES]), [t.numel * TIMES])


@triton.jit
def largest_of_groups(m, GROUP: tl.constexpr):
    """Maxima of ``GROUP`` neighbours of magnitudes [n], NaN among them: [n / GROUP]."""
    if GROUP == 1:
        return m
    else:
        most = tl.max(tl.reshape(magnitudes(m), [m.numel // GROUP, GROUP]), axis=1)
        return from_bits(most.to(tl.uint32, bitcast=True))


@triton.jit
def over_rows(m, HEIGHT: tl.constexpr, COLS: tl.constexpr):
    """Magnitudes [rows * COLS]: the largest of each ``HEIGHT`` rows, for each of them."""
    GROUPS: tl.constexpr = m.numel // (HEIGHT * COLS)
    most = tl.max(tl.reshape(magnitudes(m), [GROUPS, HEIGHT, COLS]), axis=1, keep_dims=True)
    most = tl.reshape(tl.broadcast_to(most, [GROUPS, HEIGHT, COLS]), [m.numel])
    return from_bits(most.to(tl.uint32, bitcast=True))


@triton.jit
def sum_tile_rows(e, HEIGHT: tl.constexpr, COLS: tl.constexpr):
    """Sums of [rows * COLS] over each ``HEIGHT`` rows, for each of them: rows (0..7) + (8..15), and so on."""
    GROUPS: tl.constexpr = e.numel // (HEIGHT * COLS)
    LOG2: tl.constexpr = (HEIGHT >= 32) + (HEIGHT >= 64) + (HEIGHT >= 128) + 4
    COUNT: tl.constexpr = e.numel
    for stage in tl.static_range(LOG2):
        low, high = tl.split(tl.permute(tl.reshape(e, [GROUPS, 2, (HEIGHT >> (stage + 1)) * COLS]), [0, 2, 1]))
        e = low + high
    return tl.reshape(tl.broadcast_to(tl.reshape(e, [GROUPS, 1, COLS]), [GROUPS, HEIGHT, COLS]), [COUNT])


@triton.jit
def power_of_two(y, block, CAST: tl.constexpr):
    """E8M0 bits (uint8), their FP32 value, and what elements are multiplied by, of blocks and their maxima."""
    if CAST.rule == "std":
        exponent = exponent_of_deviation(y, CAST)
    else:
        exponent = exponent_of_largest(block, CAST)
    finite = block <= FLT_MAX
    encode_scale = tl.where(finite, two_to(254 - exponent) * CAST.element_factor, float("nan"))
    decode_scale = tl.where(finite, two_to(exponent), float("nan"))
    return tl.where(finite, exponent, 255).to(tl.uint8), decode_scale, encode_scale


@triton.jit
def inverse_scale(block, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """What elements are multiplied by, and the FP32 scale that is its reciprocal, of blocks' maxima; 1 for zeros."""
    encode_scale = tl.div_rn(tl.zeros_like(block) + CAST.target, tl.where(block == 0, CAST.target, block))
    encode_scale = tl.minimum(encode_scale, FLT_MAX, propagate_nan=NAN)
    return encode_scale, reciprocal(encode_scale, HARDWARE)


@triton.jit
def exponent_of_deviation(y, CAST: tl.constexpr):
    """Biased, of the power of two under the rule "std": half the exponent of a variance."""
    ones = ()
    for _ in tl.static_range(16):
        ones = ones + (tl.zeros_like(y[0]) + 1.0,)
    squares, sums = dots(y, ones, CAST.width)
    mean = sums / CAST.width
    scaled = (squares / CAST.width - mean * mean) * GAUSSIAN_VARIANCE
    exponent = ((scaled.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    exponent = tl.minimum(tl.maximum((exponent >> 1) + 127, 0), 254)
    return tl.where(scaled > 0, exponent, 0)


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
def random_of_elements(rng_ptr, stream, row, group, like, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Random bits of every element: 16 tensors, int32 like ``like >= 0``. ``group``: of 16 neighbours in its row."""
    if CAST.sharded:
        group, row = in_the_whole(rng_ptr, group, row, stream | CAST.side)
    words = random_words(rng_ptr, group, row, stream | CAST.side, like, HARDWARE)
    low_words = words
    if CAST.random_bits == 16:
        low_words = random_words(rng_ptr, group, row, (stream | CAST.side) | 16, like, HARDWARE)
    random = ()
    for i in tl.static_range(16):
        bits = (words[i // 4] >> (8 * (i % 4))) & 0xFF
        if CAST.random_bits == 16:
            bits = (bits << 8) | ((low_words[i // 4] >> (8 * (i % 4))) & 0xFF)
        random = random + (bits.to(tl.int32, bitcast=True),)
    return random


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
    elif CAST.grid.special > 0:
        value = from_e4m3(stored & 0x7F, HARDWARE)
        return tl.where(stored > 0x7F, -value, value)
    else:
        return from_e4m3(stored, HARDWARE)


@triton.jit
def rounded_scale(scale, outer_decode_scale, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Stored bits, their value and what elements are multiplied by, for unrounded block scales."""
    stored = to_stored(scale, CAST, HARDWARE)
    decode_scale = from_stored(stored, CAST, HARDWARE)
    return stored, decode_scale, element_encode_scale(decode_scale, outer_decode_scale, HARDWARE)


@triton.jit
def stochastic_e4m3(scale, is_number, rng_ptr, block, row, stream, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 bits of ``scale >= 0``, rounded with 16 random bits of the block's; NaN unless ``is_number``."""
    if CAST.sharded:
        block, row = in_the_whole(rng_ptr, block, row, stream | CAST.side)
    word, _, _, _ = random_words(rng_ptr, block, row, stream | CAST.side | 32, tl.abs(scale), HARDWARE)
    random = (word & 0xFFFF).to(tl.int32, bitcast=True)
    GRID: tl.constexpr = CAST.scale_grid
    return tl.where(is_number, encode_element(scale, random, GRID, "stochastic", 16), 0x7F).to(tl.uint8)


@triton.jit
def encode(v, random, CAST: tl.constexpr):
    """Codes of scaled elements, uint32."""
    GRID: tl.constexpr = CAST.grid  # Triton 3.6 hands a constant's attribute on as a plain object
    ROUNDING: tl.constexpr = CAST.rounding
    codes = ()
    for i in tl.static_range(16):
        if CAST.random_bits:
            codes = codes + (encode_element(v[i], random[i], GRID, ROUNDING, CAST.random_bits),)
        else:
            codes = codes + (encode_element(v[i], 0, GRID, ROUNDING, 0),)
    return codes


@triton.jit
def decode_tile(codes, CAST: tl.constexpr):
    """What codes mean, FP32."""
    GRID: tl.constexpr = CAST.grid
    return decode_element(codes, GRID)


@triton.jit
def times_scale(value, scale, CAST: tl.constexpr):
    """What :func:`decode_tile` gave, times the scale of its block, whose sign is of special values alone."""
    if CAST.grid.special > 0:
        scale = tl.where(value == CAST.grid.special, scale, tl.abs(scale))
    return value * scale


@triton.jit
def with_special(v, codes, stored, CAST: tl.constexpr, COLS: tl.constexpr):
    """Signed bits of block scales, and codes of ``v`` with the special one; see the reference's ``_special``."""
    SPECIAL: tl.constexpr = CAST.grid.special
    REACH: tl.constexpr = CAST.grid.reach
    BLOCKS: tl.constexpr = v[0].numel * 16 // CAST.width
    SHARE: tl.constexpr = CAST.width // 16
    TILES: tl.constexpr = BLOCKS // (CAST.height * COLS)
    gains = tl.zeros_like(v[0]).to(tl.int32)
    for i in tl.static_range(16):
        gain = tl.maximum(REACH - tl.abs(tl.abs(v[i]) - SPECIAL), 0.0)
        gain = (tl.where(v[i] == v[i], gain, 0.0) * GAINS).to(tl.int32)
        gains += tl.where(v[i] < 0, -gain, gain)
    gains = tl.sum(tl.reshape(gains, [TILES, CAST.height, COLS, SHARE]), axis=3)
    gains = tl.sum(gains, axis=1, keep_dims=True)
    gains = tl.reshape(tl.broadcast_to(gains, [TILES, CAST.height, COLS]), [BLOCKS])
    minus = (gains <= 0) & (stored != 0x7F)
    minus_there = repeat(minus.to(tl.int32), SHARE) != 0
    out = ()
    for i in tl.static_range(16):
        near = tl.abs(tl.abs(v[i]) - SPECIAL) <= REACH
        out = out + (tl.where(near & ((v[i] < 0) == minus_there), 1 << (CAST.grid.bits - 1), codes[i]),)
    return stored | (minus.to(tl.uint8) << 7), out


@triton.jit
def decode(codes, CAST: tl.constexpr):
    """:func:`decode_tile` of each of 16 tensors."""
    values = ()
    for i in tl.static_range(16):
        values = values + (decode_tile(codes[i], CAST),)
    return values


@triton.jit
def error_of(y, codes, decode_scale, outer_amax, FAST: tl.constexpr, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Sums over blocks of 16, left to right, of ``|x_hat - x|`` or its square; ``value * A`` is divided as told."""
    total = tl.zeros_like(y[0])
    for i in tl.static_range(16):
        value = decode_tile(codes[i], CAST) * decode_scale * outer_amax
        difference = quotient(value, CAST.numerator, FAST, HARDWARE) - y[i]
        if CAST.rule == "4over6_mse":
            total = total + difference * difference
        else:
            total = total + tl.abs(difference)
    return total


@triton.jit
def candidate(
    y, scale, outer_amax, outer_decode_scale, random, CAST: tl.constexpr, COLS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Stored scale, its value, codes and the block's error, of one unrounded block scale under 4over6."""
    stored, decode_scale, encode_scale = rounded_scale(scale, outer_decode_scale, CAST, HARDWARE)
    codes = encode(scaled(y, encode_scale), random, CAST)
    if (tl.min(outer_amax) > 2.0**-80) & (tl.max(outer_amax) < 2.0**116):  # what quotient asks for
        error = error_of(y, codes, decode_scale, repeat(outer_amax, COLS), True, CAST, HARDWARE)
    else:
        error = error_of(y, codes, decode_scale, repeat(outer_amax, COLS), False, CAST, HARDWARE)
    if CAST.height > 1:
        error = sum_tile_rows(error, CAST.height, COLS)
    return stored, decode_scale, codes, error


@triton.jit
def searched(
    y, nominal, outer_scale, outer_decode_scale, CAST: tl.constexpr, COLS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Bits of the scale with the least squared error, of ``nominal`` and its neighbours; blocks are 16 wide.

    As :func:`fp4engine.kernels.cast.searched`.
    """
    units = scaled(y, outer_scale)
    best = nominal
    least = tl.zeros_like(units[0])
    COUNT: tl.constexpr = len(CAST.search) + 1  # pyright: ignore[reportAssignmentType]
    for step in tl.static_range(COUNT):
        stored = nominal
        if step > 0:
            stored = neighbour_scale(nominal, CAST.search[step - 1])
        scale = from_stored(stored, CAST, HARDWARE)
        codes = encode(scaled(y, element_encode_scale(scale, outer_decode_scale, HARDWARE)), (), CAST)
        error = tl.zeros_like(units[0])
        for i in tl.static_range(16):
            difference = decode_tile(codes[i], CAST) * scale - units[i]
            error = error + difference * difference
        if CAST.height > 1:
            error = sum_tile_rows(error, CAST.height, COLS)
        if step == 0:
            least = error
        else:
            better = error < least
            best = tl.where(better, stored, best)
            least = tl.where(better, error, least)
    return best


@triton.jit
def outer_of(m, amax_ptr, whole_ptr, parts, row0, col0, R, groups, CAST: tl.constexpr, TILE_R: tl.constexpr):
    """The outer amax of every row of a tile, or the one there is, FP32 [TILE_R or 1]; to ``whole_ptr`` if there.

    ``m``: largest magnitudes of 16 neighbours.
    """
    row = row0 + tl.arange(0, TILE_R)
    if CAST.outer == "1x128":  # one group is as wide as a tile
        group = col0 // 128 + tl.zeros_like(row)
        place = row.to(tl.int64) * groups + group
        inside = (row < R) & (group < groups)
        if amax_ptr is None:
            amax = largest_of_groups(m, 8)
            tl.store(whole_ptr + place, amax, mask=inside)
        else:
            amax = tl.load(amax_ptr + place, mask=inside, other=0.0)
        return amax
    elif CAST.outer == "row" or CAST.outer == "rows128":
        return tl.load(amax_ptr + row, mask=row < R, other=0.0)
    else:
        if CAST.outer == "none" or CAST.rule == "aligned":  # aligned block scales find theirs later
            amax = tl.zeros([1], tl.float32) + CAST.constant_amax
            if whole_ptr is not None:
                if tl.program_id(0) == 0:
                    tl.store(whole_ptr + tl.zeros([1], tl.int32), amax)
        elif whole_ptr is not None:
            amax = tl.zeros([1], tl.float32) + whole_amax(amax_ptr, whole_ptr, parts)
        else:
            amax = tl.zeros([1], tl.float32) + tl.load(amax_ptr)
        return amax


@triton.jit
def cast_tile(
    y, amax_ptr, whole_ptr, data_ptr, scale_ptr, sums_ptr, largest_ptr, rng_ptr, R, width, row0, col0, stream, parts,
    CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast a prepared tile and store what it becomes, see :func:`fp4engine.kernels.blocks.block_cast_kernel`."""
    COLS: tl.constexpr = TILE_C // CAST.width
    SHARE: tl.constexpr = CAST.width // 16
    sixteenth = tl.arange(0, TILE_R * TILE_C // 16)
    index = tl.arange(0, TILE_R * COLS)
    row = row0 + index // COLS
    block_index = col0 // CAST.width + index % COLS
    m = block_amax(y)
    block = largest_of_groups(m, SHARE)
    if CAST.height > 1:
        block = over_rows(block, CAST.height, COLS)
    if CAST.outer == "none" and (CAST.scale == "e4m3" or CAST.scale == "ue5m3"):  # which saturate
        block = tl.where(block <= FLT_MAX, block, float("nan"))
    random = ()
    if CAST.random_bits:
        group = col0 // 16 + sixteenth % (TILE_C // 16)
        random = random_of_elements(rng_ptr, stream, row0 + sixteenth // (TILE_C // 16), group, m, CAST, HARDWARE)
    outer_amax = outer_of(m, amax_ptr, whole_ptr, parts, row0, col0, R, width // 128, CAST, TILE_R)
    row_scale = outer_encode_scale(outer_amax, CAST.numerator)
    outer_scale = repeat(row_scale, COLS)
    outer_decode_scale = repeat(reciprocal(row_scale, HARDWARE), COLS)
    if CAST.rule == "4over6_mse" or CAST.rule == "4over6_mae":
        base = tl.div_rn(block, tl.zeros_like(block) + CAST.target) * outer_scale
        stored, decode_scale, codes, error6 = candidate(
            y, base, outer_amax, outer_decode_scale, random, CAST, COLS, HARDWARE
        )
        stored4, decode4, codes4, error4 = candidate(
            y, base * 1.5, outer_amax, outer_decode_scale, random, CAST, COLS, HARDWARE
        )
        four = error4 < error6
        stored = tl.where(four, stored4, stored)
        decode_scale = tl.where(four, decode4, decode_scale)
        codes = chosen(four, codes4, codes)
    else:
        if CAST.rule == "aligned":
            decode_scale = from_bits(to_bits(block * CAST.inverse_target) & 0xFFF80000)
            encode_scale = tl.minimum(reciprocal(decode_scale, HARDWARE), FLT_MAX, propagate_nan=NAN)
            encode_scale = tl.where(decode_scale == 0, 0.0, encode_scale)
            stored = decode_scale
        elif CAST.scale == "e4m3" or CAST.scale == "ue5m3":
            scale = block * (outer_scale * (1.0 / CAST.target))
            stored, decode_scale, encode_scale = rounded_scale(scale, outer_decode_scale, CAST, HARDWARE)
            if CAST.search is not None:
                stored = searched(y, stored, outer_scale, outer_decode_scale, CAST, COLS, HARDWARE)
                decode_scale = from_stored(stored, CAST, HARDWARE)
                encode_scale = element_encode_scale(decode_scale, outer_decode_scale, HARDWARE)
        elif CAST.scale == "fp32":
            encode_scale, decode_scale = inverse_scale(block, CAST, HARDWARE)
            stored = decode_scale
        else:
            stored, decode_scale, encode_scale = power_of_two(y, block, CAST)
        v = scaled(y, repeat(encode_scale, SHARE))
        codes = encode(v, random, CAST)
        if CAST.grid.special > 0:
            stored, codes = with_special(v, codes, stored, CAST, COLS)
            decode_scale = from_stored(stored, CAST, HARDWARE)
    if CAST.correction == "eden":
        v = y
        q = decode(codes, CAST)
        if CAST.rule == "aligned":
            v = scaled(y, repeat(encode_scale, SHARE))
        else:
            empty = decode_scale == 0
            unit = element_encode_scale(tl.where(empty, 1.0, decode_scale), outer_decode_scale, HARDWARE)
            v = scaled(y, repeat(unit, SHARE))
            q = scaled(q, repeat(tl.where(empty, 0.0, 1.0), SHARE))  # elements are finite
        vv, vq = dots(v, q, CAST.group)
        ratio = repeat(shrinkage(vv, vq), CAST.group // CAST.width)
        if CAST.rule == "aligned":
            stored = decode_scale * ratio
        else:
            is_number = decode_scale <= 448.0
            stored = stochastic_e4m3(decode_scale * ratio, is_number, rng_ptr, block_index, row, stream, CAST, HARDWARE)
            decode_scale = from_e4m3(stored, HARDWARE)
    if CAST.correction == "scalar":
        factor = repeat(tl.div_rn(outer_amax, tl.zeros_like(outer_amax) + CAST.numerator), TILE_C // 16)
        q = scaled(scaled(decode(codes, CAST), repeat(decode_scale, SHARE)), factor)
        store_sums(y, q, sums_ptr, R, width, row0, col0, CAST, TILE_R, TILE_C)
    inside = (row < R) & (block_index * CAST.width < width)
    if CAST.rule == "aligned":
        stored = round_to(stored, tl.bfloat16, HARDWARE)
        if largest_ptr is not None:
            store_amax(largest_ptr, bits_of_largest(tl.where(inside, stored, 0.0)))
    if scale_ptr is not None:
        tl.store(scale_ptr + (row.to(tl.int64) * (width // CAST.width) + block_index), stored, mask=inside)
    words = pack(codes, repeat(decode_scale, SHARE), CAST, HARDWARE)
    store_words(words, data_ptr, R, width, row0, col0, TILE_R, TILE_C)


@triton.jit
def chosen(condition, a, b):
    """Of each of 16 pairs of tensors ``a`` where ``condition``, else ``b``."""
    out = ()
    for i in tl.static_range(16):
        out = out + (tl.where(condition, a[i], b[i]),)
    return out


@triton.jit
def store_sums(y, q, sums_ptr, R, width, row0, col0, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """``<y,y>`` and ``<y,q>`` of every group, FP64 [2, R * groups]."""
    COLS: tl.constexpr = TILE_C // CAST.group
    index = tl.arange(0, TILE_R * COLS)
    row = row0 + index // COLS
    group = col0 // CAST.group + index % COLS
    groups = width // CAST.group
    inside = (row < R) & (group < groups)
    yy, yq = dots(y, q, CAST.group)
    tl.store(sums_ptr + (row.to(tl.int64) * groups + group), yy, mask=inside)
    tl.store(sums_ptr + ((row.to(tl.int64) + R) * groups + group), yq, mask=inside)


@triton.jit
def pack(codes, decode_scale, CAST: tl.constexpr, HARDWARE: tl.constexpr):
    """What 16 neighbours are stored as: 2 words of codes, 4 of codes that have a byte each, or 8 of values."""
    words = ()
    if CAST.values:
        for i in tl.static_range(0, 16, 2):
            low = times_scale(decode_tile(codes[i], CAST), decode_scale, CAST)
            high = times_scale(decode_tile(codes[i + 1], CAST), decode_scale, CAST)
            if CAST.half:
                words = words + (pack_fp16(low, high),)
            else:
                words = words + (pack_bf16(low, high, HARDWARE),)
    else:
        BITS: tl.constexpr = 4 if CAST.packed else 8  # pyright: ignore[reportAssignmentType]
        for first in tl.static_range(0, 16, 32 // BITS):
            word = codes[first]
            for i in tl.static_range(1, 32 // BITS):
                word = word | (codes[first + i] << (BITS * i))
            words = words + (word,)
    return words


@triton.jit
def pack_bf16(low, high, HARDWARE: tl.constexpr):
    """Both FP32 values rounded to the nearest BF16, in one word."""
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (to_bits(round_bf16(low)) >> 16) | (to_bits(round_bf16(high)) & 0xFFFF0000)


@triton.jit
def pack_fp16(low, high):
    """Both FP32 values, which FP16 holds, in one word."""
    low_bits = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low_bits | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def store_words(words, data_ptr, R, width, row0, col0, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Write what :func:`pack` made of every 16 neighbours."""
    COLS: tl.constexpr = TILE_C // 16
    COUNT: tl.constexpr = len(words)  # pyright: ignore[reportAssignmentType]
    index = tl.arange(0, TILE_R * COLS)
    cols = width // 16
    first = row0.to(tl.int64) * cols + col0 // 16
    inside = (index // COLS < R - row0) & (index % COLS < cols - col0 // 16)
    where = (index // COLS) * cols + index % COLS
    place = data_ptr.to(tl.pointer_type(tl.uint32)) + first * COUNT
    word = tl.arange(0, COUNT)[None, :]
    tl.store(place + (where[:, None] * COUNT + word), stack(words), mask=inside[:, None])
