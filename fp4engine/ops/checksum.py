"""Whether a tensor has the bytes that it had: known at once on a CPU, and elsewhere once the device has come to it."""

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from fp4engine import capability, reference


class Seal:
    """What the bytes of a tensor came to when this was made.

    On a CPU that is their CRC-32. Elsewhere it is their :func:`fp4engine.reference.checksum`, which the device adds up,
    so that nobody waits for it: :func:`are_broken` does, when all is over.

    Args:
        x: dense, of any shape, strides and dtype.
    """

    def __init__(self, x: Tensor) -> None:
        self._first = zlib.crc32(_bytes(x)) if _is_known_at_once(x) else _checksum(x)
        self._total: Tensor | None = None
        self._times = 0

    @property
    def is_to_be_looked_at(self) -> bool:
        """Whether :func:`are_broken` knows more than :meth:`fits` has told."""
        return self._times > 0

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` has the bytes; True where that is not known yet."""
        if isinstance(self._first, int):
            return zlib.crc32(_bytes(x)) == self._first
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph runs again, and nobody looks
            self._total = _checksum(x, self._total)
            self._times += 1
        return True

    def excess(self) -> Tensor:
        """int64 [1]: 0 if the bytes were the same whenever :meth:`fits` was called."""
        assert isinstance(self._first, Tensor) and self._total is not None
        return self._total - self._first * self._times


def are_broken(seals: Sequence[Seal]) -> list[bool]:
    """For each seal whether a tensor had other bytes when :meth:`Seal.fits` was called; waits for their devices."""
    found = [seal.excess() for seal in seals]
    for device in {excess.device for excess in found if excess.is_cuda}:
        torch.cuda.synchronize(device)  # other streams may have added to them
    return [bool(excess.item()) for excess in found]


def _is_known_at_once(x: Tensor) -> bool:
    return x.is_cpu


def _bytes(x: Tensor) -> memoryview:
    dense = x.detach().resolve_neg().contiguous()
    # A stride of one element alone may be any, also where PyTorch calls the tensor contiguous.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _checksum(x: Tensor, total: Tensor | None = None) -> Tensor:
    """``total`` plus the checksum of ``x``."""
    if total is None:
        total = torch.zeros(1, dtype=torch.int64, device=x.device)
    if capability.triton_runs_on(x.device)[0] and x.is_contiguous() and not x.is_neg() and x.element_size() <= 4:
        _kernel()(x.detach(), total)
    else:
        total += reference.checksum(x)
    return total


@cache
def _kernel() -> Callable[[Tensor, Tensor], None]:
    from fp4engine.kernels.checksum import add_checksum

    return add_checksum
