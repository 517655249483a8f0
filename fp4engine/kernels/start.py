"""Starting a kernel with little work on the host.

A kernel of a small model takes less time on the GPU than Triton takes to look at its arguments. So a problem that was
started before goes straight to its compiled kernel, which gets addresses and not tensors. That is sound because the key
below holds the grid and everything that Triton checks and specializes a kernel on.
"""

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

ALIGNMENT = 16
"""Bytes: Triton specializes on addresses divisible by this; the copy engine wants such addresses and row strides."""

_runners: dict[tuple[Any, ...], Any] = {}
_MOST_PROBLEMS = 4096
"""Problems remembered; a run whose M never repeats must not grow without end."""


def start(
    kernel: Any,
    programs: int,
    pointers: tuple[torch.Tensor | None, ...],
    scalars: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    descriptors: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """``kernel[(programs,)](*descriptors, *pointers, *scalars, *constants, **options)`` on the pointers' device.

    Args:
        kernel: a Triton or Gluon kernel, its parameters in that order.
        programs: size of the one-dimensional grid.
        pointers: tensors passed by their address; at least one is not None.
        scalars: integers and floats.
        constants: the ``constexpr`` parameters.
        descriptors: matrices as the copy engine sees them.
        options: ``num_warps`` and the like, a function of the kernel and the rest.
    """
    grid = (programs, 1, 1)
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*descriptors, *pointers, *scalars, *constants, **options)
        return
    device = next(pointer.device for pointer in pointers if pointer is not None)
    if device.index != torch.cuda.current_device():  # Triton launches on the current device, whatever it is given
        with torch.cuda.device(device):
            return start(kernel, programs, pointers, scalars, constants, descriptors=descriptors, **options)
    addresses: list[int | None] = []
    kinds: list[Any] = [id(kernel), programs, device.index, scalars, constants]
    for pointer in pointers:
        if pointer is None:
            addresses.append(None)
            kinds.append(None)
        else:
            address = pointer.data_ptr()
            addresses.append(address)
            kinds += (pointer.dtype, pointer.get_device(), address % ALIGNMENT == 0)
    for descriptor in descriptors:
        kinds.append(descriptor and descriptor.base.dtype)
    key = tuple(kinds)
    runner = _runners.get(key)
    if runner is not None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        runner(*descriptors, *addresses, *scalars, *constants, stream=stream)
        return
    if len(_runners) >= _MOST_PROBLEMS:
        _runners.clear()
    # FP contraction is off: alpha * acc + bias rounds twice by contract, a fused multiply-add rounds once.
    compiled = kernel[grid](*descriptors, *pointers, *scalars, *constants, **options, enable_fp_fusion=False)
    _runners[key] = compiled[grid]
