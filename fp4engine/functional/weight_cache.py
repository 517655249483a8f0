"""A weight's operands, kept across microbatches inside an explicit scope, and compared with the weight at each use."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from fp4engine.formats import Outer
from fp4engine.functional.plan import LinearPlan
from fp4engine.ops import Operand, SquareOperand, TiledOperand
from fp4engine.ops.checksum import Seal, are_broken, digest, in_bytes
from fp4engine.steps import hear_steps, hearing_steps

Operands = tuple[Operand, Operand | TiledOperand | SquareOperand | None]
"""``(operand of fprop, operand from which dgrad's operand is made, or None)``."""

Make = Callable[[], Operands]
"""Quantizes the weight."""


class _Kept:
    """What a cache knows of one weight.

    Attributes:
        storage: refers to the weight's storage weakly.
        key: version and layout of the weight, and the plan.
        digest: what the bytes of the weight came to.
        operands: None while they are made; then the others are valid too, and none changes.
        for_dgrad: whether they were made for a backward pass too.
        seal: what a device compares the weight with at each use; None where the host has compared.
    """

    def __init__(self, storage: "weakref.ref[UntypedStorage]", key: tuple[Any, ...], digest: int | Tensor) -> None:
        self.storage, self.key, self.digest = storage, key, digest
        self.operands: Operands | None = None
        self.for_dgrad = False
        self.seal: Seal | None = None

    def has(self, weight: Tensor, storage: UntypedStorage, key: tuple[Any, ...], needs_dgrad: bool) -> bool:
        """Whether the kept operands were made of the present bytes of ``weight``, as far as the host knows."""
        if self.operands is None or self.for_dgrad < needs_dgrad or self.storage() is not storage or self.key != key:
            return False
        return self.seal is not None or bool(digest(weight) == self.digest)


class WeightCache:
    """Operands of one weight, valid while the weight has the same memory with the same bytes, under an equal plan.

    Caching never changes a byte. Operands are not cached if their cast draws random bits or depends on earlier steps,
    or if their quantizer does more than cast: it may read something that is not in the weight. Nor are operands of a
    subclass of tensors, whose bytes are not known here, or operands that a CUDA graph makes in each of its replays.

    What a cache can know for nothing makes it quantize the weight anew: other memory (another parameter, or
    ``weight.data = ...``), another version counter. A write in place through another tensor with the same memory shows
    in none of these, nor does one by a fused optimizer. So the bytes of the weight are compared with those that were
    quantized, at each use, which reads the weight once. On a CPU the comparison comes first, and the weight is then
    quantized anew. A GPU compares after the host has gone on, since to wait for it would cost more than the cache
    saves. If the bytes differ, it makes the operands NaN before it multiplies by them, so that nothing wrong looks
    right, and :func:`require_sealed` says later which weight it was.

    The cache refers to the weight's storage alone, and weakly: ``torch.utils.swap_tensors`` refuses tensors with weak
    references. Operands are dropped with the memory of their weight.

    Threads may share a cache. An entry is replaced as a whole, so no thread adds to one that another has begun.

    Args:
        label: what the weight is called in an error.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._kept: _Kept | None = None
        self.flat: tuple[Any, ...] | None = None  # the operands that launches read, taken apart
        self._flags: list[Tensor] = []

    def clear(self) -> None:
        """Forget the operands: the weight may have changed unseen."""
        self._replace(None)

    def _replace(self, kept: _Kept | None) -> None:
        before, self._kept, self.flat = self._kept, kept, None
        if before is not None and before.seal is not None:
            self._flags.append(before.seal.broken)

    def take_flags(self) -> list[Tensor]:
        """What :func:`require_sealed` has to look at; the cache then begins anew."""
        self.clear()
        taken, self._flags = self._flags, []
        return taken

    def get(self, weight: Tensor, plan: LinearPlan, needs_dgrad: bool, make: Make) -> tuple[Operands, Seal | None]:
        """The operands of ``weight`` under ``plan``, made by ``make`` if they are not cached, and their seal.

        Where there is a seal, the device has to compare the weight with it before it multiplies by the operands.

        A forward without a backward pass may use operands that were made for one with a backward pass, but gets no
        operand for dgrad. Otherwise what a forward saves would depend on the cache, and a recomputed forward might save
        something else.
        """
        quantizer = plan.weight
        changes = quantizer.draws_in_forward or quantizer.is_stateful or not quantizer.only_casts
        storage, layout = _memory(weight)
        # Replays of a CUDA graph come when nobody asks a cache, and find its memory given away.
        is_captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if changes or storage is None or weight.is_inference() or is_captured:
            return make(), None  # a weight that was made in inference mode has no version counter
        key, kept = (weight._version, layout, plan), self._kept
        if kept is None or not kept.has(weight, storage, key, needs_dgrad):
            gone = weakref.ref(storage, partial(_forget, weakref.ref(self)))
            kept = _Kept(gone, key, digest(weight))
            self._replace(kept)  # before the operands are made: what clears the cache meanwhile clears them too
            operands = make()
            kept.for_dgrad, kept.seal = needs_dgrad, _seal(kept.digest, operands, weight)
            kept.operands = operands
        assert kept.operands is not None
        return kept.operands if kept.for_dgrad == needs_dgrad else (kept.operands[0], None), kept.seal

    def begin_microbatches(self) -> None:
        """Quantize the weight anew at the next use, as a first microbatch begins.

        Raises:
            RuntimeError: as :func:`require_sealed`, of all layers whose microbatches no optimizer's step has ended.
        """
        self.clear()
        if self._flags:  # of entries that are gone, and nobody has looked at them
            _clear_microbatches()

    def tiles(self, weight: Tensor) -> TiledOperand | None:
        """``weight`` as codes with one scale per tile, if it is stored so; every call makes operands from them."""
        return None


def _seal(first: int | Tensor, operands: Operands, weight: Tensor) -> Seal | None:
    """A seal that spoils memory of each operand which, full of NaN, makes every product by it NaN.

    None where the host knows at once what the bytes of ``weight`` come to.
    """
    if isinstance(first, int):
        return None
    found: dict[int, Tensor] = {}
    for made in operands:
        operand = made.operand if isinstance(made, SquareOperand) else made
        if not isinstance(operand, Operand):
            continue
        part = operand.amax
        if operand.spec is None:
            part = operand.data
        elif operand.spec.outer is Outer.NONE:
            part = operand.data if operand.scale_inv is None else operand.scale_inv
        if part is not None and part.untyped_storage() is not weight.untyped_storage():
            found[part.data_ptr()] = in_bytes(part)
    return Seal(first, torch.zeros(1, dtype=torch.int32, device=weight.device), tuple(found.values()))


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
        RuntimeError: a layer has multiplied by NaN, since its weight was no longer what had been quantized.
    """
    taken = [(cache.label, flag) for cache in caches for flag in cache.take_flags()]
    broken = [label for (label, _), found in zip(taken, are_broken([flag for _, flag in taken]), strict=True) if found]
    if broken:
        names = ", ".join(dict.fromkeys(label or "a weight" for label in broken))
        raise RuntimeError(
            f"the weight of {names} was written to while its codes were cached, in a way that only a comparison of its "
            "bytes shows (through weight.data or other memory, or by a fused optimizer). What was computed with it "
            "since is NaN: end fp4engine.weight_cache before such a write, or pass is_first_microbatch=True after it"
        )


_of_microbatches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while a cache is added to ``_of_microbatches``, and while these are listed."""


def microbatch_cache(label: str = "") -> WeightCache:
    """A cache without a scope, for ``is_first_microbatch``; every optimizer step clears it as long as it exists."""
    cache = WeightCache(label)
    with _lock:
        _of_microbatches.add(cache)
    return cache


def _clear_microbatches(*_: object) -> None:
    with _lock:
        caches = list(_of_microbatches)
    require_sealed(caches)


hear_steps(_clear_microbatches)


def told_of_steps(caches: Iterable[WeightCache]) -> AbstractContextManager[None]:
    """Region in which every step of a ``torch.optim`` optimizer clears ``caches``."""

    def clear(*_: object) -> None:
        for cache in caches:
            cache.clear()

    return hearing_steps(clear)
