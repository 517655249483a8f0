"""Device functions: one block of 16 values to codes, scale and packed words.

A block is a tuple of 16 tensors of any one shape, one per position along the contracted axis, so that rotation, block
maximum, rounding and packing are elementwise and stay in registers whatever the layout of the tensors is. Both sides of
:mod:`fp4engine.kernels.quantize` and :mod:`fp4engine.kernels.amax` are made of these functions.

``HARDWARE`` is a set of bits, see :mod:`fp4engine.kernels.target`; with 0 every function is plain Triton, which the
interpreter runs too. All variants give the same bytes.
"""

from struct import pack, unpack

import triton
import triton.language as tl

from fp4engine.constants import E4M3_MAX as _E4M3_MAX
from fp4engine.constants import FLT_MAX as _FLT_MAX
from fp4engine.constants import PHILOX_M0 as _PHILOX_M0
from fp4engine.constants import PHILOX_M1 as _PHILOX_M1
from fp4engine.constants import PHILOX_ROUNDS as _PHILOX_ROUNDS
from fp4engine.constants import PHILOX_W0 as _PHILOX_W0
from fp4engine.constants import PHILOX_W1 as _PHILOX_W1
from fp4engine.kernels.target import E2M1 as _E2M1
from fp4engine.kernels.target import E4M3 as _E4M3
from fp4engine.kernels.target import PAIRS as _PAIRS

E2M1 = tl.constexpr(_E2M1)
E4M3 = tl.constexpr(_E4M3)
PAIRS = tl.constexpr(_PAIRS)
E4M3_MAX = tl.constexpr(_E4M3_MAX)
FLT_MAX = tl.constexpr(_FLT_MAX)
E4M3_NAN = tl.constexpr(0x7F)
PHILOX_ROUNDS = tl.constexpr(_PHILOX_ROUNDS)
PHILOX_M0 = tl.constexpr(_PHILOX_M0)
PHILOX_M1 = tl.constexpr(_PHILOX_M1)
PHILOX_W0 = tl.constexpr(_PHILOX_W0)
PHILOX_W1 = tl.constexpr(_PHILOX_W1)
NAN = tl.constexpr(tl.PropagateNan.ALL)
STEP_HALF = tl.constexpr(1.5 * 2**22)
STEP_ONE = tl.constexpr(1.5 * 2**23 + 2)
STEP_TWO = tl.constexpr(1.5 * 2**24 + 8)
"""Adding one of these to ``a`` rounds it to a multiple of 1/2, 1 or 2; the offset of that piece of E2M1 is built in."""
STEP_HALF_BITS = tl.constexpr(0x4AC00000)
EVEN_BIAS = tl.constexpr(0x4AC00000 * 0x11111111 & 0xFFFFFFFF)
"""Eight codes' bias of ``STEP_HALF_BITS``, each shifted to its nibble, summed modulo 2^32."""
EXPONENT_STEP = tl.constexpr(0x00800000)
ROUNDER = tl.constexpr(0x0B400000)
"""Added to the bits of a power of two gives ``1.5 * 2^22`` times it: its unit in the last place is half the power."""


@triton.jit
def to_bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def wide(x):
    """FP32 from any input dtype; BF16 by integers, since the interpreter's own cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """FP32 values of ``dtype`` as ``dtype``; BF16 by integers, see :func:`round_bf16`."""
    if dtype == tl.bfloat16:
        return (to_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_pair(low, high, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Both FP32 values rounded to nearest even in ``dtype`` and widened again."""
    if dtype == tl.float32:
        return low, high
    elif dtype == tl.float16:
        return low.to(tl.float16).to(tl.float32), high.to(tl.float16).to(tl.float32)
    elif PAIRS & HARDWARE:
        # One packed conversion and two moves for two values; separately it is two conversions and two moves.
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
        return from_bits(pair << 16), from_bits(pair & 0xFFFF0000)
    else:
        return round_bf16(low), round_bf16(high)


@triton.jit
def round_bf16(x):
    """FP32 to the nearest BF16 by integers: the interpreter's own cast truncates."""
    bits = to_bits(x)
    rounded = from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
    return tl.where(x == x, rounded, x)


@triton.jit
def round_block(x, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """:func:`round_pair` of all 16."""
    y = ()
    for i in tl.static_range(0, 16, 2):
        low, high = round_pair(x[i], x[i + 1], dtype, HARDWARE)
        y = y + (low, high)
    return y


@triton.jit
def hadamard(x, SIDE: tl.constexpr, dtype: tl.constexpr):
    """``x @ diag(signs) @ H16 / 4`` in FP32: ``signs / 4`` first, then butterflies of stride 1, 2, 4, 8."""
    y = ()
    for i in tl.static_range(0, 16, 2):
        low = x[i] * (0.25 * SIDE.signs[i])
        high = 0.25 * SIDE.signs[i + 1]
        if dtype == tl.float32:
            y = y + (low + x[i + 1] * high, low - x[i + 1] * high)
        else:
            # x / 4 is exact for 16-bit dtypes, so the fused form rounds as the two steps do.
            y = y + (tl.fma(x[i + 1], high, low), tl.fma(x[i + 1], -high, low))
    return butterflies(butterflies(butterflies(y, 2), 4), 8)


@triton.jit
def butterflies(y, STRIDE: tl.constexpr):
    """Sums and differences of what is ``STRIDE`` apart."""
    z = ()
    for i in tl.static_range(16):
        if i & STRIDE:
            z = z + (y[i - STRIDE] - y[i],)
        else:
            z = z + (y[i] + y[i + STRIDE],)
    return z


@triton.jit
def rotate(x, SIDE: tl.constexpr, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """:func:`hadamard` rounded to ``dtype``."""
    return round_block(hadamard(x, SIDE, dtype), dtype, HARDWARE)


@triton.jit
def block_amax(x):
    """Largest magnitude of a block, NaN-propagating, as a tree."""
    m = ()
    for i in tl.static_range(8):
        m = m + (tl.maximum(tl.abs(x[i]), tl.abs(x[i + 8]), propagate_nan=NAN),)
    return largest_of_8(m)


@triton.jit
def largest_of_8(m):
    for stage in tl.static_range(3):
        n = ()
        for i in tl.static_range(4 >> stage):
            n = n + (tl.maximum(m[i], m[i + (4 >> stage)], propagate_nan=NAN),)
        m = n
    return m[0]


@triton.jit
def hadamard_amax(x, SIDE: tl.constexpr):
    """:func:`block_amax` of :func:`hadamard` on 16-bit x, in about 20 instructions less per 16 elements where finite.

    A finite result equals that of :func:`block_amax`. A result that is infinite or NaN proves nothing, and the caller
    computes the block's amax again the plain way. The last stage of butterflies is left out: rounding is symmetric and
    monotonic, so ``max(|fl(a + b)|, |fl(a - b)|) = fl(|a| + |b|)``. The factor 1/4 comes last, as one multiplication.
    """
    y = ()
    for i in tl.static_range(0, 16, 2):
        low = x[i] * SIDE.signs[i]
        high = x[i + 1] * SIDE.signs[i + 1]
        y = y + (low + high, low - high)
    y = butterflies(butterflies(y, 2), 4)
    m = ()
    for i in tl.static_range(8):
        m = m + (tl.abs(y[i]) + tl.abs(y[i + 8]),)
    return 0.25 * largest_of_8(m)


@triton.jit
def operand_amax(x, SIDE: tl.constexpr, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """:func:`block_amax` after the side's rotation, if any. Rounding is monotonic: that of the largest is enough."""
    if SIDE.signs is None:
        return block_amax(x)
    else:
        amax = block_amax(hadamard(x, SIDE, dtype))
        amax, _ = round_pair(amax, amax, dtype, HARDWARE)
        return amax


@triton.jit
def outer_encode_scale(amax, numerator: tl.constexpr):
    """``S_enc = min(numerator / A, FLT_MAX)``, 1 where ``A`` or ``S_enc`` is 0."""
    scale = tl.minimum(tl.div_rn(tl.zeros_like(amax) + numerator, amax), FLT_MAX, propagate_nan=NAN)
    return tl.where((amax == 0) | (scale == 0), 1.0, scale)


@triton.jit
def to_e4m3(x, HARDWARE: tl.constexpr):
    """Bits of the nearest E4M3 (ties to even) of ``x >= 0``, saturating at 448; NaN is 0x7F. uint8.

    ``x.to(tl.float8e4nv)`` would not do. For sm_89 Triton cuts x off to FP16 before it rounds, so that what is a little
    above a tie becomes one. Elsewhere it converts two numbers at once; where the codes of two pairs meet in a word,
    ptxas 12.8 and 12.9 lose some of them (benchmarks/notes/quantize.md). Here each number is converted beside a 0.
    """
    if E4M3 & HARDWARE:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b16 codes;
            .reg .f32 zero;
            mov.f32 zero, 0f00000000;
            cvt.rn.satfinite.e4m3x2.f32 codes, zero, $1;
            cvt.u32.u16 $0, codes;
            }""",
            "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
        return code.to(tl.uint8)
    else:
        clamped = tl.minimum(x, E4M3_MAX)
        bits = to_bits(clamped)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # 2^14 has a last place of 2^-9, E4M3's subnormal step.
        subnormal = to_bits(clamped + 16384.0) - 0x46800000
        code = tl.where(clamped < 0.015625, subnormal, normal)
        return tl.where(x == x, code, E4M3_NAN).to(tl.uint8)


@triton.jit
def from_e4m3(code, HARDWARE: tl.constexpr):
    """FP32 value of E4M3 bits (uint8, sign 0)."""
    if E4M3 & HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.uint32)
        value = tl.where(wide < 8, wide.to(tl.float32) * 0.001953125, from_bits((wide << 20) + (120 << 23)))
        return tl.where(wide == E4M3_NAN, float("nan"), value)


@triton.jit
def reciprocal(x, HARDWARE: tl.constexpr):
    """``fl(1 / x)``; PTX's own reciprocal is as exact as its division and 4 instructions shorter."""
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def quotient(x, DIVISOR: tl.constexpr, FAST: tl.constexpr, HARDWARE: tl.constexpr):
    """``fl(x / DIVISOR)``; ``FAST`` promises that every x is 0 or at least 2^-100, and finite.

    Then a product by the rounded reciprocal and one step of correction (Markstein, IBM J. Res. Dev. 34, 1990) give
    what a division gives, in three instructions instead of ten and a branch. The interpreter fuses nothing.
    """
    if FAST and PAIRS & HARDWARE:
        q = x * (1.0 / DIVISOR)
        return tl.fma(tl.fma(q, -DIVISOR, x), 1.0 / DIVISOR, q)
    else:
        return tl.div_rn(x, tl.zeros_like(x) + DIVISOR)


@triton.jit
def element_encode_scale(scale, outer_decode_scale, HARDWARE: tl.constexpr):
    """``enc = min(1 / (s * S_dec), FLT_MAX)``."""
    return tl.minimum(reciprocal(scale * outer_decode_scale, HARDWARE), FLT_MAX, propagate_nan=NAN)


def _even_code_ptx() -> str:
    """:func:`even_code` of ``$1`` in PTX."""
    lines = [".reg .f32 a, s<3>;", ".reg .s32 c<3>;", "abs.f32 a, $1;"]
    for i, step in enumerate((STEP_HALF, STEP_ONE, STEP_TWO)):
        lines += [f"add.rn.f32 s{i}, a, 0f{unpack('I', pack('f', step.value))[0]:08X};", f"mov.b32 c{i}, s{i};"]
        lines += [f"add.s32 c{i}, c{i}, {-i * EXPONENT_STEP.value};"] * (i > 0)
    lines += ["min.s32 c0, c0, c1;", f"min.s32 c2, c2, {STEP_HALF_BITS.value + 7};", "min.s32 $0, c0, c2;"]
    return "\n".join(["{", *lines, "}"])


def _pack_ptx(has_bias: bool) -> str:
    """:func:`pack_even`, or without a bias :func:`pack_stochastic`, of the codes ``$1`` to ``$8`` and their values."""
    lines = [".reg .b32 m, s, t;"]
    if has_bias:
        lines += ["mov.b32 m, $8;", "shr.u32 s, $16, 28;"]
        for j in range(7, 0, -1):
            lines += ["shl.b32 m, m, 4;", f"add.u32 m, m, ${j};", f"shf.l.wrap.b32 s, ${8 + j}, s, 4;"]
        lines += [f"sub.u32 m, m, {EVEN_BIAS.value:#x};", "and.b32 s, s, 0x88888888;", "or.b32 $0, m, s;"]
    else:
        lines += ["mov.b32 m, 0;"]
        for j in range(8, 0, -1):
            lines += [f"and.b32 t, ${8 + j}, 0x80000000;", f"or.b32 t, t, ${j};", "shf.l.wrap.b32 m, t, m, 4;"]
        lines += ["mov.b32 $0, m;"]
    return "\n".join(["{", *lines, "}"])


EVEN_CODE = tl.constexpr(_even_code_ptx())
PACK_EVEN = tl.constexpr(_pack_ptx(True))
PACK_STOCHASTIC = tl.constexpr(_pack_ptx(False))
STOCHASTIC_CODE = tl.constexpr(
    """{
    .reg .f32 a, y;
    .reg .s32 m;
    abs.f32 a, $1;
    fma.rn.f32 y, a, 0f3F000000, 0f3F000000;
    max.f32 y, a, y;
    mov.b32 m, y;
    add.s32 m, m, $3;
    min.s32 m, m, $4;
    shl.b32 m, m, 6;
    add.s32 $0, m, $2;
    }"""
)
EVEN_MAGNITUDE = tl.constexpr(
    f"""{{
    .reg .f32 a, r;
    .reg .s32 c;
    abs.f32 a, $1;
    min.f32 a, a, 0f40C00000;
    mov.b32 c, a;
    and.b32 c, c, 0x7F800000;
    add.s32 c, c, {ROUNDER.value:#x};
    max.s32 c, c, {0x3F800000 + ROUNDER.value:#x};
    mov.b32 r, c;
    add.rn.f32 a, a, r;
    sub.rn.f32 $0, a, r;
    }}"""
)
STOCHASTIC_MAGNITUDE = tl.constexpr(
    """{
    .reg .f32 a, y;
    .reg .s32 m;
    abs.f32 a, $1;
    fma.rn.f32 y, a, 0f3F000000, 0f3F000000;
    max.f32 y, a, y;
    mov.b32 m, y;
    add.s32 m, m, $3;
    min.s32 m, m, $4;
    add.s32 m, m, $2;
    and.b32 m, m, 0xFFC00000;
    mov.b32 y, m;
    fma.rn.f32 a, y, 0f40000000, 0fBF800000;
    min.f32 $0, y, a;
    }"""
)
PACK_VALUES = tl.constexpr(
    """{
    .reg .f32 a, b;
    .reg .b32 c, d, s;
    mul.rn.f32 a, $1, $5;
    mul.rn.f32 b, $2, $5;
    mov.b32 c, a;
    mov.b32 d, b;
    and.b32 s, $3, 0x80000000;
    or.b32 c, c, s;
    and.b32 s, $4, 0x80000000;
    or.b32 d, d, s;
    prmt.b32 $0, c, d, 0x7632;
    }"""
)
"""Chains of a cast as one operation each: some of Triton's passes take time quadratic in the number of operations."""


@triton.jit
def packed(ASM: tl.constexpr, codes, v, first: tl.constexpr):
    """The uint32 that ``ASM`` makes of eight codes and eight values."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
        [codes[first], codes[first + 1], codes[first + 2], codes[first + 3],
         codes[first + 4], codes[first + 5], codes[first + 6], codes[first + 7],
         v[first], v[first + 1], v[first + 2], v[first + 3],
         v[first + 4], v[first + 5], v[first + 6], v[first + 7]],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def even_code(v, HARDWARE: tl.constexpr = 0):
    """E2M1 magnitude code of ``v`` to nearest even, plus ``STEP_HALF_BITS``: uint32.

    The grid is three lines in ``a = |v|``, and the code is ``min(rint(2a), rint(a) + 2, rint(a / 2) + 4, 7)``: together
    the lines are concave, offsets are even, and rounding is monotone. Each rint is one FP32 addition.
    """
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(EVEN_CODE, "=r,f", [v], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        a = tl.abs(v)
        half = (a + STEP_HALF).to(tl.int32, bitcast=True)
        one = (a + STEP_ONE).to(tl.int32, bitcast=True) - EXPONENT_STEP
        two = (a + STEP_TWO).to(tl.int32, bitcast=True) - 2 * EXPONENT_STEP
        code = tl.minimum(tl.minimum(half, one), tl.minimum(two, STEP_HALF_BITS + 7))
        return code.to(tl.uint32, bitcast=True)


@triton.jit
def even_magnitude(v, HARDWARE: tl.constexpr):
    """Magnitude in E2M1 of ``v`` to nearest even, without its code: FP32; 6 for NaN.

    The grid's step at ``a = |v|`` is half the power of two below ``a``, and 1/2 below 1. A number is rounded to a
    multiple of a step by adding, and taking off again, another one whose unit in the last place is the step.
    """
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(EVEN_MAGNITUDE, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        a = tl.minimum(tl.abs(v), 6.0)
        power = (to_bits(a) & 0x7F800000).to(tl.int32, bitcast=True)
        rounder = tl.maximum(power + ROUNDER, 0x3F800000 + ROUNDER).to(tl.float32, bitcast=True)  # one instruction
        return (a + rounder) - rounder


@triton.jit
def stochastic_code(v, random, bits: tl.constexpr, HARDWARE: tl.constexpr):
    """E2M1 magnitude code of ``v``, stochastic, in bits 28..30; the bits below are what rounding drops. uint32.

    ``(a + 1) / 2`` puts the subnormal range below ``a = 1`` next to the first binade; there it is the larger one. Half
    of a number is exact, so that one fused step rounds as two do.
    ``random``: from :func:`random_bits`.
    """
    # 0.5's pattern off, half a random step on, and a = 6 at most: one instruction.
    offset: tl.constexpr = (1 << (21 - bits)) - 0x3F000000
    limit: tl.constexpr = 0x40C00000 + offset
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            STOCHASTIC_CODE, "=r,f,r,r,r", [v, random, offset, limit], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        a = tl.abs(v)
        y = tl.maximum(a, tl.fma(a, 0.5, 0.5)).to(tl.int32, bitcast=True)
        return (tl.minimum(y + offset, limit).to(tl.uint32, bitcast=True) << 6) + random


@triton.jit
def stochastic_magnitude(v, random, bits: tl.constexpr, HARDWARE: tl.constexpr):
    """Magnitude in E2M1 of ``v``, stochastic, without its code: FP32. As :func:`stochastic_code`, but not shifted.

    Of NaN any number: the block scale that it is multiplied by is NaN then.
    """
    half: tl.constexpr = 1 << (21 - bits)
    limit: tl.constexpr = 0x40C00000 + half
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            STOCHASTIC_MAGNITUDE, "=f,f,r,r,r", [v, random, half, limit], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        a = tl.abs(v)
        y = tl.maximum(a, tl.fma(a, 0.5, 0.5)).to(tl.int32, bitcast=True)
        clamped = tl.minimum(y + half, limit)
        return undone(from_bits((clamped.to(tl.uint32, bitcast=True) + random) & 0xFFC00000))


@triton.jit
def undone(y):
    """Magnitude in E2M1 of ``y = max(a, (a + 1) / 2)``: ``a`` from 1 up; below, 1/2 and 3/4 are 0 and 1/2."""
    return tl.minimum(y, tl.fma(y, 2.0, -1.0))


def _philox_ptx() -> str:
    """Philox4x32-10 in PTX: words ``$0`` to ``$3`` of the key ``$4``, ``$5`` and the counter ``$6`` to ``$9``."""
    lines = [".reg .b32 k<2>, c<4>, h<2>;", ".reg .b64 p<2>;"]
    lines += [f"mov.b32 k{i}, ${4 + i};" for i in range(2)] + [f"mov.b32 c{i}, ${6 + i};" for i in range(4)]
    for number in range(_PHILOX_ROUNDS):
        if number:
            lines += [f"add.u32 k0, k0, {_PHILOX_W0:#x};", f"add.u32 k1, k1, {_PHILOX_W1:#x};"]
        lines += [f"mul.wide.u32 p0, c0, {_PHILOX_M0:#x};", f"mul.wide.u32 p1, c2, {_PHILOX_M1:#x};"]
        lines += ["mov.b64 {_, h1}, p1;", "mov.b64 {_, h0}, p0;"]
        lines += ["xor.b32 c0, h1, c1;", "xor.b32 c0, c0, k0;", "xor.b32 c2, h0, c3;", "xor.b32 c2, c2, k1;"]
        lines += ["mov.b64 {c1, _}, p1;", "mov.b64 {c3, _}, p0;"]
    lines += [f"mov.b32 ${i}, c{i};" for i in range(4)]
    return "\n".join(["{", *lines, "}"])


PHILOX = tl.constexpr(_philox_ptx())


@triton.jit
def philox(seed, c0, c1, c2, c3, HARDWARE: tl.constexpr):
    """Philox4x32-10. Each product is one 64-bit multiplication; ``tl.philox`` asks for its halves separately.

    In PTX it is one operation instead of 130, and some of Triton's passes take time quadratic in their number.
    """
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    if PAIRS & HARDWARE:
        return tl.inline_asm_elementwise(
            PHILOX, "=r,=r,=r,=r,r,r,r,r,r,r", [k0, k1, c0, c1, c2, c3],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for _ in tl.static_range(PHILOX_ROUNDS):
            p0 = c0.to(tl.uint64) * PHILOX_M0
            p1 = c2.to(tl.uint64) * PHILOX_M1
            c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
            c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
            c1 = p1.to(tl.uint32)
            c3 = p0.to(tl.uint32)
            k0 += PHILOX_W0
            k1 += PHILOX_W1
        return c0, c1, c2, c3


@triton.jit
def random_words(rng_ptr, block, row, stream, like, HARDWARE: tl.constexpr):
    """Philox4x32-10 of counter ``(block, row, draw, stream)`` under the seed: four uint32 like ``like >= 0``."""
    seed = tl.load(rng_ptr)
    draw = tl.load(rng_ptr + 1).to(tl.uint32)
    # Always 0. It ties the counter to the data's layout: otherwise the words are made in another one and converted
    # through shared memory, which costs more than making them.
    zero = tl.where(like < 0.0, 1, 0).to(tl.uint32)
    return philox(seed, zero + block.to(tl.uint32), row.to(tl.uint32), draw, stream.to(tl.uint32), HARDWARE)


@triton.jit
def in_the_whole(rng_ptr, block, row, stream):
    """Where ``block`` and ``row`` of a shard's operand lie in the whole tensor's, by an ``rng`` of four numbers."""
    side = stream & 1
    first_row, first_col = tl.load(rng_ptr + 2 + side), tl.load(rng_ptr + 3 - side)
    return block + (first_col // 16).to(tl.int32), row + first_row.to(tl.int32)


@triton.jit
def random_bits(words, low_words, position: tl.constexpr, bits: tl.constexpr, TOP: tl.constexpr):
    """``r << (TOP - bits)``, ``r`` the random bits of one position."""
    shift: tl.constexpr = TOP - 8 - 8 * (position % 4)
    word = words[position // 4]
    high = ((word << shift) if shift > 0 else (word >> -shift)) & (0xFF << (TOP - 8))
    if bits == 8:
        return high
    else:
        low = (low_words[position // 4] >> (8 * (position % 4))) & 0xFF
        return high | (low << (TOP - 16))


@triton.jit
def pack_even(codes, v, first: tl.constexpr, HARDWARE: tl.constexpr):
    """Eight codes of :func:`even_code` and their signs in one uint32, position ``first`` in the low nibble.

    A shift-and-add per code and a funnel shift per sign.
    """
    if PAIRS & HARDWARE:
        return packed(PACK_EVEN, codes, v, first)
    else:
        magnitudes = codes[first + 7]
        signs = to_bits(v[first + 7]) >> 28
        for j in tl.static_range(1, 8):
            magnitudes = (magnitudes << 4) + codes[first + 7 - j]
            signs = (signs << 4) | (to_bits(v[first + 7 - j]) >> 28)
        return (magnitudes - EVEN_BIAS) | (signs & 0x88888888)


@triton.jit
def pack_stochastic(codes, v, first: tl.constexpr, HARDWARE: tl.constexpr):
    """As :func:`pack_even`, for codes of :func:`stochastic_code`: a logic operation and a funnel shift each."""
    if PAIRS & HARDWARE:
        return packed(PACK_STOCHASTIC, codes, v, first)
    else:
        word = codes[first] * 0
        for j in tl.static_range(8):
            signed = codes[first + 7 - j] | (to_bits(v[first + 7 - j]) & 0x80000000)
            word = (word << 4) | (signed >> 28)
        return word


@triton.jit
def pack_native(v, first: tl.constexpr):
    """As :func:`pack`, by the hardware's E2M1 conversion (nearest even, saturating)."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 b0, b1, b2, b3;
        cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
        mov.b32 $0, {b0, b1, b2, b3};
        }""",
        "=r,f,f,f,f,f,f,f,f",
        [v[first], v[first + 1], v[first + 2], v[first + 3], v[first + 4], v[first + 5], v[first + 6], v[first + 7]],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def magnitude(code, STOCHASTIC: tl.constexpr):
    """FP32 value of a magnitude code as :func:`stochastic_code` or :func:`even_code` gives it."""
    exponent_and_mantissa = (code >> 6) & 0x01C00000 if STOCHASTIC else code << 22
    return undone(from_bits(exponent_and_mantissa + 0x3F000000))


@triton.jit
def decoded(magnitude, v, scale):
    """Bits of the FP32 value ``magnitude * scale`` with the sign of ``v``."""
    return to_bits(magnitude * scale) | (to_bits(v) & 0x80000000)


@triton.jit
def pack_values(magnitudes, v, scale, HARDWARE: tl.constexpr):
    """Words, each two BF16 values ``e2m1 * scale``, exact (at most 6 significant bits)."""
    words = ()
    for i in tl.static_range(0, len(v), 2):
        if PAIRS & HARDWARE:
            word = tl.inline_asm_elementwise(
                PACK_VALUES, "=r,f,f,f,f,f", [magnitudes[i], magnitudes[i + 1], v[i], v[i + 1], scale],
                dtype=tl.uint32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low = decoded(magnitudes[i], v[i], scale)
            high = decoded(magnitudes[i + 1], v[i + 1], scale)
            word = (low >> 16) | (high & 0xFFFF0000)
        words = words + (word,)
    return words


@triton.jit
def stack(words):
    """Two, four, eight or sixteen tensors [...] as one tensor [..., 2, 4, 8 or 16]."""
    if len(words) == 2:
        return tl.join(words[0], words[1])
    elif len(words) == 4:
        both = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        return tl.reshape(both, both.shape[:-2] + [4])
    elif len(words) == 8:
        even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
        odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
        both = tl.join(even, odd)
        return tl.reshape(both, both.shape[:-3] + [8])
    else:
        halves = tl.join(stack(words[:8]), stack(words[8:]))
        return tl.reshape(tl.permute(halves, [0, 2, 1]), halves.shape[:-2] + [16])


@triton.jit
def unstack8(x):
    """[n, 8] as eight tensors [n]."""
    x = tl.reshape(x, [x.shape[0], 2, 2, 2])
    even, odd = tl.split(x)
    x04, x26 = unstack4(even)
    x15, x37 = unstack4(odd)
    return x04[0], x15[0], x26[0], x37[0], x04[1], x15[1], x26[1], x37[1]


@triton.jit
def unstack4(x):
    """[n, 2, 2] as ``((x00, x10), (x01, x11))``."""
    low, high = tl.split(x)
    return tl.split(low), tl.split(high)


@triton.jit
def sixteenths(t):
    """Sixteen tensors [n], the i-th with element i of every sixteen neighbours of ``t``."""
    low, high = tl.split(tl.permute(tl.reshape(t, [t.numel // 16, 2, 8]), [0, 2, 1]))
    return unstack8(low) + unstack8(high)


@triton.jit
def scaled(y, scale):
    """Each of 16 tensors times ``scale``."""
    v = ()
    for i in tl.static_range(16):
        v = v + (y[i] * scale,)
    return v
