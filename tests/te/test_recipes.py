"""Recipes as TransformerEngine's scripts make and change them."""

import copy
import re

import pytest
import torch

from fp4engine import recipe as frozen
from fp4engine.recipe import Format, MMParams
from fp4engine.te.common import recipe as recipes
from fp4engine.te.pytorch import DelayedScalingRequest, Linear, autocast, quantized_model_init
from fp4engine.te.pytorch.quantization import _amax_and_scale_update


def test_arguments_by_place_are_in_transformer_engines_order() -> None:
    split = MMParams()
    hybrid, e4m3, e2m1 = Format.HYBRID, Format.E4M3, Format.E2M1
    high = "high_precision"
    made = [
        recipes.DelayedScaling(1, e4m3, 16, "most_recent", None, False, False, False, None),
        recipes.Float8CurrentScaling(True, e4m3, split, split, split, False, False, high),
        recipes.Float8BlockScaling(True, hybrid, 1, 1, 2, split, split, split, False, False, high),
        recipes.MXFP8BlockScaling(0, hybrid, False, False, high, True),
        recipes.NVFP4BlockScaling(True, True, True, True, "all", "none", "MSE", e2m1, e4m3, False, False, high),
    ]
    named = [
        frozen.DelayedScaling(
            margin=1, fp8_format=e4m3, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False
        ),
        frozen.Float8CurrentScaling(
            use_power_2_scales=True, fp8_format=e4m3, fp8_gemm_fprop=split, backward_override=high
        ),
        frozen.Float8BlockScaling(
            use_f32_scales=True,
            fp8_format=hybrid,
            w_block_scaling_dim=1,
            grad_block_scaling_dim=2,
            backward_override=high,
        ),
        frozen.MXFP8BlockScaling(fp8_format=hybrid, enable_2d_quantization=True, backward_override=high),
        frozen.NVFP4BlockScaling(
            disable_rht=True,
            disable_stochastic_rounding=True,
            disable_2d_quantization=True,
            row_scaled_activation=True,
            nvfp4_4over6="all",
            nvfp4_4over6_e4m3_use_256="none",
            nvfp4_4over6_err_mode="MSE",
            backward_override=high,
        ),
    ]
    assert [recipe.frozen for recipe in made] == named
    custom = recipes.CustomRecipe(print, hybrid, False, False, "dequantized", 32).frozen
    assert (custom.backward_override, custom.quantization_alignment) == ("dequantized", 32)


def test_what_no_recipe_has_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match="CustomRecipe: missing a required argument: 'qfactory'"):
        recipes.CustomRecipe()
    with pytest.raises(TypeError, match="NVFP4BlockScaling: got an unexpected keyword argument 'disable_rth'"):
        recipes.NVFP4BlockScaling(disable_rth=True)
    recipe = recipes.NVFP4BlockScaling()
    assert isinstance(recipe, recipes.Recipe) and not recipes.Recipe().nvfp4()
    with pytest.raises(AttributeError, match="NVFP4BlockScaling has no field 'disable_rth' to assign to; its fields"):
        recipe.disable_rth = True
    with pytest.raises(ValueError, match=r"fp8_gemm_fprop must be one of MMParams.* got 'fast'"):
        recipes.Float8CurrentScaling(fp8_gemm_fprop="fast")
    with pytest.raises(ValueError, match="scaling_factor_compute_algo must be a function, got 'x'"):
        recipes.DelayedScaling(scaling_factor_compute_algo="x")


@pytest.mark.parametrize("make", [recipes.DelayedScaling, lambda **given: DelayedScalingRequest(**given)])
def test_a_function_of_amaxes_sees_them_as_transformer_engine_lays_them(make) -> None:
    seen: list[torch.Tensor] = []

    def algorithm(history: torch.Tensor) -> torch.Tensor:
        seen.append(history.clone())
        return history.amax(dim=0)

    made = make(amax_history_len=3, amax_compute_algo=algorithm)
    recipe = made if isinstance(made, recipes.DelayedScaling) else recipes.CustomRecipe(lambda role: made)
    layer = Linear(16, 16)
    with torch.no_grad():
        for size in (1.0, 2.0, 3.0, 4.0):
            with autocast(recipe=recipe):
                layer(torch.full((16, 16), size))
    of_input = [history.flatten().tolist() for history in seen if history.max() >= 1.0]
    assert of_input == [[1.0, 0.0, 0.0], [2.0, 0.0, 1.0], [3.0, 1.0, 2.0]]
    assert all(history.shape == (3, 1) for history in seen)


def test_an_update_by_hand_calls_the_function_with_all_columns() -> None:
    history, scale = torch.tensor([[3.0, 5.0], [0.0, 7.0]]), torch.ones(2)
    _amax_and_scale_update(
        history, scale, 448.0, recipes.DelayedScaling(amax_compute_algo=lambda amaxes: amaxes.amax(0))
    )
    assert torch.equal(scale, 448.0 / torch.tensor([3.0, 7.0]))


@pytest.mark.parametrize("name", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize(("returned", "shown"), [(3.0, "3.0"), (torch.zeros(2, 1), "a tensor [2, 1]")])
def test_what_functions_of_amaxes_return_is_checked(name, returned, shown) -> None:
    layer, recipe = Linear(16, 16), recipes.DelayedScaling(**{name: lambda *given: returned})
    with torch.no_grad(), autocast(recipe=recipe):
        layer(torch.ones(16, 16))
    words = re.escape(f"{name} must return a tensor of one element for the amaxes of one tensor, got {shown}")
    with torch.no_grad(), autocast(recipe=recipe), pytest.raises(ValueError, match=words):
        layer(torch.ones(16, 16))


@pytest.mark.parametrize(
    "recipe", [recipes.DelayedScaling(), frozen.MXFP8BlockScaling()], ids=["TransformerEngine", "fp4engine"]
)
def test_a_recipe_in_the_place_of_a_flag_is_refused(recipe) -> None:
    for arguments, name in (((recipe,), "enabled"), ((True, recipe), "calibrating")):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got .* a recipe goes in recipe="):
            autocast(*arguments)
    with pytest.raises(ValueError, match=r"enabled must be True or False, got .* a recipe goes in recipe="):
        quantized_model_init(recipe)


def test_a_shallow_copy_is_a_recipe_of_its_own() -> None:
    recipe = recipes.NVFP4BlockScaling()
    other = copy.copy(recipe)
    other.disable_rht = True
    assert not recipe.disable_rht and not recipe.frozen.disable_rht and other.frozen.disable_rht
