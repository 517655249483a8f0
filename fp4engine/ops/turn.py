"""The order of operators in compiled code, where it is not that of their tensors."""

from typing import Literal

import torch
from torch import Tensor

from fp4engine.tracing import constant_when_traced

Direction = Literal["forward", "backward"]
"""Of a layer's two passes, the one that asks."""


def turn_of(device: torch.device, direction: Direction) -> Tensor:
    """What operators are said to write to that have to keep their order, so that a compiler lets them keep it.

    Ranks whose operators wait for each other could else be given different orders, and one would reduce another layer's
    amaxes; and draws are numbered in the order of the layers. Autograd refuses to hand to a backward pass what a
    forward pass has written to since: each direction has its own.
    """
    return getattr(_turns, _begun(device, direction))


class _Turns:
    """By device and direction, an attribute each: Dynamo reads attributes as they are, and copies a dictionary."""


_turns = _Turns()


@constant_when_traced
def _begun(device: torch.device, direction: Direction) -> str:
    """The name in ``_turns`` of a tensor that is there from here on; nobody reads or writes what is in it."""
    name = f"{device} {direction}"
    if not hasattr(_turns, name):
        with torch.inference_mode(False):
            setattr(_turns, name, torch.zeros(1, dtype=torch.int32, device=device))
    return name
