"""FP4 with outer scales that are sampled at every n-th optimizer step, and held in between."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4engine.ops.amax_history import hold_amax, optimizer_steps
from fp4engine.quantizers.delayed import AmaxHistory, RememberingQuantizer

_NEVER = torch.iinfo(torch.int64).max
"""A count of steps that no run reaches."""


class HeldAmax(AmaxHistory):
    """The amax of one tensor of one module as it was sampled last.

    Attributes:
        values: int64 [1], the count of optimizer steps (:func:`optimizer_steps`) at which the next sample
            is due; -1 before the first one.
        amax: FP32 [1], the sample.
    """

    kept_by = "HeldScaling"

    def __init__(self, amax: float, due: int = -1) -> None:
        super().__init__(1, amax)
        with torch.inference_mode(False):
            self.values = torch.full((1,), due, dtype=torch.int64, device="cpu")
        self._seen = -1  # the count at the last cast

    def hold(self, current: Tensor, steps: int, evaluates: bool, backend: str) -> Tensor:
        """The amax [1] to scale a tensor by whose own is ``current``; a sample, held for ``steps``, if one is due.

        Args:
            evaluates: whether memory is left alone. Only a tensor without a sample is then scaled by its own amax, so
                that no score depends on the batch.
        """
        self.follow(current.device)
        if evaluates:
            due = self.values.clone().masked_fill_(self.values >= 0, _NEVER)
            return hold_amax(due, self.amax.clone(), current, steps, backend)
        if not torch.compiler.is_compiling():
            count = optimizer_steps()
            if self._turn is not None and count != self._seen:
                self.leave_turn()
            self._seen = count
        return hold_amax(self.values, self.amax, current, steps, backend)

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON or ``torch.save``: counts are of one process, so it says how many steps are left."""
        due = int(self.values)
        return {"amax": float(self.amax), "left": -1 if due < 0 else max(due - optimizer_steps(), 0)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "HeldAmax":
        """Inverse of :meth:`state`."""
        left = state["left"]
        return cls(state["amax"], left if left < 0 else optimizer_steps() + left)

    def __reduce__(self) -> Any:
        return HeldAmax.from_state, (self.state(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldAmax":
        copied = memo[id(self)] = HeldAmax.from_state(self.state())
        return copied


@dataclass(frozen=True)
class HeldQuantizer(RememberingQuantizer):
    """Scales both operands of a tensor by an outer amax that is held. Compares by its casts and ``hold``.

    Attributes:
        hold: optimizer steps for which a sample is held.
    """

    hold: int = 1

    @property
    def is_composable(self) -> bool:
        """True: a launch is given the amax."""
        return type(self) is HeldQuantizer

    def _new_history(self) -> HeldAmax:
        assert self.rowwise_spec is not None
        return HeldAmax(self.rowwise_spec.numerator)

    def _choose(self, current: Tensor) -> Tensor:
        assert isinstance(self.history, HeldAmax)
        return self.history.hold(current, self.hold, self.evaluates, self.backend)

    def given_amax(self, x: Tensor, shared: Tensor | None) -> Tensor:
        return self.scaled_by(self.own_amax(x) if shared is None else shared)
