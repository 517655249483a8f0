"""The assertions fail when they should, and say where."""

import pytest
import torch

from fp4engine import NVFP4Quantizer
from fp4engine.formats import TWO_E2M1
from fp4engine.ops import Operand
from fp4engine.testing import assert_codes_adjacent, assert_codes_bitwise, assert_scales_adjacent


def operand():
    return NVFP4Quantizer()(torch.linspace(0.1, 6, 64).view(2, 32)).rowwise


def changed(name: str, step: int):
    same = operand()
    tensor = getattr(same, name).clone()
    tensor.view(torch.uint8)[0, 1] += step
    return same._replace(**{name: tensor})


def test_equal_operands_pass_and_nan_equals_nan() -> None:
    for check in (assert_codes_bitwise, assert_codes_adjacent, assert_scales_adjacent):
        check(operand(), operand())
    nan = operand()._replace(amax=torch.tensor([float("nan")]))
    assert_codes_bitwise(nan, nan._replace(amax=-nan.amax))


def test_one_step_is_adjacent_and_not_bitwise() -> None:
    assert_codes_adjacent(changed("data", 1), operand())
    assert_scales_adjacent(changed("scale_inv", 1), operand())
    with pytest.raises(AssertionError, match=r"codes: 1 of 32 differ, first at \(0, 1\)"):
        assert_codes_bitwise(changed("data", 1), operand())
    with pytest.raises(AssertionError, match="scale_inv: 1 of 4 differ"):
        assert_codes_bitwise(changed("scale_inv", 1), operand())
    with pytest.raises(AssertionError, match="amax: 1 of 1 differ"):
        assert_codes_bitwise(operand()._replace(amax=torch.ones(1)), operand())


def test_two_steps_are_not_adjacent() -> None:
    with pytest.raises(AssertionError, match="more than a step apart"):
        assert_codes_adjacent(changed("data", 2), operand())
    with pytest.raises(AssertionError, match="more than a step apart"):
        assert_scales_adjacent(changed("scale_inv", 2), operand())


def test_neighbours_of_two_terms_are_those_in_value() -> None:
    ones = NVFP4Quantizer()(torch.ones(1, 16)).rowwise
    assert ones is not None and ones.spec is not None
    spec = ones.spec.replace(element=TWO_E2M1)

    def of(code: int) -> Operand:
        return ones._replace(spec=spec, data=torch.full((1, 16), code, dtype=torch.uint8))

    assert_codes_adjacent(of(0x02), of(0x92))  # 1 and 1 - 1/16
    with pytest.raises(AssertionError, match="more than a step apart"):
        assert_codes_adjacent(of(0x07), of(0x08))  # 6 and -0


def test_other_shapes_do_not_compare() -> None:
    with pytest.raises(AssertionError, match="rows: 2 and 3"):
        assert_codes_bitwise(operand(), NVFP4Quantizer()(torch.ones(3, 32)).rowwise)


@pytest.mark.parametrize("check", [assert_codes_bitwise, assert_codes_adjacent, assert_scales_adjacent])
def test_what_is_no_operand_is_named(check) -> None:
    whole = NVFP4Quantizer()(torch.ones(2, 32))
    with pytest.raises(ValueError, match="must be operands, as a quantized tensor's rowwise is, got QuantizedTensor"):
        check(operand(), whole)
