"""Recipes by module and by step: values in, a plain recipe out."""

import pytest
import torch

import fp4engine
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import (
    CustomRecipe,
    LinearRecipe,
    NVFP4BlockScaling,
    Rule,
    RuledRecipe,
    ScheduledRecipe,
    combine,
    final_blocks,
    recipe_from_json,
    zoo,
)
from fp4engine.roles import QuantizerRole

HIGH = LinearRecipe()
NVFP4 = zoo.make("nvfp4")
MIXED = RuledRecipe(
    NVFP4,
    (Rule(HIGH, "**.router"), Rule(zoo.make("fp8_current"), narrower_than=64), Rule(HIGH, "layers.*", blocks=(27, 32))),
)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.3.mlp.fc1", (256, 128), NVFP4),
        ("layers.3.router", (16, 128), HIGH),
        ("layers.3.mlp.gate", (16, 128), zoo.make("fp8_current")),
        ("layers.26.mlp.fc1", (256, 128), NVFP4),
        ("layers.27.mlp.fc1", (256, 128), HIGH),
        ("layers.31.mlp.fc1", (256, 128), HIGH),
        ("head", (256, 128), NVFP4),
    ],
)
def test_the_first_rule_that_matches_wins(name: str, shape: tuple[int, int], expected) -> None:
    assert MIXED.of(QuantizerRole("linear", "weight", name, shape)) == expected


def test_final_blocks_rounds_up() -> None:
    assert final_blocks(32, 0.15) == (27, 32)
    assert final_blocks(10, 0.1) == (9, 10)
    assert final_blocks(100, 0.07) == (93, 100)
    assert final_blocks(10, 1e-12) == (9, 10)
    with pytest.raises(ValueError, match=r"fraction must be a number above 0 and at most 1, got 1\.5"):
        final_blocks(10, 1.5)
    for total in (0, 32.0, "x"):
        with pytest.raises(ValueError, match=r"total must be an integer of at least 1, got"):
            final_blocks(total, 0.1)


def test_modules_follow_their_own_rule() -> None:
    model = torch.nn.Sequential(
        fp4engine.Linear(64, 64, name="layers.0.fc"), fp4engine.Linear(64, 64, name="layers.1.fc")
    )
    mixed = RuledRecipe(NVFP4BlockScaling(), (Rule(HIGH, blocks=final_blocks(2, 0.5)),))
    inp = torch.randn(8, 64, requires_grad=True)
    with fp4engine.autocast(recipe=mixed):
        hidden = model[0](inp)
        output = model[1](hidden)
    output.sum().backward()
    assert {formats for _, formats in model[0].executed.counts} == {"e2m1 x e2m1"}
    assert {formats for _, formats in model[1].executed.counts} == {"high_precision"}
    assert torch.equal(output, torch.nn.functional.linear(hidden, model[1].weight, model[1].bias))


def test_the_module_knows_the_shape_of_its_weight() -> None:
    narrow, wide = fp4engine.Linear(64, 16, bias=False), fp4engine.Linear(64, 64, bias=False)
    with fp4engine.autocast(recipe=RuledRecipe(NVFP4, (Rule(HIGH, narrower_than=32),))):
        narrow(torch.randn(4, 64)), wide(torch.randn(4, 64))
    assert set(narrow.executed.counts) == {("fprop", "high_precision")}
    assert set(wide.executed.counts) == {("fprop", "e2m1 x e2m1")}


def test_a_module_that_is_renamed_or_gets_another_weight_follows_its_rule() -> None:
    layer, x = fp4engine.Linear(64, 64, bias=False, name="body"), torch.randn(8, 64)

    def formats() -> set[str]:
        layer.executed.counts.clear()
        layer(x)
        return {words for _, words in layer.executed.counts}

    with fp4engine.autocast(recipe=RuledRecipe(NVFP4, (Rule(HIGH, "head"), Rule(HIGH, narrower_than=32)))):
        assert formats() == {"e2m1 x e2m1"}
        layer.weight = torch.nn.Parameter(torch.randn(16, 64))
        assert "high_precision" in formats()
        layer.weight = torch.nn.Parameter(torch.randn(64, 64))
        assert formats() == {"e2m1 x e2m1"}
        layer.name = "head"
        assert "high_precision" in formats()


@pytest.mark.parametrize(
    ("rule", "asked"), [(Rule(HIGH, "**.head"), r"name='\*\*\.head'"), (Rule(HIGH, blocks=(1, 2)), r"blocks=\(1, 2\)")]
)
def test_rules_about_names_refuse_a_module_without_one(rule: Rule, asked: str) -> None:
    layer, x = fp4engine.Linear(64, 64), torch.randn(8, 64)
    said = rf"a rule with {asked} cannot tell whether it is about a module whose name is not known: call fp4engine.conv"
    with fp4engine.autocast(recipe=RuledRecipe(NVFP4BlockScaling(), (rule,))):
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                layer(x)
    mlp = fp4engine.LayerNormMLP(64, 64, device="cpu")
    by_rule = fp4engine.autocast(recipe=RuledRecipe(NVFP4BlockScaling(), (rule,)))
    with by_rule, pytest.raises(ValueError, match="whose name is only known to end in 'fc1'"):
        mlp(x)
    with fp4engine.autocast(recipe=RuledRecipe(NVFP4BlockScaling(), (Rule(HIGH, "**", narrower_than=128), rule))):
        layer(x)  # follows a rule that is about every name


def test_rules_ask_for_what_they_need() -> None:
    with pytest.raises(ValueError, match="narrower_than=64 needs a role with a shape"):
        MIXED.of(QuantizerRole("linear", "input", "layers.3.mlp.fc1"))
    with pytest.raises(ValueError, match="recipe must be a Recipe, LinearRecipe\\(\\) for high precision, got None"):
        Rule(None, "**.router")
    with pytest.raises(ValueError, match="0 <= first < end, got \\(4, 4\\)"):
        Rule(HIGH, blocks=(4, 4))
    with pytest.raises(ValueError, match="depend on the module"):
        MIXED.casts("input")


@pytest.mark.parametrize("argument", [{"backend": "reference"}, {"backward_override": "high_precision"}])
def test_a_recipe_of_recipes_takes_nothing_that_theirs_decide(argument) -> None:
    for make in (lambda: RuledRecipe(NVFP4, (), **argument), lambda: ScheduledRecipe(((0, NVFP4),), **argument)):
        with pytest.raises(TypeError, match=next(iter(argument))):
            make()
    with pytest.raises((TypeError, ValueError), match=next(iter(argument))):
        MIXED.replace(**argument)


def test_lists_of_rules_and_phases_are_kept_as_tuples() -> None:
    rules, phases = [Rule(HIGH, "head")], [[0, NVFP4], (3, HIGH)]
    ruled, scheduled = RuledRecipe(NVFP4, rules), ScheduledRecipe(phases)
    rules.append(Rule(HIGH))
    for recipe in (ruled, scheduled):
        assert recipe_from_json(recipe.to_json()) == recipe and hash(recipe) == hash(recipe.replace())
    assert ruled == RuledRecipe(NVFP4, (Rule(HIGH, "head"),)) and scheduled.at(3) == HIGH
    for wrong in (None, Rule(HIGH), 3):
        with pytest.raises(ValueError, match="rules must be a tuple of Rule values, got"):
            RuledRecipe(NVFP4, wrong)
    for wrong in (None, ((0, NVFP4, 1),), (3,), 3):
        with pytest.raises(ValueError, match=r"phases must be a tuple of \(first step, recipe\), got"):
            ScheduledRecipe(wrong)


def test_rules_that_match_nothing_are_named() -> None:
    names = ["layers.28.mlp.fc1", "layers.3.router"]
    MIXED.check(names)
    with pytest.raises(ValueError, match=r"no module: name='\*\*.router'; the modules are layers.28.mlp.fc1$"):
        MIXED.check(names[:1])
    early = RuledRecipe(NVFP4, (Rule(HIGH, "layers.*", blocks=(90, 99)),))
    with pytest.raises(ValueError, match=r"name='layers.\*' in blocks \(90, 99\); the modules are .*, layers.7, ...$"):
        early.check([f"layers.{number}" for number in range(9)])


def test_a_schedule_is_a_pure_function_of_the_step() -> None:
    late = combine(forward=HIGH, backward=NVFP4)
    schedule = ScheduledRecipe(((0, NVFP4), (820, late)))
    assert [schedule.at(step) for step in (0, 819, 820, 10**6)] == [NVFP4, NVFP4, late, late]
    assert late.input.rowwise is None and late.grad_output == NVFP4.casts("grad_output")
    assert recipe_from_json(schedule.to_json()) == schedule


def test_schedules_and_rules_compose() -> None:
    schedule = ScheduledRecipe(((0, NVFP4), (10, HIGH)))
    mixed = RuledRecipe(schedule, (Rule(HIGH, "head"),))
    assert mixed.at(0) == RuledRecipe(NVFP4, (Rule(HIGH, "head"),))
    assert mixed.at(10).of(QuantizerRole("linear", "input", "layers.0")) == HIGH
    assert recipe_from_json(mixed.to_json()) == mixed


def test_the_steps_at_which_a_recipe_changes() -> None:
    inner = ScheduledRecipe(((0, HIGH), (5, NVFP4), (12, HIGH)))
    schedule = ScheduledRecipe(((0, NVFP4), (3, inner), (10, HIGH)))
    mixed = RuledRecipe(schedule, (Rule(ScheduledRecipe(((0, HIGH), (4, NVFP4))), "head"),))
    assert [recipe.starts for recipe in (NVFP4, schedule, mixed)] == [(0,), (0, 3, 5, 10), (0, 3, 4, 5, 10)]


def test_a_schedule_without_a_step_says_what_to_do() -> None:
    schedule = ScheduledRecipe(((0, NVFP4),))
    with (
        fp4engine.autocast(recipe=schedule),
        pytest.raises(ValueError, match=r"use autocast\(recipe=schedule.at\(step\)\)"),
    ):
        fp4engine.Linear(16, 16)(torch.randn(2, 16))
    with pytest.raises(ValueError, match="step must be an integer of at least 0, got -1"):
        schedule.at(-1)


@pytest.mark.parametrize("wrap", [lambda s: s, RuledRecipe, lambda s: RuledRecipe(NVFP4, (Rule(s, "head"),))])
def test_a_layer_that_is_to_follow_a_schedule_is_refused_when_it_is_built(wrap) -> None:
    recipe = wrap(ScheduledRecipe(((0, NVFP4), (9, HIGH))))
    with pytest.raises(ValueError, match=r"a schedule needs a step, .*instead of recipe="):
        fp4engine.Linear(16, 16, recipe=recipe)
    assert fp4engine.Linear(16, 16, recipe=recipe.at(9)).recipe == recipe.at(9)


@pytest.mark.parametrize("phases", [(), ((5, NVFP4),), ((0, NVFP4), (0, HIGH)), ((0, NVFP4), (9, HIGH), (4, NVFP4))])
def test_phases_start_at_zero_and_rise(phases) -> None:
    with pytest.raises(ValueError, match="phases must start at step 0 and rise"):
        ScheduledRecipe(phases)


def test_a_schedule_switches_a_running_model_and_nothing_else() -> None:
    layer = fp4engine.Linear(32, 32, bias=False)
    schedule = ScheduledRecipe(((0, NVFP4), (2, combine(HIGH, NVFP4))))
    inp = torch.randn(16, 32)
    for step in range(4):
        with fp4engine.autocast(recipe=schedule.at(step)):
            layer(inp)
    assert layer.executed.counts == {("fprop", "e2m1 x e2m1"): 2, ("fprop", "high_precision"): 2}


def test_custom_recipes_are_rules_too() -> None:
    role = QuantizerRole("linear", "input", "head", (16, 16))
    mixed = RuledRecipe(
        CustomRecipe(qfactory=lambda role: make_quantizer(NVFP4, role)), (Rule(zoo.make("mxfp8"), "head"),)
    )
    assert make_quantizer(mixed, role) == make_quantizer(zoo.make("mxfp8"), role)
    other = QuantizerRole("linear", "input", "layers.0", (16, 16))
    assert make_quantizer(mixed, other) == make_quantizer(NVFP4, other)
