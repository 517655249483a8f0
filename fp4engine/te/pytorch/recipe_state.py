"""TransformerEngine's recipe states: the quantizers, and scales, of a module's tensors by a recipe."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of
from fp4engine.quantizers.delayed import DelayedQuantizer
from fp4engine.recipe import Recipe as FrozenRecipe
from fp4engine.te.common import recipe as recipes
from fp4engine.te.common.recipe import Format, Recipe, as_frozen
from fp4engine.te.pytorch.constants import ELEMENTS, DType, TE_DType_To_Torch
from fp4engine.te.pytorch.quantized_tensor import Quantizer
from fp4engine.te.pytorch.roles import DelayedScalingRequest, QuantizerRole, require_role
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
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "RecipeState",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
]

AnyRecipe = Recipe | FrozenRecipe


def get_fp8_te_dtype(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> DType:
    """FP8 element format under the recipe: of forward tensors, or of gradients if ``fprop_tensor`` is False."""
    name = as_frozen(fp8_recipe).fp8_format  # pyright: ignore[reportAttributeAccessIssue]
    is_e4m3 = name is Format.E4M3 or (name is Format.HYBRID and fprop_tensor)
    return DType.kFloat8E4M3 if is_e4m3 else DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> torch.dtype:
    """The format of :func:`get_fp8_te_dtype` as a ``torch.dtype``."""
    return TE_DType_To_Torch[get_fp8_te_dtype(fp8_recipe, fprop_tensor)]


def get_fp4_te_dtype(fp4_recipe: AnyRecipe) -> DType:
    """Element format of an NVFP4 recipe."""
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: AnyRecipe, fprop_tensor: bool = True) -> float:
    """Largest magnitude of the format of :func:`get_fp8_te_dtype`."""
    return ELEMENTS[get_fp8_te_dtype(fp8_recipe, fprop_tensor)].max_value


FORWARD_TYPES = ("input", "weight", "output")


BACKWARD_TYPES = ("grad_output", "grad_input")


class RecipeState:
    """The quantizers, and scales, of the tensors of one module and one pass.

    Args:
        recipe: of either kind.
        mode: ``"forward"``: input, weight, output and so on in threes; ``"backward"``: grad_output, grad_input in twos.
        num_quantizers: how many tensors.
        device: where scales are kept, if the recipe has any.
        roles: of the tensors, which win over their places; None for a tensor leaves it to its place.

    Raises:
        ValueError: no recipe, another mode, or roles that are none, or not as many as the quantizers.
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
        require_one_of("mode", mode, ("forward", "backward"))
        num_quantizers = require_integer("num_quantizers", num_quantizers, 0)
        for role in roles or ():
            require_role("roles", role)
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"RecipeState requires roles to match num_quantizers={num_quantizers}, got {len(roles)} roles"
            )
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.frozen: Any = as_frozen(recipe)

    @staticmethod
    def create(recipe: AnyRecipe, **arguments: Any) -> "RecipeState":
        """The state of ``recipe``'s own kind, by the arguments of its constructor.

        Raises:
            ValueError: TransformerEngine has no such recipe; ``fp4engine.make_quantizer`` answers for every one.
        """
        as_frozen(recipe)
        for name, cls in _STATES.items():
            if getattr(recipe, name)():
                return cls(recipe, **arguments)
        raise ValueError(f"recipe must be one of {', '.join(_STATES)}, got {recipe!r}; see fp4engine.make_quantizer")

    def inherit_state_from(self, other: "RecipeState") -> bool:
        """Take over the tensors of a state that this one replaces; False if there are none that fit."""
        return False

    def make_quantizers(self) -> list[Any]:
        """A quantizer for each of the ``num_quantizers`` tensors."""
        return [self._make(self._slot_tensor_type(index)) for index in range(self.num_quantizers)]

    def _make(self, tensor_type: str) -> Quantizer:
        raise NotImplementedError

    def _slot_role(self, index: int) -> QuantizerRole:
        role = None if self.roles is None else self.roles[index]
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, index: int) -> str:
        """The type of the tensor in a slot: from its role, or else from its place."""
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
    def _slot_tensor_type(self, index: int) -> str:
        """A weight is one of which a role says so, since blocks of other tensors are never square."""
        role = self._slot_role(index)
        is_weight = role.tensor_type == "weight" and role.module_type in ("linear", "grouped_linear")
        return "weight" if is_weight else "input"

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
    """A recipe state that has a scale for each tensor, and the history of amaxes from which scales are chosen.

    Both tensors show a module's amax histories, and values written into them before a forward replace these. (A scale
    for gradients is then chosen anew from the history.)

    Attributes:
        scale: FP32 [num_quantizers].
        amax_history: FP32 [amax_history_len, num_quantizers]; row 0 is the running step, the last row the one before.
    """

    def __init__(self, recipe: AnyRecipe, **arguments: Any) -> None:
        super().__init__(recipe, **arguments)
        shape = (self.frozen.amax_history_len, self.num_quantizers)
        with torch.inference_mode(False):
            self.scale = torch.ones(self.num_quantizers, dtype=torch.float32, device=self.device)
            self.amax_history = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._shown = self._contents()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, with whether each tensor has the version that was shown, which copies do not have."""
        shown = zip((self.scale, self.amax_history), self._shown, strict=True)
        return {**vars(self), "_shown": [(now._version == version, bits) for now, (version, bits) in shown]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        shown = zip((self.scale, self.amax_history), self._shown, strict=True)
        self._shown = [(now._version if is_shown else -1, bits) for now, (is_shown, bits) in shown]

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Adopt the tensors of ``other``, and return True; False if its kind or number of tensors or steps differs."""
        if not isinstance(other, DelayedScalingRecipeState) or other.amax_history.shape != self.amax_history.shape:
            return False
        self.scale, self.amax_history, self._shown = other.scale, other.amax_history, other._shown
        return True

    def make_quantizers(self) -> list[Any]:
        """Quantizers that read their scale, and collect amaxes, in this state's own tensors."""
        each = range(self.num_quantizers)
        return [Float8Quantizer(self.scale[i : i + 1], self.amax_history[0][i : i + 1], self.dtype) for i in each]

    def _contents(self) -> list[tuple[int, Tensor]]:
        """Version and bits of either tensor: a write may leave one of them as it was."""
        return [(each._version, each.detach().clone().view(torch.int32)) for each in (self.scale, self.amax_history)]

    def exchange(self, quantizers: Sequence[DelayedQuantizer | None]) -> None:
        """Give the histories of ``quantizers``, one per column, what was written here, or else show them here."""
        is_written = any(
            now._version != version or not torch.equal(now.detach().view(torch.int32), bits)
            for now, (version, bits) in zip((self.scale, self.amax_history), self._shown, strict=True)
        )
        for index, quantizer in enumerate(quantizers):
            if quantizer is not None and is_written:
                self._write(index, quantizer)
            elif quantizer is not None:
                self._show(index, quantizer)
        self._shown = self._contents()

    def _write(self, index: int, quantizer: DelayedQuantizer) -> None:
        history, spec = quantizer.history, quantizer.rowwise_spec
        assert history is not None and spec is not None
        column = self.amax_history[:, index].detach()
        values = torch.cat((column[:1], column[1:].flip(0)))
        if self.mode == "backward":  # a step of gradients ends when the next one begins
            values = values.roll(-1)
        history.leave_turn()
        with torch.inference_mode(False):
            history.values = values.to(history.values.device)
            history.amax = (spec.numerator / self.scale[index : index + 1]).to(history.amax.device)
        history.ended = self.mode == "backward"

    def _show(self, index: int, quantizer: DelayedQuantizer) -> None:
        history, spec = quantizer.history, quantizer.rowwise_spec
        assert history is not None and spec is not None
        values, amax = history.resized(quantizer.recipe.amax_history_len), history.amax
        if (history.ended or self.mode == "backward") and bool(values[0] != 0):
            amax = history.next_amax(quantizer.recipe, spec)
            values = values.roll(1)
            values[0] = 0
        self.scale[index] = (spec.numerator / amax)[0]
        self.amax_history[:, index] = torch.cat((values[:1], values[1:].flip(0)))


class CustomRecipeState(RecipeState):
    """Asks the recipe's factory; requests for delayed scaling become quantizers of one state.

    Attributes:
        answers: what the factory has returned, one per tensor.
        delayed: the state of the requests, which are about the tensors ``delayed_slots``.
    """

    delayed: DelayedScalingRecipeState | None = None
    delayed_slots: list[int]
    answers: list[Any]
    _earlier: DelayedScalingRecipeState | None = None

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Keep the requests' state, for the case that the factory asks for the same again."""
        self._earlier = other.delayed if isinstance(other, CustomRecipeState) else None
        return self._earlier is not None

    def make_quantizers(self) -> list[Any]:
        """What the factory answers.

        Raises:
            ValueError: it returns None, or requests that differ.
        """
        factory = self.frozen.qfactory
        factory = factory.factory if isinstance(factory, recipes.Answering) else factory
        roles: list[Any] = [QuantizerRole() for _ in range(self.num_quantizers)] if self.roles is None else self.roles
        self.answers = [factory(role) for role in roles]
        for index, answer in enumerate(self.answers):
            if answer is None:
                raise ValueError(
                    f"CustomRecipe qfactory returned None for slot {index} (role={roles[index]}): it must return a "
                    "Quantizer or a QuantizerRequest, and an IdentityQuantizer where nothing is to be quantized"
                )
        asked = {slot: answer for slot, answer in enumerate(self.answers) if isinstance(answer, DelayedScalingRequest)}
        self.delayed_slots = list(asked)
        quantizers = list(self.answers)
        if asked:
            self.delayed = self._delayed_state(asked)
            for slot, quantizer in zip(asked, self.delayed.make_quantizers(), strict=True):
                quantizers[slot] = quantizer
        return quantizers

    def _delayed_state(self, asked: dict[int, DelayedScalingRequest]) -> DelayedScalingRecipeState:
        first = next(iter(asked.values()))
        for index, request in asked.items():
            for field, value in vars(first).items():
                if getattr(request, field) != value:
                    raise ValueError(
                        f"All DelayedScalingRequests in one CustomRecipeState must match: {field} is {value!r} at "
                        f"first and {getattr(request, field)!r} in slot {index}"
                    )
        recipe = recipes.DelayedScaling(**vars(first))
        earlier = self._earlier
        if earlier is not None and earlier.recipe == recipe and earlier.num_quantizers == len(asked):
            return earlier
        return DelayedScalingRecipeState(recipe, mode=self.mode, num_quantizers=len(asked), device=self.device)

    @property
    def _ds_state(self) -> DelayedScalingRecipeState | None:
        return self.delayed

    @property
    def _has_delayed_scaling(self) -> bool:
        return self.delayed is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> AnyRecipe | None:
        return None if self.delayed is None else self.delayed.recipe

    @property
    def scale(self) -> Tensor | None:
        return None if self.delayed is None else self.delayed.scale

    @property
    def amax_history(self) -> Tensor | None:
        return None if self.delayed is None else self.delayed.amax_history


_STATES: dict[str, type[RecipeState]] = {
    "delayed": DelayedScalingRecipeState,
    "mxfp8": MXFP8BlockScalingRecipeState,
    "float8_current_scaling": Float8CurrentScalingRecipeState,
    "float8_block_scaling": Float8BlockScalingRecipeState,
    "nvfp4": NVFP4BlockScalingRecipeState,
    "custom": CustomRecipeState,
}
