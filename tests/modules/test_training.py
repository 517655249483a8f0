"""What training loops do to modules: sharing, freezing, accumulating, copying, saving, stopping and going on."""

import copy
import ctypes
import gc
import json
import subprocess
import sys
import textwrap
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import fp4engine
from fp4engine import GroupedLinear, LayerNormMLP, Linear, TransformerLayer
from fp4engine.integrations import TrainingState
from fp4engine.recipe import DelayedScaling, NVFP4BlockScaling
from tests.same import assert_same

RECIPE = NVFP4BlockScaling()
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def stream():
    fp4engine.manual_seed(8)


class Model(nn.Module):
    """Every module that has weights, and a loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = TransformerLayer(16, 24, 2, activation="swiglu", hidden_dropout=0.2, normalization="RMSNorm")
        self.experts = GroupedLinear(2, 16, 16)
        self.head = Linear(16, 20, bias=False)

    def forward(self, tokens):
        hidden = self.experts(self.layer(self.embed(tokens)), [5, tokens.numel() - 5])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model()


def batch(step):
    return torch.randint(0, 20, (6, 3), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps, recipe=RECIPE, between=None):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        with fp4engine.autocast(recipe=recipe):
            loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if between is not None:
            between(model)
    return losses


def adamw(model, **arguments):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **arguments)


def gradients(function, parameters, *, draw=8):
    """Gradients of ``function()``, which returns a loss, under the recipe and from a fresh stream."""
    fp4engine.manual_seed(draw)
    for parameter in parameters:
        parameter.grad = None
    with fp4engine.autocast(recipe=RECIPE):
        loss = function()
    loss.backward()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize(
    "optimizer", [partial(adamw, foreach=False), partial(adamw, fused=True), partial(adamw, foreach=True)]
)
def test_optimizers_train(optimizer):
    model = make_model()
    losses = train(model, optimizer(model), [0] * 12)
    assert losses[-1] < losses[0] - 0.5
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_tied_weights_get_both_gradients():
    embed, head = nn.Embedding(20, 16), Linear(16, 20, bias=False)
    tokens = torch.arange(12)
    with torch.no_grad():
        embed.weight.copy_(head.weight)
    apart = gradients(lambda: head(embed(tokens)).square().sum(), [embed.weight, head.weight])
    embed.weight = head.weight
    (together,) = gradients(lambda: head(embed(tokens)).square().sum(), [head.weight])
    assert torch.equal(together, apart[0] + apart[1])


def kept_bytes(function):
    kept = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t)
    with keep, fp4engine.autocast(recipe=RECIPE):
        function()
    return sum(kept)


def test_frozen_weights_keep_no_operand_and_get_no_gradient():
    mlp, inp = LayerNormMLP(64, 64), torch.randn(32, 64, requires_grad=True)
    trained = kept_bytes(lambda: mlp(inp))
    (expected,) = gradients(lambda: mlp(inp).sum(), [inp])
    for weight in (mlp.fc1_weight, mlp.fc2_weight):
        weight.requires_grad_(False)
        weight.grad = None
    assert kept_bytes(lambda: mlp(inp)) < trained
    (got,) = gradients(lambda: mlp(inp).sum(), [inp])
    assert torch.equal(got, expected) and mlp.fc1_weight.grad is None
    assert ("wgrad", "e2m1 x e2m1") in mlp.fc1.executed.counts
    assert mlp.fc1.executed.counts["wgrad", "e2m1 x e2m1"] == 1


def test_is_first_microbatch_reaches_every_gemm():
    layer = TransformerLayer(16, 24, 2, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0)
    inp = torch.randn(4, 2, 16)
    with fp4engine.autocast(recipe=RECIPE), torch.no_grad():
        expected = layer(inp)
        assert torch.equal(layer(inp, is_first_microbatch=True), expected)
        cached = [module for module in layer.modules() if getattr(module, "_microbatch_cache", None) is not None]
        assert len(cached) == 4
        assert torch.equal(layer(inp, is_first_microbatch=False), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_accumulation_outside_regions_and_in_evaluation(dtype):
    fused, plain = Linear(16, 24, fuse_wgrad_accumulation=True, dtype=dtype), Linear(16, 24, dtype=dtype)
    plain.load_state_dict(fused.state_dict())
    inp = torch.randn(6, 16, dtype=dtype)
    with torch.no_grad():
        expected = plain(inp)
        assert torch.equal(fused(inp), expected)  # needs no buffer
    fused.weight.main_grad = torch.zeros(24, 16)
    output = fused(inp)
    assert torch.equal(output, expected)
    output.sum().backward()
    plain(inp).sum().backward()
    assert fused.weight.grad is None and torch.equal(fused.bias.grad, plain.bias.grad)
    assert torch.equal(fused.weight.main_grad.to(dtype), plain.weight.grad)
    assert set(fused.executed.counts) == {("fprop", "high_precision"), ("wgrad", "high_precision")}


def test_deepcopy_in_the_middle_goes_on_alike():
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    twin_optimizer = adamw(twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = fp4engine.get_rng_state()
    expected = train(model, optimizer, range(3, 6))
    fp4engine.set_rng_state(state)
    assert train(twin, twin_optimizer, range(3, 6)) == expected


def test_to_another_dtype_keeps_attributes_and_trains():
    model = make_model()
    model.head.weight.tag = "kept"
    model.to(torch.bfloat16).float().to(torch.bfloat16)
    assert model.head.weight.tag == "kept"
    losses = train(model, adamw(model), [0] * 8)
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


@pytest.mark.parametrize("form", ["weights_only", "safetensors"])
def test_files(tmp_path, form):
    model = make_model()
    train(model, adamw(model), range(2))
    path = tmp_path / "model"
    if form == "weights_only":
        torch.save(model.state_dict(), path)
        state = torch.load(path, weights_only=True)
    else:
        safetensors.torch.save_file(model.state_dict(), path)
        state = safetensors.torch.load_file(path)
    other = make_model(seed=1)
    other.load_state_dict(state, strict=True)
    assert_same(list(other.parameters()), list(model.parameters()))
    assert not list(model.buffers())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "recipe", [RECIPE, DelayedScaling(amax_history_len=4)], ids=lambda recipe: type(recipe).__name__
)
def test_evaluating_between_steps_changes_no_bit(context, recipe):
    def evaluate(model):
        model.eval()
        for other in (RECIPE, recipe):
            with context(), fp4engine.autocast(recipe=other):
                model(batch(99))
        with context():
            model(batch(98))
        model.train()

    model = make_model()
    expected = train(model, adamw(model), range(4), recipe)
    fp4engine.manual_seed(8)
    model = make_model()
    assert train(model, adamw(model), range(4), recipe, between=evaluate) == expected


RESUME = """
    import json, sys, torch, fp4engine
    from tests.modules.test_training import RECIPES, TrainingState, adamw, make_model, train
    losses = {}
    for name, recipe in RECIPES.items():
        saved = torch.load(f"{sys.argv[1]}/{name}", weights_only=True)
        model = make_model(seed=3)
        optimizer = adamw(model)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        TrainingState(model).load_state_dict(saved["fp4engine"])
        losses[name] = train(model, optimizer, range(3, 6), recipe)
    print(json.dumps(losses))
"""
RECIPES = {"nvfp4": RECIPE, "delayed": DelayedScaling(amax_history_len=4, amax_compute_algo="max")}


def test_resumes_bit_for_bit_in_a_fresh_process(tmp_path):
    expected = {}
    for name, recipe in RECIPES.items():
        fp4engine.manual_seed(8)
        model = make_model()
        optimizer = adamw(model)
        train(model, optimizer, range(3), recipe)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "fp4engine": TrainingState(model).state_dict()}, tmp_path / name)
        expected[name] = train(model, optimizer, range(3, 6), recipe)
    command = [sys.executable, "-c", textwrap.dedent(RESUME), str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert json.loads(output.splitlines()[-1]) == expected


MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
"""What glibc's ``mallinfo`` counts, each in 32 bits."""


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in MALLINFO.split()]


def in_use():
    """Tensors that Python sees, bytes that malloc has given out and not got back, and blocks of Python's own."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return tensors, found.uordblks + found.hblkhd, sys.getallocatedblocks()


def test_steps_leak_no_tensor_and_no_memory():
    """What leaks is more after each of three spans of 25 steps; a cache that fills is more after some."""
    model = make_model()
    optimizer = adamw(model)
    counts = []
    for span in range(4):
        loss = train(model, optimizer, range(25 * span, 25 * span + 25))[-1]
        counts.append(in_use())
    assert loss == loss
    spans = (min(later - earlier for earlier, later in pairwise(count)) for count in zip(*counts, strict=True))
    tensors, nbytes, blocks = spans
    assert tensors <= 0
    assert nbytes < 25 * 200
    assert blocks < 25 * 5
