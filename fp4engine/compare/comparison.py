"""Runs of one setting side by side: rows of a table, the noise, the verdict, Markdown and JSON lines."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fp4engine.compare import statistics
from fp4engine.compare.files import InputError
from fp4engine.compare.recorder import AGAIN
from fp4engine.compare.results import Result
from fp4engine.compare.statistics import BySeed, Interval, Verdict, interval
from fp4engine.recipe.identity import digest

Kind = Literal["baseline", "recipe", "noise"]

BASELINE = "baseline"


@dataclass(frozen=True)
class Arm:
    """The runs of one recipe, by seed.

    Attributes:
        label: unique in its comparison.
        runs: seed -> run.
        again: the same with other draws and another order of additions, where that was run.
    """

    label: str
    runs: BySeed
    again: BySeed = field(default_factory=dict[int, Result])

    def mean(self, name: str) -> float | None:
        """Mean over the runs of a number that their last lines hold; None where none has it."""
        values = [run.end[name] for run in self.runs.values() if isinstance(run.end.get(name), int | float)]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        gap: loss above the baseline's, in percent.
        to_first: of a recipe after the first, how much farther from the baseline it is, in percentage points.
        verdict: of a recipe.
    """

    label: str
    kind: Kind
    seeds: int
    loss: float
    gap: Interval | None
    to_first: Interval | None
    verdict: Verdict | None
    fp4_share: float | None
    tokens_per_second: float | None
    peak_memory: float | None
    diverged: int

    @property
    def against_first(self) -> str:
        """In a word, whether the recipe is better than the first, worse, or as good as anybody can tell."""
        if self.to_first is None or not self.to_first.count:
            return ""
        if not math.isfinite(self.to_first.mean):
            return "diverged"
        if self.to_first.count == 1:
            return "one seed"
        return "tie" if self.to_first.holds_zero else "better" if self.to_first.mean < 0 else "worse"


@dataclass(frozen=True)
class Comparison:
    """The runs of a baseline and of the recipes that are compared with it.

    Attributes:
        baseline: the baseline's runs.
        arms: each recipe's runs, in the order in which recipes are shown.
        tolerance: the largest gap to accept, in percent of the baseline's loss.
        setting: the settings that all runs have in common.
    """

    baseline: Arm
    arms: tuple[Arm, ...]
    tolerance: float
    setting: dict[str, Any]

    @property
    def results(self) -> list[Result]:
        """The results of all runs: the baseline's, the recipes' and the repeated ones."""
        arms = (self.baseline, *self.arms)
        return [run for arm in arms for runs in (arm.runs, arm.again) for run in runs.values()]

    @property
    def measure(self) -> str:
        """Which loss gaps are of, see :attr:`Result.measure`: one in all runs that did not diverge."""
        return next((run.measure for run in self.results if not run.diverged), self.results[0].measure)

    @property
    def noise(self) -> list[float]:
        """Gaps in percent between runs that were repeated, see :func:`fp4engine.compare.statistics.noise`."""
        return statistics.noise([(arm.runs, arm.again) for arm in (self.baseline, *self.arms)])

    def verdict(self, arm: Arm) -> Verdict:
        """Whether the recipe of ``arm`` trains as well as the baseline, within :attr:`tolerance`."""
        return statistics.verdict(arm.runs, self.baseline.runs, self.tolerance)

    @property
    def code(self) -> int:
        """The exit code: 3 if some recipe does not train, else 4 if some cannot be told or there is none, else 0."""
        codes = [self.verdict(arm).code for arm in self.arms] or [statistics.CANNOT_TELL]
        return min(codes, key=(statistics.DOES_NOT, statistics.CANNOT_TELL, statistics.TRAINS).index)

    def rows(self) -> list[Row]:
        """The rows of the table: the baseline, every recipe, and the runs that were repeated to measure noise."""
        found = [self._row(self.baseline, self.baseline.runs, BASELINE)]
        found += [self._row(arm, arm.runs, "recipe") for arm in self.arms]
        return found + [self._row(arm, arm.again, "noise") for arm in (self.baseline, *self.arms) if arm.again]

    def _row(self, arm: Arm, runs: BySeed, kind: Kind) -> Row:
        is_recipe, base = kind == "recipe", self.baseline.runs
        gap = interval(list(statistics.gaps(runs, arm.runs if kind == "noise" else base).values()))
        later = is_recipe and arm is not self.arms[0]
        to_first = list(statistics.differences(runs, self.arms[0].runs, base).values()) if later else []
        same = [run.loss for run in runs.values() if not run.diverged]
        loss = statistics.loss(runs, base) if is_recipe else sum(same) / len(same) if same else math.nan
        own = Arm(arm.label, runs)
        return Row(
            f"{arm.label}, again" if kind == "noise" else arm.label,
            kind,
            len(statistics.gaps(runs, base)) if is_recipe else len(runs),
            loss,
            None if kind == BASELINE else gap,
            interval(to_first) if later else None,
            self.verdict(arm) if is_recipe else None,
            own.mean("fp4_share"),
            own.mean("tokens_per_second"),
            own.mean("peak_memory"),
            sum(run.diverged for run in runs.values()),
        )

    def markdown(self) -> str:
        """The table, and below it what it means."""
        several = len(self.arms) > 1
        header = ["", "gap %, 95% interval", "verdict", *([f"to {self.arms[0].label}, points"] if several else [])]
        header += ["seeds", "loss", "FLOPs in FP4", "tokens/s", "memory GiB", "diverged"]
        lines = [header, ["---", *["---:"] * (len(header) - 1)]]
        for row in self.rows():
            to_first = f"{row.against_first} {row.to_first}" if row.to_first is not None else ""
            memory = None if row.peak_memory is None else row.peak_memory / 2**30
            lines.append([
                row.label, "" if row.gap is None else str(row.gap), "" if row.verdict is None else row.verdict.word,
                *([to_first] if several else []), str(row.seeds), number(row.loss, ".4f"), number(row.fp4_share, ".0%"),
                number(row.tokens_per_second, ",.0f"), number(memory), str(row.diverged),
            ])  # fmt: skip
        cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        verdicts = [
            f"- {arm.label}: {verdict.word}: {verdict.text}." for arm in self.arms if (verdict := self.verdict(arm))
        ]
        return "\n".join([table, "", *verdicts, "", *self.notes()])

    def notes(self) -> list[str]:
        """What the figures mean, in whole sentences."""
        said = [
            f"A gap is the {self.measure} over the baseline's of the same seed, less one; intervals are Student's: "
            "of 100 recipes that equal the one which they are held against, 5 are called different."
        ]
        if (noise := statistics.root_mean_square(self.noise)) is not None:
            said.append(
                f"Runs that differ by draws and the order of additions alone end {noise:.2g}% apart (root mean square "
                f"of {len(self.noise)})."
            )
        if uncounted := sorted({name for run in self.results for name in run.end.get("uncounted", ())}):
            said.append(f"FLOPs in FP4 are unknown: no formula counts what {', '.join(uncounted)} multiplies.")
        named = [{"fp4engine": "unknown", "torch": "unknown", **run.header} for run in self.results]
        places = {f"{of['device']}, torch {of['torch']}, fp4engine {of['fp4engine']}" for of in named}
        if len(places) > 1:
            said.append(
                f"Not all runs were made alike, and part of a gap may be due to that: {'; '.join(sorted(places))}."
            )
        return said

    def json_lines(self) -> str:
        """A line for every run."""
        lines: list[str] = []
        for arm in (self.baseline, *self.arms):
            for again, runs in ((False, arm.runs), (True, arm.again)):
                by_seed = statistics.gaps(runs, self.baseline.runs)
                for seed, run in runs.items():
                    gap = by_seed.get(seed)
                    row = {
                        "label": arm.label, "again": again, "seed": seed, "key": run.key, "file": run.path.name,
                        "loss": run.loss if math.isfinite(run.loss) else None,
                        "gap_percent": gap if gap is not None and math.isfinite(gap) else None, **run.end,
                    }  # fmt: skip
                    lines.append(json.dumps({name: value for name, value in row.items() if name != "kind"}))
        return "\n".join(lines) + "\n"


def compare(results: Iterable[Result], tolerance: float, labels: Sequence[str] = ()) -> Comparison:
    """The comparison of runs, which must have one setting.

    Args:
        labels: which recipes come first, in that order.

    Raises:
        InputError: there are none, runs have different settings, or none is of a baseline.
    """
    found = list(results)
    if not found:
        raise InputError("there is no finished run")
    settings = {digest(run.header["setting"]): run.header["setting"] for run in found}
    if len(settings) > 1:
        first, second, *_ = settings.values()
        names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
        odd = "; ".join(f"{name} {first.get(name)!r} and {second.get(name)!r}" for name in names)
        raise InputError(f"these runs cannot be compared, for they differ in more than recipe and seed: {odd}")
    judged = {run.judged_by: run for run in found if not run.diverged}
    if len(judged) > 1:
        said = "; ".join(f"{run.path} by {by}" for by, run in judged.items())
        raise InputError(f"these runs cannot be compared, for they are judged at different ends: {said}")
    if below := [run for run in found if run.loss <= 0]:
        raise InputError(f"a gap in percent needs losses above zero, and {below[0].path} ends at {below[0].loss:g}")
    kinds: dict[str, list[Result]] = {}
    again: dict[str, dict[int, Result]] = {}
    for run in found:
        extra = {name: value for name, value in run.header["extra"].items() if AGAIN.get(name) != value}
        stands_for = digest([run.header["recipe"], extra])
        if extra != run.header["extra"]:
            again.setdefault(stands_for, {})[run.seed] = run
        else:
            kinds.setdefault(stands_for, []).append(run)
    base = [kind for kind, runs in kinds.items() if runs[0].is_baseline]
    if not base:
        raise InputError("no finished run is of a baseline, whose layers all compute in high precision")
    arms: dict[str, Arm] = {}
    taken: list[str] = []
    for kind, runs in kinds.items():
        label = runs[0].label if runs[0].label not in taken else f"{runs[0].label} ({kind[:4]})"
        taken.append(label)
        arms[kind] = Arm(label, {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}, again.get(kind, {}))
    others = [arm for kind, arm in arms.items() if kind != base[0]]
    others.sort(key=lambda arm: labels.index(arm.label) if arm.label in labels else len(labels))
    return Comparison(arms[base[0]], tuple(others), tolerance, found[0].header["setting"])


def number(value: float | None, form: str = "z.2f") -> str:
    """``value`` formatted by ``form``; a dash if it is None, infinite or NaN."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)
