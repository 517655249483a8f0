"""Casting on its own, without a GEMM: ``cast(x, spec, mode)`` and back with ``upcast``."""

import warnings
from dataclasses import dataclass
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from fp4engine import capability, ops, reference
from fp4engine.arguments import require_dense, require_one_of
from fp4engine.formats import E4M3, E5M2, CastSpec
from fp4engine.quantizers import Quantizer

Mode = Literal["virtual", "actual", "compress"]
Compute = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, eq=False)
class CastTensor:
    """A cast tensor in storage.

    Attributes:
        spec: how it was cast.
        mode: ``"actual"`` or ``"compress"``.
        shape, dtype: of the tensor that was cast.
        data: [rows, padded cols] in the smallest torch dtype of one value (``float8_e4m3fn``, ``float8_e5m2``, else
            uint8 codes), or packed uint8 bytes: two 4-bit codes per byte, four 6-bit codes per three bytes.
        scale_inv: block scales [rows, blocks] in the spec's scale format.
        amax: FP32 outer amax; the decode multiplies by ``amax / spec.numerator``.
    """

    spec: CastSpec
    mode: Literal["actual", "compress"]
    shape: torch.Size
    dtype: torch.dtype
    data: Tensor
    scale_inv: Tensor
    amax: Tensor

    def __repr__(self) -> str:
        """``CastTensor([64, 48], torch.float32, 'e2m1 1x16', 'compress', device='cpu')``."""
        device = str(self.data.device)
        return f"CastTensor({list(self.shape)}, {self.dtype}, {self.spec.label!r}, {self.mode!r}, device={device!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and amax."""
        return self.data.nbytes + self.scale_inv.nbytes + self.amax.nbytes


@overload
def cast(
    x: Tensor,
    spec: CastSpec,
    mode: Literal["virtual"] = "virtual",
    *,
    compute: Compute = "auto",
    rng: Tensor | None = None,
) -> Tensor: ...
@overload
def cast(
    x: Tensor,
    spec: CastSpec,
    mode: Literal["actual", "compress"],
    *,
    compute: Compute = "auto",
    rng: Tensor | None = None,
) -> CastTensor: ...
def cast(
    x: Tensor, spec: CastSpec, mode: Mode = "virtual", *, compute: Compute = "auto", rng: Tensor | None = None
) -> Tensor | CastTensor:
    """Cast ``x`` [..., K] by ``spec``, blocks along the last axis. ``x`` is never changed.

    Args:
        mode: ``"virtual"`` returns the decoded values in the shape and dtype of ``x``; ``"actual"`` one value per
            element of the smallest torch dtype, with scales; ``"compress"`` packed bits, with scales.
        compute: ``"torch"``; ``"triton"``, which falls back to torch with a warning if Triton cannot cast ``x``; or
            ``"auto"``, which does the same without a warning.
        rng: int64 [2] ``(seed, draw)`` for stochastic specs; by default a new draw.

    Raises:
        RuntimeError: a checkpoint recomputes a stochastic cast and does not repeat its draw.
        ValueError: an unknown mode or compute, something else than a CastSpec, or an ``x`` that is no dense tensor of
            float16, bfloat16, float32 or float64 with at least one dimension.
        NotImplementedError: ``spec`` rotates, which only means something between the two operands of a GEMM.

    Source: ROCm/tensorcast, branch ``triton``, ``tcast/common.py``, for the vocabulary; modes are arguments here.
    """
    require_castable(x, spec)
    for name, value, allowed in (("mode", mode, get_args(Mode)), ("compute", compute, get_args(Compute))):
        require_one_of(name, value, allowed)
    operand = Quantizer(spec, backend=_backend(x, spec, compute)).quantize(x, columnwise=False, rng=rng).rowwise
    assert operand is not None and operand.scale_inv is not None and operand.amax is not None
    if mode == "virtual":
        return operand.dequantize(x.dtype, "auto" if compute == "auto" else "reference").view(x.shape)
    data = operand.data if mode == "compress" else _unpack(operand.data, spec)
    if mode == "compress" and spec.element.bits == 6:
        data = reference.pack6(data)
    return CastTensor(spec, mode, x.shape, x.dtype, data, operand.scale_inv, operand.amax)


def require_castable(x: Tensor, spec: CastSpec) -> None:
    """Raise as :func:`cast` unless ``x`` is a dense tensor, and ``spec`` a CastSpec that does not rotate."""
    require_dense("x", x)
    if not isinstance(spec, CastSpec):
        raise ValueError(f"spec must be an fp4engine.formats.CastSpec, got {spec!r}")
    if spec.rotation is not None:
        raise NotImplementedError(f"cast does not rotate (spec has {spec.rotation}): neither torch nor triton can")


def upcast(x: CastTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values that ``x`` decodes to, in its original shape; in its original dtype unless ``dtype`` is given.

    Raises:
        ValueError: ``x`` is no CastTensor, or ``dtype`` no floating-point dtype of PyTorch's.
    """
    if not isinstance(x, CastTensor):
        raise ValueError(f"x must be a CastTensor, as cast(..., mode='actual') returns, got {type(x).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    data = x.data
    if x.mode == "compress":
        if x.spec.element.bits == 6:
            data = reference.unpack6(data)
    else:
        data = data.view(torch.uint8)
        if x.spec.element.storage_bits == 4:
            data = reference.pack(data)
    cols = x.shape[-1]
    return ops.dequantize(data, x.scale_inv, x.amax, x.spec, cols, dtype or x.dtype).view(x.shape)


def _unpack(codes: Tensor, spec: CastSpec) -> Tensor:
    if spec.element.storage_bits == 4:
        return reference.unpack(codes)
    return codes.view(spec.element.torch_dtype) if spec.element in (E4M3, E5M2) else codes


def _backend(x: Tensor, spec: CastSpec, compute: Compute) -> str:
    if compute != "triton":
        return "auto" if compute == "auto" else "reference"
    able, reason = capability.triton_runs_on(x.device)
    if able:
        from fp4engine.kernels import casts as kernels

        able, reason = kernels.supports(spec, x.dtype)
    if able:
        return "triton"
    warnings.warn(f"fp4engine: cast runs on torch instead of triton: {reason}", stacklevel=3)
    return "reference"
