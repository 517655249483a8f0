"""Work on large weights in slabs of a few rows, each by one thread, and a bar that shows how far it is.

Operations on slabs that fit into a core's cache are several times as fast as on whole weights, and threads with a slab
each do not wait for each other at the end of every operation.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

T = TypeVar("T")

_ELEMENTS = 1 << 19


class Slabs:
    """While it is open, operations of PyTorch run on one thread, and :meth:`map` on as many as these used before."""

    def __enter__(self) -> "Slabs":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def map(self, function: Callable[[slice], T], weight: Tensor, height: int) -> Iterable[T]:
        """``function`` of every slab, in order: a multiple of ``height`` rows of ``weight`` [N, K].

        A weight that is not on a CPU is one slab.
        """
        rows, cols = weight.shape
        step = max(_ELEMENTS // cols // height, 1) * height if weight.device.type == "cpu" else rows
        parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        # Modes are those of a thread, and only inference mode writes to tensors that were made in it.
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
        return self._pool.map(mode()(function), parts)


def progress_bar(items: Iterable[Any], what: str, unit: str, shown: bool) -> Any:
    """``items`` with a bar; where standard error is no terminal, or ``shown`` is False, there is none."""
    return tqdm(items, desc=what, unit=unit, disable=None if shown else True, dynamic_ncols=True)
