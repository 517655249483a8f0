"""A recomputed forward runs in the autocast region of the forward that it repeats.

:func:`fp4engine.checkpoint` puts that region in force again, and so does PyTorch's ``checkpoint`` with
``context_fn=recompute_contexts``. Without that argument, PyTorch's non-reentrant ``checkpoint`` runs its function a
second time inside saved-tensor hooks that hold a record of the first run. The first run stores its region with that
record, and the second run reads it there (:func:`followed_state`). If a module runs inside a backward
pass in any other way, its region is not known.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from fp4engine.ops.draws import is_replaying, seeding
from fp4engine.private import innermost_saved_tensors_hooks
from fp4engine.quantizers.delayed import AmaxHistory, Turns
from fp4engine.state import AutocastState, Region, current_state, is_recomputed, region_depth

Weight = TypeVar("Weight")


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

_began_seeded: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""``PyTorch's record of a checkpoint -> seeding.is_done`` before the first module of its first run."""

_begun: WeakSet[Any] = WeakSet()
"""PyTorch's hooks of the repeats whose first module has been reached."""

_turns: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()
"""``PyTorch's record of a checkpoint -> by which amaxes delayed scaling scaled its first run``."""


class _Told(threading.local):
    """The runs of :func:`fp4engine.checkpoint` that are open on this thread, from the inside out."""

    def __init__(self) -> None:
        self.first: tuple[Turns, ...] = ()
        self.repeats: tuple[Turns, ...] = ()


_told = _Told()


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: a recomputation runs in the region in force now.

    For example ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})``.
    """
    return region_in_force(), _Repeated(region_in_force())


class _Repeated:
    """``region``, to be entered again, with :data:`~fp4engine.ops.draws.seeding` set to its value at construction."""

    def __init__(self, region: AbstractContextManager[Any]) -> None:
        self.region, self.began_seeded, self.seeded = region, seeding.is_done, False

    def __enter__(self) -> None:
        self.seeded, seeding.is_done = seeding.is_done, self.began_seeded
        self.region.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.region.__exit__(*error)
        finally:
            seeding.is_done = self.seeded


def region_in_force() -> AbstractContextManager[Any]:
    """The region in force, to be entered again; in a repeat by PyTorch's checkpoint, the region of the first run.

    Where nobody knows it, no region is entered, so that modules refuse to run.
    """
    if torch.compiler.is_dynamo_compiling():
        return Region(current_state())
    follow_seeding()
    state, is_known = followed_state()
    return Region(state) if is_known else nullcontext()


def followed_state() -> tuple[AutocastState | None, bool]:
    """The state of the region in force, and whether it is known; in a repeat, the state that the first run had.

    A first run stores the state for its repeats, if no region was opened inside the checkpointed function. If it is not
    known, the state in force is returned.
    """
    state, (checkpoint, repeat) = current_state(), _checkpoint_in_force()
    around = None if checkpoint is None else _surroundings.get(checkpoint)
    if is_recomputed():  # a first run may be here too, in the repeat of another checkpoint, and knows its regions alone
        return (state, False) if around is None or repeat is None else (around.state, True)
    if checkpoint is not None and repeat is None and (around is None or region_depth() < around.depth):
        _surroundings[checkpoint] = Surroundings(state, region_depth())
    return state, True


class Scaled:
    """The forwards inside the first ``with scaled.alike()`` are scaled alike inside every later one."""

    def __init__(self) -> None:
        self._turns: Turns | None = None

    @contextmanager
    def alike(self) -> Generator[None]:
        outer = _told.first, _told.repeats
        if self._turns is None:
            self._turns = Turns()
            _told.first = (self._turns, *_told.first)
        else:
            _told.repeats = (self._turns, *_told.repeats)
        try:
            yield
        finally:
            _told.first, _told.repeats = outer


def note_scales(histories: Mapping[str, AmaxHistory]) -> None:
    """A forward has been scaled by the ``histories`` of its roles; those who will repeat it need to know."""
    if not _told.first and innermost_saved_tensors_hooks() is None:
        return  # nobody will
    noting, (checkpoint, repeat) = _told.first, _checkpoint_in_force()
    if checkpoint is not None and repeat is None:
        noting = (*noting, _turns.setdefault(checkpoint, Turns()))
    if noting:
        repeated = noted_scales()
        for turns in noting:
            turns.note((history for role, history in histories.items() if role != "grad_output"), repeated)


def noted_scales() -> tuple[Turns, ...]:
    """What may say by which scales the forward ran that this one repeats, from the inside out."""
    checkpoint, repeat = _checkpoint_in_force()
    if checkpoint is None or repeat is None or checkpoint not in _turns:
        return _told.repeats
    return (*_told.repeats, _turns[checkpoint])


def computed(weight: Callable[[], Weight]) -> Weight:
    """What ``weight`` computes of parameters. Its ``requires_grad`` says whether they are trained.

    It says so in the first run of a reentrant checkpoint too, which is without gradients: which draws the second run
    repeats depends on it.
    """
    if torch.is_grad_enabled() or not is_replaying():
        return weight()
    with torch.enable_grad():
        return weight()


def follow_seeding() -> None:
    """Let a repeat by PyTorch's non-reentrant checkpoint begin with ``seeding`` as the first run did.

    To be called before the first module of either run. See :data:`fp4engine.ops.draws.seeding`.
    """
    checkpoint, repeat = _checkpoint_in_force()
    if checkpoint is None:
        return
    if repeat is None:
        _began_seeded.setdefault(checkpoint, seeding.is_done)
    elif repeat not in _begun:
        _begun.add(repeat)
        seeding.is_done = _began_seeded.get(checkpoint, seeding.is_done)


def _checkpoint_in_force() -> tuple[Any, Any]:
    """PyTorch's record of the non-reentrant checkpoint whose function runs or is repeated, and its hook for a repeat.

    The hook is None in the first run; both are None outside. PyTorch has no function for this, but its hooks hold the
    record: the first run's hooks directly, a repeat's by a weak reference. If the hooks of another version do not
    hold it, both are None, and recomputations without a region raise.
    """
    hooks = innermost_saved_tensors_hooks()
    if hooks is None:
        return None, None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        held, is_repeat = cell.cell_contents, isinstance(cell.cell_contents, weakref.ref)
        held = held() if is_repeat else held
        if type(held).__name__ == "_CheckpointFrame":
            return held, hooks[0] if is_repeat else None
    return None, None
