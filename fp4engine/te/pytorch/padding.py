"""Rows of zeros between the slices of grouped GEMMs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4engine.arguments import require_integer
from fp4engine.te.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization


class Fp8Padding(torch.nn.Module):
    """Rows of zeros after each slice, up to a multiple of ``align_size``.

    Args:
        num_gemms: how many slices.
        align_size: None takes what the recipe in force is padded to, once.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None:
            align_size = require_integer("align_size", align_size, 1)
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """The padded rows, and how many each slice has.

        Raises:
            ValueError: the counts of ``m_splits`` are not those of the rows of ``inp``.
        """
        padded = self._padded(m_splits)
        _require_rows(inp, m_splits, m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        parts = inp.split(list(m_splits))
        fill = [part.new_zeros(more - len(part), *part.shape[1:]) for part, more in zip(parts, padded, strict=True)]
        return torch.cat([piece for pair in zip(parts, fill, strict=True) for piece in pair]), padded

    def _padded(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits must have num_gemms={self.num_gemms} counts, got {len(m_splits)}")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        size = self.align_size
        return [-(-int(rows) // size) * size for rows in m_splits]


def _require_rows(inp: Tensor, counts: Sequence[int], m_splits: Sequence[int]) -> None:
    if min(counts, default=0) < 0 or sum(counts) != inp.shape[0]:
        raise ValueError(
            f"m_splits must be counts of slices that have {inp.shape[0]} rows in all, with padding where it is there, "
            f"got {list(m_splits)}"
        )


class Fp8Unpadding(Fp8Padding):
    """The inverse of :class:`Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rows without padding; ``m_splits`` are the counts without it.

        Raises:
            ValueError: ``inp`` has not as many rows as slices of these counts with padding.
        """
        padded = self._padded(m_splits)
        _require_rows(inp, padded, m_splits)
        if padded == list(m_splits):
            return inp
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])
