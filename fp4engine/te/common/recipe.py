"""TransformerEngine's recipes, whose fields its scripts assign to.

A recipe of this module keeps what was written to it, and makes fp4engine's frozen recipe of it whenever one is used:
``autocast`` takes a picture of it, and later assignments are seen by the next region only.
"""

import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from fp4engine import recipe as frozen
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.quantizers.factory import make_quantizer, role_stream
from fp4engine.recipe import Format, MMParams, QParams
from fp4engine.roles import QuantizerRole as FrozenRole
from fp4engine.te.pytorch.quantized_tensor import Quantizer
from fp4engine.te.pytorch.roles import DelayedScalingRequest, QuantizerRole

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "as_frozen",
]


def _asked(name: str) -> "classmethod[Recipe, [], bool]":
    """The question ``name`` to a recipe's class, which the class of the frozen recipe answers."""
    return classmethod(lambda cls: getattr(cls.frozen_class, name)())


class Recipe:
    """What may be assigned to, and the frozen recipe that it comes to.

    Raises:
        AttributeError: an assignment to what is no field.
        TypeError: of a constructor, for arguments that there are not.
        ValueError: of a constructor, for arguments that the frozen recipe refuses; of a use, for assigned ones.
    """

    frozen_class: ClassVar[type[frozen.Recipe]] = frozen.Recipe
    by_place: ClassVar[str] = ""
    """Arguments that may be given without their name, in TransformerEngine's order."""
    _signature: ClassVar[inspect.Signature] = inspect.Signature()
    _fields: dict[str, Any]
    _frozen: frozen.Recipe | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        by_place, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        known = dict(inspect.signature(cls.frozen_class).parameters)
        placed = [known.pop(name).replace(kind=by_place) for name in cls.by_place.split()]
        named = [parameter.replace(kind=by_name) for parameter in known.values()]
        cls._signature = inspect.Signature([*placed, *named])
        cls.__signature__ = cls._signature  # pyright: ignore[reportAttributeAccessIssue]
        fields = cls.frozen_class.__dataclass_fields__.items()  # for dataclasses.replace, fields and asdict
        cls.__dataclass_fields__ = {name: field for name, field in fields if not name.startswith(("_", "fp4_quant_"))}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            fields = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        vars(self).update(_fields=fields, _frozen=self._make(**fields))

    def _make(self, **fields: Any) -> frozen.Recipe:
        return self.frozen_class(**fields)

    @property
    def frozen(self) -> frozen.Recipe:
        """fp4engine's recipe with the present values of the fields."""
        if self._frozen is None:
            vars(self)["_frozen"] = self._make(**self._fields)
        assert self._frozen is not None
        return self._frozen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_fields" not in vars(self):
            raise AttributeError(name)
        fields: dict[str, Any] = vars(self)["_fields"]
        return fields[name] if name in fields else getattr(self.frozen, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._signature.parameters:
            known = ", ".join(self._signature.parameters)
            raise AttributeError(f"{type(self).__name__} has no field {name!r} to assign to; its fields are {known}")
        self._fields[name] = value
        vars(self)["_frozen"] = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_fields": dict(self._fields), "_frozen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Recipe, frozen.Recipe)) and self.frozen == as_frozen(other)

    def __hash__(self) -> int:
        return hash(self.frozen)

    def __repr__(self) -> str:
        return repr(self.frozen)

    nvfp4 = _asked("nvfp4")
    mxfp8 = _asked("mxfp8")
    delayed = _asked("delayed")
    float8_current_scaling = _asked("float8_current_scaling")
    float8_per_tensor_scaling = _asked("float8_per_tensor_scaling")
    float8_block_scaling = _asked("float8_block_scaling")
    custom = _asked("custom")


@dataclass(frozen=True)
class _OfOneColumn:
    """A function of amaxes in TransformerEngine's layout, called with one tensor's amaxes, newest first.

    Attributes:
        algorithm: ``history [len, tensors] -> amax [tensors]``; row 0 is the step that has ended, and the oldest comes
            next.
    """

    algorithm: Callable[[torch.Tensor], Any]

    def __call__(self, history: torch.Tensor) -> Any:
        return self.algorithm(torch.cat((history[:1], history[1:].flip(0)))[:, None])


class DelayedScaling(Recipe):
    """See :class:`fp4engine.recipe.DelayedScaling`.

    ``amax_compute_algo``, where it is a function, is called as TransformerEngine calls it, with amaxes [len, tensors],
    but of one tensor at a time.
    """

    frozen_class = frozen.DelayedScaling
    by_place = """margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax
        fp8_dpa fp8_mha backward_override"""

    def _make(self, **fields: Any) -> frozen.Recipe:
        if callable(algorithm := fields.get("amax_compute_algo")):
            fields["amax_compute_algo"] = _OfOneColumn(algorithm)
        return super()._make(**fields)


class Float8CurrentScaling(Recipe):
    """See :class:`fp4engine.recipe.Float8CurrentScaling`."""

    frozen_class = frozen.Float8CurrentScaling
    by_place = """use_power_2_scales fp8_format fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha
        backward_override"""


class Float8BlockScaling(Recipe):
    """See :class:`fp4engine.recipe.Float8BlockScaling`."""

    frozen_class = frozen.Float8BlockScaling
    by_place = """use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim
        fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha backward_override"""


class MXFP8BlockScaling(Recipe):
    """See :class:`fp4engine.recipe.MXFP8BlockScaling`."""

    frozen_class = frozen.MXFP8BlockScaling
    by_place = "margin fp8_format fp8_dpa fp8_mha backward_override enable_2d_quantization"


class NVFP4BlockScaling(Recipe):
    """See :class:`fp4engine.recipe.NVFP4BlockScaling`."""

    frozen_class = frozen.NVFP4BlockScaling
    by_place = """disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation nvfp4_4over6
        nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format fp8_format fp8_dpa fp8_mha backward_override"""


class CustomRecipe(Recipe):
    """See :class:`fp4engine.recipe.CustomRecipe`; a factory may return quantizers and requests of this package."""

    frozen_class = frozen.CustomRecipe
    by_place = "qfactory fp8_format fp8_dpa fp8_mha backward_override quantization_alignment"

    def _make(self, **fields: Any) -> frozen.Recipe:
        factory, alignment = fields.pop("qfactory"), fields.get("quantization_alignment", 1)
        if isinstance(alignment, int) and alignment < 1:
            raise ValueError(f"quantization_alignment must be positive, got {alignment}")
        return super()._make(qfactory=Answering(factory) if callable(factory) else factory, **fields)


class _Given(threading.local):
    """What a thread's factory has said already, by role: it is asked once for each tensor of a module."""

    answers: Mapping[QuantizerRole, Any] = MappingProxyType({})


_given = _Given()


@contextmanager
def answered(answers: Mapping[QuantizerRole, Any]) -> Generator[None]:
    """Within, factories are not asked again for the roles of ``answers``."""
    _given.answers, outer = answers, _given.answers
    try:
        yield
    finally:
        _given.answers = outer


@dataclass(frozen=True)
class Answering:
    """A factory of fp4engine's, made of one of TransformerEngine's.

    Attributes:
        factory: ``role -> Quantizer or request``.
    """

    factory: Callable[[QuantizerRole], Any]

    def __call__(self, role: FrozenRole) -> FrozenQuantizer:
        """The frozen quantizer of what the factory returns.

        Raises:
            ValueError: it returns None, or nothing that quantizes.
        """
        asked = QuantizerRole(role.module_type, role.tensor_type, role.name)
        answer = _given.answers[asked] if asked in _given.answers else self.factory(asked)
        if isinstance(answer, DelayedScalingRequest):
            return make_quantizer(DelayedScaling(**vars(answer)).frozen, role)
        if isinstance(answer, Quantizer):
            return answer.used(role_stream(role))
        if isinstance(answer, FrozenQuantizer):
            return answer
        raise ValueError(
            f"qfactory returned {answer!r} for role {role}: it must return a Quantizer or a DelayedScalingRequest for "
            "every role it is asked for, and an IdentityQuantizer where nothing is to be quantized"
        )


def as_frozen(recipe: Recipe | frozen.Recipe) -> frozen.Recipe:
    """fp4engine's recipe of either kind.

    Raises:
        ValueError: not a recipe.
    """
    if isinstance(recipe, frozen.Recipe):
        return recipe
    if isinstance(recipe, Recipe):
        return recipe.frozen
    raise ValueError(f"recipe must be one of transformer_engine.common.recipe or of fp4engine.recipe, got {recipe!r}")


def default_recipe() -> Recipe:
    """What TransformerEngine runs by where nobody gives a recipe: MXFP8 on sm_10x, then FP8 per tensor."""
    if not torch.cuda.is_available():
        return DelayedScaling()
    major, _ = torch.cuda.get_device_capability()
    if major >= 12:
        return Float8CurrentScaling()
    return MXFP8BlockScaling() if major >= 10 else DelayedScaling()
