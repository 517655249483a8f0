"""Which layers, and which of the three matrix products, a recipe's gap comes from: short runs of parts of it.

Every short run begins with the weights that the baseline ended with and reads the same batches, so two of them differ
by what follows the recipe and by nothing else. How far two runs end apart that differ by draws and the order of
additions alone is the noise below which nothing is said.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fp4engine import inspect
from fp4engine.compare.checkpoint import file_digest
from fp4engine.compare.recorder import AGAIN, HIGH_PRECISION, Run
from fp4engine.compare.results import Result, read
from fp4engine.compare.runner import Job, Runner
from fp4engine.compare.task import Task
from fp4engine.inspect.search import flops_of, keeping, last_quarter, members_of, only, parts_of
from fp4engine.modules.identity import aliases_of
from fp4engine.names import literal
from fp4engine.recipe import Recipe
from fp4engine.recipe.linear import GEMM_OPERANDS

MOST_UNITS = 24
"""Layers of larger models are tried together, block by block."""

CLEAR_OF_NOISE = 2.0
"""A part counts as costly if its gap is more than this many times the noise."""

SHARE = 0.9
"""Of the linear layers' FLOPs, that must stay in the recipe; one part may always leave it."""

RATE_SHARE = 0.3
"""The short runs' learning rate, which does not change, as a share of the peak."""


@dataclass(frozen=True)
class Unit:
    """A part of the model, or of the recipe.

    Attributes:
        name: of a layer, a pattern over layers, or a matrix product.
        gap: by how many percent the loss is above the baseline's if this part alone follows the recipe.
        share: of the FLOPs of linear layers.
    """

    name: str
    gap: float
    share: float = 1.0


@dataclass(frozen=True)
class Sensitivity:
    """What :func:`measure` found of one recipe.

    Attributes:
        units: parts of the model, the costliest first.
        products: fprop, dgrad and wgrad.
        gap: of the whole recipe, in percent.
        noise: what differences mean nothing, in percent: the largest of two runs that differ by chance alone, and of
            the parts that seem to help.
        keep: patterns of parts to keep in high precision, of those that are clear of the noise; none where keeping
            them brings less than the noise.
        gap_then: the gap that is left with those, in percent.
        steps: of each short run.
        divergence: by unit, how far its rounding in the forward pass moves predictions, in nats per token, by
            :func:`fp4engine.inspect.one_pass`; a string says why there is none, and is empty for runs of versions
            without it.
    """

    units: tuple[Unit, ...]
    products: tuple[Unit, ...]
    gap: float
    noise: float
    keep: tuple[str, ...]
    gap_then: float
    steps: int
    divergence: Mapping[str, float] | str = ""

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of the units' gaps and divergences; None where either has no order."""
        from scipy.stats import spearmanr  # a third of a second

        if isinstance(self.divergence, str):
            return None
        gaps = [unit.gap for unit in self.units]
        moved = [self.divergence.get(unit.name, 0.0) for unit in self.units]
        if len(set(gaps)) < 2 or len(set(moved)) < 2:
            return None
        result: Any = spearmanr(gaps, moved)
        return float(result.statistic)

    def is_clear(self, unit: Unit) -> bool:
        """Whether the gap of ``unit`` is more than :data:`CLEAR_OF_NOISE` times the noise."""
        return unit.gap > CLEAR_OF_NOISE * self.noise


def short(task: Task, weights: Path, steps: int) -> Task:
    """The task of the short runs: ``steps`` steps from ``weights`` on, at one learning rate."""
    return replace(
        task, steps=steps, evaluate_every=steps, start=(weights, file_digest(weights)), short=True,
        learning_rate=RATE_SHARE * task.learning_rate,
    )  # fmt: skip


def units_of(names: Iterable[str]) -> list[str]:
    """Patterns that cover each layer once, at most :data:`MOST_UNITS` where there are blocks to put together."""
    layers = list(names)
    patterns = [literal(name) for name in layers]
    for depth in range(max(name.count(".") for name in layers), 0, -1):
        if len(patterns) <= MOST_UNITS:
            break
        patterns = list(dict.fromkeys(literal(".".join(name.split(".")[:depth])) for name in layers))
    return patterns


def measure(task: Task, recipe: Recipe, model: nn.Module, runner: Runner) -> Sensitivity:
    """Rank parts of ``model``, which may be on meta and is not run, by what each costs alone.

    Args:
        task: see :func:`short`.

    Raises:
        ValueError: the recipe's casts depend on the module or on earlier steps; the baseline diverges.
    """
    sizes = flops_of(model)
    units = units_of(sizes)
    members = members_of(list(sizes), units)
    aliases = aliases_of(model)
    alone = {unit: only(names, recipe, aliases) for unit, names in members.items()}
    products = {gemm: keeping(recipe, pair) for gemm, pair in GEMM_OPERANDS.items()}
    products = {gemm: made for gemm, made in products.items() if made != keeping(recipe, ())}
    again = [Run("short", made, 0, AGAIN) for made in (HIGH_PRECISION, recipe)]
    wanted = [HIGH_PRECISION, recipe, *alone.values(), *products.values()]
    runs = [*(Run("short", made, 0) for made in wanted), *again]
    whole = runs[1]
    runner.make([Job(task, run, looks=run is whole) for run in runs], "short runs")

    def result(run: Run) -> Result:
        runner.make([Job(task, run)], "short runs")  # unless it has been made
        return read(run.path(runner.places.finished, task.setting()))

    def losses(recipe: Recipe, extra: Mapping[str, Any] = {}) -> Sequence[float]:
        return [loss for _, loss in result(Run("short", recipe, 0, extra)).losses]

    effects = [row for row in result(whole).rows if row["kind"] == "effect"]
    by_layer = {row["layer"]: row["divergence"] for row in effects if "layer" in row}
    divergence = {unit: sum(by_layer.get(name, 0.0) for name in names) for unit, names in members.items()}
    share = min(SHARE, 1 - max(parts_of(sizes, members).values()))
    advice = inspect.sensitivity(losses, model, recipe, share=share, units=units, budget=len(units) + 3)
    high = last_quarter(losses(HIGH_PRECISION))
    apart: list[float] = []
    for run in again:
        first, second = last_quarter(losses(run.recipe)), last_quarter(losses(run.recipe, AGAIN))
        apart.append(0.0 if first == second else 100 * (second - first) / high)  # 0 of two that diverge
    found = [Unit(unit.name, 100 * unit.gap / high, unit.share) for unit in advice.ranking]
    noise = max(*map(abs, apart), *(-unit.gap for unit in found))  # rounding cannot help: what seems to is chance
    clear = {unit.name for unit in found if unit.gap > CLEAR_OF_NOISE * noise}
    gap, gap_then = 100 * advice.gap / high, 100 * advice.measured_gap / high
    helps = gap - gap_then > CLEAR_OF_NOISE * noise
    keep = [unit.name for unit in advice.ranking if not unit.in_recipe and unit.name in clear] if helps else []
    return Sensitivity(
        tuple(found),
        tuple(Unit(gemm, 100 * (last_quarter(losses(made)) - high) / high, 1 / 3) for gemm, made in products.items()),
        gap,
        noise,
        tuple(keep),
        gap_then,
        task.steps,
        divergence if by_layer else "; ".join(row["why"] for row in effects),
    )
