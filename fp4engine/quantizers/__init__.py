"""From a tensor to its operands."""

from fp4engine.quantizers.base import IdentityQuantizer, Quantizer
from fp4engine.quantizers.factory import make_quantizer, reference_quantizer
from fp4engine.quantizers.hybrid import HybridQuantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer

__all__ = [
    "HybridQuantizer",
    "IdentityQuantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "make_quantizer",
    "reference_quantizer",
]
