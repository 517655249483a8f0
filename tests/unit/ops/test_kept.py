"""Tensors that are kept in one buffer come out as they went in."""

import torch

from fp4engine.formats.one_buffer import SLICE
from fp4engine.ops.linear.kept import joined, one_buffer, parts
from fp4engine.ops.operation import Output


def test_what_is_joined_comes_apart_again():
    tensors = [
        torch.arange(33, dtype=torch.uint8).view(3, 11),
        torch.randn(5, 0).to(torch.float8_e4m3fn),
        torch.randn(4, 7).to(torch.float8_e8m0fnu),
        torch.tensor([2.5, float("nan")])[1:],
        torch.randn(6, 4).T,
    ]
    outputs = [Output(tensor.shape, tensor.dtype) for tensor in tensors]
    (buffer,) = joined(tensors)
    assert [(buffer.shape, buffer.dtype)] == one_buffer(outputs)
    for part, tensor in zip(parts([buffer], outputs), tensors, strict=True):
        assert part.shape == tensor.shape and part.dtype == tensor.dtype and part.is_contiguous()
        assert part.data_ptr() % SLICE == buffer.data_ptr() % SLICE or not part.numel()
        assert torch.equal(part.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_nothing_needs_no_buffer():
    assert joined([]) == one_buffer([]) == parts([], []) == []
