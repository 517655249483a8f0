"""What scripts take from ``transformer_engine_torch``: element formats, casts, and norms and scales of many tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4engine.te.pytorch import multi_tensor
from fp4engine.te.pytorch.constants import DType, TE_DType_To_Torch
from fp4engine.te.pytorch.constants import FP8BwdTensorIdx as FP8BwdTensors
from fp4engine.te.pytorch.constants import FP8FwdTensorIdx as FP8FwdTensors
from fp4engine.te.pytorch.multi_tensor import *  # noqa: F403 - what its __all__ says
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from fp4engine.te.pytorch.state_manager import fused_amax_and_scale_update_after_reduction

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "dequantize",
    "fused_amax_and_scale_update_after_reduction",
    "quantize",
    "split_quantize",
]
__all__ += multi_tensor.__all__


def quantize(
    tensor: Tensor, quantizer: Quantizer, output: QuantizedTensor | None = None, noop: Tensor | None = None
) -> QuantizedTensor:
    """``tensor`` quantized; into ``output`` if that is given, unless ``noop`` holds something other than zero."""
    return quantizer(tensor) if output is None else quantizer.update_quantized(tensor, output, noop_flag=noop)


def dequantize(input: QuantizedTensor, otype: DType | int) -> Tensor:
    """The values, in the dtype that ``otype`` names."""
    dtype: torch.dtype = TE_DType_To_Torch[DType.cast(otype)]
    return input.dequantize(dtype=dtype)


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Quantizer], **_: Any
) -> list[QuantizedTensor]:
    """Consecutive slices of ``tensor``, of ``split_sections`` rows, each quantized by its own quantizer."""
    parts = tensor.split(list(split_sections))
    return [quantizer(part) for quantizer, part in zip(quantizer_list, parts, strict=True)]
