"""Memory that the linear layers keep for their backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def watch_saved(model: nn.Module) -> tuple[torch.autograd.graph.saved_tensors_hooks, dict[int, Tensor]]:
    """A region that notes what autograd keeps for backward, and where it notes it: by the address of its memory.

    It may be entered again, for part after part of a model. The parameters of `model`, which are there anyway, are not
    noted.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # the tensor itself would hold the graph that holds it
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = tensor
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), kept


def memory_of(kept: dict[int, Tensor]) -> int:
    """Bytes of the memory that :func:`watch_saved` noted; what several operations share counts once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def saved_by_linears(model: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes that the linear layers of `model` keep between the forward and the backward pass of `step`."""
    watch, kept = watch_saved(model)
    handles: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda *_: watch.__enter__()))
            handles.append(module.register_forward_hook(lambda *_: watch.__exit__()))
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return memory_of(kept)
