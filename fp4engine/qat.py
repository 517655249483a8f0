"""Fake quantization with the straight-through gradient, to tune a model for quantized inference.

    q = decode(encode(x)),   dq/dx = 1

Weight-only tuning of a whole model needs no function: ``autocast(recipe=recipe.zoo.make("nvfp4_weight_only"))``.
"""

from typing import Any

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.functional.cast import cast

NVFP4 = CastSpec()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: CastSpec) -> Tensor:
        return cast(x, spec)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def fake_quantize(x: Tensor, spec: CastSpec = NVFP4) -> Tensor:
    """The values that ``x`` [..., K] decodes to after ``spec``; the gradient passes straight through, also where
    values saturate.

    Source: Bengio et al., arXiv 1308.3432.
    """
    return _StraightThrough.apply(x, spec)


def ste_weight(weight: Tensor, spec: CastSpec = NVFP4) -> Tensor:
    """:func:`fake_quantize` of a weight [N, K]: what inference with quantized weights multiplies by."""
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out_features, in_features], got shape {tuple(weight.shape)}")
    return fake_quantize(weight, spec)


def linear_ste(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    input_spec: CastSpec | None = NVFP4,
    weight_spec: CastSpec | None = NVFP4,
) -> Tensor:
    """``y = Q(x) Q(w)^T + b`` as a dense product, with ``dx = dy Q(w)`` and ``dw = dy^T Q(x)``.

    Args:
        x: [..., K]; weight: [N, K]; bias: [N] or None.
        input_spec, weight_spec: None leaves that side in high precision.
    """
    left = x if input_spec is None else fake_quantize(x, input_spec)
    right = weight if weight_spec is None else ste_weight(weight, weight_spec)
    return torch.nn.functional.linear(left, right, bias)
