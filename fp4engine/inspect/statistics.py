"""What is counted of a tensor, of an operand and of a product, in plain PyTorch on the tensor's device.

Everything is a sum, a maximum or a ranking, so that figures of several ranks merge into those of all of them. Nothing
here synchronises with the host. Legend: an operand is ``[rows, cols]``, its last axis is contracted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import E4M3, CastSpec
from fp4engine.reference import outer_factor, unpack
from fp4engine.tensor import Operand

RANKED = 4
"""How many blocks with the largest errors are kept."""

_NOT_SATURATED = 1 + 2.0**-10
"""A value that exceeds the largest element by less was scaled onto it; the FP32 rounding of its scale did the rest."""

OPERAND_SUMS = (
    "elements",
    "nonfinite",
    "zeros",
    "rounded_to_zero",
    "saturated",
    "signal",
    "error",
    "blocks",
    "scale_underflow",
    "scale_overflow",
    "scales",
    "log2_scale",
    "log2_scale_squared",
)
"""Entries of :func:`operand_figures`' sums, before the histograms of codes and of scale codes."""

OPERAND_MAXIMA = ("amax", "log2_scale_max", "minus_log2_scale_min")
TENSOR_SUMS = ("elements", "nonfinite", "squares")
PRODUCT_SUMS = ("elements", "signal", "error")
ROUNDING_SUMS = ("elements", "signal", "mean_error", "spread")


class Figures(NamedTuple):
    """The numbers of one row, on the device.

    Attributes:
        sums: float64, added over ranks.
        maxima: float64, of which ranks take the largest.
        ranked: float64 [RANKED or 0, 4], rows ``(row, col, error, signal)`` of blocks, largest error first.
    """

    sums: Tensor
    maxima: Tensor
    ranked: Tensor


def tensor_figures(matrix: Tensor) -> Figures:
    """``TENSOR_SUMS`` of a matrix [M, K], and its maxima: the largest magnitude of each of the K channels."""
    values = matrix.float()
    finite = values.isfinite()
    sums = [_count(values), (~finite).sum(), values.square().sum(dtype=torch.float64)]
    channels = torch.where(finite, values.abs(), 0.0).amax(0) if values.shape[0] else values.new_zeros(values.shape[1])
    return Figures(_vector(sums), channels.double(), _nothing_ranked(values))


def operand_figures(values: Tensor, operand: Operand) -> Figures:
    """``OPERAND_SUMS`` and histograms, ``OPERAND_MAXIMA``, and the worst blocks.

    Args:
        values: FP32 [rows, padded cols], what was quantized: rotated where the cast rotates.
        operand: packed codes, made of ``values``.
    """
    spec = operand.spec
    assert spec is not None and operand.amax is not None and operand.scale_inv is not None
    decoded = operand.dequantize(torch.float32)
    width = decoded.shape[1]
    values = values[:, :width]
    codes = (unpack(operand.codes) if spec.element.storage_bits == 4 else operand.codes)[:, :width]
    magnitude = codes & ((1 << (spec.element.bits - 1)) - 1)
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    decoded = torch.where(decoded.isfinite(), decoded, 0.0)
    largest = int((1 << (spec.element.bits - 1)) - 1) if spec.element.bits == 4 else None
    beyond = values.abs() > decoded.abs() * _NOT_SATURATED
    at_most = decoded.abs() >= _largest(operand, spec, width) if largest is None else magnitude == largest
    error, signal = _per_block((values - decoded).square(), spec), _per_block(values.square(), spec)
    scales, block_amax, factor = _blocks(values, operand, spec)
    nonzero = scales > 0
    log2 = torch.where(nonzero & scales.isfinite(), scales, 1.0).log2().double()
    bound = spec.scale_bound if spec.scale == E4M3 else spec.scale.max_value
    sums = [
        _count(values),
        (~finite).sum(),
        (values == 0).sum(),
        ((decoded == 0) & (values != 0)).sum(),  # its code is not zero where the block's scale is
        (at_most & beyond & (decoded != 0)).sum(),
        signal.sum(dtype=torch.float64),
        error.sum(dtype=torch.float64),
        _count(scales),
        ((scales == 0) & (block_amax > 0)).sum(),
        ((scales >= bound) & (block_amax > spec.element.max_value * 17 / 16 * scales * factor)).sum(),
        nonzero.sum(),
        log2.sum(),
        log2.square().sum(),
    ]
    none = log2.new_full((1,), float("-inf"))
    maxima = [
        torch.where(operand.amax.isfinite(), operand.amax, 0.0).double().amax(),
        torch.cat([none, torch.where(nonzero, log2, float("-inf")).flatten()]).amax(),
        torch.cat([none, torch.where(nonzero, -log2, float("-inf")).flatten()]).amax(),
    ]
    histograms = [torch.bincount(codes.flatten().int(), minlength=1 << spec.element.bits)]
    if scales.numel() and spec.scale.storage_bits == 8 and spec.scale.bits == 8:
        stored = operand.scale_inv[:: max(spec.block[0], 1)].contiguous().view(torch.uint8)
        histograms.append(torch.bincount(stored.flatten().int(), minlength=256))
    return Figures(
        torch.cat([_vector(sums), *(histogram.double() for histogram in histograms)]),
        _vector(maxima),
        _worst(error, signal, spec),
    )


def product_figures(left: Tensor, right: Tensor, left_decoded: Tensor, right_decoded: Tensor) -> Figures:
    """``PRODUCT_SUMS`` of ``left_decoded @ right_decoded.T`` against ``left @ right.T``, all FP32, in FP32."""
    with torch.autocast(left.device.type, enabled=False):
        exact = left @ right.T
        error = left_decoded @ right_decoded.T - exact
    sums = [_count(exact), exact.square().sum(dtype=torch.float64), error.square().sum(dtype=torch.float64)]
    return Figures(_vector(sums), exact.new_zeros(0, dtype=torch.float64), _nothing_ranked(exact))


def rounding_figures(values: Tensor, decoded: list[Tensor]) -> Figures:
    """``ROUNDING_SUMS`` over n draws: of ``|mean - x|^2`` and of ``sum |x_i - mean|^2 / (n (n - 1))``.

    The first expects ``|bias|^2`` plus the second, so their difference estimates the squared bias without one.
    """
    count = len(decoded)
    mean = sum(decoded[1:], decoded[0]) / count
    spread = sum(((draw - mean).square().sum(dtype=torch.float64) for draw in decoded), mean.new_zeros(()).double())
    error = (mean - values).square().sum(dtype=torch.float64)
    sums = [_count(values), values.square().sum(dtype=torch.float64), error, spread / (count * (count - 1))]
    return Figures(_vector(sums), mean.new_zeros(0, dtype=torch.float64), _nothing_ranked(mean))


def _count(tensor: Tensor) -> Tensor:
    return torch.full((), tensor.numel(), dtype=torch.float64, device=tensor.device)


def _vector(entries: list[Tensor]) -> Tensor:
    return torch.stack([entry.double() for entry in entries])


def _nothing_ranked(like: Tensor) -> Tensor:
    return torch.zeros((0, 4), dtype=torch.float64, device=like.device)


def _largest(operand: Operand, spec: CastSpec, width: int) -> Tensor:
    """What the largest element decodes to, per element: FP32, broadcastable against [rows, width]."""
    assert operand.amax is not None and operand.scale_inv is not None
    factor = outer_factor(operand.amax, spec) * spec.element.max_value * (1 - 2.0**-10)
    if not spec.block[1]:
        return factor
    return operand.scale_inv.float().repeat_interleave(spec.block[1], 1)[:, :width] * factor


def _extent(spec: CastSpec) -> tuple[int, int]:
    """``(rows, cols)`` of what is called a block; 1x16 where the cast has no block scales."""
    rows, cols = spec.block
    return max(rows, 1), cols or 16


def _per_block(squares: Tensor, spec: CastSpec) -> Tensor:
    """Sums of ``squares`` [rows, cols] over blocks."""
    height, width = _extent(spec)
    rows, cols = squares.shape
    padded = torch.nn.functional.pad(squares, (0, -cols % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).sum((1, 3))


def _blocks(values: Tensor, operand: Operand, spec: CastSpec) -> tuple[Tensor, Tensor, Tensor]:
    """``(block scale, block amax, outer factor)``, FP32, one entry per block; empty without block scales."""
    assert operand.scale_inv is not None and operand.amax is not None
    height, width = spec.block
    if not width:
        nothing = values.new_zeros((0, 0))
        return nothing, nothing, nothing
    scales = operand.scale_inv[::height].float()
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, scales.shape[1] * width - cols, 0, -rows % height))
    amax = padded.view(padded.shape[0] // height, height, scales.shape[1], width).amax((1, 3))
    factor = outer_factor(operand.amax, spec)
    if factor.ndim == 2 and factor.shape[1] > 1:
        factor = factor[:, ::width]
    if factor.ndim == 2 and factor.shape[0] > 1:
        factor = factor[::height]
    return scales, amax, factor.broadcast_to(scales.shape)


def _worst(error: Tensor, signal: Tensor, spec: CastSpec) -> Tensor:
    height, width = _extent(spec)
    count = min(RANKED, error.numel())
    values, places = error.flatten().topk(count)
    row, col = places // max(error.shape[1], 1) * height, places % max(error.shape[1], 1) * width
    found = torch.stack([row.double(), col.double(), values.double(), signal.flatten()[places].double()], 1)
    return torch.nn.functional.pad(found, (0, 0, 0, RANKED - count))
