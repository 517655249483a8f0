"""The one GEMM contract: TN, FP32 accumulation, outer scales in the epilogue.

y[m, n] = round(alpha * sum_k left[m, k] * right[n, k] + bias[n])
alpha   = fl(fl(A_left * A_right) / (numerator_left * numerator_right))
"""

import torch
from torch import Tensor

from fp4engine.reference.scaling import divide


def gemm_factor(left_amax: Tensor, right_amax: Tensor, numerator: float) -> Tensor:
    """``alpha``, FP32, broadcastable against [M, N].

    Args:
        left_amax: FP32 [1] or [M].
        right_amax: FP32 [1] or [N].
        numerator: product of both operands' numerators.
    """
    return divide(left_amax.view(-1, 1) * right_amax.view(1, -1), numerator)


def gemm(left: Tensor, right: Tensor, alpha: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``alpha * (left @ right.T) + bias`` in FP32, rounded once to ``out_dtype``: [M, N].

    Args:
        left: [M, K] and right: [N, K], decoded values without outer factors.
        alpha: FP32, broadcastable against [M, N].
        bias: [N] or None.
    """
    with torch.autocast(left.device.type, enabled=False):  # torch.autocast would round the sum to BF16
        product = left.float() @ right.float().T
    product.mul_(alpha)
    if bias is not None:
        product.add_(bias.float())
    return product.to(out_dtype)
