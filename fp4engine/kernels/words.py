"""Device functions: the cast of a block of 16 BF16 values that is kept as eight words of two values each.

One instruction on a word does what takes two in FP32: a maximum, a sign, a stochastic rounding, a product with the
block scale. Rounding to nearest even stays in FP32, since it depends on every bit of ``fl(x * enc)``. The bytes are the
same as without words. :func:`fp4engine.kernels.cast.cast_block` keeps blocks as words if the GPU has
:data:`~fp4engine.kernels.target.WORDS`, and calls :func:`cast_words` if products stay normal too. Triton's interpreter
never does, since these functions are PTX; ``tests/parity/test_emulated_gpus.py`` runs them on emulated GPUs. The
roundings themselves are explained in :mod:`fp4engine.kernels.encode`.
"""

import triton
import triton.language as tl

from fp4engine.kernels.encode import (
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
"""A number to which it is added is rounded to an integer, and the low bits of the sum are that integer."""
HALF_BITS = tl.constexpr(0x38003800)
"""1/2 in both halves, FP16."""


@triton.jit
def on_words(ASM: tl.constexpr, a, b, c):
    """The word ``$0`` that the PTX instruction ``ASM`` makes of the words ``$1``, ``$2`` and ``$3``."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def bytes_of(a, b, SELECTOR: tl.constexpr):
    """Four bytes of the eight that ``a`` (0 to 3) and ``b`` (4 to 7) have.

    The last hexadecimal digit of ``SELECTOR`` names the lowest byte of the result.
    """
    return on_words("prmt.b32 $0, $1, $2, " + SELECTOR + ";", a, b, a)


@triton.jit
def fused(a, b, c):
    """``a * b + c`` in BF16, rounded once, for both values of the words."""
    return on_words("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)


@triton.jit
def of_magnitudes(WHICH: tl.constexpr, a, b):
    """The smaller (``min``) or the larger magnitude of each pair of values, with the product of the pair's signs."""
    return on_words(WHICH + ".xorsign.abs.bf16x2 $0, $1, $2;", a, b, b)


@triton.jit
def both(word, value: tl.constexpr):
    """The constant ``value`` in the shape of ``word``."""
    return tl.zeros_like(word) + value


@triton.jit
def words_of(x):
    """Eight words of 16 FP32 tensors whose values BF16 holds. -0.0 becomes +0.0, since E2M1 codes it without a sign."""
    words = ()
    for i in tl.static_range(0, 16, 2):
        word = (to_bits(x[i]) >> 16) | (to_bits(x[i + 1]) & 0xFFFF0000)
        words = words + (fused(word, both(word, 0x3F803F80), both(word, 0)),)
    return words


@triton.jit
def half_of(word, i: tl.constexpr):
    """The value in the lower (``i`` = 0) or the upper half of a word, in FP32."""
    return from_bits(word & 0xFFFF0000 if i else word << 16)


@triton.jit
def elements_of(words):
    """The 16 values of eight words, in FP32."""
    x = ()
    for i in tl.static_range(8):
        x = x + (half_of(words[i], 0), half_of(words[i], 1))
    return x


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

    PTX's own reciprocal takes the same steps for such x, after a branch that looks for others.
    """
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(r, tl.fma(x * -1.0, r, 1.0), r)  # Triton's -x is 0 - x, an instruction


@triton.jit
def quick_quotient(DIVIDEND: tl.constexpr, x):
    """``fl(DIVIDEND / x)`` for x from 2^-100 to 2^100, in the steps of PTX's division but for its branch."""
    r = quick_reciprocal(x)
    q = r * DIVIDEND
    return tl.fma(r, tl.fma(x * -1.0, q, DIVIDEND), q)


@triton.jit
def even_code_of(a):
    """The code of :func:`fp4engine.kernels.encode.even_code` for ``0 <= a < 7``, in the low bits of the result.

    The factors give all three sums one exponent, so the least of them as integers has the code, and no offset is left
    to take off.
    """
    half = tl.fma(a, 2.0, STEP).to(tl.int32, bitcast=True)
    one = (a + (STEP + 2)).to(tl.int32, bitcast=True)
    two = tl.fma(a, 0.5, STEP + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(half, one), two).to(tl.uint32, bitcast=True)


@triton.jit
def magnitude_of(word, i: tl.constexpr, encode_scale):
    """``fl(|x| * enc)`` of one half of a word.

    It is written in PTX because the product can ignore the sign at no cost, and the compiler would mask it first.
    """
    return tl.inline_asm_elementwise(
        "{.reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2;}", "=f,f,f",
        [half_of(word, i), encode_scale], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def odd_and_even(words, first: tl.constexpr):
    """Two words of high bytes: of the upper halves of four words, and of their lower halves."""
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
    """Both values ``y = max(a, (a + 1) / 2)`` in FP16, plus the centred random byte, as in ``stochastic_code``.

    The random byte is added to the first ten bits of the fraction, which FP16 has; no bit below them can carry into
    these. From bit 9 on, a half less ``HALF_BITS`` is E2M1's magnitude code.
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
    """A word of BF16 values ``e2m1 * scale``, which are ``min(y, 2y - 1) * scale`` of the rounded ``y``.

    FP16's exponent and first fraction bit, shifted to where BF16 has them, are ``2^-112 y`` in BF16.
    """
    y = (stochastic_word(word, random, encode_scale, i) >> 3) & 0x0FC00FC0
    least = fused(y, scales, both(word, 0x80008000))
    other = fused(y, scales + 0x00800080, to_pair(scale) ^ SIGNS)
    return on_words("min.bf16x2 $0, $1, $2;", least, other, other) | (word & signs)


@triton.jit
def to_pair(value):
    """A word that has an FP32 value, which BF16 holds, in both halves."""
    return bytes_of(to_bits(value), to_bits(value), "0x7632")


@triton.jit
def pack_words(words, random, encode_scale, scale, broken, SIDE: tl.constexpr):
    """The words to store: two of codes, or eight of BF16 values.

    ``broken``: whether a block's scale is NaN. Its codes are then 0, and its values have no sign.
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
    """Magnitudes are limited to the largest BF16 number below ``6.5 / enc``, which is rounded to 6 in E2M1.

    So :func:`even_code_of` never sees 7 or more. The limit takes half an instruction per value here, and one after the
    product. ``enc`` is at most FLT_MAX.
    """
    limit = to_pair(tl.maximum(whole_scale * 6.5, 6.5 * 2.0**-128))
    out = ()
    for i in tl.static_range(8):
        out = out + (of_magnitudes("min", words[i], limit),)
    return out


@triton.jit
def cast_words(words, amax, outer_amax, random, SIDE: tl.constexpr, HARDWARE: tl.constexpr):
    """Scale bits and packed words of blocks with the amax ``amax``, under an outer amax from 2^-100 to 2^17."""
    outer_scale = quick_quotient(SIDE.numerator, outer_amax)
    scale_inv = to_e4m3(amax * (outer_scale * (1.0 / SIDE.target)), HARDWARE)
    scale = from_e4m3(scale_inv, HARDWARE)
    whole_scale = scale * quick_reciprocal(outer_scale)
    # The minimum of NaN, which is a reciprocal of 0 here, and FLT_MAX is FLT_MAX.
    encode_scale = tl.minimum(quick_reciprocal(whole_scale), FLT_MAX)
    if not SIDE.random_bits:
        words = at_most(words, whole_scale)
    return scale_inv, pack_words(words, random, encode_scale, scale, scale != scale, SIDE)
