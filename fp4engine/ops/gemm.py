"""``fp4engine::gemm``: the TN product of two operands, whatever each is stored as.

    y[m, n] = round(alpha * sum_k left[m, k] * right[n, k] + bias[n])

The outer scales never touch the operands; they meet in ``alpha``, in the epilogue.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp4engine import capability, reference
from fp4engine.formats import E2M1, E4M3, CastSpec, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.backend import call
from fp4engine.ops.operator import operator
from fp4engine.ops.quantize import Form, decode_supports
from fp4engine.tracing import constant_when_traced


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


def gemm(
    left: OperandLike,
    right: OperandLike,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    fast_accumulation: bool = False,
) -> Tensor:
    """``left @ right.T`` with FP32 accumulation and one rounding: [left.rows, right.rows].

    Two unquantized operands multiply as ``torch.nn.functional.linear`` would, bit for bit.

    Args:
        left, right: operands that contract their last axes; ``cols`` must agree.
        out_dtype: dtype of the result; ignored when ``out`` is given.
        bias: [right.rows] or None, added in FP32 before the rounding.
        out: gradient buffer [left.rows, right.rows] to add the product to, in FP32 before the one rounding.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: FP8 products may keep their sums in the tensor core's shorter accumulator.
    """
    if left.cols != right.cols:
        raise ValueError(
            f"gemm contracts the last axis of both operands, got left [{left.rows}, {left.cols}] "
            f"and right [{right.rows}, {right.cols}]"
        )
    if left.spec is None and right.spec is None:
        return _dense(left.data, right.data, bias, out_dtype, out)
    rotations = tuple(operand.spec.rotation if operand.spec else None for operand in (left, right))
    if rotations[0] != rotations[1]:
        raise ValueError(
            "both operands of a GEMM must be rotated alike, or H H^T does not cancel: "
            f"left has {rotations[0]}, right has {rotations[1]}"
        )
    if backend in ("auto", "native") and _multiplies_fp8(_key(left), _key(right), left.data.device):
        return _fp8(left, right, bias, out_dtype, out, fast_accumulation)
    operands = (_tensors(left), _key(left), _tensors(right), _key(right))
    if out is not None:
        call(torch.ops.fp4engine.gemm_accumulate, _gemm_accumulate, out, out, *operands, backend)
        return out
    return call(torch.ops.fp4engine.gemm, _gemm, left.data, *operands, bias, out_dtype, backend)


@constant_when_traced
def _multiplies_fp8(left: str, right: str, device: torch.device) -> bool:
    return gemm_fp8.supports(left, right, device)[0]


def _fp8(
    left: OperandLike,
    right: OperandLike,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    fast_accumulation: bool,
) -> Tensor:
    assert left.spec is not None and right.spec is not None and left.amax is not None and right.amax is not None
    backends.record("gemm", "fp8")
    alpha = reference.gemm_factor(left.amax, right.amax, left.spec.numerator * right.spec.numerator)
    codes = (gemm_fp8.operand(left.data, left.spec), gemm_fp8.operand(right.data, right.spec))
    dtype = out_dtype if out is None else torch.float32
    product = gemm_fp8.multiply(*codes, alpha, bias, dtype, fast_accumulation)
    return product if out is None else out.copy_(out.float() + product)


def _tensors(operand: OperandLike) -> list[Tensor]:
    """``[data]``, ``[values, amax]`` or ``[codes, scale_inv, amax]``: the length tells which."""
    return [tensor for tensor in (operand.data, operand.scale_inv, operand.amax) if tensor is not None]


def _key(operand: OperandLike) -> str:
    return "" if operand.spec is None else operand.spec.key


def _dense(left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):  # the dtype is the caller's, also in a backward pass
        if out is not None:
            product = torch.nn.functional.linear(left.to(torch.float32), right.to(torch.float32))
            return out.copy_(out.float() + product)
        return torch.nn.functional.linear(
            left.to(out_dtype), right.to(out_dtype), bias if bias is None else bias.to(out_dtype)
        )


class _Unit(NamedTuple):
    """An operand ready to multiply: ``x_hat = values * amax / numerator``."""

    values: Tensor
    amax: Tensor
    numerator: float


def _unit(tensors: list[Tensor], key: str, path: str) -> _Unit:
    """Decode an operand; exact in BF16 on the ``triton`` path, FP32 on the ``reference`` path."""
    data = tensors[0]
    if not key:
        values = data.to(torch.bfloat16) if path == "triton" else data
        return _Unit(values, torch.ones(1, dtype=torch.float32, device=data.device), 1.0)
    spec = CastSpec.from_key(key)
    amax = tensors[-1]
    values = data if len(tensors) == 2 else _decode(data, tensors[1], spec, path)
    if spec.outer is Outer.BLOCK128:
        values = values * reference.outer_factor(amax, spec)
        return _Unit(values, torch.ones(1, dtype=torch.float32, device=data.device), 1.0)
    return _Unit(values, amax, spec.numerator)


def _decode(codes: Tensor, scale_inv: Tensor, spec: CastSpec, path: str) -> Tensor:
    if path == "reference":
        return reference.decode(codes, scale_inv, spec)
    if decode_supports(spec.key)[0]:
        from fp4engine.kernels.dequantize import decode

        return decode(codes, scale_inv)
    return reference.decode(codes, scale_inv, spec).to(torch.bfloat16)


def _supports(left: str, right: str, out_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the BF16 tensor-core product is exact for operands of these specs and roundings."""
    for key in (left, right):
        if key and not CastSpec.from_key(key).is_exact_in_bf16:
            return False, f"values of {key} are not exact in BF16"
    if not (left and right) and out_dtype != torch.bfloat16:
        return False, f"the unquantized operand of a {out_dtype} product is not BF16"
    return out_dtype in (torch.bfloat16, torch.float16, torch.float32), f"output dtype {out_dtype}"


def _native_supports(left_spec: str, right_spec: str, device: torch.device) -> tuple[bool, str]:
    """Whether FP4 tensor cores multiply operands of these specs on ``device``."""
    units, reason = capability.fp4_units(device)
    if not units:
        return False, reason
    for key in (left_spec, right_spec):
        spec = CastSpec.from_key(key) if key else None
        if spec is None or (spec.element, spec.scale) != (E2M1, E4M3) or spec.outer not in (Outer.TENSOR, Outer.ROW):
            return (
                False,
                f"FP4 tensor cores multiply E2M1 with E4M3 block scales, got {key or 'an unquantized operand'}",
            )
    return True, ""


def _is_native(left: list[Tensor], left_spec: str, right: list[Tensor], right_spec: str, backend: str) -> bool:
    """Whether this product runs on FP4 tensor cores; raises if ``backend="native"`` demands it in vain."""
    if backend not in ("auto", "native"):
        return False
    codes = len(left) == len(right) == 3
    able, reason = _native_supports(left_spec, right_spec, left[0].device)
    if backend == "native" and not (able and codes):
        raise RuntimeError(f"backend='native' was asked for, but {reason or 'an operand holds values, not codes'}")
    return able and codes


def _product(
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    if _is_native(left, left_spec, right, right_spec, backend):
        backends.record("gemm", "native")
        return _native_product(left, left_spec, right, right_spec, bias, out_dtype, out)
    path = backends.choose("gemm", left[0].device, backend, (left_spec, right_spec, out_dtype), _supports)
    first = _unit(left, left_spec, path)
    second = _unit(right, right_spec, path)
    numerator = first.numerator * second.numerator
    values = (first.values, second.values)
    width = min(value.shape[1] for value in values)
    if any(value.shape[1] > width for value in values):  # an unquantized or unpadded partner cuts off the padding
        values = (first.values[:, :width], second.values[:, :width])
    if path == "triton":
        from fp4engine.kernels.gemm import gemm as kernel

        return kernel(*values, first.amax, second.amax, numerator, bias=bias, out_dtype=out_dtype, out=out)
    alpha = reference.gemm_factor(first.amax, second.amax, numerator)
    if out is None:
        return reference.gemm(*values, alpha, bias, out_dtype)
    return out.copy_(out.float() + reference.gemm(*values, alpha, bias, torch.float32))


def _native_product(
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    from fp4engine.kernels import gemm_native

    return gemm_native.gemm(
        gemm_native.Codes(*left),
        gemm_native.Codes(*right),
        CastSpec.from_key(left_spec).numerator * CastSpec.from_key(right_spec).numerator,
        bias=bias,
        out_dtype=out_dtype,
        out=out,
    )


def _gemm(
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return _product(left, left_spec, right, right_spec, bias, out_dtype, None, backend)


def _gemm_accumulate(
    out: Tensor,
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    backend: str,
) -> None:
    _product(left, left_spec, right, right_spec, None, out.dtype, out, backend)


@operator("gemm", _gemm)
def _(
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return left[0].new_empty((left[0].shape[0], right[0].shape[0]), dtype=out_dtype)


@operator("gemm_accumulate", _gemm_accumulate, mutates_args=("out",))
def _(
    out: Tensor,
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    backend: str,
) -> None:
    return None


def transient_form(spec: CastSpec | None, device: torch.device, backend: str) -> Form:
    """The form of an operand that a GEMM reads at once and nobody keeps.

    Where the product runs on decoded BF16 values anyway (GPUs without FP4 units), the quantize pass writes those.
    """
    return "codes" if spec is None or backend == "reference" else _transient_form(spec.key, device, backend)


@constant_when_traced
def _transient_form(key: str, device: torch.device, backend: str) -> Form:
    spec = CastSpec.from_key(key)
    native = backend in ("auto", "native") and capability.fp4_units(device)[0]
    values = capability.triton_runs_on(device)[0] and not native and spec.block[1] and spec.is_exact_in_bf16
    return "values" if values else "codes"
