"""Starting a kernel with little work on the host.

A kernel of a small model takes less time on the GPU than Triton takes to look at its arguments, so a problem that was
started before goes straight to its compiled kernel: 49 -> 29 us per GEMM on the host of an H200. That is sound because
the key below holds everything that Triton specializes a kernel on.
"""

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

ALIGNMENT = 16
"""Bytes: Triton specializes on addresses divisible by this; the copy engine wants such addresses and row strides."""

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
    """``kernel[(programs,)](*arguments, *constants, **options)`` on the device of ``pointers``.

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
    device = next(pointer.device for pointer in pointers if pointer is not None)
    if device.index != torch.cuda.current_device():  # Triton launches on the current device, whatever it is given
        with torch.cuda.device(device):
            return start(kernel, programs, pointers, key, arguments, constants, **options)
    kinds = tuple((t.dtype, t.data_ptr() % ALIGNMENT == 0) if t is not None else None for t in pointers)
    full_key = (id(kernel), device, kinds, key, constants)
    compiled = _compiled.get(full_key)
    if compiled is None:
        if len(_compiled) >= _MOST_PROBLEMS:
            _compiled.clear()
        # FP contraction is off: alpha * acc + bias rounds twice by contract, a fused multiply-add rounds once.
        _compiled[full_key] = kernel[grid](*arguments, *constants, **options, enable_fp_fusion=False)
    else:
        compiled[grid](*arguments, *constants)
