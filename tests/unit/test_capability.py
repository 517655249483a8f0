"""What a device can do, as far as this machine can be made to look like another."""

import pytest
import torch

from fp4engine import capability


@pytest.mark.parametrize("ask", [capability.triton_runs_on, capability.fp8_units, capability.fp4_units])
def test_amd_gpus_are_left_to_pytorch(monkeypatch, forget_answers, ask):
    """PyTorch calls them "cuda", with compute capabilities that NVIDIA's do not have."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    forget_answers()
    runs, reason = ask(torch.device("cuda", 0))
    assert not runs and "AMD" in reason
