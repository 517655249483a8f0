"""A GPU as Triton and this package see it: a driver that starts kernels, and memory."""

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fp4engine import capability as machine
from fp4engine import kernels
from fp4engine.kernels import launch
from fp4engine.kernels.target import hardware_of
from tests.answers import forget
from tests.emulated_gpu.code import Code
from tests.emulated_gpu.program import Program

MULTIPROCESSORS = 4
SHARED_MEMORY = 101_376
"""Bytes that a program may have, the least of the GPUs that are emulated."""
ROOM = 256
"""Bytes that lie between two tensors at least."""
FORMATS = {"i1": "<?", "i32": "<i", "i64": "<q", "fp32": "<f"}
"""Of numbers that kernels take."""


class Driver:
    """What Triton asks of a driver, for a GPU of ``capability`` (10 * major + minor), which is its number as well."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.launcher_cls = Launcher
        properties = {"max_shared_mem": SHARED_MEMORY}
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda device: properties)

    def _load(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, Code, int, int, int]:
        registers, spills, threads = 0, 0, 1024
        return None, Code(cubin, self.target.arch), registers, spills, threads

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Launcher:
    """What Triton calls to start a kernel, whose tensors are on the CPU. Programs run one after the other."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types, self._threads = list(source.signature.values()), metadata.num_warps * 32

    def __call__(self, *given: Any) -> None:
        programs, code, arguments = given[0], given[4], given[9:]
        passed = [pair for pair in zip(self._types, arguments, strict=True) if pair[0] != "constexpr"]
        memory = Memory([storage_of(argument) for type_, argument in passed if type_.startswith("*")])
        packed = []
        for type_, argument in passed:
            if type_.startswith("*"):
                packed.append(struct.pack("<Q", memory.address(address_of(argument))))
            else:
                packed.append(struct.pack(FORMATS[type_], argument))
        packed += [bytes(8)] * 2  # Triton's own scratch, which these kernels do without
        for number in range(programs):
            Program(code, packed, memory.bytes, number, programs, self._threads).run()
        memory.give_back()


def address_of(pointer: torch.Tensor | int) -> int:
    """What is passed for a pointer: a tensor by a kernel's first call, its address by later ones."""
    return pointer if isinstance(pointer, int) else pointer.data_ptr()


def storage_of(pointer: torch.Tensor | int) -> torch.UntypedStorage:
    """The storage in which lies what is passed for a pointer."""
    if not isinstance(pointer, int):
        return pointer.untyped_storage()
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and not found.is_meta:
            storage = found.untyped_storage()
            with suppress(RuntimeError):  # a functional tensor, which something compiled has left, has no memory
                if storage.data_ptr() <= pointer < storage.data_ptr() + max(storage.nbytes(), 1):
                    return storage
    raise ValueError(f"no tensor lies at {pointer:#x}")


class Memory:
    """The bytes of tensors, one after the other; a kernel must not write what is between them."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._views = {
            storage.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in storages
        }
        self._places: dict[int, int] = {}
        end = ROOM
        for place, view in self._views.items():
            self._places[place] = end + place % ROOM  # as well aligned as it is
            end += -(-(len(view) + 2 * ROOM) // ROOM) * ROOM
        self.bytes = np.random.default_rng(end).integers(0, 256, end, dtype=np.uint8)
        self._before = self.bytes.copy()
        for place, view in self._views.items():
            self.bytes[self._slice(place)] = view

    def _slice(self, place: int) -> slice:
        return slice(self._places[place], self._places[place] + len(self._views[place]))

    def address(self, pointer: int) -> int:
        place = max(place for place in self._places if place <= pointer)
        return self._places[place] + pointer - place

    def give_back(self) -> None:
        """Give the tensors what the kernel has written."""
        for place, view in self._views.items():
            view[:] = self.bytes[self._slice(place)]
            self.bytes[self._slice(place)] = self._before[self._slice(place)]
        assert (self.bytes == self._before).all(), "a kernel wrote beside a tensor"


@contextmanager
def emulated(capability: int) -> Iterator[None]:
    """Tensors on the CPU are on a GPU of ``capability``, 80 to 90, as far as this package and Triton know."""
    facts = hardware_of(capability), MULTIPROCESSORS
    modules = [import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Driver(capability))
        patch.setattr(machine, "read_flag", lambda *_: True)
        patch.setattr(launch, "current_stream", lambda index: 0)
        for module in modules:
            if hasattr(module, "device_facts"):
                patch.setattr(module, "device_facts", lambda device: facts)
            if hasattr(module, "capability_of"):
                patch.setattr(module, "capability_of", lambda device: divmod(capability, 10))
        forget()
        try:
            yield
        finally:
            patch.undo()
            forget()
