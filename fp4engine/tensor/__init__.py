"""Quantized tensors: frozen, and loud when mistaken for a torch.Tensor."""

from fp4engine.ops import Operand
from fp4engine.ops.operand import is_transposable
from fp4engine.tensor.quantized_tensor import QuantizedTensor

__all__ = ["Operand", "QuantizedTensor", "is_transposable"]
