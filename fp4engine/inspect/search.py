"""Which layers, products and operands cost accuracy: short paired runs with parts in high precision.

A run is a function of a recipe. Everything else about it, data, seed and starting point, must be the same every time;
then two runs differ by the recipe only, and the difference of their losses is what it costs.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import (
    is_number,
    require_bool,
    require_callable,
    require_integer,
    require_model,
    require_patterns,
    shown,
)
from fp4engine.formats import CastSpec
from fp4engine.inspect.watch import layers_of
from fp4engine.modules.identity import aliases_of
from fp4engine.names import EndOfName, covers, literal
from fp4engine.recipe import Casts, LinearRecipe, Recipe, Rule, RuledRecipe
from fp4engine.recipe.base import require_recipe
from fp4engine.recipe.linear import GEMM_OPERANDS, sum_complaints
from fp4engine.roles import TENSOR_TYPES
from fp4engine.state import get_default_recipe

MakeRun = Callable[[Recipe], Sequence[float]]
"""Trains from a checkpoint under a recipe and returns the loss of each step."""

Aliases = Mapping[str, tuple[str, ...]]
"""``name of a layer -> all its names``, of those with several, which a recipe's rules have to treat alike."""

HIGH_PRECISION = LinearRecipe(backward_override=None, backend="auto")
"""The recipe of a baseline: every linear layer computes as if this package were not there."""

SHARE_OF_GAP = 0.1
"""A part is blamed if it alone causes at least this share of the gap that is being explained."""


class OutOfBudget(Exception):
    """The search has used up the number of training runs that it was given."""


@dataclass(frozen=True)
class Culprit:
    """Layers that cause a gap while everything else is in high precision.

    Attributes:
        layers: one name; several where neither half of them causes the gap alone.
        gap: loss with these layers quantized less the loss in high precision; infinite if the run diverged.
        gemms: of a single layer, the gap of each GEMM alone.
        operands: of its blamed GEMMs, the gap of each operand alone, by ``"gemm role side"``.
    """

    layers: tuple[str, ...]
    gap: float
    gemms: Mapping[str, float] = field(default_factory=dict)
    operands: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The layers in one string."""
        return " + ".join(self.layers)


@dataclass(frozen=True)
class Findings:
    """What :func:`bisect` found; ``print(findings)`` shows it as a table.

    Attributes:
        high_precision_loss, recipe_loss: scores of the run in high precision and of the run under the whole recipe.
        culprits: in the order in which they were found, the largest gap first within a round.
        remaining_gap: gap of ``recipe``, measured: a run of the budget is kept back for it.
        recipe: the recipe with all culprits in high precision.
        runs: how many runs were made.
        complete: False if the budget ended the search.
    """

    high_precision_loss: float
    recipe_loss: float
    culprits: tuple[Culprit, ...]
    remaining_gap: float
    recipe: Recipe
    runs: int
    complete: bool

    @property
    def gap(self) -> float:
        """What the recipe costs: loss under it, less the loss in high precision."""
        return _difference(self.recipe_loss, self.high_precision_loss)

    def __str__(self) -> str:
        lines = [
            f"loss {self.high_precision_loss:.4f} in high precision, {self.recipe_loss:.4f} by the recipe: "
            f"a gap of {self.gap:.4f}"
        ]
        for culprit in self.culprits:
            lines.append(f"  {culprit.name}: {culprit.gap:.4f} alone")
            lines += [f"    {gemm}: {gap:.4f}" for gemm, gap in culprit.gemms.items()]
            lines += [f"      {operand}: {gap:.4f}" for operand, gap in culprit.operands.items()]
        if not self.culprits:
            lines.append("  no layer was blamed")
        ended = "" if self.complete else "; the budget ended the search"
        lines.append(f"without them a gap of {self.remaining_gap:.4f} remains; {self.runs} runs{ended}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Ranked:
    """One unit of :func:`sensitivity`.

    Attributes:
        name: a layer, or the pattern that was given.
        gap: what it costs alone in the recipe, everything else in high precision.
        share: its share of the FLOPs of all linear layers.
        in_recipe: whether the advised recipe leaves it in the low precision.
    """

    name: str
    gap: float
    share: float
    in_recipe: bool


@dataclass(frozen=True)
class Advice:
    """What :func:`sensitivity` advises; ``print(advice)`` shows it as a table.

    Attributes:
        recipe: high precision for the units that cost most for their FLOPs, the given recipe for the rest.
        ranking: every unit, the largest gap first.
        share: of the linear layers' FLOPs that follow the given recipe.
        gap: what the given recipe costs everywhere.
        noise: gaps up to this are none, and their order says nothing.
        expected_gap: the sum of the gaps of the units that stay in it.
        measured_gap: of a run by ``recipe``.
        runs: how many runs were made.
    """

    recipe: RuledRecipe
    ranking: tuple[Ranked, ...]
    share: float
    gap: float
    noise: float
    expected_gap: float
    measured_gap: float
    runs: int

    def __str__(self) -> str:
        width = max(len(unit.name) for unit in self.ranking)
        lines = [f"{'unit'.ljust(width)}  gap alone  FLOPs  precision"]
        lines += [
            f"{unit.name.ljust(width)}  {unit.gap:9.4f}  {unit.share:5.1%}  {'low' if unit.in_recipe else 'high'}"
            + ("  (noise)" if abs(unit.gap) <= self.noise else "")
            for unit in self.ranking
        ]
        if self.noise:
            lines.append(f"gaps up to {self.noise:.4f} are noise, and so is the order of the units that have them")
        lines.append(
            f"{self.share:.1%} of FLOPs in low precision: a gap of {self.expected_gap:.4f} expected, "
            f"{self.measured_gap:.4f} measured, {self.gap:.4f} with everything in it; {self.runs} runs"
        )
        return "\n".join(lines)


class _Runs:
    """Runs made so far, each recipe once.

    Attributes:
        kept_back: how many runs of the budget are not to be made now.
    """

    def __init__(self, make_run: MakeRun, budget: int) -> None:
        self._make_run, self._budget = make_run, budget
        self._losses: dict[str, Sequence[float]] = {}
        self._steps = 0
        self.kept_back = 0

    @property
    def count(self) -> int:
        return len(self._losses)

    def score(self, recipe: Recipe) -> float:
        """Mean loss of the last quarter of the steps; infinite if one of them is not finite."""
        key = recipe.to_json()
        if key not in self._losses:
            if self.count >= self._budget - self.kept_back:
                raise OutOfBudget
            losses = self._make_run(recipe)
            tail = _last_quarter(losses)
            if math.isfinite(tail[0]):
                self._steps = self._steps or len(losses)
                if len(losses) != self._steps:
                    raise ValueError(
                        f"make_run must return as many losses in each run, whose last quarters are compared, got "
                        f"{len(losses)} after {self._steps}; one of a run that stops as it diverges must not be finite"
                    )
            self._losses[key] = tail
        return _mean(self._losses[key])

    def require_kept_back(self) -> None:
        """Check that there are as many runs as are kept back; runs that were made before may have found more for free.

        Raises:
            OutOfBudget: there are not.
        """
        if self.count > self._budget - self.kept_back:
            raise OutOfBudget

    def noise(self, recipe: Recipe, other: Recipe) -> float:
        """Twice the standard error of the difference of two scores, as the runs meet the same batches; 0 if unknown."""
        pairs = list(zip(self._losses[recipe.to_json()], self._losses[other.to_json()], strict=False))
        differences = [left - right for left, right in pairs if math.isfinite(left) and math.isfinite(right)]
        if len(differences) < 3:
            return 0.0
        return 2 * statistics.stdev(differences) / math.sqrt(len(differences))


def last_quarter(losses: Sequence[float]) -> float:
    """Mean of the last quarter of ``losses``, at least one of them; infinite if one of them is not finite.

    Raises:
        ValueError: no losses.
    """
    return _mean(_last_quarter(losses))


def _mean(tail: Sequence[float]) -> float:
    return sum(tail) / len(tail)


def _last_quarter(losses: Sequence[float]) -> Sequence[float]:
    """The last quarter of ``losses``; one infinity if one of all is not finite."""
    said = f"make_run must return the losses of its steps, got {shown(losses)}"
    if not isinstance(losses, Sequence | Tensor) or isinstance(losses, str | bytes):
        raise ValueError(said)
    if isinstance(losses, Tensor) and losses.ndim != 1:
        raise ValueError(said)
    try:
        values = [float(loss) for loss in losses]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(said) from error
    if not values:
        raise ValueError("make_run must return the losses of its steps, got none")
    return values[-max(len(values) // 4, 1) :] if all(map(math.isfinite, values)) else [math.inf]


def bisect(
    make_run: MakeRun,
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    *,
    budget: int = 60,
    tolerance: float | None = None,
    refine: bool = True,
) -> Findings:
    """Find the layers, GEMMs and operands that cause the gap between ``recipe`` and high precision, or a divergence.

    A group of layers is tried alone in ``recipe``, with everything else in high precision, and halved as long as it
    causes a gap. Layers found are then put in high precision, and what gap remains is searched in the same way, so that
    a large fault does not hide a small one.

    Args:
        make_run: trains from a checkpoint under the recipe it is given and returns the loss of each step. It must
            depend on nothing but the recipe: same checkpoint, same batches, same seeds. A run that diverges may end
            early, with a loss that is not finite.
        model: a converted model, for its layers' names and sizes; it is not run and may be on ``meta``.
        recipe: what is suspected; None is ``get_default_recipe()``.
        budget: the most runs to make, at least the two that are compared.
        tolerance: a gap below this is none; None is a twentieth of the recipe's gap, or, where the recipe diverges, a
            hundredth of the loss in high precision.
        refine: also tell which GEMMs of a layer, and which of their operands, cause its gap.

    Raises:
        ValueError: a model without layers, a budget below 2, a tolerance below 0, a recipe without casts of its own,
            high precision that diverges itself, finite runs of different lengths.
    """
    recipe = plain(recipe)
    require_callable("make_run", make_run)
    require_bool("refine", refine)
    budget = require_integer("budget", budget, 2)
    if tolerance is not None and not (is_number(tolerance) and 0 <= tolerance < math.inf):
        raise ValueError(f"tolerance must be a finite number of at least 0, or None, got {tolerance!r}")
    names = list(flops_of(model))
    runs = _Runs(make_run, budget)
    high, low = runs.score(HIGH_PRECISION), runs.score(recipe)
    if not math.isfinite(high):
        raise ValueError("the run in high precision diverges too, so there is no gap to explain")
    remaining, complete = _difference(low, high), True
    none = tolerance
    if none is None:
        none = abs(remaining) / 20 if math.isfinite(remaining) else abs(high) / 100
    aliases = aliases_of(model)
    search = _Search(runs, recipe, aliases, (high, low), none)
    try:
        while remaining > 0 and remaining >= none:
            suspects = [name for name in names if name not in search.blamed]
            if not suspects or not search.round(suspects, remaining):
                break
            remaining = search.remaining()
        if refine:
            search.refine()
    except OutOfBudget:
        complete = False
    remaining, advised = search.remaining(), without(recipe, search.blamed, aliases)
    return Findings(high, low, tuple(search.culprits), remaining, advised, runs.count, complete)


class _Search:
    """The search of :func:`bisect`, and what it has found."""

    def __init__(self, runs: _Runs, recipe: Recipe, aliases: Aliases, losses: tuple[float, float], none: float) -> None:
        self._runs, self._recipe, self._aliases, self._none = runs, recipe, aliases, none
        self._high, self._low = losses
        self.culprits: list[Culprit] = []

    @property
    def blamed(self) -> list[str]:
        return [name for culprit in self.culprits for name in culprit.layers]

    def round(self, suspects: Sequence[str], gap: float) -> bool:
        """Blame what explains ``gap`` among ``suspects``; False if nothing does."""
        self._runs.kept_back = 1  # for what remains without them
        threshold = self._threshold(gap)
        known = len(self.culprits)
        waiting = [(self._alone(suspects), tuple(suspects))]
        if waiting[0][0] < threshold:
            return False
        while waiting:
            waiting.sort(key=lambda group: group[0])
            gap, group = waiting.pop()
            middle = len(group) // 2
            halves = [half for half in (group[:middle], group[middle:]) if half and len(group) > 1]
            guilty = [(caused, half) for half in halves if (caused := self._alone(half)) >= threshold]
            if guilty:
                waiting += guilty
            else:
                self._runs.require_kept_back()
                self.culprits.append(Culprit(group, gap))
        return len(self.culprits) > known

    def remaining(self) -> float:
        """The gap without the culprits, by the run that :meth:`round` has kept back."""
        self._runs.kept_back = 0
        if not self.culprits:
            return _difference(self._low, self._high)
        return self._gap(without(self._recipe, self.blamed, self._aliases))

    def refine(self) -> None:
        """Try each GEMM of each single culprit alone, and each operand of the GEMMs that are to blame."""
        for place, culprit in enumerate(self.culprits):
            if len(culprit.layers) > 1:
                continue
            threshold, name = self._threshold(culprit.gap), culprit.name
            gemms, operands = dict[str, float](), dict[str, float]()
            for gemm, pair in GEMM_OPERANDS.items():
                if all(_spec(self._recipe, role, side) is None for role, side in pair):
                    continue
                gemms[gemm] = self._gap(only([name], keeping(self._recipe, pair), self._aliases))
                self.culprits[place] = Culprit(culprit.layers, culprit.gap, dict(gemms), dict(operands))
            for gemm, caused in gemms.items():
                if caused < threshold:
                    continue
                for role, side in GEMM_OPERANDS[gemm]:
                    if _spec(self._recipe, role, side) is None:
                        continue
                    alone = keeping(self._recipe, [(role, side)])
                    operands[f"{gemm} {role} {side}"] = self._gap(only([name], alone, self._aliases))
                    self.culprits[place] = Culprit(culprit.layers, culprit.gap, gemms, dict(operands))

    def _threshold(self, gap: float) -> float:
        return max(self._none, SHARE_OF_GAP * gap) if math.isfinite(gap) else self._none

    def _alone(self, names: Sequence[str]) -> float:
        return self._gap(only(names, self._recipe, self._aliases))

    def _gap(self, recipe: Recipe) -> float:
        return _difference(self._runs.score(recipe), self._high)


def sensitivity(
    make_run: MakeRun,
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    *,
    share: float = 0.9,
    units: Sequence[str] | None = None,
    budget: int = 100,
    noise: float | None = None,
) -> Advice:
    """Rank layers by what each costs alone, and make a recipe that keeps ``share`` of the FLOPs in ``recipe``.

    Units go to high precision in the order of gap per FLOP, as long as ``share`` stays and their gaps are more than
    noise. The expected gap adds the gaps of the units that remain, as if they did not interact; one more run measures
    it.

    Args:
        make_run, model, recipe: as in :func:`bisect`.
        share: of the linear layers' FLOPs that must stay in ``recipe``, 0 to 1.
        units: patterns over layers' names that are tried and switched together, such as ``"blocks.3"``, each layer in
            exactly one; None is every layer by itself.
        budget: the most runs to make; ranking takes one per unit and three more.
        noise: gaps up to this are none: what two runs differ by that differ in nothing that matters, such as in their
            seeds. None estimates it, from below, as the larger of two: the most by which a unit's run beat high
            precision; and, of all units, the median of twice the standard error of a gap, from the differences between
            the runs in each step of the last quarter.

    Raises:
        ValueError: as :func:`bisect`; a share outside 0..1; units that overlap or leave layers out; a budget that does
            not suffice.
    """
    recipe = plain(recipe)
    require_callable("make_run", make_run)
    require_share(share)
    flops = flops_of(model)
    members = members_of(list(flops), units)
    budget = require_integer("budget", budget)
    if noise is not None and not (is_number(noise) and 0 <= noise < math.inf):
        raise ValueError(f"noise must be a finite number of at least 0, or None, got {noise!r}")
    if budget < len(members) + 3:
        raise ValueError(
            f"budget={budget} does not suffice for {len(members)} units, which take {len(members) + 3} runs; "
            "raise it, or pass coarser units, such as whole blocks"
        )
    runs, aliases = _Runs(make_run, budget), aliases_of(model)
    alone = {unit: only(names, recipe, aliases) for unit, names in members.items()}
    high = runs.score(HIGH_PRECISION)
    if not math.isfinite(high):
        raise ValueError("the run in high precision diverges too, so there is no gap to rank by")
    parts = parts_of(flops, members)
    gaps = {unit: _difference(runs.score(made), high) for unit, made in alone.items()}
    full = _difference(runs.score(recipe), high)
    if noise is None:
        errors = [runs.noise(made, HIGH_PRECISION) for made in alone.values()]
        noise = max(0.0, -min(gaps.values()), statistics.median(errors))
    switched = to_switch(gaps, parts, share, noise)
    advised = without(recipe, [name for unit in switched for name in members[unit]], aliases)
    ranking = sorted(members, key=lambda unit: -gaps[unit])
    return Advice(
        advised,
        tuple(Ranked(unit, gaps[unit], parts[unit], unit not in switched) for unit in ranking),
        1 - sum(parts[unit] for unit in switched),
        full,
        noise,
        sum(gaps[unit] for unit in members if unit not in switched),
        _difference(runs.score(advised), high),
        runs.count,
    )


def require_share(share: float) -> None:
    """Raise a ValueError unless ``share`` is between 0 and 1."""
    if not (is_number(share) and 0.0 <= share <= 1.0):
        raise ValueError(f"share must be between 0 and 1, got {share!r}")


def parts_of(flops: Mapping[str, int], members: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """``unit -> share of all FLOPs``, of units with the layers ``members``."""
    total = max(sum(flops.values()), 1)
    return {unit: sum(flops[name] for name in names) / total for unit, names in members.items()}


def to_switch(costs: Mapping[str, float], parts: Mapping[str, float], share: float, noise: float = 0.0) -> list[str]:
    """Units to put in high precision, in the order of cost per FLOP, for as long as ``share`` of the FLOPs stays."""
    switched, left = list[str](), 1.0
    for unit in sorted(costs, key=lambda unit: -costs[unit] / parts[unit] if parts[unit] else -math.inf):
        if costs[unit] > noise and left - parts[unit] >= share - 1e-9:
            switched.append(unit)
            left -= parts[unit]
    return switched


def keeping(recipe: Recipe, operands: Iterable[tuple[str, str]]) -> LinearRecipe:
    """``recipe`` with only ``operands``, pairs of role and side, cast; all others stay in high precision.

    An operand whose GEMM partner is not cast is not rotated either, since only two rotations cancel, and its products
    are summed in FP32 whatever ``recipe.accumulation`` is.
    """
    kept = set(operands)
    partner = {pair[place]: pair[1 - place] for pair in GEMM_OPERANDS.values() for place in (0, 1)}

    def cast(role: str, side: str) -> CastSpec | None:
        spec = _spec(recipe, role, side)
        if spec is None or (role, side) not in kept:
            return None
        alone = partner[role, side] not in kept or _spec(recipe, *partner[role, side]) is None
        return spec.replace(rotation=None) if alone else spec

    casts: dict[str, Any] = {
        role: Casts(
            cast(role, "rowwise"),
            cast(role, "columnwise"),
            recipe.casts(role).columnwise_source,
            recipe.casts(role).clipped_gradient and cast(role, "rowwise") is not None,
        )
        for role in TENSOR_TYPES
    }
    same: dict[str, Any] = {name: getattr(recipe, name) for name in ("backward_override", "backend", "accumulation")}
    if any(sum_complaints(recipe.accumulation, recipe.backward_override, *(casts[role] for role in TENSOR_TYPES))):
        same["accumulation"] = "fp32"
    return LinearRecipe(**casts, allow_biased=True, **same)


def _spec(recipe: Recipe, role: str, side: str) -> CastSpec | None:
    casts = recipe.casts(role)
    return casts.rowwise if side == "rowwise" else casts.columnwise


def plain(recipe: Recipe | None) -> Recipe:
    require_recipe(recipe)
    recipe = recipe or get_default_recipe()
    if recipe.is_delayed:
        raise ValueError(
            "delayed scaling and held scaling depend on the steps before, so their parts cannot be switched one by one"
        )
    recipe.casts("input")  # raises where the casts depend on module or step, or are not known
    return recipe


def flops_of(model: torch.nn.Module) -> dict[str, int]:
    """``name -> N K`` of every layer, by the name that recipes see; the experts of a ``GroupedLinear`` are one layer.

    Raises:
        ValueError: the model has no layer, or rules cannot tell its layers apart by their names.
    """
    require_model(model)
    layers = layers_of(model)
    flops: dict[str, int] = {}
    whole: dict[str, str] = {}
    for path, layer in layers.items():
        name = layer.true_name()
        if not name or isinstance(name, EndOfName):
            raise ValueError(f"layer {path!r} has no name for rules to match; fp4engine.convert(model) gives names")
        holder = ".".join(path.split(".")[: -layer.seen_as[0]]) if layer.seen_as[0] else path
        if whole.setdefault(name, holder) != holder:
            raise ValueError(
                f"recipes see {holder!r} and {whole[name]!r} by one name, {name!r}, as layers that were converted "
                "before they were put together or copied: call fp4engine.convert on the whole model"
            )
        flops[name] = flops.get(name, 0) + math.prod(layer.weight_shape())
    return flops


def members_of(names: list[str], units: Sequence[str] | None) -> dict[str, list[str]]:
    """``unit -> layers``."""
    if units is None:
        return {name: [name] for name in names}
    members = {unit: [name for name in names if covers(unit, name)] for unit in require_patterns("units", units)}
    for unit, covered in members.items():
        if not covered:
            raise ValueError(f"unit {unit!r} covers no layer; they are called, for example, {', '.join(names[:3])}")
    for name in names:
        found = [unit for unit, covered in members.items() if name in covered]
        if len(found) != 1:
            told = " and ".join(map(repr, found)) or "no unit"
            raise ValueError(f"every layer must be in exactly one unit, and {name!r} is in {told}")
    return members


def only(names: Sequence[str], recipe: Recipe, aliases: Aliases) -> RuledRecipe:
    """``recipe`` for the layers ``names``, and high precision for all others."""
    return RuledRecipe(HIGH_PRECISION, _rules(names, recipe, aliases))


def without(recipe: Recipe, names: Sequence[str], aliases: Aliases) -> RuledRecipe:
    """``recipe`` for all layers but ``names``."""
    return RuledRecipe(recipe, _rules(names, HIGH_PRECISION, aliases))


def _rules(names: Sequence[str], recipe: Recipe, aliases: Aliases) -> tuple[Rule, ...]:
    return tuple(Rule(recipe, literal(called)) for name in names for called in aliases.get(name, (name,)))


def _difference(loss: float, high: float) -> float:
    return loss - high if math.isfinite(loss) else math.inf
