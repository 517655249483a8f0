"""What modules do to their inputs before a recipe sees them: the dtype of ``torch.autocast``, and one device."""

from typing import TypeVar

import torch
from torch import Tensor

from fp4engine.functional.fused_input import FusedInput

_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that ``torch.autocast`` casts; it leaves float64 and integers alone."""

Input = TypeVar("Input", Tensor, Tensor | FusedInput)


def cast_by_autocast(inp: Input) -> Input:
    """``inp`` in the dtype of ``torch.autocast``, if ``torch.autocast`` is on and casts tensors of this dtype."""
    kind = inp.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and inp.dtype in _CAST_BY_AUTOCAST:
        return inp.to(torch.get_autocast_dtype(kind))
    return inp


def unusable_devices(inp: Tensor | FusedInput, weight: Tensor) -> ValueError:
    """The error for ``inp`` and ``weight`` on different devices, or on ``meta``, where tensors have no values."""
    for name, value in (("input", inp), ("weight", weight)):
        if not isinstance(value, Tensor | FusedInput):  # NumPy's arrays have a device, too
            return ValueError(f"the {name} must be a tensor, got {type(value).__name__}")
    devices = f"got the input on {str(inp.device)!r} and the weight on {str(weight.device)!r}"
    if weight.is_meta:
        remedy = "give the layer values with .to_empty(device=...) and load_state_dict"
    elif inp.device.type == "meta":
        remedy = "give it an input with values"
    else:
        remedy = f"move the layer with .to({str(inp.device)!r}), or the input with .to({str(weight.device)!r})"
    return ValueError(f"input and weight must be on one device that has values, {devices}; {remedy}")
