"""Which gradient of a step replaces what ``weight.main_grad`` holds, and which ones are added."""

from typing import Any

import torch
from torch import Tensor

from fp4engine.state import in_backward


class FirstOfStep:
    """Whether a gradient overwrites ``main_grad``: the first one that arrives after a first microbatch's forward.

    Which one that is shows when it arrives. A layer that runs at two depths gets the gradient of the deeper run first,
    and a pipeline may have run several microbatches by then. So this is asked in the backward pass, and answers once
    with yes.

    Args:
        buffer: the weight's ``main_grad``, on which a forward notes that the next gradient overwrites it.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def __bool__(self) -> bool:
        return vars(self.buffer).pop("waits_for_first", False)


def overwrites_main_grad(weight: Tensor, is_first_microbatch: bool, is_training: bool) -> Any:
    """What says, true or false, whether the gradient of the forward that calls this overwrites ``weight.main_grad``.

    The first run of a reentrant checkpoint notes the first microbatch, and what repeats it in the backward pass does
    not. In compiled code, which cannot note anything, the gradient of a first microbatch overwrites.
    """
    buffer: Any = getattr(weight, "main_grad", None)
    if torch.compiler.is_dynamo_compiling() or not isinstance(buffer, Tensor):
        return is_first_microbatch
    if is_first_microbatch and weight.requires_grad and (is_training or torch.is_grad_enabled()) and not in_backward():
        vars(buffer)["waits_for_first"] = True
    return FirstOfStep(buffer)
