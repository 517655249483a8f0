"""A precision plugin for Lightning: ``Trainer(plugins=NVFP4Precision())``."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from fp4engine.accounting import ConversionPlan
from fp4engine.arguments import shown
from fp4engine.convert import ModuleFilter, convert_for_regions
from fp4engine.integrations.training_state import TrainingState
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.state import autocast, get_default_recipe


class NVFP4Precision(Precision):
    """Converts the model's linear modules when the trainer sets it up, and runs every step in an autocast region.

    Parameters keep their dtype, so optimizers, clipping, strategies and checkpoints work as they do without. The
    :class:`TrainingState` of every rank is saved and restored with Lightning's checkpoints, for a bit-exact resume; a
    warning says so if a checkpoint has none.

    Args:
        recipe: None means :func:`fp4engine.get_default_recipe`.
        compute_dtype: dtype of everything that is not an FP4 GEMM, by ``torch.autocast``; None leaves it alone.
        module_filter_fn, keep_high_precision: as in :func:`fp4engine.convert`.

    Raises:
        ValueError: ``recipe`` is no recipe, or ``compute_dtype`` no dtype; when the trainer sets the model up, what
            ``convert`` refuses: rules of ``recipe`` that match no module of the ``LightningModule``, for example.

    Attributes:
        plan: what was converted; None before the trainer has set the model up.
    """

    precision = "32-true"

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        compute_dtype: torch.dtype | None = torch.bfloat16,
        module_filter_fn: ModuleFilter | None = None,
        keep_high_precision: Sequence[str] = (),
    ) -> None:
        require_recipe(recipe)
        if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
            raise ValueError(f"compute_dtype must be a torch.dtype or None, got {shown(compute_dtype)}")
        self.recipe = get_default_recipe() if recipe is None else recipe
        self.compute_dtype = compute_dtype
        self.module_filter_fn = module_filter_fn
        self.keep_high_precision = keep_high_precision
        self.plan: ConversionPlan | None = None
        self._state: TrainingState | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.plan = convert_for_regions(module, self.recipe, self.module_filter_fn, self.keep_high_precision)
        self._state = TrainingState(module)
        return module

    @contextmanager
    def forward_context(self) -> Generator[None]:
        assert self._state is not None
        device = next(self._state.model.parameters()).device.type
        enabled = self.compute_dtype is not None
        with torch.autocast(device, self.compute_dtype, enabled=enabled), autocast(recipe=self.recipe):
            yield

    def state_dict(self) -> dict[str, Any]:
        return {} if self._state is None else self._state.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint:
            warnings.warn(
                "the checkpoint has no FP4 training state: random bits start anew, and so do the histories of delayed "
                f"scaling. Only a run with {type(self).__qualname__} saves them",
                stacklevel=2,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._state is not None:
            self._state.load_state_dict(state_dict)
