"""A plan says what each GEMM multiplies, left operand first, and equal plans are one frozen object."""

from dataclasses import FrozenInstanceError

import pytest

import fp4engine
from fp4engine.formats import CastSpec, Rotation, Signs
from fp4engine.functional import make_linear_plan
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling
from fp4engine.recipe.zoo import ZOO

FORMATS = {
    "mxfp4_weight_fp8": ("e4m3 x e2m1", "e4m3 x e4m3", "e4m3 x e4m3"),
    "mxfp6": ("e2m3 x e2m3", "e3m2 x e2m3", "e3m2 x e2m3"),
    "fp8_current": ("e4m3 x e4m3", "e5m2 x e4m3", "e5m2 x e4m3"),
    "nvfp4_weight_only": ("high x e2m1", "high_precision", "high_precision"),
    "mxfp4_tseng": ("high_precision", "e2m1 x e2m1", "e2m1 x e2m1"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_each_gemm(name: str) -> None:
    plan = make_linear_plan(ZOO[name].build(), "linear")
    assert plan.formats == dict(zip(("fprop", "dgrad", "wgrad"), FORMATS[name], strict=True))


def test_modules_with_equal_answers_share_one_plan() -> None:
    first, second = (fp4engine.Linear(16, 16, device="cpu") for _ in range(2))
    state = fp4engine.state.AutocastState(True, NVFP4BlockScaling())
    plan = first.plan(state)
    assert second.plan(state) is plan
    assert make_linear_plan(NVFP4BlockScaling(), "linear") is plan
    assert make_linear_plan(NVFP4BlockScaling(disable_rht=True), "linear") is not plan
    with pytest.raises(FrozenInstanceError):
        plan.backend = "reference"


@pytest.mark.parametrize("changes", [{"columnwise_source": "rowwise_dequantized"}, {"clipped_gradient": True}])
def test_what_a_gradient_does_not_take_is_refused_from_factories_too(changes: dict) -> None:
    """It was ignored: both operands were made of the gradient itself."""

    def qfactory(role):
        given = changes if role.tensor_type == "grad_output" else {}
        return fp4engine.Quantizer(CastSpec(), CastSpec(), **given)

    with pytest.raises(ValueError, match=r"grad_output\.c.* must be"):
        make_linear_plan(CustomRecipe(qfactory=qfactory), "linear")


def fresh(signs: Signs) -> CastSpec:
    return CastSpec(rotation=Rotation(signs=signs))


DRAWN_TWICE = {
    "wgrad": ("columnwise_spec", Signs.WGRAD, "weight", r"input\.columnwise has freshly drawn signs"),
    "dgrad": ("columnwise_spec", Signs.DGRAD, "input", r"weight\.columnwise has freshly drawn signs"),
    "fprop": ("rowwise_spec", Signs.DGRAD, "grad_output", r"fprop takes signs .* on input\.rowwise"),
}


@pytest.mark.parametrize("gemm", DRAWN_TWICE)
def test_signs_that_the_operands_of_a_product_would_draw_apart_are_refused_from_factories_too(gemm: str) -> None:
    """Both operands were rotated, each by signs of its own, and the product had nothing to do with the exact one."""
    side, signs, plain, words = DRAWN_TWICE[gemm]

    def qfactory(role):
        specs = {"rowwise_spec": CastSpec(), "columnwise_spec": CastSpec()}
        rotated = {"rowwise_spec": fresh(signs)} if gemm == "dgrad" else {side: fresh(signs)}
        given = rotated if role.tensor_type == "grad_output" else {side: fresh(signs)}
        return fp4engine.Quantizer(**specs | (given if role.tensor_type != plain else {}))

    with pytest.raises(ValueError, match=words):
        make_linear_plan(CustomRecipe(qfactory=qfactory), "linear")
