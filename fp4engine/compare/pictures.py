"""Pictures of a comparison, drawn by matplotlib on axes that the caller has made, and as SVG for a page."""

import io
import math
import re
import statistics as stats
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fp4engine.compare.comparison import Arm, Comparison
from fp4engine.compare.results import Result
from fp4engine.compare.statistics import gaps, interval, root_mean_square

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c564b")
"""Colours of recipes, in their order; colour-blind readers tell them apart too (Okabe and Ito)."""

BASELINE_COLOR = "#333333"
SMOOTHED = 40
"""Points of a curve of training losses."""


def svg(draw: Callable[[Axes], None], width: float = 5.4, height: float = 3.2) -> str:
    """What ``draw`` draws, as an SVG element that is as wide as its place. Sizes in inches."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "fp4engine", "font.family": "sans-serif", "font.size": 9}
    style["text.parse_math"] = False  # a label may hold dollars
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's reader has fonts of their own
        figure = Figure(figsize=(width, height), layout="constrained")
        axes: Any = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    head, _, rest = text[text.index("<svg") :].partition(">")
    return re.sub(r'\s(width|height)="[^"]*"', "", head) + ">" + rest


def color_of(place: int) -> str:
    """The colour of the recipe at ``place``, counted from 0; colours repeat after the last."""
    return COLORS[place % len(COLORS)]


def finals(axes: Axes, comparison: Comparison, arms: Sequence[Arm]) -> None:
    """The final gap of every seed, their mean and its interval, a line per recipe, with tolerance and noise."""
    noise = root_mean_square(comparison.noise)
    if noise:
        axes.axvspan(-noise, noise, color="#dddddd", linewidth=0, label=f"noise, ±{noise:.2f}%")
    axes.axvline(0, color="black", linewidth=0.8)
    if math.isfinite(comparison.tolerance):
        label = f"asked: {comparison.tolerance:g}%"
        axes.axvline(comparison.tolerance, color="#b00020", linewidth=1, linestyle="--", label=label)
    for place, arm in enumerate(arms):
        values = [gap for gap in gaps(arm.runs, comparison.baseline.runs).values() if math.isfinite(gap)]
        gap = interval(values)
        axes.plot(values, [place] * len(values), "o", color=color_of(place), alpha=0.45, markersize=5)
        if values:
            reach = [[gap.mean - gap.low], [gap.high - gap.mean]] if math.isfinite(gap.high) else None
            axes.errorbar(gap.mean, place, xerr=reach, fmt="|", color=color_of(place), capsize=4, markersize=14)
        if len(values) < len(arm.runs):
            axes.text(0.99, place, "diverged", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set(
        yticks=range(len(arms)), yticklabels=[arm.label for arm in arms], xlabel="final loss above the baseline's, %"
    )
    axes.set_ylim(max(len(arms), 1) - 0.5, -0.5)
    axes.grid(alpha=0.3, axis="x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def courses(axes: Axes, comparison: Comparison, arms: Sequence[Arm], unit: str) -> None:
    """The gap over the run, mean over seeds and the range of the seeds; a token is a ``unit``."""
    scale, name = _scale(comparison, unit)
    for place, arm in enumerate(arms):
        of_seeds = [
            _course(run, comparison.baseline.runs[seed])
            for seed, run in arm.runs.items()
            if seed in comparison.baseline.runs
        ]
        if by_step := _shared(of_seeds):
            _band(axes, scale, by_step, color_of(place), arm.label)
    axes.axhline(0, color="black", linewidth=0.8)
    if math.isfinite(comparison.tolerance):
        axes.axhline(comparison.tolerance, color="#b00020", linewidth=1, linestyle="--")
    axes.set(xlabel=name, ylabel=f"{comparison.measure.partition(' of ')[0]} above\nthe baseline's, %")
    axes.grid(alpha=0.3)
    if 0 < len(arms) <= len(COLORS):  # a legend of more would hide the curves, and colours repeat
        axes.legend(fontsize="small", frameon=False)


def losses(axes: Axes, comparison: Comparison, arms: Sequence[Arm], unit: str) -> None:
    """Training losses of baseline and recipes, mean over seeds and the range of the seeds, and validation losses."""
    scale, name = _scale(comparison, unit)
    shown = [(comparison.baseline, BASELINE_COLOR), *((arm, color_of(place)) for place, arm in enumerate(arms))]
    for arm, color in shown:
        _band(axes, scale, _shared([_smooth(run) for run in arm.runs.values()]), color, arm.label)
        by_step = _shared([dict(run.validation) for run in arm.runs.values()])
        means = [stats.fmean(values) for values in by_step.values()]
        axes.plot([step * scale for step in by_step], means, "o", color=color, markersize=3.5)
    axes.set(xlabel=name, ylabel=f"loss, nats per {unit}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", frameon=False)


def bars(axes: Axes, values: Mapping[str, float], noise: float, clear: Sequence[str], measure: str) -> None:
    """What parts cost by a measure, a bar each; those that are clear of the noise in colour."""
    names = list(values)
    finite = [value if math.isfinite(value) else 0.0 for value in values.values()]
    colors = ["#d55e00" if name in clear else "#b8b8b8" for name in names]
    axes.barh(range(len(names)), finite, color=colors)
    for place, value in enumerate(values.values()):
        if not math.isfinite(value):
            axes.text(0, place, " diverged", va="center")
    axes.axvspan(-2 * noise, 2 * noise, color="#dddddd", alpha=0.6, linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel=measure)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(alpha=0.3, axis="x")


def ratios(axes: Axes, of_recipes: Mapping[str, Sequence[tuple[int, float]]], threshold: float) -> None:
    """Gradient over quantization noise, by step, a line per recipe, and the threshold."""
    for place, (label, points) in enumerate(of_recipes.items()):
        axes.plot(*zip(*points, strict=True), "o-", color=color_of(place), markersize=4, label=label)
    axes.axhline(threshold, color="#b00020", linewidth=1, linestyle="--", label="√3")
    axes.set(xlabel="step", ylabel="gradient over its\nquantization noise")
    axes.set_yscale("log")
    least = min(ratio for points in of_recipes.values() for _, ratio in points)
    axes.set_ylim(min(1.0, 0.8 * least), None)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)


def _scale(comparison: Comparison, unit: str) -> tuple[float, str]:
    """What steps are multiplied by on the horizontal axis, and its name."""
    tokens = {run.header.get("tokens_per_step") for run in comparison.results}
    if len(tokens) != 1 or (of_step := tokens.pop()) is None:
        return 1.0, "step"
    last = max(run.end.get("steps", 0) for run in comparison.results) * of_step
    return (of_step / 1e6, f"million {unit}s") if last >= 1e6 else (of_step / 1e3, f"thousand {unit}s")


def _course(run: Result, baseline: Result) -> dict[int, float]:
    """The gap of validation losses by step; of training losses where there is no validation."""
    own, other = (dict(r.validation) if run.validation else _smooth(r) for r in (run, baseline))
    return {step: 100 * (own[step] / other[step] - 1) for step in own if other.get(step, 0.0) > 0}


def _smooth(run: Result) -> dict[int, float]:
    """Training losses, averaged to at most :data:`SMOOTHED` points."""
    share = max(1, math.ceil(len(run.losses) / SMOOTHED))
    parts = [run.losses[start : start + share] for start in range(0, len(run.losses), share)]
    return {part[-1][0]: stats.fmean(loss for _, loss in part) for part in parts}


def _shared(courses: Sequence[Mapping[int, float]]) -> dict[int, list[float]]:
    steps = sorted(set.intersection(*map(set, courses))) if courses else []
    return {step: [course[step] for course in courses] for step in steps}


def _band(axes: Axes, scale: float, by_step: Mapping[int, Sequence[float]], color: str, label: str) -> None:
    """The mean over seeds, and the range of them, of the values of each step."""
    x, values = [step * scale for step in by_step], by_step.values()
    axes.plot(x, list(map(stats.fmean, values)), color=color, linewidth=1.6, label=label)
    axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=color, alpha=0.18, linewidth=0)
