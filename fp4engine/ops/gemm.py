"""``fp4engine::gemm``: the TN product of two operands, whatever each is stored as.

    y[m, n] = round(alpha * sum_k left[m, k] * right[n, k] + bias[n])

The outer scales never touch the operands; they meet in ``alpha``, in the epilogue.
"""

from typing import Protocol

import torch
from torch import Tensor

from fp4engine import capability, reference
from fp4engine.formats import CastSpec, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops.quantize import Form


class OperandLike(Protocol):
    """What a GEMM reads of an operand; see :class:`fp4engine.tensor.Operand`."""

    @property
    def spec(self) -> CastSpec | None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def data(self) -> Tensor: ...
    @property
    def scale_inv(self) -> Tensor | None: ...
    @property
    def amax(self) -> Tensor | None: ...
    @property
    def is_values(self) -> bool: ...


def gemm(
    left: OperandLike,
    right: OperandLike,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``left @ right.T`` with FP32 accumulation and one rounding: [left.rows, right.rows].

    Two unquantized operands multiply as ``torch.nn.functional.linear`` would, bit for bit.

    Args:
        left, right: operands that contract their last axes; ``cols`` must agree.
        out_dtype: dtype of the result.
        bias: [right.rows] or None, added in FP32 before the rounding.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    if left.cols != right.cols:
        raise ValueError(
            f"gemm contracts the last axis of both operands, got left [{left.rows}, {left.cols}] "
            f"and right [{right.rows}, {right.cols}]"
        )
    if left.spec is None and right.spec is None:
        return _dense(left.data, right.data, bias, out_dtype)
    rotations = tuple(operand.spec.rotation if operand.spec else None for operand in (left, right))
    if rotations[0] != rotations[1]:
        raise ValueError(
            "both operands of a GEMM must be rotated alike, or H H^T does not cancel: "
            f"left has {rotations[0]}, right has {rotations[1]}"
        )
    return torch.ops.fp4engine.gemm(
        left.data,
        left.scale_inv,
        left.amax,
        _key(left.spec),
        right.data,
        right.scale_inv,
        right.amax,
        _key(right.spec),
        bias,
        left.cols,
        out_dtype,
        backend,
    )


def _dense(left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    left, right = left.to(out_dtype), right.to(out_dtype)
    return torch.nn.functional.linear(left, right, None if bias is None else bias.to(out_dtype))


def _key(spec: CastSpec | None) -> str:
    return "" if spec is None else spec.key


def _decode(data: Tensor, scale_inv: Tensor | None, spec: CastSpec | None, cols: int) -> Tensor:
    """Values without the outer factor, [rows, width]; ``width`` is padded if the operand is rotated."""
    if spec is None or scale_inv is None:
        values = data
    else:
        values = reference.decode(data, scale_inv, spec)
    return values if spec is not None and spec.rotation is not None else values[:, :cols]


def _factor(amax: Tensor | None, spec: CastSpec | None, like: Tensor) -> tuple[Tensor, float]:
    """``(A, numerator)`` of an operand; an operand without outer scale has ``(1, 1)``."""
    if spec is None or spec.outer is Outer.NONE or amax is None:
        return like.new_ones(1, dtype=torch.float32), 1.0
    return amax, spec.numerator


@torch.library.custom_op("fp4engine::gemm", mutates_args=())
def _gemm_op(
    left: Tensor,
    left_scale_inv: Tensor | None,
    left_amax: Tensor | None,
    left_spec: str,
    right: Tensor,
    right_scale_inv: Tensor | None,
    right_amax: Tensor | None,
    right_spec: str,
    bias: Tensor | None,
    cols: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    specs = [CastSpec.from_key(key) if key else None for key in (left_spec, right_spec)]
    left_values = _decode(left, left_scale_inv, specs[0], cols)
    right_values = _decode(right, right_scale_inv, specs[1], cols)
    left_factor, left_numerator = _factor(left_amax, specs[0], left)
    right_factor, right_numerator = _factor(right_amax, specs[1], right)
    alpha = reference.gemm_factor(left_factor, right_factor, left_numerator * right_numerator)
    backends.record("gemm", "reference")
    return reference.gemm(left_values, right_values, alpha, bias, out_dtype)


@_gemm_op.register_fake
def _gemm_fake(
    left: Tensor,
    left_scale_inv: Tensor | None,
    left_amax: Tensor | None,
    left_spec: str,
    right: Tensor,
    right_scale_inv: Tensor | None,
    right_amax: Tensor | None,
    right_spec: str,
    bias: Tensor | None,
    cols: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=out_dtype)


@torch.compiler.assume_constant_result
def transient_form(device: torch.device, backend: str) -> Form:
    """The form of an operand that a GEMM reads at once and nobody keeps.

    Where the product runs on decoded BF16 values anyway (GPUs without FP4 units), the quantize pass writes those.
    """
    if backend == "reference" or not capability.triton_runs_on(device)[0]:
        return "codes"
    return "values"
