"""Laws of one element meeting its grid."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp4engine.formats import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2, TWO_E2M1, ElementFormat, RoundingMode
from fp4engine.reference.rounding import decode, encode, pack, unpack

FORMATS = (E1M2, E2M1, E2M3, E3M2, E4M3, E5M2)
NEAREST = (RoundingMode.EVEN, RoundingMode.AWAY, RoundingMode.ZERO)
DETERMINISTIC = (*NEAREST, RoundingMode.TRUNCATE)

each_format = pytest.mark.parametrize("element", FORMATS, ids=str)
each_mode = pytest.mark.parametrize("mode", DETERMINISTIC, ids=lambda mode: mode.value)


def rounded(values: Tensor, element: ElementFormat, mode: RoundingMode = RoundingMode.EVEN) -> Tensor:
    return encode(values, element, mode, None, 8)


def max_code(element: ElementFormat) -> int:
    """Code of the format's largest magnitude."""
    positive = decode(torch.arange(1 << element.exponent_bits + element.mantissa_bits, dtype=torch.uint8), element)
    return positive.tolist().index(element.max_value)


def grid(element: ElementFormat) -> Tensor:
    """Every non-negative value of the format, by code."""
    return decode(torch.arange(max_code(element) + 1, dtype=torch.uint8), element)


def midpoints(element: ElementFormat) -> Tensor:
    """Exact in FP32: the formats have at most 4 significant bits."""
    values = grid(element)
    return (values[1:] + values[:-1]) / 2


def lists_of_floats(limit: float) -> st.SearchStrategy[Tensor]:
    floats = st.floats(-limit, limit, width=32, allow_subnormal=False)
    return st.lists(floats, min_size=1, max_size=40).map(torch.tensor)


def anywhere(element: ElementFormat) -> st.SearchStrategy[Tensor]:
    """Values on the scale of the grid, points of the grid, its midpoints and their neighbours."""
    special = torch.cat([grid(element), midpoints(element)])
    special = torch.cat([special, special.nextafter(special * 2), special.nextafter(special * 0)])
    near = st.lists(st.sampled_from(special.tolist()), min_size=1, max_size=40).map(torch.tensor)
    return lists_of_floats(element.max_value * 1.5) | lists_of_floats(4 * 2.0 ** (1 - element.bias)) | near


@pytest.mark.parametrize("mode", NEAREST, ids=lambda mode: mode.value)
@each_format
@given(data=st.data())
def test_no_grid_value_is_closer(element: ElementFormat, mode: RoundingMode, data) -> None:
    values = data.draw(anywhere(element))
    error = (decode(rounded(values, element, mode), element).double() - values.double()).abs()
    every = torch.cat([grid(element), -grid(element)]).double()
    assert torch.equal(error, (values.double()[:, None] - every).abs().amin(1))


@each_format
def test_a_tie_takes_the_even_code_the_larger_or_the_smaller_magnitude(element: ElementFormat) -> None:
    lower = torch.arange(max_code(element), dtype=torch.uint8)
    for sign in (1, -1):
        bit = 0 if sign > 0 else 1 << (element.bits - 1)
        ties = midpoints(element) * sign
        assert torch.equal(rounded(ties, element, RoundingMode.EVEN), lower + lower % 2 | bit)
        assert torch.equal(rounded(ties, element, RoundingMode.AWAY), lower + 1 | bit)
        assert torch.equal(rounded(ties, element, RoundingMode.ZERO), lower | bit)
        assert torch.equal(rounded(ties, element, RoundingMode.TRUNCATE), lower | bit)


@each_format
@given(data=st.data())
def test_truncation_takes_the_neighbour_toward_zero(element: ElementFormat, data) -> None:
    values = data.draw(anywhere(element)).clamp(-element.max_value, element.max_value)
    got = decode(rounded(values, element, RoundingMode.TRUNCATE), element).abs()
    below = torch.where(grid(element) <= values.abs()[:, None], grid(element), 0).amax(1)
    assert torch.equal(got, below)


def test_decision_points_of_e2m1() -> None:
    up_to = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for point, code in up_to.items():
        at = torch.tensor(point)
        below, above = at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(9.0))
        lower = int(rounded(below, E2M1))
        assert int(rounded(at, E2M1)) == code
        assert int(rounded(above, E2M1)) == lower + 1
        assert code in (lower, lower + 1)
    assert decode(torch.arange(16, dtype=torch.uint8), E2M1).tolist() == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]


@each_mode
@each_format
@given(data=st.data())
def test_rounding_is_monotone(element: ElementFormat, mode: RoundingMode, data) -> None:
    values = data.draw(anywhere(element)).sort().values
    decoded = decode(rounded(values, element, mode), element)
    assert torch.equal(decoded, decoded.sort().values)


@each_mode
@each_format
@given(data=st.data())
def test_rounding_is_odd(element: ElementFormat, mode: RoundingMode, data) -> None:
    values = data.draw(anywhere(element))
    assert torch.equal(
        decode(rounded(-values, element, mode), element), -decode(rounded(values, element, mode), element)
    )


@each_mode
@each_format
def test_grid_values_stay(element: ElementFormat, mode: RoundingMode) -> None:
    codes = torch.arange(max_code(element) + 1, dtype=torch.uint8)
    assert torch.equal(rounded(decode(codes, element), element, mode), codes)
    negative = codes[1:] | 1 << (element.bits - 1)
    assert torch.equal(rounded(decode(negative, element), element, mode), negative)


@each_format
def test_zero_sign_nan_and_saturation(element: ElementFormat) -> None:
    sign, largest = 1 << (element.bits - 1), max_code(element)
    tiny = 2.0 ** (-element.bias - element.mantissa_bits - 3)
    values = torch.tensor([0.0, -0.0, tiny, -tiny, float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
    assert rounded(values, element).tolist() == [0, 0, 0, sign, 0, largest, sign | largest, largest, sign | largest]


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=str)
@pytest.mark.parametrize("bits", [8, 16])
@given(data=st.data())
def test_stochastic_rounding_is_floor_of_z_plus_u(element: ElementFormat, bits: int, data) -> None:
    values = data.draw(anywhere(element)).clamp(-element.max_value, element.max_value)
    random = torch.tensor(data.draw(st.integers(0, 2**bits - 1)), dtype=torch.int32).expand_as(values)
    got = decode(encode(values, element, RoundingMode.STOCHASTIC, random, bits), element).double()
    magnitude = values.double().abs()
    smallest = 2.0 ** (1 - element.bias)
    magnitude = torch.where(values.abs() < smallest, (values.abs() + smallest).double() - smallest, magnitude)
    step = 2.0 ** (magnitude.clamp(min=smallest).log2().floor() - element.mantissa_bits)
    want = torch.floor(magnitude / step + (random + 0.5) / 2**bits) * step
    assert torch.equal(got.abs(), want.clamp(max=element.max_value))
    assert (got * values.double() >= 0).all()


@pytest.mark.parametrize("bits", [8, 16])
@each_format
def test_no_random_number_lifts_the_largest_magnitude(element: ElementFormat, bits: int) -> None:
    random = torch.arange(2**bits, dtype=torch.int32)
    largest = torch.full((2**bits,), float("inf"))
    codes = encode(largest, element, RoundingMode.STOCHASTIC, random, bits)
    assert torch.equal(codes, torch.full_like(codes, max_code(element)))


@pytest.mark.parametrize("bits", [8, 16])
@given(values=lists_of_floats(6.0))
def test_the_mean_over_all_random_numbers_is_the_value(bits: int, values: Tensor) -> None:
    """Half a random step is all the bias there is: 2^-9 of the grid's step with 8 bits."""
    random = torch.arange(2**bits, dtype=torch.int32)[:, None].expand(-1, len(values))
    drawn = decode(encode(values.expand_as(random), E2M1, RoundingMode.STOCHASTIC, random, bits), E2M1).double()
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    assert ((drawn.mean(0) - values).abs() <= step * (0.5 / 2**bits + 1e-6)).all()
    assert (drawn.abs().diff(dim=0) >= 0).all(), "a larger random number rounds no element down"


@given(rows=st.integers(0, 5), pairs=st.integers(0, 9), seed=st.integers(0, 99))
def test_pack_and_unpack(rows: int, pairs: int, seed: int) -> None:
    codes = torch.randint(16, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes)
    assert packed.shape == (rows, pairs)
    assert torch.equal(packed & 15, codes[:, 0::2]), "the even column is in the low nibble"
    assert torch.equal(unpack(packed), codes)


@given(values=anywhere(E2M1))
def test_the_second_term_is_eight_times_what_the_first_leaves(values: Tensor) -> None:
    codes = rounded(values, TWO_E2M1)
    first = rounded(values, E2M1)
    assert torch.equal(codes & 0xF, first)
    assert torch.equal(codes >> 4, rounded((values - decode(first, E2M1)) * 8, E2M1))
    error = (decode(codes, TWO_E2M1) - values).abs()
    bound = torch.where((values - decode(first, E2M1)).abs() > 0.75, 0.25, 0.125)  # 8 * 0.75 is E2M1's largest
    largest = TWO_E2M1.max_value
    assert (error[values.abs() <= largest] <= bound[values.abs() <= largest]).all()
    assert (decode(codes[values.abs() > largest], TWO_E2M1).abs() == largest).all()


def test_sums_of_two_terms_times_a_block_scale_are_exact_in_fp16() -> None:
    every = decode(torch.arange(256, dtype=torch.uint8), TWO_E2M1)
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = every[:, None] * scales
    assert every.max() == TWO_E2M1.max_value == 6.75
    assert torch.equal(values.half().float(), values)
    for element in (E1M2, E2M1, E2M3):  # what they may be multiplied by
        values = grid(element)[:, None] * scales
        assert torch.equal(values.half().float(), values)
