"""TransformerEngine's quantizers, and the tensors that they make."""

import torch

from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer, rebuild
from fp4engine.te.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from fp4engine.te.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from fp4engine.te.pytorch.tensor.hybrid_tensor import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
)
from fp4engine.te.pytorch.tensor.identity_tensor import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from fp4engine.te.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from fp4engine.te.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
]

torch.serialization.add_safe_globals(
    [rebuild, DType, *(thing for name in __all__ if isinstance(thing := globals()[name], type))]
)
