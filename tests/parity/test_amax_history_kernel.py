"""Delayed scaling's step in one kernel is that of PyTorch's operators."""

import pytest
import torch

import fp4engine
from fp4engine import ops, reference
from fp4engine.kernels.amax_history import record_amax
from fp4engine.recipe import DelayedScaling

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
