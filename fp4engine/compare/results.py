"""Reading run files: which runs there are, which of them may be compared, and what they say."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4engine.arguments import is_number
from fp4engine.compare.files import InputError, read_rows
from fp4engine.compare.recorder import HIGH_PRECISION, fault_of
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import recipe_from_data
from fp4engine.recipe.identity import identity

TAIL = 0.1
"""Where there is no validation, a run's loss is the mean of its training losses over the last share of the steps."""


@dataclass(frozen=True)
class Result:
    """What a finished run left.

    Attributes:
        path: the run's file.
        header: its first line: ``label``, ``key``, ``seed``, ``setting``, ``recipe``, ``extra`` and where it ran.
        losses: ``(step, training loss)``, steps rising; NaN where it is not finite.
        validation: ``(step, validation loss)``.
        rows: its rows of other kinds.
        end: its last line.
    """

    path: Path
    header: dict[str, Any]
    losses: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]
    rows: tuple[dict[str, Any], ...] = ()
    end: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        return self.header["label"]

    @property
    def seed(self) -> int:
        return self.header["seed"]

    @property
    def key(self) -> str:
        return self.header["key"]

    @property
    def diverged(self) -> bool:
        """Whether some loss is not finite."""
        return self.end.get("status") == "diverged" or not math.isfinite(self.loss)

    @property
    def loss(self) -> float:
        """The last validation loss; without any, the mean training loss of the last tenth of the steps."""
        return self.loss_until(1.0)

    def loss_until(self, share: float) -> float:
        """:attr:`loss` as it was after this share of the run's last step."""
        if self.end.get("status") == "diverged":
            return math.nan
        rows = self._measured
        last = share * rows[-1][0]
        done = [(step, loss) for step, loss in rows if step <= last] or [rows[0]]
        if rows is self.validation:
            return done[-1][1]
        tail = [loss for step, loss in done if step > (1 - TAIL) * done[-1][0]]
        return sum(tail) / len(tail)

    @property
    def _measured(self) -> tuple[tuple[int, float], ...]:
        """The losses that judge the run: of validations, if there is one after a step, else of training."""
        return self.validation if self.validation and (self.validation[-1][0] or not self.losses) else self.losses

    @property
    def measure(self) -> str:
        """Which loss :attr:`loss` is."""
        return "validation loss" if self._measured is self.validation else "mean training loss of the last tenth"

    @property
    def judged_by(self) -> str:
        """What :attr:`loss` is, which two runs must have in common to be compared."""
        kind = "a validation" if self._measured is self.validation else "training losses"
        return f"{kind} after step {self._measured[-1][0]}"

    @property
    def is_baseline(self) -> bool:
        """Whether every layer computed in high precision, and the run did nothing else of its own."""
        return self.header["recipe"] == identity(HIGH_PRECISION) and not self.header["extra"]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; None if it cannot be made of its JSON."""
        said = self.header.get("recipe_json")
        try:
            return None if said is None else recipe_from_data(said)
        except ValueError:
            return None

    @property
    def records(self) -> Path:
        """The folder with what :func:`fp4engine.inspect.record` has seen, if anything."""
        return self.path.with_suffix("")


def read(path: Path) -> Result:
    """The run of one file.

    Raises:
        InputError: the file is no whole run.
    """
    header, *rows = read_rows(path) or [{}]
    wanted = {"label": str, "key": str, "seed": int, "setting": dict, "recipe": dict, "extra": dict, "device": str}
    if lacking := [name for name, kind in wanted.items() if type(header.get(name)) is not kind]:
        raise InputError(f"{path} is damaged: its first line does not say {', '.join(lacking)}; move it away")
    end = rows.pop() if rows and rows[-1].get("kind") == "end" else None
    if end is None:
        raise InputError(f"{path} is damaged: it does not end with a line that says how the run ended; move it away")
    if fault := fault_of(header) or fault_of(end):
        raise InputError(f"{path} is damaged: {fault}; move it away, or mend that line")
    losses, validation = _series(path, rows, "loss"), _series(path, rows, "validation_loss")
    if not (losses or validation):
        raise InputError(f"{path} is damaged: it has no loss; move it away")
    for series in (losses, validation):
        if not all(first < second for (first, _), (second, _) in itertools.pairwise(((-1, 0.0), *series))):
            raise InputError(f"{path} is damaged: its steps do not rise; move it away")
    others = [row for row in rows if "kind" in row]
    return Result(path, header, losses, validation, tuple(others), end)


def _series(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    found: list[tuple[Any, Any]] = [(row.get("step"), row[name]) for row in rows if name in row]
    for step, loss in found:
        if type(step) is not int or not (loss is None or is_number(loss)):
            said = f"{name} {loss!r:.80} after step {step!r:.80} is no number"
            raise InputError(f"{path} is damaged: {said}; move it away")
    return tuple((step, math.nan if loss is None else float(loss)) for step, loss in found)


def require_folders(folders: Iterable[Path]) -> None:
    """Raise an InputError unless all of ``folders`` are there."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}, where finished runs should be")


def read_folders(folders: Iterable[Path]) -> list[Result]:
    """All finished runs below some folders, in the order of their paths, each once.

    Raises:
        InputError: a folder is not there, a file in it is damaged, or two are of one run and have other losses.
    """
    folders = list(folders)
    require_folders(folders)
    found: dict[str, Result] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            if re.search(r"\.seed\d+(\.[0-9a-f]{8})?\.jsonl$", path.name):
                result = read(path)
                if "short" not in result.header["setting"]:  # such runs of `compare` rank parts of a recipe
                    _add(found, result)
    return list(found.values())


def _add(found: dict[str, Result], result: Result) -> None:
    """Add a run by its key, unless it is there."""
    other = found.setdefault(result.key, result)
    if (other.losses, other.validation) != (result.losses, result.validation):
        raise InputError(
            f"{other.path} and {result.path} have the same setting, recipe and seed, and other losses; let a "
            "recorder's setting or extra say what differs, or move one of them away"
        )
