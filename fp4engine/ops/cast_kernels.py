"""From specs to Triton kernels: which kernel casts a side, and both sides in as few reads of x as they allow."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec

Pair = tuple[CastSpec | None, CastSpec | None]
"""Specs of the rowwise and the columnwise side; None for a side that is not asked for."""

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
    casts: list[tuple[Tensor, Tensor | None, Tensor] | None] = [None, None]
    for family, run in ((True, _cast_fp8), (False, _cast_fp4)):
        rowwise, columnwise = (spec if spec is not None and _is_fp8(spec) == family else None for spec in specs)
        chosen = rowwise, columnwise
        if any(spec is not None for spec in chosen):
            for side, (data, scale_inv) in enumerate(run(x, chosen, forms, amaxes, rng, stream)):
                value = amaxes[side]
                if data is not None and value is not None:
                    casts[side] = data, scale_inv, value
    return casts


def _is_fp8(spec: CastSpec) -> bool:
    return not spec.block[1]


def _cast_fp4(
    x: Tensor,
    specs: Pair,
    forms: tuple[str, str],
    amaxes: list[Tensor | None],
    rng: Tensor | None,
    stream: int,
) -> list[tuple[Tensor | None, Tensor | None]]:
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
    return [(row, row_scale), (col, col_scale)]


def _cast_fp8(
    x: Tensor,
    specs: Pair,
    forms: tuple[str, str],
    amaxes: list[Tensor | None],
    rng: Tensor | None,
    stream: int,
) -> list[tuple[Tensor | None, Tensor | None]]:
    amax = amaxes[1] if specs[0] is None else amaxes[0]
    assert amax is not None
    if specs[0] is not None and specs[1] is not None and amaxes[1] is not amax:
        (row, _), (_, col) = (
            _cast_fp8(x, half, forms, amaxes, rng, stream) for half in ((specs[0], None), (None, specs[1]))
        )
        return [row, col]
    return [
        (
            codes,
            None if codes is None or spec is None else codes.new_empty((len(codes), 0), dtype=spec.scale.torch_dtype),
        )
        for codes, spec in zip(_fp8().cast_fp8(x, amax, *specs), specs, strict=True)
    ]
