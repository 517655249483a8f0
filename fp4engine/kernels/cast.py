"""Device functions: a block (tuple of 16 tensors) through a whole cast, and the compile-time description of one.

rotate -> block amax (-> tile amax) -> E4M3 scale -> E2M1 codes -> packed words
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fp4engine.constants import HADAMARD_SIGNS
from fp4engine.formats import CastSpec, Outer, RoundingMode, ScaleRule, Signs
from fp4engine.kernels.element import neighbour_scale
from fp4engine.kernels.encode import (
    E2M1,
    E4M3_NAN,
    PAIRS,
    block_amax,
    element_encode_scale,
    even_code,
    even_magnitude,
    from_e4m3,
    in_the_whole,
    magnitude,
    outer_encode_scale,
    pack_even,
    pack_native,
    pack_stochastic,
    pack_values,
    random_bits,
    random_words,
    reciprocal,
    rotate,
    stochastic_code,
    stochastic_magnitude,
    to_e4m3,
)
from fp4engine.kernels.words import WORDS, amax_of_words, cast_words, elements_of, words_of


@dataclass(frozen=True, eq=False)
class Side:
    """What a kernel needs to know of one side's CastSpec, at compile time. Compared by identity, which is fast.

    Attributes:
        words: int32 words that one block becomes: 2 of codes, 8 of BF16 values.
        signs: of the rotation, or None.
        random_bits: 0 for nearest even, else 8 or 16.
        error: "mae" or "mse" under 4over6, else None.
        search: offsets of the scales that a block tries beside its nominal one, or None.
        per_row: one outer amax per row; shared_rows: the largest of 128 rows stands for each of them.
        bit: bit 0 of the stream: 0 rowwise, 1 columnwise.
        sharded: whether the random stream is told of the shard's place in a whole tensor.
    """

    words: int
    tiled: bool
    signs: tuple[int, ...] | None
    random_bits: int
    error: str | None
    search: tuple[int, ...] | None
    per_row: bool
    shared_rows: bool
    numerator: float
    target: float
    bit: int
    sharded: bool

    @property
    def rounds_values(self) -> bool:
        """Whether elements are rounded to magnitudes in FP32 at once: where nobody asks for their codes."""
        return self.words == 8 and self.error is None

    @property
    def fits_words(self) -> bool:
        """Whether :mod:`fp4engine.kernels.words` can cast this side."""
        return self.error is None and self.search is None and self.random_bits != 16 and not self.per_row

    @staticmethod
    def of(spec: CastSpec, output: str, bit: int, sharded: bool = False) -> "Side":
        """The side that casts by ``spec`` and writes ``output``, "codes" or "values"; one object per answer."""
        key = (spec.key, output, bit, sharded)
        if key not in _sides:
            _sides[key] = Side._make(spec, output, bit, sharded)
        return _sides[key]

    @staticmethod
    def of_key(key: str, output: str, bit: int) -> "Side | None":
        """As :meth:`of`, by the spec's key; None for none."""
        return Side.of(CastSpec.from_key(key), output, bit) if key else None

    @staticmethod
    def _make(spec: CastSpec, output: str, bit: int, sharded: bool) -> "Side":
        signs = None
        if spec.rotation is not None:
            signs = (1,) * 16 if spec.rotation.signs is Signs.NONE else HADAMARD_SIGNS
        return Side(
            words={"codes": 2, "values": 8}[output],
            tiled=spec.block == (16, 16),
            signs=signs,
            random_bits=spec.random_bits if spec.rounding is RoundingMode.STOCHASTIC else 0,
            error={ScaleRule.FOUR_OVER_SIX_MAE: "mae", ScaleRule.FOUR_OVER_SIX_MSE: "mse"}.get(spec.scale_rule),
            search=spec.search or None,
            per_row=spec.outer.is_by_rows,
            shared_rows=spec.outer is Outer.ROWS128,
            numerator=spec.numerator,
            target=spec.target,
            bit=bit,
            sharded=sharded,
        )


_sides: dict[tuple[str, str, int, bool], Side] = {}


@triton.jit
def tile_amax(m, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Maximum of ``m``, read as [OUTER, 16, INNER], over its middle axis, repeated back to ``m``'s shape."""
    amax = tl.reduce(tl.reshape(m, [OUTER, 16, INNER]), 1, _maximum, keep_dims=True)
    return tl.reshape(tl.broadcast_to(amax, [OUTER, 16, INNER]), m.shape)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_sum(e, OUTER: tl.constexpr, INNER: tl.constexpr):
    """As :func:`tile_amax` for sums, halving the 16 at each step: rows (0..7) + (8..15), and so on."""
    for step in tl.static_range(4):
        low, high = tl.split(tl.permute(tl.reshape(e, [OUTER, 2, (8 >> step) * INNER]), [0, 2, 1]))
        e = low + high
    return tl.broadcast_to(tl.reshape(e, [OUTER, 1, INNER]), [OUTER, 16, INNER])


@triton.jit
def products_stay_normal(outer_amax, SIDE: tl.constexpr, dtype: tl.constexpr):
    """True if no product of a cast but 0 itself rounds to 0, so that they may be computed in fewer steps.

    An amax below 2^-100 is left out, so that reciprocals of a block's scales need no branch for numbers out of range.

    ``enc >= numerator / (448 A)``, and ``enc >= 2^-16`` keeps products of BF16 values (2^-133 or more) above 2^-149:
    :func:`scale_elements` may fuse. Under 4over6 what is divided is 0 or at least ``2^-10 A``, see :func:`quotient`.
    """
    if dtype == tl.float32 or SIDE.per_row or SIDE.search is not None:  # a search gains little, and is long
        return False
    elif SIDE.error is not None:
        return (outer_amax < 64.0 * SIDE.numerator) & (outer_amax > 2.0**-80)
    else:
        return (outer_amax < 64.0 * SIDE.numerator) & (outer_amax > 2.0**-100)


@triton.jit
def scale_elements(x, encode_scale, FUSED: tl.constexpr):
    """``fl(x * enc) + 0``: adding 0 turns -0.0 into +0.0, whose code is 0. One instruction instead of two if fused."""
    v = ()
    for i in tl.static_range(len(x)):
        if FUSED:
            v = v + (tl.fma(x[i], encode_scale, 0.0),)
        else:
            v = v + (x[i] * encode_scale + 0.0,)
    return v


@triton.jit
def encode_elements(v, random, low_random, FIRST: tl.constexpr, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Magnitude codes as :func:`stochastic_code` or :func:`even_code` gives them, or magnitudes in FP32.

    ``FIRST`` is the position of ``v[0]`` in its block.
    """
    TOP: tl.constexpr = 22 if SIDE.rounds_values else 28  # pyright: ignore[reportAssignmentType]
    codes = ()
    for i in tl.static_range(len(v)):
        if SIDE.random_bits:
            bits = random_bits(random, low_random, FIRST + i, SIDE.random_bits, TOP)
            if SIDE.rounds_values:
                codes = codes + (stochastic_magnitude(v[i], bits, SIDE.random_bits, HARDWARE),)
            else:
                codes = codes + (stochastic_code(v[i], bits, SIDE.random_bits, HARDWARE),)
        elif SIDE.rounds_values:
            codes = codes + (even_magnitude(v[i], HARDWARE),)
        else:
            codes = codes + (even_code(v[i], HARDWARE),)
    return codes


@triton.jit
def magnitudes_of(codes, SIDE: tl.constexpr):
    """FP32 magnitudes of what :func:`encode_elements` gave."""
    if SIDE.rounds_values:
        return codes
    else:
        m = ()
        for i in tl.static_range(len(codes)):
            m = m + (magnitude(codes[i], SIDE.random_bits > 0),)
        return m


@triton.jit
def pack_elements(v, codes, scale, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """The words of as many elements: eight codes in each, or two values."""
    if SIDE.words == 8:
        return pack_values(magnitudes_of(codes, SIDE), v, scale, HARDWARE)
    else:
        words = ()
        for first in tl.static_range(0, len(v), 8):
            if SIDE.random_bits:
                words = words + (pack_stochastic(codes, v, first, HARDWARE),)
            elif E2M1 & HARDWARE:
                words = words + (pack_native(v, first),)
            else:
                words = words + (pack_even(codes, v, first, HARDWARE),)
        return words


@triton.jit
def cast_elements(
    x, scale, encode_scale, random, low_random, SIDE: tl.constexpr, FUSED: tl.constexpr, HARDWARE: tl.constexpr
):
    """The words of one block, one after the other: what an element needed is given back before the next word."""
    COUNT: tl.constexpr = 16 // SIDE.words
    words = ()
    for first in tl.static_range(0, 16, COUNT):
        part = ()
        for i in tl.static_range(COUNT):
            part = part + (x[first + i],)
        v = scale_elements(part, encode_scale, FUSED)
        codes = encode_elements(v, random, low_random, first, SIDE, HARDWARE)
        words = words + pack_elements(v, codes, scale, SIDE, HARDWARE)
    return words


@triton.constexpr_function
def error_ptx(is_stochastic, kind, is_fast):
    """An element's part of :func:`candidate_error` in PTX.

    ``$0 = $5 + |m(code $1) * scale $2 * amax $3 / numerator - |x $4||`` or its square; ``$6`` is minus the numerator,
    and ``$7`` its reciprocal.
    """
    lines = [".reg .b32 c;", ".reg .f32 y, z, a;"]
    lines += ["shr.u32 c, $1, 6;", "and.b32 c, c, 0x01C00000;"] if is_stochastic else ["shl.b32 c, $1, 22;"]
    lines += ["add.u32 c, c, 0x3F000000;", "mov.b32 y, c;", "fma.rn.f32 z, y, 0f40000000, 0fBF800000;"]
    lines += ["min.f32 y, y, z;", "mul.rn.f32 y, y, $2;", "mul.rn.f32 y, y, $3;"]
    if is_fast:
        lines += ["mul.rn.f32 z, y, $7;", "fma.rn.f32 y, z, $6, y;", "fma.rn.f32 z, y, $7, z;"]
    else:
        lines += ["neg.f32 a, $6;", "div.rn.f32 z, y, a;"]
    lines += ["abs.f32 a, $4;", "sub.rn.f32 z, z, a;", "mul.rn.f32 z, z, z;" if kind == "mse" else "abs.f32 z, z;"]
    return "\n".join(["{", *lines, "add.rn.f32 $0, $5, z;", "}"])


@triton.jit
def candidate_error(x, codes, scale, outer_amax, SIDE: tl.constexpr, FUSED: tl.constexpr, HARDWARE: tl.constexpr):
    """Sum over the block, left to right, of ``|x_hat - x|`` or its square; both have one sign, which is left out."""
    total = tl.zeros_like(scale)
    if PAIRS & HARDWARE:
        ASM: tl.constexpr = error_ptx(SIDE.random_bits > 0, SIDE.error, FUSED)
        for i in tl.static_range(16):
            total = tl.inline_asm_elementwise(
                ASM, "=f,r,f,f,f,f,f,f",
                [codes[i], scale, outer_amax, x[i], total, -SIDE.numerator, 1.0 / SIDE.numerator],
                dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        for i in tl.static_range(16):
            value = magnitude(codes[i], SIDE.random_bits > 0) * scale * outer_amax
            difference = tl.div_rn(value, tl.zeros_like(value) + SIDE.numerator) - tl.abs(x[i])
            if SIDE.error == "mse":
                total = total + difference * difference
            else:
                total = total + tl.abs(difference)
    return total


@triton.jit
def scales_of(scale, outer_scale, HARDWARE: tl.constexpr):
    """Stored scale, its value, and what elements are multiplied by, for one unrounded block scale."""
    scale_inv = to_e4m3(scale, HARDWARE)
    decode_scale = from_e4m3(scale_inv, HARDWARE)
    return scale_inv, decode_scale, element_encode_scale(decode_scale, reciprocal(outer_scale, HARDWARE), HARDWARE)


@triton.jit
def candidate(
    x, scale, outer_scale, random, low_random, SIDE: tl.constexpr, FUSED: tl.constexpr, HARDWARE: tl.constexpr
):
    """Stored scale, its value, scaled elements and codes for one unrounded block scale."""
    scale_inv, decode_scale, encode_scale = scales_of(scale, outer_scale, HARDWARE)
    v = scale_elements(x, encode_scale, FUSED)
    return scale_inv, decode_scale, v, encode_elements(v, random, low_random, 0, SIDE, HARDWARE)


@triton.jit
def draw_block(rng_ptr, block, row, stream, like, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Random words of the blocks, and those of the lower bits if 16 are asked for; see :func:`random_words`."""
    random = ()
    low_random = ()
    if SIDE.random_bits:
        if SIDE.sharded:
            block, row = in_the_whole(rng_ptr, block, row, stream | SIDE.bit)
        random = random_words(rng_ptr, block, row, stream | SIDE.bit, like, HARDWARE)
        if SIDE.random_bits == 16:
            low_random = random_words(rng_ptr, block, row, (stream | SIDE.bit) ^ 16, like, HARDWARE)
    return random, low_random


@triton.jit
def four_over_six(
    x, amax, outer_amax, outer_scale, random, low_random,
    SIDE: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, FUSED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The block's amax on 6 and on 4; 4 where its error is strictly smaller."""
    base = tl.div_rn(amax, tl.zeros_like(amax) + SIDE.target) * outer_scale
    scale6, value6, v6, codes6 = candidate(x, base, outer_scale, random, low_random, SIDE, FUSED, HARDWARE)
    scale4, value4, v4, codes4 = candidate(x, base * 1.5, outer_scale, random, low_random, SIDE, FUSED, HARDWARE)
    error6 = candidate_error(x, codes6, value6, outer_amax, SIDE, FUSED, HARDWARE)
    error4 = candidate_error(x, codes4, value4, outer_amax, SIDE, FUSED, HARDWARE)
    if SIDE.tiled:
        error6 = tl.reshape(tile_sum(error6, OUTER, INNER), amax.shape)
        error4 = tl.reshape(tile_sum(error4, OUTER, INNER), amax.shape)
    four = error4 < error6
    words6 = pack_elements(v6, codes6, value6, SIDE, HARDWARE)
    words4 = pack_elements(v4, codes4, value4, SIDE, HARDWARE)
    words = ()
    count: tl.constexpr = SIDE.words
    for i in tl.static_range(count):
        words = words + (tl.where(four, words4[i], words6[i]),)
    return tl.where(four, scale4, scale6), words


@triton.jit
def searched(
    x, nominal, outer_scale, SIDE: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, HARDWARE: tl.constexpr
):
    """Bits of the scale with the least squared error, of ``nominal`` and its neighbours.

    Errors are in units of the outer scale. Of x and what it becomes, which have one sign, magnitudes are enough; the
    product of an element and its scale is exact, so that one fused step rounds as two do.
    """
    units = ()
    for i in tl.static_range(16):
        units = units + (tl.abs(x[i] * outer_scale),)
    outer_decode_scale = reciprocal(outer_scale, HARDWARE)
    best = nominal
    least = tl.zeros_like(units[0])
    COUNT: tl.constexpr = len(SIDE.search) + 1  # pyright: ignore[reportAssignmentType]
    for candidate in tl.static_range(COUNT):
        stored = nominal
        if candidate > 0:
            stored = neighbour_scale(nominal, SIDE.search[candidate - 1])
        scale = from_e4m3(stored, HARDWARE)
        encode_scale = element_encode_scale(scale, outer_decode_scale, HARDWARE)
        error = tl.zeros_like(units[0])
        for i in tl.static_range(16):
            difference = tl.fma(even_magnitude(x[i] * encode_scale, HARDWARE), scale, -units[i])
            error = error + difference * difference
        if SIDE.tiled:
            error = tl.reshape(tile_sum(error, OUTER, INNER), error.shape)
        if candidate == 0:
            least = error
        else:
            better = error < least
            best = tl.where(better, stored, best)
            least = tl.where(better, error, least)
    return best


@triton.jit
def cast_block(
    x, outer_amax, rng_ptr, block, row, stream, DTYPE: tl.constexpr,
    SIDE: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, FUSED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Scale bits (uint8) and packed words (uint32) of the blocks ``x``.

    Args:
        x: tuple of 16 FP32 tensors with values of ``DTYPE``, which a rotation rounds to.
        outer_amax: FP32, scalar or broadcasting against a position.
        block, row: index along and across the contracted axis, for the random stream; broadcast to a position's shape.
        OUTER, INNER: a position's shape as [OUTER, 16, INNER] with a tile's rows in the middle, if ``SIDE.tiled``.
        FUSED: whether :func:`products_stay_normal`.
    """
    NATIVE: tl.constexpr = E2M1 & HARDWARE and SIDE.words == 2 and not SIDE.random_bits  # pyright: ignore[reportAssignmentType]
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE  # pyright: ignore[reportAssignmentType]
    AS_WORDS: tl.constexpr = WORDS & HARDWARE and IS_BF16 and SIDE.fits_words and not NATIVE  # pyright: ignore[reportAssignmentType]
    IN_WORDS: tl.constexpr = FUSED and AS_WORDS  # pyright: ignore[reportAssignmentType]
    if SIDE.signs is not None:
        x = rotate(x, SIDE, DTYPE, HARDWARE)
    if AS_WORDS:
        x = words_of(x)
        amax = amax_of_words(x)
    else:
        amax = block_amax(x)
    if SIDE.tiled:
        amax = tile_amax(amax, OUTER, INNER)
    if IN_WORDS:
        random, _ = draw_block(rng_ptr, block, row, stream, amax, SIDE, HARDWARE)
        scale_inv, words = cast_words(x, amax, outer_amax, random, SIDE, HARDWARE)
    elif SIDE.error is not None:
        random, low_random = draw_block(rng_ptr, block, row, stream, amax, SIDE, HARDWARE)
        outer_scale = outer_encode_scale(outer_amax, SIDE.numerator)
        scale_inv, words = four_over_six(
            x, amax, outer_amax, outer_scale, random, low_random, SIDE, OUTER, INNER, FUSED, HARDWARE
        )
    else:
        outer_scale = outer_encode_scale(outer_amax, SIDE.numerator)
        scale = amax * (outer_scale * (1.0 / SIDE.target))
        scale_inv, decode_scale, encode_scale = scales_of(scale, outer_scale, HARDWARE)
        if SIDE.search is not None:
            scale_inv = searched(x, scale_inv, outer_scale, SIDE, OUTER, INNER, HARDWARE)
            decode_scale = from_e4m3(scale_inv, HARDWARE)
            encode_scale = element_encode_scale(decode_scale, reciprocal(outer_scale, HARDWARE), HARDWARE)
        random, low_random = draw_block(rng_ptr, block, row, stream, encode_scale, SIDE, HARDWARE)
        x = elements_of(x) if AS_WORDS else x
        words = cast_elements(x, decode_scale, encode_scale, random, low_random, SIDE, FUSED, HARDWARE)
    if SIDE.words == 2 and not IN_WORDS:
        # Codes under a NaN scale are 0.
        broken = scale_inv == E4M3_NAN
        words = tl.where(broken, 0, words[0]), tl.where(broken, 0, words[1])
    return scale_inv, words
