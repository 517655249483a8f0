"""Whether a tensor has the bytes that it had: known at once on a CPU, and elsewhere once the device has come to it."""

import ctypes
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine import capability, reference


class Seal(NamedTuple):
    """What a device compares the bytes of a tensor with, so that nobody waits for it.

    Attributes:
        first: what the bytes came to, from :func:`digest`: a vector if a kernel has added them up, else a scalar.
        broken: int32 [1], 0 as long as every comparison has found the same bytes.
        spoiled: at most two, from :func:`in_bytes`, which the device fills with NaN once it finds other bytes. A
            product by them that comes later on the same stream is then not finite.
    """

    first: Tensor
    broken: Tensor
    spoiled: tuple[Tensor, ...]


def digest(x: Tensor) -> int | Tensor:
    """What the bytes of ``x`` come to.

    On a CPU that is their CRC-32. Elsewhere it is their :func:`fp4engine.reference.checksum`, which the device adds up.

    Args:
        x: of any strides, with elements of 1, 2, 4 or 8 bytes.

    Raises:
        RuntimeError: a tensor on a CPU has no memory, as a fake one.
    """
    if is_known_at_once(x):
        dense = x.detach().resolve_neg().contiguous()
        address = dense.data_ptr()
        if not address and dense.nbytes:
            raise RuntimeError(
                f"a weight that is cached must have memory, whose bytes are compared, got a {type(x).__name__}"
            )
        # Not through NumPy, after which PyTorch refuses to resize the storage, as FSDP2 does to let go of it.
        return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(address))
    if not _has_kernel(x):
        return reference.checksum(x).sum()
    from fp4engine.kernels.checksum import checksums

    return checksums(x.detach())


def compare(x: Tensor, seal: Seal) -> None:
    """Have the device compare ``x`` with the tensor of its shape and dtype that was sealed."""
    first, broken, spoiled = seal
    if first.ndim and _has_kernel(x):
        from fp4engine.kernels.checksum import compare

        compare(x.detach(), first, broken, spoiled)
        return
    with torch.inference_mode():  # where every tensor may be written to
        differs = reference.checksum(x).sum() != first.sum()
        broken.logical_or_(differs)
        for each in spoiled:
            each.masked_fill_(differs, 0xFF)


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
    """Whether the host knows the :func:`digest` of ``x`` when it has it."""
    return x.is_cpu


def _has_kernel(x: Tensor) -> bool:
    return capability.triton_runs_on(x.device)[0] and x.is_contiguous() and not x.is_neg() and x.element_size() <= 4
