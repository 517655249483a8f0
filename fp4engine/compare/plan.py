"""How many seeds and tokens a gap needs to be seen, before anything is spent on it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from fp4engine.compare.statistics import MOST_SEEDS, seeds_for

SPREADS = Path(__file__).with_name("spreads.json")
"""Written by ``examples/convergence/run.py --spreads`` of this project's own runs."""


@dataclass(frozen=True)
class Spread:
    """How far apart the gaps of one recipe's seeds lie at a size.

    Attributes:
        name: of the preset, or of the runs.
        parameters: number of the model's parameters.
        tokens: that each run was trained on; bytes, for the models of this project.
        deviation: standard deviation of gaps over seeds, in percentage points, pooled over recipes.
        recipes: how many have told.
    """

    name: str
    parameters: int
    tokens: int
    deviation: float
    recipes: int


def known_spreads() -> list[Spread]:
    """The spreads that this project has measured, the smallest model first."""
    rows = json.loads(SPREADS.read_text(encoding="utf-8"))["rows"]
    return sorted((Spread(**row) for row in rows), key=lambda spread: (spread.parameters, spread.tokens))


def nearest(parameters: int, tokens: int) -> Spread:
    """The spread of the runs most like these, by the logarithms of both sizes."""

    def distance(spread: Spread) -> float:
        return math.hypot(math.log(spread.parameters / parameters), math.log(spread.tokens / tokens))

    return min(known_spreads(), key=distance)


def advice(parameters: int, tokens: int, gap: float, own: Spread | None = None) -> str:
    """What a comparison of runs of this size can tell, in some lines.

    Args:
        gap: in percent, that is to be told from none.
        own: the spread of runs of this very setting, where some have finished.
    """
    like = own or nearest(parameters, tokens)
    lines = [
        f"{parameters:,} parameters, {tokens:,} tokens a run: {tokens / parameters:.2g} tokens per parameter",
        f"gaps of one recipe's seeds lie {like.deviation:.2f} points apart (standard deviation) "
        + (
            "in the runs of this setting that have finished"
            if own
            else f"in this project's runs most like it, {like.name}"
        ),
        f"to tell a gap of {gap:g}% from none: {_seeds(like, gap)}",
        "",
        f"{'runs of this project':22}{'parameters':>12}{'tokens':>16}{'spread':>8}   seeds for {gap:g}%",
    ]
    lines += [
        f"{spread.name:22}{spread.parameters:12,}{spread.tokens:16,}{spread.deviation:8.2f}   {_seeds(spread, gap)}"
        for spread in known_spreads()
    ]
    return "\n".join(lines)


def _seeds(spread: Spread, gap: float) -> str:
    seeds = seeds_for(spread.deviation, gap)
    return f"more than {MOST_SEEDS} seeds; train longer, or a larger model" if seeds is None else f"{seeds} seeds"


def one_seed(parameters: int, tokens: int) -> str:
    """What a single seed's gap means at this size, in a sentence."""
    like = nearest(parameters, tokens)
    return (
        f"One seed says little: gaps of runs that differ by the seed alone lie {like.deviation:.1f} points apart "
        f"(standard deviation, this project's {like.name} runs of {like.parameters:,} parameters and {like.tokens:,} "
        "bytes)"
    )
