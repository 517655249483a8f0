"""A number that tells whether the bytes of a tensor are what they were.

    word_j   = bits j of the tensor, an unsigned integer; a 64-bit element is two words, the low one first
    checksum = sum over j of mix(word_j + j CHECKSUM_STEP mod 2^32)   mod 2^64

``mix`` is a bijection of 32-bit words (the finalizer of MurmurHash3), so a change of one word always changes the sum,
and a change of several goes unnoticed with a probability of about 2^-32. Addition makes the order of words, and of
a kernel's programs, irrelevant; the step makes their places count.
"""

import torch
from torch import Tensor

from fp4engine.constants import CHECKSUM_FACTORS, CHECKSUM_STEP

_WORD = 0xFFFF_FFFF
_AT_ONCE = 1 << 20
"""So many words are mixed at a time, since each takes several int64 here."""


def checksum(x: Tensor) -> Tensor:
    """int64 [1] on the device of ``x``, a dense tensor of any shape, strides and dtype of 1, 2, 4 or 8 bytes.

    Source: the finalizer ``fmix32`` of MurmurHash3 (Austin Appleby, public domain).
    """
    dense = x.detach().resolve_neg().contiguous()
    dense = dense.as_strided((dense.numel(),), (1,))  # a stride of one element alone may be any
    bits = dense.view({1: torch.uint8, 2: torch.int16}.get(dense.element_size(), torch.int32))
    mask = (1 << 8 * bits.element_size()) - 1
    total = bits.new_zeros(1, dtype=torch.int64)
    for start in range(0, bits.numel(), _AT_ONCE):
        words = bits[start : start + _AT_ONCE].to(torch.int64) & mask
        places = torch.arange(start, start + words.numel(), dtype=torch.int64, device=x.device)
        total += _mix((words + places * CHECKSUM_STEP) & _WORD).sum()
    return total


def _mix(word: Tensor) -> Tensor:
    """A bijection of integers from 0 to 2^32 - 1, kept in int64."""
    word = word ^ (word >> 16)
    word = (word * CHECKSUM_FACTORS[0]) & _WORD
    word = word ^ (word >> 13)
    word = (word * CHECKSUM_FACTORS[1]) & _WORD
    return word ^ (word >> 16)
