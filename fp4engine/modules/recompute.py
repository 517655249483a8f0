"""What a recomputed forward is told by the forward that it repeats: the region in force when that ran.

:func:`fp4engine.checkpoint`, and :func:`recompute_contexts` for PyTorch's own, put the region in force again; then
there is nothing to hand over. PyTorch's non-reentrant ``checkpoint`` without them runs its function a second time
inside saved-tensor hooks that hold the record of the run that they repeat. The first run leaves its region with that
record (:func:`remember`), and the second finds it there (:func:`handed_over`). Whoever else runs a module inside a
backward pass is told nothing.
"""

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fp4engine.state import AutocastState, Region, current_state, region_depth


class Told(NamedTuple):
    """The region around a checkpointed function: what modules ran in that opened none inside it.

    Attributes:
        state: of the region, None outside every region.
        depth: how many regions were open.
    """

    state: AutocastState | None
    depth: int


_told: WeakKeyDictionary[Any, Told] = WeakKeyDictionary()
"""By checkpoint."""


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: a recomputation runs in the region in force now.

    For example ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})``.
    """
    state = current_state()
    return Region(state), Region(state)


def remember(state: AutocastState | None) -> None:
    """Leave ``state`` with the checkpoint whose function is running, if one is and no region was opened inside it."""
    checkpoint = _checkpoint()
    if checkpoint is not None:
        depth, known = region_depth(), _told.get(checkpoint)
        if known is None or depth < known.depth:
            _told[checkpoint] = Told(state, depth)


def handed_over() -> Told | None:
    """What the run that is being repeated has left; None where nobody knows."""
    checkpoint = _checkpoint()
    return None if checkpoint is None else _told.get(checkpoint)


def _checkpoint() -> Any:
    """PyTorch's record of the non-reentrant checkpoint whose function is running or repeated; None outside.

    PyTorch offers no way to ask. Its hooks hold the record; where they do not, in another version, this is None, and
    recomputations without a region raise.
    """
    hooks = _innermost_hooks()
    if hooks is None:
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if type(held).__name__ == "_CheckpointFrame":
            return held
    return None


def _innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks in force, ``(pack, unpack)``."""
    ask = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(True)
