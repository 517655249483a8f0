"""How kernels are started: a question about tensors is resolved to a :class:`Launch` once, and launched many times.

A question is everything that the answer depends on: the operation, its constants, and the :class:`TensorMeta` of each
tensor. A resolver, one function per operation, builds the answer: which buffers to allocate, and which kernels to start
with which arguments. Resolvers are pure, so each has a bounded cache (:func:`resolver`). No kernel of
this package reaches a GPU, or Triton's interpreter, in another way; products of PyTorch's own are calls of PyTorch.

    launch = resolve_cast((meta_of(x), ...), x.device, ...)        outputs = launch(x, ...)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import Context
from copy import copy
from functools import cache, lru_cache, partial
from itertools import groupby
from operator import itemgetter
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import JITFunction, knobs

from fp4engine.constants import ALIGNMENT, MOST_QUESTIONS
from fp4engine.formats.one_buffer import offsets, offsets_by_lifetime
from fp4engine.kernels.compiling import KernelCall, Mock, compile_side_by_side, finished, telling
from fp4engine.kernels.target import E4M3, PAIRS, hardware_of
from fp4engine.private import current_stream, triton_launcher


class TensorMeta(NamedTuple):
    """The properties of a tensor that a launch may depend on: everything but its values, its address and its device.

    Attributes:
        shape, strides: in elements.
        aligned: whether the address is a multiple of :data:`ALIGNMENT`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @property
    def row_stride(self) -> int:
        """Elements from one row of a matrix to the next; the stride of a single row means nothing and is not used."""
        return self.strides[0] if self.shape[0] > 1 else self.shape[1]

    @property
    def is_column_major(self) -> bool:
        """True if the elements of a column lie side by side in memory, and the elements of a row do not."""
        return self.strides[1] != 1 and self.strides[0] == 1

    @property
    def transposed(self) -> "TensorMeta":
        """The metadata of the transposed view of a matrix."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])


def _allocation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor, with strides given: ``torch.empty`` takes half as long again.

    It holds no tensor to be like: one that is made under a mode, such as FakeTensorMode, is not one of memory.
    """
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return partial(torch.empty_strided, shape, tuple(reversed(strides)), dtype=dtype, device=device)


_new = tuple.__new__


def meta_of(tensor: Tensor | None) -> TensorMeta | None:
    """The metadata of ``tensor``; None for None."""
    if tensor is None:
        return None
    # The same as TensorMeta(...), without a call of Python: this runs for every tensor of every launch.
    return _new(TensorMeta, (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0))


Resolver = TypeVar("Resolver", bound=Callable[..., Any])


def resolver(function: Resolver) -> Resolver:
    """Put a bounded cache in front of a pure function of hashable arguments."""
    return lru_cache(maxsize=MOST_QUESTIONS)(function)  # pyright: ignore[reportReturnType]


class Place(NamedTuple):
    """A tensor of a launch, by its position in the list of its inputs followed by its buffers."""

    position: int


class Matrix(NamedTuple):
    """A matrix, or a vector, in a launch.

    Attributes:
        turned: whether it is the transposed view of what lies at its place.
    """

    place: Place
    meta: TensorMeta
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def is_aligned(self) -> bool:
        """Whether the copy engine can read and write it; the last axis is contiguous."""
        stride = self.meta.row_stride
        aligned = self.meta.aligned and stride * self.meta.dtype.itemsize % ALIGNMENT == 0
        return aligned and stride >= self.meta.shape[1]

    def narrowed(self, width: int) -> "Matrix":
        """The first ``width`` columns."""
        return self._replace(meta=self.meta._replace(shape=(self.meta.shape[0], width)))

    @property
    def transposed(self) -> "Matrix":
        """The transposed view."""
        return Matrix(self.place, self.meta.transposed, not self.turned)


class Block(NamedTuple):
    """An argument that a kernel gets in place of a tensor: its bytes, or a descriptor for the copy engine.

    Attributes:
        describe: makes the argument from the tensor; all of it but the address is the same in every call.
    """

    place: Place
    describe: Callable[[Tensor], Any]


class KernelLaunch(NamedTuple):
    """One kernel to start: ``kernel[(programs,)](*arguments, **options)``.

    Attributes:
        arguments: the kernel's arguments in its order; a tensor is a :class:`Place` or a :class:`Block`.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Buffer(NamedTuple):
    """A contiguous tensor of a launch, which a call allocates unless it is a part of another.

    Attributes:
        whole: the position of the tensor in which it lies; None if it is no part.
        start: the byte of ``whole`` at which it begins.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: int | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HostCall(NamedTuple):
    """What PyTorch computes between the kernels of a launch.

    Attributes:
        function: takes the tensors ``reads``; returns the tensors ``writes``, in a sequence if they are several.
    """

    function: Callable[..., Any]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]


class LaunchBuilder:
    """A launch that a resolver is still writing.

    Args:
        device: where the launch will run.
        inputs: how many tensors the launch will be called with.
    """

    def __init__(self, device: torch.device, inputs: int) -> None:
        self.device = device
        self.inputs = tuple(Place(index) for index in range(inputs))
        self._buffers: list[Buffer] = []
        self._steps: list[KernelLaunch | HostCall] = []

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        """A contiguous, uninitialised buffer, which lives as long as steps use it or as the launch's output does."""
        return self.part(None, 0, shape, dtype)

    def part(self, whole: Place | None, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        """What lies in ``whole``, an input or a buffer, from byte ``start`` on; a buffer of its own if that is None."""
        self._buffers.append(Buffer(tuple(shape), dtype, None if whole is None else whole.position, start))
        return Place(len(self.inputs) + len(self._buffers) - 1)

    def whole(self, place: Place) -> Place:
        """What a place is a part of; itself if it is none."""
        while (index := place.position - len(self.inputs)) >= 0 and (whole := self._buffers[index].whole) is not None:
            place = Place(whole)
        return place

    def start(self, place: Place) -> int:
        """The byte of its whole at which a place begins."""
        index = place.position - len(self.inputs)
        if index < 0 or (whole := self._buffers[index].whole) is None:
            return 0
        return self.start(Place(whole)) + self._buffers[index].start

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """A buffer for a matrix, row-major."""
        return Matrix(self.buffer(shape, dtype), TensorMeta(tuple(shape), (shape[1], 1), dtype, True))

    def step(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Add a kernel to start, on a one-dimensional grid of ``programs``; add nothing if there are none.

        FP contraction is off: a fused multiply-add rounds once where the contract (docs/numerics.md) rounds twice.
        """
        if programs:
            self._steps.append(KernelLaunch(kernel, programs, arguments, {"enable_fp_fusion": False, **options}))

    def host_step(
        self, function: Callable[..., Any], reads: Sequence[Place], *writes: tuple[tuple[int, ...], torch.dtype]
    ) -> list[Place]:
        """Add a function of PyTorch's, and return the contiguous buffers of these shapes and dtypes that it makes."""
        made = [self.buffer(*buffer) for buffer in writes]
        self._steps.append(HostCall(function, tuple(reads), tuple(made)))
        return made

    def launch(self, *outputs: Place, kept: Sequence[Place] = ()) -> "Launch":
        """The finished launch. It returns ``outputs``, and behind them one tensor of bytes that holds all of ``kept``.

        Args:
            kept: buffers that no host step touches; :attr:`Launch.kept_at` says where each begins.
        """
        return Launch(self.device, len(self.inputs), self._buffers, self._steps, outputs, kept)


class Launch:
    """The answer to a question. Called with the question's tensors, it allocates buffers, starts kernels and returns.

    Buffers that kernels alone touch share one allocation, and those that are not in use together share bytes of it.

    Attributes:
        outputs: shape and dtype of what a call returns.
        steps: the kernels that a call starts, in their order.
        is_new: whether nobody has asked yet what is to be compiled beside it, see :meth:`beside`.
        kept_at: the byte of the last output at which each kept buffer begins.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: int,
        buffers: Sequence[Buffer],
        steps: Sequence[KernelLaunch | HostCall],
        outputs: Sequence[Place],
        kept: Sequence[Place],
    ) -> None:
        self.is_new = True
        self._index = device.index if device.type == "cuda" else None
        self._may_be_elsewhere = device.type == "cuda" and torch.cuda.device_count() > 1
        self.steps = [step for step in steps if isinstance(step, KernelLaunch)]
        # A call's tensors: inputs, buffers that are tensors of their own, what is kept, and the room of all the others.
        kept_tensor, room = inputs + len(buffers), inputs + len(buffers) + 1
        self._absent = (None,) * (len(buffers) + 2)
        self._outputs = [place.position for place in outputs] + ([kept_tensor] if kept else [])
        made = dict(enumerate(buffers, inputs))
        where = {position: (position, 0) for position in range(inputs + len(buffers))}
        self.kept_at, size = offsets(made[place.position].nbytes for place in kept)
        made[kept_tensor] = Buffer((size,), torch.uint8)
        where |= {place.position: (kept_tensor, start) for place, start in zip(kept, self.kept_at, strict=True)}
        uses = _uses(steps, made)
        touched = [place for step in steps if isinstance(step, HostCall) for place in (*step.reads, *step.writes)]
        apart = {place.position for place in (*outputs, *kept, *touched)}
        scratch = [position for position in uses if position >= inputs and position not in apart]
        starts, size = offsets_by_lifetime([(made[position].nbytes, *uses[position]) for position in scratch])
        made[room] = Buffer((size,), torch.uint8)
        where |= {position: (room, start) for position, start in zip(scratch, starts, strict=True)}
        for position, buffer in enumerate(buffers, inputs):  # a part is declared behind its whole
            if buffer.whole is not None:
                index, start = where[buffer.whole]
                where[position] = index, start + buffer.start
        layout = _Layout(device, where, made)
        self.outputs = [(made[position].shape, made[position].dtype) for position in self._outputs]
        there = set(range(inputs))
        self._segments: list[_Kernels | _Host] = []
        for are_kernels, group in groupby(steps, lambda step: isinstance(step, KernelLaunch)):
            if are_kernels:
                self._segments.append(_Kernels(layout, list(group), there))
            else:
                for step in group:
                    self._allocate(layout, there, [where[place.position][0] for place in step.reads])
                    self._segments.append(_Host(layout, step, there))
        self._allocate(layout, there, self._outputs)
        later = {*range(inputs), *self._outputs}
        for segment in reversed(self._segments):
            segment.ends, later = sorted(segment.used - later), later | segment.used

    def _allocate(self, layout: "_Layout", there: set[int], needed: Sequence[int]) -> None:
        """What nobody has to compute, such as a matrix without rows, has to be there all the same."""
        if not there.issuperset(needed):
            self._segments.append(_Kernels(layout, [], there, needed))

    def beside(self, work: Callable[[], None] | None) -> None:
        """Have ``work`` run in a thread of its own while the kernels are compiled, at the first call.

        Nobody waits for it but the end of the process, and what it raises is dropped.
        """
        self.is_new = False
        segment = next((segment for segment in self._segments if isinstance(segment, _Kernels)), None)
        if segment is not None:
            segment.beside = work

    def compile(self, inputs: Sequence[TensorMeta | None]) -> None:
        """Compile the kernels as a call with tensors of these metadata would, without a tensor."""
        calls = [call for segment in self._segments if isinstance(segment, _Kernels) for call in segment.mocked(inputs)]
        if calls:
            with nullcontext() if self._index is None else torch.cuda.device(self._index):
                Context().run(compile_side_by_side, calls)

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        """Allocate the buffers, start the kernels, return the outputs. Does not wait for the device."""
        if self._may_be_elsewhere and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):  # kernels start on the current device, wherever their arguments lie
                return self(*inputs)
        tensors: list[Any] = [*inputs, *self._absent]
        for segment in self._segments:
            segment(tensors)
            for index in segment.ends:
                tensors[index] = None
        return [tensors[index] for index in self._outputs]


def _uses(steps: Sequence[KernelLaunch | HostCall], made: dict[int, Buffer]) -> dict[int, tuple[int, int]]:
    """For each tensor that a step touches the first and the last step that does; to touch a part is to touch all."""
    uses: dict[int, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        touched = step.arguments if isinstance(step, KernelLaunch) else (*step.reads, *step.writes)
        for argument in touched:
            place = argument.place if isinstance(argument, Block) else argument
            if isinstance(place, Place):
                position = place.position
                while (buffer := made.get(position)) is not None and buffer.whole is not None:
                    position = buffer.whole
                uses[position] = uses.get(position, (index,))[0], index
    return uses


class _Layout(NamedTuple):
    """Where the buffers of a launch lie.

    Attributes:
        where: for each place the tensor of a call, by its index, and the byte of it at which the place begins.
        made: every place and tensor that is no input.
    """

    device: torch.device
    where: dict[int, tuple[int, int]]
    made: dict[int, Buffer]

    def tensor(self, position: int, tensors: Sequence[Any]) -> Tensor | None:
        """What lies at a place."""
        index, start = self.where[position]
        if index == position:
            return tensors[index]
        buffer, whole = self.made[position], tensors[index].view(-1).view(torch.uint8)
        return whole[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)


class _Host:
    """A host step of a launch."""

    def __init__(self, layout: _Layout, step: HostCall, there: set[int]) -> None:
        self._layout, self._function, self.ends = layout, step.function, list[int]()
        self._reads = [place.position for place in step.reads]
        self._writes = [place.position for place in step.writes]
        self.used = {layout.where[position][0] for position in (*self._reads, *self._writes)}
        there.update(self._writes)

    def __call__(self, tensors: list[Any]) -> None:
        made = self._function(*[self._layout.tensor(position, tensors) for position in self._reads])
        if len(self._writes) == 1:
            made = (made,)
        if self._writes:
            for index, tensor in zip(self._writes, made, strict=True):
                tensors[index] = tensor


class _Kernels:
    """Kernels of a launch that start one behind the other.

    What they are passed are addresses and constants. A call looks up the address of each tensor once, and adds to it
    where the parts begin.

    Args:
        there: tensors that are there when the kernels start; those that a call allocates are added.
        more: tensors to be allocated beside those that the kernels use.
    """

    def __init__(self, layout: _Layout, steps: list[KernelLaunch], there: set[int], more: Sequence[int] = ()) -> None:
        self._layout, self._steps, self.ends = layout, steps, list[int]()
        passed = [a for step in steps for a in step.arguments if isinstance(a, Place | Block)]
        places = [argument.place if isinstance(argument, Block) else argument for argument in passed]
        used = dict.fromkeys(layout.where[place.position][0] for place in places)
        self.used = set(used)
        absent = [index for index in dict.fromkeys((*used, *more)) if index not in there]
        self._allocations = [(index, _allocation(*layout.made[index][:2], layout.device)) for index in absent]
        there.update(absent)
        self._tensors = list(used)
        slots: dict[Place | Block, int] = {}
        self._parts: list[tuple[int, int]] = []
        for argument, place in zip(passed, places, strict=True):
            index, start = layout.where[place.position]
            if argument is place and index == place.position:
                slots[argument] = self._tensors.index(index)
            elif argument not in slots:
                slots[argument] = len(self._tensors) + len(self._parts)
                self._parts.append((self._tensors.index(index), start))
        self._slots = slots
        self._starts: _Starts | None = None
        self.beside: Callable[[], None] | None = None

    def __call__(self, tensors: list[Any]) -> None:
        for index, allocate in self._allocations:
            tensors[index] = allocate()
        starts = self._starts
        if starts is None:
            if self._steps:
                self._start_by_triton(tensors)
            return
        addresses = [0 if (tensor := tensors[index]) is None else tensor.data_ptr() for index in self._tensors]
        addresses += [addresses[base] + offset for base, offset in self._parts]
        starts(addresses, current_stream(self._layout.device.index))

    def _start_by_triton(self, tensors: Sequence[Any]) -> None:
        """Start the kernels by ``kernel[grid](...)``, which compiles them, and note how to start them again."""
        tensor_at = partial(self._layout.tensor, tensors=tensors)
        passed = self._passed(tensor_at if knows_fp8(self._layout.device) else lambda at: as_bytes(tensor_at(at)))
        calls = _calls(self._steps, passed)
        is_jit = all(isinstance(step.kernel, JITFunction) for step in self._steps)
        beside, self.beside = self.beside, None
        with telling(calls) if is_jit else _interpreter:
            if is_jit:
                Context().run(compile_side_by_side, calls, beside)
            started = [call.kernel[(call.programs,)](*call.arguments, **call.options) for call in calls]
        if is_jit:
            programs = [step.programs for step in self._steps]
            kernels = list(zip(map(finished, started), programs, passed, strict=True))
            self._starts = _Starts(kernels, len(self._tensors) + len(self._parts))

    def mocked(self, inputs: Sequence[TensorMeta | None]) -> list[KernelCall]:
        """The kernels, each with stand-ins for a call's arguments: same dtype and alignment, no memory."""
        where, made, has_fp8 = self._layout.where, self._layout.made, knows_fp8(self._layout.device)

        def mock(position: int) -> Mock | None:
            index, start = where[position]
            told = inputs[index] if index < len(inputs) else None
            if index < len(inputs) and told is None:
                return None
            dtype = told.dtype if told is not None and index == position else made[position].dtype
            is_fp8 = dtype.is_floating_point and dtype.itemsize == 1
            return Mock(
                torch.uint8 if is_fp8 and not has_fp8 else dtype, start + (told is not None and not told.aligned)
            )

        return _calls(self._steps, self._passed(mock))

    def _passed(self, value_at: Callable[[int], Any]) -> list[list[tuple[int | None, Any]]]:
        """For each kernel its arguments, and for each of these where its address is; None for a constant.

        Args:
            value_at: what lies at a position, as kernels take it.
        """
        values: dict[int, Any] = {}
        for argument, slot in self._slots.items():
            value = value_at((argument.place if isinstance(argument, Block) else argument).position)
            values[slot] = argument.describe(value) if isinstance(argument, Block) else value
        return [
            [(slot := self._slots.get(a) if isinstance(a, Place | Block) else None, a if slot is None else values[slot])
             for a in step.arguments]
            for step in self._steps
        ]  # fmt: skip


def _calls(steps: Sequence[KernelLaunch], passed: Sequence[Sequence[tuple[int | None, Any]]]) -> list[KernelCall]:
    return [
        KernelCall(step.kernel, step.programs, tuple(argument for _, argument in arguments), step.options)
        for step, arguments in zip(steps, passed, strict=True)
    ]


class _Address:
    """An address in place of the tensor of a descriptor for the copy engine."""

    def __init__(self) -> None:
        self.address = 0

    def data_ptr(self) -> int:
        return self.address


class _Starts:
    """Kernels that Triton has compiled, started again with other addresses; threads may call it at once.

    What Triton documents for that, ``compiled[grid](...)``, looks up in every call what is the same in all of them. It
    is called only while somebody has asked Triton to be told of launches, or where this Triton has no
    :func:`fp4engine.private.triton_launcher`.

    Args:
        kernels: for each kernel what Triton compiled, its programs, and its arguments: the index of an address among
            those of a call, None for a constant; and what the first call passed.
        count: how many addresses a call has.
    """

    def __init__(self, kernels: Sequence[tuple[Any, int, Sequence[tuple[int | None, Any]]]], count: int) -> None:
        described = {
            slot: a for _, _, passed in kernels for slot, a in passed if slot is not None and hasattr(a, "base")
        }
        self._slots, self._templates = list(described), list(described.values())
        for position, descriptor in enumerate(self._templates):
            self._templates[position] = own = copy(descriptor)
            own.base = None  # so that it holds no tensor
        self._idle: list[list[Any]] = []  # as many as threads have been here at once
        self._constants: list[Any] = []
        # A call's addresses, the stream, the descriptors and the constants lie in one list, of which kernels pick.
        at_descriptor = {slot: count + 1 + position for position, slot in enumerate(self._slots)}

        def constant(value: Any) -> int:
            self._constants.append(value)
            return count + len(self._slots) + len(self._constants)

        self._kernels: list[tuple[Any, Any, int, itemgetter[Any]]] = []
        for compiled, programs, passed in kernels:
            run, function, metadata = triton_launcher(compiled)
            ahead = [count, *map(constant, (function, metadata, None, None, None))]  # nobody is told of the launch
            picked = [constant(a) if slot is None else at_descriptor.get(slot, slot) for slot, a in passed]
            self._kernels.append((compiled[programs, 1, 1], run, programs, itemgetter(*ahead, *picked)))

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        described: list[Any] = []
        if self._slots:
            try:
                described = self._idle.pop()
            except IndexError:
                described = [copy(template) for template in self._templates]
                for descriptor in described:
                    descriptor.base = _Address()
            for descriptor, slot in zip(described, self._slots, strict=True):
                descriptor.base.address = addresses[slot]
        values, are_told = [*addresses, stream, *described, *self._constants], _are_told()
        for start, run, programs, pick in self._kernels:
            if run is None or are_told:
                start(*pick(values)[6:], stream=stream)
            else:
                run(programs, 1, 1, *pick(values))
        if described:
            self._idle.append(described)


def _are_told() -> bool:
    """Whether somebody, such as a profiler, has asked Triton to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_interpreter = RLock()
"""Held while Triton's interpreter runs kernels: it has one state for all threads, the number of a program among it."""


@cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Feature bits and number of multiprocessors; (0, 4) under the interpreter, where any small number will do."""
    if device.type != "cuda":
        return 0, 4
    properties = torch.cuda.get_device_properties(device)
    return hardware_of(10 * properties.major + properties.minor), properties.multi_processor_count


def knows_fp8(device: torch.device) -> bool:
    """Whether Triton has types of FP8 there; for sm_80 and sm_86 it refuses a kernel that is passed one."""
    hardware, _ = device_facts(device)
    return bool(hardware & E4M3 or not hardware & PAIRS)


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """A tensor of FP8 as bytes, which is how all kernels read it but those for FP8 tensor cores."""
    is_fp8 = tensor is not None and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_fp8 else tensor


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) under the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


WIDTHS = (1024, 512, 256, 128, 64)
"""Columns of a tile, for kernels that read a matrix only by its rows."""


def fitting(length: int, *sizes: int) -> int:
    """The size of a tile that leaves the least of the last tile along ``length`` empty; of equal ones, the first."""
    return min(sizes, key=lambda size: -length % size)


class Tiles(NamedTuple):
    """A grid of tiles over a matrix.

    Attributes:
        programs: number of tiles; each is one program's.
        constants: TILE_M, TILE_K, EVEN (no tile is cut off), HARDWARE.
    """

    programs: int
    constants: tuple[int, int, bool, int]

    @staticmethod
    def of(shape: tuple[int, int], device: torch.device, tile_m: int, tile_k: int) -> "Tiles":
        rows, cols = shape
        even = rows % tile_m == 0 and cols % tile_k == 0
        count = -(-rows // tile_m) * -(-cols // tile_k)
        return Tiles(count, (tile_m, tile_k, even, device_facts(device)[0]))
