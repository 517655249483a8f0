"""The effects of layers' rounding that one pass estimates, against sums written down again and against losses."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4engine
from fp4engine import inspect
from fp4engine.formats import CastSpec, RoundingMode
from fp4engine.recipe import Casts, LinearRecipe, zoo

NVFP4 = zoo.make("nvfp4")
ROWS, WIDTH, CLASSES = 48, 32, 5


def make_model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(layers - 1) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))
    fp4engine.convert(model)
    return model


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator))


def loss_of(model):
    return lambda given: F.cross_entropy(model(given[0]), given[1])


def test_effects_are_those_of_the_definition() -> None:
    model = make_model(1)
    (layer,) = model
    found = inspect.one_pass(model, loss_of(model), [batch(0), batch(1)], NVFP4, positions=ROWS)
    first = second = 0.0
    for seed in (0, 1):
        x, target = batch(seed)
        with torch.no_grad(), fp4engine.autocast(recipe=NVFP4):
            rounded = layer(x)
        output = rounded.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(output, target), output)
        error = rounded.double() - layer.bias.double() - x.double() @ layer.weight.double().T
        moved = (gradient.double() * error).sum(1)
        first, second = first + moved.sum().item() / 2, second + ROWS / 2 * moved.square().sum().item() / 2
    (effect,) = found.ranking
    assert (effect.name, effect.share, found.batches) == ("0", 1.0, 2)
    assert effect.loss_change == pytest.approx(first, rel=1e-3)
    assert effect.divergence == pytest.approx(second, rel=1e-3)


def test_the_divergence_is_close_to_what_predictions_diverge_by() -> None:
    """At labels that the model itself draws, where the Fisher information is no matter of fit."""
    model = make_model(1)
    x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = F.log_softmax(model(x), 1)
        with fp4engine.autocast(recipe=NVFP4):
            rounded = F.log_softmax(model(x), 1)
    true = F.kl_div(rounded, exact, log_target=True, reduction="batchmean").item()
    target = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(4)).squeeze(1)
    found = inspect.one_pass(model, loss_of(model), [(x, target)], NVFP4, positions=len(x))
    assert found.ranking[0].divergence == pytest.approx(true, rel=0.15)


def test_faults_of_the_forward_pass_are_first_and_those_of_gradients_are_not_seen(planted) -> None:
    model = planted.make_model()
    x = torch.randn(planted.ROWS, planted.WIDTH, generator=torch.Generator().manual_seed(1))
    target = torch.randint(0, planted.CLASSES, (planted.ROWS,), generator=torch.Generator().manual_seed(2))

    def loss(given):
        logits, ignored = model(given)
        return F.cross_entropy(logits, target) + ignored

    found = inspect.one_pass(model, loss, [x], NVFP4, positions=planted.ROWS, share=0.7)
    assert {unit.name for unit in found.ranking[:2]} == {planted.OUTLIER, planted.SATURATING}
    assert planted.TINY_GRADIENTS not in [unit.name for unit in found.ranking[:3]]
    assert not found.ranking[0].in_recipe and found.share >= 0.7
    assert planted.OUTLIER in str(found)
    with fp4engine.autocast(recipe=found.recipe):
        assert planted.make_model()(x)[0].isfinite().all()


def test_nothing_is_left_behind() -> None:
    model = make_model()
    loss_of(model)(batch()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    fp4engine.manual_seed(7)
    loss_of(model)(batch())
    before = fp4engine.get_rng_state()
    stochastic = Casts(CastSpec(rounding=RoundingMode.STOCHASTIC))
    recipe = LinearRecipe(input=stochastic, weight=Casts(CastSpec()))
    inspect.one_pass(model, loss_of(model), [batch()], recipe, positions=ROWS)
    assert fp4engine.get_rng_state()["draws"].get("cpu", 0) == before["draws"].get("cpu", 0)
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient, value)


def test_a_pass_moves_no_statistics_and_no_dropout() -> None:
    model = nn.Sequential(norm := nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES))
    fp4engine.convert(model)
    before, stream = copy.deepcopy(norm.state_dict()), torch.get_rng_state()
    inspect.one_pass(model, loss_of(model), [batch()], NVFP4, positions=ROWS)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_a_frozen_layer_before_all_that_trains_is_said_to_have_no_gradient() -> None:
    """Its rows were there, and it was said that none reached it."""
    model = make_model()
    model[0].requires_grad_(False)
    found = inspect.one_pass(model, loss_of(model), [batch()], NVFP4, positions=ROWS)
    assert found.unseen == {"0": "no gradient of a batch's loss reached its output"}


def test_units_add_their_layers_and_what_is_unseen_is_named() -> None:
    model = make_model()
    given = [batch()]
    alone = {unit.name: unit for unit in inspect.one_pass(model, loss_of(model), given, NVFP4, positions=ROWS).ranking}
    units = inspect.one_pass(model, loss_of(model), given, NVFP4, positions=ROWS, units=["0", "[24]"])
    both = next(unit for unit in units.ranking if unit.name == "[24]")
    assert both.divergence == pytest.approx(alone["2"].divergence + alone["4"].divergence)
    assert both.share == pytest.approx(alone["2"].share + alone["4"].share)

    def skips(pair):
        return F.cross_entropy(model[4](pair[0]), pair[1])

    found = inspect.one_pass(model, skips, given, NVFP4, positions=ROWS)
    assert list(found.unseen) == [
        "0",
        "2",
    ] and "0 was not seen: no gradient of a batch's loss reached its output" in str(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": 0}, "positions must be"),
        ({"share": 1.5}, "share must be between 0 and 1, got 1.5"),
        ({"batches": []}, "batches must hold at least one batch"),
        ({"loss": 3}, "loss must be a function, got 3"),
        ({"loss": lambda given: 1.0}, "loss must return one number with a gradient, got 1.0"),
        ({"loss": lambda given: torch.ones(())}, "loss must return one number with a gradient"),
        ({"units": ["0"]}, "every layer must be in exactly one unit"),
    ],
)
def test_bad_input_is_named(change: dict, said: str) -> None:
    model = make_model()
    given = {"loss": loss_of(model), "batches": [batch()], "recipe": NVFP4, "positions": ROWS} | change
    with pytest.raises(ValueError, match=said):
        inspect.one_pass(model, **given)


def test_models_that_cannot_be_seen_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="training mode"):
        inspect.one_pass(model.eval(), loss_of(model), [batch()], NVFP4, positions=ROWS)
    model = make_model()
    model[0].weight.main_grad = torch.zeros_like(model[0].weight)
    with pytest.raises(ValueError, match="main_grad"):
        inspect.one_pass(model, loss_of(model), [batch()], NVFP4, positions=ROWS)
    model = make_model()
    nan = [(batch()[0] * math.inf, batch()[1])]
    with pytest.raises(ValueError, match="finite"):
        inspect.one_pass(model, loss_of(model), nan, NVFP4, positions=ROWS)

    def with_a_gradient_of_nan(given):
        return 0 * (0 * model(given[0])).sqrt().sum()

    with pytest.raises(ValueError, match=r"gradient of loss must be finite, .* and at '4' it is not"):
        inspect.one_pass(model, with_a_gradient_of_nan, [batch()], NVFP4, positions=ROWS)
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="loss must return one number with a gradient"):
        inspect.one_pass(model, loss_of(model), [batch()], NVFP4, positions=ROWS)
