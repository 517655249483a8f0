"""Random Hadamard transform along the contracted axis, in a fixed order of additions."""

import math

import torch
from torch import Tensor

from fp4engine.formats import Rotation
from fp4engine.reference.philox import rotation_signs


def rotate(x: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
    """``y = x.view(-1, n) @ diag(signs) @ H_n / sqrt(n)``, Sylvester order, rounded once to ``dtype``.

    Signs and the power of two in ``1/sqrt(n)`` first (so that sums of the largest BF16 values stay finite), then
    butterflies over strides 1, 2, 4, ..., n/2 in FP32 (low gets ``a + b``, high ``a - b``), then the ``sqrt(1/2)``
    left over for n = 32 and 128. The order is part of the contract: FP32 addition does not associate.

    Args:
        x: FP32 [rows, cols], ``cols`` a multiple of ``n = len(signs)``.
        signs: FP32 [n] of +-1.
        dtype: what the result is rounded to before it is widened again (the dtype ``x`` came in).

    Returns:
        FP32 [rows, cols].

    Source: TransformerEngine ``custom_recipes/reference_nvfp4.py``, ``_apply_rht``.
    """
    size = signs.numel()
    log2_size = size.bit_length() - 1
    factors = (signs * 2.0 ** -(log2_size // 2)).repeat(x.shape[1] // size)
    y = (x.T * factors[:, None]).contiguous()  # what is added lies side by side, whole rows of it
    stride = 1
    while stride < size:
        pairs = y.view(x.shape[1] // (2 * stride), 2, stride, x.shape[0])
        low, high = pairs[:, 0], pairs[:, 1]  # what unbind returns cannot be written to where x has a graph
        difference = low - high
        low.add_(high)
        high.copy_(difference)
        stride *= 2
    if log2_size % 2:
        y = y * math.sqrt(0.5)
    return y.to(dtype).float().T.contiguous()


def rotate_back(y: Tensor, rotation: Rotation) -> Tensor:
    """The x of which ``y`` is the rotation, ``x = y.view(-1, n) @ H_n @ diag(signs) / sqrt(n)``: FP32 [rows, cols].

    In the order of :func:`rotate`, with the signs last, which are not drawn.
    """
    signs = rotation_signs(rotation, None, 0, y.device)
    return rotate(y, torch.ones_like(signs), torch.float32) * signs.repeat(y.shape[1] // signs.numel())
