"""A step of delayed scaling's memory: see :mod:`fp4engine.reference.amax_history`.

In a launch of casts the step needs no kernel of its own. The amax kernel chooses the amax that the cast scales by and
ages the history (:func:`choose`), since neither depends on the amax that it finds. The cast kernel follows, and notes
that amax (:func:`note`). A single operation does both in :func:`record_kernel`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import ALIGNMENT
from fp4engine.kernels.encode import NAN
from fp4engine.kernels.launch import Launch, LaunchBuilder, Place, TensorMeta, meta_of, resolver

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def choose(values_ptr, amax_ptr, chosen_ptr, length, CHOICE: tl.constexpr, ROOM: tl.constexpr):
    """Begin a step, in one program: write the amax to scale by, and age the values. Nothing for an empty ``CHOICE``.

    ``chosen_ptr``: read where ``CHOICE`` is "given". ``ROOM``: a power of two, ``length`` or more.
    """
    if CHOICE != "":
        index = tl.arange(0, ROOM)
        values = tl.load(values_ptr + index, mask=index < length, other=0.0)
        if CHOICE == "max":  # of what is no NaN
            chosen = tl.max(tl.where(values == values, values, 0.0), axis=0)
        elif CHOICE == "most_recent":
            chosen = tl.load(values_ptr)
        else:
            chosen = tl.load(chosen_ptr)
        amax = tl.where((chosen > 0.0) & (chosen < INFINITY), chosen, tl.load(amax_ptr))
        tl.debug_barrier()  # every thread has read before one writes
        tl.store(values_ptr + 1 + index, values, mask=index + 1 < length)
        tl.store(values_ptr, 0.0)
        tl.store(amax_ptr, amax)


@triton.jit
def note(values_ptr, current):
    """Note a tensor's amax, in one program. Threads may read what others have written: the maximum is the same."""
    tl.store(values_ptr, tl.maximum(tl.load(values_ptr), current, propagate_nan=NAN))


@triton.jit
def recall(amax_ptr, current):
    """The amax that a tensor is scaled by whose own amax is ``current``."""
    return tl.where(tl.abs(current) < INFINITY, tl.load(amax_ptr), current)


@triton.jit
def record_kernel(
    values_ptr, amax_ptr, current_ptr, chosen_ptr, out_ptr, length, CHOICE: tl.constexpr, ROOM: tl.constexpr
):
    """One program."""
    choose(values_ptr, amax_ptr, chosen_ptr, length, CHOICE, ROOM)
    tl.debug_barrier()
    current = tl.load(current_ptr)
    note(values_ptr, current)
    tl.store(out_ptr, recall(amax_ptr, current))


@triton.jit
def hold_kernel(due_ptr, amax_ptr, now_ptr, current_ptr, out_ptr, hold):
    """:func:`fp4engine.reference.hold_amax`, in one program."""
    due, now, current = tl.load(due_ptr), tl.load(now_ptr), tl.load(current_ptr)
    is_finite = tl.abs(current) < INFINITY
    samples = (now >= due) & is_finite & (current > 0.0)
    amax = tl.where(samples, current, tl.load(amax_ptr))
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(amax_ptr, amax)
    tl.store(due_ptr, tl.where(samples, now + hold, due))
    tl.store(out_ptr, tl.where(is_finite, amax, current))


class Past(NamedTuple):
    """What a launch may depend on of delayed scaling's memory of a tensor.

    Attributes:
        length: of its values; 0 where nothing is to be noted.
        aligned: of values and of amax, whether its address is a multiple of
            :data:`~fp4engine.constants.ALIGNMENT`.
        choice: of :data:`fp4engine.reference.amax_history.CHOICES`.
    """

    length: int
    aligned: tuple[bool, bool]
    choice: str

    @staticmethod
    def of(values: Tensor | None, amax: Tensor, choice: str) -> "Past":
        """The facts of a history ``values``, FP32 [length], and of ``amax``, FP32 [1], both contiguous."""
        length, address = (0, 0) if values is None else (values.shape[0], values.data_ptr())
        return Past(length, (address % ALIGNMENT == 0, amax.data_ptr() % ALIGNMENT == 0), choice)


class History(NamedTuple):
    """Delayed scaling's memory of a tensor in a launch, for the kernels of its amax and of its cast.

    Attributes:
        past: length and choice of the memory, which the launch is resolved for.
        memory: its values and its amax.
    """

    past: Past
    memory: tuple[Place, ...]

    @property
    def places(self) -> tuple[Place | None, Place]:
        """The values, or None if nothing is to be noted, and the amax."""
        values, amax = self.memory
        return values if self.past.length else None, amax

    @property
    def constants(self) -> tuple[Any, ...]:
        """The last arguments of :func:`choose`."""
        return self.past.length, self.past.choice, triton.next_power_of_2(max(self.past.length, 1))


@resolver
def resolve_record(past: Past, current: TensorMeta, chosen: TensorMeta | None, device: torch.device) -> Launch:
    """``(values, amax, current, chosen) -> scale's amax``; writes the first two."""
    builder = LaunchBuilder(device, inputs=4)
    values, amax, whole, given = builder.inputs
    out = builder.buffer((1,), torch.float32)
    constants = History(past, (values, amax)).constants
    builder.step(record_kernel, 1, values, amax, whole, given if chosen else None, out, *constants, num_warps=4)
    return builder.launch(out)


def record_amax(values: Tensor, amax: Tensor, current: Tensor, choice: str, chosen: Tensor | None) -> Tensor:
    """As :func:`fp4engine.reference.record_amax`."""
    past = Past.of(values, amax, choice)
    (out,) = resolve_record(past, meta_of(current), meta_of(chosen), values.device)(values, amax, current, chosen)
    return out


@resolver
def resolve_hold(metas: tuple[TensorMeta, ...], device: torch.device, hold: int) -> Launch:
    """``(due, amax, now, current) -> scale's amax``; writes the first two."""
    builder = LaunchBuilder(device, inputs=len(metas))
    out = builder.buffer((1,), torch.float32)
    builder.step(hold_kernel, 1, *builder.inputs, out, hold, num_warps=1)
    return builder.launch(out)


def hold_amax(due: Tensor, amax: Tensor, now: Tensor, current: Tensor, hold: int) -> Tensor:
    """As :func:`fp4engine.reference.hold_amax`."""
    tensors = due, amax, now, current
    (out,) = resolve_hold(tuple([meta_of(tensor) for tensor in tensors]), due.device, hold)(*tensors)
    return out
