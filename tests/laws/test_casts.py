"""Laws of a whole operand: scales, codes, sides, rotation, random stream."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fp4engine import Quantizer, reference
from fp4engine.formats import E4M3, UE5M3, CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule, Signs, fp8
from fp4engine.reference.hadamard import rotate
from fp4engine.reference.philox import rotation_signs
from fp4engine.reference.scaling import from_stored, to_stored
from fp4engine.tensor import Operand
from fp4engine.testing import assert_codes_adjacent, assert_codes_bitwise
from fp4engine.testing.strategies import matrices, nvfp4_specs

DRAW = torch.tensor([99, 1])


def cast(x: Tensor, spec: CastSpec, rng: Tensor = DRAW, stream: int = 0, amax: Tensor | None = None) -> Operand:
    return Operand(spec, *x.shape, *reference.quantize(x, spec, rng=rng, stream=stream, amax=amax))


def levels(operand: Operand) -> Tensor:
    """Elements with their signs on E2M1, as stored, without any scale."""
    return reference.unpack(operand.codes)


# Scales and elements


@given(x=matrices(), spec=nvfp4_specs(stochastic=False))
def test_the_cast_is_odd(x: Tensor, spec: CastSpec) -> None:
    assume(x.dtype == torch.float32 or spec.rotation is None)
    positive, negative = cast(x, spec), cast(-x, spec)
    assert torch.equal(positive.scale_inv.view(torch.uint8), negative.scale_inv.view(torch.uint8))
    assert torch.equal(positive.amax, negative.amax)
    assert torch.equal(positive.dequantize(), -negative.dequantize())


@given(x=matrices(), spec=nvfp4_specs(stochastic=False))
def test_the_cast_is_monotone_within_a_block(x: Tensor, spec: CastSpec) -> None:
    operand = cast(x, spec)
    values = reference.cast.prepare(x, spec, None, 0)
    decoded = reference.decode(operand.codes, operand.scale_inv, spec)
    order = values.view(-1, 16).argsort(dim=1, stable=True)
    assert (decoded.view(-1, 16).gather(1, order).diff(dim=1) >= 0).all()


@given(x=matrices(amplitudes=(1.0,)), spec=nvfp4_specs(rotated=False, searched=False))
def test_every_element_takes_a_neighbour_on_its_scaled_grid(x: Tensor, spec: CastSpec) -> None:
    """Whatever the rounding, no element lies a grid step away from truncation."""
    assume(not spec.scale_rule.is_four_over_six)
    assert_codes_adjacent(cast(x, spec), cast(x, spec.replace(rounding=RoundingMode.TRUNCATE)))


@given(
    x=matrices(amplitudes=(1.0,), dtypes=(torch.float32,)),
    spec=nvfp4_specs(stochastic=False, rotated=False, searched=False),
)
def test_quantizing_decoded_values_again_changes_nothing(x: Tensor, spec: CastSpec) -> None:
    """Where block scales are normal E4M3 numbers; a subnormal scale is too coarse to reproduce itself."""
    assume(not spec.scale_rule.is_four_over_six)
    first = cast(x, spec)
    scales = first.scale_inv.float()
    assume(bool(((scales == 0) | (scales >= 2**-6)).all()))
    values = first.dequantize()
    second = cast(values, spec)
    assert torch.equal(first.scale_inv.view(torch.uint8), second.scale_inv.view(torch.uint8))
    assert torch.equal(levels(first) % 8, levels(second) % 8)
    torch.testing.assert_close(second.dequantize(), values, rtol=2**-22, atol=0)


@given(
    x=matrices(amplitudes=(1.0,), dtypes=(torch.float32,)),
    spec=nvfp4_specs(),
    exponent=st.integers(-99, 99),
)
def test_amplitude_does_not_matter(x: Tensor, spec: CastSpec, exponent: int) -> None:
    """From 1e-30 to 1e30, a power of two moves the outer amax and nothing else."""
    assume(spec.scale_rule is not ScaleRule.FOUR_OVER_SIX_MSE or abs(exponent) <= 30)
    x = torch.where(x.abs() < 1e-3, 0, x)
    one, other = cast(x, spec), cast(x * 2.0**exponent, spec)
    assert torch.equal(one.amax * 2.0**exponent, other.amax)
    assert torch.equal(one.scale_inv.view(torch.uint8), other.scale_inv.view(torch.uint8))
    assert torch.equal(one.codes, other.codes)


@pytest.mark.parametrize("exponent", [-90, 90])
def test_four_over_six_by_squares_takes_six_where_squares_leave_fp32(exponent: int) -> None:
    """The peer's bytes: every error is 0 or Inf there, the candidates tie, and the cast is the plain one."""
    x = torch.randn(32, 64) * 2.0**exponent
    spec = CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE)
    assert_codes_bitwise(cast(x, spec), cast(x, spec.replace(scale_rule=ScaleRule.AMAX)))


@given(x=matrices(), spec=nvfp4_specs(), more=st.integers(1, 40))
def test_zero_columns_at_the_end_are_the_padding(x: Tensor, spec: CastSpec, more: int) -> None:
    wide = cast(torch.nn.functional.pad(x, (0, more)), spec)
    narrow = cast(x, spec)
    assert torch.equal(narrow.amax, wide.amax)
    assert torch.equal(narrow.codes, wide.codes[:, : narrow.codes.shape[1]])
    assert torch.equal(
        wide.codes[:, narrow.codes.shape[1] :] & 0x77, torch.zeros(()).expand_as(wide.codes[:, narrow.codes.shape[1] :])
    )


@given(x=matrices(), spec=nvfp4_specs())
def test_a_given_amax_equal_to_the_operands_own_changes_nothing(x: Tensor, spec: CastSpec) -> None:
    assert_codes_bitwise(cast(x, spec, amax=reference.amax(x, spec, DRAW)), cast(x, spec))


@given(x=matrices(), spec=nvfp4_specs(stochastic=False))
def test_each_row_has_its_own_outer_scale_under_row_scaling(x: Tensor, spec: CastSpec) -> None:
    spec = spec.replace(outer=Outer.ROW, block=(1, 16))
    whole = cast(x, spec)
    for row in range(x.shape[0]):
        alone = cast(x[row : row + 1], spec.replace(outer=Outer.TENSOR))
        assert torch.equal(whole.amax[row : row + 1], alone.amax)
        assert torch.equal(whole.codes[row : row + 1], alone.codes)


# Block scales in UE5M3


WIDE = CastSpec(scale=UE5M3, scale_bound=UE5M3.max_value, outer=Outer.NONE)


def test_every_code_of_ue5m3_reads_back_and_their_order_is_that_of_the_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = from_stored(codes, UE5M3)
    assert values[[0, 1, 8, 120, 254]].tolist() == [0, 2.0**-17, 2.0**-14, 1, 114688]
    assert (values[:255].diff() > 0).all() and values[255].isnan()
    assert torch.equal(to_stored(values, UE5M3), codes)
    beyond = torch.tensor([2.0**-18, 2.0**-18 * 1.01, 1e30, float("inf")])
    assert to_stored(beyond, UE5M3).tolist() == [0, 1, 254, 254]


@given(exponents=st.lists(st.integers(-17, 15), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_ue5m3_takes_the_nearest_value(exponents: list[int], seed: int) -> None:
    scales = torch.rand(len(exponents), generator=torch.Generator().manual_seed(seed)) + 1
    scales = torch.ldexp(scales, torch.tensor(exponents))
    grid = from_stored(torch.arange(255, dtype=torch.uint8), UE5M3).double()
    error = (from_stored(to_stored(scales, UE5M3), UE5M3).double() - scales).abs()
    assert torch.equal(error, (scales.double()[:, None] - grid).abs().amin(1))


@given(x=matrices(amplitudes=(1.0,), dtypes=(torch.float32,)), exponent=st.integers(-4, 12))
def test_a_power_of_two_moves_ue5m3_scales_and_nothing_else(x: Tensor, exponent: int) -> None:
    """Without an outer scale, as long as block scales are normal: from 2^-14 to 114,688."""
    x = torch.where(x.abs() < 1e-2, 0, x)
    one, other = cast(x, WIDE), cast(x * 2.0**exponent, WIDE)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(from_stored(one.scale_inv, UE5M3) * 2.0**exponent, from_stored(other.scale_inv, UE5M3))
    assert torch.equal(one.amax, other.amax), "a constant"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "spec", [WIDE, CastSpec(outer=Outer.NONE), CastSpec(outer=Outer.NONE, scale_rule=ScaleRule.FOUR_OVER_SIX_MAE)]
)
def test_what_is_not_finite_stays_so_without_an_outer_scale(spec: CastSpec, value: float) -> None:
    x = torch.randn(2, 64)
    x[1, 20] = value
    decoded = cast(x, spec).dequantize()
    assert decoded[0].isfinite().all() and decoded[1, 16:32].isnan().all() and decoded[1, 32:].isfinite().all()


# Sides


@given(x=matrices(), spec=nvfp4_specs(stochastic=False))
def test_columnwise_is_rowwise_of_the_transposed(x: Tensor, spec: CastSpec) -> None:
    quantizer = Quantizer(spec, spec)
    for tensor in (x, x.T.contiguous().T, torch.stack([x, x], 2)[..., 0]):
        assert_codes_bitwise(quantizer.quantize(tensor).columnwise, quantizer.quantize(x.T).rowwise)


@given(x=matrices(), spec=nvfp4_specs(stochastic=False, rotated=False))
def test_both_sides_agree_under_16x16_scaling(x: Tensor, spec: CastSpec) -> None:
    assume(not spec.scale_rule.is_four_over_six)
    spec = spec.replace(block=(16, 16), outer=Outer.TENSOR)
    quantized = Quantizer(spec, spec).quantize(x)
    rows, cols = x.shape
    assert torch.equal(levels(quantized.rowwise)[:, :cols], levels(quantized.columnwise)[:, :rows].T)
    assert torch.equal(quantized.rowwise.dequantize(), quantized.columnwise.dequantize().T)


# Rotation


@pytest.mark.parametrize("signs", [Signs.FIXED, Signs.NONE, Signs.DGRAD, Signs.WGRAD])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_rotation_is_orthogonal(size: int, signs: Signs) -> None:
    vector = rotation_signs(Rotation(size, signs), DRAW, 0, torch.device("cpu"))
    matrix = rotate(torch.eye(size), vector, torch.float32)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-6)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))
    assert torch.equal(matrix[0].sign() * vector[0], torch.ones(size)), "Sylvester order: row 0 is all ones"


@given(seed=st.integers(0, 99), tokens=st.integers(1, 70), size=st.sampled_from([16, 32, 64, 128]))
def test_two_rotated_operands_multiply_as_if_none_were(seed: int, tokens: int, size: int) -> None:
    """``(dy^T H)(x^T H)^T = dy^T x``, ragged token counts padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    grad_output, x = (torch.randn(tokens, n, generator=generator) for n in (24, 40))
    spec = CastSpec(rotation=Rotation(size))
    left, right = (reference.cast.prepare(t.T, spec, None, 0) for t in (grad_output, x))
    error = left @ right.T - grad_output.T @ x
    assert error.abs().max() <= 1e-5 * (1 + (grad_output.abs().T @ x.abs()).max())


def test_largest_bfloat16_values_of_any_signs_stay_finite_where_their_sum_does() -> None:
    top = torch.finfo(torch.bfloat16).max
    signs = rotation_signs(Rotation(), None, 0, torch.device("cpu"))
    x = torch.zeros(1, 16)
    x[0, :4] = top
    assert rotate(x * signs, signs, torch.bfloat16).isfinite().all()


def test_what_has_a_graph_is_rotated_alike() -> None:
    x, spec = torch.randn(4, 32), CastSpec(rotation=Rotation())
    want = reference.quantize(x, spec)
    assert all(map(torch.equal, reference.quantize(x.clone().requires_grad_(), spec), want))


# Random stream


@given(x=matrices(max_rows=24), spec=nvfp4_specs(stochastic=True, rotated=False), data=st.data())
def test_rows_draw_the_same_alone_and_together(x: Tensor, spec: CastSpec, data) -> None:
    assume(spec.block[0] == 1)
    rows = data.draw(st.integers(1, x.shape[0]))
    whole = cast(x, spec)
    amax = whole.amax[:rows] if spec.outer is Outer.ROW else whole.amax
    part = cast(x[:rows], spec, amax=amax)
    assert torch.equal(part.codes, whole.codes[:rows])


@given(x=matrices(max_rows=24), spec=nvfp4_specs(stochastic=True, rotated=False), data=st.data())
def test_blocks_draw_the_same_alone_and_together(x: Tensor, spec: CastSpec, data) -> None:
    assume(spec.outer is Outer.TENSOR)
    whole = cast(x, spec)
    cols = 16 * data.draw(st.integers(1, whole.codes.shape[1] // 8))
    part = cast(x[:, :cols], spec, amax=whole.amax)
    assert torch.equal(part.codes, whole.codes[:, : cols // 2])


def test_seed_draw_stream_and_side_all_change_the_codes() -> None:
    x = torch.randn(64, 64)
    spec = CastSpec(rounding=RoundingMode.STOCHASTIC)
    base = cast(x, spec)
    assert_codes_bitwise(cast(x, spec), base)
    for other in (
        cast(x, spec, torch.tensor([98, 1])),
        cast(x, spec, torch.tensor([99, 2])),
        cast(x, spec, stream=1),
        cast(x, spec, stream=1 << 8),
    ):
        assert_codes_adjacent(other, base)
        assert 0.1 < (levels(other) != levels(base)).float().mean() < 0.9


@given(x=matrices())
def test_sixteen_bits_agree_with_eight_wherever_eight_decide(x: Tensor) -> None:
    eight = CastSpec(rounding=RoundingMode.STOCHASTIC)
    assert_codes_adjacent(cast(x, eight), cast(x, eight.replace(random_bits=16)))


def test_a_stochastic_cast_demands_its_stream() -> None:
    with pytest.raises(ValueError, match="needs rng"):
        reference.quantize(torch.ones(1, 16), CastSpec(rounding=RoundingMode.STOCHASTIC))


# Corrections


@pytest.mark.parametrize("correction", [Correction.EDEN16, Correction.EDEN128, Correction.SCALAR])
def test_a_correction_restores_the_projection_onto_the_original(correction: Correction) -> None:
    """``<y, q>`` falls short of ``<y, y>`` under nearest rounding, and meets it once corrected."""
    y = torch.randn(1024, 512)
    spec = CastSpec(scale_bound=256.0)

    def shortfall(operand: Operand) -> float:
        return float(1 - (y * operand.dequantize()).sum() / (y * y).sum())

    aligned = spec.replace(scale_rule=ScaleRule.ALIGNED)
    assert shortfall(cast(y, aligned)) > 2e-3
    assert abs(shortfall(cast(y, aligned.replace(correction=Correction.EDEN16)))) < 1e-3

    assert shortfall(cast(y, spec)) > 2e-3
    assert abs(shortfall(cast(y, spec.replace(correction=correction)))) < 1e-3


@given(x=matrices(amplitudes=(1.0,)))
def test_four_over_six_never_has_the_larger_error(x: Tensor) -> None:
    for rule, power in ((ScaleRule.FOUR_OVER_SIX_MAE, 1), (ScaleRule.FOUR_OVER_SIX_MSE, 2)):
        chosen, plain = (
            cast(x, CastSpec(scale_bound=256.0, scale_rule=r)).dequantize() for r in (rule, ScaleRule.AMAX)
        )
        errors = [(y - x.float()).abs().double() ** power for y in (chosen, plain)]
        better, worse = (torch.nn.functional.pad(e, (0, -x.shape[1] % 16)).view(-1, 16).sum(1) for e in errors)
        assert (better <= worse * (1 + 1e-5) + 1e-12).all()


FP8 = fp8(E4M3)


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {"outer": Outer.ROW}),
        ({"outer": Outer.ROW}, {}),
        ({"outer": Outer.ROW}, {"outer": Outer.ROW}),
        ({}, {"rotation": Rotation()}),
        ({"rotation": Rotation()}, {}),
        ({"correction": Correction.SCALAR}, {}),
        ({"correction": Correction.SCALAR}, {"correction": Correction.SCALAR}),
    ],
    ids=str,
)
def test_two_sides_without_block_scales_are_what_each_is_alone(changes: tuple[dict, dict]) -> None:
    """One amax scales both only where it is the tensor's own."""
    x = torch.randn(32, 32) * torch.logspace(-1, 1, 32)[:, None]
    row, col = (FP8.replace(**change) for change in changes)
    both = Quantizer(row, col).quantize(x)
    assert_codes_bitwise(both.rowwise, Quantizer(row).quantize(x, columnwise=False).rowwise)
    assert_codes_bitwise(both.columnwise, Quantizer(col).quantize(x.T, columnwise=False).rowwise)
