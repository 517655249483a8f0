"""A draw of the random stream, on the device, in one kernel.

    draw = state[1] += count;   out = (seed + (draw >> 32) * KEY_STEP, draw[, row, column])

The addition is atomic, so that two CUDA streams never get the same draw, and it is part of a CUDA graph, so that every
replay gets draws of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import KEY_STEP
from fp4engine.kernels.launch import Draft, Facts, Launch, Place, facts, resolver


@triton.jit(do_not_specialize=["count", "row", "col"])
def draw_kernel(state_ptr, out_ptr, count, row, col, key_step: tl.constexpr, placed: tl.constexpr):
    """One program. ``state_ptr``: int64 [2]; ``out_ptr``: int64 [2], or [4] if it is ``placed`` at ``row, col``."""
    count = count.to(tl.int64)
    drawn = tl.atomic_add(state_ptr + 1, count) + count
    tl.store(out_ptr, tl.load(state_ptr) + (drawn >> 32) * key_step)
    tl.store(out_ptr + 1, drawn)
    if placed:
        tl.store(out_ptr + 2, row.to(tl.int64))
        tl.store(out_ptr + 3, col.to(tl.int64))


def add_draw(draft: Draft, state: Place, count: int, out: Place, place: tuple[int, int] | None = None) -> None:
    """Add ``count`` to the draw of ``state``, int64 [2], and write ``(key, draw)`` as of then to ``out``.

    If a ``place`` is given, the row and column at which a shard begins, they are written behind the draw.
    """
    draft.step(draw_kernel, 1, state, out, count, *(place or (0, 0)), KEY_STEP, place is not None, num_warps=1)


@resolver
def resolve_draw(state: Facts, device: torch.device, count: int) -> Launch:
    """``(state) -> draw``."""
    draft = Draft(device, inputs=1)
    add_draw(draft, draft.inputs[0], count, draft.output((2,), torch.int64))
    return draft.launch()


def draw(state: Tensor, count: int) -> Tensor:
    """Add ``count``, below 2^31, to the draw of ``state``, int64 [2] ``(seed, draw)``; ``(key, draw)`` as of then."""
    (out,) = resolve_draw(facts(state), state.device, count)(state)
    return out
