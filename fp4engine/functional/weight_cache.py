"""A weight's operands, kept across microbatches inside an explicit scope."""

from collections.abc import Callable

from torch import Tensor

from fp4engine.functional.plan import LinearPlan
from fp4engine.tensor import Operand

Operands = tuple[Operand, Operand | None]
"""``(operand of fprop, what dgrad needs)``."""


class WeightCache:
    """Operands of one weight, valid while the weight and its module's plan are what they were.

    Caching never changes a byte: what is drawn or depends on earlier steps is made anew, and an entry is dropped as
    soon as the weight's version counter, storage or plan differs. Writes through ``weight.data`` move no version
    counter; leave the scope around those.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int, LinearPlan] | None = None
        self._operands: dict[bool, Operands] = {}

    def get(self, question: tuple[Tensor, LinearPlan, bool], make: Callable[[], Operands]) -> Operands:
        """The operands for ``(weight, plan, needs_dgrad)``, made by ``make`` when they are not there.

        Operands made for a backward pass also serve a forward without one.
        """
        weight, plan, needs_dgrad = question
        changes = plan.weight.draws_in_forward or plan.weight.is_stateful
        if changes or weight.is_inference():  # made in inference mode: it has no version counter
            return make()
        key = (weight.data_ptr(), weight._version, plan)
        if key != self._key:
            self._key = key
            self._operands.clear()
        if needs_dgrad not in self._operands:
            if not needs_dgrad and True in self._operands:
                return self._operands[True]
            self._operands[needs_dgrad] = make()
        return self._operands[needs_dgrad]
