"""What every recipe has: frozen, comparable, printable, JSON there and back.

A recipe answers "what should happen to this role?". It holds no tensors and knows no modules.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from fp4engine.environment import choice
from fp4engine.formats import CastSpec
from fp4engine.recipe.casts import Casts
from fp4engine.roles import QuantizerRole

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
BACKENDS = ("auto", "reference", "triton", "native")


class Format(Enum):
    """Formats of forward and backward tensors, by TransformerEngine's names.

    ``HYBRID`` is E4M3 in the forward pass and E5M2 for gradients.
    """

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class MMParams:
    """Matrix multiplication options.

    Attributes:
        use_split_accumulator: accumulate FP8 products in full FP32 (slower) instead of the tensor core's
            shorter accumulator.
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True, slots=True)
class QParams:
    """How one role is quantized; the fields are TransformerEngine's.

    Attributes:
        power_2_scale: round scales to powers of two.
        amax_epsilon: least amax, to keep scales of tiny tensors in range.
        random_hadamard_transform: rotate the COLUMNWISE operand (wgrad) in groups of 16.
        stochastic_rounding: round elements stochastically, both directions.
        fp4_2d_quantization: one block scale per 16x16 tile instead of 1x16.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` naming the argument unless ``value`` is one of ``allowed``."""
    if not any(value is word or (type(value) is type(word) and value == word) for word in allowed):
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes.

    Attributes:
        backward_override: None quantizes the backward GEMMs; ``"high_precision"`` runs them on the original
            operands; ``"dequantized"`` runs them in high precision on the dequantized forward operands.
            Flag ``NVTE_BACKWARD_OVERRIDE``.
        backend: which implementation quantizes and multiplies. Flag ``NVTE_FP4_BACKEND``.
    """

    registry: ClassVar[dict[str, type["Recipe"]]] = {}

    backward_override: str | None = choice("NVTE_BACKWARD_OVERRIDE", BACKWARD_OVERRIDES, None)
    backend: str = choice("NVTE_FP4_BACKEND", BACKENDS, "auto")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            Recipe.registry[cls.__name__] = cls

    def __post_init__(self) -> None:
        require("backward_override", self.backward_override, (None, *BACKWARD_OVERRIDES))
        require("backend", self.backend, BACKENDS)
        for field in dataclasses.fields(self):
            if field.type in (bool, "bool"):
                require(field.name, getattr(self, field.name), (False, True))

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
            ValueError: this recipe has no such answer.
        """
        raise ValueError(f"no casts are known for recipe {type(self).__name__}; use CustomRecipe(qfactory=...)")

    def mm_params(self, gemm: str) -> MMParams:
        """Options of the GEMM ``"fprop"``, ``"dgrad"`` or ``"wgrad"``."""
        return MMParams()

    @property
    def is_delayed(self) -> bool:
        """True if some scale is made of earlier steps' amaxes, so that the end of a step matters."""
        return False

    def of(self, role: QuantizerRole) -> "Recipe":
        """The recipe of the module that ``role`` belongs to; itself unless it has rules."""
        return self

    def at(self, step: int) -> "Recipe":
        """The recipe in force at training step ``step``; itself unless it has a schedule."""
        return self

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        """Undo :func:`_to_plain` for the field ``name``; recipes with nested fields extend it."""
        return Format(value) if name.endswith("_format") else value

    def to_json(self) -> str:
        """The recipe as one JSON object; :func:`recipe_from_json` reads it back to an equal recipe."""
        return json.dumps(_to_plain(self))


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
        ValueError: unknown recipe name or field.
    """
    return recipe_from_data(json.loads(text))


def _require_fields(cls: type[Recipe], names: Iterable[str]) -> None:
    """Raise ``ValueError`` unless ``cls`` can be given every one of ``names``."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    if unknown := ", ".join(sorted(set(names) - set(known))):
        raise ValueError(f"{cls.__name__} has no {unknown}; its fields are {', '.join(known)}")


def recipe_from_data(data: Any) -> Recipe:
    """The recipe of one parsed JSON object, see :func:`recipe_from_json`."""
    fields = dict(data) if isinstance(data, dict) else {}
    name = fields.pop("recipe", None)
    if not isinstance(name, str) or name not in Recipe.registry:
        raise ValueError(f"recipe must be one of {', '.join(sorted(Recipe.registry))}, got {name!r}")
    cls = Recipe.registry[name]
    _require_fields(cls, fields)
    return cls(**{key: cls._from_plain(key, value) for key, value in fields.items()})
