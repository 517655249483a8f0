"""What a tensor is to the module that asks for a quantizer, and the products that a module makes of tensors."""

from dataclasses import dataclass
from typing import Literal, get_args

TensorType = Literal["input", "weight", "grad_output"]
TENSOR_TYPES: tuple[TensorType, ...] = get_args(TensorType)
"""The tensor roles of a linear module, in the order of their random streams."""
GemmName = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[GemmName, ...] = get_args(GemmName)
"""The products of a linear module."""


@dataclass(frozen=True, slots=True)
class QuantizerRole:
    """Identity of a tensor that wants a quantizer; what a custom recipe's factory receives.

    Attributes:
        module_type: ``"linear"``, ``"grouped_linear"``; empty when not set.
        tensor_type: one of :data:`TENSOR_TYPES`; empty when not set.
        name: the module's own name, e.g. ``"layers.3.fc1"``; empty when not set.
        shape: shape of the module's weight; empty when not set.

    Source: TransformerEngine ``pytorch/quantization.py``, ``QuantizerRole``.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    shape: tuple[int, ...] = ()
