"""What an FP8 product is multiplied by: ``alpha = fl(fl(A_left * A_right) / numerator)``, and one."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.launch import Draft, Facts, Launch, Place, facts, resolver


class Factor(NamedTuple):
    """The factor of the product of one operand, whose cast writes it, and another.

    Attributes:
        other_amax: the other operand's.
        numerator: both operands', exact in FP32.
        alpha, one: where they go, FP32 [1, 1].
    """

    other_amax: Place
    numerator: float
    alpha: Place
    one: Place


@triton.jit
def store_factor(amax, other_amax_ptr, numerator, alpha_ptr, one_ptr):
    tl.store(alpha_ptr, tl.div_rn(amax * tl.load(other_amax_ptr), numerator))
    tl.store(one_ptr, 1.0)


@triton.jit
def factor_kernel(left_amax_ptr, right_amax_ptr, numerator, alpha_ptr, one_ptr):
    store_factor(tl.load(left_amax_ptr), right_amax_ptr, numerator, alpha_ptr, one_ptr)


@resolver
def resolve_factor(left_amax: Facts, right_amax: Facts, device: torch.device, numerator: float) -> Launch:
    """``(left_amax, right_amax) -> alpha, one``."""
    draft = Draft(device, inputs=2)
    outs = [draft.output((1, 1), torch.float32) for _ in range(2)]
    draft.step(factor_kernel, 1, *draft.inputs, numerator, *outs, num_warps=1)
    return draft.launch()


def factor(left_amax: Tensor, right_amax: Tensor, numerator: float) -> list[Tensor]:
    """``alpha`` and one, FP32 [1, 1], from outer amaxes FP32 [1]; ``numerator`` is both operands', exact in FP32."""
    return resolve_factor(facts(left_amax), facts(right_amax), left_amax.device, numerator)(left_amax, right_amax)
