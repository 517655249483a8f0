"""Activation checkpointing whose recomputation is the forward over again: same recipe, same random bits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_map

from fp4engine.arguments import require_callable
from fp4engine.modules.recompute import Scaled, region_in_force
from fp4engine.ops import Draws, is_replaying
from fp4engine.state import in_backward

_TORCH_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without keeping its activations; backward runs it again.

    The autocast region in force now is in force again when ``function`` is recomputed, wherever backward is called,
    and stochastic casts in the forward draw the same bits again. Gradients are, bit for bit, those without
    checkpointing.

    Args:
        function: a module or callable; it may enter regions of its own.
        args, kwargs: of ``function``; ``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug`` and
            ``early_stop`` go to ``torch.utils.checkpoint.checkpoint``.
        use_reentrant: as there; True, as in TransformerEngine. A reentrant backward reaches the tensors among ``args``;
            those in ``kwargs`` are treated like a module's parameters.
        distribute_saved_activations, get_rng_state_tracker, tp_group: only at the values that ask for nothing.

    Raises:
        ValueError: ``function`` cannot be called.
        NotImplementedError: an argument of TransformerEngine's that is not implemented.

    Source: TransformerEngine ``pytorch/distributed.py``, ``checkpoint``.
    """
    require_callable("function", function)
    for name, value in (
        ("distribute_saved_activations", distribute_saved_activations),
        ("get_rng_state_tracker", get_rng_state_tracker),
        ("tp_group", tp_group),
    ):
        if value:
            raise NotImplementedError(f"checkpoint({name}={value!r}) is not implemented; leave it out")
    options = {name: kwargs.pop(name) for name in _TORCH_OPTIONS if name in kwargs}
    region, draws, scaled = region_in_force(), Draws(), Scaled()
    is_replayed = torch.is_grad_enabled() and (not in_backward() or is_replaying())
    # without gradients nothing is run again; and draws of what PyTorch's checkpoint runs again are others, so refused
    repeats = draws.repeated if is_replayed else nullcontext

    def run(*args: Any) -> Any:
        with region, repeats(), scaled.alike():
            return tree_map(_no_leaf, function(*args, **kwargs))

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)


def _no_leaf(output: Any) -> Any:
    """``output``, or a view of it if it is a parameter: PyTorch makes outputs part of the graph."""
    is_leaf = isinstance(output, torch.Tensor) and output.is_leaf and output.requires_grad
    return output.view_as(output) if is_leaf else output
