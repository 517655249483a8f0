"""Compiling the kernels of a launch: all at once, before there are tensors, and with a word where it takes long.

A call is a kernel, the number of its programs, its arguments and its options.
"""

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode, knobs

PARSES_IN_THREADS = sys.version_info >= (3, 11, 8)
"""Before, CPython counts the depth of a syntax tree for all threads together, and now and then raises SystemError."""
PATIENCE = 3.0
"""Seconds of compiling after which a launch says what it waits for."""


class KernelCall(NamedTuple):
    """``kernel[(programs,)](*arguments, **options)``."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Mock:
    """What Triton asks of a tensor when it compiles a kernel, without memory. Of a tuple it would take the elements."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def compile_side_by_side(calls: Sequence[KernelCall], beside: Callable[[], None] | None = None) -> None:
    """Compile kernels that Triton has not compiled yet, each in a thread: it takes seconds, mostly outside Python.

    A kernel that another thread has begun to compile is waited for. Triton's mode is one per context, and stays set
    there if a kernel does not compile, so that this has to run in a context of its own.

    Args:
        beside: runs in a thread for which nobody waits but the end of the process; what it raises is dropped.
    """
    if not PARSES_IN_THREADS:
        return
    with ThreadPoolExecutor(len(calls)) as threads, AsyncCompileMode(threads):
        made = [call.kernel.warmup(*call.arguments, grid=(call.programs,), **call.options) for call in calls]
        if beside is not None:  # now that Triton knows of these kernels, none of them is compiled twice
            others = ThreadPoolExecutor(1)
            others.submit(beside)
            others.shutdown(wait=False)
    for kernel in made:
        finished(kernel)


def finished(kernel: Any) -> Any:
    """What Triton compiles; waits for it if Triton gave a promise of it, which another thread may keep."""
    return kernel.result() if hasattr(kernel, "result") else kernel


@contextmanager
def telling(calls: Sequence[KernelCall]) -> Generator[None]:
    """Log one line, which Python prints on standard error, if what is done here takes longer than :data:`PATIENCE`."""
    names = ", ".join(dict.fromkeys(getattr(call.kernel, "__name__", "a kernel") for call in calls))
    text = "fp4engine: Triton is compiling %s; what it has compiled for these types and sizes is kept in %s"
    timer = Timer(PATIENCE, logging.getLogger("fp4engine").warning, (text, names, knobs.cache.dir))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
