"""Element formats and casts as data."""

from fp4engine.formats.cast_spec import CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule, Signs
from fp4engine.formats.elements import (
    E1M2,
    E2M1,
    E2M1_RAZER,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP32,
    SECOND_TERM,
    TWO_E2M1,
    UE5M3,
    ElementFormat,
)
from fp4engine.formats.own_scale_rule import OwnScaleRule, register_scale_rule
from fp4engine.formats.presets import fp8, fp8_block, mx, mx_ocp_floor

__all__ = [
    "E1M2",
    "E2M1",
    "E2M1_RAZER",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP32",
    "SECOND_TERM",
    "TWO_E2M1",
    "UE5M3",
    "CastSpec",
    "Correction",
    "ElementFormat",
    "Outer",
    "OwnScaleRule",
    "Rotation",
    "RoundingMode",
    "ScaleRule",
    "Signs",
    "fp8",
    "fp8_block",
    "mx",
    "mx_ocp_floor",
    "register_scale_rule",
]
