"""Outer scales of inputs for W4A4 serving, from the amaxes that a model's layers see."""

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine.arguments import require_bool, require_model
from fp4engine.export.slabs import progress_bar
from fp4engine.modules import GroupedLinear, Linear
from fp4engine.modules.adoption import is_conv1d
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.state import autocast


def calibrate(
    model: nn.Module, batches: Iterable[Any], recipe: Recipe | None = None, *, progress: bool = True
) -> dict[str, float]:
    """``layer name -> max |input|`` over ``batches``, for ``export_checkpoint(inputs=...)``.

    The model runs in evaluation mode and without gradients, by its own recipes or by ``recipe``. The experts of a
    mixture have one amax for each projection, over all their tokens, as servers do.

    Args:
        model: converted, in the precision that it is evaluated in.
        batches: tensors, tuples of positional arguments, or mappings of keyword arguments; at least one.
        recipe: as in :func:`fp4engine.autocast`; None follows what the modules were converted with.
        progress: draw a bar of the batches.

    Raises:
        ValueError: there is no batch or no converted module, an input holds a NaN or an Inf, or a layer saw no input,
            so that its scale would be a guess.
    """
    require_model(model)
    require_recipe(recipe)
    require_bool("progress", progress)
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or getattr(batches, "ndim", 1) == 0:
        raise ValueError(f"batches must be a sequence of batches, got {batches!r:.80}")
    layers = {name: module for name, module in model.named_modules() if _is_served(module)}
    if not layers:
        raise ValueError(
            f"this {type(model).__name__} has no converted module that servers know: fp4engine.convert(model, recipe) "
            "first"
        )
    amaxes: dict[str, Tensor] = {}
    count = 0
    with evaluated(model), _watched(layers, amaxes), torch.no_grad():
        for batch in progress_bar(batches, "calibrate", "batch", progress):
            count += 1
            if recipe is None:
                _call(model, batch)
            else:
                with autocast(recipe=recipe):
                    _call(model, batch)
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    seen = {name: float(amax) for name, amax in amaxes.items()}
    for name, amax in seen.items():
        if not math.isfinite(amax):
            raise ValueError(f"the input of {name!r} holds a NaN or an Inf")
    idle = [name for name in layers if name not in seen]
    if idle:
        raise ValueError(
            f"{len(idle)} of {len(layers)} layers saw no input in {count} batches, e.g. {idle[0]!r}; give more batches"
        )
    return seen


def _is_served(module: nn.Module) -> bool:
    """Whether ``module`` is of a kind that servers know, whose input they may cast."""
    return isinstance(module, Linear | GroupedLinear) or is_conv1d(module)


@contextmanager
def evaluated(model: nn.Module) -> Generator[None]:
    """Region in which ``model`` is in evaluation mode, after which each module is in its own again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _watched(layers: Mapping[str, nn.Module], amaxes: dict[str, Tensor]) -> Generator[None]:
    """Region that notes the largest magnitude of each layer's input in ``amaxes``, FP32 []; NaN if it holds one."""

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inp = args[0] if args else kwargs["inp" if isinstance(module, GroupedLinear) else "input"]
            if not isinstance(inp, Tensor):
                raise ValueError(f"the input of {name!r} must be a tensor, got {type(inp).__name__}")
            if inp.numel():
                amax = inp.detach().abs().amax().float()
                amaxes[name] = torch.maximum(amaxes[name], amax) if name in amaxes else amax

        return note

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
