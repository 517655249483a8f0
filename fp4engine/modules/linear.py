"""``nn.Linear`` whose three GEMMs follow the recipe in force."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.functional import ExecutedGemms, LinearPlan, WeightCache, linear, make_linear_plan
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
        fuse_wgrad_accumulation: wgrad adds to the buffer ``weight.main_grad`` (FP32 or BF16, shaped like the weight)
            in its epilogue, and ``weight.grad`` stays None.

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
        fuse_wgrad_accumulation: bool = False,
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
        self._configure(name, recipe, fuse_wgrad_accumulation)

    def _configure(self, name: str, recipe: Recipe | None, fuse_wgrad_accumulation: bool) -> None:
        self.name = name
        self.recipe = recipe
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.executed = ExecutedGemms()
        self._plan: LinearPlan | None = None
        self._weight_cache: WeightCache | None = None

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, name: str = "", recipe: Recipe | None = None) -> "Linear":
        """A Linear that shares the parameters, hooks and mode of ``module``."""
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        new._configure(name, recipe, False)
        return new

    def plan(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan under ``state``; None for high precision. Rebuilt when the recipe differs by value."""
        recipe = self.recipe if state is None else state.recipe
        if recipe is None or (state is not None and not state.enabled):
            return None
        group = None if state is None else state.amax_reduction_group
        plan = self._plan
        if (
            plan is None
            or (plan.recipe is not recipe and plan.recipe != recipe)
            or plan.amax_reduction_group is not group
        ):
            plan = make_linear_plan(recipe, "linear", self.name, self.executed, group)
            self._plan = plan
        return plan

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``input @ weight.T + bias``: [..., in_features] -> [..., out_features].

        Args:
            is_first_microbatch: True quantizes the weight and keeps its operands, False reuses them while the weight
                is unchanged, None neither; says nothing about gradients. See also :func:`fp4engine.weight_cache`.
        """
        plan = self.plan(current_state())
        if plan is None:
            self.executed.record_high_precision(input, self.weight)
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:  # as torch.autocast does
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return linear(
            input,
            self.weight,
            self.bias,
            plan,
            weight_cache=self._cache(is_first_microbatch),
            main_grad=self._main_grad() if self.fuse_wgrad_accumulation else None,
        )

    def _cache(self, is_first_microbatch: bool | None) -> WeightCache | None:
        """The cache to use; none while tracing, since a compiled region cannot hold tensors between calls."""
        if torch.compiler.is_compiling():
            return None
        if is_first_microbatch or (is_first_microbatch is False and self._weight_cache is None):
            self._weight_cache = WeightCache()
        return self._weight_cache

    def _main_grad(self) -> Tensor:
        main_grad = getattr(self.weight, "main_grad", None)
        if not isinstance(main_grad, Tensor) or main_grad.shape != self.weight.shape:
            raise ValueError(
                f"fuse_wgrad_accumulation=True needs weight.main_grad, a tensor of shape {tuple(self.weight.shape)} "
                f"set before the forward pass; got {main_grad!r}"
            )
        return main_grad

    def __getstate__(self) -> dict[str, Any]:
        """Leave plan and cache out of copies: both are derived, and a custom recipe's factory may not pickle."""
        return {**self.__dict__, "_plan": None, "_weight_cache": None}


@contextmanager
def weight_cache(model: torch.nn.Module) -> Generator[None]:
    """Region in which each :class:`Linear` below ``model`` quantizes its weight once, e.g. around accumulation.

    Entries are dropped when a weight changes in place, and all of them at the end of the region. Cached and uncached
    passes give the same bytes.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        layer._weight_cache = WeightCache()
    try:
        yield
    finally:
        for layer in layers:
            layer._weight_cache = None
