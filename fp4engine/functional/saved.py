"""Records of operands and tensors as the flat list of tensors that autograd saves, and back."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from fp4engine.ops import Operand, TiledOperand
from fp4engine.ops.operation import aligned

Structure = tuple[Any, ...]
"""Per field of a record: of an operand its type, how many tensors it has, and its other attributes; the length of a
tuple; ``"tensor"``; or None."""

Record = TypeVar("Record")


def flatten(record: tuple[Any, ...]) -> tuple[list[Tensor | None], Structure]:
    """The tensors of a named tuple of operands, tensors, tuples of tensors and ``None``; and its structure."""
    tensors: list[Tensor | None] = []
    structure: list[Any] = []
    for value in record:
        if isinstance(value, (Operand, TiledOperand)):
            own = value.tensors
            tensors += own
            structure.append((type(value), len(own), *value[: -len(own)]))
        elif isinstance(value, tuple):
            tensors += value
            structure.append(len(value))
        elif value is None:
            structure.append(None)
        else:
            tensors.append(value)
            structure.append("tensor")
    return tensors, tuple(structure)


def unflatten(kind: type[Record], structure: Structure, tensors: tuple[Tensor | None, ...]) -> Record:
    """Inverse of :func:`flatten`, for a record of type ``kind``.

    Tensors of quantized operands are copied that a hook of autograd gave back where kernels cannot read.
    """
    values: list[Any] = []
    place = 0
    for field in structure:
        if isinstance(field, tuple):
            operand, count, *told = field
            own = tensors[place : place + count]
            if told[0] is not None and not torch.compiler.is_dynamo_compiling():
                own = aligned(own)
            values.append(operand(*told, *own))
            place += count
        elif field is None:
            values.append(None)
        elif field == "tensor":
            values.append(tensors[place])
            place += 1
        else:
            values.append(tuple(tensors[place : place + field]))
            place += field
    return kind(*values)
