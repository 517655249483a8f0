"""Mixed and scheduled precision, as values: which recipe for which module, which recipe at which step."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from fp4engine.arguments import is_number, require_integer, shown
from fp4engine.names import EndOfName, covers
from fp4engine.recipe.base import Recipe, recipe_from_data, require_object
from fp4engine.recipe.casts import Casts
from fp4engine.roles import QuantizerRole


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that match every condition follow ``recipe``.

    Attributes:
        recipe: ``LinearRecipe()`` for high precision.
        name: pattern over the module's name, see :func:`fp4engine.names.covers`: ``"**.router"``, ``"layers.3"``.
        blocks: half-open range of the first number in the name: ``(27, 32)`` matches ``"layers.30.mlp.fc1"``;
            see :func:`final_blocks`.
        narrower_than: matches weights whose smaller dimension is less than this.
    """

    recipe: Recipe
    name: str = "*"
    blocks: tuple[int, int] | None = None
    narrower_than: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise ValueError(f"recipe must be a Recipe, LinearRecipe() for high precision, got {shown(self.recipe)}")
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a pattern over module names, got {self.name!r}")
        if self.blocks is not None and not (
            isinstance(self.blocks, tuple)
            and list(map(type, self.blocks)) == [int, int]
            and 0 <= self.blocks[0] < self.blocks[1]
        ):
            raise ValueError(f"blocks must be (first, end) with 0 <= first < end, got {self.blocks!r}")
        if self.narrower_than is not None:
            object.__setattr__(self, "narrower_than", require_integer("narrower_than", self.narrower_than, 1))

    @property
    def asks_name(self) -> bool:
        """Whether the name of a module decides whether it can match."""
        return self.name not in ("*", "**") or self.blocks is not None

    def matches(self, role: QuantizerRole) -> bool:
        """Whether ``role`` belongs to a module that this rule is about.

        Raises:
            ValueError: the rule asks for the shape of the weight, which ``role`` does not tell.
        """
        if not self.matches_name(role.name):
            return False
        if self.narrower_than is None:
            return True
        if not role.shape:
            raise ValueError(f"a rule with narrower_than={self.narrower_than} needs a role with a shape, got {role}")
        return min(role.shape) < self.narrower_than

    def matches_name(self, name: str) -> bool:
        """Whether a module of this name can match, whatever its shape."""
        if not covers(self.name, name):
            return False
        if self.blocks is None:
            return True
        index = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        return index is not None and self.blocks[0] <= index < self.blocks[1]


@dataclass(frozen=True)
class _RecipeOfRecipes(Recipe):
    """What is made of recipes takes no ``backward_override``, ``backend`` or ``accumulation``: each has its own."""

    backward_override: str | None = field(default=None, init=False, repr=False)
    backend: str = field(default="auto", init=False, repr=False)
    accumulation: str = field(default="fp32", init=False, repr=False)


@dataclass(frozen=True)
class RuledRecipe(_RecipeOfRecipes):
    """The recipe of the first rule that matches a module, or ``default``.

    Attributes:
        default: recipe of modules that no rule matches.
        rules: in order of precedence.
    """

    reads_modules: ClassVar[bool] = True

    default: Recipe
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.default, Recipe):
            raise ValueError(f"default must be a Recipe, LinearRecipe() for high precision, got {shown(self.default)}")
        if not isinstance(self.rules, tuple | list):
            raise ValueError(f"rules must be a tuple of Rule values, got {shown(self.rules)}")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"rules must be Rule values, got {shown(rule)}")
        object.__setattr__(self, "rules", tuple(self.rules))  # a list has no hash, and may change
        super().__post_init__()

    @cached_property
    def reads_names(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: a property of the value here
        """Whether a rule asks for the name of a module, rather than for the shape of its weight alone."""
        recipes = (self.default, *(rule.recipe for rule in self.rules))
        return any(rule.asks_name for rule in self.rules) or any(recipe.reads_names for recipe in recipes)

    def of(self, role: QuantizerRole) -> Recipe:
        """The plain recipe of the module that ``role`` belongs to.

        Raises:
            ValueError: the whole name of the module is not known, and a rule that comes before its own asks for one.
        """
        is_known = role.name and not isinstance(role.name, EndOfName)
        for rule in self.rules:
            if rule.asks_name and not is_known:
                asked = f"name={rule.name!r}" if rule.blocks is None else f"blocks={rule.blocks}"
                known = f"is only known to end in {role.name!r}" if role.name else "is not known"
                raise ValueError(
                    f"a rule with {asked} cannot tell whether it is about a module whose name {known}: call "
                    "fp4engine.convert on the model, which finds the names of all its modules, or give it name=..."
                )
            if rule.matches(role):
                return rule.recipe.of(role)
        return self.default.of(role)

    @property
    def is_delayed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: a property of the value here
        """True if the recipe of some module is."""
        return self.default.is_delayed or any(rule.recipe.is_delayed for rule in self.rules)

    def over(self, change: Callable[[Recipe], Recipe]) -> "RuledRecipe":
        """The same rules over what ``change`` makes of each recipe."""
        rules = tuple(replace(rule, recipe=change(rule.recipe)) for rule in self.rules)
        return RuledRecipe(change(self.default), rules)

    def at(self, step: int) -> "RuledRecipe":
        """The same rules over the recipes in force at ``step``."""
        return self.over(lambda recipe: recipe.at(step))

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which the recipe of some module begins."""
        return tuple(sorted({step for part in (self.default, *(r.recipe for r in self.rules)) for step in part.starts}))

    def casts(self, tensor_type: str) -> Casts:
        """Refuses, since the casts depend on the module.

        Raises:
            ValueError: always; ask ``of(role)``.
        """
        raise ValueError(f"the casts of {tensor_type!r} depend on the module; ask recipe.of(role)")

    def check(self, names: Iterable[str]) -> None:
        """Raise unless every rule matches one of a model's module names, and so do the rules of the rules' recipes.

        Raises:
            ValueError: naming the rules that match nothing.
        """
        names = list(names)
        matched = [[name for name in names if rule.matches_name(name)] for rule in self.rules]
        idle = [rule for rule, found in zip(self.rules, matched, strict=True) if not found]
        if idle:
            blocks = [f" in blocks {rule.blocks}" if rule.blocks else "" for rule in idle]
            conditions = ", ".join(f"name={rule.name!r}{where}" for rule, where in zip(idle, blocks, strict=True))
            modules = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
            raise ValueError(f"rules that match no module: {conditions}; the modules are {modules}")
        for rule, found in zip(self.rules, matched, strict=True):
            if isinstance(rule.recipe, RuledRecipe):
                rule.recipe.check(found)
        if isinstance(self.default, RuledRecipe):
            self.default.check(names)

    def rules_about(self, name: str) -> list[Rule]:
        """The rules that may be about a module of this name, with any name in place of theirs."""
        return [Rule(rule.recipe, "**", None, rule.narrower_than) for rule in self.rules if rule.matches_name(name)]

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        if name == "default":
            return recipe_from_data(value)
        if name == "rules":
            return tuple(map(_rule_from_plain, _require_list("rules", value)))
        return super()._from_plain(name, value)


def _rule_from_plain(value: Any) -> Rule:
    given = dict(require_object("a rule", value, ("recipe", "name", "blocks", "narrower_than")))
    recipe = recipe_from_data(given.pop("recipe", None))
    if given.get("blocks") is not None:
        given["blocks"] = tuple(_require_list("blocks", given["blocks"]))
    return Rule(recipe, **given)


def _require_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {shown(value)}")
    return value


def final_blocks(total: int, fraction: float) -> tuple[int, int]:
    """The last ``ceil(fraction * total)`` of ``total`` blocks, for :attr:`Rule.blocks`.

    Raises:
        ValueError: ``total`` is no integer of at least 1, or a fraction outside (0, 1].

    Source: arXiv 2509.25149 keeps about 15% of linear layers, mostly the last, in BF16.
    """
    total = require_integer("total", total, 1)
    if not (is_number(fraction) and 0 < fraction <= 1):
        raise ValueError(f"fraction must be a number above 0 and at most 1, got {fraction!r}")
    count = math.ceil(fraction * total - 1e-9)  # 0.07 * 100 is 7.000000000000001
    return total - max(count, 1), total


@dataclass(frozen=True)
class ScheduledRecipe(_RecipeOfRecipes):
    """A recipe per phase of training; a pure function of the step, so there is nothing to save or to restore.

        with autocast(recipe=schedule.at(step)):

    Attributes:
        phases: ``(first step, recipe)`` in rising order, the first at step 0.

    Raises:
        ValueError: phases out of order, not from 0, or without recipes.
    """

    phases: tuple[tuple[int, Recipe], ...]

    def __post_init__(self) -> None:
        pairs = self.phases if isinstance(self.phases, tuple | list) else (self.phases,)
        if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"phases must be a tuple of (first step, recipe), got {shown(self.phases)}")
        starts = [start for start, _ in self.phases]
        whole = all(type(start) is int for start in starts)
        if not starts or not whole or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"phases must start at step 0 and rise in whole steps, got steps {starts}")
        for _, recipe in self.phases:
            if not isinstance(recipe, Recipe):
                raise ValueError(f"phases must hold recipes, LinearRecipe() for high precision, got {shown(recipe)}")
        object.__setattr__(self, "phases", tuple(map(tuple, self.phases)))  # a list has no hash, and may change
        super().__post_init__()

    def at(self, step: int) -> Recipe:
        """The recipe in force at ``step`` >= 0.

        Raises:
            ValueError: ``step`` is negative, or no whole number.
        """
        whole = require_integer("step", step, 0)
        return next(recipe for start, recipe in reversed(self.phases) if start <= whole).at(whole)

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which phases begin, and the schedules that are phases change."""
        ends = *(start for start, _ in self.phases[1:]), math.inf
        return tuple(
            step
            for (start, recipe), end in zip(self.phases, ends, strict=True)
            for step in (start, *(inner for inner in recipe.starts if start < inner < end))
        )

    def of(self, role: QuantizerRole) -> Recipe:
        """Refuses: a schedule has no recipe without a step.

        Raises:
            ValueError: always; pass ``schedule.at(step)`` to autocast.
        """
        raise ValueError("a ScheduledRecipe needs a step: use autocast(recipe=schedule.at(step))")

    def casts(self, tensor_type: str) -> Casts:
        """Refuses, as :meth:`of` does."""
        raise ValueError("a ScheduledRecipe needs a step: use schedule.at(step)")

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        if name == "phases":
            phases = [_require_list("a phase", phase) for phase in _require_list("phases", value)]
            if wrong := [phase for phase in phases if len(phase) != 2]:
                raise ValueError(f"a phase must be [first step, recipe], got {shown(wrong[0])}")
            return tuple((start, recipe_from_data(recipe)) for start, recipe in phases)
        return super()._from_plain(name, value)
