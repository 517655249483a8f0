"""Runs on a GPU: what is noted of a step is what the step computed, also where the GPU is far behind the host."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fp4engine.compare import Run
from fp4engine.compare.files import read_rows
from fp4engine.recipe import zoo
from tests.tiny_task import TinyTask, trained

pytestmark = pytest.mark.gpu


@dataclass(frozen=True, kw_only=True)
class SlowTask(TinyTask):
    """The GPU waits in every forward pass, and knows the loss long after the host has asked for the next step."""

    cycles: int = 20_000_000

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return super().loss(model, tokens)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_losses_are_noted_when_they_are_known(cuda_graph: bool, tmp_path: Path) -> None:
    noted = []
    for task in (TinyTask, SlowTask):
        path = trained(
            task(device="cuda", cuda_graph=cuda_graph), Run("nvfp4", zoo.make("nvfp4"), 0), tmp_path / task.__name__
        )
        noted.append([row for row in read_rows(path) if "loss" in row or "validation_loss" in row])
    assert noted[0] == noted[1]
    assert len(noted[0]) > 4
