"""Products by quantizers that bring their own ``qgemm``: Python all the way, for references and experiments.

Legend: M rows of the input, K in_features, N out_features.
"""

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4engine.functional.linear import refuse_second_derivative
from fp4engine.te.pytorch.quantized_tensor import Quantizer


@enum.unique
class GEMMType(enum.Enum):
    """Which of the three products of a linear transformation."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """Settings of a product that ``qgemm`` gets besides the operands."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


def multiply(kind: GEMMType, left: Any, right: Any, dtype: torch.dtype) -> Tensor:
    """``left @ right.T`` by the ``qgemm`` of the quantizer that made ``left``.

    The columnwise side of an operand (``data_t``, ``scale_t``) is read where the product contracts its rows: of the
    weight in dgrad, of both in wgrad.

    Raises:
        ValueError: a side that the product reads has not been made.
    """
    columnwise = (kind is GEMMType.WGRAD, kind is not GEMMType.FPROP)
    sides: list[Tensor] = []
    for operand, is_columnwise in zip((left, right), columnwise, strict=True):
        for name in ("data_t", "scale_t") if is_columnwise else ("data", "scale"):
            side = getattr(operand, name)
            if side is None:
                raise ValueError(f"{kind.name} GEMM reads {name} of {operand!r}, which its quantizer has not made")
            sides.append(side)
    codes_left, scale_left, codes_right, scale_right = sides
    return left._quantizer.qgemm(
        codes_left,
        codes_right,
        MMParams(dtype),
        dtype,
        scale_left,
        scale_right,
        None,
        gemm_type=kind,
        qresult_x=left,
        qresult_w=right,
    )


class CustomLinear(torch.autograd.Function):
    """``inp @ weight.T`` [..., K] -> [..., N], and its gradients, by quantizers with a ``qgemm`` of their own.

    Source: TransformerEngine ``custom_recipes/gemm.py``, ``custom_gemm``.
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, quantizers: tuple[Quantizer, Quantizer, Quantizer]) -> Tensor:
        of_input, of_weight, ctx.of_grad = quantizers
        ctx.shape, ctx.dtype, ctx.weight_dtype = inp.shape, inp.dtype, weight.dtype
        needs_dgrad, needs_wgrad, _ = ctx.needs_input_grad
        of_input.set_usage(rowwise=True, columnwise=needs_wgrad)
        of_weight.set_usage(rowwise=True, columnwise=needs_dgrad)
        ctx.left = of_input.quantize(inp.detach().reshape(-1, inp.shape[-1]))
        ctx.right = of_weight.quantize(weight.detach().to(inp.dtype))
        output = multiply(GEMMType.FPROP, ctx.left, ctx.right, inp.dtype)
        return output.view(*inp.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        needs_dgrad, needs_wgrad, _ = ctx.needs_input_grad
        ctx.of_grad.set_usage(rowwise=needs_dgrad, columnwise=needs_wgrad)
        grad = ctx.of_grad.quantize(grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1]).contiguous())
        dgrad = wgrad = None
        if needs_dgrad:
            dgrad = multiply(GEMMType.DGRAD, grad, ctx.right, ctx.dtype).view(ctx.shape)
        if needs_wgrad:
            wgrad = multiply(GEMMType.WGRAD, grad, ctx.left, ctx.weight_dtype)
        return dgrad, wgrad, None
