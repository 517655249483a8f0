"""What TransformerEngine's modules with weights have in common."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_callable, shown
from fp4engine.functional.fused_input import FusedInput
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.inputs import cast_by_autocast
from fp4engine.modules.model_init import init_in_force
from fp4engine.modules.quantized_weight import QuantizedWeight, casts_of
from fp4engine.modules.te_arguments import te_device
from fp4engine.quantizers.factory import make_quantizer
from fp4engine.recipe import DelayedScaling, Recipe
from fp4engine.roles import TENSOR_TYPES
from fp4engine.roles import QuantizerRole as FrozenRole
from fp4engine.state import AutocastState
from fp4engine.te.common.recipe import answered, as_frozen
from fp4engine.te.pytorch import regions
from fp4engine.te.pytorch.arguments import Placed, rest_of
from fp4engine.te.pytorch.custom_recipes.gemm import CustomLinear
from fp4engine.te.pytorch.delayed_wgrad import DelayWgrad, Run
from fp4engine.te.pytorch.extra_state import ExtraState
from fp4engine.te.pytorch.main_grad import overwrites_main_grad
from fp4engine.te.pytorch.module_states import MODES, ModuleStates, recipe_in_force, weights_as_recorded
from fp4engine.te.pytorch.quantized_tensor import share_amaxes_of_shards
from fp4engine.te.pytorch.recipe_state import AnyRecipe
from fp4engine.te.pytorch.roles import QuantizerRole, require_role
from fp4engine.te.pytorch.state_manager import FP8GlobalStateManager
from fp4engine.te.pytorch.stored_weights import dress_weights
from fp4engine.te.pytorch.tensor import Float8Quantizer, HybridQuantizedTensor

ABSENT = dict.fromkeys(
    (
        "UserBufferQuantizationMode",
        "destroy_ub",
        "fill_userbuffers_buffer_for_all_gather",
        "get_ub",
        "get_ub_is_fp8",
        "initialize_ub",
        "is_ub_initialized",
        "using_cublasmp_backend",
    ),
    "a layer lies on one rank, and there is no communication to overlap",
)
"""Names of TransformerEngine's that are not here, and why."""


def _role(tensor: str, doc: str) -> property:
    """The role of ``tensor``, with which states are made anew when another one is set."""

    def read(module: "TransformerEngineBaseModule") -> QuantizerRole | None:
        return getattr(module, f"_{tensor}_role")

    def write(module: "TransformerEngineBaseModule", role: QuantizerRole | None) -> None:
        require_role(f"{tensor}_quantizer_role", role)
        if role != read(module):
            setattr(module, f"_{tensor}_role", role)
            module.fp8_meta_tensors_initialized = False

    return property(read, write, doc=doc)


class DeferredInit(torch.nn.Module):
    """A module whose ``reset_parameters`` gives memory to what is on ``meta``."""

    _is_built = False
    _init_context: Callable[[], Any] = nullcontext
    _preserves = False

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialise the parameters; those on ``meta`` get memory first, where TransformerEngine would place them.

        Args:
            defer_init: True does nothing.
        """
        if defer_init:
            return
        if self._is_built:
            materialize(self, self._preserves)
        with self._init_context():
            super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]


class TransformerEngineBaseModule(Placed, DeferredInit, ExtraState):
    """What TransformerEngine's modules with weights have in common.

    Attributes:
        tp_size: 1, since parts of a layer are not spread over ranks.
        sequence_parallel: False, for the same reason.
        fp8_meta_tensors_initialized: whether :attr:`fp8_meta` belongs to the present recipe and roles.
    """

    tp_size = 1
    sequence_parallel = False
    delay_wgrad_compute = False
    save_original_input = False
    _ran_by: Recipe | None = None
    _stored_by: Recipe | None = None
    _states: ModuleStates | None = None
    fp8_meta_tensors_initialized = False
    _is_watched = False
    _draws = False
    _output_role: QuantizerRole | None = None
    _grad_input_role: QuantizerRole | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._construct(self._bound(args, kwargs))

    def _construct(self, given: dict[str, Any]) -> None:
        """Construct fp4engine's module by the arguments ``given``, less what only TransformerEngine has."""
        torch.nn.Module.__init__(self)
        tracker, state = given["get_rng_state_tracker"], given.get("rng_tracker_name")
        if tracker is not None:
            require_callable("get_rng_state_tracker", tracker)
        if tracker is not None and state is not None:
            self._init_context = partial(_forked, tracker, state)
        self.delay_wgrad_compute = given["delay_wgrad_compute"]
        if (init := init_in_force()) is not None:
            self._stored_by, self._preserves = init.recipe, init.preserve_high_precision_init_val
        self._delayed: list[Callable[[], None]] = []
        self._additions: list[Callable[[], None]] = []
        theirs = rest_of(given)
        if theirs.get("recipe") is not None:
            theirs["recipe"] = as_frozen(theirs["recipe"])
        super().__init__(**theirs)
        self.save_original_input = given.get("save_original_input", False)
        self.use_bias, self._is_built = given["bias"], True
        for part in self.modules():
            if isinstance(part, Gemms):
                part.overwrites = overwrites_main_grad
                part.later = self._additions if self.delay_wgrad_compute else None
        if self._stored_by is not None:
            dress_weights(self, self._stored_by)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies the weight gradients still to be computed, which belong to this module's weights."""
        base: Any = super()
        return {**base.__getstate__(), "_delayed": []}

    def _load_from_state_dict(self, *arguments: Any, **others: Any) -> None:
        share_amaxes_of_shards(self)
        super()._load_from_state_dict(*arguments, **others)

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(self, name, value)

    def need_backward_dw(self) -> bool:
        """Whether :meth:`backward_dw` has anything to do with this module."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Give the weights the gradients of the oldest backward pass for which this has not been done."""
        if self.delay_wgrad_compute and self._delayed:
            self._delayed.pop(0)()

    def _run(self, forward: Callable[..., Any], inp: Tensor, *arguments: Any) -> Any:
        """``forward(inp, *arguments)`` in the dtype of ``torch.autocast``, by the states of the recipe in force.

        Args:
            arguments: the last is ``is_first_microbatch``. If it is False, delayed scaling keeps the weight's scale of
                the first microbatch, and notes no amax of it.
        """
        if not isinstance(inp, Tensor):
            raise ValueError(f"{type(self).__name__}.forward(inp=) must be a tensor, got {shown(inp)}")
        inp = cast_by_autocast(inp)
        frozen = None if torch.compiler.is_compiling() else recipe_in_force()
        if frozen is None:
            return self._forward(forward, inp, *arguments)
        if arguments[-1] is not False:
            return self._run_by(frozen, forward, inp, *arguments)
        with weights_as_recorded([part for part in self.modules() if isinstance(part, Gemms)], frozen):
            return self._run_by(frozen, forward, inp, *arguments)

    def _returned(self, result: Any) -> Any:
        """``result`` of a forward, whose bias, where one is returned, is of the output's dtype."""
        if not getattr(self, "return_bias", False):
            return result
        output, bias, *rest = result
        dtype: torch.dtype = output.dtype
        if isinstance(bias, list):
            return (output, [None if one is None else one.to(dtype) for one in bias], *rest)
        return (output, None if bias is None else bias.to(dtype), *rest)

    def _run_by(self, frozen: Recipe, forward: Callable[..., Any], inp: Tensor, *arguments: Any) -> Any:
        self._follow(frozen)
        if self._draws:
            regions.seed(inp.device)
        if self._states is None:
            return self._forward(forward, inp, *arguments)
        with answered(self._states.answers()):
            if not (self._is_watched and self._states.remembers):
                return self._forward(forward, inp, *arguments)
            self._exchange()
            regions.show_when_left(self._exchange)
            return self._shown_after_backward(self._forward(forward, inp, *arguments))

    def _forward(self, forward: Callable[..., Any], inp: Tensor, *arguments: Any) -> Any:
        """``forward(inp, *arguments)``; weight gradients are left to :meth:`backward_dw` if they are delayed."""
        if not (self.delay_wgrad_compute and torch.is_grad_enabled()):
            return forward(inp, *arguments)
        weights = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        later = {name: weight for name, weight in weights.items() if not name.startswith("layer_norm")}
        if not later:
            return forward(inp, *arguments)
        run = Run(forward, arguments, self._delayed, self, later, self._additions)
        now = [weight for name, weight in weights.items() if name not in later]
        trained = inp.new_empty(0).requires_grad_()  # so that the output needs a gradient even if no input does
        outputs = DelayWgrad.apply(run, trained, inp, *now)
        return run.assemble(outputs)

    def _multiply(
        self, inp: Tensor | FusedInput, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        """As in fp4engine's modules, unless the quantizers have a product of their own, which is then used.

        Raises:
            NotImplementedError: such a product would have to add to ``weight.main_grad``.
        """
        states = None if torch.compiler.is_compiling() or recipe_in_force() is None else self._states
        own = None if states is None else states.own_product()
        if own is None:
            base: Any = super()
            return base._multiply(inp, weight, bias, is_first_microbatch)
        if getattr(self, "fuse_wgrad_accumulation", False):
            raise NotImplementedError(
                "fuse_wgrad_accumulation=True is not implemented for quantizers with a qgemm() of their own; "
                "leave it at False"
            )
        output = CustomLinear.apply(cast_by_autocast(inp if isinstance(inp, Tensor) else inp.tensor()), weight, own)
        return output if bias is None else output + bias.to(output.dtype)

    def _follow(self, frozen: Recipe) -> None:
        """Bring the states in line with ``frozen``, the recipe in force, and check stored weights against it.

        Raises:
            RuntimeError: weights are stored by another recipe.
        """
        if self._ran_by is frozen and self.fp8_meta_tensors_initialized:
            return
        if self._ran_by is not None and type(self._ran_by) is not type(frozen):
            old, new = type(self._ran_by).__name__, type(frozen).__name__
            warnings.warn(f"Recipe type changed from {old} to {new}; scales start anew", stacklevel=5)
        if self._ran_by != frozen:
            self._check_stored(frozen)
            self.fp8_meta_tensors_initialized = False
        self._ran_by = frozen
        if not self.fp8_meta_tensors_initialized and (frozen.custom() or self._is_watched):
            self.init_fp8_meta_tensors(FP8GlobalStateManager.get_fp8_recipe())
        self.fp8_meta_tensors_initialized = True
        self._draws = any(map(_draws, self._quantizers_by(frozen)))
        if self.save_original_input and torch.is_grad_enabled():
            self._check_saved_input()

    def _quantizers_by(self, frozen: Recipe) -> list[Any]:
        """The quantizers of the tensors of both passes by the recipe in force."""
        if frozen.custom():
            assert self._states is not None
            return [quantizer for of_pass in self._states.quantizers.values() for quantizer in of_pass]
        kind = getattr(self, "module_type", "linear")
        slots = [role for fwd in (True, False) for role in self.get_quantizer_roles(fwd=fwd, num_quantizers=0)]
        asked = {(role.tensor_type, role.name) for role in slots if role is not None}
        known = [FrozenRole(kind, tensor_type, name) for tensor_type, name in asked if tensor_type in TENSOR_TYPES]
        return [make_quantizer(frozen, role) for role in known]

    def _check_stored(self, frozen: Recipe) -> None:
        stored = self._stored_by
        if stored is None or stored == frozen:
            return
        for name, weight in self.named_parameters():
            if isinstance(weight, QuantizedWeight) and not frozen.custom():
                role = FrozenRole(getattr(self, "module_type", "linear"), "weight", getattr(self, "name", ""))
                is_hybrid = isinstance(weight, HybridQuantizedTensor)
                if is_hybrid or casts_of(weight.quantizer) != casts_of(make_quantizer(frozen, role)):
                    raise RuntimeError(
                        f"Recipe mismatch for {name!r}: it is stored by {stored!r}, and the recipe in force is "
                        f"{frozen!r}; give quantized_model_init() and autocast() one recipe"
                    )
        if type(stored) is type(frozen):
            warnings.warn("Quantizer is being updated, this may affect model behavior", stacklevel=7)
        self._stored_by = frozen

    def _check_saved_input(self) -> None:
        """Warn or raise, as TransformerEngine does, if the recipe cannot quantize an input a second time.

        Raises:
            ValueError: under delayed scaling, whose second scale would be another one.
        """
        assert self._ran_by is not None
        if isinstance(self._ran_by, DelayedScaling):
            raise ValueError("DelayedScaling recipe is not supported with save_original_input=True; leave it at False")
        if self._states is None or not self._ran_by.custom():
            return
        of_input = self._states.quantizers["scaling_fwd"][0]
        if isinstance(of_input, Float8Quantizer):
            warnings.warn(
                "save_original_input is incompatible with delayed-scaling quantizers (Float8Quantizer); it is ignored",
                stacklevel=6,
            )
        elif not of_input.is_requantization_safe():
            warnings.warn(
                "Ignoring save_original_input=True because the input quantizer may not make the same operand twice",
                stacklevel=6,
            )

    def init_fp8_meta_tensors(self, recipe: AnyRecipe) -> None:
        """Make :attr:`fp8_meta` and :attr:`quantizers` for ``recipe``; tensors of the same shape are kept."""
        roles = {key: self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=0) for key, mode in MODES.items()}
        self._states = ModuleStates(recipe, roles, self._states)
        self.fp8_meta_tensors_initialized = True

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """The roles of the tensors of one pass; output and input gradient have those that were set."""
        kind, name = getattr(self, "module_type", "linear"), getattr(self, "name", "") or ""
        if fwd:
            return [QuantizerRole(kind, "input", name), QuantizerRole(kind, "weight", name), self.output_quantizer_role]
        return [QuantizerRole(kind, "grad_output", name), self.grad_input_quantizer_role]

    output_quantizer_role = _role("output", "The role of the output that a custom recipe's factory is asked with.")
    grad_input_quantizer_role = _role("grad_input", "The same of the input's gradient; None until it is set.")

    def _computed_by(self) -> dict[str, list[Any]]:
        """The quantizers that forwards compute by, in the places of :meth:`get_quantizer_roles`."""
        return quantizers_of(self)

    def _exchange(self) -> None:
        if self._states is None or not self._states.remembers:
            return
        with answered(self._states.answers()):
            for part in self.modules():  # a copy, or what has loaded a state, has histories before its first forward
                if isinstance(part, Gemms) and part.amax_histories:
                    part.plan(AutocastState(True, self._states.frozen))
        self._states.exchange(self._computed_by())

    def _shown_after_backward(self, output: Any) -> Any:
        """``output``; after its backward pass the amax histories are copied to :attr:`fp8_meta`."""
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            engine: Any = torch.autograd.Variable._execution_engine

            def show(grad: Tensor) -> None:
                engine.queue_callback(self._exchange)

            first.register_hook(show)
        return output

    def _made(self) -> ModuleStates:
        self._is_watched = True
        by = FP8GlobalStateManager.get_fp8_recipe() if self._ran_by is None else self._ran_by
        if self._states is None or not self.fp8_meta_tensors_initialized or self._states.frozen != as_frozen(by):
            self.init_fp8_meta_tensors(by)
        assert self._states is not None
        self._exchange()
        return self._states

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe of the last forward, and its states ``scaling_fwd`` and ``scaling_bwd``.

        Under delayed scaling these show the module's amax histories, and may be written before the next forward.
        """
        return self._made().meta

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """Quantizers of :attr:`fp8_meta`: input, weight, output in ``scaling_fwd``, gradients in ``scaling_bwd``."""
        return self._made().quantizers


def _forked(get_rng_state_tracker: Callable[[], Any], name: str) -> Any:
    return get_rng_state_tracker().fork(name)


def _draws(quantizer: Any) -> bool:
    """Whether a quantizer of either kind rounds stochastically."""
    sides = (quantizer, getattr(quantizer, "rowwise_quantizer", None), getattr(quantizer, "columnwise_quantizer", None))
    return any(getattr(side, "stochastic_rounding", getattr(side, "is_stochastic", False)) for side in sides)


def quantizers_of(gemms: Any) -> dict[str, list[Any]]:
    """The quantizers of the last forward of one linear transformation, one per slot; None before the first."""
    plan = None if gemms._plan is None else gemms._plan.plan
    if plan is None:
        return {"scaling_fwd": [None] * 3, "scaling_bwd": [None] * 2}
    return {"scaling_fwd": [plan.input, plan.weight, None], "scaling_bwd": [plan.grad_output, None]}


def materialize(module: torch.nn.Module, preserve: bool) -> None:
    """Give memory to the parameters of ``module`` that are on ``meta``.

    Args:
        preserve: weights that are stored as codes keep the values that they are initialised to.
    """
    place = te_device(None) or torch.get_default_device()
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            empty: Any = torch.nn.Parameter(torch.empty_like(parameter, device=place), parameter.requires_grad)
            setattr(module, name, empty)
            stored: Any = getattr(empty, "_local_tensor", empty)
            if isinstance(stored, QuantizedWeight) and preserve:
                stored._high_precision_init_val = torch.empty(0, dtype=parameter.dtype)
    share_amaxes_of_shards(module)
