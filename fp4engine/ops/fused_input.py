"""Around casts that compute a norm or an activation of their input: whether kernels can, statistics, gradients."""

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import as_it_is, fused_casts_supported
from fp4engine.ops.operation import PLAIN, Output, define, is_plain


def fuses(tensors: list[Tensor], specs: tuple[CastSpec, CastSpec], dtype: torch.dtype, backend: str) -> bool:
    """Whether kernels can cast a norm or activation of ``tensors``, rounded to ``dtype``, by both ``specs``.

    Args:
        tensors: x [..., K], then parameters [K] of the function.
    """
    x = tensors[0]
    if torch.compiler.is_compiling() or backend == "reference" or not capability.triton_runs_on(x.device)[0]:
        return False
    # PyTorch's function rounds to the dtype of x first, which is a second rounding unless that is FP32.
    if x.ndim == 0 or x.dtype not in (dtype, torch.float32):
        return False
    for t in tensors:
        if type(t) not in PLAIN or t.dtype not in backends.KERNEL_DTYPES:
            return False
        if t.stride(-1) != 1 or t.device != x.device or t.is_neg():
            return False
    return fused_casts_supported(specs[0].key, dtype)[0] and fused_casts_supported(specs[1].key, dtype)[0]


def row_statistics(x: Tensor, eps: float, centered: bool) -> Tensor:
    """``1 / sigma`` and, if ``centered``, the mean of each row: FP32 [2, M]; see :mod:`fp4engine.reference.norm`."""
    run = _row_statistics if is_plain(x) else torch.ops.fp4engine.row_statistics
    return run(as_it_is(x), eps, centered)[0]


def activation_backward(grad: Tensor, x: Tensor, kind: str, gated: bool) -> Tensor:
    """Gradient of x from the gradient of the activation's value [M, K]; see :mod:`fp4engine.kernels.activation`."""
    run = _activation_backward if is_plain(x) else torch.ops.fp4engine.activation_backward
    return run(as_it_is(grad), as_it_is(x), kind, gated)[0]


def _row_statistics(x: Tensor, eps: float, centered: bool) -> list[Tensor]:
    from fp4engine.kernels.norm import row_statistics

    backends.record("row_statistics/triton")
    return [row_statistics(x, eps, centered)]


def _activation_backward(grad: Tensor, x: Tensor, kind: str, gated: bool) -> list[Tensor]:
    from fp4engine.kernels.activation import activation_backward

    backends.record("activation_backward/triton")
    return [activation_backward(grad, x, kind, gated)]


def _row_statistics_outputs(x: Tensor) -> list[Output]:
    return [Output((2, x.shape[0]), torch.float32)]


def _activation_backward_outputs(x: Tensor) -> list[Output]:
    return [Output(tuple(x.shape), x.dtype)]


define(_row_statistics, _row_statistics_outputs)
define(_activation_backward, _activation_backward_outputs)
