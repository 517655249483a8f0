"""The gradient of a tensor that was cast, from the gradient of the decoded values of its cast.

    x_hat = Q(x H)      straight through:  dx = d_x_hat H^T      clipped:  dx = (d_x_hat * within) H^T

A cast that does not rotate has H = 1. A backward product gives ``d_x_hat`` if its other operand was made from the
rotated operand of the forward pass, and ``dx`` if it was made from the tensor itself.

Source: arXiv 2505.14669; IST-DASLab Quartet 00ccd38, ``quantizers/mxfp4.py``, ``QuestMXFP4QuantizerFn``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.plan import LinearPlan
from fp4engine.ops import Operand
from fp4engine.ops.operation import PLAIN
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix


def within(x: Tensor, operand: Operand, quantizer: Quantizer, plan: LinearPlan) -> Tensor | None:
    """Bits that mark the elements of ``x`` that its rowwise cast did not saturate; None if no gradient is clipped.

    Args:
        operand: codes and scales of ``x``.

    Raises:
        NotImplementedError: ``x`` is stored as codes, which do not tell what saturated.
    """
    if not quantizer.clipped_gradient or plan.backward_override is not None:
        return None
    if type(x) not in PLAIN and not _is_fake(x):
        raise NotImplementedError(f"clipped_gradient=True needs plain tensors that were cast, got a {type(x).__name__}")
    return ops.within_range(as_matrix(x), operand, plan.backend)


def rotated_by(quantizer: Quantizer, plan: LinearPlan) -> str:
    """Key of the spec whose rotation is still in the result of a backward product with the tensor of ``quantizer``.

    Empty if the result is the gradient itself.
    """
    spec = quantizer.rowwise_spec
    return spec.key if plan.keeps_rowwise(quantizer) and spec is not None and spec.rotation is not None else ""


def gradient(
    multiply: Callable[[torch.dtype], Tensor],
    rotated: str,
    within: Tensor | None,
    cols: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The gradient [rows, cols] in ``dtype``, from the product that ``multiply`` computes in a given dtype.

    Args:
        rotated: from :func:`rotated_by`, for the other tensor of the product.
        within: from :func:`within`, for the tensor whose gradient this is. If either is given, the product is computed
            in FP32, and the gradient is rounded once at the end.
    """
    if not rotated and within is None:
        return multiply(dtype)
    return ops.clip_and_rotate_back(multiply(torch.float32), within, rotated, cols, dtype, backend)


def _is_fake(x: Tensor) -> bool:
    """Whether ``x`` is a fake tensor, with which an estimate traces. PyTorch has no public name for these."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)
