"""Steps of delayed and of held scaling in one kernel are those of PyTorch's operators; and layers that hold."""

import pytest
import torch

import fp4engine
from fp4engine import ops, reference
from fp4engine.kernels.amax_history import hold_amax, record_amax
from fp4engine.optimizer_hooks import optimizer_stepped
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import DelayedScaling, zoo
from fp4engine.roles import TENSOR_TYPES, QuantizerRole

AMAXES = [0.0, 3.0, 2.0**-140, float("inf"), float("nan"), 3.0e38, 0.5, 7.0]


@pytest.mark.parametrize("choice", reference.amax_history.CHOICES)
@pytest.mark.parametrize("length", [1, 2, 5, 1024])
def test_steps(kernel_device, choice, length):
    kept = [torch.zeros(length), torch.tensor([448.0])]
    written = [tensor.to(kernel_device, copy=True) for tensor in kept]
    for step, amax in enumerate(AMAXES * 2):
        current, chosen = torch.tensor([amax]), torch.tensor([AMAXES[step % 3]])
        now = choice if step % 3 else ""  # within some steps a tensor is cast more than once
        expected = reference.record_amax(*kept, current, now, chosen)
        actual = record_amax(*written, current.to(kernel_device), now, chosen.to(kernel_device))
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        for tensor, wanted in zip(written, kept, strict=True):
            torch.testing.assert_close(tensor.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("hold", [1, 3])
def test_holds(kernel_device, hold):
    kept = [torch.tensor([-1]), torch.tensor([448.0])]
    written = [tensor.to(kernel_device, copy=True) for tensor in kept]
    for step, amax in enumerate(AMAXES * 2):
        now, current = torch.tensor([step // 2]), torch.tensor([amax])
        expected = reference.hold_amax(*kept, now, current, hold)
        actual = hold_amax(*written, now.to(kernel_device), current.to(kernel_device), hold)
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(written, kept, strict=True))


@pytest.mark.parametrize("width", [64, 100])
def test_layers_that_hold(kernel_device, width):
    """Over samples, microbatches, tensors that have grown 1,000 times or shrunk, zeros and an infinity."""
    results = []
    for backend in ("reference", "triton"):
        torch.manual_seed(3)
        fp4engine.manual_seed(3)
        layer = fp4engine.Linear(width, 48).to(kernel_device)
        recipe = zoo.make("ue5m3_held").replace(hold=2, backend=backend)
        ops.reset_executed_paths()
        found = []
        for step, size in enumerate((1.0, 1000.0, 1e-3, 0.0, 1e6, float("inf"), 3.0)):
            x, grad = torch.randn(19, width), torch.randn(19, 48)
            x = x.where(torch.arange(width) != step, size) if size == float("inf") else x * size
            leaf = x.to(kernel_device).requires_grad_()
            with fp4engine.autocast(recipe=recipe):
                y = layer(leaf)
            layer.weight.grad = None
            y.backward((grad * min(size, 1e6)).to(kernel_device))
            found += [y.detach(), leaf.grad, layer.weight.grad]
            optimizer_stepped()
        assert ops.executed_paths()[f"hold_amax/{backend}"] == 21 and f"quantize/{backend}" in ops.executed_paths()
        results.append((found, fp4engine.get_amax_history(layer)))
    (wanted, history), (got, other) = results
    assert history == other
    for expected, actual in zip(wanted, got, strict=True):
        atol = 2e-5 * float(expected.nan_to_num().abs().max())
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=atol, equal_nan=True)


@pytest.mark.parametrize("ratio", [1.0, 0.01, 200.0, 300.0, 1e6, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_under_a_held_amax(kernel_device, ratio, dtype):
    """Codes, scales and amax, byte for byte."""
    recipe, rng = zoo.make("ue5m3_held"), torch.tensor([3, 4], device=kernel_device)
    for role in TENSOR_TYPES:
        made = []
        for backend in ("reference", "triton"):
            quantizer = make_quantizer(recipe, QuantizerRole("linear", role)).with_backend(backend)
            quantizer = quantizer.remembering_in({}, role)
            x = torch.randn(33, 80, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
            quantizer.quantize(x, rng=rng)
            y = x * ratio if ratio < float("inf") else x.where(x < 2, ratio)
            cast = quantizer.quantize(y, rng=rng)
            made.append([*cast.rowwise.tensors, *cast.columnwise.tensors])
        for expected, actual in zip(*made, strict=True):
            assert torch.equal(expected.reshape(-1).view(torch.uint8), actual.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("algorithm", ["max", "most_recent", torch.Tensor.sum])
def test_layers(kernel_device, algorithm):
    results = []
    for backend in ("reference", "triton"):
        torch.manual_seed(3)
        layer = fp4engine.Linear(32, 48, device=kernel_device)
        recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, backend=backend)
        ops.reset_executed_paths()
        for size in (1.0, 100.0, 0.01, 5.0, 5.0):
            x = (size * torch.randn(16, 32)).to(kernel_device).requires_grad_()
            with fp4engine.autocast(recipe=recipe):
                y = layer(x)
            y.sum().backward()
        assert ops.executed_paths()[f"record_amax/{backend}"] == 15
        results.append((y, x.grad, layer.weight.grad, fp4engine.get_amax_history(layer)))
    *tensors, history = zip(*results, strict=True)
    assert history[0] == history[1]
    for expected, actual in tensors:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
