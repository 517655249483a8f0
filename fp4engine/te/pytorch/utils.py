"""Small functions that TransformerEngine's scripts import."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

InitMethod = Callable[[Tensor], Tensor]


def get_device_compute_capability(return_reason: bool = False) -> Any:
    """``(major, minor)`` of the current CUDA device, ``(0, 0)`` without one.

    Args:
        return_reason: also return the device's name, or why there is no device.
    """
    if not torch.cuda.is_available():
        return ((0, 0), "there is no CUDA device") if return_reason else (0, 0)
    capability = torch.cuda.get_device_capability()
    return (capability, torch.cuda.get_device_name()) if return_reason else capability


def gpu_autocast_ctx(**arguments: Any) -> torch.autocast:
    """``torch.autocast`` for CUDA."""
    return torch.autocast(device_type="cuda", **arguments)


def is_bf16_compatible() -> bool:
    """Whether BF16 runs here: always."""
    return True


def get_cudnn_version() -> tuple[int, int, int]:
    """Version of cuDNN as PyTorch finds it, ``(0, 0, 0)`` without; attention here does not ask it directly."""
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if version is None:
        return 0, 0, 0
    if version >= 90000:
        return version // 10000, version % 10000 // 100, version % 100
    return version // 1000, version % 1000 // 100, version % 100


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores with -10000 where the mask is True, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def init_method_constant(val: float) -> InitMethod:
    """An initialiser that fills a tensor with ``val``, in place."""
    return lambda tensor: torch.nn.init.constant_(tensor, val)


def init_method_normal(sigma: float) -> InitMethod:
    """An initialiser that fills a tensor from N(0, sigma^2), in place."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> InitMethod:
    """An initialiser that fills a tensor from a normal distribution of deviation sigma / sqrt(2 num_layers)."""
    return init_method_normal(sigma / (2.0 * num_layers) ** 0.5)


def get_default_init_method() -> InitMethod:
    """An initialiser that fills a tensor from a normal distribution of deviation 0.023, TransformerEngine's default."""
    return init_method_normal(0.023)


def divide(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, which has to be an integer.

    Raises:
        ValueError: the division leaves a remainder.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} must be a multiple of {denominator}")
    return numerator // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``.

    Raises:
        ValueError: ``multiple`` is zero.
    """
    if multiple == 0:
        raise ValueError("multiple must not be zero")
    return -(-value // multiple) * multiple


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``tensor`` in ``dtype``; None stays None."""
    return None if tensor is None else tensor.to(dtype)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether any of ``tensors`` requires a gradient; None requires none."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether FP8 GEMMs here take operands in any layout; they are laid out for TN ones, as on Hopper."""
    return False


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Halves ``[a; b]`` of the first axis as alternating blocks of ``interleave_size`` rows.

    Raises:
        ValueError: the halves are not made of such blocks.
    """
    return _shuffled(tensor, interleave_size, lambda blocks: blocks.view(2, -1, *blocks.shape[1:]).transpose(0, 1))


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Inverse of :func:`interleave_glu_tensor`.

    Raises:
        ValueError: the tensor is not made of such blocks.
    """
    return _shuffled(tensor, interleave_size, lambda blocks: blocks.view(-1, 2, *blocks.shape[1:]).transpose(0, 1))


def _shuffled(tensor: Tensor, size: int, shuffle: Callable[[Tensor], Tensor]) -> Tensor:
    if size < 1 or tensor.shape[0] % (2 * size):
        raise ValueError(f"the first of {list(tensor.shape)} must be a multiple of 2 * interleave_size={2 * size}")
    return shuffle(tensor.reshape(-1, size, *tensor.shape[1:])).reshape(tensor.shape)
