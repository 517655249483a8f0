"""What every module with a weight does: run its three GEMMs by the recipe in force."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import ops
from fp4engine.functional import ExecutedGemms, LinearPlan, WeightCache, linear, make_linear_plan
from fp4engine.functional.deferred import Deferred
from fp4engine.functional.grouped_linear import Expert
from fp4engine.modules.forward_memory import ForwardMemory
from fp4engine.modules.quantized_weight import QuantizedWeight, stored_operands
from fp4engine.recipe import LinearRecipe, Recipe
from fp4engine.state import AutocastState, current_state, in_backward, is_recomputed
from fp4engine.tracing import alive, constant_when_traced

_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""What ``torch.autocast`` casts; it leaves float64 and integers as they are."""

_UNQUANTIZED = LinearRecipe(backward_override=None, backend="auto")  # both given: an import reads no flag
"""High precision, bit for bit, by a plan: for a gradient that goes to ``main_grad``."""


class Gemms(torch.nn.Module):
    """The three GEMMs of one linear transformation. Has no parameters: a module is one, or owns some, beside its own.

    Args:
        name: the module's name, which recipes may match; None is the empty name.
        recipe: recipe to follow where no autocast region is active; None means high precision there.
        fuse_wgrad_accumulation: wgrad adds to the buffer ``weight.main_grad`` (FP32 or BF16, shaped like the weight)
            in its epilogue, and ``weight.grad`` stays None.
        module_type: what recipes see as :attr:`QuantizerRole.module_type`.
        shape: (N, K) of the weight, where the module has none of its own.

    Attributes:
        executed: what really ran, see :class:`~fp4engine.functional.ExecutedGemms`.
        amax_histories: what delayed scaling remembers of each role.
    """

    def __init__(
        self,
        name: str | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        module_type: str = "linear",
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self._configure(name, recipe, fuse_wgrad_accumulation, module_type, shape)

    def _configure(
        self,
        name: str | None,
        recipe: Recipe | None,
        fuse_wgrad_accumulation: bool,
        module_type: str = "linear",
        shape: tuple[int, ...] = (),
    ) -> None:
        require_own_recipe(recipe)
        self.name = name or ""
        self.recipe = recipe
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.module_type = module_type
        self.shape = shape
        self.executed = ExecutedGemms()
        self.amax_histories: dict[str, Any] = {}
        self._plan: LinearPlan | None = None
        self._weight_cache: WeightCache | None = None
        self._microbatch_cache: WeightCache | None = None
        self._forwards = ForwardMemory()

    def forget_plan(self) -> None:
        """Drop histories and the plan that uses them; the next forward makes a plan anew."""
        self.amax_histories.clear()
        self._plan = None

    def plan(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan under ``state``; None for high precision. Rebuilt when the recipe differs by value."""
        recipe = self.recipe if state is None else state.recipe
        if recipe is None or (state is not None and not state.enabled):
            return None
        group = None if state is None else state.amax_reduction_group
        if not torch.compiler.is_compiling():
            return self._make_plan(recipe, group)
        _make_plan_while_traced(id(self), id(recipe), 0 if group is None else id(group))
        return self._plan

    def _make_plan(self, recipe: Recipe, group: Any) -> LinearPlan:
        """The plan for ``recipe``, also left in ``_plan``, where another thread may replace it."""
        plan = self._plan
        if (
            plan is None
            or (plan.recipe is not recipe and plan.recipe != recipe)
            or plan.amax_reduction_group is not group
        ):
            weight = getattr(self, "weight", None)
            shape = self.shape or (() if weight is None else tuple(weight.shape))
            plan = self._plan = make_linear_plan(
                recipe, self.module_type, self.name, self.executed, group, shape, self.amax_histories
            )
        return plan

    def multiply(
        self, inp: Tensor | Deferred, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """``inp @ weight.T + bias``: [..., K] -> [..., N].

        Args:
            is_first_microbatch: True quantizes the weight and keeps its operands, False reuses them while the weight
                is unchanged, None neither; says nothing about gradients. See also :func:`fp4engine.weight_cache`.
        """
        plan = self._plan_in_force()
        main_grad = self._main_grad(weight)
        if isinstance(weight, QuantizedWeight) and plan is None:
            weight = weight.dequantize()
        if plan is None and main_grad is None:
            inp = inp if isinstance(inp, Tensor) else inp.tensor()
            self.executed.record_high_precision(inp, weight)
            output = F.linear(inp, weight, bias)
        else:
            inp = cast_by_autocast(inp)
            if isinstance(inp, Deferred) and (plan is None or not inp.fuses(plan)):
                inp = inp.tensor()
            computed_by = plan or make_linear_plan(_UNQUANTIZED, self.module_type, self.name, self.executed)
            cache = self._cache(weight, computed_by, is_first_microbatch)
            output = linear(inp, weight, bias, computed_by, weight_cache=cache, main_grad=main_grad)
        self.note_forward(plan, output)
        return output

    def expert(self, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None) -> Expert | None:
        """What :meth:`multiply` would compute by, as one of many for :func:`grouped_linear`; None in high precision."""
        plan = self._plan_in_force()
        if plan is None:
            return None
        return Expert(weight, bias, plan, self._cache(weight, plan, is_first_microbatch), self._main_grad(weight))

    def note_forward(self, plan: LinearPlan | None, output: Tensor) -> None:
        """Remember what ``output`` was computed by, for a recomputation."""
        if torch.compiler.is_compiling():
            _note_trace(id(self), plan is None)
        elif not in_backward():
            self._forwards.remember(plan, output, self.training)

    def _plan_in_force(self) -> LinearPlan | None:
        """The plan of this forward; a recomputation takes that of the forward it repeats.

        Raises:
            RuntimeError: it cannot be known which forward is repeated, or its draws cannot be.
        """
        backward = in_backward()
        repeated = self._forwards.plans(self.training) if backward and is_recomputed() else []
        if len(repeated) > 1:
            kinds = ", ".join("high precision" if plan is None else repr(plan.recipe) for plan in repeated)
            raise RuntimeError(
                f"a recomputation of {self.name or 'a module'} outside its autocast region could repeat several "
                f"forwards, by {kinds}; put the autocast region inside the checkpointed function, or use "
                "fp4engine.checkpoint"
            )
        plan = repeated[0] if repeated else self.plan(current_state())
        if plan is None:
            return None
        if not backward:
            return plan if torch.compiler.is_compiling() or self._is_remembered(plan) else _repeating(plan)
        if _draws_in_forward(plan) and not ops.is_replaying():
            raise RuntimeError(
                f"the forward of {plan.recipe!r} draws random bits, which torch.utils.checkpoint does not repeat; "
                "use fp4engine.checkpoint"
            )
        return _repeating(plan)

    def _is_remembered(self, plan: LinearPlan) -> bool:
        """Whether this forward changes what delayed scaling remembers: not in evaluation, which leaves no trace.

        Without gradients a module in train mode may still be trained: reentrant checkpointing runs it so.
        """
        if not (plan.input.is_stateful or plan.weight.is_stateful):
            return True
        return not torch.is_inference_mode_enabled() and (self.training or torch.is_grad_enabled())

    def _cache(self, weight: Tensor, plan: LinearPlan, is_first_microbatch: bool | None) -> WeightCache | None:
        """The cache to use; none while tracing, since a compiled region cannot hold tensors between calls.

        None either for a weight that was put together for this call.
        """
        if isinstance(weight, QuantizedWeight):
            return stored_operands(weight, plan)
        if torch.compiler.is_compiling() or not isinstance(weight, torch.nn.Parameter):
            return None
        if is_first_microbatch is None:
            return self._weight_cache
        if is_first_microbatch or self._microbatch_cache is None:
            self._microbatch_cache = WeightCache()
        return self._microbatch_cache

    def _main_grad(self, weight: Tensor) -> Tensor | None:
        if not (self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled()):
            return None
        main_grad = getattr(weight, "main_grad", None)
        if (
            not isinstance(main_grad, Tensor)
            or main_grad.shape != weight.shape
            or main_grad.dtype not in (torch.float32, torch.bfloat16)
        ):
            got = (tuple(main_grad.shape), main_grad.dtype) if isinstance(main_grad, Tensor) else main_grad
            raise ValueError(
                "fuse_wgrad_accumulation=True needs weight.main_grad, an FP32 or BF16 tensor of shape "
                f"{tuple(weight.shape)} set before the forward pass; got {got}"
            )
        return main_grad

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what is derived, and what a custom recipe's factory would keep from pickling."""
        derived = {"_plan": None, "_weight_cache": None, "_microbatch_cache": None, "_forwards": ForwardMemory()}
        return {**self.__dict__, **derived}


Input = TypeVar("Input", Tensor, Tensor | Deferred)


def cast_by_autocast(inp: Input) -> Input:
    """``inp`` in the dtype of ``torch.autocast`` where that is on."""
    if torch.is_autocast_enabled(inp.device.type) and inp.dtype in _CAST_BY_AUTOCAST:
        return inp.to(torch.get_autocast_dtype(inp.device.type))
    return inp


def require_own_recipe(recipe: Recipe | None) -> None:
    """Accept what a module may follow outside autocast regions.

    Raises:
        ValueError: not a recipe, or one with delayed scaling.
    """
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be an fp4engine.recipe.Recipe (zoo.make makes one) or None, got {recipe!r}")
    if recipe.is_delayed:
        raise ValueError(
            "delayed scaling chooses scales when an autocast region closes, so a module cannot follow it outside; "
            f"use autocast(recipe=...) instead of recipe={recipe!r}"
        )


@constant_when_traced
def _make_plan_while_traced(gemms: int, recipe: int, group: int) -> None:
    """:meth:`Gemms._make_plan` on the objects of these ids: ``torch.compile`` reads the plan, not how it is made.

    Dynamo passes constants to such a function, and guards on every id that it makes one.

    Raises:
        RuntimeError: the recipe is made in the function that is compiled, so that no id tells which it is.
    """
    in_force = alive(recipe)
    # Dynamo's stand-in for a recipe that the traced function makes is no recipe, or one without its fields.
    if not isinstance(in_force, Recipe) or not all(hasattr(in_force, field.name) for field in fields(in_force)):
        raise RuntimeError("torch.compile cannot trace how a recipe is made; make it outside the compiled function")
    alive(gemms)._make_plan(in_force, alive(group) if group else None)


@constant_when_traced
def _note_trace(identity: int, high_precision: bool) -> None:
    """Note what a compiled forward computes by; runs while it is traced, where no graph can be watched.

    Raises:
        RuntimeError: a recomputation is traced, and no forward computed so.
    """
    gemms: Gemms = alive(identity)
    plan = None if high_precision else gemms._plan
    if torch._C._current_graph_task_id() == -1:
        gemms._forwards.note(plan, gemms.training)
        return
    plans = gemms._forwards.plans(gemms.training)
    if plans and plan not in plans:
        raise RuntimeError(
            f"the recomputation of {gemms.name or 'a module'} is compiled outside the autocast region of its forward; "
            "put the region inside the checkpointed function, or use fp4engine.checkpoint"
        )


def _repeating(plan: LinearPlan) -> LinearPlan:
    """The plan for a forward that nothing is to be remembered of."""
    return replace(plan, input=plan.input.repeating(), weight=plan.weight.repeating())


def _draws_in_forward(plan: LinearPlan) -> bool:
    return plan.input.draws_in_forward or plan.weight.draws_in_forward


def dotted(*parts: str | None) -> str:
    """The parts that are there, joined by dots."""
    return ".".join(part for part in parts if part)
