"""Tensors that one stream of a GPU makes and others read."""

from typing import Any

import torch
from torch import Tensor


class AcrossStreams:
    """Tensors made on the current stream, to be read on any.

    FSDP2 gathers on streams of its own, which run ahead of the one that computes. Before another stream may read the
    tensors, it has to wait until they are written, and their memory has to be recorded for it: the allocator would
    otherwise reuse freed memory on the stream that it came from while the other still has to read it. Each is done once
    per stream, since both also cover the work that the stream is given later.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._is_there: Any = None
        self._streams: set[Any] = set()
        if tensors[0].is_cuda:
            stream = torch.cuda.current_stream(tensors[0].device)
            self._is_there = stream.record_event()
            self._streams.add(stream)

    def read(self) -> tuple[Tensor, ...]:
        """The tensors, for the current stream."""
        if self._is_there is not None:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            if stream not in self._streams:
                stream.wait_event(self._is_there)
                for tensor in self._tensors:
                    tensor.record_stream(stream)
                self._streams.add(stream)
        return self._tensors
