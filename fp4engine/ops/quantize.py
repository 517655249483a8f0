"""``fp4engine::amax`` and ``fp4engine::quantize``: one read of x makes both of its operands.

Plain tensors in and out. A spec travels as its key, so an operator's schema shows what it does. Legend: x is
``[M, K]``; the rowwise operand is x, the columnwise operand x.T, contracted axis last in both.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.ops import backend as backends

Form = Literal["codes", "values"]
"""What an operand is written as: packed codes and scales, or the BF16 values that they decode to."""

_COLUMNWISE = 1
"""Side bit of a stream id."""


class Side(NamedTuple):
    """One quantized operand as plain tensors.

    Attributes:
        data: codes (uint8) or values (BF16 [rows, padded cols]), as the form asked for.
        scale_inv: block scales, or None in ``values`` form.
        amax: FP32 outer amax.
    """

    data: Tensor
    scale_inv: Tensor | None
    amax: Tensor


def quantize(
    x: Tensor,
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    *,
    rowwise_form: Form = "codes",
    columnwise_form: Form = "codes",
    rowwise_amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    rng: Tensor | None = None,
    stream: int = 0,
    backend: str = "auto",
) -> tuple[Side | None, Side | None]:
    """Quantize x into the operands whose spec is given.

    Args:
        x: [M, K], BF16, FP16, FP32 or FP64, any strides.
        rowwise, columnwise: spec of each side, None to leave it out.
        rowwise_form, columnwise_form: see :data:`Form`; ``values`` needs E2M1 elements with E4M3 scales.
        rowwise_amax, columnwise_amax: outer amax from :func:`amax` (perhaps reduced over ranks); None computes it.
        rng: int64 [2] ``(seed, draw)``; needed if a spec is stochastic.
        stream: stream id of the role, side bit 0.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point matrix [M, K], got {x.dtype} of shape {tuple(x.shape)}")
    if rowwise is None and columnwise is None:
        raise ValueError("quantize needs rowwise or columnwise, got neither")
    if (rowwise is not None and rowwise_amax is None) or (columnwise is not None and columnwise_amax is None):
        own = amax(x, rowwise, columnwise, rng=rng, stream=stream, backend=backend)
        rowwise_amax = own[0] if rowwise_amax is None else rowwise_amax
        columnwise_amax = own[1] if columnwise_amax is None else columnwise_amax
    tensors = torch.ops.fp4engine.quantize(
        x,
        _key(rowwise),
        _key(columnwise),
        rowwise_form,
        columnwise_form,
        rowwise_amax if rowwise is not None else None,
        columnwise_amax if columnwise is not None else None,
        rng,
        stream,
        backend,
    )
    tensors = list(tensors)
    return (
        _take(tensors, rowwise, rowwise_form, rowwise_amax),
        _take(tensors, columnwise, columnwise_form, columnwise_amax),
    )


def amax(
    x: Tensor,
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    *,
    rng: Tensor | None = None,
    stream: int = 0,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Phase one: outer amax of each side after its rotation, both in one read of x.

    Returns:
        FP32 [1], or one per row of the operand under row scaling; NaN where a NaN went in.
    """
    tensors = list(torch.ops.fp4engine.amax(x, _key(rowwise), _key(columnwise), rng, stream, backend))
    first = tensors.pop(0) if rowwise is not None else None
    return first, tensors.pop(0) if columnwise is not None else None


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """``element * block scale * (amax / numerator)`` rounded once to ``dtype``: [rows, cols]."""
    return torch.ops.fp4engine.dequantize(codes, scale_inv, amax, spec.key, cols, dtype, backend)


def _key(spec: CastSpec | None) -> str:
    return "" if spec is None else spec.key


def _take(tensors: list[Tensor], spec: CastSpec | None, form: Form, amax: Tensor | None) -> Side | None:
    if spec is None:
        return None
    assert amax is not None
    data = tensors.pop(0)
    scale_inv = tensors.pop(0) if form == "codes" else None
    return Side(data, scale_inv, tensors.pop(0) if spec.correction is Correction.SCALAR else amax)


def _sides(x: Tensor, rowwise: str, columnwise: str) -> list[tuple[int, Tensor, CastSpec]]:
    """``(side, operand, spec)`` of the sides asked for."""
    sides = []
    if rowwise:
        sides.append((0, x, CastSpec.from_key(rowwise)))
    if columnwise:
        sides.append((_COLUMNWISE, x.T, CastSpec.from_key(columnwise)))
    return sides


def _choose(operator: str, x: Tensor, rowwise: str, columnwise: str, backend: str) -> str:
    def supports() -> tuple[bool, str]:
        from fp4engine.kernels import quantize as kernels

        for _, _, spec in _sides(x, rowwise, columnwise):
            ok, reason = kernels.supports(spec, x.dtype)
            if not ok:
                return ok, reason
        return True, ""

    path = backends.choose(operator, x.device, backend, supports)
    backends.record(operator, path)
    return path


@torch.library.custom_op("fp4engine::amax", mutates_args=())
def _amax_op(x: Tensor, rowwise: str, columnwise: str, rng: Tensor | None, stream: int, backend: str) -> list[Tensor]:
    if _choose("amax", x, rowwise, columnwise, backend) == "triton":
        from fp4engine.kernels import quantize as kernels

        specs = (CastSpec.from_key(key) if key else None for key in (rowwise, columnwise))
        return [tensor for tensor in kernels.amax(x, *specs) if tensor is not None]
    return [reference.amax(operand, spec, rng, stream | side) for side, operand, spec in _sides(x, rowwise, columnwise)]


@_amax_op.register_fake
def _amax_fake(x: Tensor, rowwise: str, columnwise: str, rng: Tensor | None, stream: int, backend: str) -> list[Tensor]:
    outputs = []
    for _, operand, spec in _sides(x, rowwise, columnwise):
        rows, cols = operand.shape
        shape: list[int] = [1]
        if spec.outer is Outer.ROW:
            shape = [rows]
        elif spec.outer is Outer.BLOCK128:
            shape = [rows, spec.padded_cols(cols) // 128]
        outputs.append(x.new_empty(shape, dtype=torch.float32))
    return outputs


@torch.library.custom_op("fp4engine::quantize", mutates_args=())
def _quantize_op(
    x: Tensor,
    rowwise: str,
    columnwise: str,
    rowwise_form: str,
    columnwise_form: str,
    rowwise_amax: Tensor | None,
    columnwise_amax: Tensor | None,
    rng: Tensor | None,
    stream: int,
    backend: str,
) -> list[Tensor]:
    if _choose("quantize", x, rowwise, columnwise, backend) == "triton":
        from fp4engine.kernels import quantize as kernels

        specs = (CastSpec.from_key(key) if key else None for key in (rowwise, columnwise))
        tensors = kernels.quantize(
            x,
            *specs,
            rowwise_amax=rowwise_amax,
            columnwise_amax=columnwise_amax,
            rng=rng,
            stream=stream,
            rowwise_output=rowwise_form,
            columnwise_output=columnwise_form,
        )
        return [tensor for tensor in tensors if tensor is not None]
    outputs = []
    amaxes, forms = (rowwise_amax, columnwise_amax), (rowwise_form, columnwise_form)
    for side, operand, spec in _sides(x, rowwise, columnwise):
        cast = reference.quantize(operand, spec, amax=amaxes[side], rng=rng, stream=stream | side)
        if forms[side] == "values":
            outputs.append(reference.decode(cast.codes, cast.scale_inv, spec).to(torch.bfloat16))
        else:
            outputs += [cast.codes, cast.scale_inv]
        if spec.correction is Correction.SCALAR:
            outputs.append(cast.amax)
    return outputs


@_quantize_op.register_fake
def _quantize_fake(
    x: Tensor,
    rowwise: str,
    columnwise: str,
    rowwise_form: str,
    columnwise_form: str,
    rowwise_amax: Tensor | None,
    columnwise_amax: Tensor | None,
    rng: Tensor | None,
    stream: int,
    backend: str,
) -> list[Tensor]:
    outputs = []
    forms = (rowwise_form, columnwise_form)
    for side, operand, spec in _sides(x, rowwise, columnwise):
        rows, cols = operand.shape[0], spec.padded_cols(operand.shape[1])
        if forms[side] == "values":
            outputs.append(x.new_empty((rows, cols), dtype=torch.bfloat16))
        else:
            outputs.append(x.new_empty((rows, cols * spec.element.storage_bits // 8), dtype=torch.uint8))
            outputs.append(x.new_empty((rows, cols // spec.block[1]), dtype=spec.scale.torch_dtype))
        if spec.correction is Correction.SCALAR:
            outputs.append(x.new_empty((1,), dtype=torch.float32))
    return outputs


@torch.library.custom_op("fp4engine::dequantize", mutates_args=())
def _dequantize_op(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, cols: int, dtype: torch.dtype, backend: str
) -> Tensor:
    parsed = CastSpec.from_key(spec)

    def supports() -> tuple[bool, str]:
        from fp4engine.kernels import quantize as kernels

        return kernels.supports(parsed, torch.bfloat16)

    path = backends.choose("dequantize", codes.device, backend, supports)
    backends.record("dequantize", path)
    if path == "triton":
        from fp4engine.kernels import quantize as kernels

        return kernels.dequantize(codes, scale_inv, amax, parsed, cols, dtype)
    return reference.dequantize(codes, scale_inv, amax, parsed, cols, dtype)


@_dequantize_op.register_fake
def _dequantize_fake(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, cols: int, dtype: torch.dtype, backend: str
) -> Tensor:
    parsed = CastSpec.from_key(spec)
    width = cols if parsed.rotation is None else parsed.padded_cols(cols)
    return codes.new_empty((codes.shape[0], width), dtype=dtype)


def outer_factor(amax: Tensor, spec: CastSpec) -> Tensor:
    """``amax / numerator``, what values are multiplied by: FP32, broadcastable against [rows, 1]."""
    return reference.outer_factor(amax, spec)
