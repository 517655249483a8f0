"""The checksum of :mod:`fp4engine.reference.checksum`, in one kernel that reads the tensor once.

A program takes every ``programs``-th tile, so that the number of atomic additions does not grow with the tensor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import CHECKSUM_FACTORS, CHECKSUM_STEP
from fp4engine.kernels.launch import Draft, Facts, Launch, facts, resolver

STEP = tl.constexpr(CHECKSUM_STEP)
FIRST, SECOND = (tl.constexpr(factor) for factor in CHECKSUM_FACTORS)
TILE = 4096
"""Elements that a program reads at a time."""
MOST_PROGRAMS = 1024


@triton.jit
def mix(word):
    """As the reference's, of uint32."""
    word ^= word >> 16
    word *= FIRST
    word ^= word >> 13
    word *= SECOND
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["programs"])
def checksum_kernel(x_ptr, total_ptr, numel, programs, BITS: tl.constexpr, TILE: tl.constexpr):
    """``x_ptr``: ``numel`` contiguous elements of 8, 16 or 32 bits; ``total_ptr``: int64 [1], to which it is added."""
    total = tl.zeros([], tl.int64)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    for _ in range(tl.program_id(0), tl.cdiv(numel, TILE), programs):
        x = tl.load(x_ptr + place, mask=place < numel, other=0)
        if BITS == 8:
            word = x.to(tl.uint8, bitcast=True).to(tl.uint32)
        elif BITS == 16:
            word = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            word = x.to(tl.uint32, bitcast=True)
        mixed = mix(word + place.to(tl.uint32) * STEP).to(tl.int64)
        total += tl.sum(tl.where(place < numel, mixed, 0))
        place += programs.to(tl.int64) * TILE
    tl.atomic_add(total_ptr, total)


@resolver
def resolve_checksum(x: Facts, device: torch.device) -> Launch:
    """``(x, total)``; adds to ``total``."""
    numel = x.shape[0]
    draft = Draft(device, inputs=2)
    programs = min(-(-numel // TILE), MOST_PROGRAMS)
    draft.step(checksum_kernel, programs, *draft.inputs, numel, programs, 8 * x.dtype.itemsize, TILE, num_warps=4)
    return draft.launch()


def add_checksum(x: Tensor, total: Tensor) -> None:
    """Add the checksum of ``x``, contiguous elements of at most 32 bits, to ``total``, int64 [1]."""
    flat = x.view(-1)
    resolve_checksum(facts(flat), x.device)(flat, total)
