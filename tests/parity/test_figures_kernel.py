"""The kernel that counts an operand finds what plain PyTorch finds: counts exactly, sums of squares to rounding."""

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E4M3, CastSpec, Outer, fp8, mx
from fp4engine.inspect.statistics import OPERAND_SUMS, operand_figures, tensor_figures
from tests.parity.test_block_casts import BOOK, OTHERS
from tests.parity.test_quantize_kernels import make

SPECS = {spec.key: spec for spec in (*BOOK.values(), *OTHERS)}
COUNTED = {
    key: spec
    for key, spec in SPECS.items()
    if not spec.block[1] or (spec.scale.torch_dtype.itemsize == 1 and spec.block[0] <= 32)
}
RNG = torch.tensor([5, 9])
STREAM = 0x22
FEW = (CastSpec(), CastSpec(block=(16, 16)), mx(E4M3), CastSpec(outer=Outer.ROW), fp8(E4M3))


def assert_same(spec: CastSpec, x: torch.Tensor) -> None:
    rng = RNG.to(x.device)
    operand, _ = ops.quantize(x, spec, None, rng=rng, stream=STREAM, backend="reference")
    assert operand is not None
    ours, want = (operand_figures(x, operand, rng, STREAM, path) for path in ("triton", "reference"))
    names = dict(zip(OPERAND_SUMS, range(len(OPERAND_SUMS)), strict=True))
    inexact = [names["signal"], names["error"]]
    exact = [index for index in range(want.sums.numel()) if index not in inexact]
    assert ours.sums.shape == want.sums.shape
    assert ours.sums[exact].tolist() == want.sums[exact].tolist()
    torch.testing.assert_close(ours.sums[inexact], want.sums[inexact], rtol=1e-5, atol=0.0)
    assert torch.equal(ours.maxima, want.maxima)
    torch.testing.assert_close(ours.ranked[:, 2], want.ranked[:, 2], rtol=1e-5, atol=1e-30)
    apart = want.ranked[:, 2].diff().abs() > 1e-4 * want.ranked[:-1, 2]
    if bool(apart.all()):  # else two blocks may change places
        torch.testing.assert_close(ours.ranked[:-1], want.ranked[:-1], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("key", COUNTED)
def test_every_cast(kernel_device, key):
    spec = COUNTED[key]
    assert_same(spec, make("normal", 70, 200, torch.bfloat16).to(kernel_device))


@pytest.mark.parametrize("spec", FEW, ids=lambda spec: spec.label)
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 130), (130, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_and_dtypes(kernel_device, spec, shape, dtype):
    x = make("normal", *shape, dtype).to(kernel_device)
    assert_same(spec, x)
    assert_same(spec, x.T.contiguous().T)


@pytest.mark.parametrize("spec", FEW, ids=lambda spec: spec.label)
def test_extremes(kernel_device, spec):
    x = make("normal", 64, 128, torch.bfloat16).to(kernel_device)
    x[3, :40] *= 1e-30
    x[5, 2] = 1e30
    x[7] = 0.0
    assert_same(spec, x)
    x[9, 3], x[20, 70], x[40] = float("nan"), float("inf"), float("-inf")
    assert_same(spec, x)


def test_equal_runs_have_equal_figures(kernel_device):
    x = make("normal", 300, 400, torch.bfloat16).to(kernel_device)
    operand, _ = ops.quantize(x, CastSpec(), None)
    assert operand is not None
    first, second = (operand_figures(x, operand, None, 0, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (33, 300), (400, 17), (4, 1024)])
def test_tensors(kernel_device, shape, dtype):
    x = make("normal", *shape, dtype).to(kernel_device)
    for matrix in (x, x.T, x.T.contiguous().T):
        assert_same_tensor(matrix)
    x[0, 0], x[-1, -1] = float("nan"), float("-inf")
    assert_same_tensor(x)


def assert_same_tensor(matrix: torch.Tensor) -> None:
    ours, want = (tensor_figures(matrix, path) for path in ("triton", "reference"))
    assert ours.sums[0] == want.sums[0] and torch.equal(ours.maxima, want.maxima)
    torch.testing.assert_close(ours.sums, want.sums, rtol=1e-5, atol=0.0)
