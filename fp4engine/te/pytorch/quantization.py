"""Regions, availability, and what TransformerEngine lets a script read of the state in force."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fp4engine import state
from fp4engine.modules import model_init
from fp4engine.modules.recompute import follow_seeding
from fp4engine.ops.draws import seeding
from fp4engine.ops.rng import follows_torch, state_of
from fp4engine.quantizers.delayed import begin_step, end_step
from fp4engine.recipe import Recipe as FrozenRecipe
from fp4engine.te.common.recipe import Recipe, as_frozen, default_recipe
from fp4engine.te.pytorch.recipe_state import (
    AnyRecipe,
    CustomRecipeState,
    DelayedScalingRecipeState,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
)
from fp4engine.te.pytorch.roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole

__all__ = [
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "FP8GlobalStateManager",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "QuantizerRequest",
    "QuantizerRole",
    "RecipeState",
    "autocast",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


class _Thread(threading.local):
    """What is in force on one thread.

    Attributes:
        given: state and recipe, as it was given, of every open region, innermost last.
        stores_by: the recipe by which new modules store their weights as codes.
        keeps_init_val: whether these weights keep their initial values.
        to_show: functions to call when the outermost region is left.
    """

    def __init__(self) -> None:  # not class attributes, as in fp4engine.state
        self.given: list[tuple[state.AutocastState | None, AnyRecipe | None]] = []
        self.stores_by: FrozenRecipe | None = None
        self.keeps_init_val = False
        self.to_show: list[Callable[[], None]] = []


_thread = _Thread()


@overload
def is_fp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the format runs here: every one does, since every machine has at least the exact reference."""
    return (True, "") if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available


def check_recipe_support(recipe: AnyRecipe) -> None:
    """Raise unless ``recipe`` runs here, which every one does.

    Raises:
        ValueError: not a recipe.
    """
    as_frozen(recipe)


def get_default_recipe() -> Recipe:
    """What ``autocast()`` runs by, TransformerEngine's choice for this device; see :func:`default_recipe`."""
    return default_recipe()


get_default_fp8_recipe = get_default_recipe


def get_align_size_for_quantization(recipe: AnyRecipe) -> int:
    """What TransformerEngine pads rows of grouped GEMMs to; fp4engine's need no padding."""
    given = as_frozen(recipe)
    if recipe.custom():
        return given.quantization_alignment  # pyright: ignore[reportAttributeAccessIssue]
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


def _refuse_recipe(flag: str, value: Any) -> None:
    """Raise a ValueError if ``value`` is a recipe: it is true, and would leave the default one in force."""
    if isinstance(value, AnyRecipe):
        raise ValueError(f"{flag} must be True or False, got {value!r}; a recipe goes in recipe=")


class autocast(state.autocast):
    """:class:`fp4engine.autocast` that takes recipes of either kind.

    Args:
        enabled: anything that is true or false.
        calibrating: noted, and without effect: modules run in high precision or by the recipe as ``enabled`` says.
        recipe: None is :func:`get_default_recipe`.
        amax_reduction_group: as there.

    Raises:
        ValueError: a recipe in the place of ``enabled`` or ``calibrating``.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: AnyRecipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        _refuse_recipe("enabled", enabled)
        _refuse_recipe("calibrating", calibrating)
        chosen = as_frozen(default_recipe() if recipe is None else recipe)
        super().__init__(bool(enabled), bool(calibrating) and not chosen.is_delayed, chosen, amax_reduction_group)
        self._given = recipe
        self._steps = chosen.custom()

    def __enter__(self) -> "autocast":  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.current_state() is None:
            seeding.is_done = False
        super().__enter__()
        _thread.given.append((self._state, self._given))
        if self._steps and not state.in_backward():
            begin_step()  # a factory may have asked for delayed scaling
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        given = _thread.given
        for place in reversed(range(len(given))):  # not always the last: tasks and generators may cross
            if given[place][0] is self._state:
                del given[place]
                break
        super().__exit__(kind, error, trace)
        if state.current_state() is None and not state.in_backward():
            if self._steps:
                end_step()
            FP8GlobalStateManager.show()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: AnyRecipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """TransformerEngine's older spelling of :class:`autocast`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: AnyRecipe | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """:func:`fp4engine.quantized_model_init` that takes recipes of either kind, and any ``enabled`` but a recipe."""
    _refuse_recipe("enabled", enabled)
    chosen = as_frozen(default_recipe() if recipe is None else recipe)
    return _ModelInit(bool(enabled), chosen, preserve_high_precision_init_val)


class _ModelInit(AbstractContextManager[None]):
    def __init__(self, enabled: bool, recipe: FrozenRecipe, preserve: bool) -> None:
        self._enabled, self._recipe, self._preserve = enabled, recipe, preserve
        self._region = model_init.quantized_model_init(enabled, recipe, preserve)
        self._outer: tuple[FrozenRecipe | None, bool] = (None, False)

    def __enter__(self) -> None:
        self._outer = _thread.stores_by, _thread.keeps_init_val
        _thread.stores_by = self._recipe if self._enabled else None
        _thread.keeps_init_val = self._enabled and self._preserve
        return self._region.__enter__()

    def __exit__(self, *details: Any) -> None:
        _thread.stores_by, _thread.keeps_init_val = self._outer
        self._region.__exit__(*details)


def fp8_model_init(
    enabled: bool = True, recipe: AnyRecipe | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """TransformerEngine's older spelling of :func:`quantized_model_init`."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """Set ``scale`` to ``fp8_max / amax / 2^margin``, at most the largest FP32, where amax is positive and finite."""
    chosen = (fp8_max / amax / 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    return scale.copy_(torch.where(amax.isfinite() & (amax > 0), chosen, scale))


def _amax_and_scale_update(  # pyright: ignore[reportUnusedFunction]: scripts that look inside import it
    amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: AnyRecipe
) -> None:
    """End a step: choose ``scale`` [n] by ``amax_history`` [length, n], whose first row is the step, and move it on."""
    given: Any = recipe
    amax: Any
    if callable(given.amax_compute_algo):
        amax = given.amax_compute_algo(amax_history)
    else:
        amax = amax_history.amax(0) if given.amax_compute_algo == "max" else amax_history[0].clone()
    if given.scaling_factor_compute_algo is None:
        _default_sf_compute(amax, scale, fp8_max, given.margin)
    else:
        scale.copy_(given.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
    amax_history.copy_(amax_history.roll(-1, 0))
    amax_history[0].zero_()


class FP8GlobalStateManager:
    """What a script may ask about the region in force."""

    @classmethod
    def seed(cls, device: torch.device) -> None:
        """Seed the random stream of ``device`` from PyTorch's generator for it, once in an outermost region.

        After ``torch.manual_seed`` or ``torch.set_rng_state``, a module then repeats its stochastic rounding. A
        recomputation takes as much of the generator as its forward took, so that dropout after it repeats its mask, and
        leaves the stream as it is. Once ``fp4engine.manual_seed`` or ``fp4engine.set_rng_state`` has told the stream a
        seed of its own, or a :class:`fp4engine.RandomStream` is in force, that is left alone, and so is the generator.
        """
        if not follows_torch():
            return
        place = torch.empty(0, dtype=torch.int64, device=device)
        if place.is_meta or type(place) is not Tensor:
            return
        follow_seeding()
        if not seeding.is_done:
            seeding.is_done = True
            stream = state_of(device)
            (torch.empty_like(stream) if state.in_backward() else stream).random_()

    @classmethod
    def reset(cls) -> None:
        """Leave all open regions, as tests do between each other."""
        while state.region_depth():
            state.Region(state.current_state()).__exit__(None, None, None)
        _thread.__init__()
        seeding.is_done = False

    @classmethod
    def show_when_left(cls, show: Callable[[], None]) -> None:
        """Call ``show`` when the outermost region is left; in a recomputation do nothing, as its forward did this."""
        if show not in _thread.to_show and not state.in_backward():
            _thread.to_show.append(show)

    @classmethod
    def show(cls) -> None:
        """Let modules show their amax histories, after the outermost region has been left."""
        waiting, _thread.to_show = _thread.to_show, []
        for show in waiting:
            show()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        current = state.current_state()
        return current is not None and current.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        current = state.current_state()
        return current is not None and current.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return _thread.stores_by is not None

    @classmethod
    def stores_by(cls) -> FrozenRecipe | None:
        """The recipe by which weights are being stored as codes."""
        return _thread.stores_by

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return _thread.keeps_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_fp8_recipe(cls) -> AnyRecipe:
        """The recipe of the region in force, as it was given, or the default."""
        current = state.current_state()
        if current is None:
            return default_recipe()
        opened, given = _thread.given[-1] if _thread.given else (None, None)
        return given if given is not None and opened is current else current.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        current = state.current_state()
        return None if current is None else current.amax_reduction_group

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        return "forward" if forward else "backward"

    is_fp8_available = staticmethod(lambda: is_fp8_available(return_reason=True))
    is_mxfp8_available = staticmethod(lambda: is_mxfp8_available(return_reason=True))
    is_fp8_block_scaling_available = staticmethod(lambda: is_fp8_block_scaling_available(return_reason=True))
    is_nvfp4_available = staticmethod(lambda: is_nvfp4_available(return_reason=True))
