"""One run: a small GPT trained under one recipe, on a GPU by replaying a CUDA graph of the whole step.

Runs of one study differ in their recipe and in nothing else: weights, data order and seeds are the same.
"""

import datetime
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4engine
from convergence.results import of_settings
from convergence.studies import HIGH_PRECISION, VARIANTS
from fp4engine.recipe import Recipe
from gpt import checkpoint
from gpt.data import Corpus
from gpt.files import write_atomically
from gpt.model import GPT
from gpt.settings import Settings
from gpt.training import LARGEST_GRADIENT_NORM, VALIDATION_BATCHES, learning_rate, make_optimizer

EAGER_STEPS = 3
"""Steps that a recipe runs before it is captured; they train like all others, and warm everything up."""

ADVANCE_EVERY = 20
"""Steps between two reports of progress; the device may not be further behind, or the deadline would mean little."""

VALIDATION_BYTES = 2**16
"""Least number of bytes that a validation loss is a mean over; the same bytes in every run."""

LOSSES_KEPT = 100
"""Rows of training loss per run; each is a mean over its share of the steps."""


class Training:
    """A model, its optimizer and the steps taken.

    Attributes:
        losses: training loss of every step, FP32 [steps], on the device.
        validation: `(step, loss in nats per byte)` so far.
        seconds: that earlier sessions of this run took.
    """

    def __init__(self, settings: Settings, variant: str, corpus: Corpus) -> None:
        self.settings, self.corpus = settings, corpus
        self.device = torch.device(settings.device)
        if self.on_gpu:
            use_own_stream()
        self.schedule = VARIANTS[variant].recipe(settings)
        torch.manual_seed(settings.seed)
        fp4engine.manual_seed(settings.seed + VARIANTS[variant].draws)
        self.model = GPT(settings.layers, settings.width, settings.sequence).to(self.device)
        fp4engine.convert(self.model, keep_high_precision=settings.keep_high_precision)
        self.compute_loss = self.model.loss
        if settings.compile:
            torch.compiler.reset()  # a process that compiles for one model after the other runs into a limit
            self.compute_loss = torch.compile(self.model.loss)
        self.optimizer = make_optimizer(self.model)
        self.rate = torch.zeros((), device=self.device)
        self._bind_rate()
        self.tokens = corpus.batch(0, settings.batch, settings.sequence + 1, settings.seed)
        self.losses = torch.zeros(settings.steps, device=self.device)
        self.validation: list[tuple[int, float]] = []
        self.seconds = 0.0
        self.step = 0
        self.seen: Counter[Recipe] = Counter()
        self.graphs: dict[Recipe, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def recipe(self) -> Recipe:
        """The recipe in force at this step, or at the last one when all are done."""
        return self.schedule.at(min(self.step, self.settings.steps - 1))

    def _bind_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=self.rate, capturable=self.on_gpu)

    def save(self, folder: Path) -> None:
        """Keep below `folder` what continuing bit for bit needs; a checkpoint without its metrics cannot come about."""
        folder.mkdir(parents=True, exist_ok=True)
        losses = self.losses[: self.step].tolist()
        state = {"losses": losses, "validation": self.validation, "seconds": self.seconds}
        write_atomically(folder / f"{self.step}.json", json.dumps(state))
        checkpoint.save(folder, self.step, self.model, self.optimizer)

    def restore(self, folder: Path) -> None:
        """Continue from what :meth:`save` left, if anything."""
        self.step = checkpoint.restore(folder, self.model, self.optimizer)
        self._bind_rate()  # the optimizer now has a rate of its own
        if self.step:
            state = json.loads((folder / f"{self.step}.json").read_text())
            self.losses[: self.step] = torch.tensor(state["losses"])
            self.validation = [(step, loss) for step, loss in state["validation"]]
            self.seconds = state["seconds"]

    @property
    def has_ended(self) -> bool:
        """All steps are done, or the loss is not finite."""
        diverged = bool(self.validation) and not math.isfinite(self.validation[-1][1])
        return diverged or self.step == self.settings.steps

    def train_step(self) -> None:
        settings = self.settings
        self.tokens.copy_(self.corpus.batch(self.step, settings.batch, settings.sequence + 1, settings.seed))
        self.rate.fill_(learning_rate(self.step, settings))
        self.losses[self.step] = self._replay(self.recipe) if self.on_gpu else self._update(self.recipe)
        self.step += 1

    def _replay(self, recipe: Recipe) -> Tensor:
        """`_update` as one launch; the same kernels on the same values. Delayed scaling, which remembers, stays eager.

        The stream of random draws lives on the device, so a replay advances it.
        """
        self.seen[recipe] += 1
        if recipe.is_delayed or self.seen[recipe] <= EAGER_STEPS:
            return self._update(recipe)
        if recipe not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                loss = self._update(recipe)
            self.graphs[recipe] = graph, loss
        graph, loss = self.graphs[recipe]
        graph.replay()
        return loss

    def _update(self, recipe: Recipe) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.tokens, recipe)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        return loss.detach()

    def loss(self, tokens: Tensor, recipe: Recipe) -> Tensor:
        with precision(recipe, self.device):
            return self.compute_loss(tokens)

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def validate(self) -> float:
        """Validation loss in nats per byte, computed as the recipe in force computes."""
        batch, length = self.settings.batch, self.settings.sequence + 1
        of = max(VALIDATION_BATCHES, VALIDATION_BYTES // (batch * self.settings.sequence))
        batches = (self.corpus.validation_batch(index, of, batch, length) for index in range(of))
        with precision(self.recipe, self.device):
            return float(torch.stack([self.model.loss(tokens) for tokens in batches]).mean())


def use_own_stream() -> None:
    """From here on this process works on a new CUDA stream: the default one cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)


@contextmanager
def precision(recipe: Recipe, device: torch.device) -> Generator[None]:
    """The only difference between two runs: which recipe is in force, if any."""
    on_gpu = device.type == "cuda"
    high_precision = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if on_gpu else nullcontext()
    with high_precision, fp4engine.autocast(enabled=recipe != HIGH_PRECISION, recipe=recipe):
        yield


def train(
    settings: Settings,
    variant: str,
    corpus: Corpus,
    advance: Callable[[int], None],
    unfinished: Path,
    deadline: float = math.inf,
) -> list[dict[str, Any]] | None:
    """All steps of one run, as rows: what it was, its losses, its result. A loss that is not finite ends it.

    Args:
        advance: told the number of steps done since it was last called.
        unfinished: folder in which a stopped run waits, and from which it continues.
        deadline: :func:`time.time` at which it is saved there, and None returned.
    """
    training = Training(settings, variant, corpus)
    training.restore(unfinished)
    begin = time.time()
    told = 0
    while not training.has_ended and time.time() < deadline:
        training.train_step()
        if training.step % settings.evaluate_every == 0 or training.step == settings.steps:
            training.validation.append((training.step, training.validate()))
        if training.step % ADVANCE_EVERY == 0:
            training.wait()
            advance(training.step - told)
            told = training.step
    advance(training.step - told)
    losses = training.losses[: training.step].tolist()
    training.seconds += time.time() - begin
    if not training.has_ended:
        training.save(unfinished)
        return None
    header = {
        "variant": variant,
        "recipe": json.loads(training.schedule.to_json()),
        **environment(settings, corpus),
        "seconds": round(training.seconds, 2),
    }
    validation = [{"step": step, "validation_loss": loss} for step, loss in training.validation]
    return [header, *thinned(losses), *validation]


def thinned(losses: list[float]) -> Iterator[dict[str, Any]]:
    """Means over equal shares of the steps, at the last step of each."""
    share = math.ceil(len(losses) / LOSSES_KEPT)
    for start in range(0, len(losses), share):
        part = losses[start : start + share]
        yield {"step": start + len(part), "loss": round(sum(part) / len(part), 5)}


def environment(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    on_gpu = settings.device == "cuda"
    return {
        "settings": of_settings(settings),
        "compile": settings.compile,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "fp4engine": fp4engine.__version__,
        "data": corpus.digest[:16],
        "date": datetime.date.today().isoformat(),
    }
