"""Outer amaxes shared by the ranks of a process group."""

import torch
import torch.distributed as dist
from torch import Tensor

_MAGNITUDE = 0x7FFF_FFFF
"""Every bit of an FP32 number but its sign."""


def all_reduce_amax(amax: Tensor, group: dist.ProcessGroup) -> None:
    """``amax = max over the ranks of group``, in place; NaN if one rank has NaN, else Inf if one rank has Inf.

    Reduces the bit patterns, which for numbers without a sign are ordered as the numbers are, with Inf above the finite
    ones and NaN above Inf. As numbers, gloo's maximum of 1 and NaN is 1 on one rank and NaN on the other.

    Args:
        amax: FP32, not negative, any shape; contiguous.
    """
    bits = amax.view(torch.int32)
    bits.bitwise_and_(_MAGNITUDE)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
