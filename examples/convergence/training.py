"""One run: a small GPT trained under one recipe, on a GPU by replaying a CUDA graph of the whole step.

Runs of one study differ in their recipe and in nothing else: weights, data order and seeds are the same. A run shares
its process with others (`together.py`), so it has a CUDA stream and a random stream of its own, and what a step reads
and writes besides the model is on the device: its number, its data, its learning rate, its loss. The host says only
"again".
"""

import dataclasses
import datetime
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import fp4engine
from convergence import two_terms
from convergence.fused import FusedGPT
from convergence.results import of_settings
from convergence.studies import HIGH_PRECISION, VARIANTS, Conditions, Variant
from fp4engine.optimizer_hooks import OsciReset, OutControl
from fp4engine.recipe import Recipe
from gpt import checkpoint
from gpt.data import Corpus, windows
from gpt.files import write_atomically
from gpt.model import GPT
from gpt.training import LARGEST_GRADIENT_NORM, VALIDATION_BATCHES, learning_rate, make_optimizer

EAGER_STEPS = 3
"""Steps that a recipe runs before it is captured; they train like all others, and warm everything up."""

EAGER_VALIDATIONS = 1

VALIDATION_BYTES = 2**16
"""Least number of bytes that a validation loss is a mean over; the same bytes in every run."""

LOSSES_KEPT = 100
"""Rows of training loss per run; each is a mean over its share of the steps."""


class Feed:
    """The data of all runs of a process, on its device; what runs read alike is made once."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.starts, self.validation = cache(self._starts), cache(self._validation)

    def _starts(self, settings: Conditions) -> Tensor:
        """Where the windows of every step begin, int64 [steps, batch]."""
        length = settings.sequence + 1
        starts = [self.corpus.starts(step, settings.batch, length, settings.seed) for step in range(settings.steps)]
        return torch.stack(starts).to(self.corpus.training.device)

    def _validation(self, batch: int, length: int) -> Tensor:
        """Windows of the validation bytes, int64 [batches, batch, length]."""
        of = max(VALIDATION_BATCHES, VALIDATION_BYTES // (batch * (length - 1)))
        return torch.stack([self.corpus.validation_batch(index, of, batch, length) for index in range(of)])


class Record:
    """Numbers appended on the device, where a captured graph can do it.

    Attributes:
        at: how many there are, int64 [1].
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.values = torch.zeros(room, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(room, device=device)

    def append(self, value: Tensor) -> None:
        self.values.copy_(torch.where(self._places == self.at, value, self.values))
        self.at.add_(1)

    def set(self, values: list[float]) -> None:
        self.values[: len(values)] = torch.tensor(values)
        self.at.fill_(len(values))


class Training:
    """A model, its optimizer and the steps taken.

    Attributes:
        step: how many steps the device has been asked for.
        losses: training loss of every step.
        validation: `(step, loss in nats per byte)` so far.
        seconds: this run's share of the time that its process has trained.
    """

    def __init__(self, settings: Conditions, variant: str, feed: Feed) -> None:
        self.settings, self.variant, self.feed = settings, variant, feed
        self.device = torch.device(settings.device)
        self.schedule = VARIANTS[variant].recipe(settings)
        self.random = fp4engine.RandomStream(settings.seed + VARIANTS[variant].draws)
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.starts, self.texts = feed.starts(settings), feed.validation(settings.batch, settings.sequence + 1)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.validation: list[tuple[int, float]] = []
        self.seconds = 0.0
        self.step = 0
        self.awaits_validation = False
        self.seen: Counter[tuple[str, Recipe, int]] = Counter()
        self.graphs: dict[tuple[str, Recipe, int], torch.cuda.CUDAGraph] = {}
        with self.alone():
            torch.manual_seed(settings.seed)
            kind = FusedGPT if settings.compile else GPT
            self.model = kind(settings.layers, settings.width, settings.sequence).to(self.device)
            if settings.hot != 1:
                heat(self.model, settings.hot)
            fp4engine.convert(self.model, keep_high_precision=settings.keep_high_precision)
            if role := VARIANTS[variant].two_terms:
                two_terms.use(self.model, self.schedule.at(0), role)
            self.optimizer = make_optimizer(self.model)
            self.hooks = self._hooks(settings.steps)
            rates = [learning_rate(step, settings) for step in range(settings.steps)]
            self.rates, self.rate = torch.tensor(rates, device=self.device), torch.zeros((), device=self.device)
            self._bind_rate()
            self.losses = Record(settings.steps, self.device)
            self.validated = Record(settings.steps // settings.evaluate_every + 1, self.device)

    @contextmanager
    def alone(self) -> Generator[None]:
        """On this run's CUDA stream, drawing from its random stream: what it computes does not depend on other runs."""
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(self.random.in_force())
            yield

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def recipe(self) -> Recipe:
        """The recipe in force at this step, or at the last one when all are done."""
        return self.schedule.at(min(self.step, self.settings.steps - 1))

    @property
    def is_warm(self) -> bool:
        """Whether a step takes no longer than the ones after it."""
        return not self.on_gpu or self.recipe.is_delayed or ("update", self.recipe, self.looks) in self.graphs

    @property
    def has_ended(self) -> bool:
        """All steps are done, or the loss is not finite."""
        diverged = bool(self.validation) and not math.isfinite(self.validation[-1][1])
        return diverged or (self.step == self.settings.steps and not self.awaits_validation)

    def _hooks(self, steps: int) -> list[OsciReset | OutControl]:
        """What is done between steps in a run of so many steps. A replayed graph calls no hook, so the run does."""
        variant = VARIANTS[self.variant]
        hooks: list[OsciReset | OutControl] = []
        if variant.resets is not None:
            hooks.append(variant.resets.hook(self.model, self.optimizer, self.schedule.at(0), steps))
        if variant.outliers is not None:
            hooks.append(variant.outliers.hook(self.model, self.optimizer, steps))
        return hooks

    @property
    def looks(self) -> int:
        """How often layers have changed what they do: when OutControl began to look at channels, and when it chose."""
        outliers = VARIANTS[self.variant].outliers
        if outliers is None:
            return 0
        start, length = outliers.times(self.settings.steps)
        return (self.step > start) + (self.step > start + length)

    def _bind_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=self.rate, capturable=self.on_gpu)

    def save(self, folder: Path) -> None:
        """Keep below `folder` what continuing bit for bit needs; a checkpoint without its metrics cannot come about."""
        folder.mkdir(parents=True, exist_ok=True)
        with self.alone():
            losses = self.losses.values[: self.step].tolist()
            state = {"losses": losses, "validation": self.validation, "seconds": self.seconds}
            write_atomically(folder / f"{self.step}.json", json.dumps(state))
            checkpoint.save(folder, self.step, self.model, self.optimizer, *self.hooks)

    def restore(self, folder: Path) -> None:
        """Continue from what :meth:`save` left, if anything."""
        with self.alone():
            self.step = checkpoint.restore(folder, self.model, self.optimizer, *self.hooks)
            self._bind_rate()  # the optimizer now has a rate of its own
            if not self.step:
                return
            state = json.loads((folder / f"{self.step}.json").read_text())
            self.validation = [(step, loss) for step, loss in state["validation"]]
            self.seconds = state["seconds"]
            self.losses.set(state["losses"])
            self.validated.set([loss for _, loss in self.validation])

    def train_step(self) -> None:
        """Ask the device for a step, and for a validation where one is due. After that, only :meth:`settle` goes on."""
        if self.awaits_validation or self.has_ended:
            return
        settings = self.settings
        with self.alone():
            self._do("update", self._update, EAGER_STEPS)
            for hook in self.hooks:
                hook.after_step()
            self.step += 1
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._do("validate", self._validate, EAGER_VALIDATIONS)
                self.awaits_validation = True

    def settle(self) -> None:
        """Wait until the device has done what was asked of it, and look at the validation, if any."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.awaits_validation:
            self.validation.append((self.step, float(self.validated.values[len(self.validation)])))
            self.awaits_validation = False

    def _do(self, name: str, work: Callable[[Recipe], None], eager: int) -> None:
        """`work` by the recipe in force, on a GPU as one launch: the same kernels on the same values.

        Delayed scaling, which remembers, stays eager.
        """
        recipe = self.recipe
        key = name, recipe, self.looks
        self.seen[key] += 1
        if not self.on_gpu or recipe.is_delayed or self.seen[key] <= eager:
            work(recipe)
            return
        if key not in self.graphs:
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], stream=self.stream):
                work(recipe)
        self.graphs[key].replay()

    def tokens(self, step: Tensor) -> Tensor:
        """The batch of a step, int64 [1] on the device: int64 [batch, sequence + 1]."""
        start = self.starts.index_select(0, step)[0]
        return windows(self.feed.corpus.training, start, self.settings.sequence + 1)

    def _update(self, recipe: Recipe) -> None:
        self.rate.copy_(self.rates.index_select(0, self.losses.at)[0])
        self.optimizer.zero_grad()
        loss = self.loss(self.tokens(self.losses.at), recipe)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        self.losses.append(loss.detach())

    @torch.no_grad()
    def _validate(self, recipe: Recipe) -> None:
        """Validation loss in nats per byte, computed as the recipe in force computes."""
        self.validated.append(torch.stack([self.loss(tokens, recipe) for tokens in self.texts]).mean())

    def loss(self, tokens: Tensor, recipe: Recipe) -> Tensor:
        with precision(recipe, self.device):
            return self.model.loss(tokens)

    def warm_up(self) -> None:
        """A step, a validation and a reset by every recipe of the schedule, so that their kernels are compiled."""
        with self.alone():
            for recipe in {self.schedule.at(step) for step in (0, self.settings.steps - 1)}:
                self._update(recipe)
                self._validate(recipe)
            for hook in self.hooks:
                hook.remove()
            self.hooks = self._hooks(steps=0)  # of a run without steps, in which everything is due at once
            for _ in range(3 if self.hooks else 0):
                for hook in self.hooks:
                    hook.after_step()
                self._update(self.schedule.at(0))
                self._validate(self.schedule.at(0))
        self.settle()

    def rows(self) -> list[dict[str, Any]]:
        """The finished run: what it was, its losses, its result."""
        header = {
            "variant": self.variant,
            "recipe": json.loads(self.schedule.to_json()),
            **beside_the_recipe(VARIANTS[self.variant]),
            **environment(self.settings, self.feed.corpus),
            "seconds": round(self.seconds, 2),
        }
        validation = [{"step": step, "validation_loss": loss} for step, loss in self.validation]
        return [header, *thinned(self.losses.values[: self.step].tolist()), *validation]


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


@contextmanager
def precision(recipe: Recipe, device: torch.device) -> Generator[None]:
    """The only difference between two runs: which recipe is in force, if any."""
    on_gpu = device.type == "cuda"
    high_precision = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if on_gpu else nullcontext()
    with high_precision, fp4engine.autocast(enabled=recipe != HIGH_PRECISION, recipe=recipe):
        yield


def beside_the_recipe(variant: Variant) -> dict[str, Any]:
    """What a variant does that its recipe does not say; nothing of what it leaves out."""
    hooks = {name: getattr(variant, name) for name in ("resets", "outliers")}
    told = {name: hook and dataclasses.asdict(hook) for name, hook in hooks.items()} | {"two_terms": variant.two_terms}
    return {name: value for name, value in told.items() if value}


def thinned(losses: list[float]) -> Iterator[dict[str, Any]]:
    """Means over equal shares of the steps, at the last step of each."""
    share = math.ceil(len(losses) / LOSSES_KEPT)
    for start in range(0, len(losses), share):
        part = losses[start : start + share]
        yield {"step": start + len(part), "loss": round(sum(part) / len(part), 5)}


def environment(settings: Conditions, corpus: Corpus) -> dict[str, Any]:
    on_gpu = settings.device == "cuda"
    return {
        "settings": of_settings(settings),
        "compile": settings.compile,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "fp4engine": fp4engine.__version__,
        "commit": commit(),
        "data": corpus.digest[:16],
        "date": datetime.date.today().isoformat(),
    }


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
