"""Factories that give each role what one of the recipes gives it."""

from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.roles import DelayedScalingRequest, QuantizerRole
from fp4engine.te.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

Role = QuantizerRole | None


def linear_type(role: Role) -> str:
    """What the tensor is to a linear module; empty for others."""
    is_linear = role is not None and role.module_type in ("linear", "grouped_linear")
    return role.tensor_type if is_linear and role is not None else ""


def high_precision_factory(role: Role) -> IdentityQuantizer:
    """A quantizer that leaves every tensor in high precision."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: Role) -> DelayedScalingRequest:
    """A request for the delayed scaling of :class:`DelayedScaling`, whatever the role."""
    return DelayedScalingRequest()


def current_scaling_factory(role: Role) -> Float8CurrentScalingQuantizer:
    """FP8 with one scale per tensor, as :class:`Float8CurrentScaling` casts: gradients to E5M2, others to E4M3."""
    is_gradient = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_gradient else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: Role) -> Float8BlockQuantizer:
    """E4M3 as :class:`Float8BlockScaling` casts it: weights in 128x128 blocks, other tensors in 1x128 blocks."""
    dim = 2 if linear_type(role) == "weight" else 1
    return Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def mxfp8_factory(role: Role) -> MXFP8Quantizer:
    """E4M3 in 1x32 blocks, as :class:`MXFP8BlockScaling` casts every role."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: Role) -> NVFP4Quantizer:
    """NVFP4 as :class:`NVFP4BlockScaling`: weights in 16x16 blocks, others rotated, gradients also stochastic."""
    kind = linear_type(role)
    if kind == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=kind == "grad_output")
