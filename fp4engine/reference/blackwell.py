"""The sum that Blackwell's FP4 tensor cores have been observed to form, as a model that any machine computes.

    partial[g]  = RNE32(sum over k in group g of left[m, k] * right[n, k])     groups of 64 terms in order, the last
                                                                               one as short as K makes it
    total       = RZ32(... RZ32(RZ32(0 + partial[0]) + partial[1]) ...)        each addition toward zero
    accumulator = total, or RNE(1024 * total) / 1024 on the optional grid

An element of E2M1 times an E4M3 scale is a multiple of 2^-10 and at most 2688, so a product is a multiple of 2^-20 and
a sum of 64 is below 2^29. That is 49 bits: FP64 sums a group exactly, in any order, with or without fused
multiply-adds. Every other step is one IEEE operation per element. So the bits are the same on every CPU and GPU, with
any library and any number of threads.

NVIDIA documents neither order nor rounding. The model is fitted to one kind of GPU, a GB200.
Source: arXiv 2609.02846, "Modeling observed native NVFP4 GEMM outputs".
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.constants import SUM_GROUP

BAND_ROWS = 256
"""Rows of the output that are summed at a time, so that they stay in a CPU's cache."""


class SumRules(NamedTuple):
    """What may be different in a sum by groups; the defaults are the model.

    Attributes:
        group: terms that are added exactly before the first rounding, at most 256.
        nearest_totals: whether groups are added to the nearest FP32 number and not toward zero.
        truncated_groups: whether the sum of a group is rounded toward zero and not to nearest even.
        grid: 1024 puts the result on multiples of 1/1024, nearest even. Observations fit with and without; near
            cancellation it erases small results.
    """

    group: int = SUM_GROUP
    nearest_totals: bool = False
    truncated_groups: bool = False
    grid: int | None = None


MODEL = SumRules()


def add_toward_zero(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` in FP32, rounded toward zero; NaN and infinities as IEEE addition has them.

    ``a + b`` is rounded to nearest, and its error is found exactly (Knuth's TwoSum). If the error points back to zero,
    the exact sum lies between the rounded one and its neighbour toward zero, and that neighbour is the result.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)).add_(b - part)
    return _step_to_zero(total, (error < 0) & (total > 0) | (error > 0) & (total < 0))


def sum_by_groups(left: Tensor, right: Tensor, rules: SumRules = MODEL) -> Tensor:
    """The accumulator of ``left @ right.T``: FP32 [M, N].

    Args:
        left, right: [M, K] and [N, K], E2M1 elements times E4M3 block scales, without outer factors.
    """
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    columns = zip(left.split(rules.group, 1), right.split(rules.group, 1), strict=True)
    groups = [(a.double(), b.double().T) for a, b in columns]
    for first in range(0, left.shape[0], BAND_ROWS):
        rows = slice(first, first + BAND_ROWS)
        band = total[rows].clone()
        for a, b in groups:
            band = _with_group(band, a[rows] @ b, rules)
        total[rows] = _on_grid(band, rules)
    return total


def sums_of_pairs(left: Tensor, right: Tensor, rules: SumRules = MODEL) -> Tensor:
    """The diagonal of :func:`sum_by_groups` of two matrices with as many rows: FP32 [M]."""
    total = torch.zeros(left.shape[0], dtype=torch.float32, device=left.device)
    for group in (left.double() * right.double()).split(rules.group, 1):
        total = _with_group(total, group.sum(1), rules)
    return _on_grid(total, rules)


def _with_group(total: Tensor, exact: Tensor, rules: SumRules) -> Tensor:
    """``total`` and the sum of another group, which is given in FP64."""
    partial = _truncated(exact) if rules.truncated_groups else exact.float()
    return total + partial if rules.nearest_totals else add_toward_zero(total, partial)


def _on_grid(total: Tensor, rules: SumRules) -> Tensor:
    return total if rules.grid is None else (total * rules.grid).round_().div_(rules.grid)


def _truncated(exact: Tensor) -> Tensor:
    """FP64 to the FP32 number next to it toward zero."""
    nearest = exact.float()
    return _step_to_zero(nearest, nearest.double().abs() > exact.abs())


def _step_to_zero(total: Tensor, too_far: Tensor) -> Tensor:
    return (total.view(torch.int32) - too_far.int()).view(torch.float32)
