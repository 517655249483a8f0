"""Run files: what a training run leaves, whoever trained it, one JSON object per line.

The first line says what the run is (its key, recipe, seed, setting, machine), the last one how it ended; between them
are the losses by step. While a run goes on, its file has the name ``....jsonl.part``; a finished one is whole, and is
never written to again.
"""

import datetime
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine.arguments import is_number, require_integer, require_path, shown
from fp4engine.compare.files import InputError, read_rows
from fp4engine.files import sync, write_atomically
from fp4engine.inspect.reading import append, are, is_count, is_text, stamp
from fp4engine.inspect.search import HIGH_PRECISION
from fp4engine.recipe import Recipe, recipe_from_argument
from fp4engine.recipe.base import require_recipe
from fp4engine.recipe.identity import digest, identity
from fp4engine.version import __version__

AGAIN = {"draws": 1_000_003, "order": "reversed"}
"""What else a run does that differs from another by nothing that means anything."""

LOSSES_KEPT = 400
"""The most rows of training loss in a finished file; where there were more steps, each is a mean over its share."""

OWN = {
    "setting": frozenset[str](),
    "facts": frozenset(("kind", "format", "label", "key", "seed", "setting", "recipe", "extra", "recipe_json")),
    "extra": frozenset(("setting", "recipe", "seed")),
    "what is noted": frozenset(("step", "loss", "validation_loss")),
    "what a run finishes with": frozenset(("kind", "steps", "status", "diverged_at")),
}
"""Names that a recorder gives meaning to, which dicts of a caller's own must not have."""

READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("parameters", "tokens_per_step", "steps"), (is_count, "an integer of at least 0")),
    **dict.fromkeys(("unit", "device"), (is_text, "a string")),
    "uncounted": (are(is_text), "a list of strings"),
    **dict.fromkeys(
        ("fp4_share", "tokens_per_second", "peak_memory"),
        (lambda value: value is None or is_number(value), "a number or None"),
    ),
}
"""What a table or a page reads of the first and the last line of a run, and what it may be."""

ROWS_AT_ONCE = 32
SECONDS_AT_ONCE = 5.0
"""Rows wait for others or for this time: writing them waits for the GPU, whose tensors they hold."""


@dataclass(frozen=True)
class Run:
    """One run of a comparison: what it does that the others do not.

    Attributes:
        label: what tables call it; no part of its key.
        recipe: of its linear layers.
        seed: of initial weights, order of data and draws.
        extra: what else it does differently, as plain JSON values, such as ``{"draws": 1_000_003}``.
    """

    label: str
    recipe: Recipe
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def identity(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that its numbers depend on, if ``setting`` is all that the runs of the comparison share."""
        return {"setting": dict(setting), "recipe": identity(self.recipe), "seed": self.seed, **self.extra}

    def key(self, setting: Mapping[str, Any]) -> str:
        """Sixteen hexadecimal digits that stand for :meth:`identity`."""
        return digest(self.identity(setting))

    def path(self, folder: Path, setting: Mapping[str, Any]) -> Path:
        """The file of the finished run in ``folder``."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.label.lower().replace("%", "")).strip("-")
        return folder / f"{slug}.seed{self.seed}.{self.key(setting)[:8]}.jsonl"

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}{' again' * (self.extra == AGAIN)}"


class Recorder:
    """Writes the file of one run, from any training loop, for ``fp4engine compare --runs FOLDER``::

        with Recorder("runs", recipe="nvfp4", seed=0, setting={"model": "mine", "data": "v3"}) as run:
            for batch in batches:
                ...
                optimizer.step()
                run.step(loss)
                if run.steps % 100 == 0:
                    run.validation(evaluate(model))

    A run without a recipe is the baseline. Runs are compared if their settings are equal, and paired if their seeds are
    too. The file is finished when the region ends without an exception, or at :meth:`finish`.

    Args:
        folder: where files of runs are.
        recipe: what the linear layers follow: a recipe, what names one
            (:func:`fp4engine.recipe.recipe_from_argument`), or None for high precision.
        seed: the run's.
        setting: what runs that may be compared have in common, as plain JSON values.
        label: what tables call the run; None is what names the recipe.
        tokens_per_step: for figures by tokens.
        first_step: how many steps were done before, in a run that continues; what the file holds beyond is dropped.
        facts: more to say about the run, such as ``{"parameters": model_size, "unit": "byte"}``, where a page calls
            tokens bytes.
        extra: see :class:`Run`.

    Attributes:
        steps: how many steps there have been.
        diverged_at: the step of the first loss that is not finite; None if there is none, as far as was looked.
        path: of the finished file.
        records: a folder for :func:`fp4engine.inspect.record`, whose figures the page then shows.

    Raises:
        InputError: the run has finished before, or there is nothing to continue.
        ValueError: an argument of another kind.

    Every rank of ``torch.distributed`` may call it; rank 0 writes. Give it losses that are averaged over the ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        recipe: Recipe | str | None = None,
        seed: int = 0,
        setting: Mapping[str, Any] | None = None,
        label: str | None = None,
        tokens_per_step: int | None = None,
        first_step: int = 0,
        facts: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        named = recipe if isinstance(recipe, str) else "baseline" if recipe is None else type(recipe).__name__
        made = recipe_from_argument(recipe) if isinstance(recipe, str) else recipe or HIGH_PRECISION
        require_recipe(made)
        given = {"setting": setting or {}, "facts": facts or {}, "extra": extra or {}}
        for name, value in given.items():
            _require_plain(name, value)
        if fault := fault_of(given["facts"]):
            raise ValueError(f"facts: {fault}")
        if label is not None and not isinstance(label, str):
            raise ValueError(f"label must be a string or None, got {shown(label)}")
        if tokens_per_step is not None:
            tokens_per_step = require_integer("tokens_per_step", tokens_per_step, 1)
        self.run = Run(label or named, made, require_integer("seed", seed, 0), dict(given["extra"]))
        self.steps = require_integer("first_step", first_step, 0)
        self.diverged_at: int | None = None
        self.path = self.run.path(require_path("folder", folder), given["setting"])
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.records = self.path.with_suffix("")
        self._noted, self._is_finished = self.steps, False
        self._pending: list[dict[str, Any]] = []
        self._begun = self._written = time.perf_counter()
        self._writes = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if self._writes:
            header = header_of(self.run, given["setting"]) | dict(given["facts"])
            self._open(header | ({} if tokens_per_step is None else {"tokens_per_step": tokens_per_step}))

    def _open(self, header: dict[str, Any]) -> None:
        if self.path.exists():
            raise InputError(
                f"the run {self.run} has finished before ({self.path}); move that file away, or change what differs"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [header]
        if self.steps:
            rows = [row for row in read_rows(self.part) if row.get("step", 0) <= self.steps]
            lost = (row["step"] for row in rows for name in ("loss", "validation_loss") if row.get(name, 0) is None)
            self.diverged_at = next(lost, None)
            noted = [row["step"] for row in rows if "loss" in row]
            if not noted or noted[-1] + noted[0] <= self.steps:  # the first one tells how many steps a row stands for
                raise InputError(
                    f"{self.part} has to hold losses up to step {self.steps}, to continue after; put it back, or begin "
                    "the run anew"
                )
        write_atomically(self.part, "".join(json.dumps(row) + "\n" for row in rows))
        self._left = stamp(self.part)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Write rows behind what this recorder has written.

        Raises:
            InputError: somebody else has written to the file, or it is not there.
        """
        if stamp(self.part) != self._left:
            raise InputError(
                f"{self.part} is not as this recorder left it: another one makes the same run ({self.run}), or the "
                "file was moved; runs at the same time need a seed, a setting, an extra or a folder of their own"
            )
        self._left = append(self.part, (json.dumps(row) + "\n" for row in rows))

    def step(self, loss: Tensor | float, at: int | None = None) -> None:
        """Count a step, and note its training loss: a number, or a tensor of one, which is not waited for.

        Args:
            at: how many steps there have been, where not every one is noted.

        Raises:
            ValueError: the loss is not one number, or has three digits (BF16, FP16); ``at`` is not above the step that
                was noted last.
            InputError: the run has been finished, or another recorder makes it too.
        """
        self._require_unfinished()
        value = _one(loss)
        self.steps = self._noted = self.steps + 1 if at is None else require_integer("at", at, self._noted + 1)
        self._pending.append({"step": self.steps, "loss": value})
        if len(self._pending) >= ROWS_AT_ONCE or time.perf_counter() - self._written >= SECONDS_AT_ONCE:
            self.flush()

    def validation(self, loss: Tensor | float) -> None:
        """Note the validation loss after the step that was counted last; of two after one step the later counts.

        Raises:
            ValueError: the loss is not one number, or has three digits (BF16, FP16).
            InputError: the run has been finished, or another recorder makes it too.
        """
        self._require_unfinished()
        self._pending.append({"step": self.steps, "validation_loss": float(_one(loss))})
        self.flush()

    def note(self, kind: str, **values: Any) -> None:
        """Note something else of the step that is under way, as a row of a kind.

        Raises:
            ValueError: no plain JSON values, or names that the recorder gives meaning to.
            InputError: the run has been finished.
        """
        self._require_unfinished()
        _require_plain("what is noted", values, allow_nan=True)
        self._pending.append({"kind": kind, "step": self.steps + 1, **values})

    def flush(self) -> None:
        """Write what waits, and look for losses that are not finite."""
        rows, self._written = self._pending, time.perf_counter()
        tensors = [row["loss"] for row in rows if isinstance(row.get("loss"), Tensor)]
        values = iter(torch.stack([loss.reshape(()) for loss in tensors]).tolist() if tensors else [])
        for row in rows:
            for name in ("loss", "validation_loss"):
                if name in row:
                    row[name] = next(values) if isinstance(row[name], Tensor) else row[name]
                    if row[name] is not None and not math.isfinite(row[name]):
                        self.diverged_at = row["step"] if self.diverged_at is None else self.diverged_at
                        row[name] = None
        if rows and self._writes:
            self._append(rows)
        self._pending = []

    def sync(self) -> None:
        """Have on disk what was noted so far; to be called before a checkpoint is written."""
        self.flush()
        if self._writes:
            sync(self.part)

    def finish(self, **facts: Any) -> None:
        """End the run: its file is then whole, with ``facts`` in its last line.

        Raises:
            ValueError: ``facts`` are no plain JSON values, or something else than a table can show.
            InputError: no loss was noted, or another recorder makes the run too.
            OSError: the disk is full, for instance; it can be called again.
        """
        _require_plain("what a run finishes with", facts, allow_nan=True)
        if fault := fault_of(facts):
            raise ValueError(f"what a run finishes with: {fault}")
        self.flush()
        if self._is_finished or not self._writes:
            self._is_finished = True
            return
        self._append([])
        header, *rows = read_rows(self.part)
        losses = [row for row in rows if "loss" in row]
        validation = {row["step"]: row for row in rows if "validation_loss" in row}
        if not (losses or validation):
            raise InputError(f"the run {self.run} has noted no loss: call step or validation before it ends")
        end: dict[str, Any] = {"kind": "end", "steps": self.steps, "status": "finished"}
        if self.diverged_at is not None:
            end |= {"status": "diverged", "diverged_at": self.diverged_at}
        rest = [row for row in rows if "loss" not in row]
        rest = [row for row in rest if "validation_loss" not in row or validation[row["step"]] is row]
        seconds = {"seconds": round(time.perf_counter() - self._begun, 2)}
        content = [header, *thinned(losses), *rest, end | seconds | facts]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in content))
        self._is_finished = True
        self.part.unlink()

    def _require_unfinished(self) -> None:
        if self._is_finished:
            raise InputError(f"the run {self.run} has been finished ({self.path}), and takes no more")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.flush()


def header_of(run: Run, setting: Mapping[str, Any]) -> dict[str, Any]:
    """The first line of a run's file."""
    try:
        recipe = json.loads(run.recipe.to_json())
    except ValueError:  # of functions, which are in the identity by name
        recipe = None
    on_gpu = torch.cuda.is_available()
    return {
        "kind": "run",
        "format": 1,
        "label": run.label,
        "key": run.key(setting),
        "seed": run.seed,
        "setting": dict(setting),
        "recipe": identity(run.recipe),
        "extra": dict(run.extra),
        "recipe_json": recipe,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": str(torch.__version__),
        "fp4engine": __version__,
        "date": datetime.date.today().isoformat(),
    }


def thinned(losses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most :data:`LOSSES_KEPT` rows: means over equal shares of the steps, at the last step of each."""
    share = math.ceil(len(losses) / LOSSES_KEPT)
    parts = [losses[start : start + share] for start in range(0, len(losses), max(share, 1))]
    return [{"step": part[-1]["step"], "loss": _mean([row["loss"] for row in part])} for part in parts]


def _one(loss: Any) -> Tensor | float:
    """A loss as one number, or as a tensor of one, which is not waited for."""
    if isinstance(loss, Tensor) and loss.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"loss must be FP32 or FP64, whose digits tell a gap from none, got {loss.dtype}: "
            "compute it of logits.float()"
        )
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach()
    if isinstance(loss, Tensor):
        raise ValueError(f"loss must be one number, got a tensor of shape {list(loss.shape)}")
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss must be one number, got {shown(loss)}") from error


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) else None


def _require_plain(name: str, value: Any, allow_nan: bool = False) -> None:
    """Raise a ValueError unless ``value``, called ``name``, is a dict of plain JSON values without names of OWN."""
    if not isinstance(value, Mapping) or not _is_plain(value, allow_nan):
        raise ValueError(f"{name} must be a dict of plain JSON values, got {shown(value)}")
    if taken := sorted(OWN[name] & value.keys()):
        raise ValueError(f"{name} must leave {taken[0]!r} to the recorder, which says it of every run")


def fault_of(facts: Mapping[str, Any]) -> str:
    """What a table or a page could not show of ``facts``; empty if it can show all."""
    for name, (fits, words) in READ.items():
        if name in facts and not fits(facts[name]):
            return f"{name} must be {words}, got {shown(facts[name])}"
    return ""


def _is_plain(value: Any, allow_nan: bool) -> bool:
    try:
        json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError):
        return False
    return True
