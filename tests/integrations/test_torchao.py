"""A converted model under torchao's 8-bit AdamW."""

import io
from functools import partial

import pytest
import torch
from torch import nn

import fp4engine
from fp4engine.integrations import TrainingState
from fp4engine.recipe import NVFP4BlockScaling

optim = pytest.importorskip("torchao.optim", reason="needs the extra `integrations`")


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # of one shape, for which one step is compiled
    fp4engine.convert(model, NVFP4BlockScaling())
    return model, optim.AdamW8bit(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        inp = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(inp) - inp).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trains_repeats_and_resumes_bit_for_bit(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor's code takes seconds
    fp4engine.manual_seed(0)
    model, optimizer = make()
    losses = train(model, optimizer, range(20))
    assert losses[-1] < losses[0] / 2
    assert fp4engine.executed_gemms(model).fp4_share == 1
    assert type(optimizer.state[model[0].weight]["exp_avg"]).__name__ == "OptimState8bit"

    fp4engine.manual_seed(0)
    model, optimizer = make()
    assert train(model, optimizer, range(10)) == losses[:10]
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), TrainingState(model).state_dict()], file)
    file.seek(0)

    fp4engine.manual_seed(99)
    model, optimizer = make()
    for part, state in zip((model, optimizer, TrainingState(model)), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(model, optimizer, range(10, 20)) == losses[10:]
