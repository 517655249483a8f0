"""Which recipe is it: what stands for a recipe in names of runs, and how two recipes differ."""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from fp4engine.arguments import shown
from fp4engine.formats import CastSpec, ElementFormat
from fp4engine.recipe.base import Recipe, default_of, require_recipes
from fp4engine.recipe.casts import Casts
from fp4engine.recipe.linear import GEMM_OPERANDS, LinearRecipe


def identity(recipe: Recipe) -> dict[str, Any]:
    """What tells ``recipe`` from recipes that compute otherwise, as plain JSON values.

    Fields at their defaults are left out, so that a field that is added later, whose default is what was done before,
    changes no identity. A function, as in a ``CustomRecipe``, is its name and a hash of its file, or of its source
    where there is no file, as in a notebook.

    Raises:
        ValueError: a function whose file cannot be found, or does not say all, as of a method of an object and of a
            function within a function; another value that is no plain one.
    """
    return _plain(recipe)


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of plain JSON values, whatever order their keys have."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, ElementFormat):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"recipe": type(value).__name__} if isinstance(value, Recipe) else {}
        kind |= {"code": _of_code(type(value))} if callable(value) else {}  # fields do not say what it computes
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        return kind | {f.name: _plain(part) for f, part in fields if part != default_of(f)}  # less defaults, as flags
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return _of_code(value)
    raise ValueError(f"a recipe with {shown(value)} has no identity; only plain values and functions have one")


def _of_code(function: Callable[..., Any]) -> str:
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    inner = inspect.unwrap(function)  # as of functools.cache
    is_bound = inspect.ismethod(function) and not isinstance(function.__self__, type)
    if is_bound or any(getattr(part, "__closure__", None) for part in (function, inner)):
        raise ValueError(
            f"{name} depends on values that its source does not say, of its object or of a function around it; define "
            "it at the top level of a file"
        )
    try:
        source, file = inspect.getsource(inner).encode(), Path(inspect.getfile(inner))
        if file.is_file() and not name.startswith("fp4engine."):  # with what it calls, and constants that it reads
            source = file.read_bytes()
    except (TypeError, OSError) as error:
        raise ValueError(f"{name} has no source, by which a changed function is known; define it in a file") from error
    return f"{name}#{hashlib.sha256(source).hexdigest()[:12]}"


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """``field -> (its value in the first, in the second)`` of every field in which two recipes differ.

    Recipes of one class are compared field by field, casts and rules in them too (``"input.rowwise.scale_rule"``);
    recipes of different classes by the casts of their three roles.

    Raises:
        ValueError: no recipes, or some of different classes, of which one has no casts that are the same for all
            modules.
    """
    require_recipes(first=first, second=second)
    if type(first) is not type(second):
        first, second = as_casts(first), as_casts(second)
    ours, theirs = dict(_flat("", first)), dict(_flat("", second))
    pairs = {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dataclasses and tuples of them, by dotted names."""
    if isinstance(value, Recipe | Casts | CastSpec) or (dataclasses.is_dataclass(value) and not callable(value)):
        if isinstance(value, ElementFormat):
            yield name, value.name
            return
        for field in dataclasses.fields(value):
            if field.init:
                yield from _flat(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(part) or isinstance(part, tuple) for part in value):
        for place, part in enumerate(value):
            yield from _flat(f"{name}[{place}]", part)
    else:
        yield name, value.value if isinstance(value, Enum) else value


def as_casts(recipe: Recipe) -> LinearRecipe:
    """``recipe`` as the casts of its three roles.

    Raises:
        ValueError: its casts depend on the module, the step or earlier steps, or are not known.
    """
    if recipe.is_delayed:
        raise ValueError("delayed and held scaling depend on the steps before, and are no table of casts")
    roles: dict[str, Any] = {role: recipe.casts(role) for role in ("input", "weight", "grad_output")}
    roles |= {name: getattr(recipe, name) for name in ("backward_override", "backend", "accumulation")}
    return LinearRecipe(**roles, allow_biased=True)


def ablations(first: Recipe, second: Recipe) -> dict[str, Recipe]:
    """``what changes -> first, with only that taken from second``, of two recipes that differ in several things.

    Of one class other than ``LinearRecipe`` a field changes at a time. Otherwise the casts of one matrix product do,
    since its two operands have to be rotated alike.

    Raises:
        ValueError: the recipes do not differ, or no change on its own makes a recipe.

    A field that changes no cast on its own, and a change that is the whole difference, are left out.
    """
    if first == second:
        raise ValueError("the two recipes are equal, so there is nothing to change one at a time")
    if type(first) is type(second) and not isinstance(first, LinearRecipe):
        fields = [f.name for f in dataclasses.fields(first) if f.init]
        changes = {name: getattr(second, name) for name in fields if getattr(first, name) != getattr(second, name)}
        made = {name: lambda name=name, value=value: first.replace(**{name: value}) for name, value in changes.items()}
    else:
        ours, theirs = as_casts(first), as_casts(second)
        made = {gemm: lambda gemm=gemm: _with_gemm(ours, theirs, gemm) for gemm in GEMM_OPERANDS}
    found: dict[str, Recipe] = {}
    refused: list[str] = []
    for name, make in made.items():
        try:
            recipe = make()
        except ValueError as error:
            refused.append(f"{name} ({error})")
            continue
        changes_casts = (casts := _casts_or_none(recipe)) is None or casts != _casts_or_none(first)
        if changes_casts and recipe not in (second, *found.values()):
            found[name] = recipe
    if not found and refused:
        raise ValueError(f"no field can be changed on its own: {'; '.join(refused)}")
    return found


def _casts_or_none(recipe: Recipe) -> LinearRecipe | None:
    """:func:`as_casts`, or None where that raises."""
    try:
        return as_casts(recipe)
    except ValueError:
        return None


def _with_gemm(first: LinearRecipe, second: LinearRecipe, gemm: str) -> LinearRecipe:
    """``first`` with the casts of both operands of ``gemm`` from ``second``."""
    changes: dict[str, Casts] = {}
    for role, side in GEMM_OPERANDS[gemm]:
        ours, theirs = first.casts(role), second.casts(role)
        change: dict[str, Any] = {side: getattr(theirs, side)}
        if side == "columnwise":
            change["columnwise_source"] = theirs.columnwise_source
        else:
            change["clipped_gradient"] = theirs.clipped_gradient
        changes[role] = dataclasses.replace(ours, **change)
    return dataclasses.replace(first, **changes)
