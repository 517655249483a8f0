"""A cached weight is the weight as it is: whatever changes it, whoever does, and wherever the new one lies."""

import contextlib
import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

import fp4engine
import fp4engine.te.pytorch as te
from fp4engine.ops import checksum
from fp4engine.recipe import NVFP4BlockScaling
from fp4engine.recipe.zoo import ZOO
from tests.modules.test_weight_cache import count_weight_casts

RECIPE = NVFP4BlockScaling(disable_stochastic_rounding=True)
X = torch.linspace(-1, 1, 4 * 32).view(4, 32)


def make():
    torch.manual_seed(0)
    return fp4engine.Linear(32, 32)


def forward(layer, is_first_microbatch=None):
    with fp4engine.autocast(recipe=RECIPE):
        return layer(X, is_first_microbatch=is_first_microbatch)


@pytest.fixture(params=["weight_cache", "is_first_microbatch"])
def cached(request):
    """``(layer, forward)`` whose weight is quantized and kept."""
    layer = make()
    if request.param == "weight_cache":
        with fp4engine.weight_cache(layer):
            forward(layer)
            yield layer, lambda: forward(layer)
    else:
        forward(layer, True)
        yield layer, lambda: forward(layer, False)


def uncached(layer):
    """The same layer's output, by a layer that has no cache."""
    twin = fp4engine.Linear(32, 32)
    twin.load_state_dict(layer.state_dict())
    return forward(twin)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_steps(cached, optimizer, fused):
    layer, again = cached
    stepper = optimizer(layer.parameters(), lr=0.1, fused=fused)
    before = again()
    before.square().sum().backward()
    stepper.step()
    assert torch.equal(again(), uncached(layer)) and not torch.equal(again(), before)


def test_a_parameter_takes_the_place_of_another_perhaps_at_its_address(cached):
    layer, again = cached
    for seed in range(8):
        torch.manual_seed(seed)
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.randn(32, 32))
        assert torch.equal(again(), uncached(layer))


def test_temporary_parameters(cached):
    layer, _ = cached
    bias = layer.bias.detach()
    for seed in range(8):
        torch.manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(32, 32))
        with fp4engine.autocast(recipe=RECIPE):
            output = torch.func.functional_call(layer, {"weight": weight}, (X,), {"is_first_microbatch": False})
        twin = fp4engine.Linear(32, 32)
        twin.load_state_dict({"weight": weight.detach(), "bias": bias})
        assert torch.equal(output, forward(twin))
        del weight


def test_the_transposed_weight_at_the_same_address(cached):
    layer, again = cached
    layer.weight = torch.nn.Parameter(layer.weight.detach().t())
    assert torch.equal(again(), uncached(layer))


def test_other_memory_by_data(cached):
    layer, again = cached
    layer.weight.data = torch.randn(32, 32)
    assert torch.equal(again(), uncached(layer))
    layer.weight.data = layer.weight.data.t()
    assert torch.equal(again(), uncached(layer))


def test_what_writes_by_giving_other_memory(cached):
    layer, again = cached
    torch.nn.utils.vector_to_parameters(torch.randn(32 * 33), layer.parameters())
    assert torch.equal(again(), uncached(layer))
    layer.bfloat16().float()
    assert torch.equal(again(), uncached(layer))


def fused_sgd(layer):
    parameters = [layer.weight, layer.bias]
    given = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
    grads = [torch.ones_like(p) for p in parameters]
    with torch.no_grad():
        torch._fused_sgd_(parameters, grads, [], **given, maximize=False, is_first_step=True)


def functional_sgd(layer):
    parameters = [layer.weight, layer.bias]
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
    grads = [torch.ones_like(p) for p in parameters]
    with torch.no_grad():
        sgd(parameters, grads, [None, None], fused=True, **settings, maximize=False)


def functional_adamw(layer):
    weight = [layer.weight]
    state = [[torch.zeros_like(layer.weight)] for _ in range(2)]
    settings = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.5, "weight_decay": 0.1, "eps": 1e-8}
    steps = [torch.zeros(())]
    with torch.no_grad():
        adamw(weight, [torch.ones_like(layer.weight)], *state, [], steps, fused=True, **settings, maximize=False)


def sharpness_aware(layer):
    """As SAM does: climb, and later step back."""
    layer.weight.data.add_(torch.full((32, 32), 0.25))


def schedule_free(layer):
    layer.weight.data.lerp_(torch.ones(32, 32), 0.5)


def one_bit(layer):
    layer.weight.data.view(torch.int32)[3, 5] ^= 1 << 20


def one_sign_of_zero(layer):
    layer.weight.data[0, 0] = -0.0 if str(layer.weight.data[0, 0].item()) == "0.0" else 0.0


def rows_change_places(layer):
    layer.weight.data.copy_(layer.weight.data.flip(0).clone())


def by_numpy(layer):
    layer.weight.detach().numpy()[:, 7] *= 3


def by_a_flat_buffer(layer):
    torch.tensor([], dtype=torch.float32).set_(layer.weight.untyped_storage()).mul_(-1)


WRITES = [
    fused_sgd,
    functional_sgd,
    functional_adamw,
    sharpness_aware,
    schedule_free,
    one_bit,
    rows_change_places,
    by_numpy,
    by_a_flat_buffer,
]


@pytest.mark.parametrize("write", WRITES)
def test_what_moves_no_version_counter(cached, write):
    layer, again = cached
    again()
    for _ in range(2):
        write(layer)
        assert torch.equal(again(), uncached(layer))


def test_the_sign_of_a_zero(cached):
    layer, again = cached
    layer.weight.data[0, 0] = 0.0
    again()
    one_sign_of_zero(layer)
    assert torch.equal(again(), uncached(layer))


def test_memory_that_leaves_and_comes_back(cached):
    """As blocks are swapped: one buffer on the device, with the weights of one block after another."""
    layer, again = cached
    buffer, home = torch.randn(32, 32), torch.randn(32, 32)
    layer.weight.data = buffer
    first = again()
    for other in (home, torch.randn(32, 32), home.clone()):
        layer.weight.data = other
        buffer.copy_(other * 2)
        layer.weight.data = buffer
        assert torch.equal(again(), uncached(layer)) and not torch.equal(again(), first)


def test_two_layers_take_turns_in_one_buffer():
    layers, buffer = [make() for _ in range(2)], torch.empty(32, 32)
    homes = [torch.randn(32, 32) for _ in layers]
    with fp4engine.weight_cache(torch.nn.ModuleList(layers)):
        for _ in range(3):
            for layer, home in zip(layers, homes, strict=True):
                buffer.copy_(home)
                layer.weight.data = buffer
                assert torch.equal(forward(layer), uncached(layer))
                layer.weight.data = home


@pytest.mark.parametrize("values", [float("nan"), 0.0, 1.0])
def test_a_weight_with_the_bytes_that_it_had_is_not_quantized_again(cached, values, monkeypatch):
    layer, again = cached
    layer.weight.data.fill_(values)
    again()
    made = count_weight_casts(monkeypatch, layer)
    again(), again()
    layer.weight.data.add_(1).sub_(1) if values == values else layer.weight.data.neg_().neg_()
    again()
    assert not made
    layer.weight.data.fill_(3.0)
    again()
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP", "GroupedLinear", "te"])
def test_every_module_that_caches(kind):
    torch.manual_seed(0)
    x, more = torch.randn(8, 32), ()
    if kind == "GroupedLinear":
        layer, more = fp4engine.GroupedLinear(2, 32, 32, device="cpu"), ([3, 5],)
    elif kind == "te":
        layer = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    else:
        layer = getattr(fp4engine, kind)(32, 32, device="cpu")

    def run(module, is_first):
        with fp4engine.autocast(recipe=RECIPE):
            return module(x, *more, is_first_microbatch=is_first)

    run(layer, True)
    for parameter in layer.parameters():
        parameter.data.mul_(-1.5)
    assert torch.equal(run(layer, False), run(copy.deepcopy(layer), None))


def test_operands_go_with_the_memory_of_their_weight():
    """Offloaded, a weight left its codes behind on the device."""
    layer = make()
    forward(layer, True)
    cache = layer._microbatch_cache
    assert cache._kept is not None
    layer.weight.data = torch.empty(32, 32)
    gc.collect()
    assert cache._kept is None
    forward(layer, True)
    layer.weight = torch.nn.Parameter(torch.empty(32, 32))
    gc.collect()
    assert cache._kept is None
    with fp4engine.weight_cache(layer):
        forward(layer)
        (cache,) = layer._weight_caches
        assert cache._kept is not None
        layer.to(torch.float64)
        gc.collect()
        assert cache._kept is None


@pytest.fixture
def elsewhere(monkeypatch):
    """The CPU as a device that nobody waits for: it compares, and somebody looks later."""
    monkeypatch.setattr(checksum, "is_known_at_once", lambda x: False)


@pytest.mark.parametrize("write", WRITES)
def test_a_device_that_nobody_waits_for_tells_when_the_region_ends(write, elsewhere):
    model = torch.nn.Sequential(make(), make())
    with fp4engine.weight_cache(model):
        for _ in range(3):
            forward(model[0]), forward(model[1])
    stale = pytest.raises(RuntimeError, match="the weight of 1 was written to while its codes were cached")
    with stale, fp4engine.weight_cache(model):
        forward(model[0]), forward(model[1])
        write(model[1])
        forward(model[0]), forward(model[1])
    with fp4engine.weight_cache(model):
        assert torch.equal(forward(model[1]), uncached(model[1]))
        with torch.no_grad():
            model[1].weight.mul_(2)  # shows
        assert torch.equal(forward(model[1]), uncached(model[1]))


CACHED = {name: row.build() for name, row in ZOO.items() if not row.build().is_delayed}


@pytest.mark.parametrize("backward_override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("name", CACHED)
def test_a_device_that_nobody_waits_for_computes_nothing_that_looks_right(name, backward_override, elsewhere):
    """What a stale weight would have an influence on is not finite; under ``TRITON_INTERPRET=1`` by a kernel."""
    torch.manual_seed(0)
    layer, x = fp4engine.Linear(64, 48, bias=False), torch.randn(32, 64, requires_grad=True)
    recipe = replace(CACHED[name], backward_override=backward_override)

    def run(module):
        fp4engine.manual_seed(0)
        with fp4engine.autocast(recipe=recipe):
            y = module(x)
        return y, *torch.autograd.grad(y.sum(), x)

    with contextlib.suppress(RuntimeError), fp4engine.weight_cache(layer):
        run(layer)
        assert all(each.isfinite().all() for each in run(layer))
        layer.weight.data.mul_(-1.5)
        got, want = run(layer), run(copy.deepcopy(layer))
        y_is_right, grad_is_right = map(torch.equal, got, want)
        (cache,) = layer._weight_caches
        is_kept = cache._kept is not None and layer.plan_by(recipe).weight.rowwise_spec is not None
        assert y_is_right != is_kept and (y_is_right or not got[0].isfinite().any())
        assert grad_is_right or not got[1].isfinite().any()


@pytest.mark.parametrize("end", ["step", "first", "another layer's first"])
def test_a_device_that_nobody_waits_for_tells_when_microbatches_end(end, elsewhere):
    model = torch.nn.ModuleList([make(), make()])
    model[0].name, model[1].name = "up", "down"
    for layer in model:
        forward(layer, True), forward(layer, False)
    sharpness_aware(model[0])
    forward(model[0], False)
    with pytest.raises(RuntimeError, match="the weight of up was written to"):
        if end == "step":
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        elif end == "first":
            forward(model[0], True)
        else:
            forward(model[1], True)
    for layer in model:
        assert torch.equal(forward(layer, True), uncached(layer))
        assert torch.equal(forward(layer, False), uncached(layer))
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()


def test_an_error_within_the_region_is_the_one_that_is_seen(elsewhere):
    layer = make()
    with pytest.raises(KeyError), fp4engine.weight_cache(layer):
        forward(layer)
        sharpness_aware(layer)
        forward(layer)
        raise KeyError


@pytest.mark.parametrize(
    "make", [lambda: fp4engine.LayerNormLinear(16, 16), lambda: fp4engine.LayerNormMLP(16, 16)], ids=["linear", "mlp"]
)
def test_the_eps_of_a_fused_module_may_change(make):
    layer, x = make(), 1e-3 * torch.randn(4, 16)
    before = layer(x)
    layer.eps = 1.0
    after = layer(x)
    layer.eps = 1e-5
    assert not torch.equal(after, before) and torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", [fp4engine.LayerNorm, fp4engine.RMSNorm])
def test_a_norms_eps_may_change(kind):
    norm, x = kind(16), torch.randn(4, 16)
    norm.eps = 0.5
    assert torch.equal(norm(x), kind(16, eps=0.5)(x))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_weight_without_memory_is_no_unchanged_weight() -> None:
    with FakeTensorMode():
        weight = torch.empty(4, 32)
        with pytest.raises(RuntimeError, match=r"must have memory.* got a FakeTensor"):
            checksum.digest(weight)
    assert checksum.digest(torch.empty(0, 32)) == 0
