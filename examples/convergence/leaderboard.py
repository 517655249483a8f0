"""All recipes by their final gap to BF16: which differ, which are a tie, and what each costs.

Two rows differ if the mean over seeds of their paired difference is at least twice its standard error.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

from convergence.gaps import Results, deviation_of, differences, gaps, with_missing
from convergence.studies import BOARD, STUDIES, VARIANTS, Conditions
from fp4engine.recipe import zoo

COSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "recipes.json"
"""What `benchmarks/recipes.py` measured."""

TOLD_APART = 2.0
"""Standard errors by which two rows differ that are no tie."""


class Estimate(NamedTuple):
    """A mean over seeds and its standard error, which one seed and what diverged do not have."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    @property
    def is_tie(self) -> bool:
        return self.error is None or not abs(self.mean) >= TOLD_APART * self.error


def estimate(values: Sequence[float]) -> Estimate:
    deviation = deviation_of(values)
    return Estimate(statistics.fmean(values), None if deviation is None else deviation / math.sqrt(len(values)))


@dataclass(frozen=True)
class Place:
    """A row of the leaderboard.

    Attributes:
        gap: to BF16, in percent.
        to_next: how much farther the next row is, in percentage points; None for the last, and where no seed is shared.
    """

    variant: str
    seeds: int
    loss: float
    gap: Estimate
    to_next: Estimate | None
    commits: tuple[str, ...]


def places(found: Results) -> list[Place]:
    """The variants that have a gap, the smallest first; those that diverged come last."""
    means = {variant: estimate(list(gaps(found, variant).values())) for variant in found if gaps(found, variant)}
    order = sorted(means, key=lambda variant: (not math.isfinite(means[variant].mean), means[variant].mean))
    rows: list[Place] = []
    for variant, after in itertools.zip_longest(order, order[1:]):
        shared = differences(found, after, variant) if after is not None else {}
        runs = found[variant].values()
        commits = tuple(sorted({run.header.get("commit", "unknown") for run in runs}))
        loss = statistics.fmean(run.loss for run in runs)
        to_next = estimate(list(shared.values())) if shared else None
        rows.append(Place(variant, len(gaps(found, variant)), loss, means[variant], to_next, commits))
    return rows


@cache
def costs(row: str) -> tuple[str, str]:
    """A linear layer's step, and the bytes that it saves for its backward pass, over those of BF16."""
    measured = [entry for entry in json.loads(COSTS.read_text())["rows"] if entry["row"] == row]
    if not measured:
        return "", ""
    step = sum(entry["ms"] for entry in measured) / sum(entry["bf16_ms"] for entry in measured)
    saved = sum(e["saved"] for e in measured) / sum(e["bf16_memory"]["saved"] for e in measured)
    return f"{step:.2f}", f"{saved:.2f}"


def source(variant: str) -> str:
    known = VARIANTS[variant]
    return f"`{known.row}`: {zoo.ZOO[known.row].source}" if known.row else known.source


def table(found: Results) -> str:
    """The leaderboard as Markdown, with the baseline at its place."""
    lines = ["| | recipe | seeds | loss | gap to bf16 (%) | to the next | step | saved | from | commit |"]
    lines.append("| ---: | --- | ---: | ---: | ---: | --- | ---: | ---: | --- | --- |")
    for number, place in enumerate(places(found), start=1):
        step, saved = costs(VARIANTS[place.variant].row)
        cells = (str(number), place.variant, str(place.seeds), f"{place.loss:.4f}", str(place.gap))
        cells += (verdict(place.to_next), step, saved, source(place.variant), ", ".join(place.commits))
        lines.append("| " + " | ".join(cells) + " |")
    return with_missing(lines, STUDIES[BOARD], found)


def ship(found: Results, preset: str, path: Path) -> None:
    """Tell `fp4engine recipes` the gaps of the recipe book's rows at a preset; nothing where there are none."""
    rows = {VARIANTS[place.variant].row: str(place.gap) for place in places(found) if VARIANTS[place.variant].row}
    if rows:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, preset: rows}, indent=1, ensure_ascii=False) + "\n")


def verdict(to_next: Estimate | None) -> str:
    if to_next is None:
        return ""
    if not math.isfinite(to_next.mean):
        return str(to_next)
    if to_next.error is None:
        return "one seed: not told apart"
    return f"tie ({to_next})" if to_next.is_tie else str(to_next)


def plot(found: Results, settings: Conditions, path: Path) -> None:
    """Mean gap of every recipe with twice its standard error, and every seed's."""
    rows = places(found)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.28 * max(1, len(rows))), layout="constrained")
    for height, place in enumerate(rows):
        values = list(gaps(found, place.variant).values())
        axes.plot(values, [height] * len(values), "o", color="C0", alpha=0.4, markersize=4)
        reach = TOLD_APART * place.gap.error if place.gap.error is not None else None
        axes.errorbar(place.gap.mean, height, xerr=reach, fmt="|", color="C0", capsize=3, markersize=12)
    axes.set(
        yticks=range(len(rows)),
        yticklabels=[place.variant for place in rows],
        ylim=(len(rows) - 0.5 if rows else 0.5, -0.5),
        xlabel=f"final gap to bf16 (%): every seed, mean, and {TOLD_APART:g} standard errors",
        title=f"{settings.preset}, {settings.tokens:,} bytes",
    )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=90)
    plt.close(figure)
