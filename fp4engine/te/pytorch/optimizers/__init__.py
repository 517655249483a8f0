"""Optimizers by TransformerEngine's names, which are PyTorch's, and norms and scales of many tensors."""

from fp4engine.te.pytorch.multi_tensor import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from fp4engine.te.pytorch.optimizers.fused_adam import FusedAdam
from fp4engine.te.pytorch.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]
