"""What the GEMM kernels are given: flags, scales, and matrices as the copy engine sees them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

from fp4engine.kernels.launch import Block, Matrix, Place


class Flags(NamedTuple):
    """What the epilogue does, in the order of the kernels' constants."""

    left_rows: bool
    right_rows: bool
    has_bias: bool
    accumulate: bool


class Product(NamedTuple):
    """One product in a launch: ``out = alpha * left @ right.T + bias``, or the same added to ``out``.

    Attributes:
        left, right: BF16 values, or codes of FP8, [M, K] and [N, K], contiguous along K.
        out: [M, N], contiguous along N.
        left_amax, right_amax, bias: what the epilogue reads.
        numerator: product of the operands' numerators.
        flags: what the epilogue does.
    """

    left: Matrix
    right: Matrix
    out: Matrix
    left_amax: Place
    right_amax: Place
    bias: Place | None
    numerator: float
    flags: Flags

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N and K."""
        m, k = self.left.meta.shape
        return m, self.right.meta.shape[0], k

    @property
    def scales(self) -> tuple[Any, ...]:
        """The epilogue's arguments, in the kernels' order."""
        return self.left_amax, self.right_amax, self.bias, self.numerator


class Descriptor(TensorDescriptor):
    """Triton's view of a matrix for the copy engine, without its checks: :attr:`Matrix.is_aligned` has made them."""

    def __post_init__(self) -> None:
        pass


def block_of(matrix: Matrix, rows: int, cols: int, make: Callable[..., Any] = Descriptor, *rest: Any) -> Block:
    """``matrix`` as the copy engine reads it, in blocks of ``rows`` by ``cols``; ``make`` also gets ``rest``."""
    shape, strides = list(matrix.meta.shape), [matrix.meta.row_stride, 1]
    return Block(matrix.place, lambda tensor: make(tensor, shape, strides, [rows, cols], *rest))
