"""What an FP8 product is multiplied by: ``alpha = fl(fl(A_left * A_right) / numerator)``, and one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.launch import Launch, LaunchBuilder, Place, TensorMeta, meta_of, resolver


@triton.jit
def factor_kernel(left_amax_ptr, right_amax_ptr, numerator, alpha_ptr, one_ptr):
    tl.store(alpha_ptr, tl.div_rn(tl.load(left_amax_ptr) * tl.load(right_amax_ptr), numerator))
    tl.store(one_ptr, 1.0)


def add_factor(builder: LaunchBuilder, left_amax: Place, right_amax: Place, numerator: float) -> tuple[Place, Place]:
    """``alpha`` and one, FP32 [1, 1]."""
    alpha, one = builder.buffer((1, 1), torch.float32), builder.buffer((1, 1), torch.float32)
    builder.step(factor_kernel, 1, left_amax, right_amax, numerator, alpha, one, num_warps=1)
    return alpha, one


@resolver
def resolve_factor(left_amax: TensorMeta, right_amax: TensorMeta, device: torch.device, numerator: float) -> Launch:
    """``(left_amax, right_amax) -> alpha, one``."""
    builder = LaunchBuilder(device, inputs=2)
    return builder.launch(*add_factor(builder, *builder.inputs, numerator))


def factor(left_amax: Tensor, right_amax: Tensor, numerator: float) -> list[Tensor]:
    """``alpha`` and one, FP32 [1, 1], from outer amaxes FP32 [1]; ``numerator`` is both operands', exact in FP32."""
    return resolve_factor(meta_of(left_amax), meta_of(right_amax), left_amax.device, numerator)(left_amax, right_amax)
