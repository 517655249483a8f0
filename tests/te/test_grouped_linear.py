"""GroupedLinear with one parameter for all slices, and with results and gradients written where they are wanted."""

import pytest
import torch
from torch.nn.utils import prune

from fp4engine.state import current_state
from fp4engine.te.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from fp4engine.te.pytorch import GroupedLinear, autocast, quantized_model_init
from fp4engine.te.pytorch.custom_recipes.quantizer_factory_zoo import nvfp4_row_scaled_fwd_mxfp8_bwd_factory
from fp4engine.te.pytorch.module import SINGLE_PARAMETER

SPLITS = [8, 0, 32]
RECIPES = [None, NVFP4BlockScaling(disable_stochastic_rounding=True), Float8CurrentScaling(), DelayedScaling()]


@pytest.fixture
def flag(monkeypatch):
    monkeypatch.setenv(SINGLE_PARAMETER, "1")


def pair(**arguments):
    """A module with a parameter for each slice, and one with the same values in one."""
    torch.manual_seed(0)
    parts = GroupedLinear(3, 32, 48, **arguments)
    whole = GroupedLinear(3, 32, 48, single_grouped_weight=True, single_grouped_bias=True, **arguments)
    whole.load_state_dict(parts.state_dict())
    return parts, whole


def step(module, recipe, **places):
    torch.manual_seed(1)
    x, grad = torch.randn(40, 32, requires_grad=True), torch.randn(40, 48)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, SPLITS, **places)
    y.backward(grad)
    return y, x.grad


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.usefixtures("flag")
def test_one_parameter_trains_as_one_for_each_slice(recipe, delay) -> None:
    parts, whole = pair(delay_wgrad_compute=delay)
    assert set(dict(whole.named_parameters())) == {"weight", "bias"} == set(whole.state_dict()) - {"_extra_state"}
    for one, other in zip(step(parts, recipe), step(whole, recipe), strict=True):
        assert torch.equal(one, other)
    for module in (parts, whole):
        module.backward_dw()
    for kind in ("weight", "bias"):
        grads = [getattr(parts, f"{kind}{index}").grad for index in range(3)]
        assert torch.equal(getattr(whole, kind).grad, torch.stack(grads))


@pytest.mark.usefixtures("flag")
def test_it_compiles_as_one_graph() -> None:
    """It was left to the interpreter, and a custom recipe of hybrid quantizers raised an error of Dynamo's own."""
    recipe = CustomRecipe(qfactory=nvfp4_row_scaled_fwd_mxfp8_bwd_factory)
    for module in pair():
        torch.compiler.reset()
        compiled = step(torch.compile(module, backend="aot_eager", fullgraph=True), recipe)
        for one, other in zip(compiled, step(module, recipe), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("flag")
def test_one_parameter_may_be_any_tensor() -> None:
    parts, whole = pair()
    x, values = torch.randn(40, 32), dict(whole.named_parameters())
    doubled = {name: (2 * value).detach().requires_grad_() for name, value in values.items()}
    got = torch.func.functional_call(whole, doubled, (x, SPLITS))
    assert torch.allclose(got, 2 * parts(x, SPLITS), atol=1e-6)
    prune.l1_unstructured(whole, "weight", 0.5)
    assert torch.equal(torch.stack(whole.weights), whole.weight) and not whole.weight.all()
    whole(x, SPLITS).sum().backward()
    assert whole.weight_orig.grad is not None


@pytest.mark.usefixtures("flag")
def test_files_of_either_form_load_in_the_other() -> None:
    parts, whole = pair()
    with torch.no_grad():
        whole.weight.mul_(2.0)
    parts.load_state_dict(whole.state_dict())
    assert torch.equal(torch.stack(parts.weights), whole.weight)


@pytest.mark.usefixtures("flag")
def test_the_returned_bias_is_the_parameter() -> None:
    module = GroupedLinear(3, 32, 48, single_grouped_bias=True, return_bias=True)
    y, bias = module(torch.ones(40, 32), SPLITS)
    assert bias is module.bias and y.shape == (40, 48)


@pytest.mark.usefixtures("flag")
def test_on_meta_it_gets_memory_and_values() -> None:
    module = GroupedLinear(3, 32, 48, single_grouped_weight=True, device="meta")
    assert module.weight.is_meta
    module.reset_parameters()
    assert float(module.weight.std()) == pytest.approx(0.023, rel=0.1)


@pytest.mark.usefixtures("flag")
def test_what_one_parameter_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="fuse_wgrad_accumulation"):
        GroupedLinear(2, 16, 16, single_grouped_weight=True, fuse_wgrad_accumulation=True)
    with quantized_model_init(recipe=NVFP4BlockScaling()), pytest.raises(NotImplementedError, match="single_grouped"):
        GroupedLinear(2, 16, 16, single_grouped_weight=True)


def test_without_the_flag_it_warns_and_keeps_one_for_each_slice() -> None:
    with pytest.warns(UserWarning, match=SINGLE_PARAMETER):
        module = GroupedLinear(2, 16, 16, single_grouped_weight=True)
    assert hasattr(module, "weight0") and not module.single_grouped_weight


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_results_and_gradients_are_written_where_they_are_wanted(recipe) -> None:
    module = GroupedLinear(3, 32, 48)
    expected = step(module, recipe)
    out, dgrad_out = torch.empty(40, 48), torch.empty(40, 32)
    y, dgrad = step(module, recipe, out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    if not isinstance(recipe, DelayedScaling):  # whose second step is scaled by the first
        assert torch.equal(out, expected[0]) and torch.equal(dgrad_out, expected[1])
    assert torch.equal(dgrad, dgrad_out)


def test_a_compiled_forward_that_writes_its_gradient_leaves_its_region() -> None:
    module, recipe = GroupedLinear(3, 32, 48), Float8CurrentScaling()
    x, place = torch.randn(40, 32, requires_grad=True), torch.empty(40, 32)

    @torch.compile(backend="eager", fullgraph=True)
    def forward(x, place):
        with autocast(recipe=recipe):
            return module(x, SPLITS, dgrad_out=place)

    output = forward(x, place)
    assert current_state() is None
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, place)


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_places_of_another_shape_are_refused(name) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*\[3, 3\]"):
        step(GroupedLinear(3, 32, 48), None, **{name: torch.empty(3, 3)})
