"""A cast is a value with a short name that reads back."""

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4engine.formats import (
    E1M2,
    E2M1_RAZER,
    E4M3,
    E8M0,
    FORMATS,
    TWO_E2M1,
    UE5M3,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    Signs,
    fp8,
    mx,
    mx_ocp_floor,
)
from fp4engine.testing.strategies import nvfp4_specs


@given(
    spec=nvfp4_specs(),
    target=st.floats(0.1, 6.0),
    rotation=st.none() | st.builds(Rotation, st.sampled_from([16, 32, 64, 128]), st.sampled_from(Signs)),
)
def test_keys_read_back_to_an_equal_cast(spec: CastSpec, target: float, rotation: Rotation | None) -> None:
    spec = spec.replace(target=target, rotation=rotation)
    assert CastSpec.from_key(spec.key) == spec
    assert hash(CastSpec.from_key(spec.key)) == hash(spec)
    assert CastSpec.from_key(spec.key).key == spec.key


def test_different_casts_have_different_keys() -> None:
    base = CastSpec()
    changes = [
        {"block": (16, 16)},
        {"scale_rule": ScaleRule.FOUR_OVER_SIX_MAE},
        {"scale_bound": 256.0},
        {"target": 4.0},
        {"rounding": RoundingMode.STOCHASTIC},
        {"random_bits": 16},
        {"rotation": Rotation()},
        {"correction": Correction.SCALAR},
        {"scale": UE5M3},
        {"outer": Outer.NONE},
        {"search": (-1,)},
        {"search": (1, 4)},
        {"outer": Outer.NONE, "outer_amax": 1.0},
    ]
    assert len({base.key, *(base.replace(**change).key for change in changes)}) == 1 + len(changes)


@pytest.mark.parametrize(
    "key",
    ["", "e2m1", "e2m1:1x16", CastSpec().key + ":x", CastSpec().key + ":x=1", CastSpec().key.replace("e4m3", "e9")],
)
def test_other_strings_are_no_keys(key: str) -> None:
    with pytest.raises(ValueError, match="not a CastSpec key"):
        CastSpec.from_key(key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_bits": 4}, "random_bits must be 8 or 16"),
        ({"element": E1M2}, "target=6, the default, .* beyond that of element=e1m2, 1.75"),
        ({"scale": E8M0, "scale_bound": 1.0}, "does not go with scale"),
        ({"scale_rule": ScaleRule.FLOOR}, "does not go with scale"),
        ({"scale_bound": 449.0}, "scale_bound must be in"),
        (
            {"scale_bound": 2.0**-10},
            r"scale_bound must be in \[2\^-9, 448\] for e4m3 scales, .* got 0.0009765625 for e4m3",
        ),
        ({"scale": UE5M3, "scale_bound": 114689.0}, r"\[2\^-17, 114688\] for ue5m3"),
        ({"scale": UE5M3, "scale_bound": 2.0**-18}, r"\[2\^-17, 114688\] for ue5m3"),
        ({"target": 1e36}, "target must be .* a normal FP32 number whose product with scale_bound is one, got 1e.36"),
        ({"target": 1e-38}, "target must be .* got 1e-38"),
        ({"target": float("nan")}, "target must be .* got nan"),
        ({"scale": UE5M3, "scale_rule": ScaleRule.TOPBINADE}, "does not go with scale=ue5m3"),
        ({"scale": UE5M3, "scale_rule": ScaleRule.FOUR_OVER_SIX_MSE}, "4over6 needs element=e2m1 and scale=e4m3"),
        ({"scale": UE5M3, "correction": Correction.EDEN16}, "rounded into e4m3 scales"),
        ({"scale": UE5M3, "block": (0, 0)}, "leaves only the outer scale"),
        ({"element": UE5M3}, "element must be"),
        ({"element": E4M3, "scale_rule": ScaleRule.FOUR_OVER_SIX_MAE}, "4over6 needs"),
        ({"correction": Correction.EDEN16, "rounding": RoundingMode.STOCHASTIC}, "does not go with rounding"),
        ({"scale_rule": ScaleRule.FOUR_OVER_SIX_MSE, "block": (3, 16)}, "block rows must be a power of two"),
        ({"scale_rule": ScaleRule.FOUR_OVER_SIX_MSE, "block": (7, 32)}, "block rows must be a power of two"),
        ({"element": TWO_E2M1, "scale": UE5M3}, "2e2m1 needs scale=e4m3"),
        ({"element": TWO_E2M1, "scale_rule": ScaleRule.ALIGNED}, "2e2m1 needs scale=e4m3, scale_rule=amax"),
        ({"element": TWO_E2M1, "target": 6.75}, "target=6, the first term's largest, got .* 6.75"),
        ({"element": TWO_E2M1, "rounding": RoundingMode.STOCHASTIC}, "2e2m1 is rounded to nearest"),
        ({"element": TWO_E2M1, "correction": Correction.SCALAR}, "2e2m1 is rounded to nearest"),
        ({"element": TWO_E2M1, "outer": Outer.BLOCK128}, "no room for outer=1x128"),
        ({"element": E2M1_RAZER, "scale": UE5M3}, "e2m1_razer needs scale=e4m3, whose sign bit it takes, .* got ue5m3"),
        (
            {"element": E2M1_RAZER, "scale_rule": ScaleRule.ALIGNED},
            "e2m1_razer needs .* scale_rule=amax, got .* aligned",
        ),
        ({"element": E2M1_RAZER, "search": (1,)}, "search needs element=e2m1"),
        ({"element": E2M1_RAZER, "rounding": RoundingMode.STOCHASTIC}, "e2m1_razer compares .* rounding=stochastic"),
        ({"element": E2M1_RAZER, "rounding": RoundingMode.TRUNCATE}, "e2m1_razer compares .* rounding=truncate"),
        ({"element": E2M1_RAZER, "correction": Correction.SCALAR}, "e2m1_razer compares .* correction=scalar"),
        ({"element": E2M1_RAZER, "block": (16, 128)}, "at most 1024 elements"),
        ({"outer_amax": 1.0}, "outer_amax is for outer=none with e4m3 or ue5m3 scales, got outer=tensor"),
        ({"outer_amax": 0.0, "outer": Outer.NONE}, "outer_amax must be positive, .* got 0.0"),
        ({"outer_amax": float("nan"), "outer": Outer.NONE}, "outer_amax must be positive, .* got nan"),
        ({"outer_amax": float("inf"), "outer": Outer.NONE}, "outer_amax must be positive, .* got inf"),
        ({"search": (0, 1)}, r"search must be different offsets from -8 to 8 without 0, got \(0, 1\)"),
        ({"search": (1, 1)}, "search must be different offsets"),
        ({"search": (9,)}, "search must be different offsets"),
        (
            {"search": (1,), "scale": UE5M3},
            "search needs element=e2m1, scale=e4m3 and scale_rule=amax, got e2m1, ue5m3",
        ),
        ({"search": (1,), "element": TWO_E2M1}, "search needs element=e2m1"),
        ({"search": (1,), "scale_rule": ScaleRule.FOUR_OVER_SIX_MSE}, "search needs .* 4over6_mse"),
        (
            {"search": (1,), "rounding": RoundingMode.STOCHASTIC},
            "search compares errors of elements rounded to nearest",
        ),
        ({"search": (1,), "block": (3, 16)}, "search adds the errors .* power of two"),
    ],
)
def test_contradictions_raise(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CastSpec(**changes)
    with pytest.raises(ValueError, match="Rotation size"):
        Rotation(24)


def test_all_that_contradicts_itself_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"scale_bound must be in .* for e8m0; scale_rule=amax .*; .* outer"):
        CastSpec(scale=E8M0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("element", "e2m1"),
        ("block", 16),
        ("block", [1, 16]),
        ("block", (1, 16.0)),
        ("block", (True, 16)),
        ("scale", None),
        ("scale_rule", "amax"),
        ("scale_bound", "448"),
        ("target", True),
        ("target", None),
        ("outer", "row"),
        ("rounding", "even"),
        ("random_bits", 8.0),
        ("rotation", 16),
        ("correction", None),
        ("outer_amax", "1"),
        ("outer_amax", True),
        ("search", [1]),
        ("search", (1.0,)),
        ("search", (True,)),
    ],
)
def test_other_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"CastSpec {name} must be .*, got {re.escape(repr(value))}"):
        CastSpec(**{name: value})


def test_rotations_and_presets_refuse_other_types() -> None:
    with pytest.raises(ValueError, match=r"Rotation size must be 16, 32, 64 or 128, got 16\.0"):
        Rotation(16.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Rotation signs must be one of Signs.FIXED, .*, got 'fixed'"):
        Rotation(16, "fixed")  # pyright: ignore[reportArgumentType]
    for preset in (mx, fp8, mx_ocp_floor):
        with pytest.raises(ValueError, match=r"element must be one of .*, got 'e4m3'"):
            preset("e4m3")  # pyright: ignore[reportArgumentType]


def test_equal_casts_have_one_key() -> None:
    assert CastSpec(target=6, scale_bound=448).key == CastSpec().key
    assert CastSpec(search=(4, 1, -1)) == CastSpec(search=(-1, 1, 4))
    assert CastSpec(outer=Outer.NONE, outer_amax=1).key == CastSpec(outer=Outer.NONE, outer_amax=1.0).key


def test_fields_that_few_casts_have_are_in_the_keys_of_those_alone() -> None:
    """Recorded keys, in files of recipes for instance, are still those of the casts."""
    assert CastSpec().key == "e2m1:1x16:e4m3:amax:448.0:6.0:tensor:even:8:none:none"
    assert CastSpec(search=(5, -1)).key == f"{CastSpec().key}:search=-1,5"


def test_formats_say_what_they_hold() -> None:
    for element in FORMATS.values():
        assert 2.0**element.max_exponent <= element.max_value < 2.0 ** (element.max_exponent + 1)
        assert str(element) == element.name
    assert {name: FORMATS[name].max_value for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")} == {
        "e2m1": 6.0,
        "e2m3": 7.5,
        "e3m2": 28.0,
        "e4m3": 448.0,
        "e5m2": 57344.0,
    }


def test_a_copy_of_a_cast_is_the_cast() -> None:
    """Guards of compiled code compare copied quantizers in every step: 6 us where the casts are other objects."""
    spec = CastSpec(block=(16, 16))
    assert copy.deepcopy(spec) is spec and copy.deepcopy([spec])[0] is spec
