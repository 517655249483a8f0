"""How kernels are started: a question about tensors is resolved to a :class:`Launch` once, and launched many times.

A question is everything that the answer depends on: the operation, its constants, and the :class:`Facts` of each
tensor. A resolver, one function per operation, drafts the answer: which buffers to allocate, and which kernels to start
with which arguments. Resolvers are pure, so each has a bounded cache (:func:`resolver`). No kernel of
this package reaches a GPU, or Triton's interpreter, in another way; products of PyTorch's own are calls of PyTorch.

    launch = resolve_cast((facts(x), ...), x.device, ...)        outputs = launch(x, ...)
"""

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import Context
from functools import cache, lru_cache, partial
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fp4engine.constants import ALIGNMENT, MOST_QUESTIONS
from fp4engine.formats.one_buffer import offsets
from fp4engine.kernels import cuda_driver
from fp4engine.kernels.target import E4M3, PAIRS, hardware_of


class Facts(NamedTuple):
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
        """Elements from one row of a matrix to the next. That of a single row means nothing and is not used."""
        return self.strides[0] if self.shape[0] > 1 else self.shape[1]

    @property
    def is_column_major(self) -> bool:
        """True if the elements of a column, and not those of a row, lie side by side in memory."""
        return self.strides[1] != 1 and self.strides[0] == 1

    @property
    def transposed(self) -> "Facts":
        """The facts of the transposed view of a matrix."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])


def _allocation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor, with strides given: ``torch.empty`` takes half as long again.

    Where PyTorch's private allocation is used, ``device`` has to be the current one when the function is called. The
    function holds no tensor to be like: one that is made under a mode, such as FakeTensorMode, is not one of memory.
    """
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    if device.type == "cuda" and (allocate := private_allocation()) is not None:
        return partial(allocate, tuple(shape), tuple(reversed(strides)), dtype)  # it refuses a torch.Size
    return partial(torch.empty_strided, shape, tuple(reversed(strides)), dtype=dtype, device=device)


@cache
def private_allocation() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None:
    """The call by which graphs of Inductor's make a tensor on the current CUDA device, from shape, strides and dtype.

    It takes half as long as ``torch.empty_strided``, which parses keywords and goes through the dispatcher. The name is
    private, so None where it is not there, or does not make what it is asked for.
    """
    try:
        allocate = torch._C._dynamo.guards._empty_strided_cuda
        made = allocate((2, 3), (3, 1), torch.uint8)
        is_right = (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.uint8) and made.is_cuda
    except (AttributeError, TypeError, RuntimeError):
        return None
    return allocate if is_right else None


_new = tuple.__new__


def facts(tensor: Tensor | None) -> Facts | None:
    """The facts of ``tensor``; None for None."""
    if tensor is None:
        return None
    # The same as Facts(...), without a call of Python: this runs for every tensor of every launch.
    return _new(Facts, (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0))


Resolver = TypeVar("Resolver", bound=Callable[..., Any])


def resolver(function: Resolver) -> Resolver:
    """Put a bounded cache in front of a pure function of hashable arguments."""
    return lru_cache(maxsize=MOST_QUESTIONS)(function)  # pyright: ignore[reportReturnType]


class Place(NamedTuple):
    """A tensor of a launch, by its position in the list of its inputs followed by its buffers."""

    position: int


class Block(NamedTuple):
    """An argument that a kernel gets in place of a whole tensor: a part of it, or a descriptor for the copy engine.

    Attributes:
        describe: makes the argument from the tensor.
        at: how many bytes behind the tensor's first byte the argument begins; all else is the same in every call.
    """

    place: Place
    describe: Callable[[Tensor], Any]
    at: int = 0


def part_of(start: int, size: int, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The part of a buffer of bytes that is ``size`` bytes from byte ``start`` on, for a :class:`Block`."""
    return tensor[start : start + size].view(dtype)


class Step(NamedTuple):
    """One kernel to start: ``kernel[(programs,)](*arguments, **options)``.

    Attributes:
        arguments: the kernel's arguments in its order; a tensor is a :class:`Place` or a :class:`Block`.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Draft:
    """A launch that a resolver is still writing.

    Args:
        device: where the launch will run.
        inputs: how many tensors the launch will be called with.
    """

    def __init__(self, device: torch.device, inputs: int) -> None:
        self.device = device
        self.inputs = tuple(Place(index) for index in range(inputs))
        self._buffers: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._outputs: list[int] = []
        self._steps: list[Step] = []

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        """A contiguous, uninitialised buffer that lives as long as the call."""
        self._buffers.append((shape, dtype))
        return Place(len(self.inputs) + len(self._buffers) - 1)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        """A buffer that the call returns; outputs are returned in the order of their declaration."""
        place = self.scratch(shape, dtype)
        self._outputs.append(place.position)
        return place

    def step(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Add a kernel to start, on a one-dimensional grid of ``programs``; add nothing if there are none.

        FP contraction is off: a fused multiply-add rounds once where the contract (docs/numerics.md) rounds twice.
        """
        if programs:
            self._steps.append(Step(kernel, programs, arguments, {"enable_fp_fusion": False, **options}))

    def launch(self) -> "Launch":
        """The finished launch."""
        return Launch(self.device, len(self.inputs), tuple(self._buffers), tuple(self._outputs), tuple(self._steps))


class Launch:
    """The answer to a question. Called with the question's tensors, it allocates buffers, starts kernels and returns.

    Attributes:
        outputs: shape and dtype of what a call returns.
        steps: the kernels that a call starts, in their order.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: int,
        buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...],
        outputs: tuple[int, ...],
        steps: tuple[Step, ...],
    ) -> None:
        self.outputs = [buffers[index - inputs] for index in outputs]
        self.steps = steps
        self._device, self._index = device, device.index if device.type == "cuda" else None
        self._may_be_elsewhere = device.type == "cuda" and torch.cuda.device_count() > 1
        parts = [index for index in range(inputs, inputs + len(buffers)) if index not in outputs]
        self._outputs = [_allocation(*buffer, device) for buffer in self.outputs]
        self._parts = [_allocation(*buffers[index - inputs], device) for index in parts]
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in (buffers[index - inputs] for index in parts))
        self._offsets, room = offsets(sizes)
        self._room = _allocation((room,), torch.uint8, device) if parts else None
        order = {index: place for place, index in enumerate([*range(inputs), *outputs, *parts])}
        blocks: dict[Block, int] = {}
        self._arguments: list[list[tuple[int | None, Any]]] = []
        for step in steps:
            arguments: list[tuple[int | None, Any]] = []
            for argument in step.arguments:
                if isinstance(argument, Place):
                    arguments.append((order[argument.position], None))
                elif isinstance(argument, Block):
                    arguments.append((blocks.setdefault(argument, len(order) + len(blocks)), None))
                else:
                    arguments.append((None, argument))
            self._arguments.append(arguments)
        self._blocks = [(order[block.place.position], block.describe, block.at) for block in blocks]
        self._is_compiled = self._is_planned = False
        self._plan: cuda_driver.Plan | None = None

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        """Allocate the buffers, start the kernels, return the outputs. Does not wait for the device.

        This is one long function, since a call of Python in it would be made some ten times in a linear layer's step.
        """
        index, plan = self._index, self._plan
        if self._may_be_elsewhere and index != torch.cuda.current_device():
            with torch.cuda.device(index):  # kernels start on the current device, wherever their arguments lie
                return self(*inputs)
        outputs = [allocate() for allocate in self._outputs]
        if plan is None or index is None or _is_watched():
            self._start_by_triton([*inputs, *outputs])
            return outputs
        # Of inputs, outputs, scratch buffers and blocks, in this order; a tensor is asked for its address once.
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*inputs, *outputs)]
        if self._room is not None:  # all scratch buffers are one allocation
            room = self._room()
            address = room.data_ptr()
            addresses += [address + offset for offset in self._offsets]
        for place, _, offset in self._blocks:
            addresses.append(addresses[place] + offset)
        plan(addresses, driver.active.get_current_stream(index), index)
        return outputs

    def _start_by_triton(self, values: list[Any]) -> None:
        """Start the kernels by Triton's documented call, ``kernel[grid](...)``, and plan how to start them again.

        Args:
            values: the inputs, then the outputs.
        """
        values += [allocate() for allocate in self._parts]
        if not knows_fp8(self._device):
            values = [as_bytes(tensor) for tensor in values]
        values += [describe(values[place]) for place, describe, _ in self._blocks]
        passed = [
            [(index, constant if index is None else values[index]) for index, constant in arguments]
            for arguments in self._arguments
        ]
        calls = [
            (step, tuple(argument for _, argument in arguments))
            for step, arguments in zip(self.steps, passed, strict=True)
        ]
        is_jit = all(isinstance(step.kernel, JITFunction) for step in self.steps)
        if is_jit and not self._is_compiled:
            Context().run(_compile_side_by_side, calls)  # in a context of its own: a failure leaves Triton's mode set
            self._is_compiled = True
        with nullcontext() if is_jit else _interpreter:
            compiled = [step.kernel[(step.programs,)](*arguments, **step.options) for step, arguments in calls]
        if is_jit and compiled and self._index is not None and not self._is_planned:
            programs = [step.programs for step in self.steps]
            self._plan = cuda_driver.plan(list(zip(compiled, programs, passed, strict=True)), len(values))
            self._is_planned = True


_interpreter = RLock()
"""Held while Triton's interpreter runs kernels: it has one state for all threads, the number of a program among it."""

_PARSES_IN_THREADS = sys.version_info >= (3, 11, 8)
"""Before, CPython counts the depth of a syntax tree for all threads together, and now and then raises SystemError."""


def _compile_side_by_side(calls: Sequence[tuple[Step, tuple[Any, ...]]]) -> None:
    """Compile kernels that Triton has not compiled yet, each in a thread: it takes seconds, mostly outside Python."""
    if len(calls) < 2 or not _PARSES_IN_THREADS:
        return
    with ThreadPoolExecutor(len(calls)) as threads, AsyncCompileMode(threads):
        for step, arguments in calls:
            step.kernel.warmup(*arguments, grid=(step.programs,), **step.options)


def _is_watched() -> bool:
    """Whether a profiler has asked Triton to be told of launches, which only ``kernel[grid](...)`` does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
