"""Device functions: the cast of a block of 16 BF16 values that is kept as eight words of two values each.

One instruction on a word does what takes two in FP32: a maximum, a sign, a stochastic rounding, a product with the
block scale. Rounding to nearest even stays in FP32, since it depends on every bit of ``fl(x * enc)``. The bytes are the
same as without words. :func:`fp4engine.kernels.cast.cast_block` keeps blocks as words if the GPU has
:data:`~fp4engine.kernels.target.WORDS`, and calls :func:`cast_words` if products stay normal too. Triton's interpreter
never does, since these functions are PTX; ``tests/parity/test_emulated_gpus.py`` runs them on emulated GPUs. The
roundings themselves are explained in :mod:`fp4engine.kernels.encode`.
"""

from struct import pack, unpack

import triton
import triton.language as tl

from fp4engine.kernels.encode import (
    FLT_MAX,
    NAN,
    ROUNDER,
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


def _magnitude_ptx(word: str, half: int, encode_scale: str) -> list[str]:
    """``a = fl(|x| * enc)`` of one half of a word.

    It is written in PTX because the product can ignore the sign at no cost, and the compiler would mask it first.
    """
    widen = f"and.b32 t, {word}, 0xFFFF0000;" if half else f"shl.b32 t, {word}, 16;"
    return [widen, "mov.b32 a, t;", "abs.f32 a, a;", f"mul.rn.f32 a, a, {encode_scale};"]


def _bits(value: float) -> str:
    """An FP32 constant of PTX."""
    return f"0f{unpack('I', pack('f', value))[0]:08X}"


def _ptx(*lines: str) -> tl.constexpr:
    """Instructions, with registers for them."""
    return tl.constexpr("\n".join(["{", ".reg .b32 t, c, p<4>, q, r, y;", ".reg .f32 a, b, s<3>;", *lines, "}"]))


def _even_codes_ptx() -> tl.constexpr:
    """:func:`fp4engine.kernels.encode.pack_even` of words ``$1`` to ``$4`` and ``enc`` ``$5``.

    A code is that of :func:`fp4engine.kernels.encode.even_code` for ``0 <= a < 7``. The factors give all three sums
    one exponent, so the least of them as integers has the code in its low bits, and no offset is left to take off.
    """
    lines: list[str] = []
    for i in range(4):
        for half in range(2):
            lines += _magnitude_ptx(f"${1 + i}", half, "$5")
            lines += [f"fma.rn.f32 s0, a, {_bits(2.0)}, {_bits(STEP.value)};"]
            lines += [f"add.rn.f32 s1, a, {_bits(STEP.value + 2)};"]
            lines += [f"fma.rn.f32 s2, a, {_bits(0.5)}, {_bits(STEP.value + 4)};"]
            lines += ["mov.b32 c, s0;", "mov.b32 r, s1;", "min.s32 c, c, r;", "mov.b32 r, s2;", "min.s32 c, c, r;"]
            lines += ["shl.b32 c, c, 4;", f"add.u32 p{i}, p{i}, c;"] if half else [f"mov.b32 p{i}, c;"]
    lines += ["prmt.b32 q, p0, p1, 0x0040;", "prmt.b32 r, p2, p3, 0x0040;", "prmt.b32 q, q, r, 0x5410;"]
    lines += ["prmt.b32 c, $1, $2, 0x7351;", "prmt.b32 r, $3, $4, 0x7351;"]  # the low byte of a pair is right
    lines += ["prmt.b32 t, c, r, 0x7632;", "and.b32 t, t, 0x80808080;", "or.b32 q, q, t;"]  # signs, odd and even
    lines += ["prmt.b32 t, c, r, 0x5410;", "shr.u32 t, t, 4;", "and.b32 t, t, 0x08080808;", "or.b32 $0, q, t;"]
    return _ptx(*lines)


def _even_value_ptx() -> tl.constexpr:
    """A word of BF16 values ``e2m1 * scale`` of word ``$1``, ``enc`` ``$2``, scales ``$3`` and a mask of signs ``$4``.

    The magnitudes are those of :func:`fp4engine.kernels.encode.even_magnitude`.
    """
    lines: list[str] = []
    for half in range(2):
        lines += [*_magnitude_ptx("$1", half, "$2"), "mov.b32 c, a;", "and.b32 c, c, 0x7F800000;"]
        lines += [f"add.s32 c, c, {ROUNDER.value:#x};", f"max.s32 c, c, {0x3F800000 + ROUNDER.value:#x};"]
        lines += ["mov.b32 b, c;", "add.rn.f32 a, a, b;", "sub.rn.f32 a, a, b;", f"mov.b32 p{half}, a;"]
    lines += ["prmt.b32 y, p0, p1, 0x7632;", "mov.b32 c, 0x80008000;", "fma.rn.bf16x2 y, y, $3, c;"]
    return _ptx(*lines, "and.b32 t, $1, $4;", "or.b32 $0, y, t;")


def _stochastic_ptx(odd: bool, *rest: str) -> tl.constexpr:
    """Both values ``y = max(a, (a + 1) / 2)`` in FP16, plus the centred random byte, as in ``stochastic_code``.

    Of word ``$1``, random bytes ``$2`` and ``enc`` ``$3``. The random byte is added to the first ten bits of the
    fraction, which FP16 has; no bit below them can carry into these. From bit 9 on, a half less ``HALF_BITS`` is E2M1's
    magnitude code.
    """
    lines: list[str] = []
    for half in range(2):
        lines += _magnitude_ptx("$1", half, "$3")
        lines += [f"fma.rn.f32 b, a, {_bits(0.5)}, {_bits(0.5)};", f"max.f32 s{half}, a, b;"]
    lines += ["cvt.rz.f16x2.f32 y, s1, s0;", "mov.b32 c, 0x46004600;", "min.f16x2 y, y, c;"]  # 6
    lines += [f"prmt.b32 t, $2, 0x80808080, {'0x3424' if odd else '0x1404'};"]  # random bytes, each above a half
    return _ptx(*lines, "shr.u32 t, t, 7;", "add.u32 y, y, t;", *(rest or ("mov.b32 $0, y;",)))


_VALUES = (
    "shr.u32 y, y, 3;", "and.b32 y, y, 0x0FC00FC0;", "mov.b32 c, 0x80008000;", "fma.rn.bf16x2 p0, y, $4, c;",
    "fma.rn.bf16x2 p1, y, $5, $6;", "min.bf16x2 y, p0, p1;", "and.b32 t, $1, $7;", "or.b32 $0, y, t;",
)  # fmt: skip
"""BF16 values ``e2m1 * scale``, which are ``min(y, 2y - 1) * scale`` of the rounded ``y``.

FP16's exponent and first fraction bit, shifted to where BF16 has them, are ``2^-112 y`` in BF16.
"""
EVEN_CODES = _even_codes_ptx()
EVEN_VALUE = _even_value_ptx()
STOCHASTIC_WORDS = _stochastic_ptx(False)
STOCHASTIC_WORDS_ODD = _stochastic_ptx(True)
STOCHASTIC_VALUE = _stochastic_ptx(False, *_VALUES)
STOCHASTIC_VALUE_ODD = _stochastic_ptx(True, *_VALUES)
"""Chains of a cast as one operation each: some of Triton's passes take time quadratic in the number of operations."""


@triton.jit
def odd_and_even(words, first: tl.constexpr):
    """Two words of high bytes: of the upper halves of four words, and of their lower halves."""
    a = bytes_of(words[first], words[first + 1], "0x7351")
    b = bytes_of(words[first + 2], words[first + 3], "0x7351")
    return bytes_of(a, b, "0x7632"), bytes_of(a, b, "0x5410")


@triton.jit
def pack_even_words(words, encode_scale, first: tl.constexpr):
    """Eight codes to nearest even in one uint32, as :func:`fp4engine.kernels.encode.pack_even`."""
    return tl.inline_asm_elementwise(
        EVEN_CODES, "=r,r,r,r,r,f", [words[first], words[first + 1], words[first + 2], words[first + 3], encode_scale],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def even_value(word, encode_scale, scales, signs):
    """A word of BF16 values ``e2m1 * scale``."""
    return tl.inline_asm_elementwise(
        EVEN_VALUE, "=r,r,f,r,r", [word, encode_scale, scales, signs], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def stochastic_word(word, random, encode_scale, i: tl.constexpr):
    """Both rounded values in FP16, see :data:`STOCHASTIC_WORDS`."""
    return tl.inline_asm_elementwise(
        STOCHASTIC_WORDS_ODD if i % 2 else STOCHASTIC_WORDS, "=r,r,r,f", [word, random, encode_scale],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


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
def stochastic_value(word, random, encode_scale, scales, twice, offset, signs, i: tl.constexpr):
    """A word of BF16 values ``e2m1 * scale``, see :data:`STOCHASTIC_VALUE`."""
    return tl.inline_asm_elementwise(
        STOCHASTIC_VALUE_ODD if i % 2 else STOCHASTIC_VALUE, "=r,r,r,f,r,r,r,r",
        [word, random, encode_scale, scales, twice, offset, signs], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


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
        twice = scales + 0x00800080
        offset = to_pair(scale) ^ SIGNS
        for i in tl.static_range(8):
            if SIDE.random_bits:
                value = stochastic_value(words[i], random[i // 2], encode_scale, scales, twice, offset, signs, i)
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
