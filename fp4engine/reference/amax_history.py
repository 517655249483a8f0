"""Delayed scaling's memory of one tensor, a step at a time.

values[0] collects the step that is running, later ones follow by age;  amax is what scales are made of

And held scaling's, whose amax is sampled at every n-th step.
"""

import torch
from torch import Tensor

CHOICES = ("", "max", "most_recent", "given")
"""What the next amax is: none since the step goes on, the largest value that is no NaN, the newest, or another one."""


def record_amax(values: Tensor, amax: Tensor, current: Tensor, choice: str, chosen: Tensor | None) -> Tensor:
    """Note ``current`` [1] in ``values`` [length], and return what the tensor is scaled by, FP32 [1].

    That is ``amax`` [1]; or ``current`` if it is an Inf or a NaN, so that its product is not silently finite. Both
    ``values`` and ``amax`` are written in place.

    Args:
        choice: of :data:`CHOICES`; but for ``""`` the step is over, so the next amax is chosen and the values age.
            A choice that is zero or not finite leaves the amax as it was.
        chosen: FP32 [1], the next amax where ``choice`` is ``"given"``.
    """
    if choice:
        if choice == "max":
            chosen = values.masked_fill(values.isnan(), 0).amax().view(1)
        elif choice == "most_recent":
            chosen = values[:1].clone()
        assert chosen is not None
        amax.copy_(torch.where(chosen.isfinite() & (chosen > 0), chosen, amax))
        values.copy_(values.roll(1))
        values[0] = 0
    values[0] = torch.maximum(values[0], current[0])
    return torch.where(current.isfinite(), amax, current)


def hold_amax(due: Tensor, amax: Tensor, now: Tensor, current: Tensor, hold: int) -> Tensor:
    """What a tensor is scaled by whose own amax is ``current``, FP32 [1]; a sample of it if one is due.

        now >= due:  amax = current;  due = now + hold

    An Inf or a NaN in ``current`` is returned, so that the product is not silently finite. It is no sample, and neither
    is zero, which says nothing of the values that will come: the next cast takes it. ``due`` and ``amax`` are written
    in place.

    Args:
        due, now: int64 [1], counts of optimizer steps; amax, current: FP32 [1].
        hold: steps for which a sample is held.

    Source: ue5m3-fp4 59868e7, ``scaling/training.py``, ``TrainingScaleState.reference``.
    """
    samples = (now >= due) & (current > 0) & current.isfinite()
    amax.copy_(torch.where(samples, current, amax))
    due.copy_(torch.where(samples, now + hold, due))
    return torch.where(current.isfinite(), amax, current)
