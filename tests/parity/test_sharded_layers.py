"""A rank's part of a layer is, byte for byte, the same by few launches, by operators and by single operations."""

import pytest
import torch

pytest.importorskip("triton")

import fp4engine
from fp4engine import ops
from fp4engine.functional import linear, make_linear_plan
from fp4engine.functional.shards import Shard, Shards
from fp4engine.ops import reduce
from fp4engine.recipe import NVFP4BlockScaling, zoo

GROUP = "the ranks"
WHOLE = Shard()
SHARDS = {
    "columns": Shards(WHOLE, Shard(((GROUP, 0),), (32, 0)), Shard(((GROUP, 1),), (0, 32)), 3),
    "rows": Shards(Shard(((GROUP, 1),), (0, 64)), Shard(((GROUP, 1),), (0, 64)), WHOLE, 3, adds_bias=False),
    "tokens": Shards(Shard(((GROUP, 0),), (48, 0)), WHOLE, Shard(((GROUP, 0),), (48, 0)), 3),
    "any order": Shards.over(GROUP),
    "two groups": Shards.over(GROUP).and_over("others"),
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

    def reduced(amaxes, group):
        if not torch.compiler.is_compiling():
            SENT.append((amaxes.numel(), group))
        return amaxes.mul_(2)

    monkeypatch.setattr(ops, "shared_amaxes", reduced)
    monkeypatch.setattr(ops, "all_reduce_amax", reduced)


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


def by_operations(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear_at_once", lambda *a: None)
        return share(*arguments, **options)


def assert_few_launches_are_many(monkeypatch, *arguments, **options):
    taken, forward = [], ops.LinearByValues.forward
    with monkeypatch.context() as patch:
        patch.setattr(ops.LinearByValues, "forward", lambda *a: taken.append(a) or forward(*a))
        few, sent = share(*arguments, **options), list(SENT)
    many = by_operations(monkeypatch, *arguments, **options)
    assert len(taken) == 1
    assert sent == SENT  # other ranks may have larger parts, and go the other way
    assert_equal(few, many)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_few_launches(kernel_device, monkeypatch, shards):
    assert_few_launches_are_many(monkeypatch, RECIPES["nvfp4"], shards, kernel_device)


@pytest.mark.parametrize("recipe", list(RECIPES.values())[1:], ids=list(RECIPES)[1:])
def test_recipes(kernel_device, monkeypatch, recipe):
    for name in ("columns", "rows"):
        assert_few_launches_are_many(monkeypatch, recipe, SHARDS[name], kernel_device)


@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_wants(kernel_device, monkeypatch, x_grad, w_grad):
    asked = {"x_grad": x_grad, "w_grad": w_grad, "bias": False}
    for name in ("columns", "tokens"):
        assert_few_launches_are_many(monkeypatch, RECIPES["nvfp4"], SHARDS[name], kernel_device, **asked)


def test_not_finite(kernel_device, monkeypatch):
    for spoil in (float("nan"), float("inf")):
        asked = {"spoil": spoil, "dtype": torch.float32}
        assert_few_launches_are_many(monkeypatch, RECIPES["nvfp4"], SHARDS["rows"], kernel_device, **asked)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_operators(kernel_device, shards):
    eager = share(RECIPES["nvfp4"], shards, kernel_device)
    torch._dynamo.reset()
    run = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert_equal(share(RECIPES["nvfp4"], shards, kernel_device, run=run), eager)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row_scaled", "quartet2", "mxfp4_hadamard_stochastic", "fp8_current"])
def test_operators_of_the_reference(name):
    """What shares no single amax, or draws what it rotates by, goes operation by operation, with the same bytes."""
    for shards in (SHARDS["columns"], SHARDS["rows"], SHARDS["any order"]):
        eager = share(zoo.make(name), shards, "cpu")
        torch._dynamo.reset()
        run = torch.compile(linear, fullgraph=True, backend="aot_eager")
        assert_equal(share(zoo.make(name), shards, "cpu", run=run), eager)


def test_directions_that_go_two_ways_take_single_operations():
    apart = Shards(Shard((("rows", 0),)), Shard((("columns", 0),)))
    assert apart.travelling() is None


def test_packed_amaxes_have_no_sign():
    packed = reduce.packed_amaxes([torch.tensor([-float("nan")]), torch.tensor([3.0])])
    assert packed.shape == (2, 4) and packed[0].isnan().all() and not packed.signbit().any()
