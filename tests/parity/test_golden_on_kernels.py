"""The recorded cases of `tests/golden`, byte for byte, by the kernels that cover them."""

import os

import pytest

from fp4engine.kernels.quantize import supports
from tests.golden.test_golden import CASES, QUANTIZERS, assert_recorded, input_of, name_of, overflows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = 16 * 16
"""Elements; the interpreter would take minutes over the larger cases."""


@pytest.mark.parametrize(
    "case", [case for case in CASES["quantize"] if not INTERPRETED or len(input_of(case)) ** 2 <= SMALL], ids=name_of
)
def test_quantize_case(case: dict, kernel_device: str) -> None:
    quantizer, x = QUANTIZERS[case["config"]].with_backend("triton"), input_of(case).to(kernel_device)
    for spec in (quantizer.rowwise_spec, quantizer.columnwise_spec):
        covered, why = supports(spec, x.dtype)
        if not covered:
            pytest.skip(why)
    quantized = quantizer.quantize(x)
    assert_recorded(quantized.rowwise, case, "")
    if not overflows(case):
        assert_recorded(quantized.columnwise, case, "_t")
