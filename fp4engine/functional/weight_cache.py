"""A weight's operands, kept across microbatches inside an explicit scope."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol

from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp4engine.functional.plan import LinearPlan
from fp4engine.ops import Operand, TiledOperand

Operands = tuple[Operand, Operand | TiledOperand | None]
"""``(operand of fprop, what dgrad's is made of)``."""

Make = Callable[[], Operands]
"""Quantizes the weight."""


def _nothing() -> None:
    """What a weak reference to nothing answers."""


def _itself(weight: Tensor) -> Tensor:
    return weight


class WeightCache:
    """Operands of one weight, valid while the weight is the same tensor, unwritten, under an equal plan.

    Caching never changes a byte: what is drawn or depends on earlier steps is made anew. The weight is known by
    identity, and by the memory that ``weight.data = ...`` may have given it; writes move its version counter, except
    those of fused optimizers, of which :func:`told_of_steps` tells, and those in place through ``weight.data``.

    A weight that has memory is held, since ``torch.utils.swap_tensors``, by which modules may be told to convert their
    parameters, swaps none that is referred to weakly; another one is not swapped, which nothing here would notice.
    """

    def __init__(self) -> None:
        self._weight: Callable[[], Tensor | None] = _nothing
        self._storage: Callable[[], UntypedStorage | None] = _nothing
        self._key: tuple[Any, ...] | None = None
        self._operands: dict[bool, Operands] = {}

    def clear(self) -> None:
        """Forget the operands: the weight may have changed unseen."""
        self._operands.clear()

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> Operands:
        """The operands of ``weight`` under ``plan``, made by ``make`` when they are not there.

        Operands made for a backward pass also serve a forward without one, which gets no operand of dgrad: what a
        forward saves must not depend on what a cache holds, or a recomputed forward would save something else.
        """
        changes = plan.weight.draws_in_forward or plan.weight.is_stateful
        if changes or weight.is_inference():  # made in inference mode: it has no version counter
            return make()
        storage, layout = _memory(weight)
        key = (weight._version, layout, plan)
        if self._weight() is not weight or self._storage() is not storage or key != self._key:
            self._weight = weakref.ref(weight) if storage is None else partial(_itself, weight)
            self._key = key
            self._storage = _nothing if storage is None else weakref.ref(storage)
            self._operands.clear()
        if needs_dgrad not in self._operands:
            if not needs_dgrad and True in self._operands:
                return self._operands[True][0], None
            self._operands[needs_dgrad] = make()
        return self._operands[needs_dgrad]

    def tiles(self, weight: Tensor) -> TiledOperand | None:
        """What ``weight`` is, if it is codes with one scale of each tile, of which every call makes operands."""
        return None


def _memory(weight: Tensor) -> tuple[UntypedStorage | None, tuple[Any, ...]]:
    """The storage that holds the values of ``weight``, and where in it they lie; none of a subclass, which need not."""
    if type(weight) not in (Tensor, Parameter):
        return None, ()
    return weight.untyped_storage(), (weight.storage_offset(), weight.dtype, weight.shape, weight.stride())


class Clearable(Protocol):
    """What remembers something of weights, and can forget it."""

    def clear(self) -> None:
        """Forget: the weights may have changed unseen."""


_told: weakref.WeakSet[Clearable] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while somebody joins those, and while a thread that has stepped an optimizer clears them."""


def tell_of_steps(cache: Clearable) -> None:
    """Clear ``cache`` after every step of a ``torch.optim`` optimizer, as long as it lives."""
    with _lock:
        _told_for_good()
        _told.add(cache)


def microbatch_cache() -> WeightCache:
    """A cache without a scope, for ``is_first_microbatch``: told of every optimizer step as long as it lives."""
    cache = WeightCache()
    tell_of_steps(cache)
    return cache


@lru_cache(maxsize=1)
def _told_for_good() -> None:
    register_optimizer_step_post_hook(_clear_told)


def _clear_told(*_: object) -> None:
    with _lock:
        for cache in _told:
            cache.clear()


@contextmanager
def told_of_steps(caches: Iterable[WeightCache]) -> Generator[None]:
    """Region in which every step of a ``torch.optim`` optimizer clears ``caches``: a fused one moves no version."""

    def clear(*_: object) -> None:
        for cache in caches:
            cache.clear()

    handle = register_optimizer_step_post_hook(clear)
    try:
        yield
    finally:
        handle.remove()
