"""How codes that have one scale per tile lie in memory while they go from rank to rank."""

from functools import cache
from typing import NamedTuple

from fp4engine.constants import ALIGNMENT
from fp4engine.formats.cast_spec import CastSpec


class Part(NamedTuple):
    """Some rows of a cast matrix as bytes: their codes, one scale of each of their blocks, and the outer amax.

    A tensor of parts has the rows of one rank in each, in the order of the ranks, as an all-gather leaves them. All
    parts have the outer amax of the whole matrix.

    Attributes:
        rows: number of the matrix's rows.
        codes, scales: bytes of both; codes are [rows, padded cols], scales [rows / block rows, blocks].
        amax: where the outer amax begins, FP32; a multiple of ``ALIGNMENT``.
        size: bytes of the part, a multiple of ``ALIGNMENT``: the next part begins where kernels can read words.
    """

    rows: int
    codes: int
    scales: int
    amax: int
    size: int

    @staticmethod
    @cache
    def of(spec: CastSpec, rows: int, cols: int) -> "Part":
        """The part of ``rows`` rows of a matrix with ``cols`` columns that is cast by ``spec``."""
        codes = rows * spec.padded_cols(cols) * spec.element.storage_bits // 8
        scales = -(-rows // spec.block[0]) * spec.num_blocks(cols) * spec.scale.torch_dtype.itemsize
        amax = -(-(codes + scales) // ALIGNMENT) * ALIGNMENT
        return Part(rows, codes, scales, amax, amax + ALIGNMENT)
