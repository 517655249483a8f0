"""A weight's operands, kept across microbatches inside an explicit scope."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

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


class _Kept(NamedTuple):
    """Operands of one weight, as it was.

    Attributes:
        weight, storage: what they were made of, if it is still there.
        key: version and layout of the weight, and the plan.
        operands: by whether a backward pass needs them.
    """

    weight: Callable[[], Tensor | None]
    storage: Callable[[], UntypedStorage | None]
    key: tuple[Any, ...]
    operands: dict[bool, Operands]


class WeightCache:
    """Operands of one weight, valid while the weight is the same tensor, unwritten, under an equal plan.

    Caching never changes a byte: what is drawn, depends on earlier steps, or is made by a quantizer that does more than
    cast, and may read what is not in the weight, is made anew. The weight is known by identity, and by the memory that
    ``weight.data = ...`` may have given it; writes move its version counter, except those of fused optimizers, of which
    :func:`told_of_steps` tells, and those in place through ``weight.data``.

    A weight that has memory is held, since ``torch.utils.swap_tensors``, by which modules may be told to convert their
    parameters, swaps none that is referred to weakly; another one is not swapped, which nothing here would notice.

    Threads may share one: what is kept is replaced as a whole, so that nobody adds to what another has begun.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def clear(self) -> None:
        """Forget the operands: the weight may have changed unseen."""
        self._kept = None

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> Operands:
        """The operands of ``weight`` under ``plan``, made by ``make`` when they are not there.

        Operands made for a backward pass also serve a forward without one, which gets no operand of dgrad: what a
        forward saves must not depend on what a cache holds, or a recomputed forward would save something else.
        """
        quantizer = plan.weight
        changes = quantizer.draws_in_forward or quantizer.is_stateful or not quantizer.only_casts
        if changes or weight.is_inference():  # made in inference mode: it has no version counter
            return make()
        storage, layout = _memory(weight)
        key, kept = (weight._version, layout, plan), self._kept
        if kept is None or kept.weight() is not weight or kept.storage() is not storage or kept.key != key:
            held = weakref.ref(weight) if storage is None else partial(_itself, weight)
            kept = self._kept = _Kept(held, _nothing if storage is None else weakref.ref(storage), key, {})
        if needs_dgrad not in kept.operands:
            if not needs_dgrad and True in kept.operands:
                return kept.operands[True][0], None
            kept.operands[needs_dgrad] = make()
        return kept.operands[needs_dgrad]

    def tiles(self, weight: Tensor) -> TiledOperand | None:
        """What ``weight`` is, if it is codes with one scale of each tile, of which every call makes operands."""
        return None


def _memory(weight: Tensor) -> tuple[UntypedStorage | None, tuple[Any, ...]]:
    """The storage that holds the values of ``weight``, and where in it they lie; none of a subclass, which need not."""
    if type(weight) not in (Tensor, Parameter):
        return None, ()
    return weight.untyped_storage(), (weight.storage_offset(), weight.dtype, weight.shape, weight.stride())


_told: weakref.WeakSet[WeightCache] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while somebody joins those, and while a thread that has stepped an optimizer clears them."""


def microbatch_cache() -> WeightCache:
    """A cache without a scope, for ``is_first_microbatch``: told of every optimizer step as long as it lives."""
    cache = WeightCache()
    with _lock:
        _told_for_good()
        _told.add(cache)
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
