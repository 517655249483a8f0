"""From specs to Triton kernels: which kernel casts a side, and both sides in as few reads of x as they allow."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec

Pair = tuple[CastSpec | None, CastSpec | None]
"""Specs of the rowwise and the columnwise side; None for a side that is not asked for."""

Half = tuple[Tensor | None, Tensor | None]
"""Data and block scales of one side, or None twice."""

Halves = tuple[Half, Half]
_NOTHING: Halves = ((None, None), (None, None))

_PLAIN = CastSpec()
"""Its amax is that of the tensor itself."""


@cache
def _fp4() -> ModuleType:
    from fp4engine.kernels import quantize

    return quantize


@cache
def _fp8() -> ModuleType:
    from fp4engine.kernels import cast_fp8

    return cast_fp8


def supports(specs: Pair, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether kernels cover the sides asked for; if not, the first refusal."""
    for spec in specs:
        if spec is not None:
            ok, reason = (_fp8() if _is_fp8(spec) else _fp4()).supports(spec, dtype)
            if not ok:
                return ok, reason
    return True, ""


def amax(x: Tensor, specs: Pair) -> list[Tensor | None]:
    """Outer amax of each side, in one read of x."""
    from fp4engine.kernels.amax import amax

    rowwise, columnwise = (_PLAIN if spec is not None and _is_fp8(spec) else spec for spec in specs)
    if rowwise is _PLAIN and columnwise is _PLAIN:
        largest = amax(x, _PLAIN, None)[0]
        own = (largest, largest)
    else:
        own = amax(x, rowwise, columnwise)
    return [
        reference.round_outer_amax(value, spec) if value is not None and spec is not None else None
        for value, spec in zip(own, specs, strict=True)
    ]


def cast(
    x: Tensor,
    specs: Pair,
    forms: tuple[str, str],
    given: tuple[Tensor | None, Tensor | None],
    rng: Tensor | None,
    stream: int,
) -> list[tuple[Tensor, Tensor | None, Tensor] | None]:
    """``(data, scale_inv, amax)`` per side; outer amaxes that are not given cost one read of x for both sides."""
    amaxes = list(given)
    missing = (specs[0] if given[0] is None else None, specs[1] if given[1] is None else None)
    if any(spec is not None for spec in missing):
        amaxes = [ours if value is None else value for value, ours in zip(given, amax(x, missing), strict=True)]
    fp8 = _cast_fp8(x, _only(specs, fp8=True), amaxes)
    fp4 = _cast_fp4(x, _only(specs, fp8=False), forms, amaxes, rng, stream)
    casts: list[tuple[Tensor, Tensor | None, Tensor] | None] = []
    for amax_of_side, (data, scale_inv), (fp4_data, fp4_scale_inv) in zip(amaxes, fp8, fp4, strict=True):
        if data is None:
            data, scale_inv = fp4_data, fp4_scale_inv
        casts.append(None if data is None or amax_of_side is None else (data, scale_inv, amax_of_side))
    return casts


def _is_fp8(spec: CastSpec) -> bool:
    return not spec.block[1]


def _only(specs: Pair, fp8: bool) -> Pair:
    """The specs of one family of kernels."""
    rowwise, columnwise = (spec if spec is not None and _is_fp8(spec) == fp8 else None for spec in specs)
    return rowwise, columnwise


def _cast_fp4(
    x: Tensor, specs: Pair, forms: tuple[str, str], amaxes: list[Tensor | None], rng: Tensor | None, stream: int
) -> Halves:
    if specs == (None, None):
        return _NOTHING
    row, row_scale, col, col_scale = _fp4().quantize(
        x,
        *specs,
        rowwise_amax=amaxes[0],
        columnwise_amax=amaxes[1],
        rng=rng,
        stream=stream,
        rowwise_output=forms[0],
        columnwise_output=forms[1],
    )
    return (row, row_scale), (col, col_scale)


def _cast_fp8(x: Tensor, specs: Pair, amaxes: list[Tensor | None]) -> Halves:
    rowwise, columnwise = specs
    if rowwise is not None and columnwise is not None and amaxes[0] is not amaxes[1]:
        return _cast_fp8(x, (rowwise, None), amaxes)[0], _cast_fp8(x, (None, columnwise), amaxes)[1]
    if rowwise is None and columnwise is None:
        return _NOTHING
    row, col = _fp8().cast_fp8(x, amaxes[1] if rowwise is None else amaxes[0], rowwise, columnwise)
    return (row, _no_scales(row, rowwise)), (col, _no_scales(col, columnwise))


def _no_scales(codes: Tensor | None, spec: CastSpec | None) -> Tensor | None:
    """What stands for block scales without blocks: [rows, 0]."""
    if codes is None or spec is None:
        return None
    return codes.new_empty((len(codes), 0), dtype=spec.scale.torch_dtype)
