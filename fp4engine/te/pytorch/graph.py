"""CUDA graphs of modules, which PyTorch captures."""

from typing import Any

import torch

from fp4engine.te.pytorch.quantization import AnyRecipe, autocast


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: AnyRecipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: AnyRecipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    pool: Any = None,
    **others: Any,
) -> Any:
    """:func:`torch.cuda.make_graphed_callables`, inside a region where quantization is enabled.

    Args:
        modules, sample_args, num_warmup_iters, allow_unused_input, pool: as there.
        enabled, recipe, calibrating, amax_reduction_group: of the region; ``fp8_`` names are the older ones.
        cache_quantized_params, fp8_weight_caching: only None or False.
        others: only None or False; ``retain_graph_in_backward`` and the like are not implemented.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        RuntimeError: there is no CUDA device.
    """
    unknown = {**others, "cache_quantized_params": cache_quantized_params, "fp8_weight_caching": fp8_weight_caching}
    for name, value in unknown.items():
        if value not in (None, False) and not (name == "clone_param_grads_on_return" and value is True):
            raise NotImplementedError(f"make_graphed_callables({name}={value!r}) is not implemented; leave it out")
    if not torch.cuda.is_available():
        raise RuntimeError("make_graphed_callables needs a CUDA device: graphs are CUDA's")
    with autocast(
        bool(enabled if enabled is not None else fp8_enabled),
        bool(calibrating if calibrating is not None else fp8_calibrating),
        recipe if recipe is not None else fp8_recipe,
        amax_reduction_group if amax_reduction_group is not None else fp8_group,
    ):
        return torch.cuda.make_graphed_callables(modules, sample_args, num_warmup_iters, allow_unused_input, pool)
