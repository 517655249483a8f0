"""Reductions over the ranks of process groups: outer amaxes that they share, and integers that are compared."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine import private
from fp4engine.constants import AMAX_STRIDE

_MAGNITUDE = 0x7FFF_FFFF
"""Every bit of an FP32 number but its sign."""


def packed_amaxes(amaxes: list[Tensor]) -> Tensor:
    """FP32 [n, AMAX_STRIDE]: n amaxes in the layout that :func:`share_amaxes` reduces, each repeated along its row.

    The sign of a NaN is cleared, so that NaNs order above all numbers as integers.

    Args:
        amaxes: FP32 vectors with n elements in all.
    """
    bits = torch.cat(amaxes).view(torch.int32).bitwise_and_(_MAGNITUDE)
    return bits[:, None].expand(-1, AMAX_STRIDE).contiguous().view(torch.float32)


def largest_magnitudes(matrices: Sequence[Tensor]) -> Tensor:
    """FP32 [n]: the largest magnitude in each matrix, 0 if it is empty and NaN if it has one; in few launches.

    These are the outer amaxes of casts that neither rotate nor align their scales.
    """
    filled = [matrix if matrix.numel() else matrix.new_zeros(1) for matrix in matrices]
    return torch.stack(list(private.largest_magnitudes(filled))).float()


def share_amaxes(amaxes: Tensor, groups: Sequence[Any]) -> None:
    """As :func:`all_reduce_amax` over each of ``groups``, of FP32 numbers without a sign, NaN too."""
    bits = amaxes.view(torch.int32)
    for group in groups:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)


def names_of(groups: tuple[Any, ...]) -> str:
    """The names of process groups in one string, as operators take them: no group has a space in its name."""
    return " ".join([private.name_of_group(group) for group in groups])


def groups_named(names: str) -> tuple[Any, ...]:
    """Inverse of :func:`names_of`."""
    return tuple([private.group_named(name) for name in names.split()])


def digest_of(facts: object) -> int:
    """An int64 by which ranks compare ``facts``: 64 bits of the BLAKE2 hash of their ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little", signed=True)


def ranges(numbers: Sequence[int], groups: Sequence[Any], device: str) -> list[tuple[int, int]]:
    """The least and the largest of each of ``numbers`` over all ranks of ``groups``, which cross each other.

    Every rank gets the same answer after one collective in every group. No rank may raise between two of these
    collectives, since the others would wait for it.

    Args:
        numbers: int64; the ranks have as many.
        device: type of the device on which the groups communicate.
    """
    both = [*numbers, *(~number for number in numbers)]
    found = torch.tensor(both, dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    largest = found.tolist()
    return [
        (~complement, most) for most, complement in zip(largest[: len(numbers)], largest[len(numbers) :], strict=True)
    ]


def all_reduce_amax(amax: Tensor, group: dist.ProcessGroup | None) -> None:
    """``amax = max over the ranks of group``, None being all, in place; NaN if one has NaN, else Inf if one has Inf.

    Reduces the bit patterns, which for numbers without a sign are ordered as the numbers are, with Inf above the finite
    ones and NaN above Inf. As numbers, gloo's maximum of 1 and NaN is 1 on one rank and NaN on the other.

    Args:
        amax: FP32, not negative, any shape; contiguous.
    """
    amax.view(torch.int32).bitwise_and_(_MAGNITUDE)
    share_amaxes(amax, (group,))
