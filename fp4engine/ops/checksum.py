"""Whether a tensor has the bytes that it had: known at once on a CPU, and elsewhere once the device has come to it."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fp4engine import capability, reference


class Seal:
    """What the bytes of a tensor came to when this was made.

    On a CPU that is their CRC-32. Elsewhere it is their :func:`fp4engine.reference.checksum`, which the device adds up
    and compares, so that nobody waits for it.

    Args:
        x: of any strides, with elements of 1, 2, 4 or 8 bytes.

    Attributes:
        broken: int32 [1] on the device of ``x``, 0 as long as every comparison there has found the same bytes; None if
            there was none.
    """

    def __init__(self, x: Tensor) -> None:
        self._is_by_kernel = not is_known_at_once(x) and _has_kernel(x)
        self._first = zlib.crc32(_bytes(x)) if is_known_at_once(x) else _checksums(x)
        self.broken: Tensor | None = None

    def fits(self, x: Tensor, spoiled: Sequence[Tensor] = ()) -> bool:
        """Whether ``x`` has the bytes; True where that is not known yet.

        Where it is not known, the device fills ``spoiled`` with NaN once it finds other bytes, and :attr:`broken` says
        so. A product by ``spoiled`` that comes later on the same stream is then not finite.

        Args:
            x: of the shape and dtype of the tensor that was sealed.
            spoiled: at most two, from :func:`in_bytes`.
        """
        if isinstance(self._first, int):
            return zlib.crc32(_bytes(x)) == self._first
        if self.broken is None:
            self.broken = torch.zeros(1, dtype=torch.int32, device=x.device)
        if self._is_by_kernel and _has_kernel(x):
            from fp4engine.kernels.checksum import compare

            compare(x.detach(), self._first, self.broken, list(spoiled))
        else:
            with torch.inference_mode():  # where every tensor may be written to
                differs = reference.checksum(x) != self._first.sum()
                self.broken.logical_or_(differs)
                for each in spoiled:
                    each.masked_fill_(differs, 0xFF)
        return True


def in_bytes(x: Tensor) -> Tensor:
    """The memory of ``x``, dense, as uint8 [bytes]; a write to it does not move the version counter of ``x``."""
    dense = x.data if x.is_contiguous() else x.data.T
    return dense.view(-1).view(torch.uint8)


def are_broken(flags: Sequence[Tensor]) -> list[bool]:
    """Which of these :attr:`Seal.broken` are set; waits for their devices."""
    for device in {flag.device for flag in flags if flag.is_cuda}:
        torch.cuda.synchronize(device)  # other streams may have compared too
    return [bool(flag.item()) for flag in flags]


def is_known_at_once(x: Tensor) -> bool:
    """Whether a comparison of ``x`` is over when :meth:`Seal.fits` returns."""
    return x.is_cpu


def _has_kernel(x: Tensor) -> bool:
    return capability.triton_runs_on(x.device)[0] and x.is_contiguous() and not x.is_neg() and x.element_size() <= 4


def _bytes(x: Tensor) -> memoryview:
    dense = x.detach().resolve_neg().contiguous()
    # A stride of one element alone may be any, also where PyTorch calls the tensor contiguous.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _checksums(x: Tensor) -> Tensor:
    if not _has_kernel(x):
        return reference.checksum(x)
    from fp4engine.kernels.checksum import checksums

    return checksums(x.detach())
