"""One run: a model trained under one recipe, stopped at any step and continued bit for bit.

Runs of one comparison differ in their recipe and in nothing else: weights, data, its order and seeds are the same. On a
GPU a step may be the replay of a CUDA graph, which runs the same kernels on the same values.
"""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine import inspect
from fp4engine.accounting import executed_gemms
from fp4engine.compare import checkpoint
from fp4engine.compare.files import InputError
from fp4engine.compare.loop import (
    LARGEST_GRADIENT_NORM,
    Pace,
    generator_states,
    make_optimizer,
    peak_memory,
    reset_peak_memory,
    seed_generators,
    set_generator_states,
)
from fp4engine.compare.recorder import HIGH_PRECISION, Recorder, Run
from fp4engine.compare.task import Task
from fp4engine.files import write_atomically
from fp4engine.inspect.one_pass import buffers_kept
from fp4engine.inspect.search import keeping
from fp4engine.modules import get_amax_history, set_amax_history
from fp4engine.recipe import Recipe
from fp4engine.state import RandomStream, autocast, get_rng_state, set_rng_state

EAGER_STEPS = 3
"""Steps that are not captured in a CUDA graph; they train like all others, and warm everything up."""

PACE_STEPS = 10
"""Steps on a GPU between two measurements of the pace, each of which waits for the GPU."""

LOOKS = (1 / 3, 2 / 3, 1.0)
"""Shares of a run after which a step of it is looked at."""

RECORDED_ROWS = 64
"""Rows of a product that are computed in high precision for comparison."""

EFFECT_PASSES = 8
"""Batches from which the effect of each layer's rounding on the loss is estimated."""

DRAWS = 4
"""Backward passes that tell the noise of a gradient from its bias."""

SAVING_SHARE = 30
"""A checkpoint is due when this many times the duration of saving the last one has passed: saving takes 3% at most."""

IN_A_WORD = {torch.float64: "FP64", torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}

Outcome = Literal["finished", "stopped"]


@dataclass(frozen=True)
class Places:
    """Where runs are kept, and how often they are saved.

    Attributes:
        finished: folder of finished runs.
        scratch: folder in which runs that were stopped wait.
        save_every: seconds between checkpoints, at least.
    """

    finished: Path
    scratch: Path
    save_every: float = 60.0

    def waiting(self, task: Task, run: Run) -> Path:
        """Folder of a run that has not finished, with its checkpoints."""
        return self.scratch / run.key(task.setting())


class Clock:
    """Seconds that a run has been trained, over all sessions."""

    def __init__(self) -> None:
        self.before, self.begin = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.begin

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self.begin = state_dict["seconds"], time.perf_counter()


class Training:
    """A model, its optimizer and the steps taken.

    Attributes:
        step: how many were.
    """

    def __init__(self, task: Task, run: Run) -> None:
        self.task, self.run = task, run
        self.device = torch.device(task.device)
        self.on_gpu = self.device.type == "cuda"
        self.random = RandomStream(run.seed + run.extra.get("draws", 0))
        self.stream = _graph_stream() if task.cuda_graph else None
        self.step = 0
        self.clock = Clock()
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        reset_peak_memory(self.device)
        with self.alone():
            seed_generators(run.seed)
            with self.device:
                self.model = task.model()
            self.plan = task.convert(self.model, run)
            if task.start is not None:
                checkpoint.load_weights(self.model, task.start[0])
            if extra := run.extra.get("draws", 0):
                seed_generators(run.seed + extra)  # of dropout
            self.known = {*self.model.parameters()}, {*self.model.state_dict()}
            self.optimizer = make_optimizer(self.model)
            self.hooks = task.hooks(self.model, self.optimizer, run)
            self.compute = task.compute(self.model)
            self.rate = torch.zeros((), dtype=torch.float32, device=self.device)
            self.inputs = self._on_device(task.tokens(run.seed, 0))
            self.texts = {last: task.validation(last).to(self.device) for last in (() if task.short else (False, True))}
            self._bind_rate()

    @contextmanager
    def alone(self) -> Generator[None]:
        """The context in which this run computes: its own random stream and, where graphs are captured, CUDA stream.

        What the surrounding stream does before and after waits for this one: it reads the losses.
        """
        with ExitStack() as stack:
            if self.stream is not None:
                outside = torch.cuda.current_stream()
                self.stream.wait_stream(outside)
                stack.callback(outside.wait_stream, self.stream)
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(self.random.in_force())
            yield

    @property
    def high_precision(self) -> str:
        """What the baseline computes in, in a word: on a CPU, where nothing casts them, what the parameters are in."""
        if self.on_gpu:
            return "BF16"
        kinds = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return " and ".join(sorted(IN_A_WORD.get(kind, str(kind)) for kind in kinds))

    @property
    def recipe(self) -> Recipe:
        """The recipe in force at this step, or at the last one when all are done."""
        return self.run.recipe.at(min(self.step, self.task.steps - 1))

    def _bind_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=self.rate, capturable=self.on_gpu)

    def _on_device(self, tokens: Tensor) -> Tensor:
        """Tokens [passes, batch, length] of a step, in this run's order."""
        passes = tokens.unflatten(0, (self.task.accumulation, -1)).to(self.device, non_blocking=True)
        return passes.flip(0, 1).contiguous() if self.run.extra.get("order") == "reversed" else passes

    def save(self, folder: Path) -> None:
        """Keep below ``folder`` what continuing bit for bit needs."""
        folder.mkdir(parents=True, exist_ok=True)
        with self.alone():
            checkpoint.save(folder, self.step, self.model, self.optimizer, self.clock, *self.hooks)

    def restore(self, folder: Path) -> None:
        """Continue from what :meth:`save` left, if anything."""
        with self.alone():
            self.step = checkpoint.restore(folder, self.model, self.optimizer, self.clock, *self.hooks)
            self._bind_rate()  # the optimizer now has a rate of its own

    def train_step(self, captured: bool = True) -> Tensor:
        """One step; returns its loss, which is not waited for."""
        with self.alone():
            self.rate.fill_(self.task.rate(self.step))
            self.inputs.copy_(self._on_device(self.task.tokens(self.run.seed, self.step)))
            loss = self._do("update", self._update) if captured else self._update(self.recipe)
            if not self.step:
                self._require_known()
            for hook in self.hooks:
                hook.after_step()
            self.step += 1
            return loss.clone() if self.task.cuda_graph else loss

    def _require_known(self) -> None:
        """Check that the first step has made no parameter, which the optimizer would not train, and no saved buffer.

        Raises:
            InputError: it has.
        """
        parameters, names = self.known
        made = [name for name, parameter in self.model.named_parameters() if parameter not in parameters]
        made += [name for name in self.model.state_dict() if name not in names]
        if made:
            raise InputError(
                f"--model: the first pass has made {made[0]!r}, which is neither trained nor continued; make every "
                "parameter and every saved buffer before, in __init__"
            )

    def validate(self) -> Tensor:
        """Validation loss, computed as the recipe in force computes."""
        with self.alone():
            self.model.eval()
            last = self.step == self.task.steps
            loss = self._do(f"validate {last}", lambda recipe: self._validate(recipe, self.texts[last]))
            self.model.train()
            return loss.clone()

    def _do(self, name: str, work: Callable[[Recipe], Tensor]) -> Tensor:
        """The result of ``work``, called with the recipe in force; a CUDA graph if the task sets ``cuda_graph``.

        Delayed scaling, and the first calls of every kind of work, run eagerly.
        """
        recipe = self.recipe
        key = name, self.task.phase(self.run, min(self.step, self.task.steps - 1))
        self.seen[key] += 1
        if not self.task.cuda_graph or recipe.is_delayed or self.seen[key] <= (EAGER_STEPS if name == "update" else 1):
            return work(recipe)
        if key not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                result = work(recipe)
            self.graphs[key] = graph, result
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _update(self, recipe: Recipe) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(recipe)
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        return loss

    def backward(self, recipe: Recipe, passes: int | None = None) -> Tensor:
        """Gradients of the step's tokens, or of its first passes alone; returns the mean loss."""
        losses: list[Tensor] = []
        for tokens in self.inputs[:passes]:  # cloned, since some losses mark their labels in place
            with self.precision(recipe):
                loss = self.compute(tokens.clone()) / len(self.inputs[:passes])
            loss.backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @torch.no_grad()
    def _validate(self, recipe: Recipe, texts: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for tokens in texts:
            with self.precision(recipe):
                losses.append(self.compute(tokens.clone()))
        return torch.stack(losses).mean()

    @contextmanager
    def precision(self, recipe: Recipe) -> Generator[None]:
        """The only difference between two runs: which recipe is in force, if any."""
        with self.task.precision(), autocast(enabled=recipe != HIGH_PRECISION, recipe=recipe):
            yield

    @contextmanager
    def aside(self) -> Generator[None]:
        """A region whose passes leave no trace: random streams, buffers, amaxes of delayed scaling are as before."""
        with self.alone():
            before = get_rng_state(), generator_states(), get_amax_history(self.model)
            try:
                with buffers_kept(self.model):
                    yield
            finally:
                set_rng_state(before[0])
                set_generator_states(before[1])
                set_amax_history(self.model, before[2])
                self.optimizer.zero_grad()

    def examine(self) -> dict[str, Any]:
        """What of a step is quantized, over the run's recipes, and whether a step repeats its bytes.

        Of FLOPs it is the share that is in FP4, None beside ``uncounted`` operators whose FLOPs nobody knows; of
        products of linear layers, the number that is in any format.
        """
        starts = self.task.starts(self.run.recipe)
        share, quantized = 0.0, 0
        uncounted: set[str] = set()
        checksums: list[Any] = []
        for start, end in pairwise((*starts, self.task.steps)):
            recipe = self.run.recipe.at(start)
            with self.aside():
                report = executed_gemms(self.model, lambda recipe=recipe: self.backward(recipe, 1))
            share += report.fp4_share * (end - start) / self.task.steps
            quantized += report.counts.total() - report.high_precision_gemms
            uncounted.update(report.opaque)
        for _ in range(2):
            with self.aside():
                self.optimizer.zero_grad()
                loss = self.backward(self.recipe, 1)
                checksums.append(
                    [_checksum(loss), *(_checksum(p.grad) for p in self.model.parameters() if p.grad is not None)]
                )
        return {
            "fp4_share": None if uncounted else share, "uncounted": sorted(uncounted), "quantized_gemms": quantized,
            "repeats": checksums[0] == checksums[1],
        }  # fmt: skip

    def look(self, recorder: Recorder) -> Tensor:
        """One step, whose operands, products and gradients are recorded."""
        recipe = self.recipe
        if not recipe.is_delayed:
            with self.alone():  # of the tokens that the step will read
                self.inputs.copy_(self._on_device(self.task.tokens(self.run.seed, self.step)))
            for row in gradient_noise(self, recipe):
                recorder.note("gradient", **row)
        options: dict[str, Any] = {"every": 1, "first_step": self.step, "shadow_rows": RECORDED_ROWS}
        with inspect.record(self.model, recorder.records, optimizer="by hand", **options) as seen:
            loss = self.train_step(captured=False)
            seen.step()
        return loss

    def effects(self) -> list[dict[str, Any]]:
        """What each layer's rounding in the forward pass does to the loss of a few batches, or why that is unknown."""
        batches = [self._on_device(self.task.tokens(self.run.seed, step))[0] for step in range(EFFECT_PASSES)]

        def loss(tokens: Tensor) -> Tensor:
            with self.task.precision():
                return self.task.loss(self.model, tokens)

        positions = self.task.batch * self.task.sequence
        with self.aside():
            try:
                found = inspect.one_pass(self.model, loss, batches, self.recipe, positions=positions)
            except ValueError as error:  # such as of a recipe that is no table of casts
                return [{"why": str(error)}]
        return [{"layer": unit.name, "divergence": unit.divergence} for unit in found.ranking]


@cache
def _graph_stream() -> torch.cuda.Stream:
    """The stream on which a process's runs compute; one for all, since cuBLAS keeps 64 MiB for each stream it sees."""
    return torch.cuda.Stream()


def _checksum(tensor: Tensor) -> int:
    """A number that any changed byte almost surely changes."""
    kind = torch.int32 if tensor.itemsize == 4 else torch.int16
    integers = tensor.detach().reshape(-1).view(kind).to(torch.int64)
    return int((integers * (torch.arange(integers.numel(), device=tensor.device) % 65521 + 1)).sum())


def gradient_noise(training: Training, recipe: Recipe) -> list[dict[str, Any]]:
    """How far the next step's gradients are from the gradients of a backward pass in high precision, by parameter.

    Let g be the gradient with the recipe's forward pass and backward products in high precision, and g_d the gradient
    under the recipe's draw d. Then ``ratio`` is ``rms(g) / rms(g_d - g)``, to be compared with sqrt(3); ``noise`` is
    the spread of the g_d, and ``bias`` the distance of their mean from g, both divided by ``|g|``.

    Source: arXiv 2505.19115 (training becomes less effective where the ratio falls below sqrt 3).
    """
    reference = in_forward(recipe)
    if reference is None:
        return []
    found: dict[str, dict[str, float]] = {}
    exact = _gradients(training, reference)
    sums = {name: torch.zeros_like(gradient, dtype=torch.float32) for name, gradient in exact.items()}
    squares = dict.fromkeys(exact, 0.0)
    with training.aside():
        others = generator_states()
        for _ in range(DRAWS):
            set_generator_states(others)  # of dropout, whose masks are no noise of rounding
            training.optimizer.zero_grad()
            training.backward(recipe, 1)
            for name, parameter in _matrices(training.model):
                assert parameter.grad is not None
                error = parameter.grad.float() - exact[name]
                sums[name] += error
                squares[name] += float(error.square().sum())
    total = dict.fromkeys(("signal", "error", "spread", "bias"), 0.0)
    for name, gradient in exact.items():
        signal = float(gradient.square().sum())
        error = squares[name] / DRAWS
        of_mean = float((sums[name] / DRAWS).square().sum())
        spread = max(error - of_mean, 0.0) * DRAWS / (DRAWS - 1)
        found[name] = {"signal": signal, "error": error, "spread": spread, "bias": max(of_mean - spread / DRAWS, 0.0)}
        total = {part: value + found[name][part] for part, value in total.items()}
    return [_ratios(name, sums) for name, sums in ({"": total} | found).items() if sums.get("signal")]


def _ratios(name: str, sums: dict[str, float]) -> dict[str, Any]:
    signal, error = sums["signal"], sums["error"]
    ratio = math.sqrt(signal / error) if error else None
    return {
        "parameter": name, "ratio": ratio, "noise": math.sqrt(sums["spread"] / signal),
        "bias": math.sqrt(sums["bias"] / signal),
    }  # fmt: skip


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.ndim >= 2 and p.grad is not None]


def _gradients(training: Training, recipe: Recipe) -> dict[str, Tensor]:
    with training.aside():
        training.optimizer.zero_grad()
        training.backward(recipe, 1)
        return {
            name: parameter.grad.float() for name, parameter in _matrices(training.model) if parameter.grad is not None
        }


def in_forward(recipe: Recipe) -> Recipe | None:
    """``recipe`` in fprop, and high precision in the backward products; None where it is no table of casts."""
    with suppress(ValueError):
        return keeping(recipe, [("input", "rowwise"), ("weight", "rowwise")])
    return None


def train(
    task: Task,
    run: Run,
    places: Places,
    *,
    looks: bool = False,
    keep: Path | None = None,
    tell: Callable[[int], None] = lambda step: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train a run to its end, or until somebody asks to stop. A finished run is left as it is.

    Args:
        looks: look at some steps (:meth:`Training.look`), or, before a short run, at :meth:`Training.effects`.
        keep: a file for the weights in the end.
        tell: called with the number of steps done.
    """
    setting = task.setting()
    if run.path(places.finished, setting).exists():
        return "finished"
    waiting = places.waiting(task, run)
    training = Training(task, run)
    training.restore(waiting)
    facts = {
        "device": torch.cuda.get_device_name() if training.on_gpu else "cpu",
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "tokens_per_step": task.tokens_per_step,
        "precision": training.high_precision,
        **task.facts(),
    }
    try:
        recorder = Recorder(
            places.finished, recipe=run.recipe, seed=run.seed, setting=setting, label=run.label,
            first_step=training.step, facts=facts, extra=run.extra,
        )  # fmt: skip
    except InputError as error:  # which does not know of checkpoints
        raise InputError(f"{error}: delete {waiting}") from error
    if not training.step:
        shutil.rmtree(recorder.records, ignore_errors=True)  # of a run that was killed before it was saved
    looked_at = {max(round(share * task.steps), 1) - 1 for share in LOOKS} if looks and not task.short else set[int]()
    if looks and task.short and not training.step:
        for row in training.effects():
            recorder.note("effect", **row)
    pace = Pace(task.tokens_per_step)
    saved, saving = time.perf_counter(), 0.0
    pace.start()
    since = training.step
    peak = 0  # of steps that nobody looks at
    while training.step < task.steps and recorder.diverged_at is None:
        if interrupted := training.step in looked_at:
            peak = max(peak, peak_memory(training.device))
            recorder.step(training.look(recorder))
            reset_peak_memory(training.device)
        else:
            recorder.step(training.train_step())
        done = training.step
        evaluates = not task.short and (done % task.evaluate_every == 0 or done == task.steps)
        stops = stop() and done < task.steps
        due = time.perf_counter() - saved >= max(places.save_every, SAVING_SHARE * saving)
        if not interrupted and (not training.on_gpu or evaluates or done - since >= PACE_STEPS):
            if training.on_gpu:
                torch.cuda.synchronize()
            pace.stop(done - since)
            since = done
        if evaluates:
            recorder.validation(training.validate())
        if (due and done < task.steps) or stops:
            begin = time.perf_counter()
            recorder.sync()
            training.save(waiting)
            saved = time.perf_counter()
            saving = saved - begin
        tell(done)
        if stops:
            return "stopped"
        if evaluates or due or interrupted:
            pace.start()
            since = done
    if keep is not None:
        write_atomically(keep, checkpoint.packed(training.model))
    peak = max(peak, peak_memory(training.device))
    measured = {"tokens_per_second": pace.tokens_per_second, "peak_memory": peak}
    examined = {} if task.short else training.examine()
    recorder.finish(seconds=round(training.clock.seconds, 2), **measured, **examined)
    shutil.rmtree(waiting, ignore_errors=True)
    return "finished"
