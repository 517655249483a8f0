"""The MX casts are microxcaling's, bit for bit, on every finite BF16 value."""

import hashlib

import pytest
import torch

from fp4engine import reference
from fp4engine.formats import FORMATS, RoundingMode, ScaleRule, mx, mx_ocp_floor

# First 16 hex digits of the SHA-256 of what microxcaling 7bc4195 returns, on the CPU, for
# mx.mx_ops._quantize_mx(every_bf16().float(), 8, element, axes=[-1], block_size=32, round=rounding) in FP32.
DIGESTS = {
    ("fp4_e2m1", "nearest"): "186f2e34ba26577b",
    ("fp4_e2m1", "even"): "b4fe85ccc3740b76",
    ("fp4_e2m1", "floor"): "c8323e232651fc17",
    ("fp6_e2m3", "nearest"): "0a2552a195d69ccd",
    ("fp6_e2m3", "even"): "b16998ec94f3829d",
    ("fp6_e2m3", "floor"): "d0381c744dce18d8",
    ("fp6_e3m2", "nearest"): "2033f61aa5ae7929",
    ("fp6_e3m2", "even"): "823e8e1416938599",
    ("fp6_e3m2", "floor"): "141bec3aa316bab9",
    ("fp8_e4m3", "nearest"): "6d519ed5b76a3cf0",
    ("fp8_e4m3", "even"): "979b0f5f995934cc",
    ("fp8_e4m3", "floor"): "e73771578fbf6504",
    ("fp8_e5m2", "nearest"): "ee6d70cb70cb2810",
    ("fp8_e5m2", "even"): "0c9ca556a07cad7f",
    ("fp8_e5m2", "floor"): "5f16b9f4aa4c0b17",
}
ROUNDINGS = {"nearest": RoundingMode.AWAY, "even": RoundingMode.EVEN, "floor": RoundingMode.TRUNCATE}


def every_bf16() -> torch.Tensor:
    """All finite BF16 values twice: in a scrambled order, so that blocks span binades, and in their own."""
    patterns = torch.arange(65536)
    both = torch.cat([(patterns * 40503 + 12345) % 65536, patterns])
    values = torch.where(both >= 32768, both - 65536, both).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), values, 0).view(-1, 64)


@pytest.mark.parametrize(("element", "rounding"), DIGESTS)
def test_same_bits(element: str, rounding: str) -> None:
    spec = mx(FORMATS[element[4:]], ScaleRule.FLOOR, ROUNDINGS[rounding])
    assert rounding != "nearest" or spec == mx_ocp_floor(FORMATS[element[4:]])
    x = every_bf16()
    decoded = reference.dequantize(*reference.quantize(x, spec), spec, x.shape[1], torch.float32)
    assert hashlib.sha256(decoded.numpy().tobytes()).hexdigest()[:16] == DIGESTS[element, rounding]
