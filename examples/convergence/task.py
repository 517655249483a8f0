"""What the runs of a study share, as `fp4engine.compare` wants it: the byte-level GPT, its text, its settings."""

import dataclasses
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from convergence import sources, two_terms
from convergence.fused import FusedGPT
from convergence.studies import VARIANTS, Conditions, Variant, always
from fp4engine.accounting import ConversionPlan
from fp4engine.compare import Run
from fp4engine.compare.task import Task
from fp4engine.recipe import recipe_from_argument
from gpt.model import GPT

VALIDATION_PASSES = 8
VALIDATION_BYTES = 2**16
"""Least number of passes, and of bytes, that a validation loss is a mean over; the same bytes in every run."""

NUMBERS_DEPEND_ON = (
    "preset", "layers", "width", "sequence", "batch", "tokens", "learning_rate", "keep_high_precision",
)  # fmt: skip
"""Settings of a run that say what it is, besides its seed."""


@dataclass(frozen=True, kw_only=True)
class StudyTask(Task):
    """Trains a preset's GPT.

    Attributes:
        settings: of the preset.
        corpus: the file that holds the text; None where nothing is trained.
        digest: of the text.
    """

    settings: Conditions
    corpus: Path | None = None
    digest: str = ""

    def setting(self) -> dict[str, Any]:
        """As the committed runs say it, so that they are known again."""
        named = {name: getattr(self.settings, name) for name in NUMBERS_DEPEND_ON}
        hot = {} if self.settings.hot == 1 else {"hot": self.settings.hot}
        keep = {"keep_high_precision": list(self.settings.keep_high_precision)}
        return named | keep | hot | {"data": self.digest, "on": "cpu" if self.device == "cpu" else "gpu"}

    def facts(self) -> dict[str, Any]:
        return {"compile": self.settings.compile, "commit": commit()}

    def model(self) -> nn.Module:
        kind, device = FusedGPT if self.settings.compile else GPT, torch.get_default_device()
        with torch.device("meta" if device.type == "meta" else "cpu"):  # every machine draws the same weights
            model = kind(self.settings.layers, self.settings.width, self.settings.sequence)
        model = model.to(device)
        if self.settings.hot != 1:
            heat(model, self.settings.hot)
        return model

    def compute(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        assert isinstance(model, GPT)
        return model.loss

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        assert isinstance(model, GPT)
        return model.loss(tokens)

    def tokens(self, seed: int, step: int) -> Tensor:
        assert self.corpus is not None
        return sources.load(self.corpus, "cpu").batch(step, self.batch, self.sequence + 1, seed)

    def validation(self, last: bool) -> Tensor:
        assert self.corpus is not None
        text, length = sources.load(self.corpus, "cpu"), self.sequence + 1
        of = max(VALIDATION_PASSES, VALIDATION_BYTES // (self.batch * self.sequence))
        return torch.stack([text.validation_batch(index, of, self.batch, length) for index in range(of)])

    def keep_high_precision(self, model: nn.Module) -> Sequence[str]:
        return self.settings.keep_high_precision

    def convert(self, model: nn.Module, run: Run) -> ConversionPlan:
        plan = super().convert(model, run)
        if role := run.extra.get("two_terms"):
            two_terms.use(model, run.recipe.at(0), role)
        return plan

    def hooks(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> list[Any]:
        variant, steps = variant_of(run.label), self.steps
        hooks: list[Any] = []
        if variant.resets is not None:
            hooks.append(variant.resets.hook(model, optimizer, run.recipe.at(0), steps))
        if variant.outliers is not None:
            hooks.append(variant.outliers.hook(model, optimizer, steps))
        return hooks

    def phase(self, run: Run, step: int) -> Any:
        """The recipe, and how often OutControl has changed what layers do: began to look at channels, and chose."""
        outliers = variant_of(run.label).outliers
        if outliers is None:
            return super().phase(run, step), 0
        start, length = outliers.times(self.steps)
        return super().phase(run, step), (step > start) + (step > start + length)


def task_of(settings: Conditions, corpus: Path | None = None) -> StudyTask:
    """The task of a preset, on a text or, to read what is there, on none."""
    return StudyTask(
        settings=settings, corpus=corpus, digest="" if corpus is None else sources.load(corpus, "cpu").digest[:16],
        steps=settings.steps, batch=settings.batch, sequence=settings.sequence, learning_rate=settings.learning_rate,
        evaluate_every=settings.evaluate_every, device=settings.device, cuda_graph=settings.device == "cuda",
    )  # fmt: skip


def variant_of(label: str) -> Variant:
    """A variant of the studies, or what else names a recipe.

    Raises:
        ValueError: neither.
    """
    return VARIANTS[label] if label in VARIANTS else always(recipe_from_argument(label), source=label)


def run_of(label: str, settings: Conditions, seed: int) -> Run:
    """The run of a variant."""
    variant = variant_of(label)
    hooks = {name: getattr(variant, name) for name in ("resets", "outliers")}
    extra = {name: hook and dataclasses.asdict(hook) for name, hook in hooks.items()}
    extra |= {"two_terms": variant.two_terms, "draws": variant.draws}
    return Run(label, variant.recipe(settings), seed, {name: value for name, value in extra.items() if value})


COLD = 1000
"""One channel in so many is hot."""


class Diagonal(nn.Module):
    """A norm's weight, of which some channels are multiplied by what is not trained."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        diagonal = torch.ones(width)
        diagonal[::COLD] = factor
        self.register_buffer("diagonal", diagonal, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.diagonal


def heat(model: GPT, factor: float) -> None:
    """Make hot channels: one in a thousand, and at least one, of what linear layers read of a block's norms."""
    for block in model.blocks:
        for norm in (block.attention_norm, block.mlp_norm):
            width = norm.weight.numel()
            register_parametrization(norm, "weight", Diagonal(width, factor).to(norm.weight.device))


@cache
def commit() -> str:
    """The commit of the sources that run here: what `COMMIT` says, or else git."""
    if said := os.environ.get("COMMIT"):
        return said
    root = Path(__file__).resolve().parents[2]
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
