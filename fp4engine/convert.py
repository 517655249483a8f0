"""Whole models: swap ``nn.Linear`` for :class:`fp4engine.Linear`, and say what will multiply and what will not."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any, TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from fp4engine.accounting.executed import count_high_precision, counter_of, stop_counting
from fp4engine.accounting.planned import (
    ConversionPlan,
    is_never_called,
    linear_modules,
    other_matrices,
    plan_module,
)
from fp4engine.accounting.table import collapsed
from fp4engine.arguments import require_bool, require_callable, require_integer, require_model, require_patterns
from fp4engine.modules import Gemms, Linear
from fp4engine.modules.adoption import (
    adapter_names,
    adoptable,
    forget_storage,
    gemms_of,
    is_conv1d,
    release,
    require_plain_class,
    to_linear,
)
from fp4engine.modules.identity import forget_root, identify, require_rules, seen_names
from fp4engine.modules.learned_scales import scales_of
from fp4engine.modules.linear import own_attributes, own_forward, require_free_names
from fp4engine.modules.plans import require_own_recipe
from fp4engine.modules.torch_attention import TorchMultiheadAttention
from fp4engine.names import covers, dotted
from fp4engine.quantizers.base import FLOATS
from fp4engine.recipe import Recipe

ModuleFilter = Callable[[nn.Module, str], bool]

_NAMED = 4
"""The most layers, or groups of alike ones, that an error lists."""


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    module_filter_fn: ModuleFilter | None = None,
    keep_high_precision: Sequence[str] = (),
    *,
    adapters: bool = False,
) -> ConversionPlan:
    """Swap every ``nn.Linear`` below ``model`` for an :class:`fp4engine.Linear` with the same parameters, in place.

    ``nn.MultiheadAttention`` and, of transformers, ``Conv1D`` and experts in one parameter multiply by the recipe too;
    they stay the same objects. So do modules left alone, and the names of all parameters; :func:`revert` undoes it.
    Converting again changes nothing that is converted already, except that a ``recipe`` is then set on it; so it is on
    ``LayerNormMLP`` and its like.

    Args:
        model: anything but an ``nn.Linear`` itself.
        recipe: recipe that the modules also follow outside autocast regions; None: they follow autocast only, and
            the plan shows the formats of ``get_default_recipe()``.
        module_filter_fn: ``(module, name) -> bool``, asked of everything that could follow a recipe; False leaves the
            module alone.
        keep_high_precision: names to leave alone with everything below them, as :func:`fp4engine.names.covers` reads
            patterns: ``*`` is one segment or part of one, ``**`` any number of them. Linear modules, and the plan's
            :attr:`~fp4engine.ConversionPlan.matrices`, which stay in high precision anyway. A module that has several
            names is left alone if a pattern covers one of them.
        adapters: convert the adapters of PEFT's layers too, whose GEMMs are narrow; otherwise they stay as they are,
            as they do when they are added to a converted model.

    Raises:
        ValueError: ``model`` is an ``nn.Linear`` or has no linear module, a pattern covers none or one that is
            fp4engine's already, modules cannot follow ``recipe`` outside regions (it is a schedule, or has delayed
            scaling), a rule of it matches no module, or one name of a module and not another, or another argument is
            of another kind; or nothing at all can be converted, and not because the arguments leave it alone. The model
            is then as it was. A linear module was given an attribute by a name that fp4engine's layers use. A
            ``recipe`` for weights that learn their scales, and would be cast twice.
    """
    require_own_recipe(recipe)
    plan = convert_for_regions(model, recipe, module_filter_fn, keep_high_precision, adapters)
    for module in model.modules():
        if isinstance(module, Gemms):  # a recipe that stays is told anew too: its rules now read names of this model
            module.recipe = module.recipe if recipe is None else recipe
    return plan


def convert_for_regions(
    model: nn.Module,
    recipe: Recipe | None,
    module_filter_fn: ModuleFilter | None,
    keep_high_precision: Sequence[str],
    adapters: bool = False,
) -> ConversionPlan:
    """:func:`convert` for a model that is to run in regions of ``recipe``, which need not be one to follow outside.

    The rules of ``recipe`` are checked, and the plan shows its formats.

    Raises:
        ValueError: as :func:`convert`; ``recipe`` is a schedule, which has no formats without a step.
    """
    require_model(model)
    if isinstance(model, nn.Linear):
        raise ValueError(
            "convert swaps the linear modules inside a model, and this model is itself one; "
            "use fp4engine.Linear.from_linear(model)"
        )
    if module_filter_fn is not None:
        require_callable("module_filter_fn", module_filter_fn)
    require_bool("adapters", adapters)
    learned = [name for name, module in model.named_modules() if scales_of(module) is not None]
    if learned and recipe is not None:
        raise ValueError(
            f"recipe must be None while {learned[0]!r} learns the scales of its weight, as qat.prepare(learn=...) made "
            f"it: it would cast what they decode to a second time, got {recipe!r}; call qat.finalize(model) first"
        )
    patterns = require_patterns("keep_high_precision", keep_high_precision)
    adopted: list[nn.Module] = []
    try:
        called = _names(model)
        for name, module, adopt in list(adoptable(model)):
            own = [*(parameter for parameter, _ in module.named_parameters(recurse=False)), *gemms_of(module).values()]
            names = [other for alias in called[name] for other in (alias, *(dotted(alias, part) for part in own))]
            kept = any(covers(pattern, other) for pattern in patterns for other in names)
            if not kept and (module_filter_fn is None or module_filter_fn(module, name)):
                adopt()
                adopted.append(module)
        return _convert_linears(model, recipe, module_filter_fn, patterns, adapters)
    except BaseException:
        for module in adopted:
            release(module)
        raise


def revert(model: nn.Module) -> None:
    """Undo :func:`convert`, in place: the modules are what they were, with the parameters that they have now.

    Weights that are stored as codes become the values that they decode to. Modules of fp4engine that replace nothing
    stay, such as ``LayerNormMLP`` and those of a subclass of ``Linear`` with a forward of its own.

    Raises:
        ValueError: ``model`` is a :class:`fp4engine.Linear` itself, or nothing below it was converted; a module was
            parametrized since, a list or a bound method holds it besides, or its forward was replaced on the object, as
            Accelerate's hooks do.
    """
    require_model(model)
    if isinstance(model, Linear):
        raise ValueError("revert swaps the modules inside a model, and this model is itself an fp4engine.Linear")
    held = _held_besides(model)
    for name, module in model.named_modules():
        if not (_replaces_linear(module) or isinstance(module, TorchMultiheadAttention) or is_conv1d(module)):
            continue
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {name!r} was replaced on the object, and goes on multiplying as before; delete the "
                "attribute first, after accelerate.hooks.remove_hook_from_submodules(model) where that put it there"
            )
        if module in held:
            raise ValueError(f"{name!r} would go on following recipes: {held[module]}")
        require_plain_class(name, module, "revert")
    swaps: dict[nn.Module, nn.Module] = {m: to_linear(m) for m in model.modules() if _replaces_linear(m)}
    modules = list(model.modules())
    forget_storage(model)
    released = [release(module) for module in modules]
    if not swaps and not any(released):
        raise ValueError(f"nothing below this {type(model).__name__} was converted")
    for module in modules:
        forget_root(module)
        stop_counting(module)
    _swap(modules, swaps)


def _replaces_linear(module: nn.Module) -> TypeGuard[Linear]:
    """Whether ``module`` is a Linear and computes as one: not of somebody's subclass with a forward of its own."""
    return isinstance(module, Linear) and type(module).forward.__module__.startswith("fp4engine.")


def _convert_linears(
    model: nn.Module,
    recipe: Recipe | None,
    module_filter_fn: ModuleFilter | None,
    patterns: tuple[str, ...],
    adapters: bool,
) -> ConversionPlan:
    """:func:`convert`, once everything else has been adopted."""
    linears = dict(linear_modules(model))
    called = _names(model)
    if not linears:
        raise ValueError(f"there is no nn.Linear below this {type(model).__name__}: nothing to convert")
    seen = seen_names(model)
    if recipe is not None:
        require_rules(recipe, seen.values())
    matrices = other_matrices(model)
    kept = _kept(linears, matrices, patterns, called)
    if not adapters:
        kept |= {name: "an adapter; adapters=True converts it" for name in adapter_names(model) if name in linears}
    never_called, held = is_never_called(model), _held_besides(model)
    reasons: dict[str, str] = {}  # why each is left alone; empty if it is not
    for name, module in linears.items():
        if isinstance(module, Gemms):
            reason = ""
        elif name in kept:
            reason = kept[name]
        elif module in never_called:
            reason = "nn.MultiheadAttention reads its weight and never calls it"
        else:
            reason = _obstacle(module) or held.get(module, "")
            if not reason and module_filter_fn is not None and not module_filter_fn(module, name):
                reason = "module_filter_fn said no"
        reasons[name] = reason
    if all(reasons.values()):
        _require_asked(model, {name: linears[name] for name in linears if name not in kept}, reasons, module_filter_fn)
    for name, module in linears.items():
        # those left alone get no attribute but the count of their products
        if not reasons[name] or ("executed" in vars(module) and counter_of(module) is None):
            require_free_names(repr(name), module)
    swaps: dict[nn.Module, Linear] = {
        module: Linear.from_linear(module)
        for name, module in linears.items()
        if not isinstance(module, Gemms) and not reasons[name]
    }
    planned = (
        plan_module(name, swaps.get(module, module), reasons[name], recipe, seen[module][0])
        for name, module in linears.items()
    )
    others = (replace(matrix, reason=kept.get(name, matrix.reason)) for name, matrix in matrices.items())
    plan = ConversionPlan(tuple(planned), tuple(others))
    for name, module in linears.items():
        if reasons[name]:
            assert isinstance(module, nn.Linear)
            count_high_precision(module)
    _swap([*model.modules(), *swaps.values()], swaps)
    identify(model)
    return plan


def _swap(parents: Iterable[nn.Module], swaps: Mapping[Any, nn.Module]) -> None:
    """Put the values of ``swaps`` in the places of their keys, which are children of ``parents``."""
    for parent in parents:
        for name, child in list(parent._modules.items()):
            if child in swaps:
                setattr(parent, name, swaps[child])


def _require_asked(
    model: nn.Module,
    linears: dict[str, nn.Linear | Gemms],
    reasons: dict[str, str],
    module_filter_fn: ModuleFilter | None,
) -> None:
    """Check that the caller has asked to leave alone all of ``linears``, which ``keep_high_precision`` does not name.

    Raises:
        ValueError: naming some for which that is not so, and why they are left alone.
    """
    # what could still be adopted was declined, and so was an attention's projection with it
    declined = {m.out_proj for _, m, _ in adoptable(model) if isinstance(m, nn.MultiheadAttention)}
    left = [
        (name, reasons[name])
        for name, module in linears.items()
        if module not in declined and (module_filter_fn is None or module_filter_fn(module, name))
    ]
    if left:
        named = [f"{name} ({why})" for name, why in collapsed(left)]
        more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        raise ValueError(
            f"nothing below this {type(model).__name__} can be converted, so all of it would compute in high "
            f"precision: {'; '.join(named[:_NAMED])}{more}. Convert before layers are wrapped or their forward is "
            "replaced; or name what is to stay in high precision, keep_high_precision=..."
        )


def last_blocks(model: nn.Module, count: int) -> tuple[str, ...]:
    """Patterns for :func:`convert` that keep the last ``count`` blocks of ``model`` in high precision.

    The blocks are the items of the ``nn.ModuleList`` that holds most weights of two or three dimensions, less
    those of embeddings.

    Raises:
        ValueError: there is no such list, or it has fewer than ``count`` blocks.
    """
    require_model(model)
    sizes: dict[tuple[str, int], int] = {}
    for name, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList):
            owners = (m for m in blocks.modules() if not isinstance(m, nn.Embedding | nn.EmbeddingBag))
            weights = [p for m in owners for p in m.parameters(recurse=False) if not is_lazy(p) and p.dim() in (2, 3)]
            sizes[name, len(blocks)] = sum(weight.numel() for weight in weights)
    if not sizes:
        raise ValueError("last_blocks looks for an nn.ModuleList of blocks, and the model has none; write patterns")
    name, length = max(sizes, key=lambda each: sizes[each])
    if (count := require_integer("count", count, 0)) > length:
        raise ValueError(f"count must be between 0 and the {length} blocks of {name!r}, got {count}")
    return tuple(f"{name}.{index}" for index in range(length - count, length))


def _names(model: nn.Module) -> dict[str, list[str]]:
    """``name -> all names`` of each module and parameter, which has several if several modules hold it.

    A parameter of a module that could be adopted also has the name of what will multiply by it.
    """
    found: dict[int, list[str]] = {}
    for name, held in chain(
        model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    ):
        found.setdefault(id(held), []).append(name)
    called = {name: names for names in found.values() for name in names}
    for name, module, _ in list(adoptable(model)):
        for parameter, child in gemms_of(module).items():
            # PEFT's attention makes its parameter anew whenever modules are asked for, so it has no lasting id
            called[dotted(name, parameter)] += [dotted(alias, child) for alias in called[name]]
    return {names[0]: names for names in called.values()}


def _kept(
    linears: dict[str, nn.Linear | Gemms],
    matrices: Iterable[str],
    patterns: tuple[str, ...],
    called: dict[str, list[str]],
) -> dict[str, str]:
    """``name -> "kept by" the pattern that keeps it``, of linear modules and other matrices, by any of their names."""
    names = [*linears, *matrices]
    kept: dict[str, str] = {}
    for pattern in patterns:
        covered = [name for name in names if any(covers(pattern, alias) for alias in called[name])]
        if not covered:
            # patterns begin at the top of the model; attention's rules have the name of its parameter without the end
            known = {f"**.{pattern}": names, f"{pattern}_weight": called}
            found = [other for other, of in known.items() if any(covers(other, name) for name in of)]
            meant = f"; did you mean {found[0]!r}?" if found else ""
            raise ValueError(
                f"pattern {pattern!r} covers no nn.Linear of the model and no other matrix; its linear modules are "
                f"called, for example, {', '.join(map(repr, list(linears)[-3:])) or 'nothing: there are none'}{meant}"
            )
        for name in covered:
            if isinstance(linears.get(name), Gemms):
                raise ValueError(
                    f"pattern {pattern!r} covers {name!r}, which is fp4engine's already; "
                    "build it as nn.Linear to keep it in high precision"
                )
            kept.setdefault(name, f"kept by {pattern!r}")
    return kept


def _obstacle(module: nn.Linear) -> str:
    """Why a swap would change what ``module`` computes; empty if it would not."""
    if own := own_forward(module):
        return own
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    if is_lazy(weight):
        return "its weight has no shape yet (lazy); run the model once first"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}, which no recipe casts"
    return own_attributes(module)


def _held_besides(model: nn.Module) -> dict[nn.Module, str]:
    """Linear modules that a module has in a list, a function or a bound method too, and why a swap would miss calls."""
    held: dict[nn.Module, str] = {}
    of_every_module = vars(nn.Module()).keys()  # children, which a swap reaches, and hooks, which may only look at one
    for module in model.modules():
        for name, value in vars(module).items():
            for leaf in tree_leaves(value) if name not in of_every_module else ():
                for called in _callees(leaf):
                    if isinstance(called, nn.Linear) and called is not module:
                        where = f"{type(module).__name__}.{name}"
                        held[called] = f"{where} holds it too, which a swap does not reach; make that an nn.ModuleList"
    return held


def _callees(held: Any, known: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What is called where ``held`` is: the object of a bound method, and all that a partial, function or set holds.

    Args:
        known: ids of the functions around ``held``, which may hold each other.
    """
    parts: tuple[Any, ...] = ()
    if isinstance(held, partial):
        parts = held.func, held.args, held.keywords
    elif isinstance(held, set | frozenset):
        parts = tuple(held)
    elif isinstance(held, FunctionType) and id(held) not in known:
        parts = *map(_content, held.__closure__ or ()), held.__defaults__, held.__kwdefaults__
        known |= {id(held)}
    else:
        yield held.__self__ if isinstance(held, MethodType) else held
    for part in tree_leaves(parts):
        yield from _callees(part, known)


def _content(cell: CellType) -> Any:
    """What a function has taken from around it; None if that is not there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
