"""How TransformerEngine lays out codes and block scales, and how fp4engine's operands have them.

Legend: M rows and K columns of the matrix of a tensor [..., K]. An operand is [rows, cols], where cols is contracted:
[M, K] rowwise and [K, M] columnwise.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.formats import CastSpec
from fp4engine.ops.checksum import Seal, compare, digest, in_bytes
from fp4engine.ops.operation import is_plain
from fp4engine.reference import swizzle_scales
from fp4engine.reference.swizzle import unswizzle_scales


def matrix_shape(shape: Iterable[int]) -> tuple[int, int]:
    """``(M, K)`` of the matrix that a tensor [..., K] of ``shape`` is quantized as; a number is [1, 1]."""
    *leading, last = tuple(shape) or (1,)
    return math.prod(leading), last


def operand_shape(shape: Iterable[int], side: str) -> tuple[int, int]:
    """``(rows, cols)`` of the operand ``"rowwise"`` or ``"columnwise"`` of a tensor of ``shape``."""
    rows, cols = matrix_shape(shape)
    return (rows, cols) if side == "rowwise" else (cols, rows)


def transposed_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """``shape`` with the last axis first."""
    whole = tuple(shape)
    return (*whole[-1:], *whole[:-1])


def up_to(size: int, multiple: int) -> int:
    """``size`` rounded up to a ``multiple``."""
    return -(-size // multiple) * multiple


class ScaleLayout(NamedTuple):
    """How block scales [rows, blocks] of an operand lie in an attribute of TransformerEngine's.

    Attributes:
        height: rows that have the same scales, of which one is stored.
        is_turned: whether the blocks are the first axis.
        multiples: what both axes are padded to, with zeros.
    """

    height: int
    is_turned: bool
    multiples: tuple[int, int]

    def shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """Shape, with padding, in which the scales of ``rows`` x ``blocks`` are stored."""
        axes = -(-rows // self.height), blocks
        first, second = axes[::-1] if self.is_turned else axes
        return up_to(first, self.multiples[0]), up_to(second, self.multiples[1])

    def lay(self, scales: Tensor, swizzled: bool = False) -> Tensor:
        """The attribute, of bytes or FP32, from ``scales`` [rows, blocks].

        Args:
            swizzled: let the bytes lie as tensor cores read them.
        """
        shape = self.shape(*scales.shape)
        scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales
        if swizzled:
            return swizzle_scales(scales).view(shape)
        kept = scales[:: self.height]
        kept = kept.T if self.is_turned else kept
        padding = 0, shape[1] - kept.shape[1], 0, shape[0] - kept.shape[0]
        return pad(kept, padding) if any(padding) else kept.clone(memory_format=torch.contiguous_format)

    def cut(self, laid: Tensor, rows: slice, blocks: slice) -> Tensor | None:
        """A view of the scales of some rows and blocks; None if these rows share scales with others."""
        if rows.start % self.height:
            return None
        kept = slice(rows.start // self.height, -(-rows.stop // self.height))
        return laid[blocks, kept] if self.is_turned else laid[kept, blocks]

    def read(self, laid: Tensor, rows: int, spec: CastSpec, cols: int, swizzled: bool = False) -> Tensor:
        """Inverse of :meth:`lay`: the block scales of an operand [rows, cols] that was cast by ``spec``."""
        blocks = spec.num_blocks(cols)
        if swizzled:
            kept = unswizzle_scales(laid.reshape(-1), rows, blocks)
        else:
            kept = (laid.T if self.is_turned else laid)[: -(-rows // self.height), :blocks]
        if self.height > 1:
            kept = kept.repeat_interleave(self.height, 0)[:rows]
        return kept.contiguous().view(spec.scale.torch_dtype)


def codes(data: Tensor, rows: int, spec: CastSpec, cols: int) -> Tensor:
    """Codes [rows, bytes of ``spec.padded_cols(cols)``], from a tensor that stores them without padding."""
    per_byte = 8 // max(spec.element.storage_bits, 4)
    width = spec.padded_cols(cols) // per_byte
    matrix = data.reshape(rows, data.numel() // max(rows, 1))
    return pad(matrix, (0, width - matrix.shape[1])) if matrix.shape[1] < width else matrix.contiguous()


def rectangle(part: Tensor, cols: int) -> tuple[slice, slice] | None:
    """Which rows and columns of a contiguous tensor [..., cols] its view ``part`` shows; None if it is no rectangle."""
    if not part.ndim or not part.numel() or part.shape[-1] > cols:
        return None
    whole = torch.empty((*part.shape[:-1], cols), dtype=torch.uint8, device="meta").stride()
    if part.stride() != whole and part.numel() > 1:
        return None
    first_row, first_col = divmod(int(part.storage_offset()), cols)
    rows, width = matrix_shape(part.shape)
    if first_col + width > cols:
        return None
    return slice(first_row, first_row + rows), slice(first_col, first_col + width)


def remember(tensor: Tensor, source: Tensor) -> None:
    """Keep ``source``, which ``tensor`` was computed from, as its attribute, valid until somebody writes into it."""
    kept: Any = tensor
    has_bytes = is_plain(tensor) and not tensor.is_meta and tensor.numel() > 0
    first: Any = digest(tensor) if has_bytes else None
    if isinstance(first, Tensor):
        first = Seal(first, torch.zeros(1, dtype=torch.int32, device=tensor.device), (in_bytes(source),))
    kept.remembered = source, _version(tensor), first


def remembered(tensor: Tensor) -> Tensor | None:
    """What :func:`remember` has kept; None if there is nothing, or ``tensor`` has been written into since.

    A write through ``tensor.data`` or other memory shows in no version, so the bytes are compared too. Where the host
    would wait for that, the device makes what was kept NaN if they differ.
    """
    source, version, first = getattr(tensor, "remembered", (None, None, None))
    if source is None or version is None or version != _version(tensor):
        return None
    if isinstance(first, Seal):
        compare(tensor, first)
        return source
    return source if first is None or digest(tensor) == first else None


def _version(tensor: Tensor) -> int | None:
    """How often ``tensor`` has been written into; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version
