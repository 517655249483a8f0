"""A recomputed forward runs in the autocast region of the forward that it repeats.

:func:`fp4engine.checkpoint` puts that region in force again, and so does PyTorch's ``checkpoint`` with
``context_fn=recompute_contexts``. Without that argument, PyTorch's non-reentrant ``checkpoint`` runs its function a
second time inside saved-tensor hooks that hold a record of the first run. The first run stores its region with that
record (:func:`remember`), and the second run reads it there (:func:`handed_over`). If a module runs inside a backward
pass in any other way, its region is not known.
"""

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fp4engine.state import AutocastState, Region, current_state, region_depth


class Surroundings(NamedTuple):
    """The region around a checkpointed function. It applies to modules inside the function, except in inner regions.

    Attributes:
        state: of the region; None outside every region.
        depth: how many regions were open.
    """

    state: AutocastState | None
    depth: int


_surroundings: WeakKeyDictionary[Any, Surroundings] = WeakKeyDictionary()
"""``PyTorch's record of a checkpoint -> the region around it``."""


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: a recomputation runs in the region in force now.

    For example ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})``.
    """
    state = current_state()
    return Region(state), Region(state)


def remember(state: AutocastState | None) -> None:
    """Store ``state`` with the checkpoint whose function is running, if no region was opened inside the function."""
    checkpoint = checkpoint_in_force()
    if checkpoint is not None:
        depth, known = region_depth(), _surroundings.get(checkpoint)
        if known is None or depth < known.depth:
            _surroundings[checkpoint] = Surroundings(state, depth)


def handed_over() -> Surroundings | None:
    """The region around the run that is being repeated; None if it is not known."""
    checkpoint = checkpoint_in_force()
    return None if checkpoint is None else _surroundings.get(checkpoint)


def checkpoint_in_force() -> Any:
    """PyTorch's record of the non-reentrant checkpoint whose function is running or repeated; None outside.

    PyTorch has no function for this, but its hooks hold the record. If the hooks of another version do not hold it,
    this returns None, and recomputations without a region raise.
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
