"""Casts on GPUs that are not here equal the reference: what ptxas has made for sm_80, sm_86, sm_89 and sm_90 (NumPy).

``make emulate`` runs all tests of ``test_quantize_kernels.py`` so, for one GPU at a time.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton

from fp4engine import ops, reference
from tests.emulated_gpu import emulated
from tests.parity.test_quantize_kernels import SPECS, STREAM, assert_same, make, run

BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    # capability, casts, dtype, distribution, shape, form; 70 columns are read one by one, 144 eight at once
    (80, "default forward", BF16, "normal", (33, 144), "values"),
    (80, "default backward", BF16, "normal", (33, 144), "codes"),
    (86, "default backward", BF16, "normal", (33, 144), "values"),
    (86, "16x16", BF16, "huge", (33, 144), "codes"),
    (89, "default backward", FP32, "normal", (80, 144), "codes"),
    (89, "4over6 mae", BF16, "normal", (80, 144), "codes"),
    (90, "default forward", BF16, "zeros", (33, 144), "codes"),
    (90, "default backward", BF16, "normal", (33, 144), "values"),
    (90, "default backward", BF16, "zeros", (33, 70), "codes"),
    (90, "16x16", BF16, "normal", (33, 70), "values"),
    (90, "row-scaled", BF16, "normal", (33, 144), "codes"),
]

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


def hold(x: torch.Tensor, name: str, form: str, amaxes: tuple[torch.Tensor | None, ...] = (None, None)) -> None:
    """Codes and scales of ``x``, or values, and its amaxes unless they are given, are the reference's."""
    specs, rng = SPECS[name], torch.tensor([0x1234_5678_9ABC, 77])
    *found, row, row_scales, col, col_scales = run(x, *specs, rng, form, amaxes)
    for side, (data, scales) in enumerate(((row, row_scales), (col, col_scales))):
        operand, spec = (x, x.T)[side], specs[side]
        want = reference.quantize(operand, spec, amax=amaxes[side], rng=rng, stream=STREAM | side)
        assert_same(found[side], want.amax, f"amax, side {side}")
        if form == "codes":
            assert_same(scales, want.scale_inv, f"scales, side {side}")
            assert_same(data, want.codes, f"codes, side {side}")
        else:
            assert_same(data, reference.decode(want.codes, want.scale_inv, spec).bfloat16(), f"values, side {side}")


@pytest.mark.parametrize(("capability", "name", "dtype", "distribution", "shape", "form"), CASES)
def test_bytes_are_the_references(capability, name, dtype, distribution, shape, form):
    with emulated(capability):
        hold(make(distribution, *shape, dtype), name, form)


@pytest.mark.parametrize("capability", [86, 90], ids=["without E4M3 conversions", "with"])
def test_nan_and_infinity_under_an_amax_that_is_given(capability):
    """A finite amax sends the block of a NaN through words, where its scale is NaN and its codes are 0."""
    x = make("normal", 33, 144, BF16)
    amaxes = tuple(operand.float().abs().max().reshape(1) for operand in (x, x))
    x[17, 21], x[30, 100], x[31, 3] = float("nan"), float("inf"), float("-inf")
    with emulated(capability):
        hold(x, "default backward", "codes", amaxes)


def test_an_amax_of_both_sides():
    x = make("outliers", 130, 200, BF16)
    with emulated(90):
        found = ops.amax(x, *SPECS["default forward"], backend="triton")
    for side, (operand, spec, amax) in enumerate(zip((x, x.T), SPECS["default forward"], found, strict=True)):
        assert_same(amax, reference.amax(operand, spec), f"side {side}")
