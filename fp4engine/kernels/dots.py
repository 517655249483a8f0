"""Device functions: FP64 dot products in the order of the reference, and the correction that they give.

The order is a binary tree over neighbours: 0 + 1, 2 + 3, ..., then sums of those sums.
"""

import triton
import triton.language as tl

from fp4engine.kernels.encode import FLT_MAX


@triton.jit
def dots(y, q, GROUP: tl.constexpr):
    """``<y,y>`` and ``<y,q>`` of every ``GROUP`` neighbours, FP64 [n * 16 / GROUP], of tuples of 16 tensors [n]."""
    yy = ()
    yq = ()
    for i in tl.static_range(16):
        wide_y = y[i].to(tl.float64)
        yy = yy + (wide_y * wide_y,)
        yq = yq + (wide_y * q[i].to(tl.float64),)
    return neighbour_sums(sum_of_16(yy), GROUP // 16), neighbour_sums(sum_of_16(yq), GROUP // 16)


@triton.jit
def sum_of_16(t):
    for stage in tl.static_range(4):
        halves = ()
        for i in tl.static_range(8 >> stage):
            halves = halves + (t[2 * i] + t[2 * i + 1],)
        t = halves
    return t[0]


@triton.jit
def neighbour_sums(t, GROUP: tl.constexpr):
    """Sums of ``GROUP`` neighbours of one axis, as a binary tree. A sum of two has no order: it is a reduction."""
    LOG2: tl.constexpr = (
        (GROUP >= 2) + (GROUP >= 4) + (GROUP >= 8) + (GROUP >= 16) + (GROUP >= 32) + (GROUP >= 64) + (GROUP >= 128)
        + (GROUP >= 256) + (GROUP >= 512) + (GROUP >= 1024) + (GROUP >= 2048)
    )  # fmt: skip
    COUNT: tl.constexpr = t.numel
    for stage in tl.static_range(LOG2):
        t = tl.sum(tl.reshape(t, [COUNT >> (stage + 1), 2]), axis=1)
    return t


@triton.jit
def shrinkage(yy, yq):
    """``<y,y> / <y,q>`` rounded to FP32, 1 where that is not finite."""
    ratio = (yy / yq).to(tl.float32)
    return tl.where(tl.abs(ratio) <= FLT_MAX, ratio, 1.0)
