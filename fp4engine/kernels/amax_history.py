"""A step of delayed scaling's memory in one kernel: see :mod:`fp4engine.reference.amax_history`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels.amax import Maxima, largest_part
from fp4engine.kernels.encode import NAN, from_bits, to_bits
from fp4engine.kernels.launch import ALIGNMENT, Draft, Facts, Launch, Place, facts, resolver

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def record_kernel(
    values_ptr, amax_ptr, current_ptr, chosen_ptr, out_ptr, length, parts,
    CHOICE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program.

    ``values_ptr``: None leaves the memory as it is. ``current_ptr``: parts of the tensor's amax.
    ``chosen_ptr``: read where ``CHOICE`` is "given". ``ROOM``: a power of two, ``length`` or more.
    """
    amax = tl.load(amax_ptr)
    current = from_bits(largest_part(current_ptr, parts).to(tl.uint32, bitcast=True))
    if values_ptr is not None:
        index = tl.arange(0, ROOM)
        values = tl.load(values_ptr + index, mask=index < length, other=0.0)
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


class Past(NamedTuple):
    """What a launch may depend on of delayed scaling's memory of a tensor.

    Attributes:
        length: of its values; 0 where nothing is to be noted.
        aligned: of values and of amax, whether its address is a multiple of
            :data:`~fp4engine.kernels.launch.ALIGNMENT`.
        choice: of :data:`fp4engine.reference.amax_history.CHOICES`.
    """

    length: int
    aligned: tuple[bool, bool]
    choice: str

    @staticmethod
    def of(values: Tensor | None, amax: Tensor, choice: str) -> "Past":
        """Of ``values`` FP32 [length] and ``amax`` FP32 [1], both contiguous."""
        length, address = (0, 0) if values is None else (values.shape[0], values.data_ptr())
        return Past(length, (address % ALIGNMENT == 0, amax.data_ptr() % ALIGNMENT == 0), choice)


def add_record(
    draft: Draft, past: Past, memory: tuple[Place, Place], current: Maxima, out: Place, chosen: Place | None = None
) -> None:
    """Write to ``out`` what a tensor is scaled by, and note its amax.

    Args:
        memory: its values and its amax.
        current: parts of the tensor's amax.
    """
    values, amax = memory
    draft.step(
        record_kernel, 1, values if past.length else None, amax, current.row, chosen, out, past.length, current.parts,
        past.choice, triton.next_power_of_2(max(past.length, 1)), num_warps=4,
    )  # fmt: skip


@resolver
def resolve_record(past: Past, current: Facts, chosen: Facts | None, device: torch.device) -> Launch:
    """``(values, amax, current, chosen) -> scale's amax``; writes the first two."""
    draft = Draft(device, inputs=4)
    values, amax, whole, given = draft.inputs
    out = draft.output((1,), torch.float32)
    add_record(draft, past, (values, amax), Maxima(whole, None, 1), out, given)
    return draft.launch()


def record_amax(values: Tensor, amax: Tensor, current: Tensor, choice: str, chosen: Tensor | None) -> Tensor:
    """As :func:`fp4engine.reference.record_amax`."""
    past = Past.of(values, amax, choice)
    (out,) = resolve_record(past, facts(current), facts(chosen), values.device)(values, amax, current, chosen)
    return out
