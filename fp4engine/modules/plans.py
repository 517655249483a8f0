"""By which plan a layer computes: that of the recipe in force, or of its own recipe; also while code is traced."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional import LinearPlan, make_linear_plan
from fp4engine.modules.identity import Named, expect_traces
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.modules.recompute import followed_state, noted_scales
from fp4engine.private import constant_when_traced
from fp4engine.quantizers.delayed import DelayedQuantizer
from fp4engine.quantizers.shared import require_own_siblings
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import numbered, require_recipe
from fp4engine.roles import TENSOR_TYPES, QuantizerRole
from fp4engine.state import AutocastState, current_state, in_backward, is_recomputed


class MadePlan(NamedTuple):
    """A plan that a module keeps until something changes from which the plan was made.

    Attributes:
        read: the module's name and its weight's shape, which the recipe may have read.
    """

    recipe: Recipe
    plan: LinearPlan
    read: tuple[str, tuple[int, ...]]


class Planned(Named):
    """A layer that follows recipes.

    Attributes:
        module_type: the :attr:`QuantizerRole.module_type` that recipes see.
        shape: (N, K) of the weight, if the module has no weight of its own.
        amax_histories: what delayed scaling remembers of each role.
    """

    def _configure_plans(
        self, name: str | None, recipe: Recipe | None, module_type: str, shape: tuple[int, ...]
    ) -> None:
        # By the number of the recipe and the weight's shape, of recipes that read the module.
        self._plans_for_tracing: dict[tuple[str, tuple[int, ...]], LinearPlan] = {}
        self._remembering = Remembering(self)
        self.name = name
        require_own_recipe(recipe)  # nn.Module would take a module for a child, and never ask the property
        self.recipe = recipe
        self.module_type, self.shape = module_type, shape
        self.amax_histories: dict[str, Any] = {}
        self._plan: MadePlan | None = None
        self._ran_by_recipe = False

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that the module follows outside autocast regions; None is high precision."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        require_own_recipe(recipe)
        self._recipe = recipe
        if recipe is not None and recipe.reads_names and self._identity is not None:
            self._identity.root.look_when_called()

    def forget_plan(self) -> None:
        """Drop histories and the plan that uses them; the next forward makes a plan anew."""
        self.amax_histories.clear()
        self._plan = None
        self._remembering = Remembering(self)

    def weight_shape(self) -> tuple[int, ...]:
        """(N, K) of the weight. A weight that is computed from other parameters is not computed for this."""
        return self.shape

    def plan(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan under ``state``; None for high precision.

        The module keeps the plan until the recipe changes, or the module's name or its weight's shape if the recipe
        reads these.
        """
        recipe = self.recipe if state is None else state.recipe
        if recipe is None or (state is not None and not state.enabled):
            return None
        if torch.compiler.is_dynamo_compiling():
            return self._traced_plan(recipe)
        made = self._plan  # read once, since a thread in another region may replace it
        if (
            made is None
            or (made.recipe is not recipe and made.recipe != recipe)
            or (recipe.reads_modules and made.read != (self.name_for(recipe), self.weight_shape()))
        ):
            name, shape = read = self.name_for(recipe), self.weight_shape()
            plan = make_linear_plan(recipe, self.module_type, name, shape)
            require_own_siblings(plan.weight, self)
            if recipe.reads_modules and not plan.is_stateful:
                self._plans_for_tracing[recipe.number, shape] = plan
            plan = plan.remembering_in(self.amax_histories) if plan.is_stateful else plan
            made = self._plan = MadePlan(recipe, plan, read)
        return made.plan

    def plan_by(self, recipe: Recipe) -> LinearPlan:
        """The plan by which the module would multiply under ``recipe``.

        Raises:
            ValueError: as :meth:`name_for`.
        """
        return make_linear_plan(recipe, self.module_type, self.name_for(recipe), self.weight_shape())

    def role(self, tensor_type: str, recipe: Recipe) -> QuantizerRole:
        """What ``recipe`` is told of a tensor of this module.

        Raises:
            ValueError: as :meth:`name_for`.
        """
        return QuantizerRole(self.module_type, tensor_type, self.name_for(recipe), self.weight_shape())

    def _traced_plan(self, recipe: Recipe) -> LinearPlan:
        """The plan for code that ``torch.compile`` traces, made outside the trace.

        If the recipe reads nothing of the module but its type, equal modules share a plan, and so one graph. Under
        other recipes each name makes a graph; if the modules have run in eager mode before, each plan makes a graph.
        """
        if not recipe.reads_modules:
            return getattr(_plans, _leave_plan(recipe.number, self.module_type, "", ()))
        self._require_plan(recipe.number, "" if self._identity is None else self._identity.root.kind)
        shape = self.weight_shape()
        if (recipe.number, shape) in self._plans_for_tracing:
            return self._plans_for_tracing[recipe.number, shape]
        return getattr(_plans, _leave_plan(recipe.number, self.module_type, self.name, shape))

    @constant_when_traced
    def _require_plan(self, recipe: str, kind: str) -> None:
        """Check, while ``torch.compile`` traces, that the recipe of this number can tell how the module computes.

        Args:
            kind: see :class:`~fp4engine.modules.identity.Root`; the graph has a guard on it.

        Raises:
            ValueError: as :meth:`name_for`.
        """
        expect_traces()
        self.plan_by(numbered(recipe))

    @constant_when_traced
    def _leave_remembering(self, recipe: str, mode: str, device: str) -> str:
        """Make the plan with this module's memory, and return its attribute; runs while ``torch.compile`` traces."""
        name = f"{mode} {recipe} {device}"
        getattr(self._remembering, name)
        return name

    def _state_in_force(self) -> AutocastState | None:
        """The state of the region in force. In a recomputed forward, that is the region of the forward that it repeats.

        Raises:
            RuntimeError: the module runs inside a backward pass, and the region that it should repeat is not known.
        """
        if torch.compiler.is_dynamo_compiling():
            refuse_stray_recomputation()
            return current_state()
        state, is_known = followed_state()
        if is_known:
            return state
        if self._ran_by_recipe or state is not None:
            raise RuntimeError(
                f"{self.name or type(self).__name__} runs inside a backward pass, outside any autocast region that was "
                "entered there, and it is not known by which recipe. If activation checkpointing recomputes it, use "
                "fp4engine.checkpoint, or give torch.utils.checkpoint use_reentrant=False and "
                "context_fn=fp4engine.recompute_contexts, or put the region inside the checkpointed function; "
                "elsewhere, enter autocast(recipe=...) or autocast(enabled=False) around the call"
            )
        return None

    def _plan_under(self, state: AutocastState | None, weight: "Tensor | QuantizedWeight") -> LinearPlan | None:
        """The plan of this forward, which computes where ``weight`` is.

        Raises:
            RuntimeError: a recomputation cannot repeat its draws, or does not know its scales.
            ValueError: the module follows its own recipe outside regions, and that has delayed scaling.
        """
        plan = self.plan(state)
        if plan is None or torch.compiler.is_dynamo_compiling():
            if plan is None or not plan.is_stateful:
                return plan
            if state is None:
                raise no_step(self.recipe)
            mode = "train" if self.training or torch.is_grad_enabled() else "eval"
            return getattr(self._remembering, self._leave_remembering(state.recipe.number, mode, str(weight.device)))
        if not self._ran_by_recipe:  # an assignment to a module's attribute is a call of Python
            self._ran_by_recipe = True
        if in_backward():
            if plan.draws_in_forward and not ops.is_replaying():
                raise RuntimeError(
                    f"the forward of {plan.recipe!r} draws random bits, which torch.utils.checkpoint does not repeat; "
                    "use fp4engine.checkpoint"
                )
            return plan.repeating(noted_scales()) if plan.is_stateful else plan
        if plan.is_stateful and state is None:
            raise no_step(plan.recipe)
        if not plan.is_stateful:
            return plan
        # A forward in evaluation adds nothing to histories. One in train mode without gradients does, and so does the
        # first run of a reentrant checkpoint, which is without gradients and will be run again.
        is_trained = self.training or torch.is_grad_enabled() or ops.is_replaying()
        return plan if is_trained and not torch.is_inference_mode_enabled() else plan.evaluating()


def require_own_recipe(recipe: Recipe | None) -> None:
    """Accept a recipe that a module may follow outside autocast regions.

    Raises:
        ValueError: ``recipe`` is not a recipe, has delayed scaling, or has a schedule in it.
    """
    require_recipe(recipe)
    if recipe is None:
        return
    if recipe.is_delayed:
        raise no_step(recipe)
    if recipe.at(0) != recipe:
        raise ValueError(
            "a schedule needs a step, so a module cannot follow it outside autocast regions; "
            f"use autocast(recipe=recipe.at(step)) instead of recipe={recipe!r}"
        )


def no_step(recipe: Recipe | None) -> ValueError:
    """The error for a module that would follow ``recipe``, which scales by earlier steps, outside every region."""
    return ValueError(
        "a recipe that scales by earlier steps needs autocast regions, so a module cannot follow it outside; "
        f"use autocast(recipe=...) instead of recipe={recipe!r}"
    )


class _Plans:
    """The plans that traces read, one attribute each: Dynamo reads an attribute, but would copy a dictionary."""


_plans = _Plans()
_attributes: dict[tuple[str, str, str, tuple[int, ...]], str] = {}
"""``what _leave_plan was asked -> the attribute with the answer``; Dynamo takes no name with a dot, as modules have."""


@constant_when_traced
def _leave_plan(recipe: str, module_type: str, name: str, shape: tuple[int, ...]) -> str:
    """Make a plan, leave it in ``_plans`` and return the attribute's name; runs while ``torch.compile`` traces.

    Args:
        recipe: number of the recipe.
        name, shape: of the module; empty where the recipe does not read them.
    """
    asked = recipe, module_type, name, shape
    if asked not in _attributes:
        plan = make_linear_plan(numbered(recipe), module_type, name, shape)
        if any(isinstance(getattr(plan, role), DelayedQuantizer) for role in TENSOR_TYPES):
            raise RuntimeError(
                "DelayedScaling keeps amaxes between steps, which torch.compile cannot trace; use "
                "Float8CurrentScaling, or leave its layers out of compiled code, by torch.compiler.disable"
            )
        attribute = f"plan{len(_attributes)}"
        setattr(_plans, attribute, plan)
        _attributes[asked] = attribute
    return _attributes[asked]


class Remembering:
    """The plans of one module by recipes with a memory, one attribute each, as in :class:`_Plans`.

    The guards of a graph that another module's trace has made ask for an attribute too, and so equal modules share it.
    """

    def __init__(self, module: Any) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)

    def __getattr__(self, name: str) -> LinearPlan:
        """The plan under the name ``"train"`` or ``"eval"``, number of the recipe, and device, with spaces between."""
        # The first question is for copies: they ask for names before there is a module.
        if " " not in name or (module := self._module()) is None:
            raise AttributeError(name)
        mode, recipe, device = name.split(" ")
        plan = module.plan_by(numbered(recipe)).remembering_in(module.amax_histories)
        for history in module.amax_histories.values():
            history.follow(torch.device(device))  # or every graph would
        plan = plan.evaluating() if mode == "eval" else plan
        setattr(self, name, plan)
        return plan


@constant_when_traced
def refuse_stray_recomputation() -> None:
    """Refuse to trace a recomputed forward, whose region is not known while it is traced.

    Raises:
        RuntimeError: this runs inside a backward pass, outside any region that was entered there.
    """
    if is_recomputed():
        raise RuntimeError(
            "a compiled module is traced inside a backward pass, outside any autocast region that was entered there; "
            "put the region inside the checkpointed function, or use fp4engine.checkpoint"
        )
