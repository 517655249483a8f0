"""A flag is read, warned of, or refused; none is ignored."""

import warnings

import pytest

import fp4engine
from fp4engine import environment
from fp4engine.recipe import Float8CurrentScaling, LinearRecipe, NVFP4BlockScaling


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_looked_at", set())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVTE_NVFP4_DISABLE_RTH", "NVTE_NVFP4_DISABLE_RHT"),
        ("NVTE_NVFP4_DISABLE_SR", "NVTE_NVFP4_DISABLE_RHT"),
        ("NVTE_NVFP4_4OVER6_ERRMODE", "NVTE_NVFP4_4OVER6_ERR_MODE"),
        ("NVTE_FP4_BACKENDS", "NVTE_FP4_BACKEND"),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALE", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        ("NVTE_BACKWARD_OVERIDE", "NVTE_BACKWARD_OVERRIDE"),
    ],
)
def test_a_name_that_nobody_reads_is_warned_of_once(name: str, nearest: str, monkeypatch) -> None:
    monkeypatch.setenv(name, "1")
    said = f"nobody reads the environment flag {name}; did you mean {nearest}\\? The flags are .*_STOCHASTIC_ROUNDING"
    with pytest.warns(UserWarning, match=said) as seen:
        NVFP4BlockScaling()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NVFP4BlockScaling()
        LinearRecipe()


def test_an_empty_flag_is_an_unset_one(monkeypatch) -> None:
    for name in sorted(environment._fields):
        monkeypatch.setenv(name, "")
    assert NVFP4BlockScaling() == NVFP4BlockScaling(backend="auto") and not NVFP4BlockScaling().disable_rht
    assert not Float8CurrentScaling().use_power_2_scales
    assert environment.read_flag("TRITON_INTERPRET_NOT", default=True)


def test_any_recipe_looks(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RTH", "1")
    for make in (LinearRecipe, Float8CurrentScaling, fp4engine.get_default_recipe):
        environment._looked_at.clear()
        with pytest.warns(UserWarning, match="NVTE_NVFP4_DISABLE_RTH"):
            make()


def test_names_that_are_read_and_those_of_others_are_left_alone(monkeypatch) -> None:
    of_others = ("NVTE_DEBUG", "NVTE_FLASH_ATTN", "NVTE_FP8_DPA_BWD", "NVTE_GROUPED_LINEAR_SINGLE_PARAM")
    for name in ("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", *of_others):
        monkeypatch.setenv(name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NVFP4BlockScaling().disable_rht


@pytest.mark.parametrize(
    "name",
    [
        "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        "NVTE_USE_FAST_MATH",
        "NVTE_KEEP_BACKWARD_UNQUANTIZED",
        "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
        "NVTE_DPA_FP8_RECIPE_DPA",
        "NVTE_DPA_FP8_RECIPE_MHA",
    ],
)
def test_what_is_not_implemented_is_refused_by_name(monkeypatch, name) -> None:
    monkeypatch.setenv(name, "1")
    for make in (NVFP4BlockScaling, LinearRecipe):
        with pytest.raises(ValueError, match=f"{name}='1' is not implemented.*'0'"):
            make()
    monkeypatch.setenv(name, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NVFP4BlockScaling()
