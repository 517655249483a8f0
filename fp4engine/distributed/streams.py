"""Tensors that one stream of a GPU makes and others read."""

from typing import Any

import torch
from torch import Tensor


class Shared:
    """Tensors made on the current stream, for any stream to read as long as somebody holds them.

    FSDP2 gathers on streams of its own, which run ahead of the one that computes, and on that of the caller where it is
    asked to unshard. Two things are due before another stream reads: it waits until the tensors are written; and their
    memory is recorded for it, as the allocator gives freed memory to the stream that it came from at once, while the
    other may still have to read it. Each is due once for a stream: what it starts later comes behind the wait, and
    memory that is freed waits for all that a recorded stream was given until then.
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
