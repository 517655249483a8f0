"""Device functions: the cast of a block that is eight words of two BF16 values each.

A word's two values take one instruction where FP32 takes two: maximum, sign, stochastic rounding, product with the
block scale. Nearest even stays in FP32, since it must know every bit of ``fl(x * enc)``. The bytes are those of
:func:`fp4engine.kernels.cast.cast_block`, which comes here where a GPU has ``WORDS`` and products stay normal; the
interpreter does not. ``even_code`` and the like are explained in :mod:`fp4engine.kernels.encode`.
"""

import triton
import triton.language as tl

from fp4engine.kernels.encode import (
    E4M3_NAN,
    FLT_MAX,
    NAN,
    even_magnitude_of,
    from_bits,
    from_e4m3,
    to_bits,
    to_e4m3,
)
from fp4engine.kernels.target import WORDS as _WORDS

WORDS = tl.constexpr(_WORDS)
SIGNS = tl.constexpr(0x80008000)
STEP = tl.constexpr(1.5 * 2**23)
"""Adding it to a number rounds that to an integer, which is then in the low bits."""
HALF_BITS = tl.constexpr(0x38003800)
"""1/2 in both halves, FP16."""


@triton.jit
def on_words(ASM: tl.constexpr, a, b, c):
    """One instruction of PTX, ``$0`` from ``$1`` to ``$3``."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def bytes_of(a, b, SELECTOR: tl.constexpr):
    """Four bytes of ``a``, 0 to 3, and ``b``, 4 to 7, the lowest named by the last digit of ``SELECTOR``."""
    return on_words("prmt.b32 $0, $1, $2, " + SELECTOR + ";", a, b, a)


@triton.jit
def fused(a, b, c):
    """``a * b + c`` of BF16, rounded once."""
    return on_words("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)


@triton.jit
def of_magnitudes(WHICH: tl.constexpr, a, b):
    """The smaller or the larger magnitude, with the product of both signs."""
    return on_words(WHICH + ".xorsign.abs.bf16x2 $0, $1, $2;", a, b, b)


@triton.jit
def both(word, value: tl.constexpr):
    """A constant like ``word``."""
    return tl.zeros_like(word) + value


@triton.jit
def words_of(x):
    """The words of 16 FP32 tensors that BF16 holds, with +0.0 for -0.0: it has no sign in E2M1."""
    words = ()
    for i in tl.static_range(0, 16, 2):
        word = (to_bits(x[i]) >> 16) | (to_bits(x[i + 1]) & 0xFFFF0000)
        words = words + (fused(word, both(word, 0x3F803F80), both(word, 0)),)
    return words


@triton.jit
def half_of(word, i: tl.constexpr):
    """FP32 value of one half."""
    return from_bits(word & 0xFFFF0000 if i else word << 16)


@triton.jit
def amax_of_words(words):
    """As :func:`fp4engine.kernels.encode.block_amax`."""
    m = words
    for stage in tl.static_range(3):
        n = ()
        for i in tl.static_range(4 >> stage):
            n = n + (of_magnitudes("max.NaN", m[i], m[i + (4 >> stage)]),)
        m = n
    return tl.maximum(tl.abs(half_of(m[0], 0)), tl.abs(half_of(m[0], 1)), propagate_nan=NAN)


@triton.jit
def quick_reciprocal(x):
    """``fl(1 / x)`` for x from 2^-126 to 2^126; NaN for 0.

    These are the steps that PTX's own reciprocal takes there, without its branch for other x.
    """
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(r, tl.fma(x * -1.0, r, 1.0), r)  # Triton's -x is 0 - x, an instruction


@triton.jit
def quick_quotient(DIVIDEND: tl.constexpr, x):
    """``fl(DIVIDEND / x)`` for x from 2^-100 to 2^100: as :func:`quick_reciprocal`, those of PTX's division."""
    r = quick_reciprocal(x)
    q = r * DIVIDEND
    return tl.fma(r, tl.fma(x * -1.0, q, DIVIDEND), q)


@triton.jit
def even_code_of(a):
    """As :func:`fp4engine.kernels.encode.even_code` of ``0 <= a < 7``, in the lowest bits of ``STEP``'s pattern.

    The factors bring all three lines to one exponent, so that no offset is left to take off.
    """
    half = tl.fma(a, 2.0, STEP).to(tl.int32, bitcast=True)
    one = (a + (STEP + 2)).to(tl.int32, bitcast=True)
    two = tl.fma(a, 0.5, STEP + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(half, one), two).to(tl.uint32, bitcast=True)


@triton.jit
def magnitude_of(word, i: tl.constexpr, encode_scale):
    """``fl(|x| * enc)`` of one half. In PTX, since the compiler masks a sign that the product takes off for nothing."""
    return tl.inline_asm_elementwise(
        "{.reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2;}", "=f,f,f",
        [half_of(word, i), encode_scale], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def odd_and_even(words, first: tl.constexpr):
    """The high bytes of both halves of four words: those of high halves, and those of low halves."""
    a = bytes_of(words[first], words[first + 1], "0x7351")
    b = bytes_of(words[first + 2], words[first + 3], "0x7351")
    return bytes_of(a, b, "0x7632"), bytes_of(a, b, "0x5410")


@triton.jit
def pack_even_words(words, encode_scale, first: tl.constexpr):
    """Eight codes to nearest even in one uint32, as :func:`fp4engine.kernels.encode.pack_even`."""
    pairs = ()
    for i in tl.static_range(4):
        low = even_code_of(magnitude_of(words[first + i], 0, encode_scale))
        high = even_code_of(magnitude_of(words[first + i], 1, encode_scale))
        pairs = pairs + ((high << 4) + low,)  # the low byte is right
    codes = bytes_of(bytes_of(pairs[0], pairs[1], "0x0040"), bytes_of(pairs[2], pairs[3], "0x0040"), "0x5410")
    odd, even = odd_and_even(words, first)
    return codes | (odd & 0x80808080) | ((even >> 4) & 0x08080808)


@triton.jit
def even_value(word, encode_scale, scales, signs):
    """A word of BF16 values ``e2m1 * scale``."""
    low = even_magnitude_of(magnitude_of(word, 0, encode_scale))
    high = even_magnitude_of(magnitude_of(word, 1, encode_scale))
    magnitudes = bytes_of(to_bits(low), to_bits(high), "0x7632")
    return fused(magnitudes, scales, both(word, 0x80008000)) | (word & signs)


@triton.jit
def stochastic_word(word, random, encode_scale, i: tl.constexpr):
    """Both halves ``y = max(a, (a + 1) / 2)`` in FP16 with half a random step on, see :func:`stochastic_code`.

    Of the fraction the random byte meets the first ten bits, which FP16 has; bits below them carry nothing. E2M1's
    magnitude code is the half less ``HALF_BITS``, from bit 9.
    """
    low = magnitude_of(word, 0, encode_scale)
    high = magnitude_of(word, 1, encode_scale)
    y = tl.inline_asm_elementwise(
        "cvt.rz.f16x2.f32 $0, $2, $1;", "=r,f,f",
        [tl.maximum(low, tl.fma(low, 0.5, 0.5)), tl.maximum(high, tl.fma(high, 0.5, 0.5))],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
    y = on_words("min.f16x2 $0, $1, $2;", y, both(word, 0x46004600), y)  # 6
    steps = bytes_of(random, both(word, 0x80808080), "0x3424" if i % 2 else "0x1404")  # random bytes, each above a half
    return y + (steps >> 7)


@triton.jit
def pack_stochastic_words(words, random, encode_scale, first: tl.constexpr):
    """Eight stochastic codes in one uint32."""
    signed = ()
    for i in tl.static_range(4):
        word = words[first + i]
        y = stochastic_word(word, random[(first + i) // 2], encode_scale, i)
        signed = signed + (((y - HALF_BITS) * 8) | (word & SIGNS),)
    odd, even = odd_and_even(signed, 0)
    return (odd & 0xF0F0F0F0) | ((even >> 4) & 0x0F0F0F0F)


@triton.jit
def stochastic_value(word, random, encode_scale, scale, scales, signs, i: tl.constexpr):
    """A word of BF16 values ``e2m1 * scale``: ``min(y, 2y - 1) * scale`` of the rounded ``y``.

    FP16's exponent and first fraction bit, shifted to their places in BF16, are ``2^-112 y`` there.
    """
    y = (stochastic_word(word, random, encode_scale, i) >> 3) & 0x0FC00FC0
    least = fused(y, scales, both(word, 0x80008000))
    other = fused(y, scales + 0x00800080, to_pair(scale) ^ SIGNS)
    return on_words("min.bf16x2 $0, $1, $2;", least, other, other) | (word & signs)


@triton.jit
def to_pair(value):
    """A word of an FP32 value that BF16 holds, twice."""
    return bytes_of(to_bits(value), to_bits(value), "0x7632")


@triton.jit
def pack_words(words, random, encode_scale, scale, broken, SIDE: tl.constexpr):
    """Words of codes, or of BF16 values.

    ``broken``: where ``scale`` is NaN. Codes are 0 then, and values have no sign.
    """
    out = ()
    if SIDE.words == 2:
        for first in tl.static_range(0, 8, 4):
            if SIDE.random_bits:
                codes = pack_stochastic_words(words, random, encode_scale, first)
            else:
                codes = pack_even_words(words, encode_scale, first)
            out = out + (tl.where(broken, 0, codes),)
    else:
        signs = tl.where(broken, 0, SIGNS).to(tl.uint32)
        scales = to_pair(scale * (2.0**112 if SIDE.random_bits else 1.0))
        for i in tl.static_range(8):
            if SIDE.random_bits:
                value = stochastic_value(words[i], random[i // 2], encode_scale, scale, scales, signs, i)
            else:
                value = even_value(words[i], encode_scale, scales, signs)
            out = out + (value,)
    return out


@triton.jit
def at_most(words, whole_scale):
    """What is larger than the BF16 number below ``6.5 / enc`` becomes it: 6 in E2M1 as before, and never 7 or more.

    In words it takes half an instruction, where a minimum of codes or magnitudes takes one. ``enc`` is at most FLT_MAX.
    """
    limit = to_pair(tl.maximum(whole_scale * 6.5, 6.5 * 2.0**-128))
    out = ()
    for i in tl.static_range(8):
        out = out + (of_magnitudes("min", words[i], limit),)
    return out


@triton.jit
def cast_words(words, amax, outer_amax, random, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Scale bits and packed words of blocks whose amax is ``amax`` and outer amax between 2^-100 and 2^17."""
    outer_scale = quick_quotient(SIDE.numerator, outer_amax)
    scale_inv = to_e4m3(amax * (outer_scale * (1.0 / SIDE.target)), HARDWARE)
    scale = from_e4m3(scale_inv, HARDWARE)
    whole_scale = scale * quick_reciprocal(outer_scale)
    # The minimum of NaN, which is a reciprocal of 0 here, and FLT_MAX is FLT_MAX.
    encode_scale = tl.minimum(quick_reciprocal(whole_scale), FLT_MAX)
    if not SIDE.random_bits:
        words = at_most(words, whole_scale)
    return scale_inv, pack_words(words, random, encode_scale, scale, scale_inv == E4M3_NAN, SIDE)
