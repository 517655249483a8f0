"""Two operands compared: bitwise, or within one step of their grids."""

import torch
from torch import Tensor

from fp4engine.arguments import shown
from fp4engine.reference import unpack
from fp4engine.reference.rounding import decode
from fp4engine.tensor import Operand


def assert_codes_bitwise(got: Operand, want: Operand) -> None:
    """Codes, block scales and outer amaxes of both operands have the same bytes; a NaN amax equals any NaN.

    Raises:
        AssertionError: names the tensor, how many entries differ, and the first of them.
    """
    _assert_comparable(got, want)
    _assert_equal("codes", got.codes, want.codes)
    _assert_equal("scale_inv", _scale_bits(got), _scale_bits(want))
    assert got.amax is not None and want.amax is not None
    _assert_equal("amax", got.amax, want.amax)


def assert_codes_adjacent(got: Operand, want: Operand) -> None:
    """Every element is at most one step of its grid from its partner; +0 and -0 are no step apart."""
    _assert_comparable(got, want)
    steps = (_ranks(got) - _ranks(want)).abs()
    assert bool((steps <= 1).all()), f"{int((steps > 1).sum())} of {steps.numel()} elements are more than a step apart"


def assert_scales_adjacent(got: Operand, want: Operand) -> None:
    """Every block scale is at most one step of its format from its partner."""
    _assert_comparable(got, want)
    steps = (_scale_bits(got).int() - _scale_bits(want).int()).abs()
    assert bool((steps <= 1).all()), f"{int((steps > 1).sum())} of {steps.numel()} scales are more than a step apart"


def _assert_comparable(got: Operand, want: Operand) -> None:
    for operand in (got, want):
        if not isinstance(operand, Operand):
            raise ValueError(f"got and want must be operands, as a quantized tensor's rowwise is, got {shown(operand)}")
    for name in ("rows", "cols"):
        assert getattr(got, name) == getattr(want, name), f"{name}: {getattr(got, name)} and {getattr(want, name)}"
    assert got.spec is not None and want.spec is not None, "an unquantized operand has no codes"
    assert got.spec.element == want.spec.element, f"elements: {got.spec.element} and {want.spec.element}"


def _scale_bits(operand: Operand) -> Tensor:
    assert operand.scale_inv is not None, "the operand holds values, not codes"
    return operand.scale_inv.view(torch.uint8)


def _ranks(operand: Operand) -> Tensor:
    """Places of the codes' values among all values of the format; both zeros have one."""
    assert operand.spec is not None
    element = operand.spec.element
    codes = operand.codes if element.storage_bits == 8 else unpack(operand.codes)
    every = decode(torch.arange(1 << element.bits, dtype=torch.uint8, device=codes.device), element)
    _, ranks = every.unique(return_inverse=True)
    return ranks[codes.int()]


def _assert_equal(name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, f"{name}: shapes {tuple(got.shape)} and {tuple(want.shape)}"
    different = (got != want) & ~(got.isnan() & want.isnan())
    if bool(different.any()):
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(different.sum())} of {different.numel()} differ, first at {first}: "
            f"{got[first].item()} and {want[first].item()}"
        )
