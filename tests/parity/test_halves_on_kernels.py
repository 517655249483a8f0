"""A backward pass in two halves is the whole one on kernels too: of one launch each way, and of grouped experts."""

import pytest
import torch

from fp4engine import ops
from fp4engine.recipe import zoo
from tests.modules.test_halves import assert_halves_are_the_whole


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
@pytest.mark.parametrize("name", ["linear", "several", "experts"])
def test_two_halves_are_the_whole(kernel_device, name, recipe):
    ops.reset_executed_paths()
    assert_halves_are_the_whole(name, zoo.make(recipe), device=kernel_device, dtype=torch.bfloat16)
    if recipe == "nvfp4":
        assert {path.partition("/")[2] for path in ops.executed_paths()} == {"triton"}
