"""``nn.Linear`` whose three GEMMs follow the recipe in force."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.functional import ExecutedGemms, LinearPlan, linear, make_linear_plan
from fp4engine.functional.plan import HIGH_PRECISION
from fp4engine.recipe import Recipe
from fp4engine.state import AutocastState, current_state


class Linear(torch.nn.Linear):
    """``y = x W^T + b``; an ``nn.Linear`` in every respect outside an autocast region.

    Same constructor, same parameters, same ``state_dict`` in both directions; no buffers, no extra state.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        name: the module's name, which recipes may match; ``convert`` sets it.
        params_dtype: TransformerEngine's spelling of ``dtype``. With it, and without ``device``, parameters are
            placed as TransformerEngine places them: on the current CUDA device where there is one.
        recipe: recipe to follow where no autocast region is active; None means high precision there.

    Attributes:
        executed: what really ran, see :class:`~fp4engine.functional.ExecutedGemms`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "",
        params_dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        if params_dtype is not None:
            if dtype is not None and dtype != params_dtype:
                raise ValueError(f"dtype and params_dtype are the same thing, got {dtype} and {params_dtype}")
            dtype = params_dtype
            if device is None and torch.cuda.is_available():
                device = "cuda"
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ValueError(f"recipe must be an fp4engine.recipe.Recipe or None, got {recipe!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.name = name
        self.recipe = recipe
        self.executed = ExecutedGemms()
        self._plan: LinearPlan | None = None

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, name: str = "", recipe: Recipe | None = None) -> "Linear":
        """A Linear that shares the parameters, hooks and mode of ``module``."""
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        new.name = name
        new.recipe = recipe
        new.executed = ExecutedGemms()
        new._plan = None
        return new

    def plan(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan under ``state``; None for high precision. Rebuilt when the recipe differs by value."""
        recipe = self.recipe if state is None else state.recipe
        if recipe is None or (state is not None and not state.enabled):
            return None
        plan = self._plan
        if plan is None or (plan.recipe is not recipe and plan.recipe != recipe):
            plan = make_linear_plan(recipe, "linear", self.name, self.executed)
            self._plan = plan
        return plan

    def forward(self, input: Tensor) -> Tensor:
        plan = self.plan(current_state())
        if plan is None:
            self._record_high_precision(input)
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return linear(input, self.weight, self.bias, plan)

    def _record_high_precision(self, inp: Tensor) -> None:
        """Count fprop, and the backward GEMMs that autograd will run for it."""
        self.executed.record("fprop", HIGH_PRECISION)
        if torch.is_grad_enabled():
            if inp.requires_grad:
                self.executed.record("dgrad", HIGH_PRECISION)
            if self.weight.requires_grad:
                self.executed.record("wgrad", HIGH_PRECISION)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan out of pickles: it is derived, and a custom recipe's factory may not pickle."""
        return {**self.__dict__, "_plan": None}
