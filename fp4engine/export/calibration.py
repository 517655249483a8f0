"""Outer scales of inputs, and scales of cached keys and values, from the amaxes that a model's layers see."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine.arguments import is_number, require_bool, require_model, require_one_of
from fp4engine.constants import FLT_MAX
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
    kinds = Linear | GroupedLinear  # whose input servers may cast
    layers = {n: module for n, module in model.named_modules() if isinstance(module, kinds) or is_conv1d(module)}
    if not layers:
        raise ValueError(
            f"this {type(model).__name__} has no converted module that servers know: fp4engine.convert(model, recipe) "
            "first"
        )
    amaxes: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, module in layers.items():
            stack.enter_context(module.register_forward_pre_hook(partial(_note_amax, amaxes, name), with_kwargs=True))
        count = sum(1 for _ in _runs(model, batches, recipe, progress))
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


def _note_amax(
    amaxes: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Keep the largest magnitude of the inputs of the layer ``name``, FP32 []; NaN if one holds one."""
    inp = args[0] if args else kwargs["inp" if isinstance(module, GroupedLinear) else "input"]
    if not isinstance(inp, Tensor):
        raise ValueError(f"the input of {name!r} must be a tensor, got {type(inp).__name__}")
    if inp.numel():
        amax = inp.detach().abs().amax().float()
        amaxes[name] = torch.maximum(amaxes[name], amax) if name in amaxes else amax


def _runs(
    model: nn.Module, batches: Iterable[Any], recipe: Recipe | None, progress: bool, **more: Callable[[], Any]
) -> Iterator[None]:
    """Run ``model`` on each batch, in evaluation mode and without gradients, with ``more`` arguments, made anew.

    Raises:
        ValueError: there is no batch, or an argument of another type.
    """
    require_recipe(recipe)
    require_bool("progress", progress)
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | Tensor):
        raise ValueError(f"batches must be a sequence of batches, got {batches!r:.80}")
    ran = False
    with evaluated(model), torch.no_grad():
        for batch in progress_bar(batches, "calibrate", "batch", progress):
            ran = True
            output_of(model, recipe, batch, **{name: make() for name, make in more.items()})
            yield
    if not ran:
        raise ValueError("batches must hold at least one batch, got none")


def output_of(model: nn.Module, recipe: Recipe | None, batch: Any, **more: Any) -> Any:
    """What ``model`` returns for a batch, see :func:`calibrate`, under ``recipe``; None follows the modules' own."""
    with nullcontext() if recipe is None else autocast(recipe=recipe):
        if isinstance(batch, Mapping):
            return model(**batch, **more)
        return model(*(batch if isinstance(batch, tuple | list) else (batch,)), **more)


@dataclass(frozen=True)
class KVCache:
    """How servers are to cache keys and values.

    Attributes:
        amaxes: ``name of an attention module -> largest magnitudes`` of its keys, after rotation, and values.
        format: ``"fp8"``: E4M3 by ``amax / 448``, one scale for all keys and one for all values of a layer; or
            ``"nvfp4"``, which has these scales too, and block scales that servers find.

    Raises:
        ValueError: another format, or an amax that is no positive finite FP32 number.
    """

    amaxes: Mapping[str, tuple[float, float]]
    format: Literal["fp8", "nvfp4"] = "fp8"

    def __post_init__(self) -> None:
        require_one_of("format", self.format, ("fp8", "nvfp4"))
        given: Any = self.amaxes
        if not isinstance(given, Mapping) or not given:
            raise ValueError(f"amaxes must be a mapping of attention modules to two numbers each, got {given!r:.80}")
        for name, pair in given.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(f"amaxes must have two numbers of {name!r}, got {pair!r:.80}")
            if not all(is_number(amax) and 0 < amax <= FLT_MAX for amax in pair):
                raise ValueError(f"amaxes of {name!r} must be positive finite FP32 numbers, got {pair!r:.80}")


def attention_modules(model: nn.Module) -> dict[int, str]:
    """``index of a layer -> name of its attention``, of modules with a ``k_proj`` and a ``v_proj`` that cache both."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        index: Any = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            found[index] = name
    return found


def calibrate_kv_cache(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    format: Literal["fp8", "nvfp4"] = "fp8",
    progress: bool = True,
) -> KVCache:
    """The amaxes of keys and values over ``batches``, for ``export_checkpoint(kv_cache=...)``.

    Args:
        model: of transformers, a decoder that caches keys and values.
        batches, recipe, progress: as in :func:`calibrate`.
        format: see :class:`KVCache`.

    Raises:
        ValueError: as :func:`calibrate`; the model caches nothing, or something else than keys and values.
    """
    require_model(model)
    names = attention_modules(model)
    config: Any = getattr(model, "config", None)
    if not names or config is None or config.is_encoder_decoder:
        raise ValueError(
            f"this {type(model).__name__} has no attention with k_proj and v_proj whose keys and values a decoder of "
            "transformers caches"
        )
    from transformers import DynamicCache

    largest: dict[int, list[Tensor]] = {}

    class Recording(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
            seen = [states.detach().abs().amax().float() for states in (key_states, value_states)]
            known = largest.get(layer_idx, seen)
            largest[layer_idx] = [torch.maximum(*pair) for pair in zip(known, seen, strict=True)]
            return super().update(key_states, value_states, layer_idx, *args, **more)

    for _ in _runs(model, batches, recipe, progress, past_key_values=lambda: Recording(config=config)):
        pass
    if idle := [name for index, name in names.items() if index not in largest]:
        raise ValueError(f"{idle[0]!r} cached nothing")
    return KVCache({name: (float(largest[i][0]), float(largest[i][1])) for i, name in names.items()}, format)
