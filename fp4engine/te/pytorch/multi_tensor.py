"""Norms and scales of many tensors at once, as clipping of gradients asks for them.

Every function takes a chunk size, which has no effect, and a flag, int32 [1], as TransformerEngine's kernels do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls a function on what ranks hold of many tensors, less those that are empty.

    Args:
        chunk_size: passed on.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """What ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)`` returns; None where nothing is left.

        Raises:
            RuntimeError: the lists are not of one length.
        """
        lengths = {len(tensors) for tensors in tensor_lists}
        if len(lengths) > 1:
            raise RuntimeError(f"tensor_lists must be of one length, got {[len(tensors) for tensors in tensor_lists]}")
        local = [[t.to_local() if isinstance(t, DTensor) else t for t in tensors] for tensors in tensor_lists]
        kept = [[t for t, first in zip(tensors, local[0], strict=True) if first.numel()] for tensors in local]
        return op(self.chunk_size, noop_flag_buffer, kept, *args) if kept and kept[0] else None


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """The second list becomes the first times ``scale``; ``noop_flag`` becomes 1 if that holds an Inf or a NaN."""
    source, target = tensor_lists
    torch._foreach_copy_(list(target), [t.float() * scale for t in source])
    _flag(noop_flag, [t.abs().amax() for t in source])


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors of the one list, FP32 [1], and of each, which is empty unless ``per_tensor``."""
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, 1.0, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: float | Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """As :func:`multi_tensor_l2norm`, of the tensors times ``inv_scale``."""
    norms = torch.stack(torch._foreach_norm([t.float() for t in tensor_lists[0]])) * inv_scale
    _flag(noop_flag, [norms])
    return norms.norm().view(1), norms if per_tensor else norms[:0]


def _flag(noop_flag: Tensor, values: Sequence[Tensor]) -> None:
    finite = torch.stack([value.float().sum().isfinite() for value in values]).all()
    noop_flag.copy_(torch.where(finite, noop_flag, torch.ones_like(noop_flag)))
