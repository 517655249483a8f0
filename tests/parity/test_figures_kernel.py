"""The kernel that counts an operand finds what plain PyTorch finds: counts exactly, sums of squares to rounding."""

from typing import NamedTuple

import pytest
import torch

from fp4engine import ops
from fp4engine.formats import E4M3, CastSpec, Outer, Rotation, fp8, mx
from fp4engine.inspect.statistics import OPERAND_SUMS, Counted, Figures, figures_of
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


class Row(NamedTuple):
    """The numbers of one row."""

    sums: torch.Tensor
    maxima: torch.Tensor
    ranked: torch.Tensor

    @staticmethod
    def of(figures: Figures) -> "Row":
        (size,), maxima = figures.sizes, figures.maxima
        assert maxima is not None and size.maxima == maxima.numel()
        assert figures.numbers.numel() == size.sums + 4 * size.ranked
        return Row(figures.numbers[: size.sums], maxima, figures.numbers[size.sums :].view(-1, 4))


def assert_same(spec: CastSpec, x: torch.Tensor) -> None:
    rng = RNG.to(x.device)
    operand, _ = ops.quantize(x, spec, None, rng=rng, stream=STREAM, backend="reference")
    assert operand is not None
    counted = Counted(x, operand, rng, STREAM)
    ours, want = (Row.of(figures_of([], [counted], path)) for path in ("triton", "reference"))
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
    first, second = (figures_of([x], [Counted(x, operand, None, 0)], "triton") for _ in range(2))
    assert torch.equal(first.numbers, second.numbers) and torch.equal(first.maxima, second.maxima)


def test_several_are_counted_in_one_launch_as_each_alone(kernel_device, monkeypatch):
    from fp4engine.kernels.launch import Launch

    x, w = make("normal", 70, 200, torch.bfloat16), make("normal", 33, 130, torch.float32)
    x, w, rng = x.to(kernel_device), w.to(kernel_device), RNG.to(kernel_device)
    tensors, operands = [x, w, x.T], []
    for matrix, spec in ((x, CastSpec()), (x.T, CastSpec(rotation=Rotation())), (w, CastSpec(block=(16, 16))),
                         (w, CastSpec(outer=Outer.ROW)), (w.T, mx(E4M3)), (x, fp8(E4M3))):  # fmt: skip
        operand, _ = ops.quantize(matrix, spec, None, rng=rng, stream=STREAM, backend="reference")
        assert operand is not None
        operands.append(Counted(matrix, operand, rng, STREAM))
    alone = [figures_of([matrix], [], "triton") for matrix in tensors]
    alone += [figures_of([], [counted], "triton") for counted in operands]
    started, call = [], Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *inputs: started.append(self) or call(self, *inputs))
    together = figures_of(tensors, operands, "triton")
    want = Figures.joined(alone)
    assert len(started) == 1 and together.sizes == want.sizes
    assert torch.equal(together.numbers, want.numbers) and torch.equal(together.maxima, want.maxima)


def test_what_no_kernel_counts_is_counted_beside_what_one_does(kernel_device):
    x = make("normal", 70, 200, torch.bfloat16).to(kernel_device)
    fp32 = next(spec for spec in SPECS.values() if spec.block[1] and spec.scale.torch_dtype.itemsize > 1)
    made = [Counted(x, ops.quantize(x, spec, None)[0], None, 0) for spec in (CastSpec(), fp32)]
    ops.reset_executed_paths()
    together = figures_of([x], made)
    paths = ops.executed_paths()
    assert (paths["figures/triton"], paths["figures/reference"]) == (2, 1)
    alone = [figures_of([x], []), *(figures_of([], [counted]) for counted in made)]
    assert together.sizes == Figures.joined(alone).sizes
    assert torch.equal(together.numbers, Figures.joined(alone).numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (33, 300), (400, 17), (4, 1024)])
def test_tensors(kernel_device, shape, dtype):
    x = make("normal", *shape, dtype).to(kernel_device)
    for matrix in (x, x.T, x.T.contiguous().T):
        assert_same_tensor(matrix)
    x[0, 0], x[-1, -1] = float("nan"), float("-inf")
    assert_same_tensor(x)


def assert_same_tensor(matrix: torch.Tensor) -> None:
    ours, want = (Row.of(figures_of([matrix], [], path)) for path in ("triton", "reference"))
    assert ours.sums[0] == want.sums[0] and torch.equal(ours.maxima, want.maxima)
    torch.testing.assert_close(ours.sums, want.sums, rtol=1e-5, atol=0.0)
