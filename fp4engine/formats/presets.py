"""CastSpecs of the formats that have names of their own; NVFP4 is ``CastSpec()``."""

from fp4engine.arguments import require_bool, require_integer
from fp4engine.formats.cast_spec import CastSpec, Outer, RoundingMode, ScaleRule
from fp4engine.formats.elements import E8M0, FP32, ElementFormat

LARGEST_MARGIN = 126
"""Beyond, ``max / 2^margin`` of a format would be no normal FP32 number."""


def mx(
    element: ElementFormat,
    scale_rule: ScaleRule = ScaleRule.FLOOR,
    rounding: RoundingMode = RoundingMode.EVEN,
    rows: int = 1,
) -> CastSpec:
    """Microscaling: blocks of 32 (or ``rows`` x 32) with one power of two, no outer scale.

    Args:
        element: E2M1 (MXFP4), E2M3 or E3M2 (MXFP6), E4M3 or E5M2 (MXFP8).
        scale_rule: one of the power-of-two rules; FLOOR is the standard's.

    Source: OCP Microscaling Formats v1.0, section 6.3; rules from ROCm/tensorcast ``docs/modes.md``.
    """
    return CastSpec(
        element=element,
        block=(rows, 32),
        scale=E8M0,
        scale_rule=scale_rule,
        scale_bound=1.0,
        target=_largest(element),
        outer=Outer.NONE,
        rounding=rounding,
    )


def mx_ocp_floor(element: ElementFormat) -> CastSpec:
    """The default of microxcaling: ``round="nearest"`` (ties away from zero), ``shared_exp_method="max"``, no flush.

    Values agree bit for bit on BF16 and FP16 inputs. On FP32 inputs microxcaling's ``floor(log2(x))`` and
    ``floor(x + 0.5)`` themselves round just below a power of two and just below a tie; this cast does not.

    Source: microsoft/microxcaling 7bc4195, ``mx/mx_ops.py`` ``_quantize_mx``.
    """
    return mx(element, ScaleRule.FLOOR, RoundingMode.AWAY)


def fp8(element: ElementFormat, *, power_of_two: bool = False, margin: int = 0) -> CastSpec:
    """FP8 with one scale per tensor: ``code = element(x * max / A / 2^margin)``.

    Args:
        power_of_two: round ``max / A`` down to a power of two.
        margin: binades left free above the amax, 0 to 126.

    Raises:
        ValueError: ``element`` is no format, ``power_of_two`` no bool, or ``margin`` none of these integers.
    """
    require_bool("power_of_two", power_of_two)
    margin = require_integer("margin", margin, 0, LARGEST_MARGIN)
    return CastSpec(
        element=element,
        block=(0, 0),
        scale=E8M0 if power_of_two else FP32,
        scale_rule=ScaleRule.TOPBINADE if power_of_two else ScaleRule.AMAX,
        scale_bound=1.0,
        target=_largest(element) / 2.0**margin,
    )


def fp8_block(element: ElementFormat, rows: int, *, power_of_two: bool = True) -> CastSpec:
    """FP8 in blocks of ``rows`` x 128 with their own FP32 scale, or the power of two that is not below it.

    Args:
        rows: 1 or 128.

    Raises:
        ValueError: ``element`` is no format, ``power_of_two`` no bool, or ``rows`` no size of a block.
    """
    require_bool("power_of_two", power_of_two)
    return CastSpec(
        element=element,
        block=(rows, 128),
        scale=E8M0 if power_of_two else FP32,
        scale_rule=ScaleRule.TOPBINADE if power_of_two else ScaleRule.AMAX,
        scale_bound=1.0,
        target=_largest(element),
        outer=Outer.NONE,
    )


def _largest(element: ElementFormat) -> float:
    """The largest magnitude of ``element``.

    Raises:
        ValueError: it is no format.
    """
    if not isinstance(element, ElementFormat):
        raise ValueError(f"element must be one of fp4engine.formats.FORMATS, such as E4M3, got {element!r}")
    return element.max_value
