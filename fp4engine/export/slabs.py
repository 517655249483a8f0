"""Work on large weights a few rows at a time, one thread for each part.

Operations on parts that a core's cache holds are several times as fast as on whole weights, and threads that take a
part each do not wait for each other at the end of every operation.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ELEMENTS = 1 << 19


class Slabs:
    """While it is open, operations of PyTorch have one thread, and :meth:`map` has as many as they had before."""

    def __enter__(self) -> "Slabs":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def map(self, function: Callable[[slice], T], weight: Tensor, height: int) -> Iterable[T]:
        """``function`` of every slab, in order: rows of ``weight`` [N, K], ``height`` or a multiple of it at a time.

        Weights that are not on a CPU are one slab.
        """
        rows, cols = weight.shape
        step = max(_ELEMENTS // cols // height, 1) * height if weight.device.type == "cpu" else rows
        parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        return self._pool.map(_quiet(function), parts)


def _quiet(function: Callable[[slice], Any]) -> Callable[[slice], Any]:
    def without_gradients(rows: slice) -> Any:
        with torch.no_grad():  # which every thread says for itself
            return function(rows)

    return without_gradients
