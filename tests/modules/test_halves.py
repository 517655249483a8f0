"""A backward pass in two halves, as zero-bubble pipelines run it, is the whole one: its bytes, draws and products."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fp4engine
from fp4engine.modules import Gemms
from fp4engine.recipe import Recipe, zoo

ROWS, WIDTH = 48, 64
MODULES = {
    "linear": lambda **place: fp4engine.Linear(WIDTH, 80, **place),
    "without bias": lambda **place: fp4engine.Linear(WIDTH, 80, bias=False, **place),
    "several": lambda **place: torch.nn.Sequential(
        fp4engine.Linear(WIDTH, 80, **place), torch.nn.GELU(), fp4engine.Linear(80, 48, **place)
    ),
    "norm": lambda **place: fp4engine.LayerNormLinear(WIDTH, 80, **place),
    "mlp": lambda **place: fp4engine.LayerNormMLP(WIDTH, 96, **place),
    "experts": lambda **place: Experts(**place),
}
RECIPES = ("nvfp4", "fp4_all_the_way", "quartet2", "tetrajet2", "nvfp4_row_scaled", "fp8_delayed")


class Experts(torch.nn.Module):
    def __init__(self, **place: Any) -> None:
        super().__init__()
        self.experts = fp4engine.GroupedLinear(2, WIDTH, 80, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, torch.tensor([19, ROWS - 19], device=x.device))


def problem(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    module = MODULES[name](device=device)
    module.to(dtype)
    x = torch.randn(ROWS, WIDTH, dtype=dtype).to(device).requires_grad_()
    return module, x


def backward(module: torch.nn.Module, x: torch.Tensor, recipe: Recipe, passes: Sequence[Any]):
    """Gradients of the tensors in each of ``passes``; the draws taken, and the products that ran."""
    fp4engine.manual_seed(3)
    gemms = [part for part in module.modules() if isinstance(part, Gemms)]
    before = [dict(part.executed.counts) for part in gemms]
    with fp4engine.autocast(recipe=recipe):
        y = module(x)
    direction = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).sin().to(y)
    found = [torch.autograd.grad(y, tensors, direction, retain_graph=True) for tensors in passes]
    ran = [
        {key: number - old.get(key, 0) for key, number in part.executed.counts.items()}
        for part, old in zip(gemms, before, strict=True)
    ]
    return found, fp4engine.get_rng_state()["draws"], ran


def assert_halves_are_the_whole(name: str, recipe: Recipe, reverse: bool = False, **place: Any) -> None:
    results = []
    for in_halves in (False, True):
        module, x = problem(name, **place)
        weights = [p for name, p in module.named_parameters() if "layer_norm" not in name]
        halves = [weights, [x]] if reverse else [[x], weights]
        found, *counted = backward(module, x, recipe, halves if in_halves else [[*halves[0], *halves[1]]])
        results.append(([grad for part in found for grad in part], counted))
    (whole, counts), (parts, halves_counts) = results
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    if name in ("several", "mlp"):  # the way to the first layer's weights is through the second layer, once more
        assert counts[0] == halves_counts[0]
    else:
        assert counts == halves_counts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_two_halves_are_the_whole(name, recipe):
    assert_halves_are_the_whole(name, zoo.make(recipe))


@pytest.mark.parametrize("name", ["linear", "norm", "experts"])
def test_so_they_are_of_one_layer_the_other_way_round(name):
    assert_halves_are_the_whole(name, zoo.make("nvfp4"), reverse=True)


@pytest.mark.parametrize("name", ["linear", "norm", "mlp"])
def test_so_they_are_by_pytorchs_own_halves_with_the_parameters_of_a_norm(name):
    results = []
    for in_halves in (False, True):
        module, x = problem(name)
        fp4engine.manual_seed(3)
        with fp4engine.autocast(recipe=zoo.make("nvfp4")):
            y = module(x)
        direction = torch.ones_like(y)
        if in_halves:
            _, groups = stage_backward_input([y], [direction], [x], module.parameters())
            stage_backward_weight(module.parameters(), groups)
        else:
            y.backward(direction)
        results.append([x.grad, *(p.grad for p in module.parameters())])
        assert fp4engine.get_rng_state()["draws"]["cpu"] == (2 if name == "mlp" else 1)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_main_grad_is_added_to_once():
    results = []
    for order in (["x", "weight"], ["both"]):
        torch.manual_seed(0)
        layer = fp4engine.Linear(WIDTH, 80, bias=False, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.ones(80, WIDTH)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        named = {"x": [x], "weight": [layer.weight], "both": [x, layer.weight]}
        fp4engine.manual_seed(3)
        with fp4engine.autocast():
            y = layer(x)
        for which in order:
            y.sum().backward(inputs=named[which], retain_graph=True)
            if which == "x":
                assert torch.equal(layer.weight.main_grad, torch.ones(80, WIDTH))
        results.append((x.grad, layer.weight.main_grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_pass_that_is_repeated_draws_anew():
    module, x = problem("linear")
    (first, again, whole, other), draws, _ = backward(
        module, x, zoo.make("nvfp4"), [[x], [x], [x, module.weight], [x, module.weight]]
    )
    assert not torch.equal(first[0], again[0])
    assert torch.equal(again[0], whole[0])  # the other half of which the weight's gradient is
    assert not torch.equal(whole[0], other[0]) and not torch.equal(whole[1], other[1])
    assert draws["cpu"] == 3


def test_only_what_is_asked_for_is_multiplied():
    module, x = problem("linear")
    _, _, ran = backward(module, x, zoo.make("nvfp4"), [[x], [module.bias], [module.weight]])
    assert sorted(key[0] for key in ran[0]) == ["dgrad", "fprop", "wgrad"] and set(ran[0].values()) == {1}


def test_a_record_of_halves_is_that_of_the_whole(tmp_path):
    rows = []
    for passes in ("xw", "x w"):
        module, x = problem("several")
        fp4engine.convert(module)
        named = {"x": [x], "w": [module[0].weight]}
        with fp4engine.inspect.record(module, tmp_path / passes, every=1, optimizer="by hand", draws=2) as recorder:
            tensors = [[tensor for letter in part for tensor in named[letter]] for part in passes.split()]
            backward(module, x, zoo.make("nvfp4"), tensors)
            recorder.step()
        rows.append([*map(json.loads, (tmp_path / passes / "record.jsonl").read_text().splitlines())])
    assert rows[0][1:] == rows[1][1:]
    assert {row["gemm"] for row in rows[0] if row["kind"] == "gemm"} == {"fprop", "dgrad", "wgrad"}
