"""Blocks compiled on their own, as pre-trainers do: equal blocks share a graph, and recipes in turn settle."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling, Rule, RuledRecipe, zoo

RECIPES = (NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True), zoo.make("mxfp8"))


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.up, self.down = linear(16, 32), linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def model(linear, count=12):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(linear) for _ in range(count)))
    for name, module in blocks.named_modules():
        module.name = name  # as convert does
    return blocks


def step(blocks, x, recipe):
    blocks.zero_grad()
    leaf = x.clone().requires_grad_()
    with fp4engine.autocast(recipe=recipe):
        y = blocks(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in blocks.parameters())]


def compiled(linear, count=12):
    torch._dynamo.reset()
    counters.clear()
    blocks = model(linear, count)
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    return blocks


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.no_poison
def test_equal_blocks_share_a_graph_and_recipes_in_turn_settle():
    x = torch.randn(4, 16)
    plain = compiled(nn.Linear)
    step(plain, x, RECIPES[0])
    of_linear = graphs()
    eager, blocks = model(fp4engine.Linear), compiled(fp4engine.Linear)
    settled = []
    for index in range(20):
        recipe = RECIPES[index % 3]
        fp4engine.manual_seed(index)
        want = step(eager, x, recipe)
        fp4engine.manual_seed(index)
        got = step(blocks, x, recipe)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        settled.append(graphs())
    assert settled[2] == settled[-1] == 3 * of_linear


@pytest.mark.no_poison
def test_a_recipe_with_rules_makes_a_graph_for_each_answer_once_modules_have_run_by_it():
    recipe = RuledRecipe(RECIPES[0], (Rule(RECIPES[1], blocks=(3, 6)),))
    x, blocks = torch.randn(4, 16), compiled(fp4engine.Linear, 6)
    by_call = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    want = [fp4engine.manual_seed(0), *step(blocks, x, recipe)][1:]
    for block, call in zip(blocks, by_call, strict=True):
        block._compiled_call_impl = call
    fp4engine.manual_seed(0)
    for ours, theirs in zip(step(blocks, x, recipe), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert graphs() == 2


@pytest.mark.no_poison
def test_rows_marked_dynamic_do_not_recompile():
    torch._dynamo.reset()
    counters.clear()
    layer = fp4engine.Linear(16, 32)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (20, 36, 52, 1000):  # more than one block of 16: PyTorch makes another graph for sizes of one
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        with fp4engine.autocast(recipe=RECIPES[0]):
            assert call(x).shape == (rows, 32)
    assert graphs() == 1


@pytest.mark.no_poison
def test_two_recipes_inside_one_compiled_function():
    torch._dynamo.reset()
    first, second = fp4engine.Linear(16, 16), fp4engine.Linear(16, 16)

    def forward(x):
        with fp4engine.autocast(recipe=RECIPES[0]):
            x = first(x)
        with fp4engine.autocast(recipe=RECIPES[1]):
            return second(x)

    x = torch.randn(20, 16)
    assert torch.equal(torch.compile(forward, fullgraph=True, backend="aot_eager")(x), forward(x))


@pytest.mark.no_poison
def test_a_recipe_with_rules_inside_one_compiled_function():
    torch._dynamo.reset()
    recipe = RuledRecipe(RECIPES[0], (Rule(RECIPES[1], name="1"),))
    layers = nn.Sequential(fp4engine.Linear(16, 16, name="0"), fp4engine.Linear(16, 16, name="1"))
    call = torch.compile(layers, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 16)
    with fp4engine.autocast(recipe=recipe):
        assert torch.equal(call(x), layers(x))
