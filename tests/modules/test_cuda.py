"""Modules on a GPU: kernels under them, no synchronisation, CUDA graphs, torch.compile."""

import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing

import fp4engine
from fp4engine import GroupedLinear, ops
from fp4engine.formats import CastSpec
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, zoo

pytestmark = pytest.mark.gpu

RECIPE = NVFP4BlockScaling()


def make_model(*sizes, **kwargs):
    torch.manual_seed(0)
    layers = [fp4engine.Linear(i, o, device="cuda", **kwargs) for i, o in pairwise(sizes)]
    return torch.nn.Sequential(*layers)


def step(model, inp, recipe=RECIPE):
    with fp4engine.autocast(recipe=recipe):
        out = model(inp)
    out.float().square().mean().backward()
    return out


def results(model, inp, recipe=RECIPE):
    """Output and every gradient of one step from draw 0."""
    fp4engine.manual_seed(11)
    model.zero_grad()
    inp = inp.clone().requires_grad_()
    out = step(model, inp, recipe)
    return [out.detach(), inp.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "sizes"), [(64, (64, 96, 32)), (37, (50, 77, 15)), (1, (16, 16)), (130, (1000, 17))])
def test_kernels_equal_reference_quantizers(rows, sizes, dtype):
    model = make_model(*sizes, dtype=dtype)
    inp = torch.randn(rows, sizes[0], device="cuda", dtype=dtype)
    oracle = CustomRecipe(qfactory=partial(reference_quantizer, RECIPE))
    ops.reset_executed_paths()
    ours = results(model, inp)
    assert not any(path.endswith("reference") for path in ops.executed_paths()), ops.executed_paths()
    for left, right in zip(ours, results(model, inp, oracle), strict=True):
        assert torch.equal(left, right)


def test_two_runs_give_the_same_bytes():
    model = make_model(256, 512, 256, dtype=torch.bfloat16)
    inp = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    for left, right in zip(results(model, inp), results(model, inp), strict=True):
        assert torch.equal(left, right)


def test_no_host_synchronisation():
    model = make_model(128, 128, dtype=torch.bfloat16)
    inp = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(model, inp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, inp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_saved_bytes():
    layer = make_model(1024, 1024, dtype=torch.bfloat16)[0]
    inp = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t),
        fp4engine.autocast(recipe=RECIPE),
    ):
        layer(inp)
    assert sum(saved) <= 0.57 * inp.numel() + 0.57 * layer.weight.numel()


def test_save_on_cpu():
    model = make_model(64, 64, 64, dtype=torch.bfloat16)
    inp = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    plain = results(model, inp)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        offloaded = results(model, inp)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@pytest.mark.no_poison
def test_graph_replay_advances_the_noise():
    model = make_model(128, 128, dtype=torch.bfloat16)
    inp = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inp.grad = torch.zeros_like(inp)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, inp)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, inp)

    def replay():
        inp.grad.zero_()
        graph.replay()
        return inp.grad.clone()

    fp4engine.manual_seed(5)
    first, second = replay(), replay()
    assert not torch.equal(first, second)
    fp4engine.manual_seed(5)
    assert torch.equal(replay(), first)
    fp4engine.manual_seed(5)
    inp.grad.zero_()
    step(model, inp)
    assert torch.equal(inp.grad, first)


@pytest.mark.no_poison
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend):
    model = make_model(128, 192, 64, dtype=torch.bfloat16)
    inp = torch.randn(96, 128, device="cuda", dtype=torch.bfloat16)
    eager = results(model, inp)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for left, right in zip(eager, results(compiled, inp), strict=True):
        assert torch.equal(left, right)


@pytest.mark.no_poison
def test_dynamic_rows_compile_once():
    model = make_model(64, 64, dtype=torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)

    def compile_count(*sizes):
        for rows in sizes:
            results(compiled, torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16))
        return counter.frame_count

    first = compile_count(32, 48)
    assert compile_count(80, 33, 1000, 17, 64) == first


COUNTS = [0, 300, 17, 1, 0, 700, 6, 0]


class Experts(torch.nn.Module):
    """A GroupedLinear with its counts, in a list or on the device."""

    def __init__(self, layer, m_splits):
        super().__init__()
        self.layer, self.m_splits = layer, m_splits

    def forward(self, inp):
        return self.layer(inp, self.m_splits)


def make_experts(fan_in, fan_out, dtype=torch.bfloat16, counts=COUNTS):
    """Twice the same experts: counts in a list, counts on the device."""
    torch.manual_seed(0)
    layer = GroupedLinear(len(counts), fan_in, fan_out, params_dtype=dtype, device="cuda")
    for bias in layer.biases:
        torch.nn.init.normal_(bias)
    return Experts(layer, counts), Experts(layer, torch.tensor(counts, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "counts"),
    [
        ((256, 192), COUNTS),
        ((1024, 2048), COUNTS),
        ((77, 50), COUNTS),
        ((384, 256), [20_011, 3, 0, 40_000, 16_384]),  # wgrad alone splits its sums
        ((20_000, 64), [0, 30, 700, 64]),  # fprop does
    ],
    ids=str,
)
def test_grouped_equals_the_loop(size, counts, dtype):
    loop, experts = make_experts(*size, dtype, counts)
    inp = torch.randn(sum(counts), size[0], device="cuda", dtype=dtype)
    want = results(loop, inp)
    ops.reset_executed_paths()
    got = results(experts, inp)
    assert ops.executed_paths()["grouped_gemm/triton"] == 3
    names = ["output", "inp", *dict(experts.named_parameters())]
    different = [name for name, left, right in zip(names, got, want, strict=True) if not torch.equal(left, right)]
    assert not different


def test_grouped_equals_the_loop_beyond_32_bit_offsets():
    loop, experts = make_experts(256, 256)
    loop.m_splits = [2**23 - 5, 0, 7, 0, 0, 2**20 + 3, 0, 100]
    experts.m_splits = torch.tensor(loop.m_splits, device="cuda")
    inp = torch.randn(sum(loop.m_splits), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert inp.numel() > 2**31
    found = []
    for model in (loop, experts):
        fp4engine.manual_seed(11)
        model.zero_grad()
        with fp4engine.autocast(recipe=RECIPE):
            out = model(inp)
        found.append((out.detach(), *torch.autograd.grad(out, [inp, *model.parameters()], inp.detach())))
        del out
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_grouped_without_host_synchronisation():
    _, experts = make_experts(256, 192)
    inp = torch.randn(sum(COUNTS), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(experts, inp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(experts, inp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.no_poison
def test_graph_replay_follows_the_counts():
    loop, experts = make_experts(256, 192)
    inp = torch.randn(sum(COUNTS), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [inp, *experts.parameters()]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(experts, inp)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(experts, inp)
    grads = [leaf.grad for leaf in leaves]
    for splits in (COUNTS, [sum(COUNTS), *[0] * 7], [0, 5, 200, 0, 700, 20, 99, 0]):
        experts.m_splits.copy_(torch.tensor(splits))
        loop.m_splits = splits
        want = results(loop, inp.detach())[1:]
        fp4engine.manual_seed(11)
        torch._foreach_zero_(grads)
        graph.replay()
        assert all(torch.equal(left, right) for left, right in zip(grads, want, strict=True))


@pytest.mark.no_poison
def test_compiled_experts_equal_eager_ones():
    _, experts = make_experts(256, 192)
    inp = torch.randn(sum(COUNTS), 256, device="cuda", dtype=torch.bfloat16)
    eager = results(experts, inp)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True)
    for left, right in zip(eager, results(compiled, inp), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("fuse_wgrad_accumulation", [False, True])
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp4_quest"])
def test_the_expanded_gradient_of_a_sum(recipe, fuse_wgrad_accumulation):
    model = make_model(128, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
    if fuse_wgrad_accumulation:
        model[0].weight.main_grad = torch.zeros(64, 128, device="cuda")

    def gradients(expanded):
        model.zero_grad()
        inp = torch.linspace(-1, 1, 32 * 128, device="cuda").bfloat16().view(32, 128).requires_grad_()
        fp4engine.manual_seed(11)
        with fp4engine.autocast(recipe=zoo.make(recipe)):
            out = model(inp)
        out.sum().backward() if expanded else out.backward(torch.ones_like(out))
        if not fuse_wgrad_accumulation:
            return inp.grad, model[0].weight.grad
        made = model[0].weight.main_grad.clone()
        model[0].weight.main_grad.zero_()
        return inp.grad, made

    for actual, wanted in zip(gradients(expanded=True), gradients(expanded=False), strict=True):
        assert wanted.any()
        assert torch.equal(actual, wanted)


def test_a_thread_that_has_not_used_cuda_starts_the_same_kernels():
    """CUDA knows the device by the thread's context, and a new thread has none."""
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    spec, found = CastSpec(), []
    want = [ops.quantize(x, spec, None)[0].codes for _ in range(2)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=lambda: found.append(ops.quantize(x, spec, None)[0].codes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(codes, want[0]) for codes in found)


def test_a_model_compiled_to_cuda_graphs_equals_eager():
    """``mode="reduce-overhead"``: forward and backward are replayed, and every replay takes draws of its own."""
    model, inp = make_model(256, 512, 256, dtype=torch.bfloat16), torch.randn(64, 256, device="cuda").bfloat16()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def train(run):
        fp4engine.manual_seed(11)
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
        for _ in range(6):  # the first ones compile, warm up and record
            torch.compiler.cudagraph_mark_step_begin()
            with fp4engine.autocast(recipe=RECIPE):
                loss = run(inp).float().square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    want = train(model)
    got = train(torch.compile(model, mode="reduce-overhead", fullgraph=True))
    assert "cudagraph_skips" not in torch._dynamo.utils.counters["inductor"]
    assert len({loss.item() for loss in want[:6]}) == 6
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right)
