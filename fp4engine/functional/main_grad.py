"""Where a weight's gradient is added to a buffer of the user's, ``weight.main_grad``, by wgrad's epilogue."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MainGrad:
    """A buffer that the weight's gradient is added to, in FP32 before the one rounding, by wgrad's epilogue.

    Args:
        buffer: FP32, BF16 or FP16, shaped like the weight.
        overwrites: forget what the buffer holds. So does a weight whose attribute ``overwrite_main_grad`` is true.

    The product runs in the autograd node of the weight (:class:`Accumulate`), which PyTorch runs only if the weight's
    gradient is asked for; the linear transformation's node leaves the product here.
    """

    def __init__(self, buffer: Tensor, overwrites: bool = False) -> None:
        self.buffer, self.overwrites = buffer, overwrites
        self.product: Callable[[], Any] | None = None


class Accumulate(torch.autograd.Function):
    """The weight itself; in the backward pass, wgrad into ``weight.main_grad`` and no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.main_grad, ctx.weight = main_grad, weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        main_grad: MainGrad = ctx.main_grad
        product, main_grad.product = main_grad.product, None
        assert product is not None, "the linear transformation's backward comes first"
        if not torch.compiler.is_dynamo_compiling():
            _require_same(getattr(ctx.weight, "main_grad", None), main_grad.buffer)
        if main_grad.overwrites or getattr(ctx.weight, "overwrite_main_grad", False):
            main_grad.buffer.zero_()
        product()
        if hasattr(ctx.weight, "grad_added_to_main_grad"):  # who looks at it has put it there
            ctx.weight.grad_added_to_main_grad = True
        return None, None


def _require_same(now: Any, buffer: Tensor) -> None:
    """Raise if ``now``, the ``weight.main_grad`` of a backward pass, is not the ``buffer`` of its forward.

    Decoded values of a stored weight have none.

    Raises:
        RuntimeError: it is another, which would stay as it is.
    """
    if now is not buffer and isinstance(now, Tensor) and now.data_ptr() != buffer.data_ptr():
        raise RuntimeError(
            "weight.main_grad is another tensor in the backward pass than it was in the forward pass; set it before "
            "the forward pass, and clear it with main_grad.zero_()"
        )


def add_rounded(buffer: Tensor, product: Callable[[], Tensor]) -> None:
    """Add to ``buffer`` in FP32, rounded once."""
    buffer.copy_(buffer.float() + product())


def no_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for the gradient that :class:`Accumulate` computes: a tensor of one element that nobody reads."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
