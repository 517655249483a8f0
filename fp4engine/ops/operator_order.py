"""The order of operators in compiled code that do not read each other's tensors."""

from typing import Literal

import torch
from torch import Tensor

from fp4engine.private import constant_when_traced

Direction = Literal["forward", "backward"]
"""A pass of a layer."""


def order_token(device: torch.device, direction: Direction) -> Tensor:
    """A tensor that operators declare to write to, so that the compiler keeps their order. Nothing reads or writes it.

    Ranks have to run operators with a collective in one order, or one rank would reduce the amaxes of another layer.
    Operators that take draws have to run in the order of the layers, since draws are numbered. Each direction has a
    token of its own, because autograd gives no backward pass a tensor that a forward pass has written to since.
    """
    return getattr(_tokens, _token_name(device, direction))


class _Tokens:
    """An attribute for each device and direction: Dynamo reads an attribute, but would copy a dictionary."""


_tokens = _Tokens()


@constant_when_traced
def _token_name(device: torch.device, direction: Direction) -> str:
    """The attribute of ``_tokens`` that holds the token, which is made if need be."""
    name = f"{device} {direction}"
    if not hasattr(_tokens, name):
        with torch.inference_mode(False):
            setattr(_tokens, name, torch.zeros(1, dtype=torch.int32, device=device))
    return name
