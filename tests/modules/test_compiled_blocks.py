"""Blocks compiled on their own, as pre-trainers do: equal blocks share a graph, and recipes in turn settle."""

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx

import fp4engine
from fp4engine.formats.one_buffer import SLICE
from fp4engine.functional import operators
from fp4engine.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    LinearRecipe,
    NVFP4BlockScaling,
    Rule,
    RuledRecipe,
    zoo,
)

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


@pytest.mark.parametrize("recipe", RECIPES, ids=["nvfp4", "no_rht", "mxfp8"])
def test_an_exported_program_is_the_forward_by_the_recipe_in_force(recipe):
    block, x = model(fp4engine.Linear, 1), torch.randn(16, 16)
    with fp4engine.autocast(recipe=recipe):
        expected, program = block(x), torch.export.export(block, (x,)).module()
    assert torch.equal(program(x), expected) and not torch.equal(block(x), expected)


@pytest.mark.parametrize("enabled", [True, False], ids=["recipe", "high precision"])
def test_a_trace_of_symbolic_sizes_counts_no_products_and_disturbs_no_later_one(enabled):
    block, x = model(fp4engine.Linear, 1), torch.randn(16, 16)
    call, parameters = partial(torch.func.functional_call, block), dict(block.named_parameters())
    dynamic = ({0: torch.export.Dim("rows", min=1, max=64)},)
    with torch.no_grad(), fp4engine.autocast(enabled=enabled, recipe=RECIPES[0]):
        for _ in range(2):
            torch.export.export(block, (x,), dynamic_shapes=dynamic, strict=False)
            make_fx(call, tracing_mode="symbolic")(parameters, x)
        assert not block[0].up.executed.counts and not block[0].up.executed.by_torch
        block(x)
        torch.export.export(block, (x,), strict=False)
    assert all(type(flops) is int for flops in block[0].up.executed.flops.values())


@pytest.mark.no_poison
def test_equal_blocks_share_a_graph_and_recipes_in_turn_settle():
    x = torch.randn(4, 16)
    plain = compiled(nn.Linear)
    step(plain, x, RECIPES[0])
    of_linear = graphs()
    eager, blocks = model(fp4engine.Linear), compiled(fp4engine.Linear)
    settled = []
    for index in range(9):
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
def test_compiled_code_asks_its_rules_again_for_another_name_or_weight():
    torch._dynamo.reset()
    recipe = RuledRecipe(RECIPES[0], (Rule(LinearRecipe(), "head"), Rule(RECIPES[2], narrower_than=32)))
    layer, x = fp4engine.Linear(16, 64, bias=False, name="first"), torch.randn(4, 16)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with fp4engine.autocast(recipe=recipe):
        assert torch.equal(layer(x), call(x))
        layer.name = "head"
        assert torch.equal(call(x), nn.functional.linear(x, layer.weight))
        layer.name = "body"
        by_rule = fp4engine.Linear(16, 16, bias=False, name="body")
        layer.weight = by_rule.weight
        assert torch.equal(call(x), by_rule(x))
        copied = copy.deepcopy(layer)
        copied.name = "head"
        assert torch.equal(layer(x), call(x)) and layer.name == "body"


class Graphs:
    """A backend that runs the graphs of forward and backward as they are, and keeps the names of our operators."""

    def __init__(self):
        self.operators = []

    def __call__(self, module, inputs):
        split = min_cut_rematerialization_partition
        return aot_module_simplified(module, inputs, fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=split)

    def keep(self, module, inputs):
        text = module.print_readable(print_output=False)
        self.operators.append(dict(Counter(re.findall(r"fp4engine\.(\w+)\.default", text))))
        return make_boxed_func(module.forward)


def trained(run, layer, recipe, shape=(2, 17, 64), x_grad=True):
    """Output and gradients of a step, as it is drawn after the same seed."""
    fp4engine.manual_seed(4)
    torch.manual_seed(4)
    layer.zero_grad()
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=x_grad)
    with fp4engine.autocast(recipe=recipe):
        y = run(x)
    if y.requires_grad:
        y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


AT_ONCE = {
    "default": NVFP4BlockScaling(),
    "4over6": NVFP4BlockScaling(nvfp4_4over6="all"),
    "row scaled": NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "FP8 current": Float8CurrentScaling(),
    "FP8 blocks": zoo.make("fp8_block"),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("recipe", AT_ONCE.values(), ids=AT_ONCE)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_layer_is_an_operator_forward_and_one_backward(recipe, bias):
    torch._dynamo.reset()
    layer, graphs = fp4engine.Linear(64, 48, bias=bias, dtype=torch.bfloat16), Graphs()
    got = trained(torch.compile(layer, fullgraph=True, backend=graphs), layer, recipe)
    assert_same(got, trained(layer, layer, recipe))
    backward = {"linear_backward": 1} | ({"column_sums": 1} if bias else {})  # the first takes the draw
    assert graphs.operators == [{"linear_forward": 1}, backward]


@pytest.mark.no_poison
@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("recipe", AT_ONCE.values(), ids=AT_ONCE)
def test_the_operators_make_and_keep_what_gradients_need(recipe, x_grad, w_grad):
    torch._dynamo.reset()
    layer, graphs = fp4engine.Linear(64, 48, bias=False, dtype=torch.bfloat16), Graphs()
    layer.weight.requires_grad_(w_grad)
    got = trained(torch.compile(layer, fullgraph=True, backend=graphs), layer, recipe, x_grad=x_grad)
    assert_same(got, trained(layer, layer, recipe, x_grad=x_grad))
    assert graphs.operators[0] == {"linear_forward": 1} and len(graphs.operators) == 1 + (x_grad or w_grad)


@pytest.mark.no_poison
def test_what_a_compiled_layer_saves_is_what_an_eager_one_saves():
    """Codes, scales and amaxes, and nothing in high precision; in one buffer where it is an operator."""
    torch._dynamo.reset()
    layer = fp4engine.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=Graphs())):
        kept = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t),
            fp4engine.autocast(recipe=RECIPES[0]),
        ):
            run(x)
        saved.append(kept)
    eager, (compiled,) = saved
    assert len(eager) == 6 and not any(t.dtype == torch.bfloat16 for t in eager)
    assert compiled.dtype == torch.uint8
    assert 0 <= compiled.nbytes - sum(t.nbytes for t in eager) < 5 * SLICE


@pytest.mark.no_poison
@pytest.mark.parametrize("recipe", AT_ONCE.values(), ids=AT_ONCE)
def test_what_a_compiled_layer_keeps_may_come_back_at_any_address(recipe):
    def moved(tensor):
        room = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
        place = -room.data_ptr() % 64 + 1 if tensor.dtype == torch.uint8 else 0
        elsewhere = room[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return elsewhere.copy_(tensor)

    torch._dynamo.reset()
    layer = fp4engine.Linear(64, 48, dtype=torch.bfloat16)
    want = trained(layer, layer, recipe)
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        got = trained(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, recipe)
    assert_same(got, want)


@pytest.mark.no_poison
@pytest.mark.parametrize("recipe", [RECIPES[0], Float8CurrentScaling()], ids=["NVFP4", "FP8"])
def test_rows_marked_dynamic_train_by_one_graph(recipe):
    torch._dynamo.reset()
    counters.clear()
    layer, by_rows = fp4engine.Linear(64, 48, bias=False, dtype=torch.bfloat16), Graphs()
    call = torch.compile(layer, fullgraph=True, backend=by_rows)

    def run(x):
        torch._dynamo.mark_dynamic(x, 0)
        return call(x)

    for rows in (20, 36, 52, 1000):
        assert_same(trained(run, layer, recipe, (rows, 64)), trained(layer, layer, recipe, (rows, 64)))
    assert graphs() == 1 and len(by_rows.operators) == 2


@pytest.mark.no_poison
def test_large_layers_are_single_operators_and_share_casts_of_one_input(monkeypatch):
    monkeypatch.setattr(operators, "LARGE", 2 * 48 * 64 - 1)
    torch._dynamo.reset()
    layers, graphs = (
        nn.ModuleList(fp4engine.Linear(64, 48, dtype=torch.bfloat16, bias=False) for _ in range(3)),
        Graphs(),
    )

    def run(x):
        return layers[0](x) + layers[1](x) * layers[2](x)

    got = trained(torch.compile(run, fullgraph=True, backend=graphs), layers, RECIPES[0])
    assert_same(got, trained(run, layers, RECIPES[0]))
    assert graphs.operators[0] == {"quantize": 4, "gemm": 3}


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
@pytest.mark.parametrize("prefix", ["", "blocks.0."])
def test_a_recipe_with_rules_inside_one_compiled_function(prefix):
    torch._dynamo.reset()
    recipe = RuledRecipe(RECIPES[0], (Rule(RECIPES[1], name=f"{prefix}1"),))
    layers = nn.Sequential(*(fp4engine.Linear(16, 16, name=f"{prefix}{index}") for index in range(2)))
    call = torch.compile(layers, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 16)
    with fp4engine.autocast(recipe=recipe):
        assert torch.equal(call(x), layers(x))


class Beside(nn.ModuleList):
    def forward(self, x):
        return self[0](x) + self[1](x)


@pytest.mark.parametrize("row", [name for name in zoo.ZOO if name != "fp8_delayed"])
def test_every_row_of_the_book_has_eager_bytes_compiled(row):
    """But for delayed scaling, which does not compile. The draws of a backward pass begin with the last layer."""
    recipe, x = zoo.make(row), torch.randn(48, 16)
    torch._dynamo.reset()
    eager = Beside(fp4engine.Linear(16, 32) for _ in range(2))
    traced = copy.deepcopy(eager)
    for layer in traced:
        layer.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for layers in (eager, traced):
        for _ in range(3):
            fp4engine.manual_seed(1)
            found = step(layers, x, recipe)
        results.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@torch.compile(backend="eager")
def enter(x, region):
    region.__enter__()
    return x + 1


@torch.compile(backend="eager")
def leave(x, region):
    region.__exit__(None, None, None)
    return x + 1


@pytest.mark.no_poison
def test_a_region_that_compiled_code_enters_and_leaves_by_calls_is_in_force_between():
    torch._dynamo.reset()
    layer, x, region = fp4engine.Linear(16, 16), torch.randn(4, 16), fp4engine.autocast(recipe=RECIPES[0])
    with region:
        want = layer(x)
    enter(x, region)
    assert torch.equal(layer(x), want)
    leave(x, region)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.no_poison
def test_steps_of_delayed_scaling_begin_and_end_in_compiled_code():
    torch._dynamo.reset()
    layer, region = fp4engine.Linear(16, 16), fp4engine.autocast(recipe=DelayedScaling(amax_history_len=4))
    for size in (1.0, 2.0, 4.0):
        x = torch.full((4, 16), size)
        enter(x, region)
        layer(x)
        leave(x, region)
    assert layer.amax_histories["input"].values.tolist() == [4, 2, 1, 0]


def test_recipes_come_as_arguments_of_one_compiled_function():
    """What changes from recipe to recipe makes no variable, in whose place a constant has to stand."""

    def forward(layer, x, recipe):
        with fp4engine.autocast(recipe=recipe):
            return layer(x)

    torch._dynamo.reset()
    compiled, x = torch.compile(forward, fullgraph=True, backend="aot_eager"), torch.randn(8, 32)
    for recipe in RECIPES:
        layer = fp4engine.Linear(32, 32)
        assert torch.equal(compiled(layer, x, recipe), forward(layer, x, recipe))


@pytest.mark.no_poison
def test_a_compiled_layer_adds_to_main_grad_in_one_graph():
    torch._dynamo.reset()
    layer, x = fp4engine.Linear(32, 32, fuse_wgrad_accumulation=True), torch.randn(16, 32)

    def gradient(forward):
        layer.weight.main_grad = torch.ones(32, 32)
        fp4engine.manual_seed(5)
        with fp4engine.autocast():
            forward(x).sum().backward()
        return layer.weight.main_grad

    assert torch.equal(gradient(torch.compile(layer, fullgraph=True, backend="aot_eager")), gradient(layer))
