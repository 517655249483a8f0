"""Delayed scaling's memory of one tensor, on whatever device it lies."""

from typing import NamedTuple

from torch import Tensor

from fp4engine import reference
from fp4engine.ops import backend as backends


class Memory(NamedTuple):
    """What one cast reads and writes of delayed scaling's memory of its tensor.

    Attributes:
        values: FP32 [length], the history in which the tensor's amax is stored; None stores nothing.
        amax: FP32 [1], what the tensor is scaled by, once the choice has been made.
        choice: of :data:`fp4engine.reference.amax_history.CHOICES`, but for ``"given"``.
    """

    values: Tensor | None
    amax: Tensor
    choice: str


def record_amax(
    values: Tensor, amax: Tensor, current: Tensor, choice: str, chosen: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Note ``current`` in ``values``, and return what the tensor is scaled by: see
    :func:`fp4engine.reference.record_amax`.

    Args:
        values: FP32 [length]; amax, current, chosen: FP32 [1]; the first two are written in place.
        choice: of :data:`fp4engine.reference.amax_history.CHOICES`.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    if backends.choose("record_amax", values.device, backend, (), backends.always) == "triton":
        from fp4engine.kernels.amax_history import record_amax as record_by_kernel

        return record_by_kernel(values, amax, current, choice, chosen)
    return reference.record_amax(values, amax, current, choice, chosen)
