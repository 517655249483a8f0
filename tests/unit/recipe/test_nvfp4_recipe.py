"""NVFP4BlockScaling: a frozen value, tuned by TransformerEngine's arguments and flags."""

import json
from dataclasses import FrozenInstanceError

import pytest

from fp4engine.formats import Outer, RoundingMode, ScaleRule
from fp4engine.quantizers import make_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling, QParams, Recipe, recipe_from_json
from fp4engine.roles import QuantizerRole

FLAGS = {
    "NVTE_NVFP4_DISABLE_RHT": ("disable_rht", "1", True),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("disable_stochastic_rounding", "1", True),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("disable_2d_quantization", "1", True),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("row_scaled_activation", "1", True),
    "NVTE_NVFP4_4OVER6": ("nvfp4_4over6", "weights", "weights"),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("nvfp4_4over6_e4m3_use_256", "none", "none"),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("nvfp4_4over6_err_mode", "mse", "MSE"),
    "NVTE_BACKWARD_OVERRIDE": ("backward_override", "dequantized", "dequantized"),
    "NVTE_FP4_BACKEND": ("backend", "reference", "reference"),
}

each_flag = pytest.mark.parametrize(
    ("flag", "argument", "text", "value"), [(name, *rest) for name, rest in FLAGS.items()], ids=FLAGS
)


@each_flag
def test_a_flag_is_read_at_construction_and_shown(flag, argument, text, value, monkeypatch) -> None:
    default = getattr(NVFP4BlockScaling(), argument)
    assert default != value
    monkeypatch.setenv(flag, text)
    recipe = NVFP4BlockScaling()
    assert getattr(recipe, argument) == value
    assert f"{argument}={value!r}" in repr(recipe)
    assert recipe == NVFP4BlockScaling(**{argument: value})
    monkeypatch.delenv(flag)
    assert getattr(recipe, argument) == value, "a recipe keeps what it read"
    assert getattr(NVFP4BlockScaling(), argument) == default


@each_flag
def test_an_argument_wins_over_the_flag(flag, argument, text, value, monkeypatch) -> None:
    default = getattr(NVFP4BlockScaling(), argument)
    monkeypatch.setenv(flag, text)
    assert getattr(NVFP4BlockScaling(**{argument: default}), argument) == default


@each_flag
def test_a_bad_flag_raises_and_is_named(flag, argument, text, value, monkeypatch) -> None:
    for bad in ("yes", "2", "true"):
        monkeypatch.setenv(flag, bad)
        with pytest.raises(ValueError, match=f"{flag} must be .*{bad}"):
            NVFP4BlockScaling()


@pytest.mark.parametrize("argument", [argument for argument, *_ in FLAGS.values()] + ["fp8_dpa", "fp8_format"])
def test_a_bad_argument_raises_and_is_named(argument: str) -> None:
    allowed = "True or False" if isinstance(getattr(NVFP4BlockScaling(), argument), bool) else "one of"
    for bad in ("yes", 1, 0.0, object()):
        with pytest.raises(ValueError, match=f"{argument} must be {allowed}"):
            NVFP4BlockScaling(**{argument: bad})


def test_frozen_equal_hashable() -> None:
    one, same, other = NVFP4BlockScaling(), NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)
    assert one == same and hash(one) == hash(same) and one != other
    assert len({one, same, other}) == 2
    with pytest.raises(AttributeError):
        one.disable_rht = True
    with pytest.raises(TypeError, match="rth"):
        NVFP4BlockScaling(disable_rth=True)
    assert one.replace(disable_rht=True) == other and not one.disable_rht


def test_replace_does_not_read_flags_again(monkeypatch) -> None:
    recipe = NVFP4BlockScaling()
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1")
    assert recipe.replace(disable_rht=True).disable_2d_quantization is False


@pytest.mark.parametrize("changes", [{}, *({argument: value} for argument, _, value in FLAGS.values())], ids=str)
def test_json_there_and_back(changes, monkeypatch) -> None:
    recipe = NVFP4BlockScaling(**changes)
    text = recipe.to_json()
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert recipe_from_json(text) == recipe, "the file decides, not the environment"


@pytest.mark.parametrize(
    "data",
    [
        {"recipe": "Unheard"},
        {"recipe": []},
        {"recipe": None},
        {},
        [],
        3,
        {"recipe": "NVFP4BlockScaling", "disable_rth": True},
        {"recipe": "NVFP4BlockScaling", "disable_rht": "yes"},
        {"recipe": "NVFP4BlockScaling", "fp4_format": "e9m9"},
    ],
    ids=str,
)
def test_json_of_another_form_is_refused(data) -> None:
    with pytest.raises(ValueError):
        recipe_from_json(json.dumps(data))
    with pytest.raises(ValueError):
        recipe_from_json("{")


def test_qparams_of_each_role() -> None:
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert recipe.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    bare = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert bare.fp4_quant_fwd_inp == bare.fp4_quant_fwd_weight == bare.fp4_quant_bwd_grad == QParams()


def test_casts_of_each_role() -> None:
    recipe = NVFP4BlockScaling()
    inp, weight, grad = (make_quantizer(recipe, QuantizerRole("linear", t)) for t in ("input", "weight", "grad_output"))
    assert inp.rowwise_spec.rotation is None and inp.columnwise_spec.rotation is not None
    assert grad.rowwise_spec.rotation is None and grad.columnwise_spec.rotation == inp.columnwise_spec.rotation
    assert weight.rowwise_spec == weight.columnwise_spec and weight.rowwise_spec.block == (16, 16)
    assert {spec.rounding for spec in (grad.rowwise_spec, grad.columnwise_spec)} == {RoundingMode.STOCHASTIC}
    assert not inp.is_stochastic and not weight.is_stochastic
    assert len({inp.stream, weight.stream, grad.stream}) == 3


def test_options_reach_their_role_alone() -> None:
    def specs(**arguments):
        recipe = NVFP4BlockScaling(**arguments)
        return [make_quantizer(recipe, QuantizerRole("", t)).rowwise_spec for t in ("input", "weight", "grad_output")]

    assert [s.outer for s in specs(row_scaled_activation=True)] == [Outer.ROW, Outer.TENSOR, Outer.TENSOR]
    mae, plain = ScaleRule.FOUR_OVER_SIX_MAE, ScaleRule.AMAX
    for scope, rules in {"weights": [plain, mae, plain], "activations": [mae, plain, plain]}.items():
        assert [s.scale_rule for s in specs(nvfp4_4over6=scope)] == rules
    assert [s.scale_rule for s in specs(nvfp4_4over6="all")] == [mae, mae, plain]
    bounds = specs(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights")
    assert [s.scale_bound for s in bounds] == [448.0, 256.0, 448.0]


def test_custom_recipes_ask_their_factory() -> None:
    recipe = NVFP4BlockScaling()
    asked = []

    def factory(role: QuantizerRole):
        asked.append(role)
        return make_quantizer(recipe, role)

    role = QuantizerRole("linear", "weight", "fc1")
    custom = CustomRecipe(qfactory=factory)
    assert make_quantizer(custom, role) == make_quantizer(recipe, role) and asked == [role]
    assert custom == CustomRecipe(qfactory=factory)
    with pytest.raises(ValueError, match="qfactory must be callable"):
        CustomRecipe(qfactory=3)
    with pytest.raises(ValueError, match="must return a Quantizer"):
        make_quantizer(CustomRecipe(qfactory=lambda role: None), role)
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        custom.to_json()


def test_roles_and_recipes_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_type must be one of"):
        make_quantizer(NVFP4BlockScaling(), QuantizerRole("linear", "activation"))
    with pytest.raises(ValueError, match="use CustomRecipe"):
        make_quantizer(Recipe(), QuantizerRole("linear", "input"))


def test_qparams_set_the_switches() -> None:
    plain = QParams()
    recipe = NVFP4BlockScaling(fp4_quant_fwd_inp=plain, fp4_quant_fwd_weight=plain, fp4_quant_bwd_grad=plain)
    assert recipe == NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert NVFP4BlockScaling().replace(fp4_quant_fwd_weight=plain) == NVFP4BlockScaling(disable_2d_quantization=True)
    assert recipe.replace(disable_rht=False).fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)


@pytest.mark.parametrize(
    "given",
    [
        {"fp4_quant_fwd_inp": QParams(), "fp4_quant_bwd_grad": QParams(random_hadamard_transform=True)},
        {"fp4_quant_fwd_inp": QParams(random_hadamard_transform=True, stochastic_rounding=True)},
        {"fp4_quant_fwd_weight": QParams(random_hadamard_transform=True)},
        {"fp4_quant_bwd_grad": QParams(random_hadamard_transform=True, fp4_2d_quantization=True)},
        {"fp4_quant_bwd_grad": QParams(power_2_scale=True)},
        {"fp4_quant_bwd_grad": "fast"},
    ],
)
def test_qparams_that_no_switches_come_to_are_refused_by_name(given) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        NVFP4BlockScaling(**given)


def test_an_assignment_says_what_to_do_instead() -> None:
    with pytest.raises(FrozenInstanceError, match=r"write recipe = recipe\.replace\(disable_rht=\.\.\.\)"):
        NVFP4BlockScaling().disable_rht = True  # pyright: ignore[reportAttributeAccessIssue]
