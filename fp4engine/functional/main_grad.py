"""Weight gradients that wgrad's epilogue adds to a buffer of the user's, ``weight.main_grad``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class MainGrad:
    """A buffer to which the weight's gradient is added, in FP32 and with one rounding.

    Args:
        buffer: FP32, BF16 or FP16, shaped like the weight.
        overwrites: whether to clear the buffer first. It is also cleared if the attribute ``overwrite_main_grad`` of
            the weight is true.
        later: a list to which a backward pass appends a function that adds the gradient; None if it adds it itself.

    The autograd node of the linear transformation stores wgrad here as a function, ``product``. The autograd node of
    the weight (:class:`Accumulate`) calls it. PyTorch runs that node only if the weight's gradient is asked for.
    """

    def __init__(self, buffer: Tensor, overwrites: bool, later: list[Callable[[], None]] | None) -> None:
        self.buffer, self.overwrites, self.later = buffer, overwrites, later
        self.product: Callable[[], Any] | None = None


class Accumulate(torch.autograd.Function):
    """A node between a weight and its linear transformation, which has wgrad added to ``weight.main_grad``.

    Forward returns the weight. Backward calls the product that :class:`MainGrad` holds, which adds to the buffer, and
    returns no gradient, so that ``weight.grad`` stays None.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.main_grad, ctx.weight = main_grad, weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        main_grad: MainGrad = ctx.main_grad
        product, main_grad.product = main_grad.product, None
        assert product is not None, "the linear transformation's backward comes first"
        if main_grad.later is None:
            _add(product, main_grad, ctx.weight)
        else:
            main_grad.later.append(partial(_add, product, main_grad, ctx.weight))
        return None, None


def _add(product: Callable[[], Any], main_grad: MainGrad, weight: Any) -> None:
    if not weight.requires_grad:  # frozen since the forward pass, as ``weight.grad`` would be left alone
        return
    if not torch.compiler.is_dynamo_compiling():
        _require_same(getattr(weight, "main_grad", None), main_grad.buffer)
    if main_grad.overwrites or getattr(weight, "overwrite_main_grad", False):
        main_grad.buffer.zero_()
    product()
    if hasattr(weight, "grad_added_to_main_grad"):  # set by frameworks that read it
        weight.grad_added_to_main_grad = True


def require_main_grad(weight: Tensor) -> Tensor:
    """``weight.main_grad``, checked to be a buffer to which a backward pass can add.

    Raises:
        ValueError: there is none, it is not shaped and placed like the weight, or the elements of a row do not lie
            side by side, each in a place of its own.
    """
    main_grad = getattr(weight, "main_grad", None)
    if (
        not isinstance(main_grad, Tensor)
        or main_grad.shape != weight.shape
        or main_grad.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or main_grad.device != weight.device
        or main_grad.is_neg()
        or not _has_rows(main_grad)
    ):
        got = main_grad
        if isinstance(main_grad, Tensor):
            kind = "a negated view" if main_grad.is_neg() else "a tensor"
            got = f"{kind} {tuple(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}"
            got += f" with strides {main_grad.stride()}"
        raise ValueError(
            "fuse_wgrad_accumulation=True needs weight.main_grad, an FP32, BF16 or FP16 tensor of shape "
            f"{tuple(weight.shape)} on {weight.device} whose rows are contiguous, set before the forward pass; "
            f"got {got}"
        )
    return main_grad


def _has_rows(matrix: Tensor) -> bool:
    """Whether the elements of each row of a strided [N, K] lie side by side, and no two elements in one place."""
    rows, cols = matrix.shape
    if matrix.layout != torch.strided:
        return False
    return (cols <= 1 or matrix.stride(1) == 1) and (rows <= 1 or matrix.stride(0) >= cols)


def _require_same(now: Any, buffer: Tensor) -> None:
    """Raise if ``now``, the ``weight.main_grad`` of a backward pass, is not the ``buffer`` of its forward.

    ``now`` is None for the decoded values of a stored weight.

    Raises:
        RuntimeError: ``now`` is another tensor, to which nothing would be added.
    """
    if now is not buffer and isinstance(now, Tensor) and now.data_ptr() != buffer.data_ptr():
        raise RuntimeError(
            "weight.main_grad is another tensor in the backward pass than it was in the forward pass; set it before "
            "the forward pass, and clear it with main_grad.zero_()"
        )


def add_rounded(buffer: Tensor, product: Callable[[], Tensor]) -> None:
    """Add to ``buffer`` in FP32, rounded once."""
    buffer.add_(product())


def no_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A placeholder of ``shape`` for the gradient that :class:`Accumulate` computes: one element that is never read."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=device)
