"""Which layers are blamed: on losses that are known, and on a model with three planted faults."""

import math
from itertools import count

import pytest
import torch
from torch import nn

import fp4engine
from fp4engine import inspect
from fp4engine.inspect.search import HIGH_PRECISION, keeping
from fp4engine.recipe import DelayedScaling, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo
from fp4engine.recipe.linear import GEMM_OPERANDS
from fp4engine.roles import QuantizerRole

RECIPE = zoo.make("nvfp4")


def model_of(layers: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    fp4engine.convert(model)
    return model


def losses_by(costs: dict[str, dict[tuple[str, str], float]], made: list | None = None):
    """A run whose loss is 1 and the cost of every operand that the recipe casts."""

    def make_run(recipe):
        if made is not None:
            made.append(recipe)
        loss = 1.0
        for name, operands in costs.items():
            own = recipe.of(QuantizerRole("linear", "", name, (32, 32)))
            for (role, side), cost in operands.items():
                loss += cost if getattr(own.casts(role), side) is not None else 0.0
        return [5.0, 4.0, 3.0, loss]

    return make_run


def test_layers_gemms_and_operands_are_named() -> None:
    costs = {"11": {("input", "rowwise"): 0.3}, "4": {("grad_output", "columnwise"): 0.2}}
    found = inspect.bisect(losses_by(costs), model_of(16), RECIPE)
    assert found.complete and found.remaining_gap == pytest.approx(0)
    assert [culprit.layers for culprit in found.culprits] == [("11",), ("4",)]
    assert [max(culprit.operands, key=culprit.operands.get) for culprit in found.culprits] == [
        "fprop input rowwise",
        "wgrad grad_output columnwise",
    ]
    assert "11: 0.3000 alone" in str(found)


def test_a_layer_at_several_places_is_judged_by_all_its_names() -> None:
    """Rules about the first of its names alone are refused when the model runs by them."""
    shared, model = nn.Linear(32, 32), nn.ModuleDict()
    model["0"], model["1"], model["tail"] = nn.Sequential(shared, nn.Linear(32, 32)), shared, nn.Linear(32, 32)
    fp4engine.convert(model)
    x = torch.randn(8, 32)

    def make_run(recipe):
        with fp4engine.autocast(recipe=recipe), torch.no_grad():
            y = model["tail"](model["1"](model["0"](x)))
        own = recipe.of(QuantizerRole("linear", "input", "0.0", (32, 32))).casts("input")
        return [y.isnan().sum().item() + 1.0 + 0.5 * (own.rowwise is not None)]

    found = inspect.bisect(make_run, model, RECIPE, refine=False)
    assert [culprit.name for culprit in found.culprits] == ["0.0"] and found.remaining_gap == 0
    assert [rule.name for rule in found.recipe.rules] == ["0.0", "1"]
    advice = inspect.sensitivity(make_run, model, RECIPE, share=0.6)
    assert advice.ranking[0].name == "0.0" and advice.recipe == found.recipe and advice.measured_gap == 0
    passed = inspect.one_pass(model, lambda x: model["1"](model["0"](x)).square().mean(), [x], RECIPE, positions=8)
    make_run(passed.recipe)


def test_a_large_fault_does_not_hide_a_small_one() -> None:
    costs = {"1": {("input", "rowwise"): 900.0}, "5": {("input", "rowwise"): 0.5}}
    found = inspect.bisect(losses_by(costs), model_of(8), RECIPE, refine=False, tolerance=0.01)
    assert {culprit.name for culprit in found.culprits} == {"1", "5"}


def test_a_divergence_is_found() -> None:
    costs = {"6": {("weight", "rowwise"): math.inf}}
    found = inspect.bisect(losses_by(costs), model_of(8), RECIPE)
    assert found.gap == math.inf and [culprit.name for culprit in found.culprits] == ["6"]
    assert set(found.culprits[0].operands) == {"fprop input rowwise", "fprop weight rowwise"}


def test_what_many_layers_cause_together_is_blamed_on_them_together() -> None:
    def make_run(recipe):
        low = sum(recipe.of(QuantizerRole("linear", "", str(i), (32, 32))) == RECIPE for i in range(4))
        return [1.0 + (low == 4)]

    found = inspect.bisect(make_run, model_of(4), RECIPE)
    assert [culprit.layers for culprit in found.culprits] == [("0", "1", "2", "3")]


def test_the_budget_ends_the_search_and_is_told() -> None:
    made: list = []
    costs = {str(i): {("input", "rowwise"): 1.0} for i in range(16)}
    found = inspect.bisect(losses_by(costs, made), model_of(16), RECIPE, budget=9)
    assert len(made) == found.runs == 8 and not found.complete  # one was kept back, to measure what remains
    with pytest.raises(ValueError, match="budget"):
        inspect.bisect(losses_by(costs), model_of(16), RECIPE, budget=1)
    for tolerance in (math.nan, -0.1, "small"):
        with pytest.raises(ValueError, match="tolerance must be a finite number of at least 0, or None, got"):
            inspect.bisect(losses_by(costs), model_of(16), RECIPE, tolerance=tolerance)
    for losses in (torch.tensor(1.0), "123", [None], [[1.0]], 3.0):
        with pytest.raises(ValueError, match="make_run must return the losses of its steps, got "):
            inspect.bisect(lambda _, losses=losses: losses, model_of(16), RECIPE)


@pytest.mark.parametrize("budget", range(2, 40))
def test_what_remains_is_measured_however_soon_the_budget_ends(budget) -> None:
    """The whole gap was printed as what remains, if the budget ended a round that had found culprits."""
    costs = {str(i): {("input", "rowwise"): 0.5 / (i + 1), ("weight", "columnwise"): 0.01 * i} for i in range(8)}
    make_run = losses_by(costs)
    found = inspect.bisect(make_run, model_of(8), RECIPE, budget=budget)
    true = inspect.search.last_quarter(make_run(found.recipe)) - found.high_precision_loss
    assert found.runs <= budget and found.remaining_gap == pytest.approx(true)
    assert f"without them a gap of {true:.4f} remains" in str(found)


def test_no_gap_blames_nobody() -> None:
    found = inspect.bisect(losses_by({}), model_of(4), RECIPE)
    assert found.culprits == () and found.runs == 2


def test_sensitivity_gives_high_precision_to_what_costs_most() -> None:
    costs = {str(i): {("input", "rowwise"): cost} for i, cost in enumerate([0.1, 0.01, 0.4, 0.02])}
    advice = inspect.sensitivity(losses_by(costs), model_of(4), RECIPE, share=0.5)
    assert advice.recipe == RuledRecipe(RECIPE, tuple(Rule(advice.recipe.rules[0].recipe, name) for name in "20"))
    assert advice.share == pytest.approx(0.5) and advice.expected_gap == pytest.approx(0.03)
    assert advice.measured_gap == pytest.approx(0.03) and advice.gap == pytest.approx(0.53)
    assert [unit.name for unit in advice.ranking] == ["2", "0", "3", "1"]
    assert advice.runs == 7 and "50.0% of FLOPs" in str(advice)


def test_gaps_that_are_noise_rank_nobody() -> None:
    """Gaps of 0.0001 were ranked, and switched, like any other."""
    costs = {"0": 0.1, "1": 0.0001, "2": -0.0004, "3": 0.0003}

    def make_run(recipe):
        low = [name for name in costs if recipe.of(QuantizerRole("linear", "", name, (32, 32))) == RECIPE]
        return [1.0 + sum(costs[name] for name in low)] * 8

    advice = inspect.sensitivity(make_run, model_of(4), RECIPE, share=0.0)
    assert advice.noise == pytest.approx(0.0004)
    assert [unit.name for unit in advice.ranking if not unit.in_recipe] == ["0"]
    assert str(advice).count("(noise)") == 3 and "gaps up to 0.0004 are noise" in str(advice)
    told = inspect.sensitivity(make_run, model_of(4), RECIPE, share=0.0, noise=0.0002)
    assert {unit.name for unit in told.ranking if not unit.in_recipe} == {"0", "3"}
    with pytest.raises(ValueError, match="noise must be a finite number of at least 0, or None, got -1"):
        inspect.sensitivity(make_run, model_of(4), RECIPE, noise=-1)


def test_steps_that_scatter_make_a_gap_noise() -> None:
    def make_run(recipe):
        is_low = recipe.of(QuantizerRole("linear", "", "0", (32, 32))) == RECIPE
        return [1.0 + is_low * (0.001 + 0.1 * (-1) ** step) for step in range(64)]

    advice = inspect.sensitivity(make_run, model_of(1), RECIPE, share=0.0)
    assert advice.ranking[0].gap == pytest.approx(0.001) and 0.04 < advice.noise < 0.06
    assert advice.ranking[0].in_recipe


def test_a_layer_that_multiplies_nothing_has_no_share() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 0))
    fp4engine.convert(model)
    advice = inspect.sensitivity(losses_by({"1": {("input", "rowwise"): 0.5}}), model, RECIPE, share=1.0)
    assert [(unit.name, unit.share, unit.in_recipe) for unit in advice.ranking] == [("1", 0.0, False), ("0", 1.0, True)]


def test_names_are_no_patterns() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a*", "ab", "[x]")})
    fp4engine.convert(model)
    make_run = losses_by({"a*": {("input", "rowwise"): 0.25}, "[x]": {("weight", "rowwise"): 0.5}})
    advice = inspect.sensitivity(make_run, model, RECIPE, share=0.6)
    assert [(unit.name, unit.gap) for unit in advice.ranking] == [("[x]", 0.5), ("a*", 0.25), ("ab", 0.0)]
    assert advice.expected_gap == advice.measured_gap == 0.25
    found = inspect.bisect(make_run, model, RECIPE, refine=False)
    assert {culprit.name: culprit.gap for culprit in found.culprits} == {"[x]": 0.5, "a*": 0.25}
    assert found.remaining_gap == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 6}, "does not suffice"),
        ({"budget": "60"}, "budget must be an integer, got '60'"),
        ({"share": None}, "share must be between 0 and 1, got None"),
        ({"units": "**"}, "units must be a sequence of patterns, got the string"),
        ({"share": 1.5}, "share must be"),
        ({"units": ["0", "1"]}, "is in no unit"),
        ({"units": ["*", "1"]}, "'\\*' and '1'"),
        ({"units": ["*", "nothing"]}, "covers no layer"),
        ({"recipe": DelayedScaling()}, "delayed scaling"),
        ({"recipe": RuledRecipe(RECIPE)}, "depend on the module"),
    ],
)
def test_what_cannot_be_ranked_is_refused(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        inspect.sensitivity(losses_by({}), model_of(4), **{"recipe": RECIPE, **options})


def test_a_high_precision_run_that_diverges_explains_nothing() -> None:
    steps = count()
    with pytest.raises(ValueError, match="diverges too"):
        inspect.bisect(lambda recipe: [math.nan, next(steps)], model_of(4), RECIPE)


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if not zoo.make(name).is_delayed])
@pytest.mark.parametrize("gemm", GEMM_OPERANDS)
def test_parts_of_every_recipe_are_recipes(name: str, gemm: str) -> None:
    recipe = zoo.make(name)
    both = keeping(recipe, GEMM_OPERANDS[gemm])
    for role, side in GEMM_OPERANDS[gemm]:
        assert getattr(both.casts(role), side) == getattr(recipe.casts(role), side)
        spec = getattr(keeping(recipe, [(role, side)]).casts(role), side)
        assert spec is None or spec.rotation is None
    everything = [operand for pair in GEMM_OPERANDS.values() for operand in pair]
    assert all(keeping(recipe, everything).casts(role) == recipe.casts(role) for role in ("weight", "grad_output"))
    assert (
        keeping(recipe, []).replace(allow_biased=False).casts("input").rowwise is LinearRecipe().casts("input").rowwise
    )


def test_a_product_alone_is_summed_as_the_recipe_sums_it_and_an_operand_alone_in_fp32() -> None:
    recipe = NVFP4BlockScaling(accumulation="blackwell")
    for pair in GEMM_OPERANDS.values():
        assert keeping(recipe, pair).accumulation == "blackwell"
        assert {keeping(recipe, [operand]).accumulation for operand in pair} == {"fp32"}


@pytest.mark.slow
def test_three_planted_faults_are_named(planted) -> None:
    found = inspect.bisect(planted.make_run, planted.make_model(), RECIPE, refine=False)
    assert {culprit.name for culprit in found.culprits} == {planted.OUTLIER, planted.TINY_GRADIENTS, planted.SATURATING}
    assert found.complete and found.remaining_gap < found.gap / 20


@pytest.mark.slow
def test_sensitivity_ranks_the_three_planted_faults_first(planted) -> None:
    advice = inspect.sensitivity(planted.make_run, planted.make_model(), RECIPE, share=0.6)
    names = {planted.OUTLIER, planted.TINY_GRADIENTS, planted.SATURATING}
    assert {unit.name for unit in advice.ranking[:3]} == names
    assert {rule.name for rule in advice.recipe.rules} == names and advice.share >= 0.6
    assert advice.measured_gap < advice.gap / 20


@pytest.mark.parametrize("search", [inspect.bisect, inspect.sensitivity])
def test_runs_of_different_lengths_are_not_compared(search) -> None:
    steps = iter((20, 10))
    with pytest.raises(ValueError, match=r"as many losses in each run, .* got 10 after 20"):
        search(lambda recipe: [3 - 0.1 * step for step in range(next(steps))], model_of(4), RECIPE)
    steps = iter((20, *range(3, 100)))
    assert search(lambda recipe: [1.0] * next(steps) + [math.inf] * (recipe != HIGH_PRECISION), model_of(4), RECIPE)
