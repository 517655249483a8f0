"""One operand of one GEMM: a matrix [rows, cols] whose last axis is contracted."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.reference import pack, unpack
from fp4engine.reference.hadamard import rotate_back


class Operand(NamedTuple):
    """One operand of a GEMM: a matrix as it was cast, or in high precision. Immutable.

    Attributes:
        spec: how ``data`` was cast; None for an unquantized matrix.
        rows, cols: shape of the matrix, without padding.
        data: codes (uint8), or values without the outer factor (in ``spec.values_dtype``, BF16 or FP16), or the matrix
            itself if ``spec`` is None.
        scale_inv: block scales [rows, blocks], row-major; None unless ``data`` holds codes.
        amax: FP32 outer amax, [1] or [rows]; None if ``spec`` is None.
    """

    spec: CastSpec | None
    rows: int
    cols: int
    data: Tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None

    def __repr__(self) -> str:
        """``Operand([64, 48], 'e2m1 1x16', codes, device='cpu')``."""
        label = "high precision" if self.spec is None else self.spec.label
        form = "" if self.spec is None else ", values" if self.is_values else ", codes"
        return f"Operand([{self.rows}, {self.cols}], {label!r}{form}, device={str(self.data.device)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = (self.data, self.scale_inv, self.amax)
        return _unpickled, (self.spec, self.rows, self.cols, *map(for_pickles, tensors))

    @classmethod
    def dense(cls, matrix: Tensor) -> "Operand":
        """An unquantized matrix [rows, cols]."""
        return cls(None, matrix.shape[0], matrix.shape[1], matrix)

    @property
    def is_values(self) -> bool:
        """True if ``data`` holds values, which a GEMM multiplies without decoding, and False if it holds codes."""
        return self.scale_inv is None

    @property
    def codes(self) -> Tensor:
        """Packed codes: uint8 [rows, padded cols / 2], even column in the low nibble.

        Raises:
            ValueError: the operand holds values, not codes.
        """
        if self.is_values:
            raise ValueError("this operand holds values, not codes; quantize with form 'codes' to get them")
        return self.data

    @property
    def nbytes(self) -> int:
        """Bytes of data, block scales and outer amax."""
        return sum(tensor.nbytes for tensor in self.parts)

    def dequantize(self, dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
        """``element * block scale * (amax / numerator)`` rounded once: [rows, cols]; as stored if rotated."""
        if self.spec is None:
            return self.data.to(dtype)
        assert self.amax is not None
        if self.scale_inv is None:
            width = self.cols if self.spec.rotation is None else self.data.shape[1]
            factor = reference.outer_factor(self.amax, self.spec)
            return (self.data[:, :width].float() * factor).to(dtype)
        from fp4engine.ops.cast import dequantize

        return dequantize(self.data, self.scale_inv, self.amax, self.spec, self.cols, dtype, backend)

    def tensor(self, dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
        """The tensor that was cast, as it decodes, in ``dtype``: :meth:`dequantize`, rotated back and without padding.

        Raises:
            ValueError: it was rotated by signs that were drawn for it.
        """
        rotation = None if self.spec is None else self.spec.rotation
        if rotation is None:
            return self.dequantize(dtype, backend)
        if rotation.signs.is_fresh:
            raise ValueError(f"an operand rotated by freshly drawn signs ({rotation}) does not decode to its tensor")
        values = self.dequantize(torch.float32, backend)
        values = rotate_back(values, rotation)
        return values[:, : self.cols].to(dtype).contiguous()

    def transposed(self) -> "Operand":
        """The operand of the transposed matrix under the same cast, which :func:`is_transposable` has been asked of."""
        assert self.spec is not None and self.scale_inv is not None
        packed = self.spec.element.storage_bits == 4
        codes = (unpack(self.data) if packed else self.data)[:, : self.cols].T
        codes = torch.nn.functional.pad(codes, (0, self.spec.padded_cols(self.rows) - self.rows)).contiguous()
        height = self.spec.block[0]
        if height:
            tiles = self.scale_inv[::height].T
            repeated = tiles.repeat(1, height).view(tiles.shape[0] * height, tiles.shape[1])
            scale_inv = repeated[: self.cols]
        else:
            scale_inv = self.scale_inv.new_empty((self.cols, 0))
        data = pack(codes) if packed else codes
        return Operand(self.spec, self.cols, self.rows, data, scale_inv, self.amax)

    @property
    def key(self) -> str:
        """The spec as operators take it; empty for an unquantized matrix."""
        return "" if self.spec is None else self.spec.key

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(data, scale_inv, amax)``."""
        return self.data, self.scale_inv, self.amax

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that there are: ``[matrix]``, ``[values, amax]`` or ``[codes, scale_inv, amax]``."""
        return [tensor for tensor in (self.data, self.scale_inv, self.amax) if tensor is not None]


class SquareOperand(NamedTuple):
    """An operand in square blocks, of which the operand of the transposed matrix is made each time it is read."""

    operand: Operand

    def rowwise(self, backend: str = "auto") -> Operand:
        """The operand itself."""
        return self.operand

    def columnwise(self, backend: str = "auto") -> Operand:
        """The operand of the transposed matrix under the same cast."""
        return self.operand.transposed()


def is_transposable(spec: CastSpec) -> bool:
    """Whether the cast of a transposed matrix is the transposed cast: blocks are square, and nothing knows a direction.

    4over6, a search and corrections sum errors in an order, so they do.
    """
    return (
        spec.block[0] == spec.block[1]
        and spec.outer in (Outer.TENSOR, Outer.NONE)
        and spec.rotation is None
        and spec.correction is Correction.NONE
        and not spec.is_stochastic
        and not spec.scale_rule.is_four_over_six
        and not spec.search
    )


Pickled = tuple[Tensor, torch.dtype] | None
"""A tensor that is to be pickled, and its dtype: PyTorch cannot unpickle some of one byte, such as E4M3."""


def for_pickles(tensor: Tensor | None) -> Pickled:
    """``tensor`` for a pickle, those of one byte as uint8."""
    if tensor is None:
        return None
    return (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor), tensor.dtype


def from_pickle(pickled: Pickled | Tensor) -> Tensor | None:
    """Inverse of :func:`for_pickles`; files from before it have the tensor itself."""
    return pickled[0].view(pickled[1]) if isinstance(pickled, tuple) else pickled


def _unpickled(spec: CastSpec | None, rows: int, cols: int, *tensors: Pickled) -> Operand:
    """An operand of what :func:`for_pickles` made of its tensors."""
    data, *rest = map(from_pickle, tensors)
    assert data is not None
    return Operand(spec, rows, cols, data, *rest)
