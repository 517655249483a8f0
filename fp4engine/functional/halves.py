"""A backward pass in two halves, as zero-bubble pipelines run it: gradients of inputs first, of weights later.

PyTorch runs the whole backward function of a node in each half, and tells while it runs which nodes come next. What
would go nowhere is not computed. Both halves are one pass over one gradient, and cast it by one draw.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp4engine.functional.linear import Call


class Half(NamedTuple):
    """What a node remembers of the half that came first: its draw, and what has been computed by that."""

    draw: Tensor
    dgrad: bool
    wgrad: bool


def asked(ctx: Any) -> list[bool] | None:
    """Of the tensors that the function of ``ctx`` took, those to whose gradients the backward pass that runs goes on.

    None if it goes on to all that have one, as it does but for ``inputs=`` and ``torch.autograd.grad``.
    """
    nodes, _ = zip(*ctx.next_functions, strict=True)
    try:
        if all(map(torch._C._will_engine_execute_node, filter(None, nodes))):
            return None
    except RuntimeError:
        pass  # see below
    return [node is not None and _comes_next(node) for node in nodes]


def _comes_next(node: Any) -> bool:
    """Whether the backward pass that runs goes on to ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is to be returned, of which PyTorch does not tell
        return True


def draw_of(ctx: Any, whole: "Call", now: "Call", take: Callable[[], Tensor]) -> Tensor:
    """The draw of a pass that needs the gradients of ``now``: that of the half before, or by ``take()`` a new one.

    Args:
        ctx: remembers a half as ``ctx.half``, None in the beginning.
        whole: what is needed by both halves.
    """
    half: Half | None = ctx.half
    if half is None or not ((now.needs_dgrad and not half.dgrad) or (now.needs_wgrad and not half.wgrad)):
        half = Half(take(), False, False)  # the first half, or a pass that is repeated
    half = Half(half.draw, half.dgrad or now.needs_dgrad, half.wgrad or now.needs_wgrad)
    ctx.half = None if half[1:] == (whole.needs_dgrad, whole.needs_wgrad) else half
    return half.draw
