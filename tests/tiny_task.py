"""A task for tests of `fp4engine.compare`: a small residual network that learns which token follows which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4engine.compare import Run
from fp4engine.compare.runner import Job
from fp4engine.compare.task import Task
from fp4engine.compare.training import Places, train

TOKENS, WIDTH, BLOCKS = 32, 32, 3


class Block(nn.Module):
    """`x + down(relu(up(scales * x)))`, whose first channel may be hot for `up` alone: the function stays the same."""

    def __init__(self, hot: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        scales = torch.ones(WIDTH)
        scales[0] = hot
        self.register_buffer("scales", scales)
        with torch.no_grad():
            self.up.weight[:, 0] /= hot

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(F.layer_norm(x, x.shape[-1:]) * self.scales)))


class Network(nn.Module):
    def __init__(self, hot: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(hot if place == 1 else 1.0) for place in range(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, TOKENS)
        for fixed in (self.embedding, self.lm_head):  # so that the blocks have to learn
            fixed.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def sequence(seed: int, count: int, length: int) -> Tensor:
    """Tokens int64 [count, length]: the next is a function of the last one, nineteen times of twenty."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(TOKENS, (count, length), generator=generator)
    follows = torch.rand(count, length, generator=generator) < 0.95
    tokens = [noise[:, 0]]
    for place in range(1, length):
        tokens.append(torch.where(follows[:, place], (5 * tokens[-1] + 7) % TOKENS, noise[:, place]))
    return torch.stack(tokens, 1)


@dataclass(frozen=True, kw_only=True)
class TinyTask(Task):
    steps: int = 24
    batch: int = 8
    sequence: int = 16
    learning_rate: float = 1e-2
    evaluate_every: int = 6
    hot: float = 1.0
    explodes_at: int = 10**9

    def setting(self) -> dict[str, Any]:
        return super().setting() | {"hot": self.hot}

    def model(self) -> nn.Module:
        return Network(self.hot)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def tokens(self, seed: int, step: int) -> Tensor:
        drawn = sequence(seed * 1000 + step, self.batch * self.accumulation, self.sequence + 1)
        if step >= self.explodes_at:
            raise OSError(28, "No space left on device")
        return drawn

    def validation(self, last: bool) -> Tensor:
        return sequence(-1 % 2**31, 2 * 64, self.sequence + 1).unflatten(0, (2, 64))

    def keep_high_precision(self, model: nn.Module) -> Sequence[str]:
        return ["lm_head"]


def trained(task: Task, run: Run, folder: Path, stop: Callable[[], bool] = lambda: False, **options: Any) -> Path:
    """The file of a run that is trained in this process, below `folder / "runs"`."""
    train(task, run, Places(folder / "runs", folder / "scratch", **options), stop=stop)
    return run.path(folder / "runs", task.setting())


class InThisProcess:
    """Stands for a :class:`fp4engine.compare.runner.Runner`: runs are trained where they are asked for."""

    def __init__(self, places: Places, **options: Any) -> None:
        self.places = places

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def make(self, jobs: Sequence[Job], what: str = "") -> None:
        for job in jobs:
            train(job.task, job.run, self.places, looks=job.looks, keep=job.keep)
