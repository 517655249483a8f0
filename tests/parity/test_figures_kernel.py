"""The kernel that counts an operand finds what plain PyTorch finds: counts exactly, sums of squares to rounding."""

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E4M3, CastSpec, Outer, fp8, mx
from fp4engine.inspect.statistics import OPERAND_SUMS, operand_figures
from fp4engine.reference.cast import prepare
from tests.parity.test_block_casts import BOOK, OTHERS
from tests.parity.test_quantize_kernels import make

SPECS = {spec.key: spec for spec in (*BOOK.values(), *OTHERS)}
COUNTED = {
    key: spec
    for key, spec in SPECS.items()
    if not spec.block[1] or (spec.scale.torch_dtype.itemsize == 1 and spec.block[0] <= 32)
}
RNG = torch.tensor([5, 9])
FEW = (CastSpec(), CastSpec(block=(16, 16)), mx(E4M3), CastSpec(outer=Outer.ROW), fp8(E4M3))


def counted(spec: CastSpec, x: torch.Tensor) -> tuple[torch.Tensor, ops.Operand]:
    """``(values, operand)`` of a cast of ``x``."""
    rng = RNG.to(x.device)
    operand, _ = ops.quantize(x, spec, None, rng=rng, backend="reference")
    assert operand is not None
    return prepare(x, spec, rng, 0).to(x.dtype), operand


def assert_same(values: torch.Tensor, operand: ops.Operand) -> None:
    ours, want = (operand_figures(values, operand, path) for path in ("triton", "reference"))
    names = dict(zip(OPERAND_SUMS, range(len(OPERAND_SUMS)), strict=True))
    inexact = [names["signal"], names["error"]]
    exact = torch.ones(want.sums.numel(), dtype=torch.bool)
    exact[inexact] = False
    assert ours.sums.shape == want.sums.shape and torch.equal(ours.sums.cpu()[exact], want.sums.cpu()[exact])
    torch.testing.assert_close(ours.sums[inexact], want.sums[inexact], rtol=1e-5, atol=0.0)
    assert torch.equal(ours.maxima, want.maxima)
    torch.testing.assert_close(ours.ranked[:, 2], want.ranked[:, 2], rtol=1e-5, atol=1e-30)
    apart = want.ranked[:, 2].diff().abs() > 1e-4 * want.ranked[:-1, 2]
    if bool(apart.all()):  # else two blocks may change places
        torch.testing.assert_close(ours.ranked[:-1], want.ranked[:-1], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("key", COUNTED)
def test_every_cast(kernel_device, key):
    spec = COUNTED[key]
    assert_same(*counted(spec, make("normal", 70, 200, torch.bfloat16).to(kernel_device)))


@pytest.mark.parametrize("spec", FEW, ids=lambda spec: spec.label)
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 130), (130, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_and_dtypes(kernel_device, spec, shape, dtype):
    assert_same(*counted(spec, make("normal", *shape, dtype).to(kernel_device)))


@pytest.mark.parametrize("spec", FEW, ids=lambda spec: spec.label)
def test_extremes(kernel_device, spec):
    x = make("normal", 64, 128, torch.bfloat16).to(kernel_device)
    x[3, :40] *= 1e-30
    x[5, 2] = 1e30
    x[7] = 0.0
    assert_same(*counted(spec, x))
    x[9, 3], x[20, 70], x[40] = float("nan"), float("inf"), float("-inf")
    assert_same(*counted(spec, x))


def test_equal_runs_have_equal_figures(kernel_device):
    values, operand = counted(CastSpec(), make("normal", 300, 400, torch.bfloat16).to(kernel_device))
    first, second = (operand_figures(values, operand, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
