"""What a forward keeps for its backward in one buffer of bytes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp4engine.formats.one_buffer import offsets
from fp4engine.ops.operation import Output


def one_buffer(outputs: Sequence[Output]) -> list[Output]:
    """The buffer in which tensors like ``outputs`` lie, in their order; none for none."""
    return [Output((offsets(_sizes(outputs))[1],), torch.uint8)] if outputs else []


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of ``tensors`` in one buffer; none for none."""
    outputs = [Output(tensor.shape, tensor.dtype) for tensor in tensors]
    buffers = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in one_buffer(outputs)]
    for part, tensor in zip(parts(buffers, outputs), tensors, strict=True):
        part.copy_(tensor)
    return buffers


def parts(buffers: Sequence[Tensor], outputs: Sequence[Output]) -> list[Tensor]:
    """Inverse of :func:`joined`, for tensors like ``outputs``: views of the one buffer."""
    starts, _ = offsets(_sizes(outputs))
    return [
        buffers[0][start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, _sizes(outputs), outputs, strict=True)
    ]


def _sizes(outputs: Sequence[Output]) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape, dtype in outputs]
