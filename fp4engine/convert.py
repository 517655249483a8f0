"""Whole models: swap ``nn.Linear`` for :class:`fp4engine.Linear`, say what will run, and count what ran.

Legend: N out_features, K in_features of a linear module's weight [N, K].
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp4engine.formats import E2M1
from fp4engine.functional import ExecutedGemms, make_linear_plan
from fp4engine.functional.plan import GEMMS, HIGH_PRECISION
from fp4engine.modules import Gemms, GroupedLinear, Linear
from fp4engine.modules.gemms import require_own_recipe
from fp4engine.names import covers
from fp4engine.recipe import Recipe, RuledRecipe
from fp4engine.state import get_default_recipe

FP4_FORMATS = f"{E2M1} x {E2M1}"

ModuleFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class PlannedModule:
    """One linear module of a :class:`ConversionPlan`.

    Attributes:
        name: dotted name in the model; a ``GroupedLinear`` is one module, since a token sees one of its weights.
        shape: (N, K).
        formats: what fprop, dgrad and wgrad multiply, e.g. ``"e2m1 x e2m1"`` or ``"high_precision"``.
        reason: why the module was left alone; empty if it was converted, or is fp4engine's anyway.
    """

    name: str
    shape: tuple[int, int]
    formats: tuple[str, str, str]
    reason: str = ""

    @property
    def flops_per_token(self) -> int:
        """``2 N K`` for each of the three GEMMs."""
        return 2 * self.shape[0] * self.shape[1] * len(GEMMS)

    @property
    def fp4_flops_per_token(self) -> int:
        """The part of :attr:`flops_per_token` whose operands are both FP4."""
        return self.flops_per_token * self.formats.count(FP4_FORMATS) // len(GEMMS)


@dataclass(frozen=True)
class ConversionPlan:
    """What :func:`convert` did, module by module; ``print(plan)`` shows it as a table.

    Attributes:
        modules: every linear module of the model, in the model's order, those inside ``LayerNormMLP`` and its like too.
    """

    modules: tuple[PlannedModule, ...]

    @property
    def converted(self) -> tuple[PlannedModule, ...]:
        """The modules that follow the recipe."""
        return tuple(module for module in self.modules if not module.reason)

    @property
    def left_alone(self) -> tuple[PlannedModule, ...]:
        """The modules that stayed what they were, each with its reason."""
        return tuple(module for module in self.modules if module.reason)

    @property
    def fp4_share(self) -> float:
        """FLOPs of FP4 GEMMs over FLOPs of all the linear modules' GEMMs, every module seeing every token once."""
        total = sum(module.flops_per_token for module in self.modules)
        return sum(module.fp4_flops_per_token for module in self.modules) / total

    @property
    def summary(self) -> str:
        """One line: how many modules, and the share of FLOPs in FP4."""
        return (
            f"{len(self.converted)} of {len(self.modules)} linear modules converted, "
            f"{self.fp4_share:.1%} of linear FLOPs planned in FP4"
        )

    def __str__(self) -> str:
        rows = [(m.name, f"{m.shape[0]} x {m.shape[1]}", *m.formats, m.reason) for m in self.modules]
        return f"{_table(('module', 'N x K', *GEMMS, 'left alone because'), rows)}\n{self.summary}"


@dataclass(frozen=True)
class ExecutedModule:
    """What one module ran since it was converted.

    Attributes:
        name: dotted name in the model.
        counts: ``(gemm, formats) -> times``.
        flops: ``(gemm, formats) -> 2 M N K`` over those times.
    """

    name: str
    counts: dict[tuple[str, str], int]
    flops: dict[tuple[str, str], int]


@dataclass(frozen=True)
class ExecutedReport:
    """What the linear modules of a model really ran in eager mode; ``print(report)`` shows it as a table.

    Attributes:
        modules: every counted module, those that ran nothing included.
    """

    modules: tuple[ExecutedModule, ...]

    @property
    def counts(self) -> Counter[str]:
        """GEMMs by formats, e.g. ``{"e2m1 x e2m1": 12, "high_precision": 3}``."""
        return _by_formats(module.counts for module in self.modules)

    @property
    def flops(self) -> Counter[str]:
        """FLOPs by formats."""
        return _by_formats(module.flops for module in self.modules)

    @property
    def fp4_gemms(self) -> int:
        """GEMMs with both operands in FP4."""
        return self.counts[FP4_FORMATS]

    @property
    def high_precision_gemms(self) -> int:
        """GEMMs with neither operand quantized."""
        return self.counts[HIGH_PRECISION]

    @property
    def fp4_share(self) -> float:
        """FLOPs of FP4 GEMMs over FLOPs of all counted GEMMs; NaN if none was counted."""
        flops = self.flops
        return flops[FP4_FORMATS] / flops.total() if flops.total() else float("nan")

    def __str__(self) -> str:
        rows = [(m.name, *(_times(m.counts, gemm) for gemm in GEMMS)) for m in self.modules]
        total = ", ".join(f"{times} GEMMs {formats}" for formats, times in self.counts.items()) or "no GEMM was counted"
        return f"{_table(('module', *GEMMS), rows)}\n{total}; {self.fp4_share:.1%} of FLOPs in FP4"


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    module_filter_fn: ModuleFilter | None = None,
    keep_high_precision: Sequence[str] = (),
) -> ConversionPlan:
    """Swap every ``nn.Linear`` below ``model`` for an :class:`fp4engine.Linear` with the same parameters, in place.

    Modules left alone stay the same objects. Converting again changes nothing that is converted already, except
    that a ``recipe`` is then set on it; so it is on ``LayerNormMLP`` and its like.

    Args:
        model: anything but an ``nn.Linear`` itself.
        recipe: recipe that the modules also follow outside autocast regions; None: they follow autocast only, and
            the plan shows the formats of ``get_default_recipe()``.
        module_filter_fn: ``(module, name) -> bool``; False leaves the module alone.
        keep_high_precision: names to leave alone with everything below them, as :func:`fp4engine.names.covers` reads
            patterns: ``*`` is one segment or part of one, ``**`` any number of them.

    Raises:
        ValueError: ``model`` is an ``nn.Linear`` or has no linear module, a pattern covers none or one that is
            fp4engine's already, modules cannot follow ``recipe`` outside regions (it is a schedule, or has delayed
            scaling), or a rule of it matches no module. The model is then as it was.
    """
    if isinstance(model, nn.Linear):
        raise ValueError(
            "convert swaps the linear modules inside a model, and this model is itself one; "
            "use fp4engine.Linear.from_linear(model)"
        )
    require_own_recipe(recipe)
    linears = dict(_linear_modules(model))
    if not linears:
        raise ValueError(f"there is no nn.Linear below this {type(model).__name__}: nothing to convert")
    if isinstance(recipe, RuledRecipe):
        recipe.check([module.name if isinstance(module, Gemms) else name for name, module in linears.items()])
    reasons = _reasons(model, linears, module_filter_fn, _as_patterns(keep_high_precision))
    swaps: dict[nn.Module, Linear] = {
        module: Linear.from_linear(module, name)
        for name, module in linears.items()
        if not isinstance(module, Gemms) and not reasons[name]
    }
    planned = (_planned(name, swaps.get(module, module), reasons[name], recipe) for name, module in linears.items())
    plan = ConversionPlan(tuple(planned))
    for name, module in linears.items():
        if reasons[name]:
            assert isinstance(module, nn.Linear)
            _count_high_precision(module)
    for parent in (*model.modules(), *swaps.values()):
        for child_name, child in list(parent._modules.items()):
            if child in swaps:
                setattr(parent, child_name, swaps[child])
        if recipe is not None and isinstance(parent, Gemms):
            parent.recipe = recipe
    return plan


def last_blocks(model: nn.Module, count: int) -> tuple[str, ...]:
    """Patterns for :func:`convert` that keep the last ``count`` blocks of ``model`` in high precision.

    The blocks are the items of the ``nn.ModuleList`` that holds most linear weights.

    Raises:
        ValueError: there is no such list, or it has fewer than ``count`` blocks.
    """
    lists = [
        (_linear_numel(module), name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        raise ValueError("last_blocks looks for an nn.ModuleList of blocks, and the model has none; write patterns")
    _, name, length = max(lists, key=itemgetter(0))
    if not 0 <= count <= length:
        raise ValueError(f"count must be between 0 and the {length} blocks of {name!r}, got {count}")
    return tuple(f"{name}.{index}" for index in range(length - count, length))


def executed_gemms(model: nn.Module) -> ExecutedReport:
    """What really ran in the linear modules of a converted model, in eager mode, since it was converted."""
    counted = ((name, _counter(module)) for name, module in model.named_modules())
    return ExecutedReport(
        tuple(
            ExecutedModule(name, dict(executed.counts), dict(executed.flops))
            for name, executed in counted
            if executed is not None
        )
    )


def assert_quantized(model: nn.Module, *, min_fraction: float) -> None:
    """Assert that at least ``min_fraction`` (0 to 1) of the FLOPs that ran in linear modules ran in FP4.

    Raises:
        AssertionError: less did, or nothing was counted at all; the message shows what ran.
        ValueError: ``min_fraction`` is not in 0..1.
    """
    if not 0.0 <= min_fraction <= 1.0:
        raise ValueError(f"min_fraction must be between 0 and 1, got {min_fraction}")
    report = executed_gemms(model)
    if not report.flops.total():
        raise AssertionError(
            "no GEMM of a linear module was counted: convert the model, then run it in eager mode "
            "(compiled regions are not counted)"
        )
    if report.fp4_share < min_fraction:
        raise AssertionError(
            f"{report.fp4_share:.1%} of the FLOPs ran in FP4, expected at least {min_fraction:.1%}\n{report}"
        )


def _as_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ValueError(f"keep_high_precision must be a sequence of patterns, got the string; write [{patterns!r}]")
    return tuple(patterns)


def _reasons(
    model: nn.Module,
    linears: dict[str, nn.Linear | Gemms],
    module_filter_fn: ModuleFilter | None,
    patterns: tuple[str, ...],
) -> dict[str, str]:
    """Why each linear module is left alone; empty if it is not."""
    kept = _kept(linears, patterns)
    fused = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    reasons: dict[str, str] = {}
    for name, module in linears.items():
        if isinstance(module, Gemms):
            reason = ""
        elif name in kept:
            reason = f"kept by {kept[name]!r}"
        elif module in fused:
            reason = "nn.MultiheadAttention reads its weight and never calls it"
        else:
            reason = _obstacle(module)
            if not reason and module_filter_fn is not None and not module_filter_fn(module, name):
                reason = "module_filter_fn said no"
        reasons[name] = reason
    return reasons


def _kept(linears: dict[str, nn.Linear | Gemms], patterns: tuple[str, ...]) -> dict[str, str]:
    """``name -> the pattern that keeps it``."""
    kept: dict[str, str] = {}
    for pattern in patterns:
        covered = [name for name in linears if covers(pattern, name)]
        if not covered:
            deeper = f"**.{pattern}"  # patterns begin at the top of the model
            meant = f"; did you mean {deeper!r}?" if any(covers(deeper, name) for name in linears) else ""
            raise ValueError(
                f"pattern {pattern!r} covers no nn.Linear of the model; its linear modules are called, "
                f"for example, {', '.join(map(repr, list(linears)[-3:])) or 'nothing: there are none'}{meant}"
            )
        for name in covered:
            if isinstance(linears[name], Gemms):
                raise ValueError(
                    f"pattern {pattern!r} covers {name!r}, which is fp4engine's already; "
                    "build it as nn.Linear to keep it in high precision"
                )
            kept.setdefault(name, pattern)
    return kept


def _obstacle(module: nn.Linear) -> str:
    """Why a swap would change what ``module`` computes; empty if it would not."""
    kind = type(module).__name__
    if type(module).forward is not nn.Linear.forward:
        return f"{kind} has a forward of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the object; convert before wrapping"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    if is_lazy(weight):
        return "its weight has no shape yet (lazy); run the model once first"
    return ""


def _linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear | Gemms]]:
    """What multiplies by a weight, by its name in the model; of a ``GroupedLinear``, the first of its equals."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            first = module.gemms[0]
            assert isinstance(first, Gemms)
            yield name, first
        elif isinstance(module, nn.Linear) or (isinstance(module, Gemms) and module.module_type == "linear"):
            yield name, module


def _shape(module: nn.Linear | Gemms) -> tuple[int, int]:
    """(N, K)."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    rows, cols = module.shape
    return rows, cols


def _planned(name: str, module: nn.Linear | Gemms, reason: str, recipe: Recipe | None) -> PlannedModule:
    formats = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)
    shape = _shape(module)
    if isinstance(module, Gemms):
        recipe = recipe or module.recipe or get_default_recipe()
        plan = make_linear_plan(recipe, module.module_type, module.name, ExecutedGemms(), shape=shape).formats
        formats = (plan["fprop"], plan["dgrad"], plan["wgrad"])
    return PlannedModule(name, shape, formats, reason)


def _counter(module: nn.Module) -> ExecutedGemms | None:
    executed = getattr(module, "executed", None)
    return executed if isinstance(executed, ExecutedGemms) else None


def _count_high_precision(module: nn.Linear) -> None:
    """Count the GEMMs of a module that is left alone."""
    if _counter(module) is None:
        vars(module)["executed"] = ExecutedGemms()
        module.register_forward_hook(_record, with_kwargs=True)


def _record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook; silent while ``torch.compile`` traces, and once the module was converted after all."""
    if torch.compiler.is_compiling() or isinstance(module, Linear):
        return
    assert isinstance(module, nn.Linear)
    executed = _counter(module)
    assert executed is not None
    executed.record_high_precision(args[0] if args else kwargs["input"], module.weight)


def _linear_numel(module: nn.Module) -> int:
    return sum(math.prod(_shape(linear)) for _, linear in _linear_modules(module))


def _by_formats(tables: Iterable[dict[tuple[str, str], int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for table in tables:
        for (_, formats), value in table.items():
            total[formats] += value
    return total


def _times(counts: dict[tuple[str, str], int], gemm: str) -> str:
    found = [f"{times} {formats}" for (name, formats), times in counts.items() if name == gemm]
    return ", ".join(found) or "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)
