"""The oracle in plain PyTorch: every kernel is held to its bytes."""

from fp4engine.reference.amax_history import hold_amax, record_amax
from fp4engine.reference.blackwell import SumRules, add_toward_zero, sum_by_groups, sums_of_pairs
from fp4engine.reference.cast import Cast, amax, decode, dequantize, outer_factor, quantize, within_range
from fp4engine.reference.checksum import checksum
from fp4engine.reference.column_sums import column_sums
from fp4engine.reference.gemm import gemm, gemm_factor
from fp4engine.reference.rounding import pack, pack6, pack_bits, unpack, unpack6, unpack_bits
from fp4engine.reference.scaling import round_outer_amax
from fp4engine.reference.swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "Cast",
    "SumRules",
    "add_toward_zero",
    "amax",
    "checksum",
    "column_sums",
    "decode",
    "dequantize",
    "gemm",
    "gemm_factor",
    "hold_amax",
    "outer_factor",
    "pack",
    "pack6",
    "pack_bits",
    "quantize",
    "record_amax",
    "round_outer_amax",
    "sum_by_groups",
    "sums_of_pairs",
    "swizzle_scales",
    "unpack",
    "unpack6",
    "unpack_bits",
    "unswizzle_scales",
    "within_range",
]
