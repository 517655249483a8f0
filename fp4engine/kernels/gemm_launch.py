"""What the GEMM kernels are given: flags, scales, and matrices as the copy engine sees them."""

from functools import cache
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4engine.kernels.tape import ALIGNMENT


class Flags(NamedTuple):
    """What the epilogue does, in the order of the kernels' constants."""

    left_rows: bool
    right_rows: bool
    has_bias: bool
    accumulate: bool


class Scales(NamedTuple):
    """What the epilogue reads, in the order of the kernels' arguments."""

    left_amax: torch.Tensor
    right_amax: torch.Tensor
    bias: torch.Tensor | None
    numerator: float


class Descriptor(TensorDescriptor):
    """Triton's view of a matrix for the copy engine, without its checks: :func:`is_aligned` has made them."""

    def __post_init__(self) -> None:
        pass


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def row_stride(matrix: torch.Tensor) -> int:
    """Elements from one row to the next; that of a single row means nothing and may be anything."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read and write ``matrix``, whose last axis is contiguous."""
    stride = row_stride(matrix)
    return (stride * matrix.element_size() | matrix.data_ptr()) % ALIGNMENT == 0 and stride >= matrix.shape[1]


def describe(matrix: torch.Tensor, rows: int, cols: int) -> Descriptor:
    """``matrix`` as the copy engine sees it, in blocks of ``rows`` by ``cols``."""
    return Descriptor(matrix, list(matrix.shape), [row_stride(matrix), 1], [rows, cols])
