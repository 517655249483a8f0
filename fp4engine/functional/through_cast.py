"""From the gradient of what a cast decodes to, to the gradient of the tensor that was cast.

    x_hat = Q(x H)      straight through:  dx = d_x_hat H^T      clipped:  dx = (d_x_hat * within) H^T

A cast that does not rotate has H = 1. A product gives ``d_x_hat`` if its other operand was made of what the forward
pass multiplied, rotated as that is; an operand that is made of the tensor itself gives ``dx``.

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
    """Bits of the elements that the rowwise cast of ``x`` did not saturate; None if all of them get their gradient.

    Args:
        operand: codes and scales of ``x``.

    Raises:
        NotImplementedError: ``x`` is stored as codes, of which nobody knows what saturated.
    """
    if not quantizer.clipped_gradient or plan.backward_override is not None:
        return None
    if type(x) not in PLAIN and not _is_fake(x):
        raise NotImplementedError(f"clipped_gradient=True needs plain tensors that were cast, got a {type(x).__name__}")
    return ops.within_range(as_matrix(x), operand, plan.backend)


def rotated_by(quantizer: Quantizer, plan: LinearPlan) -> str:
    """Key of the spec by whose rotation a backward product comes out that multiplies the tensor of ``quantizer``.

    Empty if it comes out as the gradient itself.
    """
    made_of_rowwise = quantizer.columnwise_source == "rowwise_dequantized"
    if plan.backward_override is not None:
        made_of_rowwise = plan.backward_override == "dequantized"
    spec = quantizer.rowwise_spec
    return spec.key if made_of_rowwise and spec is not None and spec.rotation is not None else ""


def gradient(
    multiply: Callable[[torch.dtype], Tensor],
    rotated: str,
    within: Tensor | None,
    cols: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The gradient [rows, cols] in ``dtype``, of a product in the dtype that ``multiply`` is asked for.

    Args:
        rotated, within: from :func:`rotated_by`, of the product's other tensor, and :func:`within`, of its own. With
            either the product is in FP32, and rounded once in the end.
    """
    if not rotated and within is None:
        return multiply(dtype)
    return ops.clip_and_rotate_back(multiply(torch.float32), within, rotated, cols, dtype, backend)


def _is_fake(x: Tensor) -> bool:
    """Whether ``x`` is what an estimate traces with, for which PyTorch has no public name: asked of subclasses only."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)
