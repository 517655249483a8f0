"""Casts: :func:`quantize` makes both operands of x in one read of it, and :func:`dequantize` decodes an operand.

Operators get a spec as its key, a string that describes the cast. Legend: x is ``[M, K]``; the rowwise operand is x,
the columnwise operand x.T; both have the contracted axis last.
"""

from functools import cache
from itertools import count
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fp4engine import capability, reference
from fp4engine.arguments import require_one_of
from fp4engine.formats import CastSpec, Correction, Outer, RoundingMode
from fp4engine.kernels.source import Asked, Source
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import PLAIN, Output, define, is_plain
from fp4engine.private import constant_when_traced

Form = Literal["codes", "values"]
"""How an operand is written: as packed codes and scales, or as the 16-bit values that they decode to."""

_COLUMNWISE = 1
"""The side bit of the stream id of a columnwise operand."""

_PLAIN = (*PLAIN, type(None))
"""Types of an amax, given or not, with which a cast does not need PyTorch's dispatcher."""


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
) -> tuple[Operand | None, Operand | None]:
    """Quantize x into the operands whose spec is given.

    Args:
        x: [M, K], BF16, FP16, FP32 or FP64, any strides; or a source that :func:`fp4engine.ops.fuses` accepts.
        rowwise, columnwise: spec of each side, None to leave it out.
        rowwise_form, columnwise_form: see :data:`Form`; ``values`` needs values that are exact in 16 bits.
        rowwise_amax, columnwise_amax: outer amax from :func:`amax` (perhaps reduced over ranks); None computes it.
            Without an outer scale it is the constant that stands for it, whatever is given.
        rng: int64 [2] ``(seed, draw)``, or [4] for a shard, see :mod:`fp4engine.reference.philox`; needed if a spec is
            stochastic.
        stream: stream id of the role, side bit 0.
        backend: see :func:`fp4engine.ops.backend.choose`.

    Raises:
        ValueError: x is no matrix of floating-point numbers, no side is asked for, a form is unknown or would round, or
            an amax is not what :func:`amax` returns.
    """
    kind, gated, statistics, gamma, beta = "", False, None, None, None
    if isinstance(x, Tensor):
        matrix = x
    elif isinstance(x, Source):
        matrix, _, kind, gated, statistics, gamma, beta = x
    else:
        raise ValueError(f"x must be a tensor, got {type(x).__name__}")
    if rowwise is None and columnwise is None:
        raise ValueError("quantize needs rowwise or columnwise, got neither")
    matrix = as_it_is(matrix)
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(f"x must be a floating-point matrix [M, K], got {x.dtype} of shape {tuple(x.shape)}")
    rows, cols = x.shape
    require_amax("rowwise_amax", rowwise_amax, rowwise, rows, cols, matrix.device)
    require_amax("columnwise_amax", columnwise_amax, columnwise, cols, rows, matrix.device)
    row_key, col_key = "" if rowwise is None else rowwise.key, "" if columnwise is None else columnwise.key
    if not rowwise_form == columnwise_form == "codes":
        _require_forms(row_key, col_key, rowwise_form, columnwise_form)
    row_amax = None if rowwise is None or rowwise.outer is Outer.NONE else rowwise_amax
    col_amax = None if columnwise is None or columnwise.outer is Outer.NONE else columnwise_amax
    parts = (row_key, col_key, rowwise_form, columnwise_form, backend, kind, gated, x.dtype)
    asked, layout = _key_and_layout(row_amax is None, col_amax is None, rng is None, *parts)
    if layout is None:
        assert isinstance(x, Tensor)
        own = amax(x, rowwise, columnwise, rng=rng, stream=stream, backend=backend)
        row_amax, col_amax = own[0] if row_amax is None else row_amax, own[1] if col_amax is None else col_amax
        asked, layout = _key_and_layout(row_amax is None, col_amax is None, rng is None, *parts)
        assert layout is not None
    is_direct = is_plain(matrix) and type(row_amax) in _PLAIN and type(col_amax) in _PLAIN
    run = _quantize if is_direct else torch.ops.fp4engine.quantize
    outputs = run(matrix, row_amax, col_amax, rng, statistics, gamma, beta, stream, asked)
    made: list[Any] = [*outputs, None, row_amax, col_amax]
    row = col = None
    if rowwise is not None:
        row = Operand(rowwise, rows, cols, *[made[place] for place in layout[0]])
    if columnwise is not None:
        col = Operand(columnwise, cols, rows, *[made[place] for place in layout[1]])
    return row, col


@constant_when_traced
def _amax_draws(rowwise: str, columnwise: str) -> str:
    """The key of a side whose amax depends on random bits; empty if there is none."""
    return _drawn(rowwise, columnwise, True)


@cache
def _drawn(rowwise: str, columnwise: str, amax_alone: bool) -> str:
    """The key of a side whose cast draws random bits, or whose amax does if ``amax_alone``; empty if there is none."""
    for spec in (CastSpec.from_key(key) for key in (rowwise, columnwise) if key):
        read = spec.replace(rounding=RoundingMode.EVEN) if amax_alone else spec
        if read.is_stochastic:
            return spec.key
    return ""


Layout = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Where the data, the block scales and the outer amax of each side are, in a list of what a cast returns followed by
None and by the amax that was given for each side."""


@constant_when_traced
def _key_and_layout(row_missing: bool, col_missing: bool, no_draw: bool, *parts: Any) -> tuple[str, Layout | None]:
    """The key and the layout of a cast. ``parts`` are the fields of :class:`Asked`; Dynamo would lose a named tuple."""
    return _told(row_missing, col_missing, no_draw, *parts)


@cache
def _told(row_missing: bool, col_missing: bool, no_draw: bool, *parts: Any) -> tuple[str, Layout | None]:
    asked = Asked(*parts)
    return asked.key, _laid_out(asked, row_missing, col_missing, no_draw)


@cache
def _laid_out(asked: Asked, row_missing: bool, col_missing: bool, no_draw: bool) -> Layout | None:
    """Where a cast puts what it makes; None if it lacks an outer amax that has to be rounded, which :func:`amax` does.

    A cast returns the outer amax of each side if it was not given. There are two exceptions. Two sides that are scaled
    by the amax of the tensor itself, without block scales, share one amax, which the rowwise side returns. A scalar
    correction changes the amax, so the amax is then returned whether or not it was given.

    Raises:
        ValueError: the cast draws random bits, and there is no draw.
    """
    if no_draw and (drawing := _drawn(asked.rowwise, asked.columnwise, False)):
        raise ValueError(f"a stochastic cast needs rng=(seed, draw), got None (spec {drawing})")
    missing, nowhere, given = (row_missing, col_missing), -3, (-2, -1)
    specs = [CastSpec.from_key(key) if key else None for key, _ in asked.sides]
    shared = all(missing) and all(spec is not None and _has_amax_of_tensor(spec) for spec in specs)
    places, made = [], count()
    for side, (spec, (_, form)) in enumerate(zip(specs, asked.sides, strict=True)):
        if spec is None:
            places.append((nowhere, nowhere, nowhere))
            continue
        if missing[side] and not spec.block[1] and spec.scale_rule.is_power_of_two:
            return None
        data = next(made)
        scale_inv = next(made) if form == "codes" else nowhere
        if shared and side == 1:
            outer = places[0][2]
        else:
            outer = next(made) if missing[side] or spec.correction is Correction.SCALAR else given[side]
        places.append((data, scale_inv, outer))
    return places[0], places[1]


def _has_amax_of_tensor(spec: CastSpec) -> bool:
    """Whether the tensor's own amax, which the transposed tensor has as well, is a cast's only scale."""
    changed = spec.rotation is not None or spec.correction is not Correction.NONE
    return not (spec.block[1] or changed) and spec.outer is Outer.TENSOR


def as_it_is(x: Tensor) -> Tensor:
    """``x`` detached, and with PyTorch's lazy negation carried out, since kernels do not read the bit that marks it.

    Code that is traced leaves that to PyTorch, whose Inductor ignores the bit of a graph's inputs in every operation.
    """
    if torch.compiler.is_dynamo_compiling():
        return x.detach()
    if x.requires_grad and torch.is_grad_enabled():
        x = x.detach()
    return x.resolve_neg() if x.is_neg() else x


def amax(
    x: Tensor,
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    *,
    rng: Tensor | None = None,
    stream: int = 0,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """The outer amax of each side after its rotation, both in one read of x: the first of the two phases of a cast.

    Returns:
        FP32 [1], or one per row of the operand under row scaling; NaN where a NaN went in.

    Raises:
        ValueError: a cast rotates by fresh signs or corrects its scales, and ``rng`` is None.
    """
    x = as_it_is(x)
    run = _amax if is_plain(x) else torch.ops.fp4engine.amax
    row_key, col_key = "" if rowwise is None else rowwise.key, "" if columnwise is None else columnwise.key
    if rng is None and (drawing := _amax_draws(row_key, col_key)):
        raise ValueError(f"the amax of a cast that draws needs rng=(seed, draw), got None (spec {drawing})")
    tensors = iter(run(x, row_key, col_key, rng, stream, backend))
    return None if rowwise is None else next(tensors), None if columnwise is None else next(tensors)


def amax_shape(spec: CastSpec, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the outer amax of an operand [rows, cols]."""
    if spec.outer.is_by_rows:
        return (rows,)
    return (rows, spec.padded_cols(cols) // 128) if spec.outer is Outer.BLOCK128 else (1,)


def require_amax(
    name: str, amax: Tensor | None, spec: CastSpec | None, rows: int, cols: int, device: torch.device
) -> None:
    """Raise a ValueError unless ``amax``, if given, is an outer amax of an operand [rows, cols] cast by ``spec``."""
    if amax is None or spec is None:
        return
    shape = amax_shape(spec, rows, cols)
    if isinstance(amax, Tensor):
        if amax.dtype == torch.float32 and amax.shape == shape and amax.device == device:
            return
        got = f"{amax.dtype} {list(amax.shape)} on {amax.device}"
    else:
        got = repr(amax)
    raise ValueError(f"{name} must be torch.float32 {list(shape)} on {device}, got {got}")


@constant_when_traced
def _require_forms(rowwise: str, columnwise: str, rowwise_form: str, columnwise_form: str) -> None:
    """Raise a ValueError unless casts, given by their keys, can be written in these forms."""
    for name, key, form in (("rowwise", rowwise, rowwise_form), ("columnwise", columnwise, columnwise_form)):
        require_one_of(f"{name}_form", form, get_args(Form))
        if key and form == "values":
            spec = CastSpec.from_key(key)
            if not (spec.is_exact_in_bf16 or spec.is_exact_in_fp16):
                raise ValueError(f"{name}_form='values' needs values that are exact in 16 bits, got {spec!r}")


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec, cols: int, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """``element * block scale * (amax / numerator)`` rounded once to ``dtype``: [rows, cols]."""
    run = _dequantize if is_plain(codes) else torch.ops.fp4engine.dequantize
    return run(codes, scale_inv, amax, spec.key, cols, dtype, backend)[0]


@constant_when_traced
def transient_form(spec: str, device: torch.device, backend: str) -> Form:
    """The form of an operand that a GEMM reads at once and that is not kept, given the key of its spec.

    On GPUs without FP4 units the product reads decoded values, so the cast writes values.
    """
    return _transient_form(spec, device, backend)


@cache
def _transient_form(key: str, device: torch.device, backend: str) -> Form:
    if not key or backend == "reference" or not capability.triton_runs_on(device)[0]:
        return "codes"
    spec = CastSpec.from_key(key)
    multiplied = False
    if backend in ("auto", "native"):
        multiplied = capability.fp4_units(device)[0] or gemm_fp8.has_blocks(key, device)
    is_exact = spec.is_exact_in_bf16 or spec.is_exact_in_fp16
    return "values" if not multiplied and spec.block[1] and is_exact else "codes"


@cache
def casts_supported(rowwise: str, columnwise: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether kernels cover the casts of the sides that are asked for; if not, the first refusal."""
    for key in (rowwise, columnwise):
        if key:
            ok, reason = kernels().supports(CastSpec.from_key(key), dtype)
            if not ok:
                return False, reason
    return True, ""


@cache
def fused_casts_supported(key: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether kernels of a spec cast norms and activations that they compute, and rows of experts; if not, why."""
    return kernels().fuses(CastSpec.from_key(key), dtype)


@cache
def decode_supported(spec: str) -> tuple[bool, str]:
    """Whether the launch of a product can decode the codes of ``spec``; if not, they are decoded before that launch."""
    from fp4engine.kernels.dequantize import supports

    return supports(CastSpec.from_key(spec))


@cache
def kernels() -> ModuleType:
    """:mod:`fp4engine.kernels.casts`, imported when a kernel is first asked for: it brings Triton."""
    from fp4engine.kernels import casts

    return casts


def _sides(x: Tensor, rowwise: str, columnwise: str) -> list[tuple[int, Tensor, CastSpec]]:
    """``(side, operand, spec)`` of the sides that are asked for."""
    sides = []
    if rowwise:
        sides.append((0, x, CastSpec.from_key(rowwise)))
    if columnwise:
        sides.append((_COLUMNWISE, x.T, CastSpec.from_key(columnwise)))
    return sides


def _amax(x: Tensor, rowwise: str, columnwise: str, rng: Tensor | None, stream: int, backend: str) -> list[Tensor]:
    path = backends.choose("amax", x.device, backend, (rowwise, columnwise, x.dtype), casts_supported)
    sides = _sides(x, rowwise, columnwise)
    if path == "triton":
        amaxes = kernels().amaxes(x, (rowwise, columnwise), rng, stream)
        return [reference.round_outer_amax(value, spec) for value, (_, _, spec) in zip(amaxes, sides, strict=True)]
    return [reference.amax(operand, spec, rng, stream | side) for side, operand, spec in sides]


def _quantize(
    x: Tensor,
    rowwise_amax: Tensor | None,
    columnwise_amax: Tensor | None,
    rng: Tensor | None,
    statistics: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    stream: int,
    asked: str,
) -> list[Tensor]:
    question, given = Asked.from_key(asked), (rowwise_amax, columnwise_amax)
    covered = (question.rowwise, question.columnwise, question.dtype)
    if backends.choose("quantize", x.device, question.backend, covered, casts_supported) == "triton":
        inputs = (x, *given, rng, *((statistics, gamma, beta) if question.kind else ()))
        told = tuple([None if tensor is None else kernels().meta_of(tensor) for tensor in inputs])
        return kernels().resolve_cast(told, x.device, question, rowwise_amax is columnwise_amax, stream)(*inputs)
    assert not question.kind, "only kernels compute a function while they cast it"
    layout = _laid_out(question, rowwise_amax is None, columnwise_amax is None, rng is None)
    assert layout is not None, "quantize rounds an amax before it casts by it"
    outputs: list[Tensor] = []
    for side, operand, spec in _sides(x, question.rowwise, question.columnwise):
        data, scale_inv, amax = reference.quantize(operand, spec, amax=given[side], rng=rng, stream=stream | side)
        if question.sides[side][1] == "codes":
            outputs += [data, scale_inv]
        else:
            outputs.append(reference.decode(data, scale_inv, spec).to(spec.values_dtype))
        if layout[side][2] == len(outputs):
            outputs.append(amax)
    return outputs


def _dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor, spec: str, cols: int, dtype: torch.dtype, backend: str
) -> list[Tensor]:
    if backends.choose("dequantize", codes.device, backend, (), backends.always) == "triton":
        if decode_supported(spec)[0]:
            from fp4engine.kernels.dequantize import dequantize
        else:
            from fp4engine.kernels.block_decode import block_dequantize as dequantize

        return [dequantize(codes, scale_inv, amax, spec, cols, dtype)]
    return [reference.dequantize(codes, scale_inv, amax, CastSpec.from_key(spec), cols, dtype)]


def codes_outputs(spec: CastSpec, rows: int, cols: int) -> list[Output]:
    """Codes and block scales of an operand [rows, cols]."""
    width = spec.padded_cols(cols)
    codes = Output((rows, width * spec.element.storage_bits // 8), torch.uint8)
    return [codes, Output((rows, spec.num_blocks(width)), spec.scale.torch_dtype)]


def _amax_outputs(x: Tensor, rowwise: str, columnwise: str) -> list[Output]:
    sides = _sides(x, rowwise, columnwise)
    return [Output(amax_shape(spec, *operand.shape), torch.float32) for _, operand, spec in sides]


def _quantize_outputs(
    x: Tensor, rowwise_amax: Tensor | None, columnwise_amax: Tensor | None, rng: Tensor | None, asked: str
) -> list[Output]:
    question = Asked.from_key(asked)
    layout = _laid_out(question, rowwise_amax is None, columnwise_amax is None, rng is None)
    assert layout is not None, "quantize rounds an amax before it calls the operator"
    outputs: list[Output] = []
    rows, cols = x.shape[0], x.shape[1] // 2 if question.gated else x.shape[1]
    for (key, form), shape, (_, _, outer) in zip(question.sides, ((rows, cols), (cols, rows)), layout, strict=True):
        if not key:
            continue
        spec = CastSpec.from_key(key)
        if form == "values":
            outputs.append(Output((shape[0], spec.padded_cols(shape[1])), spec.values_dtype))
        else:
            outputs += codes_outputs(spec, *shape)
        if outer == len(outputs):
            outputs.append(Output(amax_shape(spec, *shape), torch.float32))
    return outputs


def _dequantize_outputs(codes: Tensor, spec: str, cols: int, dtype: torch.dtype) -> list[Output]:
    parsed = CastSpec.from_key(spec)
    return [Output((codes.shape[0], cols if parsed.rotation is None else parsed.padded_cols(cols)), dtype)]


define(_amax, _amax_outputs, any_strides=True)
define(_quantize, _quantize_outputs, any_strides=True)
define(_dequantize, _dequantize_outputs)
