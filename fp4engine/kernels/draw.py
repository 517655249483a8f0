"""A draw of the random stream, on the device, in one kernel.

    draw = state[1] += count;   out = (seed + (draw >> 32) * KEY_STEP, draw)

The addition is atomic, so that two CUDA streams never get the same draw, and it is part of a CUDA graph, so that every
replay gets draws of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import KEY_STEP
from fp4engine.kernels.launch import Launch, LaunchBuilder, Place, TensorMeta, meta_of, resolver


@triton.jit(do_not_specialize=["count"])
def draw_kernel(state_ptr, out_ptr, count, key_step: tl.constexpr):
    """One program. ``state_ptr``, ``out_ptr``: int64 [2]."""
    count = count.to(tl.int64)
    drawn = tl.atomic_add(state_ptr + 1, count) + count
    tl.store(out_ptr, tl.load(state_ptr) + (drawn >> 32) * key_step)
    tl.store(out_ptr + 1, drawn)


@triton.jit(do_not_specialize=["row", "col"])
def place_kernel(rng_ptr, out_ptr, row, col):
    """One program: int64 [4], the draw of ``rng_ptr`` and the place at which a shard begins."""
    tl.store(out_ptr, tl.load(rng_ptr))
    tl.store(out_ptr + 1, tl.load(rng_ptr + 1))
    tl.store(out_ptr + 2, row.to(tl.int64))
    tl.store(out_ptr + 3, col.to(tl.int64))


def add_place(builder: LaunchBuilder, rng: Place, place: tuple[int, int]) -> Place:
    """The draw ``rng`` [2] with the row and column at which a shard begins, see :func:`fp4engine.ops.placed`."""
    out = builder.buffer((4,), torch.int64)
    builder.step(place_kernel, 1, rng, out, *place, num_warps=1)
    return out


def add_draw(builder: LaunchBuilder, state: Place, count: int) -> Place:
    """Add ``count`` to the draw of ``state``, int64 [2], and return ``(key, draw)`` as of then."""
    out = builder.buffer((2,), torch.int64)
    builder.step(draw_kernel, 1, state, out, count, KEY_STEP, num_warps=1)
    return out


@resolver
def resolve_draw(state: TensorMeta, device: torch.device, count: int) -> Launch:
    """``(state) -> draw``."""
    builder = LaunchBuilder(device, inputs=1)
    return builder.launch(add_draw(builder, builder.inputs[0], count))


def draw(state: Tensor, count: int) -> Tensor:
    """Add ``count``, below 2^31, to the draw of ``state``, int64 [2] ``(seed, draw)``; ``(key, draw)`` as of then."""
    (out,) = resolve_draw(meta_of(state), state.device, count)(state)
    return out
