"""Factories whose forward and backward operands differ."""

from fp4engine.te.pytorch.custom_recipes.quantizer_factories import Role, linear_type, mxfp8_factory, nvfp4_factory
from fp4engine.te.pytorch.quantized_tensor import Quantizer
from fp4engine.te.pytorch.tensor import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer


def _hybrid(row: Quantizer, col: Quantizer, dequantized: bool = False) -> HybridQuantizer:
    source = "rowwise_dequantized" if dequantized else "original"
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source)


def high_precision_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """Products of fprop in high precision; dgrad and wgrad in MXFP8."""
    if linear_type(role) == "grad_output":
        return mxfp8_factory(role)
    return _hybrid(IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role: Role) -> Quantizer:
    """Products of fprop in MXFP8; dgrad and wgrad in NVFP4, dgrad's weight from what MXFP8 left of it."""
    kind = linear_type(role)
    if kind == "input":
        return _hybrid(mxfp8_factory(role), nvfp4_factory(role))
    if kind == "weight":
        return _hybrid(mxfp8_factory(role), NVFP4Quantizer(), dequantized=True)
    return nvfp4_factory(role) if kind == "grad_output" else mxfp8_factory(role)


def nvfp4_1d_weight_factory(role: Role) -> Quantizer:
    """NVFP4, with 1x16 blocks for weights: dgrad's made from what fprop's left."""
    if linear_type(role) == "weight":
        return _hybrid(NVFP4Quantizer(), NVFP4Quantizer(), dequantized=True)
    return nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """Products of fprop in MXFP8; dgrad and wgrad in high precision, on what MXFP8 left of input and weight."""
    return _fwd_with_high_precision_bwd(mxfp8_factory(role), role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """Products of fprop in NVFP4, the input scaled by row; dgrad and wgrad in high precision, on what NVFP4 left."""
    return _fwd_with_high_precision_bwd(_row_scaled(role), role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """Products of fprop in row-scaled NVFP4, in grouped modules; all else in MXFP8, on what NVFP4 left."""
    is_grouped = role is not None and role.module_type == "grouped_linear"
    if is_grouped and linear_type(role) in ("input", "weight"):
        return _hybrid(_row_scaled(role), mxfp8_factory(role), dequantized=True)
    return mxfp8_factory(role)


def _row_scaled(role: Role) -> NVFP4Quantizer:
    return NVFP4Quantizer(row_scaled_nvfp4=linear_type(role) == "input")


def _fwd_with_high_precision_bwd(forward: Quantizer, role: Role) -> Quantizer:
    kind = linear_type(role)
    if kind in ("input", "weight"):
        return _hybrid(forward, IdentityQuantizer(), dequantized=True)
    return IdentityQuantizer() if kind == "grad_output" else forward
