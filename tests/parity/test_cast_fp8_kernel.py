"""The FP8 cast kernel equals the reference byte for byte.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import pytest
import torch

from fp4engine import ops, reference
from fp4engine.formats import E4M3, E5M2, FP32, CastSpec, Correction

SPECS = {
    "e4m3": CastSpec(E4M3, (0, 0), FP32, scale_bound=1.0, target=448.0),
    "e5m2": CastSpec(E5M2, (0, 0), FP32, scale_bound=1.0, target=57344.0),
    "margin": CastSpec(E4M3, (0, 0), FP32, scale_bound=1.0, target=112.0),
}


def make(kind: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, cols)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-30, 10, (rows, cols)).float())
    elif kind == "zeros":
        x = torch.zeros(rows, cols).copysign(x)
    elif kind == "nan":
        x[rows // 2, cols // 2] = float("nan")
    elif kind == "inf":
        x[0, -1] = float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "nan", "inf"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 63), (64, 128), (130, 200)])
@pytest.mark.parametrize(
    ("row", "col"), [("e4m3", "e4m3"), ("e5m2", None), (None, "e5m2"), ("e4m3", "e5m2"), ("margin", "margin")]
)
def test_bytes(kernel_device, row, col, shape, kind):
    dtype = torch.float32 if shape == (17, 63) else torch.bfloat16
    x = make(kind, *shape, dtype).to(kernel_device)
    specs = (SPECS.get(row), SPECS.get(col))
    amax = next(value for value in ops.amax(x, *specs, backend="triton") if value is not None)
    given = ops.quantize(x, *specs, rowwise_amax=amax, columnwise_amax=amax, backend="triton")
    one_given = ops.quantize(x, *specs, rowwise_amax=amax, backend="triton")
    operands = ops.quantize(x, *specs, backend="triton")
    for operand, spec, ours, *others in zip((x, x.T), specs, operands, given, one_given, strict=True):
        if spec is None:
            assert ours is None
            continue
        expected = reference.quantize(operand, spec)
        for twin in (ours, *others):
            torch.testing.assert_close(twin.amax, expected.amax, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(twin.data, expected.codes)


def test_columns_of_a_transposed_view(kernel_device):
    x = torch.randn(40, 24, device=kernel_device).T
    operand, _ = ops.quantize(x, SPECS["e4m3"], None, backend="triton")
    assert torch.equal(operand.data, reference.quantize(x, SPECS["e4m3"]).codes)


def test_what_the_kernel_leaves_out_is_refused(kernel_device):
    x, spec = torch.randn(32, 48, device=kernel_device), SPECS["e4m3"].replace(correction=Correction.SCALAR)
    for sides in ((spec, None), (None, spec), (spec, spec)):
        with pytest.raises(RuntimeError, match="does not cover correction=scalar"):
            ops.quantize(x, *sides, backend="triton")
    row, col = ops.quantize(x, spec, spec)
    assert torch.equal(row.amax, reference.quantize(x, spec).amax)
    assert torch.equal(col.amax, reference.quantize(x.T, spec).amax)
