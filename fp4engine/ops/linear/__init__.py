"""A linear layer's forward, and its backward, each as few launches: for layers in which the host is the limit.

If kernels cover all casts of a layer, the casts of one direction are one launch. It starts the kernels of
:mod:`fp4engine.ops.cast` and :mod:`fp4engine.ops.gemm`, so the bytes are theirs. Legend: x is [M, K], weight [N, K].
"""

from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.choice import LinearAtOnce, amaxes_of, linear_at_once
from fp4engine.ops.linear.operators import (
    LinearByOperators,
    can_share,
    is_bound_by_host,
    key_of,
    weight_amaxes_for,
)
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, Kept, LayerCasts

__all__ = [
    "BackwardPass",
    "ForwardPass",
    "LayerCasts",
    "Kept",
    "LinearAtOnce",
    "LinearByOperators",
    "LinearByValues",
    "amaxes_of",
    "can_share",
    "is_bound_by_host",
    "key_of",
    "linear_at_once",
    "weight_amaxes_for",
]
