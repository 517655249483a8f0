"""A step of delayed scaling's memory in one kernel: see :mod:`fp4engine.reference.amax_history`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.encode import NAN, from_bits, to_bits
from fp4engine.kernels.launch import Draft, Facts, Launch, facts, resolver

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def record_kernel(
    values_ptr, amax_ptr, current_ptr, chosen_ptr, out_ptr, length, CHOICE: tl.constexpr, ROOM: tl.constexpr
):
    """One program. ``ROOM``: a power of two, ``length`` or more; ``chosen_ptr`` is read where ``CHOICE`` is "given"."""
    index = tl.arange(0, ROOM)
    values = tl.load(values_ptr + index, mask=index < length, other=0.0)
    amax = tl.load(amax_ptr)
    current = tl.load(current_ptr)
    newest = tl.load(values_ptr)
    if CHOICE != "":
        if CHOICE == "max":  # as integers, magnitudes have NaN above all
            bits = (to_bits(values) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
            chosen = from_bits(tl.max(bits, axis=0).to(tl.uint32, bitcast=True))
        elif CHOICE == "most_recent":
            chosen = newest
        else:
            chosen = tl.load(chosen_ptr)
        amax = tl.where((chosen > 0.0) & (chosen < INFINITY), chosen, amax)
        newest = tl.zeros_like(newest)
        tl.debug_barrier()  # every thread has read before one writes
        tl.store(values_ptr + 1 + index, values, mask=index + 1 < length)
        tl.store(amax_ptr, amax)
    tl.debug_barrier()
    tl.store(values_ptr, tl.maximum(newest, current, propagate_nan=NAN))
    tl.store(out_ptr, tl.where(tl.abs(current) < INFINITY, amax, current))


@resolver
def resolve_record(
    values: Facts, amax: Facts, current: Facts, chosen: Facts | None, device: torch.device, choice: str
) -> Launch:
    """``(values, amax, current, chosen) -> scale's amax``; writes the first two."""
    draft = Draft(device, inputs=4)
    (length,) = values.shape
    out = draft.output((1,), torch.float32)
    draft.step(record_kernel, 1, *draft.inputs, out, length, choice, triton.next_power_of_2(length), num_warps=4)
    return draft.launch()


def record_amax(values: Tensor, amax: Tensor, current: Tensor, choice: str, chosen: Tensor | None) -> Tensor:
    """As :func:`fp4engine.reference.record_amax`."""
    asked = facts(values), facts(amax), facts(current), facts(chosen)
    (out,) = resolve_record(*asked, values.device, choice)(values, amax, current, chosen)
    return out
