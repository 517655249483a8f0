"""The sum by groups of 64, in the reference: against integers of any length, rule by rule."""

import itertools
import math
import struct

import pytest
import torch

from fp4engine.reference import SumRules, add_toward_zero, gemm, sum_by_groups
from tests.exact_sums import assert_same_bits, planted, spread, sums


@pytest.mark.parametrize("sigma", [0.0, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("k", [0, 1, 16, 48, 64, 65, 200, 333])
def test_every_bit_is_that_of_integers(k, sigma):
    left, right = spread(5, k, sigma, 1), spread(4, k, sigma, 2)
    assert_same_bits(sum_by_groups(left, right), sums(left, right))


def test_scales_that_are_far_apart():
    left, right = planted(5, 320, 3), planted(6, 320, 4)
    assert_same_bits(sum_by_groups(left, right), sums(left, right))
    assert (sum_by_groups(left, right) != left.float() @ right.float().T).any()


def test_more_rows_than_are_summed_at_a_time():
    left, right = spread(300, 100, 2.0, 1), spread(3, 100, 2.0, 2)
    assert_same_bits(sum_by_groups(left, right)[250:], sum_by_groups(left[250:], right))


def test_groups_are_those_of_the_rules():
    left, right = spread(6, 300, 3.0, 1), spread(7, 300, 3.0, 2)
    assert_same_bits(sum_by_groups(left, right, SumRules(group=32)), sums(left, right, 32))
    model = sum_by_groups(left, right)
    for other in (SumRules(group=128), SumRules(nearest_totals=True), SumRules(truncated_groups=True)):
        assert (sum_by_groups(left, right, other) != model).any(), other


def test_the_grid_comes_before_the_outer_factors_and_erases_what_cancels():
    left, right = spread(8, 128, 1.0, 1) / 256, spread(8, 128, 1.0, 2) / 256
    total, alpha = sum_by_groups(left, right), torch.tensor([[1 / 3]])
    on_grid = gemm(left, right, alpha, None, torch.float32, "blackwell", SumRules(grid=1024))
    assert_same_bits(on_grid, torch.round(total * 1024) / 1024 * alpha)
    tiny = torch.tensor([[2.0**-9]])
    assert float(sum_by_groups(tiny, tiny)) == 2.0**-18 and float(sum_by_groups(tiny, tiny, SumRules(grid=1024))) == 0


def below(value: float) -> float:
    """The FP32 number next to ``value`` > 0 toward zero."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<i", bits - 1))[0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (2.0**24, 1.0, 2.0**24),  # a tie
        (2.0**24, 1.5, 2.0**24),  # nearest is above
        (2.0**24, -0.25, below(2.0**24)),  # nearest is a power of two, and what lies below it is half as far away
        (2.0**40, -(2.0**-20), below(2.0**40)),  # FP64 does not hold the exact sum
        (2.0**40, 2.0**-20, 2.0**40),
        (3.0, -3.0, 0.0),
        (1.0, 2.0**-23, 1 + 2.0**-23),
    ],
)
def test_addition_toward_zero(a, b, expected):
    for sign, (x, y) in itertools.product((1, -1), ((a, b), (b, a))):
        got = float(add_toward_zero(torch.tensor([sign * x]), torch.tensor([sign * y])))
        assert got == sign * expected
        assert math.copysign(1, got) == 1 or expected, "cancellation gives +0"


def test_addition_toward_zero_of_what_is_not_finite():
    inf, nan = math.inf, math.nan
    a, b = torch.tensor([inf, -inf, inf, nan, 1.0]), torch.tensor([1.0, -inf, -inf, 2.0, nan])
    assert torch.equal(add_toward_zero(a, b).isnan(), (a + b).isnan())
    assert add_toward_zero(a, b)[:2].tolist() == [inf, -inf]


def test_order_of_factors_bias_and_rounding():
    """The sum, times alpha, plus the bias: each is one FP32 rounding, and the output's is the last."""
    left, right, bias = spread(4, 80, 2.0, 1), spread(5, 80, 2.0, 2), torch.randn(5)
    alpha = torch.rand(4, 1)
    want = (sum_by_groups(left, right) * alpha + bias).bfloat16()
    assert torch.equal(gemm(left, right, alpha, bias, torch.bfloat16, "blackwell"), want)


def test_threads_change_nothing():
    left, right = spread(600, 1000, 3.0, 1), spread(70, 1000, 3.0, 2)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(sum_by_groups(left, right))
    torch.set_num_threads(threads)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
