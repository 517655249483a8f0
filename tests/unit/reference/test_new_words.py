"""A member that is new to an enumeration: nothing casts by it before somebody has written how."""

from types import SimpleNamespace

import pytest
import torch

from fp4engine import reference
from fp4engine.formats import E2M1, CastSpec, Correction, Outer, RoundingMode, ScaleRule, mx
from fp4engine.kernels import casts


@pytest.mark.parametrize("spec", [mx(E2M1), CastSpec()], ids=["power of two", "two levels"])
def test_the_reference_refuses_a_scale_rule_that_it_does_not_know(spec: CastSpec) -> None:
    """It took the last branch: the rule \"ceil\", or the largest magnitude."""
    rule = SimpleNamespace(value="new", is_power_of_two=spec.scale_rule.is_power_of_two, is_four_over_six=False)
    object.__setattr__(spec := spec.replace(), "scale_rule", rule)
    with pytest.raises(NotImplementedError, match="scale_rule=new"):
        reference.quantize(torch.randn(2, 32), spec)


@pytest.mark.parametrize(
    ("field", "members"),
    [("scale_rule", ScaleRule), ("rounding", RoundingMode), ("outer", Outer), ("correction", Correction)],
)
def test_kernels_cover_the_words_that_they_name(field: str, members: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that is missing among them goes to the reference; kernels took it for another one."""
    assert set(casts.COVERED[field]) == set(members)
    assert casts.supports(CastSpec(), torch.bfloat16)[0]
    monkeypatch.setitem(casts.COVERED, field, ())
    covered, why = casts.supports(CastSpec(), torch.bfloat16)
    assert not covered and f"{field}=" in why
