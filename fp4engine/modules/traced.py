"""What a module asks while ``torch.compile`` traces it, answered as constants."""

import weakref
from typing import Any

import torch

from fp4engine.functional import LinearPlan, make_linear_plan
from fp4engine.private import constant_when_traced
from fp4engine.quantizers.delayed import DelayedQuantizer
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import numbered
from fp4engine.roles import TENSOR_TYPES
from fp4engine.state import is_recomputed


class _Plans:
    """The plans that traces read, one attribute each: Dynamo reads an attribute, but would copy a dictionary."""


_plans = _Plans()
_attributes: dict[tuple[str, str, str, tuple[int, ...]], str] = {}
"""``what _leave_plan was asked -> the attribute with the answer``; Dynamo takes no name with a dot, as modules have."""


def traced_plan(recipe: Recipe, module_type: str, name: str, shape: tuple[int, ...]) -> LinearPlan:
    """The plan by ``recipe`` of every module of this type, name and shape, for code that is traced.

    Raises:
        RuntimeError: the recipe has delayed scaling, whose steps end on the host.
    """
    return getattr(_plans, _leave_plan(recipe.number, module_type, name, shape))


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
