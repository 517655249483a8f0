"""A weight's operands, kept across microbatches inside an explicit scope, and compared with the weight at each use."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from fp4engine.functional.plan import LinearPlan
from fp4engine.ops import Operand, Seal, SquareOperand, TiledOperand, are_broken
from fp4engine.steps import hear_steps, hearing_steps

Operands = tuple[Operand, Operand | TiledOperand | SquareOperand | None]
"""``(operand of fprop, operand from which that of dgrad is made, or None)``."""

Make = Callable[[], Operands]
"""Quantizes the weight."""


class _Kept(NamedTuple):
    """Operands of one weight, and what identifies the weight from which they were made.

    Attributes:
        storage: refers to the weight's storage weakly.
        key: identity, version and layout of the weight, and the plan.
        seal: the bytes of the weight.
        operands: ``whether a backward pass needs them -> operands``.
    """

    storage: "weakref.ref[UntypedStorage]"
    key: tuple[Any, ...]
    seal: Seal
    operands: dict[bool, Operands]


class WeightCache:
    """Operands of one weight, valid while the weight is the same tensor with the same bytes, under an equal plan.

    Caching never changes a byte. Operands are not cached if their cast draws random bits or depends on earlier steps,
    or if their quantizer does more than cast: it may read something that is not in the weight. Nor are those of a
    subclass of tensors, whose bytes are not known here.

    What a cache can know for nothing makes it quantize the weight anew: another tensor, other memory
    (``weight.data = ...``), another version counter. A write in place through another tensor with the same memory shows
    in none of these, nor does one by a fused optimizer. So the bytes of the weight are compared with those that were
    quantized, at each use, which reads the weight once. On a CPU the comparison comes first, and the weight is then
    quantized anew. A GPU has not made it yet when the operands are used, and to wait for it would cost more than the
    cache saves; there :func:`require_sealed` raises, once the comparison is made.

    The cache refers to the weight's storage alone, and weakly: ``torch.utils.swap_tensors`` refuses tensors with weak
    references. Operands are dropped with the memory of their weight.

    Threads may share a cache. An entry is replaced as a whole, so no thread adds to an entry that another has begun.

    Args:
        label: what the weight is called in an error.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._kept: _Kept | None = None
        self.flat: tuple[Any, ...] | None = None  # the operands that launches read, taken apart
        self._retired: list[Seal] = []

    def clear(self) -> None:
        """Forget the operands: the weight may have changed unseen."""
        self._replace(None)

    def _replace(self, kept: _Kept | None) -> None:
        before, self._kept = self._kept, kept
        self.flat = None
        if before is not None and before.seal.is_to_be_looked_at:
            self._retired.append(before.seal)

    @property
    def has_seals(self) -> bool:
        """Whether comparisons have been asked for at which nobody has looked."""
        return bool(self._retired)

    def take_seals(self) -> list[Seal]:
        """The seals at which :func:`require_sealed` has to look; the cache then begins anew."""
        self.clear()
        taken, self._retired = self._retired, []
        return taken

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> Operands:
        """The operands of ``weight`` under ``plan``, made by ``make`` if they are not cached.

        A forward without a backward pass may use operands that were made for one with a backward pass, but gets no
        operand for dgrad. Otherwise what a forward saves would depend on the cache, and a recomputed forward might save
        something else.
        """
        quantizer = plan.weight
        changes = quantizer.draws_in_forward or quantizer.is_stateful or not quantizer.only_casts
        storage, layout = _memory(weight)
        if changes or storage is None or weight.is_inference():  # made in inference mode: it has no version counter
            return make()
        key, kept = (id(weight), weight._version, layout, plan), self._kept
        known = kept is not None and kept.storage() is storage and kept.key == key
        if kept is None or not known or not kept.seal.fits(weight):
            gone = partial(_forget, weakref.ref(self))
            kept = _Kept(weakref.ref(storage, gone), key, Seal(weight), {})
            self._replace(kept)
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


def _forget(cache: "weakref.ref[WeightCache]", storage: "weakref.ref[UntypedStorage]") -> None:
    """Drop what a cache has made of memory that is gone."""
    found = cache()
    if found is not None and found._kept is not None and found._kept.storage is storage:
        found.clear()


def require_sealed(caches: Iterable[WeightCache]) -> None:
    """Forget what ``caches`` hold, after a look at the comparisons that their devices have made.

    Raises:
        RuntimeError: a layer has multiplied by codes of what its weight was before.
    """
    taken = [(cache.label, seal) for cache in caches for seal in cache.take_seals()]
    broken = [label for (label, _), found in zip(taken, are_broken([seal for _, seal in taken]), strict=True) if found]
    if broken:
        names = ", ".join(dict.fromkeys(label or "a weight" for label in broken))
        raise RuntimeError(
            f"the weight of {names} was written to while its codes were cached, in a way that only a comparison of its "
            "bytes shows (through weight.data or other memory, or by a fused optimizer), and the device had used the "
            "codes before it compared: end fp4engine.weight_cache before such a write, or pass "
            "is_first_microbatch=True after it. What was computed since is wrong"
        )


_told: weakref.WeakSet[WeightCache] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while a cache is added to ``_told``, and while the caches in it are cleared."""


def microbatch_cache(label: str = "") -> WeightCache:
    """A cache without a scope, for ``is_first_microbatch``; every optimizer step clears it as long as it exists."""
    cache = WeightCache(label)
    with _lock:
        _told_for_good()
        _told.add(cache)
    return cache


@lru_cache(maxsize=1)
def _told_for_good() -> None:
    hear_steps(_clear_told)


def _clear_told(*_: object) -> None:
    with _lock:
        caches = list(_told)
    require_sealed(caches)


def begin_microbatches(cache: WeightCache) -> None:
    """Let ``cache`` quantize its weight anew, as a first microbatch begins.

    Raises:
        RuntimeError: as :func:`require_sealed`, of all layers whose microbatches no optimizer's step has ended.
    """
    cache.clear()
    if cache.has_seals:
        _clear_told()


@contextmanager
def told_of_steps(caches: Iterable[WeightCache]) -> Generator[None]:
    """Region in which every step of a ``torch.optim`` optimizer clears ``caches``."""

    def clear(*_: object) -> None:
        for cache in caches:
            cache.clear()

    with hearing_steps(clear):
        yield
