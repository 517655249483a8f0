"""The one GEMM contract: TN, an FP32 sum, outer scales in the epilogue.

y[m, n] = round(alpha * sum_k left[m, k] * right[n, k] + bias[n])
alpha   = fl(fl(A_left * A_right) / (numerator_left * numerator_right))

The sum is FP32 accumulation in any order, or by groups as in :mod:`fp4engine.reference.blackwell`.
"""

import torch
from torch import Tensor

from fp4engine.reference.blackwell import MODEL, SumRules, sum_by_groups
from fp4engine.reference.scaling import divide


def gemm_factor(left_amax: Tensor, right_amax: Tensor, numerator: float) -> Tensor:
    """``alpha``, FP32, broadcastable against [M, N].

    Args:
        left_amax: FP32 [1] or [M].
        right_amax: FP32 [1] or [N].
        numerator: product of both operands' numerators.
    """
    return divide(left_amax.view(-1, 1) * right_amax.view(1, -1), numerator)


def gemm(
    left: Tensor,
    right: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str = "fp32",
    rules: SumRules = MODEL,
) -> Tensor:
    """``alpha * (left @ right.T) + bias`` in FP32, rounded once to ``out_dtype``: [M, N].

    Args:
        left: [M, K] and right: [N, K], decoded values without outer factors.
        alpha: FP32, broadcastable against [M, N].
        bias: [N] or None.
        accumulation: ``"fp32"``, or ``"blackwell"`` for :func:`~fp4engine.reference.blackwell.sum_by_groups`.
        rules: of ``"blackwell"``.
    """
    with torch.autocast(left.device.type, enabled=False):  # torch.autocast would round the sum to BF16
        if accumulation == "blackwell":
            product = sum_by_groups(left, right, rules)
        else:
            product = left.float() @ right.float().T
    product = product * alpha  # not in place: selective checkpointing may keep the sum
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)
