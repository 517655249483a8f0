"""Regions in which layers are computed operation by operation, and every product is heard of."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fp4engine.functional.call import Call
from fp4engine.functional.eager import Eager
from fp4engine.tensor import Operand


@contextmanager
def one_by_one() -> Generator[None]:
    """Region in which no launch computes a direction of a layer."""
    with mock.patch.object(Call, "fuses", lambda *_: False):
        yield


@contextmanager
def heard(hear: Callable[[Call, str, Operand, Operand], Any]) -> Generator[None]:
    """Region in which ``hear`` is called with the layer's call, the GEMM and both operands before each product."""

    class Heard(Eager):
        def __init__(self, device: torch.device, call: Call, state: torch.Tensor | None) -> None:
            super().__init__(call.plan, device, call.shards, state)
            self.call = call

        def product(self, name: Any, left: Operand, right: Operand, *arguments: Any) -> torch.Tensor:
            hear(self.call, name, left, right)
            return super().product(name, left, right, *arguments)

    def eager(call: Call, device: torch.device, state: torch.Tensor | None = None) -> Heard:
        return Heard(device, call, state)

    with one_by_one(), mock.patch.object(Call, "eager", eager):
        yield
