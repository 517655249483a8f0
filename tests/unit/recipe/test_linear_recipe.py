"""Six casts that contradict each other raise, naming the argument, what came and what is allowed."""

import json

import pytest

from fp4engine import make_quantizer
from fp4engine.formats import Rotation, RoundingMode, Signs
from fp4engine.recipe import Casts, CustomRecipe, LinearRecipe, RuledRecipe, combine, recipe_from_json, zoo

RN = zoo.NEAREST
FRESH = RN.replace(rotation=Rotation(128, Signs.WGRAD))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": RN}, "input must be a Casts, got CastSpec"),
        (
            {"input": Casts(RN, RN.replace(rotation=Rotation()))},
            r"wgrad needs grad_output.columnwise and input.columnwise rotated alike.* got None and rht16-fixed",
        ),
        (
            {"weight": Casts(RN, RN.replace(rotation=Rotation())), "grad_output": Casts(RN, RN)},
            r"dgrad needs grad_output.rowwise and weight.columnwise rotated alike",
        ),
        (
            {"input": Casts(RN, FRESH), "grad_output": Casts(RN, FRESH)},
            "columnwise_source must be 'rowwise_dequantized' or 'saved_original', got 'original'",
        ),
        (
            {
                "input": Casts(RN, FRESH.replace(rotation=Rotation(128, Signs.DGRAD)), "rowwise_dequantized"),
                "grad_output": Casts(RN, FRESH.replace(rotation=Rotation(128, Signs.DGRAD))),
            },
            "wgrad takes signs Signs.FIXED, Signs.REPEATED, Signs.NONE, Signs.WGRAD, got Signs.DGRAD",
        ),
        (
            {"input": Casts(FRESH), "weight": Casts(FRESH)},
            "fprop takes signs Signs.FIXED, Signs.REPEATED, Signs.NONE, got Signs.WGRAD",
        ),
        (
            {"grad_output": Casts(RN, RN, "rowwise_dequantized")},
            "grad_output.columnwise_source must be 'original', .* got 'rowwise_dequantized'",
        ),
        ({"grad_output": Casts(RN, RN, clipped_gradient=True)}, "grad_output.clipped_gradient must be False"),
        ({"weight": Casts(RN, RN, "saved_original")}, "weight.columnwise_source='saved_original' is for inputs"),
        (
            {"grad_output": Casts(zoo.FOUR_OVER_SIX.replace(rounding=RoundingMode.STOCHASTIC))},
            "grad_output.rowwise has 4over6 with stochastic rounding, which is biased; allow_biased=True accepts it",
        ),
        ({"grad_output": Casts(zoo.EDEN)}, "correction=eden128 without freshly drawn signs"),
        ({"allow_biased": "yes"}, "allow_biased must be True or False, got 'yes'"),
        ({"backend": "cuda"}, "backend must be one of 'auto', 'reference', 'triton', 'native', got 'cuda'"),
    ],
)
def test_contradictions(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearRecipe(**arguments)


def test_biased_combinations_by_name() -> None:
    biased = zoo.FOUR_OVER_SIX.replace(rounding=RoundingMode.STOCHASTIC)
    assert LinearRecipe(grad_output=Casts(biased, biased), allow_biased=True).allow_biased


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"columnwise_source": "copy"},
            "must be one of 'original', 'rowwise_dequantized', 'saved_original', got 'copy'",
        ),
        (
            {"columnwise": RN, "clipped_gradient": True},
            "clipped_gradient=True needs a rowwise cast in blocks, whose scales tell what saturated, got None",
        ),
    ],
)
def test_casts_that_cannot_be(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Casts(**arguments)


def test_combine_takes_each_gemm_from_its_recipe() -> None:
    nvfp4, mxfp8 = zoo.make("nvfp4"), zoo.make("mxfp8")
    hybrid = combine(forward=mxfp8, backward=nvfp4)
    assert (hybrid.input.rowwise, hybrid.weight.rowwise) == (
        mxfp8.casts("input").rowwise,
        mxfp8.casts("weight").rowwise,
    )
    assert (hybrid.input.columnwise, hybrid.weight.columnwise) == (
        nvfp4.casts("input").columnwise,
        nvfp4.casts("weight").columnwise,
    )
    assert hybrid.grad_output == nvfp4.casts("grad_output")


def test_combine_accepts_the_bias_that_its_recipes_accept() -> None:
    biased = zoo.make("nvfp4_4over6_stochastic")
    assert combine(LinearRecipe(), biased).grad_output == biased.casts("grad_output")
    assert combine(biased, biased).allow_biased and not combine(zoo.make("nvfp4"), LinearRecipe()).allow_biased


@pytest.mark.parametrize("recipe", [CustomRecipe(qfactory=make_quantizer), RuledRecipe(LinearRecipe())])
def test_combine_names_the_recipe_whose_casts_depend_on_the_module(recipe) -> None:
    with pytest.raises(ValueError, match="forward must be a recipe that casts alike in all modules, got"):
        combine(recipe, LinearRecipe())
    with pytest.raises(ValueError, match="backward must be a recipe that casts alike in all modules, got"):
        combine(LinearRecipe(), recipe)


def test_json_names_what_is_wrong() -> None:
    data = json.loads(zoo.make("nvfp4_guarded").to_json())
    data["input"]["rowwise"] = "e2m1:what"
    with pytest.raises(ValueError, match="not a CastSpec key: 'e2m1:what'"):
        recipe_from_json(json.dumps(data))
    with pytest.raises(ValueError, match="input must be an object"):
        recipe_from_json(json.dumps({"recipe": "LinearRecipe", "input": 3}))
