"""Regions, availability, and what TransformerEngine lets a script read of the state in force."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine import state
from fp4engine.modules import model_init
from fp4engine.quantizers.delayed import begin_step, end_step
from fp4engine.recipe import Recipe as FrozenRecipe
from fp4engine.te.common import recipe as recipes
from fp4engine.te.common.recipe import Format, Recipe, as_frozen, default_recipe
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.quantized_tensor import (
    DelayedScalingRequest,
    Quantizer,
    QuantizerRequest,
    QuantizerRole,
)
from fp4engine.te.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

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
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

AnyRecipe = Recipe | FrozenRecipe


def _available(what: str) -> Callable[..., bool | tuple[bool, str]]:
    def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
        return (True, "") if return_reason else True

    is_available.__doc__ = f"Whether {what} runs here: always, since every machine has at least the exact reference."
    return is_available


is_fp8_available = _available("FP8 with one scale per tensor")
is_mxfp8_available = _available("MXFP8")
is_fp8_block_scaling_available = _available("FP8 in blocks")
is_nvfp4_available = _available("NVFP4")
is_bf16_available = _available("BF16")


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
    if recipe.custom():
        return as_frozen(recipe).quantization_alignment  # pyright: ignore[reportAttributeAccessIssue]
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


def get_fp8_te_dtype(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> DType:
    """Element format of forward tensors or of gradients."""
    name = as_frozen(fp8_recipe).fp8_format  # pyright: ignore[reportAttributeAccessIssue]
    is_e4m3 = name is Format.E4M3 or (name is Format.HYBRID and fprop_tensor)
    return DType.kFloat8E4M3 if is_e4m3 else DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> torch.dtype:
    """As :func:`get_fp8_te_dtype`, by PyTorch's name."""
    is_e4m3 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) is DType.kFloat8E4M3
    return torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2


def get_fp4_te_dtype(fp4_recipe: AnyRecipe) -> DType:
    """Element format of an NVFP4 recipe."""
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> float:
    """Largest magnitude of forward tensors or of gradients."""
    is_e4m3 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) is DType.kFloat8E4M3
    return Format.E4M3.value.max_fwd if is_e4m3 else Format.E5M2.value.max_fwd


class autocast(state.autocast):
    """:class:`fp4engine.autocast` that takes recipes of either kind.

    Args:
        enabled: anything that is true or false.
        calibrating: noted, and without effect: modules run in high precision or by the recipe as ``enabled`` says.
        recipe: None is :func:`get_default_recipe`.
        amax_reduction_group: as there.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: AnyRecipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        chosen = as_frozen(default_recipe() if recipe is None else recipe)
        super().__init__(bool(enabled), calibrating and not chosen.is_delayed, chosen, amax_reduction_group)
        self._given = recipe
        self._steps = chosen.custom()
        self._outer: list[AnyRecipe | None] = []

    def __enter__(self) -> "autocast":  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__enter__()
        self._outer.append(FP8GlobalStateManager.given)
        FP8GlobalStateManager.given = self._given
        if self._steps and not state.in_backward():
            begin_step()  # a factory may have asked for delayed scaling
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        FP8GlobalStateManager.given = self._outer.pop()
        super().__exit__(kind, error, trace)
        if self._steps and state.current_state() is None and not state.in_backward():
            end_step()


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
    """:func:`fp4engine.quantized_model_init` that takes recipes of either kind."""
    chosen = as_frozen(default_recipe() if recipe is None else recipe)
    return _ModelInit(bool(enabled), chosen, preserve_high_precision_init_val)


class _ModelInit(AbstractContextManager[None]):
    def __init__(self, enabled: bool, recipe: FrozenRecipe, preserve: bool) -> None:
        self._enabled, self._preserve = enabled, preserve
        self._region = model_init.quantized_model_init(enabled, recipe, preserve)
        self._outer = (False, False)

    def __enter__(self) -> None:
        self._outer = FP8GlobalStateManager.model_init
        FP8GlobalStateManager.model_init = (self._enabled, self._enabled and self._preserve)
        return self._region.__enter__()

    def __exit__(self, *details: Any) -> None:
        FP8GlobalStateManager.model_init = self._outer
        self._region.__exit__(*details)


def fp8_model_init(
    enabled: bool = True, recipe: AnyRecipe | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """TransformerEngine's older spelling of :func:`quantized_model_init`."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """``scale`` becomes ``fp8_max / amax / 2^margin``, at most the largest FP32; as it was where amax says nothing."""
    chosen = (fp8_max / amax / 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    return scale.copy_(torch.where(amax.isfinite() & (amax > 0), chosen, scale))


def _amax_and_scale_update(  # pyright: ignore[reportUnusedFunction]: scripts that look inside import it
    amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: AnyRecipe
) -> None:
    """End a step: choose ``scale`` [n] by ``amax_history`` [length, n], whose first row is the step, and move it on."""
    given: Any = as_frozen(recipe)
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
    """What a script may ask about the region in force. All but :meth:`reset` reads."""

    given: ClassVar[AnyRecipe | None] = None
    """The recipe of the innermost region as it was given."""
    model_init: ClassVar[tuple[bool, bool]] = (False, False)
    """Whether weights are being stored as codes, and their initial values kept."""

    @classmethod
    def reset(cls) -> None:
        """Forget the region in force, as a test does between two others."""
        while state.region_depth():
            state.autocast.__exit__(state.autocast(enabled=False), None, None, None)
        cls.given, cls.model_init = None, (False, False)

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
        return cls.model_init[0]

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return cls.model_init[1]

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_fp8_recipe(cls) -> AnyRecipe:
        """The recipe of the region in force, or the default."""
        current = state.current_state()
        if current is None:
            return default_recipe()
        return current.recipe if cls.given is None else cls.given

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


FORWARD_TYPES = ("input", "weight", "output")
BACKWARD_TYPES = ("grad_output", "grad_input")


class RecipeState:
    """What a recipe comes to for the tensors of one module and one pass.

    Args:
        recipe: of either kind.
        mode: ``"forward"``: input, weight, output and so on in threes; ``"backward"``: grad_output, grad_input in twos.
        num_quantizers: how many tensors.
        device: where scales are kept, if the recipe has any.
        roles: of the tensors, which win over their places; None for a tensor leaves it to its place.

    Raises:
        ValueError: another mode, or roles that are not as many as the quantizers.
    """

    _KNOWN_TENSOR_TYPES = (*FORWARD_TYPES, *BACKWARD_TYPES)

    def __init__(
        self,
        recipe: AnyRecipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
        roles: "list[QuantizerRole | None] | None" = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode must be 'forward' or 'backward', got {mode!r}")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"RecipeState requires roles to match num_quantizers={num_quantizers}, got {len(roles)} roles"
            )
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.frozen: Any = as_frozen(recipe)

    @staticmethod
    def create(
        recipe: AnyRecipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
        roles: "list[QuantizerRole | None] | None" = None,
    ) -> "RecipeState":
        """The state of ``recipe``'s own kind.

        Raises:
            ValueError: TransformerEngine has no such recipe; ``fp4engine.make_quantizer`` answers for every one.
        """
        for name, cls in _STATES.items():
            if getattr(recipe, name)():
                return cls(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        raise ValueError(f"recipe must be one of {', '.join(_STATES)}, got {recipe!r}; see fp4engine.make_quantizer")

    def make_quantizers(self) -> list[Any]:
        """The quantizer of each tensor."""
        return [self._make(self._slot_tensor_type(index)) for index in range(self.num_quantizers)]

    def _make(self, tensor_type: str) -> Quantizer:
        raise NotImplementedError

    def _slot_role(self, index: int) -> QuantizerRole:
        role = None if self.roles is None else self.roles[index]
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, index: int) -> str:
        """What the tensor is: as its role says, or by its place."""
        known = self._slot_role(index).tensor_type
        places = FORWARD_TYPES if self.mode == "forward" else BACKWARD_TYPES
        return known if known in self._KNOWN_TENSOR_TYPES else places[index % len(places)]

    @property
    def dtype(self) -> DType:
        """Element format of this pass."""
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")


def _by_tensor_type(tensor_type: str, inp: Any, weight: Any, grad: Any) -> Any:
    return {"weight": weight, "grad_output": grad, "grad_input": grad}.get(tensor_type, inp)


class NVFP4BlockScalingRecipeState(RecipeState):
    @property
    def dtype(self) -> DType:
        return DType.kFloat4E2M1

    def _make(self, tensor_type: str) -> NVFP4Quantizer:
        role = _by_tensor_type(tensor_type, "input", "weight", "grad_output")
        arguments = self.frozen.quantizer_arguments(role)
        arguments["row_scaled_nvfp4"] = arguments["row_scaled_nvfp4"] and self.mode == "forward"
        return NVFP4Quantizer(**arguments, with_post_rht_amax=arguments["with_rht"])


class MXFP8BlockScalingRecipeState(RecipeState):
    def _make(self, tensor_type: str) -> MXFP8Quantizer:
        square = tensor_type == "weight" and self.frozen.enable_2d_quantization
        return MXFP8Quantizer(self.dtype, with_2d_quantization=square)


class Float8CurrentScalingRecipeState(RecipeState):
    def _make(self, tensor_type: str) -> Float8CurrentScalingQuantizer:
        return Float8CurrentScalingQuantizer(self.dtype, self.device, force_pow_2_scales=self.frozen.use_power_2_scales)


class Float8BlockScalingRecipeState(RecipeState):
    def _make(self, tensor_type: str) -> Float8BlockQuantizer:
        given = self.frozen
        dims = (given.x_block_scaling_dim, given.w_block_scaling_dim, given.grad_block_scaling_dim)
        return Float8BlockQuantizer(
            self.dtype,
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=not given.use_f32_scales,
            block_scaling_dim=_by_tensor_type(tensor_type, *dims),
        )


class DelayedScalingRecipeState(RecipeState):
    """As the others, with a scale of one per tensor and an empty history.

    Attributes:
        scale: FP32 [num_quantizers].
        amax_history: FP32 [amax_history_len, num_quantizers].
    """

    def __init__(self, recipe: AnyRecipe, **arguments: Any) -> None:
        super().__init__(recipe, **arguments)
        self.scale = torch.ones(self.num_quantizers, dtype=torch.float32, device=self.device)
        shape = (self.frozen.amax_history_len, self.num_quantizers)
        self.amax_history = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def make_quantizers(self) -> list[Any]:
        """Quantizers that read their scale, and collect amaxes, in this state's own tensors."""
        each = range(self.num_quantizers)
        return [Float8Quantizer(self.scale[i : i + 1], self.amax_history[0][i : i + 1], self.dtype) for i in each]


class CustomRecipeState(RecipeState):
    """Asks the recipe's factory; requests for delayed scaling become quantizers of one state."""

    _ds_state: DelayedScalingRecipeState | None = None

    def make_quantizers(self) -> list[Any]:
        roles: list[Any] = [self._slot_role(index) for index in range(self.num_quantizers)]
        factory = self.frozen.qfactory
        factory = factory.factory if isinstance(factory, recipes.Answering) else factory
        roles = roles if self.roles is None else self.roles
        answers = [factory(role) for role in roles]
        for index, answer in enumerate(answers):
            if answer is None:
                raise ValueError(
                    f"CustomRecipe qfactory returned None for slot {index} (role={roles[index]}): it must return a "
                    "Quantizer or a QuantizerRequest, and an IdentityQuantizer where nothing is to be quantized"
                )
        asked = {index: answer for index, answer in enumerate(answers) if isinstance(answer, DelayedScalingRequest)}
        if asked:
            first = next(iter(asked.values()))
            for index, request in asked.items():
                for field, value in vars(first).items():
                    if getattr(request, field) != value:
                        raise ValueError(
                            f"All DelayedScalingRequests in one CustomRecipeState must match: {field} is {value!r} at "
                            f"first and {getattr(request, field)!r} in slot {index}"
                        )
            recipe = recipes.DelayedScaling(**vars(first))
            self._ds_state = DelayedScalingRecipeState(
                recipe, mode=self.mode, num_quantizers=len(asked), device=self.device
            )
            for index, quantizer in zip(asked, self._ds_state.make_quantizers(), strict=True):
                answers[index] = quantizer
        return answers

    @property
    def _has_delayed_scaling(self) -> bool:
        return self._ds_state is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> AnyRecipe | None:
        return None if self._ds_state is None else self._ds_state.recipe

    @property
    def scale(self) -> Tensor | None:
        return None if self._ds_state is None else self._ds_state.scale

    @property
    def amax_history(self) -> Tensor | None:
        return None if self._ds_state is None else self._ds_state.amax_history


_STATES: dict[str, type[RecipeState]] = {
    "delayed": DelayedScalingRecipeState,
    "mxfp8": MXFP8BlockScalingRecipeState,
    "float8_current_scaling": Float8CurrentScalingRecipeState,
    "float8_block_scaling": Float8BlockScalingRecipeState,
    "nvfp4": NVFP4BlockScalingRecipeState,
    "custom": CustomRecipeState,
}
