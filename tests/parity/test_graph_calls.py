"""Casts and layers at the call sites of graphs of Inductor's: as in eager code, whatever values and addresses come.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fp4engine
from fp4engine import ops
from fp4engine.formats import E4M3, CastSpec, Rotation, RoundingMode, fp8
from fp4engine.functional import make_linear_plan
from fp4engine.kernels.source import Source
from fp4engine.recipe import NVFP4BlockScaling

PLAIN, ROTATED = CastSpec(), CastSpec(rotation=Rotation())
STOCHASTIC = CastSpec(rounding=RoundingMode.STOCHASTIC)
FP8 = fp8(E4M3)


@pytest.fixture(autouse=True)
def compiles_anew():
    """No graph comes from a cache, in which the code of an earlier version may lie."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def tensors_of(operands):
    return [t for operand in operands if operand is not None for t in (operand.data, operand.scale_inv, operand.amax)]


def cast(sides, x, amax=None, rng=None):
    return tensors_of(ops.quantize(x, *sides, rowwise_amax=amax, columnwise_amax=amax, rng=rng, backend="triton"))


def cast_norm(sides, x, statistics, gamma):
    return tensors_of(ops.quantize(Source(x, x.dtype, "RMSNorm", False, statistics, gamma), *sides, backend="triton"))


def cast_of_a_part(sides, x):
    """Of a matrix that begins behind ``x``'s first element, so at an address of which no launch is told."""
    rows, cols = x.shape
    return tensors_of(
        ops.quantize(x.view(-1)[1 : 1 + (rows - 1) * cols].view(rows - 1, cols), *sides, backend="triton")
    )


def same(left, right):
    return len(left) == len(right) and all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def problem(name, device, seed):
    """A cast and its arguments, which differ with ``seed`` in nothing but values."""
    torch.manual_seed(seed)
    x, rng = torch.randn(32, 64, device=device).bfloat16(), torch.tensor([seed, 7], device=device)
    amax = torch.full((1,), 3.0 + seed, device=device)
    return {
        "amax given": (partial(cast, (PLAIN, None)), (x, amax)),
        "own amaxes": (partial(cast, (PLAIN, ROTATED)), (x,)),
        "stochastic": (partial(cast, (STOCHASTIC, STOCHASTIC)), (x, amax, rng)),
        "FP8, one amax of both sides": (partial(cast, (FP8, FP8)), (x, amax)),
        "norm": (partial(cast_norm, (PLAIN, ROTATED)), (x, 1 + torch.rand(2, 32, device=device), x[0].clone())),
        "elsewhere": (partial(cast_of_a_part, (PLAIN, None)), (x,)),
    }[name]


@pytest.mark.parametrize(
    "name", ["amax given", "own amaxes", "stochastic", "FP8, one amax of both sides", "norm", "elsewhere"]
)
def test_a_call_site_casts_as_eager_code_does(kernel_device, name):
    function, _ = problem(name, kernel_device, 0)
    graph = torch.compile(function, fullgraph=True)
    for seed in range(3):
        _, arguments = problem(name, kernel_device, seed)
        assert same(graph(*arguments), function(*arguments)), seed


def test_call_sites_of_a_graph_keep_what_is_theirs(kernel_device):
    """Tensors of three shapes, and two of one shape by two specs."""

    def function(x, narrow):
        parts = (x, PLAIN), (x[:16], PLAIN), (narrow, PLAIN), (x, ROTATED)
        return [t for part, spec in parts for t in cast((spec, None), part)]

    graph = torch.compile(function, fullgraph=True)
    for _ in range(2):
        inputs = [torch.randn(32, cols, device=kernel_device).bfloat16() for cols in (64, 32)]
        assert same(graph(*inputs), function(*inputs))


def test_rows_may_vary(kernel_device):
    function = partial(cast, (PLAIN, ROTATED))
    graph = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (32, 48, 17):
        x = torch.randn(rows, 64, device=kernel_device).bfloat16()
        assert same(graph(x), function(x))


def moved(tensor):
    """A copy of ``tensor`` at an address that is no multiple of 16."""
    elsewhere = torch.empty(tensor.nbytes + 4, dtype=torch.uint8, device=tensor.device)[4:]
    return elsewhere.view(tensor.dtype).view(tensor.shape).copy_(tensor)


LAYERS = {
    "bias": {},
    "no bias": {"bias": False},
    "frozen weight": {"frozen": True},
    "an input without a gradient": {"needs_dgrad": False},
    "kept elsewhere": {"hooks": (moved, lambda tensor: tensor)},
    "checkpoint": {"checkpoint": True},
}


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_a_layer_at_call_sites_is_that_of_eager_code(kernel_device, settings):
    """Three steps, of which each draws random bits of its own."""
    torch.manual_seed(0)
    layer = fp4engine.Linear(32, 16, bias=settings.get("bias", True), device=kernel_device, dtype=torch.bfloat16)
    layer.weight.requires_grad_(not settings.get("frozen", False))
    inputs, recipe = [torch.randn(16, 32, device=kernel_device).bfloat16() for _ in range(3)], NVFP4BlockScaling()
    compiled, hooks = torch.compile(layer, fullgraph=True), settings.get("hooks")
    results = []
    for run in (layer, compiled):
        fp4engine.manual_seed(5)
        if settings.get("checkpoint"):
            run = partial(fp4engine.checkpoint, run)
        found = []
        for inp in inputs:
            x = inp.clone().requires_grad_(settings.get("needs_dgrad", True))
            layer.zero_grad()
            keeping = nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)
            with keeping, fp4engine.autocast(recipe=recipe):
                y = run(x)
            y.square().sum().backward()
            found += [t for t in (y.detach(), x.grad, *(p.grad for p in layer.parameters())) if t is not None]
        results.append(found)
    assert same(*results)


@pytest.mark.parametrize("needs_wgrad", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_layer_of_tiles_at_call_sites_is_that_of_its_operators(kernel_device, parts, needs_wgrad):
    """A weight that ranks have gathered as codes. Gradients are drawn from a state that moves on."""
    plan, fp4 = make_linear_plan(NVFP4BlockScaling(), "linear"), torch.ops.fp4engine
    spec, casts = plan.weight.rowwise_spec, plan.casts.key
    torch.manual_seed(0)
    weight, bias = torch.randn(32, 48, device=kernel_device), torch.randn(32, device=kernel_device).bfloat16()
    amax = plan.weight.amax(weight, columnwise=False)[0]
    shards = ops.quantize_tiles(weight.chunk(parts), [spec] * parts, [amax] * parts)
    packed = torch.cat([shard.packed for shard in shards])

    def step(x, grad, state, packed, bias):
        kinds = torch.bfloat16, torch.float32
        y, *kept = fp4.tiled_linear_forward(x, packed, bias, casts, torch.float32, needs_wgrad, 32, parts)
        told = (True, needs_wgrad, 48, state, casts, *kinds, None, None, None, "", parts)
        return [y, *kept, *fp4.linear_backward(grad, [*kept, packed], *told)]

    graph, states = torch.compile(step, fullgraph=True), [torch.tensor([5, 0], device=kernel_device) for _ in range(2)]
    for _ in range(3):
        x, grad = (torch.randn(16, cols, device=kernel_device).bfloat16() for cols in (48, 32))
        assert same(*(run(x, grad, state, packed, bias) for run, state in zip((step, graph), states, strict=True)))
    assert torch.equal(*states) and states[0][1] == 3


def test_a_layer_that_is_compiled_before_its_process_has_a_rank_draws_as_that_rank(kernel_device, monkeypatch):
    """Ranks draw different bits, and a process may become one of several after its first step."""
    layer = fp4engine.Linear(32, 16, device=kernel_device, dtype=torch.bfloat16)
    compiled, x = torch.compile(layer, fullgraph=True), torch.randn(16, 32, device=kernel_device).bfloat16()

    def gradient(run):
        fp4engine.manual_seed(5)
        layer.zero_grad()
        with fp4engine.autocast(recipe=NVFP4BlockScaling()):
            run(x).square().sum().backward()
        return layer.weight.grad

    alone = gradient(compiled)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    as_rank = gradient(compiled)
    assert torch.equal(as_rank, gradient(layer)) and not torch.equal(as_rank, alone)
