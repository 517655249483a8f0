"""Modules that replay their launches give the bytes, counts and draws of modules that do not.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import copy
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fp4engine
from fp4engine import ops
from fp4engine.formats import CastSpec, Rotation, RoundingMode
from fp4engine.kernels.amax import amax
from fp4engine.kernels.quantize import quantize
from fp4engine.kernels.tape import Tape, Tapes
from fp4engine.recipe import NVFP4BlockScaling, zoo

RECIPE = NVFP4BlockScaling()
BF16 = torch.bfloat16


@pytest.fixture
def replays(monkeypatch):
    """Replays of modules' passes (True), which note what they count, and of single casts (False), which do not."""
    played = {True: [], False: []}
    play = Tape.play

    def spy(self, addresses):
        outputs = play(self, addresses)
        if outputs is not None:
            played[bool(self.notes)].append(self)
        return outputs

    monkeypatch.setattr(Tape, "play", spy)
    return played


@pytest.fixture
def plays(replays):
    """One entry per replay of a module's forward or backward."""
    return replays[True]


def without_tapes(function):
    """``function()`` with every call made by the code that a tape would stand for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tapes, "run", lambda self, problem, tensors, compute, given=(): compute(*given, *tensors))
        return function()


def linear(device, **arguments):
    torch.manual_seed(5)
    return fp4engine.Linear(32, 16, device=device, dtype=BF16, **arguments)


def inputs(device, shape=(5, 32), count=3):
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(shape, generator=generator).to(device, BF16) for _ in range(count)]


def step(layer, x, recipe=RECIPE, forward=None):
    """Output and gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with fp4engine.autocast(recipe=recipe):
        out = (forward or layer)(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def train(layer, steps, **arguments):
    """Every tensor of every step, the draws after them, and what was counted."""
    fp4engine.manual_seed(7)
    ops.reset_executed_paths()
    tensors = [tensor.clone() for x in steps for tensor in step(layer, x, **arguments)]
    counts = [(m.executed.counts, m.executed.flops) for m in layer.modules() if hasattr(m, "executed")]
    return tensors, (fp4engine.get_rng_state(), ops.executed_paths(), counts)


def assert_same(ours, theirs):
    for left, right in zip(ours[0], theirs[0], strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)
    assert ours[1] == theirs[1]


@pytest.mark.parametrize(("shape", "bias"), [((5, 32), False), ((2, 3, 32), True), ((32,), False), ((0, 32), True)])
def test_a_linear(kernel_device, plays, shape, bias):
    def run():
        return train(linear(kernel_device, bias=bias), inputs(kernel_device, shape))

    assert_same(run(), without_tapes(run))
    assert len(plays) == 2


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
        NVFP4BlockScaling(backward_override="dequantized"),
        NVFP4BlockScaling(backward_override="high_precision"),
        NVFP4BlockScaling(row_scaled_activation=True),
        *(zoo.make(name) for name in ("fp8_current", "fp8_delayed")),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_recipes(kernel_device, recipe):
    """Those whose passes are launches alone, and those whose are not."""

    def run():
        return train(linear(kernel_device), inputs(kernel_device), recipe=recipe)

    assert_same(run(), without_tapes(run))


@pytest.mark.parametrize(
    "make",
    [
        lambda **place: fp4engine.LayerNormLinear(32, 16, **place),
        lambda **place: fp4engine.LayerNormLinear(32, 16, normalization="RMSNorm", **place),
        lambda **place: fp4engine.LayerNormMLP(32, 16, activation="swiglu", **place),
    ],
    ids=["LayerNormLinear", "RMSNormLinear", "LayerNormMLP"],
)
def test_other_modules(kernel_device, plays, make):
    def run():
        torch.manual_seed(5)
        layer = make(device=kernel_device, params_dtype=BF16)
        return train(layer, inputs(kernel_device))

    assert_same(run(), without_tapes(run))
    assert plays


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_gradient_is_added_to_main_grad(kernel_device, plays, dtype):
    def run():
        layer = linear(kernel_device, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(16, 32, device=kernel_device, dtype=dtype)
        tensors, rest = train(layer, inputs(kernel_device))
        return [*tensors, layer.weight.main_grad], rest

    assert_same(run(), without_tapes(run))
    assert len(plays) == 2


@pytest.mark.parametrize("frozen", ["inp", "weight"])
def test_half_a_backward(kernel_device, plays, frozen):
    def run():
        layer = linear(kernel_device)
        layer.weight.requires_grad_(frozen != "weight")
        results = []
        for x in inputs(kernel_device):
            with fp4engine.autocast(recipe=RECIPE):
                out = layer(x.requires_grad_(frozen != "inp"))
            out.sum().backward()
            results += [out.detach(), layer.weight.grad if frozen == "inp" else x.grad]
            layer.weight.grad = None
        return results, None

    assert_same(run(), without_tapes(run))
    assert len(plays) == 2


def test_a_cached_weight_in_another_form(kernel_device):
    """Training leaves codes in the cache, which evaluation then multiplies; before, it had left values there itself."""
    recipe = NVFP4BlockScaling(backward_override="dequantized")

    def run():
        layer, (x, *_) = linear(kernel_device, bias=False), inputs(kernel_device)
        outputs = []
        for trains in (False, True):
            with fp4engine.weight_cache(layer), fp4engine.autocast(recipe=recipe):
                if trains:
                    layer(x)
                with torch.no_grad():
                    outputs += [layer(x) for _ in range(1 if trains else 3)]
        return outputs, None

    assert_same(run(), without_tapes(run))


def test_cached_weights(kernel_device, plays):
    def run():
        layer = linear(kernel_device)
        with fp4engine.weight_cache(layer):
            return train(layer, inputs(kernel_device))

    assert_same(run(), without_tapes(run))
    assert len(plays) == 2


def test_without_gradients(kernel_device, plays):
    def run():
        layer = linear(kernel_device)
        with fp4engine.autocast(recipe=RECIPE), torch.no_grad():
            outputs = [layer(x) for x in inputs(kernel_device)]
        with fp4engine.autocast(recipe=RECIPE), torch.inference_mode():
            outputs += [layer(x) for x in inputs(kernel_device)]
        assert [out.is_inference() for out in outputs] == [False] * 3 + [True] * 3
        return outputs, None

    assert_same(run(), without_tapes(run))
    assert len(plays) == 4


def test_what_changes_between_steps(kernel_device, plays):
    """Shapes, the recipe, the weight in place and its storage."""

    def run():
        layer = linear(kernel_device)
        other = NVFP4BlockScaling(disable_rht=True)
        results = []
        for x, short in zip(inputs(kernel_device), inputs(kernel_device, (3, 32)), strict=True):
            results += [*step(layer, x), *step(layer, short)]
            with torch.no_grad():
                layer.weight.mul_(1.5)
        for x in inputs(kernel_device):
            results += step(layer, x, recipe=other)
            layer.weight.data = layer.weight.data.clone()
        return [tensor.clone() for tensor in results], None

    fp4engine.manual_seed(7)
    ours = run()
    fp4engine.manual_seed(7)
    assert_same(ours, without_tapes(run))
    assert len(plays) == 2 * (1 + 1 + 1)


def test_backward_twice_and_two_graphs_at_once(kernel_device, plays):
    def run():
        layer = linear(kernel_device)
        xs = [x.requires_grad_() for x in inputs(kernel_device)]
        with fp4engine.autocast(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True)):
            outputs = [layer(x) for x in xs]
        for out in reversed(outputs):
            out.sum().backward(retain_graph=True)
            out.sum().backward()
        return [layer.weight.grad, *(x.grad for x in xs)], None

    assert_same(run(), without_tapes(run))
    assert len(plays) == 1 + 4


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [checkpoint, fp4engine.checkpoint])
def test_checkpointing(kernel_device, plays, kind, use_reentrant):
    """Also while the recomputation is on a tape and its forward was not."""

    def run():
        layer = linear(kernel_device)
        return train(layer, inputs(kernel_device), forward=lambda x: kind(layer, x, use_reentrant=use_reentrant))

    def plain():
        return train(linear(kernel_device), inputs(kernel_device))

    ours = run()
    assert plays
    assert_same((ours[0], None), (without_tapes(plain)[0], None))


def test_saved_tensors_may_go_elsewhere(kernel_device, plays):
    def run():
        layer = linear(kernel_device)

        def forward(x):
            with torch.autograd.graph.save_on_cpu():
                return layer(x)

        return train(layer, inputs(kernel_device), forward=forward)

    assert_same(run(), without_tapes(run))
    assert plays


def test_under_autocast_of_torch(kernel_device, plays):
    def run():
        torch.manual_seed(5)
        layer = fp4engine.Linear(32, 16, device=kernel_device)

        def forward(x):
            with torch.autocast(torch.device(kernel_device).type, BF16):
                return layer(x)

        return train(layer, [x.float() for x in inputs(kernel_device)], forward=forward)

    assert_same(run(), without_tapes(run))
    assert len(plays) == 2


def test_a_copy_has_its_own(kernel_device, plays):
    layer = linear(kernel_device)
    for x in inputs(kernel_device, count=2):
        step(layer, x)
    twin = copy.deepcopy(layer)
    x = inputs(kernel_device)[0]
    fp4engine.manual_seed(7)
    ours = step(layer, x)
    fp4engine.manual_seed(7)
    assert_same((ours, None), (step(twin, x), None))
    assert len(plays) == 2


@pytest.mark.gpu  # the interpreter runs one kernel at a time
def test_threads(plays):
    """Modules on several threads do not see each other's recordings."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    layer = linear("cuda")
    xs = inputs("cuda", count=4)
    want = without_tapes(lambda: [step(linear("cuda"), x, recipe)[0] for x in xs])
    got = [[] for _ in xs]

    def work(index):
        with torch.no_grad(), fp4engine.autocast(recipe=recipe):
            got[index] = [layer(xs[index]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(outputs) == 50 for outputs in got)
    assert plays and all(torch.equal(out, right) for outputs, right in zip(got, want, strict=True) for out in outputs)


@pytest.mark.parametrize("transposed", [False, True])
def test_single_casts(kernel_device, replays, transposed):
    x = torch.randn(20, 20, device=kernel_device).to(BF16)
    x = x.T if transposed else x
    rng = torch.tensor([3, 4], device=kernel_device)
    row, col = CastSpec(rounding=RoundingMode.STOCHASTIC), CastSpec(rotation=Rotation())

    def run():
        results = []
        for _ in range(4):
            amaxes = amax(x, row, col)
            results += [*amaxes, *quantize(x, row, col, rowwise_amax=amaxes[0], columnwise_amax=amaxes[1], rng=rng)]
            results += [codes for codes in quantize(x, row, None, rowwise_amax=amaxes[0], rng=rng) if codes is not None]
        return [tensor.view(torch.uint8) for tensor in results], None

    assert_same(run(), without_tapes(run))
    assert len(replays[False]) == 3 * 2


@pytest.mark.gpu
def test_a_replay_can_be_captured(plays):
    layer = linear("cuda")
    x = inputs("cuda")[0]
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    for _ in range(4):
        want = step(layer, x, recipe)
    torch.cuda.synchronize()
    static, grad = x.clone().requires_grad_(), torch.linspace(-1, 1, 5 * 16, device="cuda").view(5, 16).to(BF16)
    graph = torch.cuda.CUDAGraph()
    plays.clear()
    with torch.cuda.graph(graph):
        with fp4engine.autocast(recipe=recipe):
            out = layer(static)
        grads = torch.autograd.grad(out, (static, layer.weight), grad)
    assert len(plays) == 2
    graph.replay()
    for left, right in zip((out, *grads), want, strict=False):
        assert torch.equal(left, right)


@pytest.mark.gpu
def test_replays_on_another_stream(plays):
    layer = linear("cuda")
    x = inputs("cuda")[0]
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    for _ in range(4):
        want = step(layer, x, recipe)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = step(layer, x, recipe)
    torch.cuda.synchronize()
    assert len(plays) == 6
    assert_same((got, None), (want, None))


@pytest.mark.gpu
def test_a_replay_takes_no_more_memory():
    """At the peak of a step; temporaries are in one block, whose slices are used again when their time is over."""
    recipe = NVFP4BlockScaling()

    def peak():
        torch.manual_seed(5)
        layer = fp4engine.Linear(2048, 3072, device="cuda", dtype=BF16, bias=False)
        x = torch.randn(4096, 2048, device="cuda", dtype=BF16)
        for _ in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(layer, x, recipe)
            layer.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    assert peak() <= 1.01 * without_tapes(peak)


@pytest.mark.multi_gpu
def test_devices_have_tapes_of_their_own(plays):
    want = step(layer := linear("cuda:0"), inputs("cuda:0")[0])
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1") * 2:
        layer.to(device)
        fp4engine.manual_seed(torch.initial_seed())
        got = step(layer, inputs(device)[0])
        assert torch.equal(got[0].cpu(), want[0].cpu())
    assert plays
