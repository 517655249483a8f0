"""A module that is called is a tensor to a type checker, where PyTorch's own declaration says Any."""

import inspect
from collections.abc import Callable

import pytest
from torch import Tensor

import fp4engine
import fp4engine.te.pytorch as te

MODULES = (
    fp4engine.Linear,
    fp4engine.LayerNorm,
    fp4engine.RMSNorm,
    fp4engine.LayerNormLinear,
    fp4engine.LayerNormMLP,
    fp4engine.MultiheadAttention,
    fp4engine.TransformerLayer,
    te.Linear,
    te.LayerNormLinear,
    te.LayerNormMLP,
    te.DotProductAttention,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: f"{module.__module__}.{module.__name__}")
def test_a_call_is_declared_to_return_a_tensor(module: type) -> None:
    declared = [inspect.get_annotations(base) for base in module.__mro__]
    assert next(names["__call__"] for names in declared if "__call__" in names) == Callable[..., Tensor]
