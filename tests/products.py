"""Regions in which layers are computed operation by operation, and every product is heard of."""

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fp4engine.functional.call import Call
from fp4engine.functional.eager import Eager
from fp4engine.tensor import Operand

LINEAR = importlib.import_module("fp4engine.functional.linear")  # the module, which the function's name hides


@contextmanager
def one_by_one() -> Generator[None]:
    """Region in which no launch computes a direction of a layer."""
    with mock.patch.object(LINEAR, "fuses", lambda *_: False):
        yield


@contextmanager
def heard(hear: Callable[[Call, str, Operand, Operand], Any]) -> Generator[None]:
    """Region in which ``hear`` is called with the layer's call, the GEMM and both operands before each product."""

    class Heard(Eager):
        def __init__(self, device: torch.device, call: Call) -> None:
            super().__init__(call.plan, device, call.shards)
            self.call = call

        def product(self, name: Any, left: Operand, right: Operand, *arguments: Any) -> torch.Tensor:
            hear(self.call, name, left, right)
            return super().product(name, left, right, *arguments)

    with one_by_one(), mock.patch.object(Call, "eager", lambda call, device: Heard(device, call)):
        yield
