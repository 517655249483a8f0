"""Every recipe trains the example GPT for 44 steps, with nothing changed but ``autocast(recipe=...)``."""

import pytest
import torch

import fp4engine
from fp4engine.recipe import zoo
from gpt.model import GPT

TEXT = b"Every recipe is a row of data, and a row of data is a recipe. "
LENGTH, BATCH, STEPS = 16, 4, 44


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_learns_a_sentence(name: str) -> None:
    fp4engine.manual_seed(1)
    text = torch.tensor(list(TEXT * 2))
    model = GPT(layers=1, width=32, sequence=LENGTH)
    fp4engine.convert(model, keep_high_precision=("lm_head",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT), (BATCH,))
        tokens = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        with fp4engine.autocast(recipe=zoo.make(name)):
            loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 5.3, "bytes are uniform to a model that knows nothing: ln 256"
    assert sum(losses[-10:]) / 10 < 1.0
