"""Casting on its own, without a GEMM: ``cast(x, spec)`` and back with ``upcast``."""

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from fp4engine import capability, ops, reference
from fp4engine.arguments import require_dense
from fp4engine.formats import E4M3, E5M2, CastSpec
from fp4engine.functional.cast_words import Cast, Compute, Round, Scale, Words, resolve
from fp4engine.quantizers import Quantizer


@dataclass(frozen=True, eq=False)
class CastTensor:
    """A cast tensor in storage.

    Attributes:
        spec: how it was cast.
        mode: how it is stored, ``"actual"`` or ``"compress"``: the word that ``cast`` was told.
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
    x: Tensor, spec: CastSpec, cast: None = None, *, compute: Compute | None = None, rng: Tensor | None = None
) -> Tensor: ...
@overload
def cast(
    x: Tensor,
    spec: CastSpec | str,
    cast: Literal["virtual"],
    *,
    round: Round | None = None,
    scale: Scale | None = None,
    compute: Compute | None = None,
    rng: Tensor | None = None,
) -> Tensor: ...
@overload
def cast(
    x: Tensor,
    spec: CastSpec | str,
    cast: Literal["actual", "compress"],
    *,
    round: Round | None = None,
    scale: Scale | None = None,
    compute: Compute | None = None,
    rng: Tensor | None = None,
) -> CastTensor: ...
@overload
def cast(
    x: Tensor,
    spec: str,
    cast: None = None,
    *,
    round: Round | None = None,
    scale: Scale | None = None,
    compute: Compute | None = None,
    rng: Tensor | None = None,
) -> Tensor | CastTensor: ...
def cast(
    x: Tensor,
    spec: CastSpec | str,
    cast: Cast | None = None,
    *,
    round: Round | None = None,
    scale: Scale | None = None,
    compute: Compute | None = None,
    rng: Tensor | None = None,
) -> Tensor | CastTensor:
    """Cast ``x`` [..., K] by ``spec``, blocks along the last axis. ``x`` is never changed.

    Args:
        x: float16, bfloat16, float32 or float64.
        spec: a CastSpec, or the name of a format: ``"nvfp4"``, or one of TensorCast's. ``"mxfp4"``, ``"mxfp6"`` (E2M3),
            ``"mxbf6"`` (E3M2), ``"mxfp8"`` (E4M3) and ``"mxbf8"`` (E5M2) are those of Microscaling, also called
            ``"mxfp4e2"``, ``"mxfp6e2"``, ``"mxfp6e3"``, ``"mxfp8e4"`` and ``"mxfp8e5"``; ``"mxfp4s"``, ``"mxfp6s"``,
            ``"mxbf6s"`` and ``"mxfp8s"`` have blocks of 32 x 32; ``"fp8_F"`` and ``"bf8_F"`` are E4M3 and E5M2 with one
            FP32 scale per tensor.
        cast: ``"virtual"`` returns the decoded values in the shape and dtype of ``x``; ``"actual"`` one value per
            element of the smallest torch dtype, with scales; ``"compress"`` packed bits, with scales.
        round: how elements of a named format meet their grid: to nearest with ties to ``"even"``, ``"away"`` from zero
            or toward ``"zero"``; or ``"stochastic"``.
        scale: how a named format of Microscaling chooses the powers of two of its blocks: ``"floor"``, ``"ceil"``,
            ``"midmax"``, ``"option3"`` or ``"topbinade"``.
        compute: ``"torch"`` is the reference; ``"triton"`` the kernels; ``"auto"`` the kernels where they can, and the
            reference where they cannot. All give the same bytes.
        rng: int64 [2] ``(seed, draw)`` for stochastic casts; by default a new draw.

    A word that is left out is the one of :func:`fp4engine.cast_defaults` if ``spec`` is a name; else ``"virtual"``,
    ``"even"``, ``"floor"`` and ``"auto"``.

    Raises:
        RuntimeError: a checkpoint recomputes a stochastic cast and does not repeat its draw; or ``compute`` is
            ``"triton"`` and Triton cannot cast ``x``.
        ValueError: an unknown word or format, a word that does not go with ``spec``, or an ``x`` that is no dense
            tensor of these dtypes with at least one dimension.
        NotImplementedError: ``spec`` rotates, which only means something between the two operands of a GEMM.

    Source: ROCm/tensorcast, branch ``triton``, ``tcast/common.py``, for the vocabulary.
    """
    spec, words = resolve(spec, Words(round, scale, cast, compute))
    require_castable(x, spec)
    mode, compute = words.cast or "virtual", words.compute or "auto"
    operand = Quantizer(spec, backend=_backend(x, spec, compute)).quantize(x, columnwise=False, rng=rng).rowwise
    assert operand is not None and operand.scale_inv is not None and operand.amax is not None
    if mode == "virtual":
        return operand.dequantize(x.dtype, "reference" if compute == "torch" else "auto").view(x.shape)
    data = operand.data
    if mode == "compress":
        data = reference.pack6(data) if spec.element.bits == 6 else data
    elif spec.element.storage_bits == 4:
        data = reference.unpack(data)
    elif spec.element in (E4M3, E5M2):
        data = data.view(spec.element.torch_dtype)
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
        raise ValueError(f"x must be a CastTensor, as cast(..., cast='actual') returns, got {type(x).__name__}")
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


def _backend(x: Tensor, spec: CastSpec, compute: Compute) -> str:
    """The backend of a quantizer that computes so; raises a RuntimeError where Triton is asked for and cannot."""
    if compute != "triton":
        return "auto" if compute == "auto" else "reference"
    able, reason = capability.triton_runs_on(x.device)
    if able:
        from fp4engine.kernels import casts as kernels

        able, reason = kernels.supports(spec, x.dtype)
    if not able:
        raise RuntimeError(
            f"compute='triton' cannot cast x: {reason}; compute='auto' takes torch where Triton cannot, 'torch' always"
        )
    return "triton"
