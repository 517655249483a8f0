"""``torch.set_default_dtype`` changes no byte of a cast, a norm or a step: what fp4engine makes has its own dtype."""

import pytest
import torch

import fp4engine
from fp4engine.formats import CastSpec, Rotation, Signs
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe.zoo import ZOO
from fp4engine.reference.norm import row_statistics
from fp4engine.reference.scaling import outer_amax
from fp4engine.roles import QuantizerRole
from tests.same import assert_same

DEFAULTS = pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)


@pytest.fixture
def under():
    """``under(default, function, *arguments)`` calls a function under a default dtype."""

    def call(default, function, *arguments):
        torch.set_default_dtype(default)
        try:
            return function(*arguments)
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def normal(*size):
    return torch.randn(*size, dtype=torch.float32, generator=torch.Generator().manual_seed(7))


def steps(recipe):
    """Outputs and gradients of two steps: enough for scales of an earlier step."""
    fp4engine.manual_seed(3)
    layer = fp4engine.LayerNormLinear(32, 48, params_dtype=torch.float32, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(normal(48, 32))
        layer.bias.copy_(normal(48))
    results = []
    for size in (1.0, 3.0):
        inp = (size * normal(16, 32)).requires_grad_()
        with fp4engine.autocast(recipe=recipe):
            output = layer(inp)
        layer.zero_grad()
        output.square().sum().backward()
        assert output.isfinite().all()
        results += [output.detach(), inp.grad, *(parameter.grad for parameter in layer.parameters())]
    return results


@pytest.fixture(scope="module")
def expected():
    return {}


@DEFAULTS
@pytest.mark.parametrize("name", ZOO)
def test_every_recipe(under, expected, name, default):
    if name not in expected:
        expected[name] = steps(ZOO[name].build())
    assert_same(under(default, steps, ZOO[name].build()), expected[name])


def of_its_own():
    """What the reference makes without a tensor to take the dtype from."""
    x = normal(4, 600)
    quantizer = fp4engine.Quantizer(CastSpec(rotation=Rotation(signs=Signs.NONE)), None)
    rotated = quantizer.quantize(x.double(), columnwise=False).rowwise
    return (
        outer_amax(x, make_quantizer(ZOO["mxfp8"].build(), QuantizerRole("linear", "input")).rowwise_spec),
        row_statistics(x, 1e-5, True),
        rotated.codes,
        rotated.scale_inv.view(torch.uint8),
        rotated.amax,
    )


@DEFAULTS
def test_what_the_reference_makes_of_its_own(under, default):
    assert_same(under(default, of_its_own), of_its_own())


def saved_and_loaded():
    layer = fp4engine.Linear(16, 16, params_dtype=torch.float32)
    state = {f":{role}": {"values": [1 / 3, 0.1], "amax": 0.7, "open": False} for role in ("input", "weight")}
    fp4engine.set_amax_history(layer, state)
    return [history.values for history in layer.amax_histories.values()]


@DEFAULTS
def test_histories_that_are_loaded(under, default):
    assert_same(under(default, saved_and_loaded), saved_and_loaded())
