"""A rank's part of a layer is, byte for byte, the same by few launches, by operators and by single operations."""

import re
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("triton")

import fp4engine
from fp4engine.distributed.weight_amaxes import amaxes_of
from fp4engine.functional import linear, make_linear_plan
from fp4engine.functional.shards import Shard, Shards
from fp4engine.ops import reduce
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.products import one_by_one


class Group:
    """Stands for a process group of this name."""

    def __init__(self, name):
        self.group_name = name


GROUP, OTHERS = Group("ranks"), Group("others")
WHOLE = Shard()
SHARDS = {
    "columns": Shards(WHOLE, Shard(((GROUP, 0),), (32, 0)), Shard(((GROUP, 1),), (0, 32)), 3),
    "rows": Shards(Shard(((GROUP, 1),), (0, 64)), Shard(((GROUP, 1),), (0, 64)), WHOLE, 3, adds_bias=False),
    "tokens": Shards(Shard(((GROUP, 0),), (48, 0)), WHOLE, Shard(((GROUP, 0),), (48, 0)), 3),
    "any order": Shards().and_over(GROUP),
    "two groups": Shards().and_over(GROUP).and_over(OTHERS),
    "own draws": Shards(rank=5, layer="up"),
}
RECIPES = {
    "nvfp4": NVFP4BlockScaling(),
    "nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "4over6": NVFP4BlockScaling(nvfp4_4over6="all"),
    "1D weights": NVFP4BlockScaling(disable_2d_quantization=True),
}


SENT: list[tuple[int, str]] = []
"""How many numbers were reduced, and over which group."""


@pytest.fixture(autouse=True)
def other_ranks(monkeypatch):
    """Ranks beside this one that find twice its amaxes."""

    def all_reduce(bits, op, group):
        if not torch.compiler.is_compiling():
            SENT.append((bits.numel(), group.group_name))
        bits.view(torch.float32).mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_resolve_process_group", Group)


def share(recipe, shards, device, x_grad=True, w_grad=True, bias=True, run=linear, dtype=torch.bfloat16, spoil=None):
    """Output and gradients of this rank's part; what it reduces is in ``SENT``."""
    torch.manual_seed(0)
    fp4engine.manual_seed(7)
    make = lambda *shape: torch.randn(*shape).to(device, dtype)
    x, weight, b = make(2, 16, 64), make(32, 64), make(32) if bias else None
    if spoil is not None:
        x[1, 3, 5] = spoil
    x.requires_grad_(x_grad)
    weight.requires_grad_(w_grad)
    if b is not None:
        b.requires_grad_()
    SENT.clear()
    y = run(x, weight, b, make_linear_plan(recipe, "linear"), shards=shards)
    if y.requires_grad:
        y.backward(make(2, 16, 32))
    return [y.detach(), *(tensor.grad for tensor in (x, weight, b) if tensor is not None)]


def assert_equal(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def by_operations(*arguments, **options):
    with one_by_one():
        return share(*arguments, **options)


def assert_few_launches_are_many(*arguments, **options):
    few, sent = share(*arguments, **options), list(SENT)
    many = by_operations(*arguments, **options)
    assert sent == SENT
    assert_equal(few, many)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_few_launches(kernel_device, shards):
    assert_few_launches_are_many(RECIPES["nvfp4"], shards, kernel_device)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_amaxes_that_ranks_share_are_kept_with_the_codes(kernel_device, shards):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        share(RECIPES["nvfp4"], shards, kernel_device)
    assert [(t.dtype, t.ndim) for t in saved] == [(torch.uint8, 1)]


@pytest.mark.parametrize("recipe", list(RECIPES.values())[1:], ids=list(RECIPES)[1:])
def test_recipes(kernel_device, recipe):
    for name in ("columns", "rows"):
        assert_few_launches_are_many(recipe, SHARDS[name], kernel_device)


@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_wants(kernel_device, x_grad, w_grad):
    asked = {"x_grad": x_grad, "w_grad": w_grad, "bias": False}
    for name in ("columns", "tokens"):
        assert_few_launches_are_many(RECIPES["nvfp4"], SHARDS[name], kernel_device, **asked)


def test_not_finite(kernel_device):
    for spoil in (float("nan"), float("inf")):
        asked = {"spoil": spoil, "dtype": torch.float32}
        assert_few_launches_are_many(RECIPES["nvfp4"], SHARDS["rows"], kernel_device, **asked)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_operators(kernel_device, shards):
    eager = share(RECIPES["nvfp4"], shards, kernel_device)
    torch._dynamo.reset()
    run = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert_equal(share(RECIPES["nvfp4"], shards, kernel_device, run=run), eager)


@pytest.mark.parametrize("name", ["columns", "rows"])
def test_amaxes_of_a_weight_that_were_found_before(kernel_device, name):
    """Are not sent again; by few launches, by single operations and by operators."""

    def run(x, weight, bias, plan, shards, multiply=linear):
        amaxes = amaxes_of([x.new_zeros(16, 16), weight.detach()], [plan.weight] * 2)[2:].mul_(2)
        return multiply(x, weight, bias, plan, shards=shards._replace(weight_amaxes=amaxes))

    asked = RECIPES["nvfp4"], SHARDS[name], kernel_device
    expected, sent = share(*asked), list(SENT)
    of_weight = 8
    left = [(count - of_weight, group) for count, group in sent[:1] if count > of_weight] + sent[1:]
    assert_equal(share(*asked, run=run), expected)
    assert left == SENT
    assert_equal(by_operations(*asked, run=run), expected)
    assert left == SENT
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert_equal(share(*asked, run=partial(run, multiply=compiled)), expected)


def test_operators_that_wait_for_other_ranks_keep_their_order():
    """Each is said to write to what the one before it wrote to, in a graph where nothing else puts them in order."""
    graphs = []

    def keep(module, inputs):
        graphs.append(str(module.graph))
        return make_boxed_func(module.forward)

    def twice(x, weight, bias, plan, shards):
        return linear(x, weight, bias, plan, shards=shards) + linear(x, weight, bias, plan, shards=shards)

    torch._dynamo.reset()
    run = torch.compile(twice, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    share(RECIPES["nvfp4"], SHARDS["columns"], "cpu", run=run)
    for graph, operator in zip(graphs, ("linear_forward", "linear_backward"), strict=True):
        first, second = re.findall(rf"%(\w+) : .*{operator}\.default.*_all_bases: \[(.*?)\]", graph)
        for written in second[1].split(", "):
            assert re.search(rf"{written} : .*getitem\]\(args = \(%{first[0]},", graph)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row_scaled", "quartet2", "mxfp4_hadamard_stochastic", "fp8_current"])
def test_operators_of_the_reference(name):
    """What shares no single amax, or draws what it rotates by, goes operation by operation, with the same bytes."""
    recipe = zoo.make(name, backend="reference")
    for shards in (SHARDS["columns"], SHARDS["rows"], SHARDS["any order"]):
        eager = share(recipe, shards, "cpu")
        torch._dynamo.reset()
        run = torch.compile(linear, fullgraph=True, backend="aot_eager")
        assert_equal(share(recipe, shards, "cpu", run=run), eager)


def test_packed_amaxes_have_no_sign():
    packed = reduce.packed_amaxes([torch.tensor([-float("nan")]), torch.tensor([3.0])])
    assert packed.shape == (2, 4) and packed[0].isnan().all() and not packed.signbit().any()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_hadamard"])
def test_amaxes_of_weights_have_no_sign(name):
    """Also if the largest magnitude is all that is asked for, and is a NaN whose sign is set."""
    quantizer, weights = make_linear_plan(zoo.make(name), "linear").weight, [torch.full((16, 128), -2.0)] * 2
    weights = [weight.clone() for weight in weights]
    weights[1][3, 4] = -float("nan")
    amaxes = amaxes_of(weights, [quantizer] * 2)[:, 0]
    assert amaxes[:2].min() > 0 and amaxes[2:].isnan().all() and not amaxes.signbit().any()
