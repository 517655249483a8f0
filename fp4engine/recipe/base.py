"""What every recipe has: frozen, comparable, printable, JSON there and back.

A recipe answers "what should happen to this role?". It holds no tensors and knows no modules.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from fp4engine import formats
from fp4engine.arguments import is_number, require_bool, require_integer, require_one_of, shown
from fp4engine.environment import choice
from fp4engine.formats import CastSpec
from fp4engine.recipe.casts import Casts
from fp4engine.roles import GEMMS, QuantizerRole

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
BACKENDS = ("auto", "reference", "triton", "native")
ACCUMULATIONS = ("fp32", "blackwell")
UNKNOWN_NAMED = 8
"""The most unknown keys that an error names."""


class _FormatName(str):
    """The word that stands for a format in JSON, and the largest magnitudes that its two passes can hold.

    Attributes:
        max_fwd, max_bwd: of forward tensors and of gradients.
    """

    max_fwd: float
    max_bwd: float

    def __new__(cls, name: str, max_fwd: float = 0.0, max_bwd: float | None = None) -> "_FormatName":
        word = super().__new__(cls, name)
        word.max_fwd, word.max_bwd = max_fwd, max_fwd if max_bwd is None else max_bwd
        return word


class Format(Enum):
    """Formats of forward and backward tensors, by TransformerEngine's names.

    ``HYBRID`` is E4M3 in the forward pass and E5M2 for gradients. A value is a word with two numbers beside it:
    ``Format.HYBRID.value.max_fwd`` is 448, ``.max_bwd`` 57,344.
    """

    E2M1 = _FormatName("e2m1", formats.E2M1.max_value)
    E4M3 = _FormatName("e4m3", formats.E4M3.max_value)
    E5M2 = _FormatName("e5m2", formats.E5M2.max_value)
    HYBRID = _FormatName("hybrid", formats.E4M3.max_value, formats.E5M2.max_value)


@dataclass(frozen=True, slots=True)
class MMParams:
    """Matrix multiplication options.

    Attributes:
        use_split_accumulator: accumulate FP8 products in full FP32 (slower) instead of the tensor core's
            shorter accumulator.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        require_bool("use_split_accumulator", self.use_split_accumulator)


@dataclass(frozen=True, slots=True)
class QParams:
    """How one role is quantized; the fields are TransformerEngine's.

    Attributes:
        power_2_scale: round scales to powers of two.
        amax_epsilon: least amax, to keep scales of tiny tensors in range.
        random_hadamard_transform: rotate the COLUMNWISE operand (wgrad) in groups of 16.
        stochastic_rounding: round elements stochastically, both directions.
        fp4_2d_quantization: one block scale per 16x16 tile instead of 1x16.

    Raises:
        ValueError: ``amax_epsilon`` is no finite number of at least 0, or another one no bool.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        for name in ("power_2_scale", "random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
            require_bool(name, getattr(self, name))
        epsilon = self.amax_epsilon
        if not (is_number(epsilon) and 0 <= float(epsilon) < math.inf):
            raise ValueError(f"amax_epsilon must be a finite number of at least 0, got {epsilon!r}")


def _is_a(name: str) -> "classmethod[Recipe, [], bool]":
    """The question whether a recipe is TransformerEngine's of that name."""
    return classmethod(lambda cls: issubclass(cls, Recipe.registry[name]))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes.

    Attributes:
        backward_override: None quantizes the backward GEMMs; ``"high_precision"`` runs them on the original
            operands; ``"dequantized"`` runs them in high precision on the dequantized forward operands.
            Flag ``NVTE_BACKWARD_OVERRIDE``.
        backend: which implementation quantizes and multiplies. Flag ``NVTE_FP4_BACKEND``.
        accumulation: how FP4 products are summed: ``"fp32"`` in FP32, in whatever order is fastest; ``"blackwell"`` to
            the same bits on every machine, in the order and with the roundings observed on Blackwell's FP4 tensor
            cores. The latter takes E2M1 with E4M3 block scales of 1x16 or 16x16 alone; see ``docs/numerics.md``.
    """

    registry: ClassVar[dict[str, type["Recipe"]]] = {}
    reads_modules: ClassVar[bool] = False
    """Whether the answer may depend on a module's name or shape."""
    reads_names: ClassVar[bool] = False
    """Whether the answer may depend on a module's name."""
    is_delayed: ClassVar[bool] = False
    """Whether some scale is made of earlier steps' amaxes, so that the end of a step matters."""

    if TYPE_CHECKING:  # set by _take_number, and no field

        @property
        def number(self) -> str: ...

    backward_override: str | None = choice("NVTE_BACKWARD_OVERRIDE", BACKWARD_OVERRIDES, None)
    backend: str = choice("NVTE_FP4_BACKEND", BACKENDS, "auto")
    accumulation: str = "fp32"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Recipe.__repr__  # or the dataclass that cls becomes would write one that shows every field
        if not cls.__name__.startswith("_"):
            Recipe.registry[cls.__name__] = cls

    def __post_init__(self) -> None:
        require_one_of("backward_override", self.backward_override, (None, *BACKWARD_OVERRIDES))
        require_one_of("backend", self.backend, BACKENDS)
        require_one_of("accumulation", self.accumulation, ACCUMULATIONS)
        for field in dataclasses.fields(self):
            if field.type is bool:
                require_bool(field.name, getattr(self, field.name))
            if field.name in ("fp8_dpa", "fp8_mha"):  # TransformerEngine's, for attention in FP8
                require_one_of(field.name, getattr(self, field.name), (False,))
        self._take_number()

    def _take_number(self) -> None:
        """Set ``number``, a word of digits that stands for this recipe and its equals where only constants go.

        No int: ``torch.compile`` takes one that another recipe has changed for a variable.

        Raises:
            RuntimeError: ``torch.compile`` traces how the recipe is made, and could not tell which it is.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError("torch.compile cannot trace how a recipe is made; make it outside the compiled function")
        try:
            number = _numbers.setdefault(self, str(next(_next_number)))
        except TypeError:  # a custom recipe whose factory has no hash equals nothing but itself
            number = str(next(_next_number))
        first = _numbered.setdefault(number, self)
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "_first", None if first is self else first)  # lives as long as an equal does

    def __getstate__(self) -> dict[str, Any]:
        """The fields: numbers are of one process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_number()

    def __repr__(self) -> str:
        """``NVFP4BlockScaling(disable_rht=True)``: what differs from a recipe made without arguments and flags."""
        shown = [field for field in dataclasses.fields(self) if field.init and field.repr]
        changed = [(field.name, value) for field in shown if (value := getattr(self, field.name)) != default_of(field)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def replace(self, **changes: Any) -> "Recipe":
        """A copy with ``changes`` applied; the environment is not read again.

        Raises:
            ValueError: no such field, or a value that the field does not take.
        """
        _require_fields(type(self), changes)
        return dataclasses.replace(self, **changes)

    def casts(self, tensor_type: str) -> Casts:
        """What happens to ``"input"``, ``"weight"`` or ``"grad_output"``.

        Raises:
            ValueError: another word, or this recipe has no such answer.
        """
        raise ValueError(f"no casts are known for recipe {type(self).__name__}; use CustomRecipe(qfactory=...)")

    def mm_params(self, gemm: str) -> MMParams:
        """Options of the GEMM ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.

        Raises:
            ValueError: another word.
        """
        require_one_of("gemm", gemm, GEMMS)
        return MMParams()

    # Which of TransformerEngine's recipes a class is.
    nvfp4 = _is_a("NVFP4BlockScaling")
    mxfp8 = _is_a("MXFP8BlockScaling")
    delayed = _is_a("DelayedScaling")
    float8_current_scaling = _is_a("Float8CurrentScaling")
    float8_block_scaling = _is_a("Float8BlockScaling")
    custom = _is_a("CustomRecipe")

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is delayed or current scaling."""
        return cls.delayed() or cls.float8_current_scaling()

    def of(self, role: QuantizerRole) -> "Recipe":
        """The recipe of the module that ``role`` belongs to; itself unless it has rules."""
        return self

    def at(self, step: int) -> "Recipe":
        """The recipe in force at training step ``step`` >= 0; itself unless it has a schedule.

        Raises:
            ValueError: ``step`` is negative, or no whole number.
        """
        require_integer("step", step, 0)
        return self

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which :meth:`at` may begin to return another recipe, in rising order; 0 is the first."""
        return (0,)

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        """Undo :func:`_to_plain` for the field ``name``; recipes with nested fields extend it."""
        if not name.endswith("_format"):
            return value
        require_one_of(name, value, tuple(str(word.value) for word in Format))
        return Format(value)

    def to_json(self) -> str:
        """The recipe as one JSON object; :func:`recipe_from_json` reads it back to an equal recipe."""
        return json.dumps(_to_plain(self))


def say_how_to_change(cls: type[Recipe]) -> None:
    """Let an assignment to a field of ``cls``, which is frozen, raise with what to do instead."""

    def refuse(self: Recipe, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{cls.__name__}.{name} cannot be assigned, since recipes are frozen; "
            f"write recipe = recipe.replace({name}=...) instead"
        )

    setattr(cls, "__setattr__", refuse)  # noqa: B010 - a frozen dataclass takes none from the body


_numbers: WeakKeyDictionary[Recipe, str] = WeakKeyDictionary()
_numbered: WeakValueDictionary[str, Recipe] = WeakValueDictionary()
_next_number = count()


def require_recipe(recipe: Any) -> None:
    """Accept a recipe, and None for what stands in its place.

    Raises:
        ValueError: something else, such as the name of a recipe.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        maker = f"zoo.make({recipe!r})" if isinstance(recipe, str) else "zoo.make"
        raise ValueError(f"recipe must be an fp4engine.recipe.Recipe ({maker} makes one) or None, got {shown(recipe)}")


def require_recipes(**recipes: Any) -> None:
    """Accept recipes alone.

    Raises:
        ValueError: the argument of a name is something else.
    """
    for name, recipe in recipes.items():
        if not isinstance(recipe, Recipe):
            raise ValueError(f"{name} must be an fp4engine.recipe.Recipe, got {shown(recipe)}")


def numbered(number: str) -> Recipe:
    """The recipe with that number: the first of those that equal it.

    Raises:
        RuntimeError: there is none in this process, or none any more.
    """
    recipe = _numbered.get(number)
    if recipe is None:
        raise RuntimeError(f"no recipe has the number {number}: recipes are made outside compiled functions, and kept")
    return recipe


def default_of(field: dataclasses.Field[Any]) -> Any:
    """What ``field`` is if neither an argument nor a flag says otherwise."""
    return field.metadata.get("default", field.default)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, CastSpec):
        return value.key
    if isinstance(value, Recipe):
        fields = {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"recipe": type(value).__name__, **fields}
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} cannot be written as JSON; only recipes made of plain values can")


def recipe_from_json(text: str) -> Recipe:
    """The recipe that wrote ``text`` with :meth:`Recipe.to_json`.

    Raises:
        ValueError: not the JSON of a recipe: no JSON at all, an unknown recipe name, key or value, a key twice.
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be the JSON that recipe.to_json() wrote, got {text!r}")
    try:
        data = json.loads(text, object_pairs_hook=_without_repetition)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"text must be the JSON that recipe.to_json() wrote, got {text[:80]!r} ({error})") from error
    return recipe_from_data(data)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = [key for key, _ in pairs]
        raise ValueError(f"JSON says {next(key for key in data if repeated.count(key) > 1)!r} twice; once is allowed")
    return data


def require_keys(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``ValueError`` naming each key that ``what`` does not have, and the nearest one that it has."""
    known = list(known)
    if unknown := sorted(set(given) - set(known)):
        unknown = [f"{key:.80}" for key in unknown[:UNKNOWN_NAMED]]
        nearest = {get_close_matches(key, known, n=1, cutoff=0.0)[0]: None for key in unknown} if known else {}
        meant = f" (did you mean {', '.join(nearest)}?)" if nearest else ""
        raise ValueError(f"{what} has no {', '.join(unknown)}{meant}; its fields are {', '.join(known)}")


def require_object(what: str, value: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """``value`` if it is a JSON object with no keys but ``known``.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object of {', '.join(known)}, got {shown(value)}")
    require_keys(what, value, known)
    return value


def _require_fields(cls: type[Recipe], names: Iterable[str]) -> None:
    """Raise ``ValueError`` unless ``cls`` can be given every one of ``names``."""
    require_keys(cls.__name__, names, (field.name for field in dataclasses.fields(cls) if field.init))


def recipe_from_data(data: Any) -> Recipe:
    """The recipe of one parsed JSON object, see :func:`recipe_from_json`."""
    if not isinstance(data, dict):
        raise ValueError(f"a recipe must be a JSON object with the key 'recipe', got {shown(data)}")
    fields = dict(data)
    name = fields.pop("recipe", None)
    if not isinstance(name, str) or name not in Recipe.registry:
        kinds = ", ".join(sorted(Recipe.registry))
        raise ValueError(f"a recipe's JSON names its kind under the key 'recipe', one of {kinds}; got {shown(name)}")
    cls = Recipe.registry[name]
    _require_fields(cls, fields)
    values = {key: cls._from_plain(key, value) for key, value in fields.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a field is missing, or of a kind that cannot be compared
        raise ValueError(f"{name} cannot be made of {shown(values)}: {error}") from error
