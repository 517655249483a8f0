"""Statistics of tensors, operands and products, computed on the tensor's device.

All of them are sums, maxima or rankings, so the figures of several ranks can be merged. Nothing here synchronises with
the host. :mod:`fp4engine.kernels.figures` computes the same in one read of each tensor, and for several tensors and
operands in one launch. Legend: an operand is ``[rows, cols]``, its last axis is contracted.
"""

import math
from collections.abc import Sequence
from functools import cache
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Correction, ElementFormat, Outer
from fp4engine.ops import backend
from fp4engine.reference import outer_factor, unpack
from fp4engine.reference.cast import prepare
from fp4engine.reference.scaling import from_stored
from fp4engine.tensor import Operand

RANKED = 4
"""How many blocks with the largest errors are kept."""

_NOT_SATURATED = 1 + 2.0**-10
"""A value counts as saturated if it exceeds the largest element by this factor: less is FP32 rounding of its scale."""

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
"""Entries of an operand's sums, before the histograms of codes and of scale codes."""

OPERAND_MAXIMA = ("amax", "log2_scale_max", "minus_log2_scale_min")
TENSOR_SUMS = ("nonfinite", "squares")
PRODUCT_SUMS = ("signal", "error")
ROUNDING_SUMS = ("signal", "mean_error", "spread")


class Size(NamedTuple):
    """How many numbers a row has: sums, maxima, and blocks with the largest errors."""

    sums: int
    maxima: int = 0
    ranked: int = 0


class Figures(NamedTuple):
    """The numbers of one or several rows, concatenated, on the device.

    Attributes:
        numbers: float64; for each row sums, which are added over ranks, and then ``ranked`` blocks ``(row, col, error,
            signal)``, largest error first.
        maxima: float64, whose maximum over ranks is taken; None where no row has any.
        sizes: of the rows, in their order.
    """

    numbers: Tensor
    maxima: Tensor | None
    sizes: tuple[Size, ...]

    @staticmethod
    def of(sums: Tensor, maxima: Tensor | None = None, ranked: Tensor | None = None) -> "Figures":
        """The figures of one row."""
        size = Size(sums.numel(), 0 if maxima is None else maxima.numel(), 0 if ranked is None else ranked.shape[0])
        return Figures(sums if ranked is None else torch.cat([sums, ranked.flatten()]), maxima, (size,))

    @staticmethod
    def joined(several: "Sequence[Figures]") -> "Figures":
        """Several figures as one, with the rows of all."""
        maxima = [figures.maxima for figures in several if figures.maxima is not None]
        sizes = tuple(size for figures in several for size in figures.sizes)
        numbers = torch.cat([figures.numbers for figures in several])
        return Figures(numbers, torch.cat(maxima) if maxima else None, sizes)

    def among_channels(self, row: int, first: int, count: int) -> "Figures":
        """The same with the maxima of ``row`` put at ``first`` among ``count`` channels, zeros elsewhere."""
        assert self.maxima is not None
        parts = list(self.maxima.split([size.maxima for size in self.sizes]))
        parts[row] = torch.nn.functional.pad(parts[row], (first, count - first - parts[row].numel()))
        sizes = [size._replace(maxima=part.numel()) for size, part in zip(self.sizes, parts, strict=True)]
        return self._replace(maxima=torch.cat(parts), sizes=tuple(sizes))


class Counted(NamedTuple):
    """An operand to be counted.

    Attributes:
        source: [rows, cols], any strides: the matrix that was cast.
        operand: the operand that it became.
        rng, stream: of the cast.
    """

    source: Tensor
    operand: Operand
    rng: Tensor | None
    stream: int


def figures_of(tensors: Sequence[Tensor], operands: Sequence[Counted], path: str = "auto") -> Figures:
    """A row for each matrix [M, K] of ``tensors``, and then one for each operand; at least one in all.

    The row of a tensor has ``TENSOR_SUMS`` and, as maxima, the largest finite magnitude of each of its K channels. That
    of an operand has ``OPERAND_SUMS``, histograms of codes and of scales that are bytes, ``OPERAND_MAXIMA`` and the
    worst blocks. The host computes what follows from the histogram of scales, see :func:`scale_spread_of_bytes`. A
    block with values or decoded values that are not finite adds nothing to signal and error.

    Args:
        path: a backend, see :func:`fp4engine.ops.backend.choose`.
    """
    paths = [
        backend.choose("figures", matrix.device, path, (matrix.dtype, matrix.numel()), _kernel_reads)
        for matrix in tensors
    ]
    for source, operand, *_ in operands:
        assert operand.spec is not None
        question = (operand.spec.key, source.dtype, operand.rows)
        paths.append(backend.choose("figures", source.device, path, question, _kernel_supports))
    if "reference" not in paths:
        return _by_kernels(tensors, operands)
    kernels = [path == "triton" for path in paths]
    parts = [
        _by_kernels([matrix], []) if by_kernel else _tensor_figures(matrix)
        for matrix, by_kernel in zip(tensors, kernels, strict=False)
    ]
    parts += [
        _by_kernels([], [counted]) if by_kernel else _operand_figures(counted)
        for counted, by_kernel in zip(operands, kernels[len(tensors) :], strict=True)
    ]
    return Figures.joined(parts)


def _kernel_reads(dtype: torch.dtype, elements: int) -> tuple[bool, str]:
    return dtype != torch.float64 and elements > 0, f"figures of {elements} elements in {dtype} have no kernel"


def _kernel_supports(key: str, dtype: torch.dtype, rows: int) -> tuple[bool, str]:
    from fp4engine.kernels.figures import supports

    return supports(CastSpec.from_key(key), dtype, rows)


def _by_kernels(tensors: Sequence[Tensor], operands: Sequence[Counted]) -> Figures:
    from fp4engine.kernels import figures

    sizes = [Size(len(TENSOR_SUMS), matrix.shape[1]) for matrix in tensors]
    asked: list[figures.Counted] = []
    for source, operand, rng, stream in operands:
        spec, _, _, codes, scale_inv, amax = operand
        assert spec is not None
        drawn = rng if spec.rotation is not None and spec.rotation.signs.is_fresh else None
        asked.append(figures.Counted(source, drawn, codes, scale_inv, amax, spec.key, stream))
        scales = 256 if spec.block[1] else 0
        sizes.append(Size(len(OPERAND_SUMS) + (1 << spec.element.bits) + scales, len(OPERAND_MAXIMA), RANKED))
    numbers, maxima = figures.figures(tensors, asked)
    return Figures(numbers, maxima, tuple(sizes))


def _tensor_figures(matrix: Tensor) -> Figures:
    """The row of a tensor, in plain PyTorch."""
    finite = matrix.nan_to_num(0.0, 0.0, 0.0)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    squares = torch.linalg.vector_norm(finite, dim=1, dtype=wide).double().square()
    none = matrix.new_zeros(matrix.shape[1])
    largest = torch.linalg.vector_norm(finite, float("inf"), 0) if matrix.shape[0] else none
    return Figures.of(_vector([(finite != matrix).sum(), squares.sum()]), largest.double())


def _operand_figures(counted: Counted) -> Figures:
    """The row of an operand, in plain PyTorch."""
    source, operand, rng, stream = counted
    spec = operand.spec
    assert spec is not None and operand.amax is not None and operand.scale_inv is not None
    values = prepare(source, spec, rng, stream)
    decoded = operand.dequantize(torch.float32)  # [rows, cols], or [rows, padded cols] if rotated
    rows, width = decoded.shape
    if missing := values.shape[1] - width:
        decoded = torch.nn.functional.pad(decoded, (0, missing))
    signal, error = _squares(values, spec), _squares(decoded - values, spec)
    is_finite = signal.isfinite() & error.isfinite()
    signal, error = torch.where(is_finite, signal, 0.0), torch.where(is_finite, error, 0.0)
    nonzero, decoded_nonzero = _nonzero(values), _nonzero(decoded)
    limit = _limit(operand, spec)
    none = torch.zeros((), dtype=torch.float64, device=values.device)
    sums = [
        none + rows * width,
        _nonzero(values - values),
        rows * width - nonzero,
        nonzero - decoded_nonzero,  # a zero stays one
        _saturated(values, decoded, limit, spec),
        signal.sum(dtype=torch.float64),
        error.sum(dtype=torch.float64),
    ]
    scales, block_amax = operand.scale_inv[:: max(spec.block[0], 1)], _block_amax(values, spec)
    histograms = [_code_histogram(operand, spec, width)]
    spread = none.new_full((2,), float("-inf"))
    if not scales.numel():
        sums += [none] * (len(OPERAND_SUMS) - len(sums))
    else:
        bound = spec.largest_scale
        stored = from_stored(scales, spec.scale).abs()
        underflow = ((stored == 0) & (block_amax > 0)).sum()
        overflow = (stored >= bound) & (block_amax > limit[:: max(spec.block[0], 1)] * (17 / 16))
        sums += [none + scales.numel(), underflow, overflow.sum()]
        if scales.element_size() == 1:  # the host makes the rest of the histogram
            histograms.append(_histogram(scales.contiguous().view(torch.uint8)))
            sums += [none] * 3
        else:
            scale_sums, spread = scale_spread(stored)
            sums += scale_sums
    amax = torch.where(operand.amax.isfinite(), operand.amax, 0.0).double().amax()
    return Figures.of(
        torch.cat([_vector(sums), *(histogram.double() for histogram in histograms)]),
        torch.cat([amax[None], spread]),
        _worst(error, signal, spec),
    )


def product_figures(
    sources: Sequence[Tensor], operands: Sequence[Operand], chosen: Tensor | None = None, groups: Sequence[Any] = ()
) -> Figures:
    """``PRODUCT_SUMS``: the product of two operands against the product of their uncast matrices, summed in FP32.

    Args:
        sources: the matrices, left and right: [rows, cols], any strides.
        operands: the operands that they became; a matrix without a cast is an operand as well.
        chosen: int64, which rows of the left one are multiplied; None is all of them.
        groups: process groups whose ranks hold parts of the contracted axis, so that the product is the sum of theirs.
    """
    left, left_operand = sources[0], operands[0]
    if chosen is not None:
        left, left_operand = left[chosen], _chosen(left_operand, chosen)
    both = torch.stack(product_error((left, sources[1]), (left_operand, operands[1])))
    for group in groups:
        dist.all_reduce(both, group=group)
    return Figures.of(torch.linalg.vector_norm(both, dim=(1, 2), dtype=torch.float64).square())


def product_error(sources: Sequence[Tensor], operands: Sequence[Operand]) -> tuple[Tensor, Tensor]:
    """FP32 [rows, cols]: the product of two matrices, and what the product of their operands differs by."""
    exact = _product(*sources)
    return exact, _quantized_product(*operands).sub_(exact)


def _chosen(operand: Operand, rows: Tensor) -> Operand:
    """Some rows of an operand."""
    scale_inv, amax = operand.scale_inv, operand.amax
    if scale_inv is not None:
        scale_inv = (
            scale_inv.view(torch.uint8).index_select(0, rows).view(scale_inv.dtype)
            if scale_inv.element_size() == 1
            else scale_inv.index_select(0, rows)
        )
    if operand.spec is not None and operand.spec.outer not in (Outer.TENSOR, Outer.NONE):
        assert amax is not None
        amax = amax.index_select(0, rows)
    return operand._replace(rows=rows.numel(), data=operand.data.index_select(0, rows), scale_inv=scale_inv, amax=amax)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """FP32 ``left @ right.T``; on a GPU 16-bit values go to tensor cores, which multiply them exactly."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right.T, out_dtype=torch.float32)
    return left.float() @ right.float().T


def _quantized_product(left: Operand, right: Operand) -> Tensor:
    """FP32 product of two operands: by the kernels that the step itself uses, unless these round sums."""
    if all(
        side.spec is not None and side.spec.element.storage_bits == 4 and side.spec.is_exact_in_bf16
        for side in (left, right)
    ):
        return ops.gemm(left, right, out_dtype=torch.float32)
    first, second = (side.dequantize(torch.float32) for side in (left, right))
    width = min(first.shape[1], second.shape[1])
    return first[:, :width] @ second[:, :width].T


def rounding_figures(values: Tensor, decoded: list[Tensor]) -> Figures:
    """``ROUNDING_SUMS`` over n draws: ``|x|^2``, ``|mean - x|^2`` and ``sum |x_i - mean|^2 / (n (n - 1))``.

    The second has the expected value ``|bias|^2`` plus the expected value of the third, so the second minus the third
    is an unbiased estimate of ``|bias|^2``.
    """
    count, values = len(decoded), values.float()
    mean = sum(decoded[1:], decoded[0]) / count
    spread = sum(((draw - mean).square().sum(dtype=torch.float64) for draw in decoded), mean.new_zeros(()).double())
    error = (mean - values).square().sum(dtype=torch.float64)
    sums = [values.square().sum(dtype=torch.float64), error, spread / (count * (count - 1))]
    return Figures.of(_vector(sums))


def scale_spread(scales: Tensor) -> tuple[list[Tensor], Tensor]:
    """``scales``, ``log2_scale`` and ``log2_scale_squared`` over nonzero FP32 scales, and the two maxima."""
    there = scales > 0
    log2 = torch.where(scales.isfinite() & there, scales, 1.0).log2().double()
    weight = there.double()
    sums = [weight.sum(), (log2 * weight).sum(), (log2.square() * weight).sum()]
    nothing = float("-inf")
    maxima = torch.stack([torch.where(there, log2, nothing).amax(), torch.where(there, -log2, nothing).amax()])
    return sums, maxima


def scale_spread_of_bytes(
    codes: Sequence[int], times: Sequence[float], scale: ElementFormat
) -> tuple[list[float], list[float]]:
    """:func:`scale_spread` on the host, of scales that a byte holds, from the bytes that occur and how often."""
    log2 = _log2_of_bytes(scale)
    found = [(log2[code], count) for code, count in zip(codes, times, strict=True) if code in log2]
    if not found:
        return [0.0, 0.0, 0.0], [-math.inf, -math.inf]
    values, counts = zip(*found, strict=True)
    squares = map(mul, values, values)
    sums = [sum(counts, 0.0), sum(map(mul, counts, values)), sum(map(mul, counts, squares))]
    return sums, [max(values), -min(values)]


@cache
def _log2_of_bytes(scale: ElementFormat) -> dict[int, float]:
    """``byte -> log2 of its magnitude``, unless that is zero; a value that is not finite counts as 1."""
    values = from_stored(torch.arange(256, dtype=torch.uint8).view(scale.torch_dtype), scale).abs().double().tolist()
    return {code: math.log2(value) if math.isfinite(value) else 0.0 for code, value in enumerate(values) if value > 0}


def _vector(entries: list[Tensor]) -> Tensor:
    return torch.stack([entry.double() for entry in entries])


def _extent(spec: CastSpec) -> tuple[int, int]:
    """``(rows, cols)`` of a block; 1x16 where the cast has no block scales."""
    rows, cols = spec.block
    return max(rows, 1), cols or 16


def _in_blocks(matrix: Tensor, spec: CastSpec) -> Tensor:
    """``matrix`` [rows, padded cols] as [tiles, height, blocks, width]; a copy only if rows are missing."""
    height, width = _extent(spec)
    rows, cols = matrix.shape
    if missing := -rows % height:
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, missing))
    return matrix.view(-(-rows // height), height, cols // width, width)


def _squares(matrix: Tensor, spec: CastSpec) -> Tensor:
    """Sums of squares over blocks: FP32 [tiles, blocks]."""
    return torch.linalg.vector_norm(_in_blocks(matrix, spec), dim=(1, 3), dtype=torch.float32).square_()


def _block_amax(matrix: Tensor, spec: CastSpec) -> Tensor:
    return torch.linalg.vector_norm(_in_blocks(matrix, spec), float("inf"), dim=(1, 3))


def _nonzero(matrix: Tensor) -> Tensor:
    """How many elements are not zero, FP64; exact, since a row has less than 2^24."""
    return torch.linalg.vector_norm(matrix, 0, dim=1, dtype=torch.float32).sum(dtype=torch.float64)


def _limit(operand: Operand, spec: CastSpec) -> Tensor:
    """The decoded value of the largest element: FP32 [rows, blocks], or [rows | 1, 1] without block scales."""
    assert operand.amax is not None and operand.scale_inv is not None
    factor = outer_factor(operand.amax, spec)
    if not spec.block[1]:
        return factor * spec.element.max_value
    if factor.shape[1] > 1:
        factor = factor[:, :: spec.block[1]]
    return from_stored(operand.scale_inv, spec.scale).abs() * spec.element.max_value * factor


def _saturated(values: Tensor, decoded: Tensor, limit: Tensor, spec: CastSpec) -> Tensor:
    """How many elements were larger than the largest that can be stored; blocks whose scale is zero have none."""
    rows, cols = values.shape
    shape, limit = (rows, limit.shape[1], cols // limit.shape[1]), limit[..., None]
    beyond = values.abs().view(shape) > torch.where(limit > 0, limit * _NOT_SATURATED, float("inf"))
    if spec.correction is not Correction.NONE:  # the scale that elements met is not the one that was stored
        beyond &= decoded.abs().view(shape) >= limit * (1 - 2.0**-10)
    return beyond.sum()


def _code_histogram(operand: Operand, spec: CastSpec, width: int) -> Tensor:
    """How often each code of the first ``width`` columns occurs."""
    codes = unpack(operand.codes) if spec.element.storage_bits == 4 else operand.codes
    return _histogram(codes[:, :width])[: 1 << spec.element.bits]


def _histogram(codes: Tensor) -> Tensor:
    """How often each of 256 bytes occurs."""
    if codes.is_cuda and not torch.are_deterministic_algorithms_enabled():  # bincount waits for the largest
        return torch.histc(codes.reshape(-1).int(), 256, 0, 256)
    return torch.bincount(codes.reshape(-1), minlength=256)


def _worst(error: Tensor, signal: Tensor, spec: CastSpec) -> Tensor:
    """The blocks with the largest errors, which are looked for in the rows of blocks whose largest errors lead."""
    height, width = _extent(spec)
    if not error.numel():
        return error.new_zeros((RANKED, 4), dtype=torch.float64)
    tiles = error.amax(1).topk(min(RANKED, error.shape[0])).indices
    few = error[tiles]
    values, places = few.flatten().topk(min(RANKED, few.numel()))
    row, col = tiles[places // error.shape[1]], places % error.shape[1]
    parts = [row * height, col * width, values, signal[row, col]]
    found = torch.stack([part.double() for part in parts], 1)
    return torch.nn.functional.pad(found, (0, 0, 0, RANKED - found.shape[0]))
