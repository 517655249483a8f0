"""Norms and scales of many tensors at once, as clipping of gradients and masters of FP8 weights ask for them.

Every function takes a chunk size, which has no effect, and a flag, int32 [1], as TransformerEngine's kernels do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp4engine.reference.scaling import encode_scale

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls a function on what ranks hold of many tensors, less those that are empty.

    Args:
        chunk_size: passed on.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor | None, tensor_lists: Lists, *args: Any) -> Any:
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


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """The second list becomes ``max_fp8 / amax`` of the first, FP32, and the third its reciprocal.

    Args:
        force_pow_2_scales: round scales down to powers of two.
        epsilon: the least amax that is divided by. A scale is 1 where that is zero or Inf, and NaN where it is NaN.
    """
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        made = encode_scale(amax.clamp(min=epsilon), max_fp8)
        scale.copy_((made.view(torch.int32) & ~0x7FFFFF).view(torch.float32) if force_pow_2_scales else made)
        scale_inv.copy_(scale.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists) -> None:
    """The second list, bytes, becomes E8M0 of ``amax / 448`` of the first, rounded up; 255, which is NaN, for NaN."""
    for amax, scale_inv in zip(*tensor_lists, strict=True):
        ratio = amax.float() / torch.finfo(torch.float8_e4m3fn).max
        mantissa, exponent = torch.frexp(ratio.clamp(max=torch.finfo(torch.float32).max))
        code = torch.where(ratio > 0, exponent + 126 + (mantissa > 0.5), 0).clamp(0, 254)
        scale_inv.copy_(torch.where(ratio.isnan(), 255, code))


def _flag(noop_flag: Tensor, values: Sequence[Tensor]) -> None:
    finite = torch.stack([value.float().sum().isfinite() for value in values]).all()
    noop_flag.copy_(torch.where(finite, noop_flag, torch.ones_like(noop_flag)))
