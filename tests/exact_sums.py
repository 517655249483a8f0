"""Operands whose block scales lie far apart, and the sum of `accumulation="blackwell"` in integers of any length."""

from fractions import Fraction

import torch
from torch import Tensor

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def spread(rows: int, cols: int, sigma: float, seed: int = 0) -> Tensor:
    """BF16 values: random codes, block scales log-normal. At a sigma of 6 they reach both ends of E4M3."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=generator)
    scales = (torch.randn(rows, -(-cols // 16), generator=generator) * sigma).exp() * 32
    scales = scales.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float().repeat_interleave(16, 1)[:, :cols]
    return (torch.cat([GRID, -GRID])[codes] * scales).bfloat16()


def planted(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Blocks whose scales are 2^17 apart, side by side."""
    values = spread(rows, cols, 0.0, seed).float() / 32
    high = torch.arange(cols) // 16 % 2 == 0
    return torch.where(high, values * 256, values * 2.0**-9).bfloat16()


def significand(value: Fraction) -> tuple[int, Fraction, Fraction]:
    """The 24-bit integer below ``value`` > 0 in its own unit, that unit, and what is left, in units."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    unit = Fraction(2) ** (exponent - 24 if value < Fraction(2) ** exponent else exponent - 23)
    whole = value // unit
    return whole, unit, value / unit - whole


def nearest_even(value: Fraction) -> Fraction:
    if value == 0:
        return value
    whole, unit, rest = significand(abs(value))
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return whole * unit if value > 0 else -whole * unit


def toward_zero(value: Fraction) -> Fraction:
    if value == 0:
        return value
    whole, unit, _ = significand(abs(value))
    return whole * unit if value > 0 else -whole * unit


def sums(left: Tensor, right: Tensor, group: int = 64) -> Tensor:
    """FP32 [M, N], from integers and fractions alone."""
    first, second = ((operand.double() * 2**10).long().tolist() for operand in (left, right))
    rows = []
    for a in first:
        rows.append([])
        for b in second:
            total = Fraction(0)
            for k in range(0, len(a), group):
                terms = sum(x * y for x, y in zip(a[k : k + group], b[k : k + group], strict=True))
                total = toward_zero(total + nearest_even(Fraction(terms, 2**20)))
            rows[-1].append(float(total))
    return torch.tensor(rows, dtype=torch.float64).view(len(first), len(second)).float()


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    words = torch.int32 if actual.dtype == torch.float32 else torch.int16
    wrong = actual.cpu().view(words) != expected.cpu().view(words)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"
