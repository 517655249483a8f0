"""The edge-case table of numerics.md, every line, both sides."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine import NVFP4Quantizer, Quantizer, ops
from fp4engine.formats import E2M1, E4M3, E5M2, E8M0, CastSpec, Correction, ElementFormat, Outer, ScaleRule, fp8
from fp4engine.reference.cast import prepare
from fp4engine.tensor import Operand
from fp4engine.testing import assert_codes_bitwise

ALIGNED = CastSpec(scale_rule=ScaleRule.ALIGNED, scale_bound=256.0)
EDEN = CastSpec(correction=Correction.EDEN16, scale_bound=256.0)
ALIGNED_EDEN = ALIGNED.replace(correction=Correction.EDEN16)
QUANTIZERS = {
    "1x16": NVFP4Quantizer(),
    "16x16": NVFP4Quantizer(with_2d_quantization=True),
    "rht": NVFP4Quantizer(with_rht=True),
    "stochastic": NVFP4Quantizer(stochastic_rounding=True),
    "gradient": NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "row scaled": NVFP4Quantizer(row_scaled_nvfp4=True),
    "aligned": Quantizer(ALIGNED, ALIGNED),
    "MS-EDEN": Quantizer(EDEN, EDEN),
    "aligned MS-EDEN": Quantizer(ALIGNED_EDEN, ALIGNED_EDEN),
    "4over6 mae": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "4over6 mse 16x16": NVFP4Quantizer(
        with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"
    ),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sides(quantizer: Quantizer, x: Tensor) -> tuple[Operand, Operand]:
    quantized = quantizer.quantize(x)
    return quantized.rowwise, quantized.columnwise


def product(operand: Operand) -> Tensor:
    return product_of(operand, operand)


def product_of(left: Operand, right: Operand) -> Tensor:
    return ops.gemm(left, right, out_dtype=torch.float32)


@every_dtype
@every_quantizer
def test_all_zero(quantizer: Quantizer, dtype: torch.dtype) -> None:
    for operand in sides(quantizer, torch.zeros(33, 47, dtype=dtype)):
        assert not operand.amax.any()
        assert not operand.scale_inv.view(torch.uint8).any()
        assert not operand.codes.any()
        assert not operand.dequantize().any()
        assert torch.equal(product(operand), torch.zeros(operand.rows, operand.rows))


@every_quantizer
def test_a_zero_block_among_others(quantizer: Quantizer) -> None:
    x = torch.randn(48, 48)
    x[16:32, 16:32] = 0
    for operand in sides(quantizer, x):
        scales = operand.scale_inv.view(torch.uint8)
        assert not scales[16:32, 1].any()
        assert not operand.codes[16:32, 8:16].any()
        assert scales.count_nonzero() == scales.numel() - 16


@every_quantizer
def test_a_block_so_small_that_its_scale_underflows(quantizer: Quantizer) -> None:
    """The least E4M3 scale is 2^-9: a block below about 2^-10 / 448 of the outer amax has none.

    EDEN rounds scales stochastically, so its blocks have to be far smaller: of 1e-7, one in a hundred keeps a scale.
    """
    x = torch.ones(32, 32)
    x[:16, :16] = 1e-7 if quantizer.rowwise_spec.correction is Correction.NONE else 1e-20
    for operand in sides(quantizer, x):
        if operand.spec.outer is Outer.ROW:
            operand = operand._replace(amax=operand.amax.clamp(min=1))
        assert operand.scale_inv.float().isfinite().all()
        assert not operand.scale_inv[:16, 0].view(torch.uint8).any()
        assert not operand.dequantize()[:16, :16].any()
        assert operand.dequantize()[16:, 16:].any()


@every_quantizer
@pytest.mark.parametrize("amplitude", [1e-30, 1e-15, 1e15, 1e30])
def test_amplitude_leaves_the_relative_error_alone(quantizer: Quantizer, amplitude: float) -> None:
    if quantizer.rowwise_spec.scale_rule is ScaleRule.FOUR_OVER_SIX_MSE:
        amplitude = amplitude**0.25  # squares of errors have to stay in FP32, see tests/laws/test_casts.py
    x = torch.randn(128, 128)
    errors = [relative_errors(quantizer, x * factor) for factor in (1.0, amplitude)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def relative_errors(quantizer: Quantizer, x: Tensor) -> list[float]:
    """Per side, against the matrix that was quantized, rotated where the operand is."""
    errors = []
    quantized = quantizer.quantize(x, rng=torch.tensor([5, 1]))
    for operand, matrix in ((quantized.rowwise, x), (quantized.columnwise, x.T)):
        want = prepare(matrix, operand.spec, None, 0).double()
        errors.append(float((operand.dequantize().double() - want).norm() / want.norm()))
    return errors


def test_products_of_tiny_operands_lose_bits_and_then_everything() -> None:
    """Where ``alpha = A_left * A_right / 2688^2`` is subnormal, and where it is 0."""
    x = torch.ones(4, 64)
    for amaxes, least, most in ((8.6e-32, 0, 2**-22), (1e-37, 1e-3, 0.06), (5.2e-39, 0.3, 1.0), (5.0e-39, 1.0, 1.0)):
        left, right = (NVFP4Quantizer().quantize(x * factor).rowwise for factor in (1e-18, amaxes * 1e18))
        error = (product_of(left, right).double() / (64 * amaxes) - 1).abs()
        assert least <= error.min() and error.max() <= most


@every_quantizer
def test_bfloat16_maximum_everywhere(quantizer: Quantizer) -> None:
    x = torch.full((32, 48), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    operand = quantizer.quantize(x).rowwise
    assert operand.amax.isfinite().all()
    assert operand.scale_inv.float().isfinite().all()
    assert (operand.dequantize() / x.float() - 1).abs().max() < 0.2


@every_dtype
@every_quantizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_inf_leave_no_finite_product(quantizer: Quantizer, bad: float, dtype: torch.dtype) -> None:
    """Per tensor nothing is left; under row scaling the row is lost. A partner of zeros does not hide it."""
    x = torch.randn(33, 40).to(dtype)
    x[5, 7] = bad
    for operand, zeros, row in zip(
        sides(quantizer, x), sides(quantizer, x.nan_to_num(0, 0, 0) * 0), (5, 7), strict=True
    ):
        lost = slice(row, row + 1) if operand.spec.outer is Outer.ROW else slice(None)
        assert not operand.amax[lost].isfinite().any()
        assert not operand.dequantize()[lost].isfinite().any()
        assert not product(operand)[lost].isfinite().any()
        assert not ops.gemm(operand, zeros, out_dtype=torch.float32)[lost].isfinite().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_and_inf_under_power_of_two_scales_lose_their_block(bad: float) -> None:
    spec = CastSpec(block=(1, 32), scale=E8M0, scale_rule=ScaleRule.FLOOR, scale_bound=1.0, outer=Outer.NONE)
    x = torch.randn(4, 64)
    x[1, 40] = bad
    operand = Quantizer(spec, None).quantize(x, columnwise=False).rowwise
    assert operand.dequantize()[1, 32:].isnan().all()
    assert operand.dequantize().isnan().sum() == 32
    assert product(operand)[1].isnan().all()


@every_dtype
@every_quantizer
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (0, 5), (3, 0)], ids=str)
def test_empty(quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    quantized = quantizer.quantize(torch.empty(shape, dtype=dtype))
    for operand, (rows, cols) in ((quantized.rowwise, shape), (quantized.columnwise, shape[::-1])):
        assert operand.codes.shape == (rows, -(-cols // 16) * 8)
        assert operand.scale_inv.shape == (rows, -(-cols // 16))
        assert not operand.amax.any()
        assert torch.equal(product(operand), torch.zeros(rows, rows))
    assert quantized.dequantize().shape == shape
    assert quantized.dequantize().dtype == dtype


@every_quantizer
@pytest.mark.parametrize("cols", [1, 15, 17, 31])
def test_a_ragged_last_block_is_padded_with_zeros(quantizer: Quantizer, cols: int) -> None:
    x = torch.randn(16, cols)
    state = torch.tensor([5, 1])
    ragged = quantizer.quantize(x, rng=state).rowwise
    padded = quantizer.quantize(pad(x, (0, -cols % 16)), rng=state).rowwise
    assert torch.equal(ragged.amax, padded.amax)
    assert torch.equal(ragged.scale_inv.view(torch.uint8), padded.scale_inv.view(torch.uint8))
    assert torch.equal(ragged.codes, padded.codes)
    assert ragged.dequantize().shape == x.shape


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16], ids=str)
def test_arithmetic_is_fp32_from_the_inputs_own_values(quantizer: Quantizer, dtype: torch.dtype) -> None:
    x = torch.randn(40, 48).to(dtype)
    state = torch.tensor([5, 1])
    assert_codes_bitwise(quantizer.quantize(x, rng=state).rowwise, quantizer.quantize(x.float(), rng=state).rowwise)
    assert quantizer.quantize(x).dequantize().dtype == dtype


@every_quantizer
def test_any_stride_and_rank_is_the_contiguous_matrix(quantizer: Quantizer) -> None:
    base = torch.randn(6, 4, 96)
    state = torch.tensor([5, 1])
    views = {
        "three axes": base,
        "one axis": base[0, 0],
        "transposed": base.transpose(0, 1),
        "every other column": base[..., ::2],
        "reversed axes": base.permute(2, 1, 0),
        "expanded": base[:1].expand(5, -1, -1),
        "broadcast column": base[..., :1].expand(-1, -1, 32),
        "offset": base.flatten()[7:].unfold(0, 33, 5),
    }
    for name, view in views.items():
        got = quantizer.quantize(view, rng=state)
        want = quantizer.quantize(view.contiguous().view(-1, view.shape[-1]), rng=state)
        assert_codes_bitwise(got.rowwise, want.rowwise)
        assert_codes_bitwise(got.columnwise, want.columnwise)
        assert got.dequantize().shape == got.shape == view.shape, name


def test_what_is_no_matrix_of_numbers_is_refused() -> None:
    quantizer = NVFP4Quantizer()
    with pytest.raises(ValueError, match="at least one dimension"):
        quantizer(torch.tensor(1.0))
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"got {dtype}"):
            quantizer(torch.zeros(4, 16).to(dtype))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).max, 3e38, 1e-36, 1e-38, 1e-40])
def test_power_of_two_scales_at_both_ends_of_fp32_decode_to_what_was_cast(element: ElementFormat, value: float) -> None:
    x = torch.full((4, 32), value)
    spec = fp8(element, power_of_two=True)
    quantized = Quantizer(spec, spec).quantize(x)
    for side in (quantized.rowwise, quantized.columnwise):
        error = side.dequantize().double() / value - 1
        assert error.abs().max() <= 2.0 ** -(element.mantissa_bits + 1)


def test_an_amax_whose_quotient_is_beyond_fp32_is_not_rounded_to_a_small_one() -> None:
    """frexp gives infinity the exponent 0, and 3e38 was cast as 0.75."""
    spec = fp8(E2M1, power_of_two=True, margin=3)
    operand = Quantizer(spec).quantize(torch.full((1, 32), 3e38), columnwise=False).rowwise
    assert operand.amax == torch.tensor(3e38) and not operand.dequantize().isfinite().any()


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_a_power_of_two_scale_is_one_at_the_smallest_amplitudes(element: ElementFormat) -> None:
    spec = fp8(element, power_of_two=True)
    for value in (1e-30, 1e-37, 1e-39, 1e-45):
        operand = Quantizer(spec).quantize(torch.full((1, 32), value), columnwise=False).rowwise
        fraction, exponent = torch.frexp(operand.amax.double() / spec.numerator)
        assert fraction == 0.5 and exponent >= -126
