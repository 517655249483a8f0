"""Device functions: elements of any small float format to codes and back, one by one.

The kernels that hold a block as 16 tensors have E2M1 roundings of their own, in fewer instructions
(:mod:`fp4engine.kernels.encode`); these serve every format, see :mod:`fp4engine.reference.rounding`.
"""

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from fp4engine.formats import E2M1, SECOND_TERM, ElementFormat
from fp4engine.kernels.encode import STEP_HALF_BITS, even_code, from_bits, to_bits

INTEGERS = tl.constexpr(2.0**23)
"""Adding this rounds a smaller number to an integer, ties to even, which is then the low bits."""
INTEGERS_BITS = tl.constexpr(0x4B000000)
EIGHTH = tl.constexpr(1 / SECOND_TERM)
EIGHTFOLD = tl.constexpr(float(SECOND_TERM))


@dataclass(frozen=True, eq=False)
class Grid:
    """An element format at compile time. Compared by identity, as from :meth:`of`.

    Attributes:
        bits: of a code, the sign in the highest; formats without one have a bit more, which is never set.
        mantissa: mantissa bits.
        bias: of the exponent.
        largest_term, largest_code: largest magnitude and its code.
        terms: of a code; all of the above are of one of them.
        largest: magnitude of all terms together.
        special: of the code of -0, 0 for none; reach: what is so near to it may become it.
    """

    bits: int
    mantissa: int
    bias: int
    largest_term: float
    largest_code: int
    is_e2m1: bool
    terms: int
    largest: float
    special: float
    reach: float

    @staticmethod
    @cache
    def of(element: ElementFormat) -> "Grid":
        term = element.term
        exponent, mantissa = term.max_exponent, term.mantissa_bits
        fraction = term.max_value / 2.0**exponent - 1
        code = ((exponent + term.bias) << mantissa) + int(fraction * (1 << mantissa))
        bits = term.exponent_bits + mantissa + 1
        is_e2m1 = (term.exponent_bits, mantissa, term.bias) == (E2M1.exponent_bits, E2M1.mantissa_bits, E2M1.bias)
        return Grid(
            bits, mantissa, term.bias, term.max_value, code, is_e2m1, element.terms, element.max_value,
            element.special, element.special_reach,
        )  # fmt: skip


@triton.jit
def encode_element(v, random, GRID: tl.constexpr, ROUNDING: tl.constexpr, RANDOM_BITS: tl.constexpr):
    """Codes of FP32 ``v``, see :func:`encode_term`; of two terms, the second of eight times what the first leaves."""
    code = encode_term(v, random, GRID, ROUNDING, RANDOM_BITS)
    if GRID.terms == 2:
        rest = (v - decode_term(code, GRID)) * EIGHTFOLD
        code = code | (encode_term(rest, random, GRID, ROUNDING, RANDOM_BITS) << GRID.bits)
    return code


@triton.jit
def encode_term(v, random, GRID: tl.constexpr, ROUNDING: tl.constexpr, RANDOM_BITS: tl.constexpr):
    """Codes of FP32 ``v``, saturating: uint32.

    NaN and -0.0 become code 0, a negative that rounds to zero keeps its sign, unless its code is special.

    Args:
        random: int32 in ``[0, 2^RANDOM_BITS)`` under ``"stochastic"``, else anything.
        ROUNDING: value of a :class:`fp4engine.formats.RoundingMode`.
    """
    v = tl.where(v == v, v, 0.0)
    a = tl.minimum(tl.abs(v), GRID.largest_term)
    if GRID.is_e2m1 and (ROUNDING == "even" or ROUNDING == "away" or ROUNDING == "stochastic"):
        code = e2m1_code(a, random, ROUNDING, RANDOM_BITS)
    elif ROUNDING == "stochastic":
        shift: tl.constexpr = 23 - GRID.mantissa
        least: tl.constexpr = 2.0 ** (1 - GRID.bias)
        binade: tl.constexpr = (128 - GRID.bias) << GRID.mantissa
        below: tl.constexpr = 1 << GRID.mantissa
        subnormal = a < least
        pattern = tl.where(subnormal, a + least, a).to(tl.int32, bitcast=True)
        pattern += (random << (shift - RANDOM_BITS)) + (1 << (shift - RANDOM_BITS - 1))
        code = (pattern >> shift) - tl.where(subnormal, binade, binade - below)
    else:
        # z is a times a power of two: integers are the grid's points, in the binade of a.
        exponent = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 128 - GRID.bias)
        z = a * ((GRID.mantissa + 254 - exponent) << 23).to(tl.float32, bitcast=True)
        if ROUNDING == "even":
            steps = (to_bits(z + INTEGERS) - INTEGERS_BITS).to(tl.int32, bitcast=True)
        else:
            steps = z.to(tl.int32)
            above = z - steps.to(tl.float32)
            if ROUNDING == "away":
                steps += (above >= 0.5).to(tl.int32)
            elif ROUNDING == "zero":
                steps += (above > 0.5).to(tl.int32)
        code = ((exponent - (128 - GRID.bias)) << GRID.mantissa) + steps
    sign = (v < 0).to(tl.uint32) << (GRID.bits - 1)
    if GRID.special > 0:
        sign = tl.where(code == 0, 0, sign)
    return tl.minimum(code, GRID.largest_code).to(tl.uint32, bitcast=True) | sign


@triton.jit
def e2m1_code(a, random, ROUNDING: tl.constexpr, RANDOM_BITS: tl.constexpr):
    """Magnitude code of ``a``, from 0 to 6: int32, in half the instructions that any format takes."""
    if ROUNDING == "even":
        code = even_code(a).to(tl.int32, bitcast=True) - STEP_HALF_BITS
    elif ROUNDING == "stochastic":
        # The subnormal range below 1 beside the first binade, as in stochastic_code.
        pattern = tl.maximum(a, tl.fma(a, 0.5, 0.5)).to(tl.int32, bitcast=True) - 0x3F000000
        code = (pattern + (random << (22 - RANDOM_BITS)) + (1 << (21 - RANDOM_BITS))) >> 22
    else:
        # Half a step onto the bits carries ties away from zero; 1/2 and 1, the subnormal steps, are compared with.
        normal = ((a.to(tl.int32, bitcast=True) + 0x00200000) >> 22) - 252
        code = tl.maximum(normal, tl.where(a >= 0.75, 2, (a >= 0.25).to(tl.int32)))
    return code


@triton.jit
def decode_element(code, GRID: tl.constexpr):
    """FP32 values of uint32 ``code``, exact; of the special code its magnitude."""
    if GRID.terms == 2:
        BELOW: tl.constexpr = (1 << GRID.bits) - 1
        value = decode_term(code & BELOW, GRID) + decode_term(code >> GRID.bits, GRID) * EIGHTH
    else:
        value = decode_term(code, GRID)
    if GRID.special > 0:
        value = tl.where(code == 1 << (GRID.bits - 1), GRID.special, value)
    return value


@triton.jit
def decode_term(code, GRID: tl.constexpr):
    """FP32 values of uint32 ``code`` of one term, exact.

    Exponent and mantissa, put where FP32 keeps the end of its own exponent and the start of its mantissa, are the value
    times a power of two, subnormals included.
    """
    magnitudes: tl.constexpr = (1 << (GRID.bits - 1)) - 1
    power: tl.constexpr = 2.0 ** (127 - GRID.bias)
    sign = (code >> (GRID.bits - 1)) << 31
    return from_bits(((code & magnitudes) << (23 - GRID.mantissa)) | sign) * power


@triton.jit
def neighbour_scale(code, OFFSET: tl.constexpr):
    """E4M3 bits (uint8, sign 0) ``OFFSET`` codes away, none below 0 or beyond 448; NaN stays."""
    moved = tl.minimum(tl.maximum(code.to(tl.int32) + OFFSET, 0), 0x7E)
    return tl.where(code == 0x7F, 0x7F, moved).to(tl.uint8)
