"""A weight's operands, kept across microbatches inside an explicit scope."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from fp4engine.functional.plan import LinearPlan
from fp4engine.ops import Operand, SquareOperand, TiledOperand
from fp4engine.steps import hear_steps, hearing_steps

Operands = tuple[Operand, Operand | TiledOperand | SquareOperand | None]
"""``(operand of fprop, operand from which that of dgrad is made, or None)``."""

Make = Callable[[], Operands]
"""Quantizes the weight."""


class _Kept(NamedTuple):
    """Operands of one weight, and what identifies the weight from which they were made.

    Attributes:
        weight, storage: functions that return the weight and its storage, or None if these no longer exist.
        key: version and layout of the weight, and the plan.
        operands: ``whether a backward pass needs them -> operands``.
    """

    weight: Callable[[], Tensor | None]
    storage: Callable[[], UntypedStorage | None]
    key: tuple[Any, ...]
    operands: dict[bool, Operands]


class WeightCache:
    """Operands of one weight, valid while the weight is the same tensor, unwritten, under an equal plan.

    Caching never changes a byte. Operands are not cached if their cast draws random bits or depends on earlier steps,
    or if their quantizer does more than cast: it may read something that is not in the weight. The cache recognises its
    weight by identity, by its storage (``weight.data = ...`` changes that), and by its version counter. Fused
    optimizers do not change the counter, so :func:`told_of_steps` clears caches after every step. The cache cannot
    notice writes in place through ``weight.data``.

    The cache refers to a weight that has a storage strongly, because ``torch.utils.swap_tensors`` refuses tensors with
    weak references. It notices a swap by the other storage. It refers to a weight without a storage weakly; such a
    weight cannot be swapped.

    Threads may share a cache. An entry is replaced as a whole, so no thread adds to an entry that another has begun.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self.flat: tuple[Any, ...] | None = None  # the operands that launches read, taken apart

    def clear(self) -> None:
        """Forget the operands: the weight may have changed unseen."""
        self._kept = self.flat = None

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> Operands:
        """The operands of ``weight`` under ``plan``, made by ``make`` if they are not cached.

        A forward without a backward pass may use operands that were made for one with a backward pass, but gets no
        operand for dgrad. Otherwise what a forward saves would depend on the cache, and a recomputed forward might save
        something else.
        """
        quantizer = plan.weight
        changes = quantizer.draws_in_forward or quantizer.is_stateful or not quantizer.only_casts
        if changes or weight.is_inference():  # made in inference mode: it has no version counter
            return make()
        storage, layout = _memory(weight)
        key, kept = (weight._version, layout, plan), self._kept
        if kept is None or kept.weight() is not weight or kept.storage() is not storage or kept.key != key:
            if storage is None:
                kept = _Kept(weakref.ref(weight), lambda: None, key, {})
            else:
                kept = _Kept(lambda: weight, weakref.ref(storage), key, {})
            self._kept = kept
        if needs_dgrad not in kept.operands:
            if not needs_dgrad and True in kept.operands:
                return kept.operands[True][0], None
            kept.operands[needs_dgrad] = make()
        return kept.operands[needs_dgrad]

    def tiles(self, weight: Tensor) -> TiledOperand | None:
        """``weight`` as codes with one scale per tile, if it is stored so; every call makes operands from them."""
        return None


def _memory(weight: Tensor) -> tuple[UntypedStorage | None, tuple[Any, ...]]:
    """The storage of ``weight`` and its layout there; ``(None, ())`` for a subclass, which may have no storage."""
    if type(weight) not in (Tensor, Parameter):
        return None, ()
    return weight.untyped_storage(), (weight.storage_offset(), weight.dtype, weight.shape, weight.stride())


_told: weakref.WeakSet[WeightCache] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while a cache is added to ``_told``, and while the caches in it are cleared."""


def microbatch_cache() -> WeightCache:
    """A cache without a scope, for ``is_first_microbatch``; every optimizer step clears it as long as it exists."""
    cache = WeightCache()
    with _lock:
        _told_for_good()
        _told.add(cache)
    return cache


@lru_cache(maxsize=1)
def _told_for_good() -> None:
    hear_steps(_clear_told)


def _clear_told(*_: object) -> None:
    with _lock:
        for cache in _told:
            cache.clear()


@contextmanager
def told_of_steps(caches: Iterable[WeightCache]) -> Generator[None]:
    """Region in which every step of a ``torch.optim`` optimizer clears ``caches``."""

    def clear(*_: object) -> None:
        for cache in caches:
            cache.clear()

    with hearing_steps(clear):
        yield
