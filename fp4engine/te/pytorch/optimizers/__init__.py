"""Optimizers by TransformerEngine's names, which are PyTorch's, and norms and scales of many tensors."""

from fp4engine.te.pytorch import multi_tensor
from fp4engine.te.pytorch.multi_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.optimizers.fused_adam import FusedAdam
from fp4engine.te.pytorch.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
__all__ += multi_tensor.__all__
