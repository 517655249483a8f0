"""What a forward keeps for its backward, as tensors that autograd saves and a record of what they are."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine.functional.program import CastWeight, Kept, LaterProduct
from fp4engine.ops import Operand, SquareOperand, TiledOperand
from fp4engine.ops.checksum import Seal
from fp4engine.ops.operation import aligned


class Slot(NamedTuple):
    """One of the saved tensors, or what lies in it.

    Attributes:
        tensor: its index.
        start, shape, dtype: of a part of a tensor of bytes: the byte at which it begins, and what it is; None for a
            whole tensor.
        turned: whether the slot stands for the transposed tensor.
    """

    tensor: int
    start: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    turned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one part."""
        assert self.dtype is not None
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Layout:
    """What a forward saves, as a part of the keys of launches that read it. It equals nothing but itself.

    Attributes:
        slots: a record, with a :class:`Slot` in place of each tensor.
    """

    def __init__(self, slots: Any) -> None:
        self.slots = slots


RECORDS = (CastWeight, Kept, LaterProduct, Seal, SquareOperand)


def replaced(record: Any, function: Callable[[Any], Any]) -> Any:
    """The record with ``function`` of each of its tensors, or of what stands for one, in its place.

    Args:
        record: one of :data:`RECORDS`, an operand, a tensor or None; or a tuple of these.
    """
    if record is None:
        return None
    if isinstance(record, Operand):
        spec, rows, cols, *parts = record
        made: list[Any] = [None if part is None else function(part) for part in parts]
        return Operand(spec, rows, cols, *made)
    if isinstance(record, TiledOperand):
        return record._replace(packed=function(record.packed))
    if isinstance(record, RECORDS):
        return type(record)(*[replaced(value, function) for value in record])
    if type(record) is tuple:
        return tuple([replaced(value, function) for value in record])
    return function(record)


def leaves(record: Any) -> list[Any]:
    """The tensors of a record, or what stands for them, in order."""
    found: list[Any] = []
    replaced(record, found.append)
    return found


def saved(record: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a record, each once, and the record with a :class:`Slot` in place of each."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        for index, other in enumerate(tensors):
            if other is tensor:
                return Slot(index)
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    slots = replaced(record, slot)
    return tensors, slots


def restored(slots: Any, tensors: Sequence[Tensor]) -> Any:
    """Inverse of :func:`saved`.

    Tensors are copied that a hook of autograd gave back at addresses from which kernels cannot read.
    """
    if not torch.compiler.is_dynamo_compiling():
        tensors = list(aligned(tensors))

    def read(slot: Slot) -> Tensor:
        whole = tensors[slot.tensor]
        if slot.start is None:
            return whole.T if slot.turned else whole
        assert slot.dtype is not None
        return whole[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)

    return replaced(slots, read)
