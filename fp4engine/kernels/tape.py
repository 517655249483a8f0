"""What a function launched, remembered, so that it is done again without the function.

A small problem takes less time on the GPU than the Python that starts it, and that Python does the same every time: on
tensors of the same shapes it allocates the same buffers and launches the same kernels. A :class:`Tape` is that list.
Replaying it allocates what the function returned, one workspace for everything else, and launches; the bytes are the
function's because the launches are.

What this package does on a device goes through PyTorch's dispatcher or through :func:`fp4engine.kernels.start.start`.
The recording watches both: allocations and views are understood, launches are kept, and a function that does anything
else is never replayed. Imports no Triton.
"""

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = tuple[tuple[Tensor | None, ...], Any]
"""What a taped function returns: tensors, each of them allocated in it, and a constant."""

Returned = TypeVar("Returned", bound=Result)

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

Slot = tuple[int, int]
"""A buffer, counted over inputs, outputs and the workspace, and bytes from its start."""

ALIGNMENT = 16
"""Bytes: Triton specializes on addresses divisible by this; the copy engine wants such addresses and row strides."""

_SLICE = 256
"""Slices of a workspace start at multiples of this many bytes."""

_MOST_WORKSPACE = 256 << 20
"""Bytes of the largest workspace. Above it the GPU takes longer than Python, and finds smaller blocks more easily."""

_MOST_ADDRESSES = 64
"""Sets of addresses for which one tape remembers its calls."""

_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
)
_empty: dict[str, Callable[..., Tensor]] = {
    "cpu": torch._C._dynamo.guards._empty_strided_cpu,
    "cuda": torch._C._dynamo.guards._empty_strided_cuda,
}
"""``torch.empty_strided(size, stride, dtype)`` on the current device, as Inductor's code calls it: in half the time."""

_PLAIN = (Tensor, torch.nn.Parameter)
_modes_on_this_thread = torch._C._len_torch_dispatch_stack
_SEEN, _REFUSED = object(), object()


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        kernel: a compiled kernel and its grid; ``kernel.bind(stream, arguments)`` is the :data:`Call` that launches it.
        descriptors: matrices as the copy engine sees them.
        pointers: tensors passed by their address; slots in their place once they are on a tape.
        rest: scalars and constants.
    """

    kernel: Any
    descriptors: tuple[Any, ...]
    pointers: tuple[Any, ...]
    rest: tuple[Any, ...]


class Recording(TorchDispatchMode):
    """Watches one thread's work while it is entered.

    Attributes:
        launches: what was launched; holds its tensors, so that no address comes twice.
        notes: calls of :func:`note`.
        allocated: what was allocated, by storage.
        refusal: the first operator that cannot be replayed, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.notes: list[Call] = []
        self.allocated: dict[int, Tensor] = {}
        self.refusal: str | None = None

    def __enter__(self) -> "Recording":
        _local.recording = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _local.recording = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated[_storage(result)] = result
        elif not _is_view(func, args, result):
            self.refusal = self.refusal or str(func)
        return result


class _Local(threading.local):
    recording: Recording | None = None


_local = _Local()


def active() -> Recording | None:
    """The recording on this thread."""
    return _local.recording


def note(function: Callable[..., Any], *arguments: Any) -> None:
    """Say that the caller does ``function(*arguments)``, which every replay is to do too: for counters."""
    recording = _local.recording
    if recording is not None:
        recording.notes.append((function, arguments))


class Tape:
    """The launches of one function on tensors of one description.

    Args:
        recording: of a call that launched something.
        inputs: the tensors of that call.
        result: what it returned.

    Raises:
        ValueError: the call cannot be replayed.
    """

    def __init__(self, recording: Recording, inputs: Sequence[Tensor | None], result: Result) -> None:
        from fp4engine.kernels.start import launching_stream

        if recording.refusal is not None:
            raise ValueError(f"{recording.refusal} is not a launch")
        if not recording.launches:
            raise ValueError("nothing was launched")
        tensors, self.constant = result
        device = next(tensor.device for tensor in inputs if tensor is not None)
        self.notes = recording.notes
        self._stream = partial(launching_stream, device.index)
        self._empty = _empty[device.type]
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        first = len(inputs)  # of the outputs' buffers
        storages = [_storage(tensor) for tensor in tensors if tensor is not None]
        if len(set(storages)) < len(storages):
            raise ValueError("two outputs share their memory")
        slots = {storage: (first + place, 0) for place, storage in enumerate(storages)}
        offsets, nbytes = _lay_out(_lifetimes(recording, slots))
        if nbytes > _MOST_WORKSPACE:
            raise ValueError(f"a workspace of {nbytes} bytes is too large")
        outputs = [None if tensor is None else _description(tensor, recording) for tensor in tensors]
        self._outputs = [(place, output) for place, output in enumerate(outputs) if output is not None]
        self._no_outputs: list[Tensor | None] = [None] * len(outputs)
        self._workspace = ((nbytes,), (1,), torch.uint8) if offsets else None
        slots |= {storage: (first + len(storages), offset) for storage, offset in offsets.items()}
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in inputs]

        def slot(tensor: Tensor | None) -> Slot | None:
            if tensor is None:
                return None
            if (storage := _storage(tensor)) in slots:
                buffer, offset = slots[storage]
                return buffer, offset + tensor.data_ptr() - recording.allocated[storage].data_ptr()
            if addresses.count(tensor.data_ptr()) != 1:
                raise ValueError("a kernel reads memory that is no input, or two of them")
            return addresses.index(tensor.data_ptr()), 0

        self._launches = [
            launch._replace(
                descriptors=tuple(d and (_at(d, None), slot(d.base)) for d in launch.descriptors),
                pointers=tuple(slot(pointer) for pointer in launch.pointers),
            )
            for launch in recording.launches
        ]

    def play(self, addresses: list[int]) -> list[Tensor | None] | None:
        """Launch everything on inputs at ``addresses``, a list that play may append to: the outputs.

        None where only Triton itself may launch: see :func:`fp4engine.kernels.start.launching_stream`, or an input is
        not aligned.
        """
        stream = self._stream()
        if stream is None:
            return None
        outputs = self._no_outputs.copy()
        for place, description in self._outputs:
            outputs[place] = output = self._empty(*description)
            addresses.append(output.data_ptr())
        if self._workspace is not None:
            workspace = self._empty(*self._workspace)  # until play returns; later work on this stream may have it then
            addresses.append(workspace.data_ptr())
        addresses.append(stream)
        bases = tuple(addresses)
        calls = self._calls.get(bases)
        if calls is None:
            if not _are_aligned(bases[:-1]):
                return None
            calls = self._bind(bases)
        for function, arguments in calls:
            function(*arguments)
        for function, arguments in self.notes:
            function(*arguments)
        return outputs

    def _bind(self, bases: tuple[int, ...]) -> list[Call]:
        """The calls for buffers at these addresses, which an allocator gives to every step alike."""
        *buffers, stream = bases

        def address(slot: Slot | None) -> int | None:
            return None if slot is None else buffers[slot[0]] + slot[1]

        if len(self._calls) >= _MOST_ADDRESSES:
            self._calls.clear()
        calls = self._calls[bases] = [
            kernel.bind(
                stream,
                (*(d and _at(d[0], address(d[1])) for d in descriptors), *map(address, pointers), *rest),
            )
            for kernel, descriptors, pointers, rest in self._launches
        ]
        return calls


class Tapes:
    """Tapes by what decides them. A problem is recorded when it comes a second time: many come only once.

    Args:
        most: problems remembered; a run whose shapes never repeat must not grow without end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tapes: dict[tuple[Any, ...], Any] = {}

    def run(
        self,
        problem: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        function: Callable[..., Returned],
        arguments: tuple[Any, ...] = (),
    ) -> Returned:
        """``function(*arguments, *tensors)``, replayed where it can be.

        Every step here is time per launch, which is why it is written out. Not for code that Dynamo traces.

        Args:
            problem: hashable; with the shapes, strides, dtypes and devices of ``tensors`` it decides what ``function``
                does.
            tensors: what ``function`` reads and writes, on the CPU or one GPU; the first is not None.
        """
        if _local.recording is not None or _modes_on_this_thread():
            return function(*arguments, *tensors)
        parts: list[Any] = [*problem]
        addresses: list[int] = []
        for tensor in tensors:
            if type(tensor) in _PLAIN:
                parts += (tensor.shape, tensor.is_contiguous() or tensor.stride(), tensor.dtype, tensor.get_device())
                addresses.append(tensor.data_ptr())
            elif tensor is None:
                parts.append(None)
                addresses.append(0)
            else:
                return function(*arguments, *tensors)
        key = tuple(parts)
        tape = self._tapes.get(key)
        if type(tape) is Tape:
            outputs = tape.play(addresses)
            if outputs is not None:
                return tuple(outputs), tape.constant  # pyright: ignore[reportReturnType]: what function would return
        elif tape is _SEEN and _are_aligned(addresses) and _are_distinct(addresses):
            return self._record(key, tensors, function, arguments)
        elif tape is None:
            if len(self._tapes) >= self._most:
                self._tapes.clear()
            self._tapes[key] = _SEEN
        return function(*arguments, *tensors)

    def _record(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor | None, ...],
        function: Callable[..., Returned],
        arguments: tuple[Any, ...],
    ) -> Returned:
        recording = Recording()
        with recording:
            result = function(*arguments, *tensors)
        try:
            self._tapes[key] = Tape(recording, tensors, result)
        except ValueError:
            self._tapes[key] = _REFUSED
        return result


class _Address:
    """Stands for a tensor where only its address is asked for."""

    def __init__(self, address: int | None) -> None:
        self._address = address

    def data_ptr(self) -> int | None:
        return self._address


def _at(descriptor: Any, address: int | None) -> Any:
    """``descriptor`` for the same matrix at ``address``."""
    moved = copy(descriptor)
    moved.base = _Address(address)
    return moved


def _are_aligned(addresses: Sequence[int]) -> bool:
    return not any(address % ALIGNMENT for address in addresses)


def _are_distinct(addresses: Sequence[int]) -> bool:
    """Whether no tensor is there twice; 0 stands for none."""
    given = [address for address in addresses if address]
    return len(set(given)) == len(given)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether an operator did nothing but describe memory of its first argument anew."""
    if func._schema.is_mutable or not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return _storage(result) == _storage(args[0])


def _description(tensor: Tensor, recording: Recording) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Size, stride and dtype of an output that fills what was allocated for it."""
    storage = _storage(tensor)
    if storage not in recording.allocated or tensor.nbytes != tensor.untyped_storage().nbytes():
        raise ValueError("an output is not a buffer of its own")
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _lifetimes(recording: Recording, outputs: dict[int, Slot]) -> dict[int, tuple[int, int, int]]:
    """``storage -> (bytes, first launch, last launch)`` of everything allocated that is not returned."""
    lifetimes: dict[int, tuple[int, int, int]] = {}
    for index, launch in enumerate(recording.launches):
        for tensor in (*launch.pointers, *(d.base for d in launch.descriptors if d is not None)):
            storage = 0 if tensor is None else _storage(tensor)
            if storage in recording.allocated and storage not in outputs:
                first = lifetimes[storage][1] if storage in lifetimes else index
                lifetimes[storage] = (recording.allocated[storage].untyped_storage().nbytes(), first, index)
    return lifetimes


def _lay_out(lifetimes: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """``(storage -> offset, bytes in all)``: each slice at the lowest place that is free while it is used.

    A kernel that starts before its predecessor ends (amax, while its maxima are cleared) must not write what that has
    finished with: clearing finishes with nothing.
    """
    offsets: dict[int, int] = {}
    total = 0
    for storage, (nbytes, first, _) in lifetimes.items():
        start = 0
        living = [(offsets[s], n) for s, (n, _, end) in lifetimes.items() if s in offsets and end >= first]
        for offset, taken in sorted(living):
            if start + nbytes <= offset:
                break
            start = max(start, -(-(offset + taken) // _SLICE) * _SLICE)
        offsets[storage] = start
        total = max(total, start + nbytes)
    return offsets, total
