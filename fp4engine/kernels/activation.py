"""Activations in FP32 on the device, their derivatives, and the backward pass of one.

    f(a) = a sigmoid(z(a))      silu  z = a      qgelu  z = 1.702 a      gelu  z = 2 sqrt(2/pi) (a + 0.044715 a^3)
    f(a) = sigmoid(a), max(a, 0), max(a, 0)^2

A gated activation maps [M, 2H] to [M, H]: ``y = f(first half) * second half``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.encode import NAN, narrow, round_pair, wide
from fp4engine.kernels.launch import Launch, LaunchBuilder, TensorMeta, device_facts, meta_of, resolver

GELU_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
GELU_CUBE = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
BLOCK = 1024
"""Columns of y that one program takes."""


@triton.jit
def activated(a, KIND: tl.constexpr):
    """``f(a), f'(a)``; what of it is not used costs nothing."""
    if KIND == "relu" or KIND == "srelu":
        value = tl.maximum(a, 0.0, propagate_nan=NAN)
        if KIND == "srelu":
            return value * value, 2.0 * value
        else:
            return value, tl.where(a <= 0.0, 0.0, 1.0)
    else:
        if KIND == "gelu":
            square = a * a
            z, z_slope = a * (GELU_SLOPE + GELU_CUBE * square), GELU_SLOPE + 3.0 * GELU_CUBE * square
        elif KIND == "qgelu":
            z, z_slope = 1.702 * a, 1.702
        else:
            z, z_slope = a, 1.0
        s = tl.sigmoid(z)
        if KIND == "sigmoid":
            return s, s * (1.0 - s)
        else:
            value = a * s
            return value, s + value * (1.0 - s) * z_slope


@triton.jit
def activation_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, H, stride_dy, stride_x, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``dx = dy f'(x)``, or its two halves ``dy g f'(a)`` and ``dy f(a)``, each rounded once; part of a row each."""
    parts = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    col = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    dx_ptr += row * (2 * H if GATED else H)
    dy = wide(tl.load(dy_ptr + row * stride_dy + col, mask=inside, other=0.0))
    value, slope = activated(wide(tl.load(x_ptr + row * stride_x + col, mask=inside, other=0.0)), KIND)
    if GATED:
        gate = wide(tl.load(x_ptr + row * stride_x + H + col, mask=inside, other=0.0))
        first, second = round_pair(dy * (slope * gate), dy * value, dtype, HARDWARE)
        tl.store(dx_ptr + H + col, narrow(second, dtype), mask=inside)
    else:
        first, _ = round_pair(dy * slope, dy, dtype, HARDWARE)
    tl.store(dx_ptr + col, narrow(first, dtype), mask=inside)


@resolver
def resolve_activation_backward(dy: TensorMeta, x: TensorMeta, device: torch.device, kind: str, gated: bool) -> Launch:
    """``(dy, x) -> dx``."""
    rows, cols = dy.shape
    builder = LaunchBuilder(device, inputs=2)
    dx = builder.buffer(x.shape, x.dtype)
    builder.step(
        activation_backward_kernel, rows * -(-cols // BLOCK), *builder.inputs, dx, cols, dy.strides[0], x.strides[0],
        kind, gated, BLOCK, device_facts(device)[0], num_warps=4,
    )  # fmt: skip
    return builder.launch(dx)


def activation_backward(dy: Tensor, x: Tensor, kind: str, gated: bool) -> Tensor:
    """Gradient of x [M, H] or [M, 2H], from dy [M, H]; unit stride along the rows of both."""
    (dx,) = resolve_activation_backward(meta_of(dy), meta_of(x), x.device, kind, gated)(dy, x)
    return dx
