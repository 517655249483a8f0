"""What a GPU can do, as bits that kernels take at compile time; 0 is plain Triton, which the interpreter runs too."""

PAIRS = 1
"""Packed FP32 to 16-bit conversions and 16-bit maxima in PTX: sm_80 and later."""
E4M3 = 2
"""E4M3 conversions: sm_89 and later."""
E2M1 = 4
"""``cvt.rn.satfinite.e2m1x2.f32``: sm_100, sm_103, sm_120, sm_121."""
OVERLAP = 8
"""Programmatic dependent launch: a kernel may begin while the one before it ends. sm_90 and later."""
WORDS = 16
"""Arithmetic on words of two BF16 values, with maxima of magnitudes: sm_86 and later."""


def hardware_of(capability: int) -> int:
    """Feature bits of a CUDA target, ``capability`` as 10 * major + minor."""
    return (
        PAIRS * (capability >= 80)
        | E4M3 * (capability >= 89)
        | OVERLAP * (capability >= 90)
        | E2M1 * (capability >= 100)
        | WORDS * (capability >= 86)
    )
