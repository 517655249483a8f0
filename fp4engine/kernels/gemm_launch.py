"""Launching GEMM kernels with little work on the host.

A GEMM of a small model takes less time on the GPU than Triton takes to look at its arguments, so a problem that was
launched before goes straight to its compiled kernel: 49 -> 29 us per call on the host of an H200. That is sound because
the key below holds everything that Triton specializes a kernel on.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16
"""Bytes: the copy engine wants base addresses and row strides divisible by this, and Triton specializes on it."""


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


@cache
def multiprocessors_of(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_stride(matrix: torch.Tensor) -> int:
    """Elements from one row to the next; that of a single row means nothing and may be anything."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read and write ``matrix``, whose last axis is contiguous."""
    stride = row_stride(matrix)
    return (stride * matrix.element_size() | matrix.data_ptr()) % ALIGNMENT == 0 and stride >= matrix.shape[1]


_compiled: dict[tuple[Any, ...], Any] = {}
_MOST_PROBLEMS = 4096
"""Problems remembered; a run whose M never repeats must not grow without end."""


def start(
    kernel: Any,
    programs: int,
    pointers: tuple[torch.Tensor | None, ...],
    key: tuple[Any, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """``kernel[(programs,)](*arguments, *constants, **options)``.

    Args:
        kernel: a Triton or Gluon kernel.
        programs: size of the one-dimensional grid.
        pointers: the tensors among ``arguments`` that are passed as plain pointers.
        key: the integers among ``arguments``, and the dtypes of descriptors where they vary.
        arguments: in the kernel's order.
        constants: the kernel's ``constexpr`` parameters, which follow its arguments.
        options: ``num_warps`` and the like.
    """
    grid = (programs, 1, 1)
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*arguments, *constants, **options)
        return
    kinds = tuple((t.dtype, t.data_ptr() % ALIGNMENT == 0) if t is not None else None for t in pointers)
    full_key = (id(kernel), torch.cuda.current_device(), kinds, key, constants)
    compiled = _compiled.get(full_key)
    if compiled is None:
        if len(_compiled) >= _MOST_PROBLEMS:
            _compiled.clear()
        # FP contraction is off: alpha * acc + bias rounds twice by contract, a fused multiply-add rounds once.
        _compiled[full_key] = kernel[grid](*arguments, *constants, **options, enable_fp_fusion=False)
    else:
        compiled[grid](*arguments, *constants)
