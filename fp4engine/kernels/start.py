"""Starting a kernel with little work on the host.

A kernel of a small model takes less time on the GPU than Triton takes to look at its arguments. So a problem that was
started before goes straight to its compiled kernel, which gets addresses and not tensors. That is sound because the key
below holds the grid and everything that Triton checks and specializes a kernel on.
"""

import ctypes
import inspect
import threading
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.interpreter import InterpretedFunction

from fp4engine.kernels import tape
from fp4engine.kernels.tape import ALIGNMENT, Call

_runtime: Any = knobs.runtime
_prepared: dict[tuple[Any, ...], "Prepared"] = {}
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
        with _disable_current_modes():  # the interpreter runs operators, which are not the caller's
            kernel[grid](*descriptors, *pointers, *scalars, *constants, **options)
        prepared = Interpreted(kernel, grid, [None if p is None else p.dtype for p in pointers], options)
    else:
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
        prepared = _prepared.get(key)
        if prepared is not None:
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            prepared(stream, (*descriptors, *addresses, *scalars, *constants))
        else:
            if len(_prepared) >= _MOST_PROBLEMS:
                _prepared.clear()
            # FP contraction is off: alpha * acc + bias rounds twice by contract, a fused multiply-add rounds once.
            compiled = kernel[grid](*descriptors, *pointers, *scalars, *constants, **options, enable_fp_fusion=False)
            prepared = _prepared[key] = Prepared(compiled, grid)
    recording = tape.active()
    if recording is not None:
        recording.launches.append(tape.Launch(prepared, descriptors, pointers, (*scalars, *constants)))


def launching_stream(index: int | None) -> int | None:
    """The stream on which bound calls launch now on GPU ``index``, 0 on the CPU, whose index is None.

    None if it is another GPU's turn, or a profiler has asked Triton to tell it of launches.
    """
    if index is None:
        return 0
    if index != torch._C._cuda_getDevice() or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
        return None
    return torch._C._cuda_getCurrentRawStream(index)


class Prepared:
    """A compiled kernel with its grid: takes a stream and arguments, tensors among them as addresses."""

    def __init__(self, compiled: Any, grid: tuple[int, int, int]) -> None:
        self._compiled, self._grid = compiled, grid
        self._spied: tuple[Any, ...] | None = None

    def __call__(self, stream: int, arguments: tuple[Any, ...]) -> None:
        self._compiled[self._grid](*arguments, stream=stream)

    def bind(self, stream: int, arguments: tuple[Any, ...]) -> Call:
        """The call of C that launches the kernel on ``arguments``; hooks are not told of it.

        Triton's own launcher says what it passes to C: it is run with a list in C's place.
        """
        compiled = self._compiled
        if self._spied is None:
            self._spied = _spy_on(compiled)
        if not self._spied:
            return partial(compiled[self._grid], stream=stream), arguments
        function, launcher, passed = self._spied
        with _spying:
            launcher(*self._grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
            return function, passed.pop()


def _spy_on(compiled: Any) -> tuple[Any, ...]:
    """``(C function, launcher that appends what it would pass, the list it appends to)``.

    Empty for a kernel that needs memory per launch, and under a Triton that launches in another way.
    """
    passed: list[tuple[Any, ...]] = []
    try:
        launcher = copy(compiled.run)
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return ()
        function = launcher.launch
        if inspect.isfunction(function):  # it encodes descriptors, then calls C
            function = inspect.getclosurevars(function).nonlocals["launcher"]
        encodings = getattr(compiled.metadata, "tensordesc_meta", None)
        launcher.launch = driver.wrap_handle_tensordesc(
            lambda *call: passed.append(call), compiled.src.signature, encodings
        )
    except (AttributeError, KeyError):
        return ()
    return function, launcher, passed


_spying = threading.Lock()


class Interpreted:
    """What :meth:`Prepared.bind` is for a kernel that Triton's interpreter runs, on the CPU."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], dtypes: list[torch.dtype | None], options: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._dtypes, self._options = kernel, grid, dtypes, options

    def bind(self, stream: int, arguments: tuple[Any, ...]) -> Call:
        pointers = len(self._dtypes)
        return self._run, (arguments[:pointers], arguments[pointers:])

    def _run(self, addresses: tuple[int | None, ...], rest: tuple[Any, ...]) -> None:
        tensors = [
            None if address is None or dtype is None else _tensor_at(address, dtype)
            for address, dtype in zip(addresses, self._dtypes, strict=True)
        ]
        self._kernel[self._grid](*tensors, *rest, **self._options)


def _tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One element of memory of the CPU; nothing at address 0, where tensors without elements are."""
    if address == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_byte * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=1)
