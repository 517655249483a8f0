"""What ran in a model: counted by its linear modules, and by PyTorch where it multiplies outside them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp4engine.accounting.flops import watch
from fp4engine.accounting.planned import (
    FP4_FORMATS,
    is_never_called,
    linear_modules,
    other_matrices,
    plan_module,
)
from fp4engine.accounting.table import collapsed, patterns_for, table
from fp4engine.arguments import require_callable, require_model, require_patterns, require_rate
from fp4engine.functional import ExecutedGemms
from fp4engine.functional.plan import HIGH_PRECISION
from fp4engine.modules import Gemms, GroupedLinear, Linear
from fp4engine.modules.identity import known_names, plain_path, require_paths, require_rules, wrapped_at
from fp4engine.modules.learned_scales import parametrization_of
from fp4engine.names import covers
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.roles import GEMMS

_Table = dict[tuple[str, str], int]

_NAMED = 8
"""The most names that an error lists."""


@dataclass(frozen=True)
class ExecutedModule:
    """What one module ran.

    Attributes:
        name: dotted name in the model.
        counts: ``(gemm, formats) -> times``.
        flops: ``(gemm, formats) -> 2 M N K`` over those times; in a report of one step without what PyTorch counts.
    """

    name: str
    counts: _Table
    flops: _Table


@dataclass(frozen=True)
class ExecutedReport:
    """What a model really ran in eager mode; ``print(report)`` shows it as a table.

    Attributes:
        modules: every counted module, those that ran nothing included.
        others: ``operator -> FLOPs`` of every product in high precision that PyTorch computed during one step: of
            plain linear modules, experts, attention, convolutions; empty for a report without a step.
        opaque: operators that ran in the step and of which nobody knows how much they multiply.
        uncounted: linear modules that do not count, such as one that was put in after ``convert``; empty for a report
            of one step, where PyTorch counts their products.
    """

    modules: tuple[ExecutedModule, ...]
    others: dict[str, int] = field(default_factory=dict[str, int])
    opaque: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """GEMMs of linear modules by formats, e.g. ``{"e2m1 x e2m1": 12, "high_precision": 3}``."""
        return _by_formats(module.counts for module in self.modules)

    @property
    def flops(self) -> Counter[str]:
        """FLOPs by formats."""
        return _by_formats(module.flops for module in self.modules) + Counter(
            {HIGH_PRECISION: sum(self.others.values())}
        )

    @property
    def fp4_gemms(self) -> int:
        """GEMMs with both operands in FP4."""
        return _of_fp4(self.counts)

    @property
    def high_precision_gemms(self) -> int:
        """GEMMs of linear modules with neither operand quantized."""
        return self.counts[HIGH_PRECISION]

    @property
    def fp4_share(self) -> float:
        """FLOPs of FP4 GEMMs over all FLOPs counted; NaN if there are none.

        Of one step that is everything that multiplied; without a step, linear modules only.
        """
        flops = self.flops
        return _of_fp4(flops) / flops.total() if flops.total() else float("nan")

    def __str__(self) -> str:
        rows = [(m.name, *(_times(m.counts, gemm) for gemm in GEMMS)) for m in self.modules]
        text = table(("module", *GEMMS), collapsed(rows))
        if self.others:
            others = [(name, f"{flops:,}") for name, flops in sorted(self.others.items())]
            text += "\n" + table(("counted by PyTorch, in high precision", "FLOPs"), others)
        if self.opaque:
            text += f"\nnot counted, since nobody knows what they multiply: {', '.join(self.opaque)}"
        if self.uncounted:
            names = ", ".join(name for (name,) in collapsed((name,) for name in self.uncounted))
            text += f"\nnot counted: {names} (convert has not seen them, or nn.MultiheadAttention never calls them)"
        total = ", ".join(f"{times} GEMMs {formats}" for formats, times in self.counts.items()) or "no GEMM was counted"
        share = f"; {self.fp4_share:.1%} of FLOPs in FP4" if self.flops.total() else ""
        return f"{text}\n{total}{share}"


def executed_gemms(model: nn.Module, step: Callable[[], Any] | None = None) -> ExecutedReport:
    """What really ran in a converted model, in eager mode.

    Args:
        step: called once, without arguments, e.g. a whole training step; the report is about this call alone, and
            PyTorch's ``FlopCounterMode`` counts every product in it, inside linear modules or not. Compiled functions
            run eagerly in it. None: what the linear modules have counted since they were converted.

    Raises:
        ValueError: ``model`` is no module, or ``step`` no function.
    """
    require_model(model)
    if step is not None:
        require_callable("step", step)
    counters = [(name, executed) for name, module in model.named_modules() if (executed := counter_of(module))]
    if step is None:
        never_called = is_never_called(model)
        uncounted = (name for name, m in linear_modules(model) if counter_of(m) is None or m in never_called)
        modules = (ExecutedModule(name, dict(e.counts), dict(e.flops)) for name, e in counters)
        return ExecutedReport(tuple(modules), uncounted=tuple(uncounted))
    before = [(dict(e.counts), dict(e.flops), dict(e.by_torch)) for _, e in counters]
    watched = watch(step)
    ran: list[ExecutedModule] = []
    for (name, executed), (counts, flops, by_torch) in zip(counters, before, strict=True):
        torch_flops = {(gemm, HIGH_PRECISION): n for gemm, n in _new(executed.by_torch, by_torch).items()}
        ran.append(ExecutedModule(name, _new(executed.counts, counts), _new(_new(executed.flops, flops), torch_flops)))
    return ExecutedReport(tuple(ran), dict(watched.flops), tuple(sorted(watched.opaque)))


def assert_quantized(
    model: nn.Module,
    step: Callable[[], Any] | None = None,
    *,
    min_fraction: float | None = None,
    recipe: Recipe | None = None,
    keep_high_precision: Sequence[str] = (),
) -> None:
    """Assert that ``model`` multiplies in FP4 what it was to, and that nothing multiplies unseen.

    Without ``min_fraction``: every linear module that ``recipe`` plans in FP4 ran, each of its GEMMs that ran did so
    in the planned formats, and every other matrix of the model is kept in high precision by name. With it: at least
    this share of the FLOPs ran in FP4; with a ``step`` of all FLOPs, without one of those in linear modules, which then
    have to be all that multiplies by a matrix. Products by buffers and of two activations are seen only with both.

    Args:
        step: as in :func:`executed_gemms`; None asserts about all that ran since the conversion.
        min_fraction: from 0 to 1.
        recipe: the recipe that was in force; None takes the modules' own, and ``get_default_recipe()`` where they have
            none, as :func:`~fp4engine.convert` does for its plan.
        keep_high_precision: patterns over names of linear modules, of other matrices and of operators
            (``"flash_attn::*"``) that are known to multiply in high precision; the patterns given to ``convert`` fit,
            also where DDP or another wrapper has put names in front of theirs since.

    Raises:
        AssertionError: it is not so; the message names what ran otherwise, or cannot be seen.
        ValueError: ``min_fraction`` is not in 0..1, ``recipe`` is none, a pattern covers nothing, a rule of the recipe
            matches no layer, or none that is left in the model, or a rule asks for the name of a layer that is not
            where ``convert`` has found it.
    """
    if min_fraction is not None:
        require_rate("min_fraction", min_fraction)
    require_recipe(recipe)
    keep_high_precision = require_patterns("keep_high_precision", keep_high_precision)
    report = executed_gemms(model, step)
    if not report.flops.total():
        raise AssertionError(
            "no GEMM of a linear module was counted: convert the model, then run it in eager mode "
            "(compiled regions are not counted)"
        )
    unseen = _unseen(
        model, report, keep_high_precision, without_parameters=step is not None and min_fraction is not None
    )
    if unseen:
        named = [f"{name} ({why})" for name, why in collapsed(unseen.items())]
        more = [f"and {len(named) - _NAMED} more, which the plan of convert lists"] if len(named) > _NAMED else []
        raise AssertionError(
            f"no layer of fp4engine counts what multiplies by {'; '.join(named[:_NAMED] + more)}. Where all of it is "
            f"to stay in high precision, pass keep_high_precision={_patterns(model, [*keep_high_precision], unseen)}; "
            "or give step=... and min_fraction=... to have PyTorch count all products of one step"
        )
    own = [module.recipe for module in model.modules() if isinstance(module, Gemms) and module.recipe is not None]
    for each in {each.number: each for each in ([recipe] if recipe is not None else own)}.values():
        require_rules(each, known_names(model))
        require_paths(each, model)
    if min_fraction is None:
        if found := [*_departures(model, report, recipe, keep_high_precision)]:
            faults = [name + fault for name, fault in collapsed(found)]
            if set(report.counts) == {HIGH_PRECISION}:
                faults.append(
                    "every product ran in high precision: put the forward inside `with fp4engine.autocast():`, or give "
                    "the layers a recipe of their own, convert(model, recipe)"
                )
            raise AssertionError("not everything that was planned in FP4 ran so:\n" + "\n".join(faults) + f"\n{report}")
    elif not report.fp4_share >= min_fraction:
        raise AssertionError(
            f"{report.fp4_share:.1%} of the FLOPs ran in FP4, expected at least {min_fraction:.1%}\n{report}"
        )


def _unseen(
    model: nn.Module, report: ExecutedReport, patterns: Sequence[str], without_parameters: bool
) -> dict[str, str]:
    """``name -> why`` of what multiplies uncounted, less what ``patterns`` cover."""
    never_called = is_never_called(model)
    linears = dict(linear_modules(model))
    found = {name: "an operator that PyTorch has no formula for" for name in report.opaque}
    if not without_parameters:
        for name, module in linears.items():
            if module in never_called:
                found[f"{name}.weight"] = "nn.MultiheadAttention reads it and never calls its module"
            elif counter_of(module) is None:
                found[f"{name}.weight"] = "an nn.Linear that convert has not seen"
            elif (chain := parametrization_of(module)) is not None:
                kinds = ", ".join(type(part).__name__ for part in chain)
                found[f"{name}.weight"] = f"the parametrization {kinds} computes it, perhaps by products of its own"
        found.update((name, matrix.reason) for name, matrix in other_matrices(model).items())
    keeps = _keeper(model)
    names = {*found, *linears, *other_matrices(model)}
    for pattern in patterns:
        if not any(keeps([pattern], name) for name in names):
            raise ValueError(
                f"pattern {pattern!r} in keep_high_precision covers no linear module and no matrix of the model"
            )
    return {name: why for name, why in found.items() if not keeps(patterns, name)}


def _keeper(model: nn.Module) -> Callable[[Sequence[str], str], bool]:
    """Whether patterns cover a name, or what it was before a wrapper such as DDP, unless another has that now."""
    around = f"{wrapped_at(model)}."
    names = {*other_matrices(model)}.union(*((name, f"{name}.weight") for name, _ in linear_modules(model)))
    taken = {name.removeprefix(around) for name in names}

    def keeps(patterns: Sequence[str], name: str) -> bool:
        inside = name.removeprefix(around)
        called = {name, inside, *({plain_path(inside)} - taken)}
        return any(covers(pattern, each) for pattern in patterns for each in called)

    return keeps


def _patterns(model: nn.Module, given: list[str], unseen: Iterable[str]) -> list[str]:
    """``given`` and patterns that cover ``unseen`` and nothing else."""
    known = {name for name, _ in linear_modules(model)} | other_matrices(model).keys()
    others = known.difference(unseen, (name.removesuffix(".weight") for name in unseen))
    return list(dict.fromkeys([*given, *patterns_for(unseen, others)]))


def _departures(
    model: nn.Module, report: ExecutedReport, recipe: Recipe | None, patterns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """``(name, fault)`` of every module that did not run what was planned in FP4, unless ``patterns`` cover it."""
    counts = {module.name: module.counts for module in report.modules}
    planned_in_fp4, keeps = False, _keeper(model)
    for name, module in linear_modules(model):
        planned = plan_module(name, module, "", recipe)
        if FP4_FORMATS.isdisjoint(planned.formats) or keeps(patterns, name):
            continue
        planned_in_fp4 = True
        owner = model.get_submodule(name)
        parts = [f"{name}.gemms.{i}" for i in range(owner.num_gemms)] if isinstance(owner, GroupedLinear) else [name]
        ran = [key for part in parts for key in counts[part]]
        if not ran:
            yield name, " did not run"
        for gemm, formats in zip(GEMMS, planned.formats, strict=True):
            for other in sorted({executed for which, executed in ran if which == gemm and executed != formats}):
                yield name, f": {gemm} was planned as {formats} and ran as {other}"
    if not planned_in_fp4:
        yield "", "no linear module is planned in FP4"


class _Counter(ExecutedGemms):
    """The counter of a module of PyTorch's. A copy begins at zero: what ran in a module did not run in its copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counter, ()


def counter_of(module: nn.Module) -> ExecutedGemms | None:
    """Where ``module`` counts its GEMMs; None if it does not."""
    executed = vars(module).get("executed")  # getattr would find that of what a wrapper wraps, a second time
    return executed if isinstance(executed, ExecutedGemms) else None


def count_high_precision(module: nn.Linear) -> None:
    """Count the GEMMs of a module that is left alone."""
    if counter_of(module) is None:
        vars(module)["executed"] = _Counter()
        module.register_forward_hook(_record, with_kwargs=True)


def stop_counting(module: nn.Module) -> None:
    """Undo :func:`count_high_precision`, if it was called."""
    for key, hook in list(module._forward_hooks.items()):
        if hook is _record:
            module._forward_hooks.pop(key)
            module._forward_hooks_with_kwargs.pop(key, None)
            del vars(module)["executed"]


def _record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook; silent while ``torch.compile`` traces, and once the module was converted after all."""
    if torch.compiler.is_compiling() or isinstance(module, Linear):
        return
    assert isinstance(module, nn.Linear)
    executed = counter_of(module)
    assert executed is not None
    inp, weight = args[0] if args else kwargs["input"], module._parameters.get("weight")
    if weight is not None:
        executed.record_high_precision(inp, weight.shape[0], weight.requires_grad)
        return
    # A weight that is computed from others is not computed here: a spectral norm takes a step whenever it is.
    of_bias = ("bias", "parametrizations.bias")
    trained = any(own.requires_grad for name, own in module.named_parameters() if not name.startswith(of_bias))
    executed.record_high_precision(inp, module.out_features, trained)


def _new(after: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """What was added, without zeros."""
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def _of_fp4(by_formats: Counter[str]) -> int:
    return sum(value for formats, value in by_formats.items() if formats in FP4_FORMATS)


def _by_formats(tables: Iterable[_Table]) -> Counter[str]:
    total: Counter[str] = Counter()
    for table_of_one in tables:
        for (_, formats), value in table_of_one.items():
            total[formats] += value
    return total


def _times(counts: _Table, gemm: str) -> str:
    found = [f"{times} {formats}" for (name, formats), times in counts.items() if name == gemm]
    return ", ".join(found) or "-"
