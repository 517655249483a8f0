"""Number formats as data: what a code of each format means."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ElementFormat:
    """A small float: sign, ``exponent_bits`` biased by ``bias``, ``mantissa_bits``.

    ``value = (-1)^s * 2^(e - bias) * (1 + m / 2^mantissa_bits)``, subnormal at ``e == 0``. A code of two terms holds
    two of these, the first in its low bits, and its value is ``first + second / 8``.

    Attributes:
        name: lower-case standard name, unique; what a :class:`CastSpec` key prints.
        exponent_bits, mantissa_bits, bias: the bit layout, most significant first after the sign.
        max_value: largest finite magnitude.
        signed: False for pure scales (E8M0, UE5M3).
        each: the format of both terms, where a code holds two; None where it holds one value.
        special: magnitude that the code of -0 stands for, in the middle between two others; its sign is the sign bit of
            the block's scale. 0 if that code is -0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    signed: bool = True
    each: "ElementFormat | None" = None
    special: float = 0.0

    @property
    def terms(self) -> int:
        """How many codes of :attr:`term` a code holds: 1 or 2."""
        return 1 if self.each is None else 2

    @property
    def term(self) -> "ElementFormat":
        """The format of the first term; the format itself if it has but one."""
        return self.each or self

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (self.exponent_bits + self.mantissa_bits + self.signed) * self.terms

    @property
    def significant_bits(self) -> int:
        """Significant bits that hold any value; every sum of two terms is a multiple of the second's least step."""
        if self.terms == 1:
            return self.mantissa_bits + 1 + (self.special > 0)  # special halves a step
        return int(self.max_value / self.min_value * SECOND_TERM).bit_length()

    @property
    def min_value(self) -> float:
        """The smallest positive magnitude of a term."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def special_reach(self) -> float:
        """What is at most so far from :attr:`special` has it for a neighbour: half the distance to the next others."""
        return 2.0 ** (math.frexp(self.special)[1] - self.mantissa_bits - 3)

    @property
    def storage_bits(self) -> int:
        """Bits that a stored code takes: two 4-bit codes share a byte, wider ones take a byte each."""
        return 4 if self.bits == 4 else 8

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's dtype of stored values; uint8 codes for UE5M3, which PyTorch lacks."""
        return _TORCH_DTYPES[self.name]

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest binade: ``floor(log2(max_value))``."""
        return math.frexp(self.max_value)[1] - 1

    def __str__(self) -> str:
        return self.name


SECOND_TERM = 8
"""What the second of two terms is divided by: nearest rounding to E2M1 leaves at most 1, which eight times is 8, and
codes reach 6. The squared error is then least among powers of two, and sums times an E4M3 scale are exact in FP16."""

E1M2 = ElementFormat("e1m2", 1, 2, 1, 1.75)
"""The uniform 4-bit grid: every multiple of 0.25 up to 1.75, which scaled is INT4 without -8."""
E2M1 = ElementFormat("e2m1", 2, 1, 1, 6.0)
TWO_E2M1 = ElementFormat("2e2m1", 2, 1, 1, 6.75, each=E2M1)
"""The sum of two E2M1 codes, the second of what the first leaves: a product by it is two FP4 products."""
E2M1_RAZER = ElementFormat("e2m1_razer", 2, 1, 1, 6.0, special=5.0)
"""E2M1 whose code of -0 is 5 or -5, as the block chooses.

Source: arXiv 2501.04052; NVFP4-RaZeR 42c18e1, ``quantize/quantizer.py``, ``quant_nvfp4_razer_e4m3``.
"""
E2M3 = ElementFormat("e2m3", 2, 3, 1, 7.5)
E3M2 = ElementFormat("e3m2", 3, 2, 3, 28.0)
E4M3 = ElementFormat("e4m3", 4, 3, 7, 448.0)
E5M2 = ElementFormat("e5m2", 5, 2, 15, 57344.0)
E8M0 = ElementFormat("e8m0", 8, 0, 127, 2.0**127, signed=False)
UE5M3 = ElementFormat("ue5m3", 5, 3, 15, 114688.0, signed=False)
"""E4M3's sign bit spent on its exponent: block scales from 2^-17 to 114,688, code 0xFF is NaN.

Source: OCP E5M3; PTX ISA 9.4, ``ue5m3``.
"""
FP32 = ElementFormat("fp32", 8, 23, 127, 3.4028234663852886e38)

FORMATS = {f.name: f for f in (E1M2, E2M1, TWO_E2M1, E2M1_RAZER, E2M3, E3M2, E4M3, E5M2, E8M0, UE5M3, FP32)}
"""All formats by name."""

_TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "ue5m3": torch.uint8,
    "fp32": torch.float32,
}
