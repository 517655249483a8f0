"""E8M0 block scales: which power of two a block gets.

With ``f = floor(log2 amax)``, ``m = amax / 2^f`` in [1, 2) and ``emax`` the element's largest exponent, the biased
exponent is ``f - emax + 127`` plus

    floor      0
    midmax     1 if m > (max + half the spacing of elements there) / 2^emax
    option3    1 if m, rounded to the element's mantissa with ties up, reaches 2
    topbinade  1 if m > max / 2^emax
    ceil       1 if amax is no power of two  (ceil(log2 amax))
    ceil87     1 if m >= 2 * fl(0.87): amax is then at least 0.87 of the power of two above it

``std`` asks the block's variance instead, ``t = GAUSSIAN_VARIANCE * (<x, x> / n - (<x, 1> / n)^2)``, and
takes ``floor(log2 sqrt(t)) + 127``: half of the exponent of ``t``, rounded down. Sums are FP64, in the order of
:func:`scaling.neighbour_sum`, and so is every step.

``midmax`` turns halfway to the value that would follow the largest element: at 7 for E2M1, at 464 for E4M3.

Source: ROCm/tensorcast, branch ``triton``, ``tcast/torchcast.py`` and ``tcast/number.py``; OCP Microscaling Formats
v1.0, section 6.3 (floor); arXiv 2610.00053, section 2.2 (ceil87); IST-DASLab Quartet 00ccd38, ``mxfp4_triton.py``
(std).
"""

import torch
from torch import Tensor

from fp4engine.constants import CEIL87_TURN, GAUSSIAN_VARIANCE
from fp4engine.formats import ElementFormat, OwnScaleRule, ScaleRule
from fp4engine.reference.scaling import neighbour_sum


def power_of_two_scale(amax: Tensor, element: ElementFormat, rule: ScaleRule | OwnScaleRule) -> Tensor:
    """Biased E8M0 exponents, int32, for block maxima ``amax`` (FP32, non-negative); 0 for an empty block.

    Args:
        amax: any shape; non-finite entries give an unspecified exponent, the caller stores NaN for them.
    """
    fraction, exponent = torch.frexp(amax)
    mantissa = fraction * 2
    binade = 2.0**element.max_exponent
    if rule is ScaleRule.FLOOR:
        up = torch.zeros_like(amax, dtype=torch.bool)
    elif rule is ScaleRule.MIDMAX:
        up = mantissa > element.max_value / binade + 2.0 ** -(element.mantissa_bits + 1)
    elif rule is ScaleRule.OPTION3:
        up = mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1)
    elif rule is ScaleRule.TOPBINADE:
        up = mantissa > element.max_value / binade
    elif rule is ScaleRule.CEIL:
        up = mantissa > 1
    elif rule is ScaleRule.CEIL87:
        up = mantissa >= CEIL87_TURN
    else:
        raise NotImplementedError(f"the reference has no power of two for scale_rule={rule.value}")
    biased = exponent - 1 - element.max_exponent + 127 + up
    return torch.where(amax == 0, 0, biased.clamp(0, 254)).to(torch.int32)


def std_scale(blocks: Tensor) -> Tensor:
    """Biased E8M0 exponents, int32 [...], of FP32 ``blocks`` [..., n]; 0 for a block of one value.

    Entries that are not finite give an unspecified exponent, as above.
    """
    x, count = blocks.double(), blocks.shape[-1]
    mean = neighbour_sum(x) / count
    scaled = (neighbour_sum(x * x) / count - mean * mean) * GAUSSIAN_VARIANCE
    exponent = (scaled.view(torch.int64) >> 52 & 0x7FF) - 1023
    return torch.where(scaled > 0, ((exponent >> 1) + 127).clamp(0, 254), 0).to(torch.int32)
