"""Compiled kernels, started by what the CUDA driver documents: ``cuLaunchKernelEx`` and descriptors of matrices.

Of all that the kernels of a launch are passed, only addresses change from one call to the next. So their arguments are
laid out in memory once. A call writes its addresses there, all at once, and starts the kernels. Triton's own launcher
parses every argument of every kernel in every call, and makes every descriptor anew.

What a kernel takes is read from its PTX, and must be what Triton's signature says. Where it is not, or where a kernel
needs what is not known here, :func:`plan` answers None, and Triton starts the kernels.

Sources: CUDA Driver API, "Execution Control" and "Tensor Map Object Management"; PTX ISA, "Kernel Function Parameters".
"""

import ctypes
import re
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_char, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from struct import Struct
from typing import Any, NamedTuple

import torch

_MAP_BYTES, _MAP_ALIGNMENT = 128, 128
"""Of a descriptor, CUtensorMap; CUDA 13 declares that it lies at a multiple of 128 bytes, CUDA 12 of 64."""

_CODES = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
"""Type in a signature of Triton's -> the code of :mod:`struct` for it."""

_MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""Dtype -> CUtensorMapDataType."""

_INVALID_CONTEXT = 201
_EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_L2_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

_LAST_WRONG_VERSION, _SMALL, _WRONG_BIT = 13030, 128 << 10, 1 << 21
"""For a matrix of less than 128 KiB, drivers up to CUDA 13.3 may set a bit in bytes 8 to 15 that must not be set.

With it, Blackwell now and then reads memory that is not there ("Known Issues" of NVIDIA's driver 595.71.05, which say
to clear it). Triton and CUTLASS clear it up to CUDA 13.1, on every GPU.
"""


class _Attribute(Structure):
    """CUlaunchAttribute, of a value that is one integer."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_int), ("rest", c_char * 60))


class _Configuration(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("attribute_count", c_uint),
    )


class Driver:
    """The functions of ``libcuda`` that are used here, each a Python callable that returns a CUresult.

    Attributes:
        is_wrong_for_small: whether it sets :data:`_WRONG_BIT`.
    """

    def __init__(self, library: Any) -> None:
        self.start = library.cuLaunchKernelEx
        self.encode = library.cuTensorMapEncodeTiled
        self.replace = library.cuTensorMapReplaceAddress
        self.replace.argtypes = (c_void_p, c_void_p)
        self._name, self._retain = library.cuGetErrorName, library.cuDevicePrimaryCtxRetain
        self._device, self._make_current = library.cuDeviceGet, library.cuCtxSetCurrent
        version = c_int()
        library.cuDriverGetVersion(byref(version))
        self.is_wrong_for_small = version.value <= _LAST_WRONG_VERSION

    def check(self, error: int, what: str) -> None:
        if error:
            name = c_char_p()
            self._name(error, byref(name))
            raise RuntimeError(f"CUDA could not {what}: {(name.value or b'error').decode()} ({error})")

    def enter(self, device: int) -> None:
        """Make the context that PyTorch uses on a device that of this thread, which may have none yet."""
        handle, context = c_int(), c_void_p()
        self.check(self._device(byref(handle), device), f"find device {device}")
        self.check(self._retain(byref(context), handle), f"find the context of device {device}")
        self.check(self._make_current(context), f"enter the context of device {device}")


@cache
def driver() -> Driver | None:
    """The CUDA driver of this machine; None if there is none, or one older than CUDA 12."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class Slot(NamedTuple):
    """An argument whose address a call gives: the ``position``-th of its addresses."""

    position: int


class Described(NamedTuple):
    """A matrix for the copy engine: where it begins, and what else its descriptor says.

    Attributes:
        clears_bit: whether the driver may have set :data:`_WRONG_BIT` in the descriptor, so that it has to be cleared.
    """

    slot: Slot
    descriptor: bytes
    clears_bit: bool


class Kernel(NamedTuple):
    """A kernel, and all that it is passed.

    Attributes:
        compiled: what Triton compiled; Triton 3.8 unloads ``function``, a CUfunction, when it is collected.
        parameters: a :class:`Slot`, a :class:`Described`, or the bytes of a number, in the kernel's order.
        has_early_start: whether it may begin before the kernel before it has ended.
    """

    compiled: Any
    function: int
    programs: int
    threads: int
    shared: int
    has_early_start: bool
    parameters: tuple[Slot | Described | bytes, ...]


def plan(calls: Sequence[tuple[Any, int, Sequence[tuple[int | None, Any]]]], slots: int) -> "Plan | None":
    """How to start kernels that Triton has compiled and started; None if one of them is not understood here.

    Args:
        calls: for each kernel what Triton compiled, the number of programs, and the arguments of a call that has
            happened: for an address its index among the addresses of a call, else None; and the argument.
        slots: how many addresses a call gives.
    """
    found = driver()
    if found is None:
        return None
    kernels: list[Kernel] = []
    for compiled, programs, arguments in calls:
        try:
            kernel = _kernel(found, compiled, programs, arguments)
        except AttributeError:  # another version of Triton, which tells less of a kernel
            return None
        if kernel is None:
            return None
        kernels.append(kernel)
    return Plan(found, kernels, slots)


def _kernel(found: Driver, compiled: Any, programs: int, arguments: Sequence[tuple[int | None, Any]]) -> Kernel | None:
    metadata, types = compiled.metadata, list(compiled.src.signature.values())
    is_plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not is_plain or metadata.global_scratch_size or metadata.profile_scratch_size or len(types) != len(arguments):
        return None
    blocks = iter(metadata.tensordesc_meta or ())
    parameters: list[Slot | Described | bytes] = []
    for type_, (index, argument) in zip(types, arguments, strict=True):
        if type_ == "constexpr":
            continue
        if index is None:
            if type_ not in _CODES:
                return None
            parameters.append(Struct(_CODES[type_]).pack(argument))
        elif type_.startswith("*"):
            parameters.append(Slot(index))
        elif type_.startswith("tensordesc") and (block := next(blocks, None)) is not None:
            described = _described(found, Slot(index), block, argument)
            if described is None:
                return None
            parameters.append(described)  # Triton passes shape and strides after a descriptor
            parameters += [Struct("i").pack(size) for size in argument.shape]
            parameters += [Struct("q").pack(stride) for stride in argument.strides]
        else:
            return None
    parameters += [bytes(8), bytes(8)]  # Triton's own scratch, of which there is none
    taken = _taken(compiled.asm["ptx"])
    if taken is None or [_size(parameter) for parameter in parameters] != taken[1]:
        return None
    early = bool(metadata.launch_pdl)
    return Kernel(compiled, compiled.function, programs, taken[0], metadata.shared, early, tuple(parameters))


def _size(parameter: Slot | Described | bytes) -> int:
    if isinstance(parameter, Slot):
        return 8
    return _MAP_BYTES if isinstance(parameter, Described) else len(parameter)


_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)\s*\.reqntid\s+(\d+)")
_PARAMETER = re.compile(r"\.param\s.*?\.[bufs](\d+)\s[^\[]*(?:\[(\d+)\])?$")


def _taken(ptx: str) -> tuple[int, list[int]] | None:
    """What the one kernel of ``ptx`` takes: threads of a program, and the bytes of each parameter."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        return None
    (declared, threads), sizes = entries[0], []
    for line in declared.split(","):
        match = _PARAMETER.search(line.strip())
        if match is None:
            return None
        sizes.append(int(match[1]) // 8 * int(match[2] or 1))
    return int(threads), sizes


def _described(found: Driver, slot: Slot, block: dict[str, Any], matrix: Any) -> Described | None:
    """``matrix``, a descriptor of Triton's, as a CUtensorMap, in blocks of which ``block`` tells."""
    dtype = _MAP_TYPES.get(matrix.base.dtype if matrix.base.dtype.itemsize > 1 else torch.uint8)
    if dtype is None or block["fp4_padded"] or matrix.padding != "zero" or matrix.strides[-1] != 1:
        return None
    rank, itemsize = len(matrix.shape), block["elem_size"]
    memory, place = _memory(_MAP_BYTES)
    error = found.encode(
        c_void_p(addressof(memory) + place), c_int(dtype), c_uint32(rank), c_void_p(matrix.base.data_ptr()),
        (c_uint64 * rank)(*matrix.shape[::-1]), (c_uint64 * rank)(*[itemsize * s for s in matrix.strides[-2::-1]]),
        (c_uint32 * rank)(*block["block_size"][::-1]), (c_uint32 * rank)(*[1] * rank),
        c_int(0), c_int(block["swizzle"]), c_int(_L2_PROMOTION), c_int(0),
    )  # fmt: skip
    found.check(error, f"describe a matrix of shape {list(matrix.shape)} and strides {list(matrix.strides)}")
    last = itemsize * sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.strides, strict=True))
    return Described(slot, memory.raw[place : place + _MAP_BYTES], found.is_wrong_for_small and last + 1 < _SMALL)


class Plan:
    """Kernels and what they are passed but for addresses. Called, it starts the kernels; threads may call it at once.

    Args:
        slots: how many addresses a call gives.
    """

    def __init__(self, found: Driver, kernels: Sequence[Kernel], slots: int) -> None:
        self._driver, self._kernels, self._slots = found, kernels, slots
        self._idle: list[_Arguments] = []  # as many as threads have been here at once

    def __call__(self, addresses: Sequence[int], stream: int, device: int) -> None:
        """Start the kernels, on ``stream``, a CUstream, of ``device``; does not wait for them."""
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = _Arguments(self._kernels, self._slots)
        arguments.write(*addresses)
        if arguments.maps:
            arguments.describe(self._driver, addresses)
        if stream != arguments.stream:
            arguments.move(stream)
        start = self._driver.start
        for started in arguments.starts:
            if error := start(*started):
                if error == _INVALID_CONTEXT:
                    self._driver.enter(device)
                    error = start(*started)
                self._driver.check(error, "start a kernel")
        self._idle.append(arguments)


class _Arguments:
    """The memory that one call of a plan passes to the kernels.

    Attributes:
        write: takes the addresses that a call gives.
        maps: for each descriptor the position of its address, where it lies, what may have to be cleared in it, and the
            address that it holds.
        stream: on which the kernels start; None before the first call.
        starts: the arguments of ``cuLaunchKernelEx`` for each kernel.
    """

    def __init__(self, kernels: Sequence[Kernel], slots: int) -> None:
        self._addresses = (c_uint64 * slots)()
        self.write = partial(Struct(f"{slots}Q").pack_into, self._addresses, 0)
        self.maps: list[list[Any]] = []
        self.stream: int | None = None
        self._configurations = [_configuration(kernel) for kernel in kernels]
        self._kept: list[Any] = []
        self.starts = [
            (byref(configuration), c_void_p(kernel.function), self._pointers(kernel), None)
            for configuration, kernel in zip(self._configurations, kernels, strict=True)
        ]

    def _pointers(self, kernel: Kernel) -> Any:
        """The address of each parameter."""
        found: list[int] = []
        for parameter in kernel.parameters:
            if isinstance(parameter, Slot):
                found.append(addressof(self._addresses) + 8 * parameter.position)
                continue
            given = parameter.descriptor if isinstance(parameter, Described) else parameter
            memory, place = _memory(len(given))
            memory[place : place + len(given)] = given
            self._kept.append(memory)
            found.append(addressof(memory) + place)
            if isinstance(parameter, Described):
                flags = c_uint64.from_address(found[-1] + 8) if parameter.clears_bit else None
                self.maps.append([parameter.slot.position, found[-1], flags, None])
        return (c_void_p * len(found))(*found)

    def describe(self, found: Driver, addresses: Sequence[int]) -> None:
        """Write the addresses that have changed into their descriptors."""
        for described in self.maps:
            index, place, flags, last = described
            address = addresses[index]
            if address != last:
                found.check(found.replace(place, address), f"describe a matrix at address {address:#x}")
                if flags is not None:
                    flags.value &= ~_WRONG_BIT
                described[3] = address

    def move(self, stream: int) -> None:
        """Start the kernels on another stream from now on."""
        self.stream = stream
        for configuration in self._configurations:
            configuration.stream = stream


def _memory(size: int) -> tuple[Any, int]:
    """Memory, and where in it ``size`` bytes begin at a multiple of :data:`_MAP_ALIGNMENT`."""
    memory = (c_char * (size + _MAP_ALIGNMENT))()
    return memory, -addressof(memory) % _MAP_ALIGNMENT


def _configuration(kernel: Kernel) -> _Configuration:
    early = (_Attribute * 1)(_Attribute(_EARLY_START, 0, 1))
    return _Configuration(
        (kernel.programs, 1, 1), (kernel.threads, 1, 1), kernel.shared, None, early, int(kernel.has_early_start)
    )
