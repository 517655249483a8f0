"""Delayed and held scaling's memory of one tensor, on whatever device it lies; and the count of optimizer steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.ops import backend as backends
from fp4engine.ops.operation import Output, define, is_plain
from fp4engine.private import backward_pass
from fp4engine.steps import hear_steps


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


class _Count:
    """How many optimizer steps have been counted.

    Attributes:
        steps: the count.
        is_over: whether an optimizer has stepped since; the next cast outside a backward pass counts it. So several
            optimizers that step one after the other are one step, and so is one inside each layer's backward pass.
        shown: ``device -> the count on it, int64 [1], and what it shows``.
    """

    def __init__(self) -> None:
        self.steps, self.is_over = 0, False
        self.shown: dict[torch.device, tuple[Tensor, int]] = {}

    def on(self, device: torch.device) -> Tensor:
        """The count at a cast that begins now.

        Raises:
            RuntimeError: a CUDA graph is captured, whose replays would not count.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "HeldScaling counts optimizer steps on the host, which a CUDA graph does not replay; leave its layers "
                "out of the graph, or use another recipe"
            )
        if self.is_over and backward_pass() == -1:
            self.steps, self.is_over = self.steps + 1, False
        tensor, shown = self.shown.get(device, (None, -1))
        with torch.inference_mode(False):
            if tensor is None:
                tensor = torch.zeros(1, dtype=torch.int64, device=device)
            if shown != self.steps:
                tensor.fill_(self.steps)
        self.shown[device] = tensor, self.steps
        return tensor


_count = _Count()


def optimizer_stepped(*_: object) -> None:
    """Tell layers under :class:`~fp4engine.recipe.HeldScaling` that an optimizer step is over.

    Optimizers of ``torch.optim`` and their subclasses tell by themselves; after a step of another one, call this.
    """
    _count.is_over = True


hear_steps(optimizer_stepped)


def optimizer_steps() -> int:
    """How many optimizer steps are over; several without a forward between them are one."""
    return _count.steps + _count.is_over


def hold_amax(due: Tensor, amax: Tensor, current: Tensor, hold: int, backend: str = "auto") -> Tensor:
    """Sample ``current`` if that is due, and return what the tensor is scaled by; the reference has the arithmetic.

    Args:
        due: int64 [1]; amax, current: FP32 [1]; the first two are written in place.
        hold: optimizer steps for which a sample is held.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    run = _hold_amax if is_plain(current) else torch.ops.fp4engine.hold_amax
    return run(due, amax, current, hold, backend)


def _hold_amax(due: Tensor, amax: Tensor, current: Tensor, hold: int, backend: str) -> Tensor:
    now = _count.on(due.device)
    if backends.choose("hold_amax", due.device, backend, (), backends.always) == "triton":
        from fp4engine.kernels.amax_history import hold_amax as hold_by_kernel

        return hold_by_kernel(due, amax, now, current, hold)
    return reference.hold_amax(due, amax, now, current, hold)


define(_hold_amax, lambda: [Output((1,), torch.float32)], mutates_args=("due", "amax"))
