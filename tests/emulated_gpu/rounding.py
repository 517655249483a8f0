"""Floating-point numbers as GPUs round them, bits of 16 and 8 in unsigned integers of 64."""

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
"""The magnitudes of E4M3, by their codes."""
COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def compared(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Comparisons of numbers; those with a final U are true of NaN too."""
    either = np.isnan(a) | np.isnan(b)
    if how in ("NAN", "NUM"):
        return either == (how == "NAN")
    ordered = COMPARISONS[how[:2]](a, b) & ~either
    return ordered | either if how.endswith("U") else ordered


def extreme(least: np.ndarray, numbers: list[np.ndarray], keeps_nan: bool) -> np.ndarray:
    """Of each place the least number or the largest."""
    smallest, largest = (np.minimum, np.maximum) if keeps_nan else (np.fmin, np.fmax)
    return np.where(least, reduce(smallest, numbers), reduce(largest, numbers))


def fused(a: float, b: float, c: float) -> float:
    """``a * b + c`` in FP64, rounded once."""
    if not np.isfinite([a, b, c]).all():
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def flushed(numbers: np.ndarray) -> np.ndarray:
    """FP32 numbers, with zeros of the same sign for those that are subnormal."""
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.copysign(np.float32(0), numbers), numbers)


def rounded(exact: np.ndarray, words: tuple[str, ...]) -> np.ndarray:
    """FP32 numbers, as the modifiers of an instruction say."""
    near = exact.astype(np.float32)
    beyond: dict[str, tuple[np.ndarray, float]] = {
        "RM": (near > exact, -np.inf), "RP": (near < exact, np.inf), "RZ": (np.abs(near) > np.abs(exact), 0.0),
    }  # fmt: skip
    for word in beyond.keys() & set(words):
        is_beyond, toward = beyond[word]
        near = np.where(is_beyond, np.nextafter(near, np.float32(toward)), near)
    return flushed(near) if "FTZ" in words else near


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Bits of FP64 rounded to BF16 once, to nearest even; NaN is 0x7FFF."""
    single = numbers.astype(np.float32)
    odd = np.where(single.astype(np.float64) == numbers, 0, 1)  # what is cut off matters only where it makes a tie
    toward = np.where(np.abs(single.astype(np.float64)) > np.abs(numbers), -1, 1)
    bits = single.view(np.uint32).astype(np.int64)
    tie = (bits & 0xFFFF) == 0x8000
    near = (bits + 0x7FFF + (bits >> 16 & 1) + np.where(tie, odd * toward, 0)) >> 16
    return np.where(np.isnan(numbers), 0x7FFF, near & 0xFFFF).astype(np.uint64)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits << np.uint64(16)).astype(np.uint32).view(np.float32).astype(np.float64)


def from_fp16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Codes of the nearest E4M3, ties to even, at most 448; NaN is 0x7F."""
    magnitudes = np.fmin(np.abs(numbers.astype(np.float64)), E4M3[-1])
    above = np.searchsorted(E4M3, magnitudes).clip(1, len(E4M3) - 1)
    down, up = magnitudes - E4M3[above - 1], E4M3[above] - magnitudes
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    codes = np.where(np.isnan(numbers), 0x7F, codes)
    return (codes | (np.signbit(numbers) * 0x80)).astype(np.uint64)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    magnitudes = np.append(E4M3, np.nan)[(codes & np.uint64(127)).astype(int)]
    return np.where(codes > 127, -magnitudes, magnitudes)


def toward_zero(numbers: np.ndarray) -> np.ndarray:
    """FP16 numbers, FP32 cut off."""
    near = numbers.astype(np.float16)
    return np.where(np.abs(near.astype(np.float32)) > np.abs(numbers), np.nextafter(near, np.float16(0)), near)


def joined(low: np.ndarray, high: np.ndarray, dtype: Any = np.float16) -> np.ndarray:
    """A word of two numbers."""
    first, second = (half.astype(dtype).view(np.uint16).astype(np.uint64) for half in (low, high))
    return first | (second << np.uint64(16))
