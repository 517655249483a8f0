"""``fp4engine::amax`` and ``fp4engine::quantize``: one read of x makes both of its operands.

Plain tensors in and out. A spec travels as its key, so an operator's schema shows what it does. Legend: x is
``[M, K]``; the rowwise operand is x, the columnwise operand x.T, contracted axis last in both.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.kernels.source import Source
from fp4engine.ops import backend as backends
from fp4engine.ops.backend import call
from fp4engine.ops.operator import operator

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
    x: Tensor | Source,
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
        x: [M, K], BF16, FP16, FP32 or FP64, any strides; or what only kernels read, as of :func:`normalized`.
        rowwise, columnwise: spec of each side, None to leave it out.
        rowwise_form, columnwise_form: see :data:`Form`; ``values`` needs E2M1 elements with E4M3 scales.
        rowwise_amax, columnwise_amax: outer amax from :func:`amax` (perhaps reduced over ranks); None computes it.
        rng: int64 [2] ``(seed, draw)``; needed if a spec is stochastic.
        stream: stream id of the role, side bit 0.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    if isinstance(x, Tensor) and (x.ndim != 2 or not x.is_floating_point()):
        raise ValueError(f"x must be a floating-point matrix [M, K], got {x.dtype} of shape {tuple(x.shape)}")
    if rowwise is None and columnwise is None:
        raise ValueError("quantize needs rowwise or columnwise, got neither")
    arguments = (
        x.detach() if isinstance(x, Tensor) else x,
        _key(rowwise),
        _key(columnwise),
        rowwise_form,
        columnwise_form,
        None if rowwise is None else rowwise_amax,
        None if columnwise is None else columnwise_amax,
        rng,
        stream,
        backend,
    )
    if isinstance(x, Tensor):
        tensors = call(torch.ops.fp4engine.quantize, _quantize, x, *arguments)
    else:
        tensors = _quantize(*arguments)  # pyright: ignore[reportArgumentType]: the operator's schema knows tensors only
    sides = iter(tensors)
    return (
        None if rowwise is None else _take(sides, rowwise, rowwise_form, rowwise_amax),
        None if columnwise is None else _take(sides, columnwise, columnwise_form, columnwise_amax),
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
    tensors = iter(call(torch.ops.fp4engine.amax, _amax, x, x, _key(rowwise), _key(columnwise), rng, stream, backend))
    return (
        None if rowwise is None else next(tensors),
        None if columnwise is None else next(tensors),
    )


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """``element * block scale * (amax / numerator)`` rounded once to ``dtype``: [rows, cols]."""
    arguments = (codes, scale_inv, amax, spec.key, cols, dtype, backend)
    return call(torch.ops.fp4engine.dequantize, _dequantize, codes, *arguments)


def outer_factor(amax: Tensor, spec: CastSpec) -> Tensor:
    """``amax / numerator``, what values are multiplied by: FP32, broadcastable against [rows, padded cols]."""
    return reference.outer_factor(amax, spec)


def _key(spec: CastSpec | None) -> str:
    return "" if spec is None else spec.key


def _take(tensors: Iterator[Tensor], spec: CastSpec, form: Form, amax: Tensor | None) -> Side:
    """The next side of the operator's flat list; an amax that was given is not returned by it again."""
    data = next(tensors)
    scale_inv = next(tensors) if form == "codes" else None
    if amax is None or spec.correction is Correction.SCALAR:
        amax = next(tensors)
    return Side(data, scale_inv, amax)


def _sides(x: Tensor, rowwise: str, columnwise: str) -> list[tuple[int, Tensor, CastSpec]]:
    """``(side, operand, spec)`` of the sides asked for."""
    sides = []
    if rowwise:
        sides.append((0, x, CastSpec.from_key(rowwise)))
    if columnwise:
        sides.append((_COLUMNWISE, x.T, CastSpec.from_key(columnwise)))
    return sides


def _specs(rowwise: str, columnwise: str) -> tuple[CastSpec | None, CastSpec | None]:
    return (
        CastSpec.from_key(rowwise) if rowwise else None,
        CastSpec.from_key(columnwise) if columnwise else None,
    )


def _choose(operator: str, x: Tensor, rowwise: str, columnwise: str, backend: str) -> str:
    return backends.choose(operator, x.device, backend, (rowwise, columnwise, x.dtype), _supports)


def _supports(rowwise: str, columnwise: str, dtype: torch.dtype) -> tuple[bool, str]:
    from fp4engine.ops import cast_kernels

    return cast_kernels.supports(_specs(rowwise, columnwise), dtype)


def _amax(x: Tensor, rowwise: str, columnwise: str, rng: Tensor | None, stream: int, backend: str) -> list[Tensor]:
    if _choose("amax", x, rowwise, columnwise, backend) == "triton":
        from fp4engine.ops import cast_kernels

        return [tensor for tensor in cast_kernels.amax(x, _specs(rowwise, columnwise)) if tensor is not None]
    return [reference.amax(operand, spec, rng, stream | side) for side, operand, spec in _sides(x, rowwise, columnwise)]


def _quantize(
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
    given = (rowwise_amax, columnwise_amax)
    forms = (rowwise_form, columnwise_form)
    specs = _specs(rowwise, columnwise)
    path = _choose("quantize", x, rowwise, columnwise, backend)
    casts: Any
    if path == "triton":
        from fp4engine.ops import cast_kernels

        casts = cast_kernels.cast(x, specs, forms, given, rng, stream)
    else:
        casts = {
            side: reference.quantize(operand, spec, amax=given[side], rng=rng, stream=stream | side)
            for side, operand, spec in _sides(x, rowwise, columnwise)
        }
    outputs = []
    for side, spec in enumerate(specs):
        if spec is None:
            continue
        data, scale_inv, amax = casts[side]
        if forms[side] == "codes":
            outputs += [data, scale_inv]
        elif path == "reference":
            outputs.append(reference.decode(data, scale_inv, spec).to(torch.bfloat16))
        else:
            outputs.append(data)
        if given[side] is None or spec.correction is Correction.SCALAR:
            outputs.append(amax)
    return outputs


def decode_supports(spec: str) -> tuple[bool, str]:
    """Whether the decode kernels read the codes of ``spec``'s casts; fewer do than are written by one."""
    from fp4engine.kernels import quantize as kernels

    return kernels.supports(CastSpec.from_key(spec), torch.bfloat16)


def _dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, cols: int, dtype: torch.dtype, backend: str
) -> Tensor:
    parsed = CastSpec.from_key(spec)
    path = backends.choose("dequantize", codes.device, backend, (spec,), decode_supports)
    if path == "triton":
        from fp4engine.kernels.dequantize import dequantize

        return dequantize(codes, scale_inv, amax, parsed, cols, dtype)
    return reference.dequantize(codes, scale_inv, amax, parsed, cols, dtype)


def _fake_amax(operand: Tensor, spec: CastSpec) -> Tensor:
    rows, cols = operand.shape
    shape = {Outer.ROW: [rows], Outer.BLOCK128: [rows, spec.padded_cols(cols) // 128]}.get(spec.outer, [1])
    return operand.new_empty(shape, dtype=torch.float32)


@operator("amax", _amax)
def _(x: Tensor, rowwise: str, columnwise: str, rng: Tensor | None, stream: int, backend: str) -> list[Tensor]:
    return [_fake_amax(operand, spec) for _, operand, spec in _sides(x, rowwise, columnwise)]


@operator("quantize", _quantize)
def _(
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
    forms, given = (rowwise_form, columnwise_form), (rowwise_amax, columnwise_amax)
    for side, operand, spec in _sides(x, rowwise, columnwise):
        rows, cols = operand.shape[0], spec.padded_cols(operand.shape[1])
        if forms[side] == "values":
            outputs.append(x.new_empty((rows, cols), dtype=torch.bfloat16))
        else:
            outputs.append(x.new_empty((rows, cols * spec.element.storage_bits // 8), dtype=torch.uint8))
            outputs.append(x.new_empty((rows, spec.num_blocks(cols)), dtype=spec.scale.torch_dtype))
        if given[side] is None or spec.correction is Correction.SCALAR:
            outputs.append(_fake_amax(operand, spec))
    return outputs


@operator("dequantize", _dequantize)
def _(codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, cols: int, dtype: torch.dtype, backend: str) -> Tensor:
    parsed = CastSpec.from_key(spec)
    width = cols if parsed.rotation is None else parsed.padded_cols(cols)
    return codes.new_empty((codes.shape[0], width), dtype=dtype)
