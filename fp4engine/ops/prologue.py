"""Functions of a cast's input that its kernels compute: norms while they read, activations with their amaxes.

Kernels on plain tensors only; everything else takes the unfused composition, see :func:`fuses`. Legend: x is [M, K], or
[M, 2K] under a gated activation, with unit stride along the rows.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.kernels.source import Source
from fp4engine.ops.backend import record

Specs = tuple[CastSpec, CastSpec | None]
"""Casts of the rowwise and the columnwise side."""

Amaxes = tuple[Tensor | None, Tensor | None]
"""Outer amax of the rowwise and the columnwise side; None for a side that is not asked for."""


def fuses(tensors: Sequence[Tensor], specs: tuple[CastSpec, CastSpec], dtype: torch.dtype, backend: str) -> bool:
    """Whether kernels cast a function of ``tensors``, rounded to ``dtype``, by ``specs``.

    Args:
        tensors: x [..., K], then parameters [K] of the function.
    """
    x = tensors[0]
    # Rounding to x's own dtype before is a second rounding unless that is FP32.
    if torch.compiler.is_compiling() or x.ndim == 0 or x.dtype not in (dtype, torch.float32):
        return False
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.stride(-1) != 1 or t.device != x.device for t in tensors):
        return False
    exact = all(t.dtype in (torch.bfloat16, torch.float16, torch.float32) for t in tensors)
    return exact and _covered(x.device, specs, dtype, backend)


@cache
def _covered(device: torch.device, specs: tuple[CastSpec, CastSpec], dtype: torch.dtype, backend: str) -> bool:
    if backend == "reference" or not capability.triton_runs_on(device)[0]:
        return False
    from fp4engine.kernels.quantize import supports

    return all(supports(spec, dtype)[0] for spec in specs)


def row_statistics(x: Tensor, eps: float, centered: bool) -> Tensor:
    """``1 / sigma`` and, if ``centered``, the mean of each row: FP32 [2, M]; see :mod:`fp4engine.reference.norm`."""
    from fp4engine.kernels.norm import row_statistics

    record("row_statistics", "triton")
    return row_statistics(x, eps, centered)


def normalized(x: Tensor, statistics: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype) -> Source:
    """A LayerNorm of x, or an RMSNorm if there is no ``beta``, as :func:`quantize` and :func:`amax` read it."""
    from fp4engine.kernels.load import Prologue

    kind = "RMSNorm" if beta is None else "LayerNorm"
    return Source(x, dtype, Prologue.of(kind, dtype), statistics, gamma, beta)


def activate(x: Tensor, kind: str, gated: bool, dtype: torch.dtype, specs: Specs) -> tuple[Tensor, Amaxes]:
    """``f(x)`` [M, K] rounded to ``dtype`` and its outer amaxes, in one pass.

    Args:
        kind: see :mod:`fp4engine.kernels.activation`.
    """
    from fp4engine.kernels.amax import amax
    from fp4engine.kernels.load import Prologue

    record("activate", "triton")
    source = Source(x, dtype, Prologue.of(kind, dtype, gated))
    y = torch.empty(source.shape, dtype=dtype, device=x.device)
    return y, amax(source, *specs, out=y)


def activation_backward(grad: Tensor, x: Tensor, kind: str, gated: bool) -> Tensor:
    """Gradient of x from that of :func:`activate`'s result [M, K]."""
    from fp4engine.kernels.activation import activation_backward

    record("activation_backward", "triton")
    return activation_backward(grad, x, kind, gated)
