"""TransformerEngine's quantized tensors, by the attributes that it gives what it stores."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.formats import E2M1
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4 by TransformerEngine's attributes: what it stores, as views or copies of what is stored here."""

    _quantizer: Quantizer
    _with_gemm_swizzled_scales = False
    _fp4_dtype = DType.kFloat4E2M1

    @property
    def _rowwise_data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data.view(*self.operands.shape[:-1], -1)

    @property
    def _columnwise_data(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.rowwise)

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.columnwise)

    @property
    def _amax_rowwise(self) -> Tensor | None:
        return None if self.operands.rowwise is None else self.operands.rowwise.amax

    @property
    def _amax_columnwise(self) -> Tensor | None:
        return None if self.operands.columnwise is None else self.operands.columnwise.amax

    @property
    def _row_scaled_nvfp4(self) -> bool:
        return getattr(self._quantizer, "row_scaled_nvfp4", False)

    @property
    def _nvfp4_use_4over6(self) -> bool:
        return getattr(self._quantizer, "nvfp4_use_4over6", False)

    @property
    def _nvfp4_e4m3_max(self) -> int:
        return getattr(self._quantizer, "nvfp4_e4m3_max", 448)


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """What :class:`NVFP4Quantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return _is_cast(weight, E2M1.name, 16)


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8 by TransformerEngine's attributes; its columnwise side lies as the tensor does."""

    _quantizer: Quantizer
    _with_gemm_swizzled_scales = False

    @property
    def _fp8_dtype(self) -> DType:
        return getattr(self._quantizer, "dtype", DType.kFloat8E4M3)

    @property
    def _rowwise_data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data[:, : side.cols].reshape(self.operands.shape)

    @property
    def _columnwise_data(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data[:, : side.cols].T.reshape(self.operands.shape)

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.rowwise)

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        side = self.operands.columnwise
        if side is None or side.scale_inv is None:
            return None
        scales = side.scale_inv.view(torch.uint8).T
        return pad(scales, (0, -scales.shape[1] % 128, 0, -scales.shape[0] % 4))


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """What :class:`MXFP8Quantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return _is_cast(weight, "", 32)


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale, by TransformerEngine's attributes."""

    _quantizer: Quantizer

    @property
    def _fp8_dtype(self) -> DType:
        return getattr(self._quantizer, "dtype", DType.kFloat8E4M3)

    @property
    def _data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data[:, : side.cols].reshape(self.operands.shape)

    @property
    def _transpose(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data[:, : side.cols]

    @property
    def _transpose_invalid(self) -> bool:
        return self.operands.columnwise is None

    @property
    def _scale_inv(self) -> Tensor:
        side = self.operands.rowwise or self.operands.columnwise
        assert side is not None and side.spec is not None and side.amax is not None
        return side.amax / side.spec.numerator


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """What :class:`Float8Quantizer` and :class:`Float8CurrentScalingQuantizer` make."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return _is_cast(weight, "", 0)


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 in blocks, by TransformerEngine's attributes; scales are [rows, blocks], without its padding."""

    _quantizer: Quantizer

    @property
    def _fp8_dtype(self) -> DType:
        return getattr(self._quantizer, "dtype", DType.kFloat8E4M3)

    @property
    def _is_2D_scaled(self) -> bool:
        return getattr(self._quantizer, "block_scaling_dim", 2) == 2

    @property
    def _rowwise_data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data[:, : side.cols].reshape(self.operands.shape)

    @property
    def _columnwise_data(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data[:, : side.cols]

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        return None if self.operands.rowwise is None else self.operands.rowwise.scale_inv

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        return None if self.operands.columnwise is None else self.operands.columnwise.scale_inv


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """What :class:`Float8BlockQuantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return _is_cast(weight, "", 128)


class IdentityTensorStorage(QuantizedTensorStorage):
    """High precision in the dress of a quantized tensor."""


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """What :class:`IdentityQuantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return False


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two sides by two quantizers."""

    _quantizer: Quantizer

    def _side(self, name: str) -> Any:
        side: Operand | None = getattr(self.operands, name)
        if side is None:
            return None
        quantizer: Quantizer = getattr(self._quantizer, f"{name}_quantizer")
        alone = {"rowwise": None, "columnwise": None, name: side}
        return quantizer.tensor_class.of(Operands(self.operands.shape, self.operands.dtype, **alone), quantizer)

    @property
    def rowwise_sub_storage(self) -> Any:
        """The rowwise side as a tensor of its own quantizer."""
        return self._side("rowwise")

    @property
    def columnwise_sub_storage(self) -> Any:
        """The columnwise side as a tensor of its own quantizer."""
        return self._side("columnwise")

    @property
    def _rowwise_storage(self) -> Any:
        return self._side("rowwise")

    @property
    def _columnwise_storage(self) -> Any:
        return self._side("columnwise")


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """What :class:`HybridQuantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return weight.quantizer.rowwise_spec != weight.quantizer.columnwise_spec


def _is_cast(weight: QuantizedWeight, element: str, block: int) -> bool:
    spec = weight.quantizer.rowwise_spec
    return spec is not None and spec.block[1] == block and spec.element.name.startswith(element)


def _padded_scales(side: Operand | None) -> Tensor | None:
    """Block scales as bytes [rows, blocks], padded with zeros to multiples of 128 and 4."""
    if side is None or side.scale_inv is None:
        return None
    rows, blocks = side.scale_inv.shape
    return pad(side.scale_inv.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
