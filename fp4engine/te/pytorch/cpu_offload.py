"""Activations kept on the CPU between forward and backward, which PyTorch does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Synchronize = Callable[[Tensor], Tensor]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[AbstractContextManager[Any], Synchronize]:
    """A context that saves activations on the CPU, and a function to call on each layer's output, which does nothing.

    Args:
        num_layers, model_layers, double_buffering, retain_pinned_cpu_buffers, offload_stream: of a schedule that is not
            kept: every layer inside the context is offloaded, at once.

    Raises:
        NotImplementedError: weights are to be offloaded, or transfers started by hand.
    """
    if offload_weights or manual_synchronization:
        given = "offload_weights" if offload_weights else "manual_synchronization"
        raise NotImplementedError(f"get_cpu_offload_context({given}=True) is not implemented; leave it out")
    context = torch.autograd.graph.save_on_cpu() if enabled and offload_activations else nullcontext()
    return context, lambda tensor: tensor


def mark_not_offload(*tensors: Tensor) -> None:
    """Do nothing, as :func:`start_offload`: when a tensor is saved PyTorch moves it, whichever it is."""


def start_offload(*tensors: Tensor, offload_base_tensor: bool = False) -> None:
    """Do nothing: PyTorch moves a tensor when it is saved."""
