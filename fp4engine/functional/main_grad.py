"""Weight gradients that wgrad's epilogue adds to a buffer of the user's, ``weight.main_grad``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4engine.ops.backend import KERNEL_DTYPES
from fp4engine.private import is_asked_for


class MainGrad:
    """A buffer to which the weight's gradient is added, in FP32 and with one rounding; ``weight.grad`` stays None.

    Args:
        weight: the weight.
        buffer: FP32, BF16 or FP16, shaped like the weight.
        overwrites: whether to clear the buffer first. It is also cleared if the attribute ``overwrite_main_grad`` of
            the weight is true.
        later: a list to which a backward pass appends a function that adds the gradient; None if it adds it itself.
    """

    def __init__(
        self, weight: Tensor, buffer: Tensor, overwrites: bool, later: list[Callable[[], None]] | None
    ) -> None:
        self.weight: Any = weight
        self.buffer, self.overwrites, self.later = buffer, overwrites, later

    def is_asked_for(self, ctx: Any, index: int) -> bool:
        """Whether the backward pass that runs has to compute the weight's gradient.

        Args:
            ctx: the autograd node that would compute it.
            index: of the weight among the node's tensors.
        """
        if not self.weight.requires_grad:  # frozen since the forward pass, as ``weight.grad`` would be left alone
            return False
        return torch.compiler.is_dynamo_compiling() or is_asked_for(ctx.next_functions[index][0])

    def begin(self) -> None:
        """Make the buffer ready for a gradient.

        Raises:
            RuntimeError: ``weight.main_grad`` is another tensor than in the forward pass.
        """
        if not torch.compiler.is_dynamo_compiling():
            now, buffer = getattr(self.weight, "main_grad", None), self.buffer  # None for values of a stored weight
            if now is not buffer and isinstance(now, Tensor) and now.data_ptr() != buffer.data_ptr():
                raise RuntimeError(
                    "weight.main_grad is another tensor in the backward pass than it was in the forward pass; set it "
                    "before the forward pass, and clear it with main_grad.zero_()"
                )
        if self.overwrites or getattr(self.weight, "overwrite_main_grad", False):
            self.buffer.zero_()

    def end(self) -> None:
        """Tell those who look at the weight that its gradient was added."""
        if hasattr(self.weight, "grad_added_to_main_grad"):  # set by frameworks that read it
            self.weight.grad_added_to_main_grad = True

    def add(self, product: Callable[[], Any]) -> None:
        """Call ``product``, which adds to the buffer: now, or ``later``."""
        if self.later is None:
            self._add(product)
        else:
            self.later.append(partial(self._add, product))

    def _add(self, product: Callable[[], Any]) -> None:
        if self.weight.requires_grad:
            self.begin()
            product()
            self.end()


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
        or main_grad.dtype not in KERNEL_DTYPES
        or main_grad.device != weight.device
        or (not torch.compiler.is_dynamo_compiling() and main_grad.is_neg())
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
