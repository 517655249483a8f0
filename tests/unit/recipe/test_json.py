"""JSON of recipes is read as it was written, or refused with what was given and what is allowed."""

import json
import math

import pytest

from fp4engine.formats import CastSpec
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, ScheduledRecipe, recipe_from_json, zoo

KEY = CastSpec().key
SIDES = {"rowwise": KEY, "columnwise": KEY}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input": {"rowise": KEY, "columnwise": KEY}}, r"input has no rowise \(did you mean rowwise\?\)"),
        (
            {"weight": {**SIDES, "columnwise_sorce": "original"}},
            r"columnwise_sorce \(did you mean columnwise_source\?\)",
        ),
        ({"weight": {"rowwise": KEY}}, "weight has no columnwise; null leaves the operand in high precision"),
        ({"weight": {"rowwise": "", "columnwise": KEY}}, "not a CastSpec key: ''"),
        ({"weight": {"rowwise": False, "columnwise": KEY}}, "not a CastSpec key: False"),
        ({"inputs": SIDES}, r"LinearRecipe has no inputs \(did you mean input\?\); its fields are .*input, weight"),
        ({"recipe": "NVFP4BlockScaling", "disable_rth": True}, r"no disable_rth \(did you mean disable_rht\?\)"),
        ({"recipe": "DelayedScaling", "margin": "3"}, "margin must be an integer from 0 to 7, got '3'"),
        (
            {"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": {"split": True}},
            r"fp8_gemm_fprop has no split \(did you mean use_split_accumulator\?\)",
        ),
        ({"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": 3}, "fp8_gemm_fprop must be an object of use_split"),
        (
            {"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": {"use_split_accumulator": "no"}},
            "use_split_accumulator must be True or False, got 'no'",
        ),
        ({"recipe": "RuledRecipe"}, "RuledRecipe cannot be made of .*default"),
        ({"recipe": "RuledRecipe", "default": {"recipe": "LinearRecipe"}, "rules": 3}, "rules must be a list, got 3"),
        (
            {"recipe": "RuledRecipe", "default": {"recipe": "LinearRecipe"}, "rules": [{"nmae": "head"}]},
            r"a rule has no nmae \(did you mean name\?\)",
        ),
        (
            {
                "recipe": "RuledRecipe",
                "default": {"recipe": "LinearRecipe"},
                "rules": [{"recipe": {"recipe": "LinearRecipe"}, "blocks": [1]}],
            },
            r"blocks must be \(first, end\)",
        ),
        ({"recipe": "ScheduledRecipe", "phases": [3]}, "a phase must be a list, got 3"),
        ({"recipe": "ScheduledRecipe", "phases": [[0]]}, r"a phase must be \[first step, recipe\]"),
        (
            {"recipe": "ScheduledRecipe", "phases": [["0", {"recipe": "LinearRecipe"}]]},
            "phases must start at step 0 and rise in whole steps",
        ),
        ({"recipe": "ScheduledRecipe", "phases": [[0, None]]}, "a recipe must be a JSON object with the key 'recipe'"),
    ],
    ids=str,
)
def test_keys_and_values_of_another_kind_are_named(data, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from_json(json.dumps({"recipe": "LinearRecipe", **data}))


@pytest.mark.parametrize(
    ("recipe", "key"), [("NVFP4BlockScaling", "fp4_format"), ("Float8CurrentScaling", "fp8_format")]
)
def test_a_format_that_is_none_is_named(recipe: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be one of 'e2m1', .*'hybrid', got 'x'"):
        recipe_from_json(json.dumps({"recipe": recipe, key: "x"}))


@pytest.mark.parametrize("data", [{}, {"recipe": "nvfp4"}, {"recipe": 3}], ids=str)
def test_json_that_names_no_kind_of_recipe_is_told_the_key(data) -> None:
    with pytest.raises(ValueError, match=r"names its kind under the key 'recipe', one of CustomRecipe, .*; got"):
        recipe_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "nonsense", None, b"{}", 3])
def test_what_is_no_json_is_shown(text) -> None:
    with pytest.raises(ValueError, match="text must be the JSON that"):
        recipe_from_json(text)


MANY = {f"key {number}": number for number in range(500)}


@pytest.mark.parametrize(
    "data",
    [
        list(MANY),
        {"recipe": MANY},
        {"recipe": "x" * 5000},
        {"recipe": "NVFP4BlockScaling", **MANY},
        {"recipe": "NVFP4BlockScaling", "x" * 5000: 1},
        {"recipe": "LinearRecipe", "input": list(MANY)},
        {"recipe": "LinearRecipe", "input": {"rowwise": MANY, "columnwise": None}},
        {"recipe": "RuledRecipe", "default": {"recipe": "LinearRecipe"}, "rules": MANY},
        {"recipe": "ScheduledRecipe", "phases": [list(MANY)]},
    ],
)
def test_a_file_that_is_another_one_is_not_printed(data) -> None:
    with pytest.raises(ValueError) as refused:
        recipe_from_json(json.dumps(data))
    assert len(str(refused.value)) < 1000


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="says 'disable_rht' twice"):
        recipe_from_json('{"recipe": "NVFP4BlockScaling", "disable_rht": true, "disable_rht": false}')


@pytest.mark.parametrize("key", [None, 3, b"e2m1", ["e2m1"], "", "e2m1", KEY + ":"])
def test_what_is_no_key_of_a_cast_is_shown(key) -> None:
    with pytest.raises(ValueError, match=r"not a CastSpec key: .*spec.key prints"):
        CastSpec.from_key(key)


@pytest.mark.parametrize("step", [math.nan, math.inf, 2.5, None, "3", -1, True])
def test_a_step_that_is_no_whole_number_is_refused(step) -> None:
    schedule = ScheduledRecipe(((0, NVFP4BlockScaling()), (5, LinearRecipe())))
    for recipe in (schedule, RuledRecipe(schedule), NVFP4BlockScaling(), LinearRecipe()):
        with pytest.raises(ValueError, match="step must be an integer of at least 0, got"):
            recipe.at(step)


@pytest.mark.parametrize(
    "rule",
    [{"name": 3}, {"blocks": (1.0, 2.0)}, {"blocks": [0, 1]}, {"narrower_than": "64"}, {"narrower_than": -3}],
    ids=str,
)
def test_a_rule_of_other_kinds_is_refused(rule) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(rule))} must be"):
        Rule(LinearRecipe(), **rule)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_recipe_prints_in_the_words_of_the_book(name: str) -> None:
    recipe = zoo.make(name)
    assert len(repr(recipe)) < 350
    for role in ("input", "weight", "grad_output"):
        for spec in (recipe.casts(role).rowwise, recipe.casts(role).columnwise):
            assert spec is None or not isinstance(recipe, LinearRecipe) or repr(spec.label) in repr(recipe)
            assert spec is None or eval(repr(spec), {"CastSpec": CastSpec}) == spec


def test_what_differs_is_printed(monkeypatch) -> None:
    assert repr(NVFP4BlockScaling()) == "NVFP4BlockScaling()"
    assert repr(NVFP4BlockScaling(nvfp4_4over6="all")) == "NVFP4BlockScaling(nvfp4_4over6='all')"
    assert repr(LinearRecipe()) == "LinearRecipe()"
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert repr(NVFP4BlockScaling()) == "NVFP4BlockScaling(disable_rht=True)"
    assert repr(NVFP4BlockScaling(disable_rht=False)) == "NVFP4BlockScaling()"


def test_the_books_nvfp4_is_nvidias_recipe() -> None:
    assert zoo.make("nvfp4") == NVFP4BlockScaling()
    assert zoo.make("nvfp4", disable_rht=True) == NVFP4BlockScaling(disable_rht=True)
