"""One HTML page about a comparison, with nothing to load and no scripts, for people who do not know this project."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4engine import inspect
from fp4engine.compare import pictures, statistics
from fp4engine.compare.comparison import Arm, Comparison, number
from fp4engine.compare.loop import BETAS, FINAL_SHARE, LARGEST_GRADIENT_NORM, WARMUP_SHARE, WEIGHT_DECAY
from fp4engine.compare.sensitivity import Sensitivity, Unit
from fp4engine.compare.statistics import CANNOT_TELL, DOES_NOT, TRAINS
from fp4engine.estimate import Estimate
from fp4engine.inspect.reading import FILE
from fp4engine.inspect.report import GEMMS, OPERANDS, rendered
from fp4engine.version import __version__

SQRT_3 = math.sqrt(3)

CLASSES = {TRAINS: "good", DOES_NOT: "bad", CANNOT_TELL: "open"}
"""Classes of the style sheet, by exit code."""

LOUDEST, FAINTEST = 24.0, 0.0
"""Decibels at which a cell of the table of signals is white, and darkest."""


@dataclass(frozen=True)
class About:
    """What the page says beside the runs.

    Attributes:
        name: the name of the model, or of the runs.
        model: in words.
        data: in words.
        command: the command that made the runs; empty if another script did.
        parameters: number of the model's parameters.
        unit: what a token is, ``"byte"`` or ``"token"``.
        sensitivity: by label of a recipe; a string says why there is none.
        estimates: of a step on GPU ``gpu``, by label, the baseline's included; a string says why there is none.
        pretrained: whether training began with weights of the model's own.
        keep: patterns over names of layers that no recipe reached.
    """

    name: str
    model: str = ""
    data: str = ""
    command: str = ""
    parameters: int = 0
    unit: str = "token"
    sensitivity: Mapping[str, Sensitivity | str] = field(default_factory=dict[str, Sensitivity | str])
    estimates: Mapping[str, Estimate | str] = field(default_factory=dict[str, Estimate | str])
    gpu: str = "B200"
    pretrained: bool = False
    keep: Sequence[str] = ()

    @property
    def usual(self) -> int:
        """Units per parameter that models in use have seen at least: 20 tokens (arXiv 2203.15556), of four bytes."""
        return 80 if self.unit == "byte" else 20


def title(comparison: Comparison, about: About) -> str:
    """The answer in a line."""
    words = [f"{arm.label}: {comparison.verdict(arm).word}" for arm in comparison.arms]
    return f"{about.name} – {'; '.join(words) or 'a baseline alone'}"


def html(comparison: Comparison, about: About) -> str:
    """The page."""
    arms = [arm for arm in comparison.arms if statistics.gaps(arm.runs, comparison.baseline.runs)]
    estimates = {label: made for label, made in about.estimates.items() if isinstance(made, Estimate)}
    return rendered(
        Path(__file__).with_name("page.html.j2"),
        about=about,
        title=title(comparison, about),
        comparison=comparison,
        rows=comparison.rows(),
        classes=CLASSES,
        precision=next(iter(comparison.baseline.runs.values())).header.get("precision", "high precision"),
        noise=statistics.root_mean_square(comparison.noise),
        pairs=len(comparison.noise),
        charts=_charts(comparison, arms, about.unit),
        costs={label: _costs(found) for label, found in about.sensitivity.items() if not isinstance(found, str)},
        signals={arm.label: table for arm in comparison.arms if (table := _signals(arm))},
        gradients=_gradients(comparison.arms),
        estimates=estimates,
        notes=list(dict.fromkeys(note for estimate in estimates.values() for note in estimate.notes)),
        facts=_facts(comparison, about),
        repeats=_repeats(comparison),
        tokens=_tokens(comparison),
        number=number,
        shade=_shade,
        version=__version__,
        sqrt3=SQRT_3,
        infinity=math.inf,
    )


def _charts(comparison: Comparison, arms: Sequence[Arm], unit: str) -> dict[str, str]:
    """SVGs of where recipes end, of the gap on the way, and of losses; none without recipes."""
    if not arms:
        return {}
    tall = max(1.5, 0.9 + 0.42 * len(arms))
    return {
        "finals": pictures.svg(lambda axes: pictures.finals(axes, comparison, arms), height=tall),
        "courses": pictures.svg(lambda axes: pictures.courses(axes, comparison, arms, unit)),
        "losses": pictures.svg(lambda axes: pictures.losses(axes, comparison, arms, unit)),
    }


def _costs(found: Sensitivity) -> dict[str, str]:
    """SVGs of what parts cost: layers and products by short runs, and layers by a few batches, where that is known."""
    prefix = _prefix([unit.name for unit in found.units])

    def by_gap(units: Sequence[Unit]) -> str:
        values = {unit.name.removeprefix(prefix): unit.gap for unit in units}
        clear = [unit.name.removeprefix(prefix) for unit in units if found.is_clear(unit)]
        return _bars(values, "loss above the baseline's if this alone follows the recipe, %", found.noise, clear)

    charts = {"layers": by_gap(found.units), "products": by_gap(found.products)}
    if not isinstance(found.divergence, str):
        moved = sorted(found.divergence.items(), key=lambda pair: -pair[1])
        values = {unit.removeprefix(prefix): 1e6 * value for unit, value in moved}
        charts["batches"] = _bars(values, "divergence of predictions, millionths of a nat per token")
    return charts


def _bars(values: Mapping[str, float], measure: str, noise: float = 0.0, clear: Sequence[str] = ()) -> str:
    height = max(1.2, 0.8 + 0.24 * len(values))
    return pictures.svg(lambda axes: pictures.bars(axes, values, noise, clear, measure), height=height)


def _signals(arm: Arm) -> dict[str, Any] | None:
    """Signal over error at the last recorded step, by layer: six operands and three products, in decibels."""
    folders = [run.records for run in arm.runs.values() if (run.records / FILE).is_file()]
    if not folders:
        return None
    rows = [row for row in inspect.read(folders[0]) if row["kind"] in ("operand", "gemm")]
    if not rows:
        return None
    last = max(row["step"] for row in rows)
    layers: dict[str, dict[tuple[str, ...], float | None]] = {}
    for row in rows:
        if row["step"] == last:
            operand = row["kind"] == "operand"
            place = (row["gemm"], row["role"], row["side"]) if operand else (row["gemm"],)
            layers.setdefault(row["layer"], {})[place] = row["sqnr_db"] if operand else row["snr_db"]
    prefix = _prefix(list(layers))
    places: list[tuple[str, ...]] = [*OPERANDS, *((gemm,) for gemm in GEMMS)]
    rows_of = {name.removeprefix(prefix): [cells.get(place) for place in places] for name, cells in layers.items()}
    return {"step": last + 1, "layers": rows_of, "prefix": prefix}


def _prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot."""
    shared, dot, _ = os.path.commonprefix(list(names)).rpartition(".")  # noqa: RUF071 - these are no paths
    return shared + dot


def _gradients(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Gradient over noise on the way, and by parameter in the end."""
    curves: dict[str, list[tuple[int, float]]] = {}
    ends: dict[str, list[dict[str, Any]]] = {}
    for arm in arms:
        rows = [row for run in arm.runs.values() for row in run.rows if row["kind"] == "gradient" and row.get("ratio")]
        rows = [row for row in rows if {"parameter", "noise", "bias"} <= row.keys()]  # others are of somebody's script
        whole = [(row["step"], row["ratio"]) for row in rows if not row["parameter"]]
        if whole:
            curves[arm.label] = sorted(whole)
            last = max(step for step, _ in whole)
            ends[arm.label] = [row for row in rows if row["step"] == last]
    if not curves:
        return None
    return {
        "svg": pictures.svg(lambda axes: pictures.ratios(axes, curves, SQRT_3)),
        "ends": ends,
        "least": {label: min(r for _, r in c) for label, c in curves.items()},
    }


def _tokens(comparison: Comparison) -> int:
    """Number of tokens that each run was trained on; 0 if it is not known."""
    run = next(iter(comparison.baseline.runs.values()))
    return run.end.get("steps", 0) * (run.header.get("tokens_per_step") or 0)


def _facts(comparison: Comparison, about: About) -> list[tuple[str, str]]:
    """What was run, for who wants to run it again."""
    run = next(iter(comparison.baseline.runs.values()))
    said = [("model", about.model), ("data", about.data), ("command", about.command)]
    if about.command:
        said.append((
            "optimizer",
            f"AdamW, betas {BETAS[0]:g} and {BETAS[1]:g}, weight decay {WEIGHT_DECAY:g} on matrices, gradient norm at "
            f"most {LARGEST_GRADIENT_NORM:g}; learning rate up over {WARMUP_SHARE:.0%} of the steps, then a cosine to "
            f"{FINAL_SHARE:.0%} of its peak",
        ))  # fmt: skip
    said += [(name.replace("_", " "), str(value)) for name, value in comparison.setting.items()]
    places = {
        f"{r.header['device']}, torch {r.header.get('torch')}, {r.header.get('date')}" for r in comparison.results
    }
    said += [("run on", "; ".join(sorted(places))), ("fp4engine", str(run.header.get("fp4engine")))]
    return [(name, value) for name, value in said if value]


def _repeats(comparison: Comparison) -> bool | None:
    """Whether a step gave the same bytes twice, in all runs; None if that was not tried."""
    said = [run.end["repeats"] for run in comparison.results if "repeats" in run.end]
    return all(said) if said else None


def _shade(decibels: float | None) -> str:
    """The background of a cell: the less signal is left, the darker."""
    if decibels is None:
        return ""
    share = min(max((LOUDEST - decibels) / (LOUDEST - FAINTEST), 0), 1)
    return f"background:rgb({255 - round(20 * share)},{255 - round(130 * share)},{255 - round(190 * share)})"
