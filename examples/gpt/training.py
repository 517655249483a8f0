"""Training one model in one precision, interruptible at any step and continued bit for bit."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fp4engine
from fp4engine.compare import checkpoint
from fp4engine.compare.loop import (
    LARGEST_GRADIENT_NORM,
    Pace,
    duration,
    learning_rate,
    make_optimizer,
    peak_memory,
    reset_peak_memory,
    stop_on_signals,
)
from fp4engine.files import sync, write_atomically
from fp4engine.recipe import Recipe, recipe_from_json
from gpt.data import Corpus
from gpt.measure import saved_by_linears
from gpt.metrics import Metrics
from gpt.model import GPT
from gpt.settings import HIGH_PRECISION, InputError, Settings, folder_of, recipe_of

LOG_EVERY = 10
"""Steps between two looks at the losses; each look waits for the GPU."""

LINE_SECONDS = 10.0
"""At least so long between two lines about training where the output is no terminal, which gets a bar."""

VALIDATION_BATCHES = 8


class Diverged(RuntimeError):
    """The loss is not finite any more."""


class Interrupted(Exception):
    """The user asked to stop; everything up to `step` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True)
class Result:
    """One row of the final table.

    Attributes:
        tokens_per_second: of the training steps of the last session, without its first few; None if it had none.
        peak_memory: bytes; CUDA's peak allocation, or the peak resident size of the process.
        saved_for_backward: bytes that the linear layers keep between forward and backward of one step.
        fp4_share: FLOPs of the linear layers that ran in FP4.
    """

    precision: str
    high_precision_dtype: str
    validation_loss: float
    tokens_per_second: float | None
    peak_memory: int
    saved_for_backward: int
    fp4_share: float

    @staticmethod
    def load(path: Path) -> "Result":
        try:
            result = Result(**json.loads(path.read_text()))
            for field in fields(Result):
                value, is_text = getattr(result, field.name), field.type in (str, "str")
                optional = field.name == "tokens_per_second" and value is None
                if not optional and not (isinstance(value, str) if is_text else type(value) in (int, float)):
                    raise ValueError(f"{field.name} is {value!r}")
            return result
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{path} does not hold the result of a run ({error}); delete it to have it made again"
            ) from error


class Trainer:
    """A model, its optimizer and its place in the run `folder / precision`."""

    def __init__(self, settings: Settings, precision: str, folder: Path, corpus: Corpus) -> None:
        self.settings, self.precision, self.corpus = settings, precision, corpus
        self.folder = folder_of(folder, precision)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(settings.device)
        torch.manual_seed(settings.seed)
        fp4engine.manual_seed(settings.seed)
        reset_peak_memory(self.device)
        self.model = GPT(settings.layers, settings.width, settings.sequence).to(self.device)
        self.plan = fp4engine.convert(self.model, keep_high_precision=settings.keep_high_precision)
        self.recipe = self._recipe()
        self.optimizer = make_optimizer(self.model)
        self.loss = torch.compile(self.model.loss) if settings.compile else self.model.loss
        self.step = checkpoint.restore(self.folder / "checkpoints", self.model, self.optimizer)
        self.metrics = Metrics(self.folder / "metrics.jsonl", self.step)
        self.pending: list[Tensor] = []
        self.pace = Pace(settings.batch * settings.sequence)

    def _recipe(self) -> Recipe | None:
        """The recipe of this precision; a run that is continued keeps the one it began with."""
        if self.precision == HIGH_PRECISION:
            return None
        path = self.folder / "recipe.json"
        instead = "put back the one that the run began with, or begin another run"
        if not path.exists():
            if checkpoint.checkpoints(self.folder / "checkpoints"):
                raise InputError(f"{path} is missing; {instead}")
            recipe = recipe_of(self.precision)
            assert recipe is not None
            write_atomically(path, recipe.to_json() + "\n")
        try:
            return recipe_from_json(path.read_text())
        except ValueError as error:
            raise InputError(f"{path} does not hold a recipe ({error}); {instead}") from error

    def train(self) -> Result:
        """All steps that are left.

        Raises:
            Interrupted: on Ctrl-C, after saving.
            Diverged: the loss is NaN or infinite.
        """
        settings = self.settings
        bar = tqdm(total=settings.steps, initial=self.step, desc=self.precision, unit="step", disable=None)
        told = time.perf_counter()
        with bar, stop_on_signals() as stop:
            self.pace.start()
            while self.step < settings.steps:
                self._train_step()
                bar.update()
                ends = self.step == settings.steps
                stops = stop.requested and not ends  # looked at once: it may change at any moment
                evaluates = self.step % settings.evaluate_every == 0 or ends
                saves = self.step % settings.checkpoint_every == 0 or ends or stops
                if evaluates or saves or self.step % LOG_EVERY == 0:
                    loss = f"{self._write_losses():.4f}"
                    bar.set_postfix(loss=loss, refresh=False)
                    if bar.disable and not evaluates and time.perf_counter() - told >= LINE_SECONDS:
                        print(self._line(f"loss {loss}"), flush=True)
                        told = time.perf_counter()
                if evaluates:
                    self._evaluate(bar.disable)
                    told = time.perf_counter()
                if saves:
                    sync(self.metrics.path)
                    checkpoint.save(self.folder / "checkpoints", self.step, self.model, self.optimizer)
                if stops:
                    raise Interrupted(self.step)
                if evaluates or saves:
                    self.pace.start()
        return self._result()

    def _train_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings.steps, self.settings.learning_rate)
        loss = self._backward(self.step, self.loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pending.append(loss.detach())
        self.step += 1

    def _backward(self, step: int, compute_loss: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = self.corpus.batch(step, self.settings.batch, self.settings.sequence + 1, self.settings.seed)
        with self._precision():
            loss = compute_loss(tokens)
        loss.backward()
        return loss

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The only difference between two precisions: which recipe is in force, if any."""
        high_precision = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with high_precision, fp4engine.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            yield

    def _write_losses(self) -> float:
        """Write the losses since the last time, and return the newest. Waits for the GPU."""
        losses: list[float] = torch.stack(self.pending).tolist()
        first = self.step - len(losses)
        self.pace.stop(len(losses))
        self.pending.clear()
        self.metrics.append([{"step": first + n + 1, "loss": loss} for n, loss in enumerate(losses)])
        for n, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise Diverged(
                    f"the {self.precision} loss is {loss} at step {first + n + 1}; try --learning-rate lower"
                )
        return losses[-1]

    @torch.no_grad()
    def _evaluate(self, as_line: bool) -> None:
        settings = self.settings
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(VALIDATION_BATCHES):
            tokens = self.corpus.validation_batch(index, VALIDATION_BATCHES, settings.batch, settings.sequence + 1)
            with self._precision():
                total += self.loss(tokens)
        loss = float(total) / VALIDATION_BATCHES
        self.metrics.append([{"step": self.step, "validation_loss": loss}])
        text = self._line(f"validation loss {loss:.4f}")
        print(text, flush=True) if as_line else tqdm.write(text)

    def _line(self, said: str) -> str:
        """Step, what is said, and how long this precision's other steps will take at the pace so far."""
        line = f"{self.precision:>8}  step {self.step}/{self.settings.steps}  {said}"
        left = self.pace.seconds(self.settings.steps - self.step)
        return line if not left else f"{line}  about {duration(left)} left"

    def _result(self) -> Result:
        peak = peak_memory(self.device)
        saved = saved_by_linears(self.model, lambda: self._backward(0, self.model.loss))
        self.optimizer.zero_grad()
        validation = [row["validation_loss"] for row in self.metrics.rows() if "validation_loss" in row]
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        share = fp4engine.executed_gemms(self.model).fp4_share
        result = Result(self.precision, dtype, validation[-1], self.pace.tokens_per_second, peak, saved, share)
        write_atomically(self.folder / "result.json", json.dumps(asdict(result), indent=2) + "\n")
        return result
