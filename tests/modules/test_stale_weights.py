"""A cached weight is the weight as it is: whatever changes it, whoever does, and wherever the new one lies."""

import pytest
import torch

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling

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
