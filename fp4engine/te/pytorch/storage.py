"""TransformerEngine's quantized tensors, by the attributes that it gives what it stores."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.formats import E2M1
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.reference import swizzle_scales
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4 by TransformerEngine's attributes, which are views or copies of the tensors that are stored here."""

    _quantizer: Quantizer
    _fp4_dtype = DType.kFloat4E2M1

    @property
    def _rowwise_data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data.view(*self.operands.shape[:-1], side.data.shape[-1])

    @property
    def _columnwise_data(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return self._quantizer.optimize_for_gemm

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.rowwise, swizzled=self._with_gemm_swizzled_scales)

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.columnwise, swizzled=self._with_gemm_swizzled_scales)

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


class _Float8Storage(QuantizedTensorStorage):
    """Codes of one byte, whose rowwise side lies as the tensor does."""

    _quantizer: Quantizer

    @property
    def _fp8_dtype(self) -> DType:
        return getattr(self._quantizer, "dtype", DType.kFloat8E4M3)

    @property
    def _rowwise_data(self) -> Tensor | None:
        side = self.operands.rowwise
        return None if side is None else side.data[:, : side.cols].reshape(self.operands.shape)


class MXFP8TensorStorage(_Float8Storage):
    """MXFP8 by TransformerEngine's attributes; its columnwise side lies as the tensor does."""

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return self._quantizer.optimize_for_gemm

    @property
    def _columnwise_data(self) -> Tensor | None:
        side = self.operands.columnwise
        return None if side is None else side.data[:, : side.cols].T.reshape(self.operands.shape)

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        return _padded_scales(self.operands.rowwise, swizzled=self._with_gemm_swizzled_scales)

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        scales = _padded_scales(self.operands.columnwise, swizzled=self._with_gemm_swizzled_scales)
        if scales is None:
            return None
        return scales.view(scales.T.shape) if self._with_gemm_swizzled_scales else scales.T.contiguous()


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """What :class:`MXFP8Quantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return _is_cast(weight, "", 32)


class Float8TensorStorage(_Float8Storage):
    """FP8 with one scale, by TransformerEngine's attributes."""

    @property
    def _data(self) -> Tensor | None:
        return self._rowwise_data

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


class Float8BlockwiseQTensorStorage(_Float8Storage):
    """FP8 in blocks, by TransformerEngine's attributes; scales are [rows, blocks], without its padding."""

    @property
    def _is_2D_scaled(self) -> bool:
        return getattr(self._quantizer, "block_scaling_dim", 2) == 2

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
    """High precision as a quantized tensor: one set of values, which serves both sides."""

    @property
    def _hp_data(self) -> Tensor:
        side = self.operands.rowwise
        assert side is not None
        return side.data.view(self.operands.shape)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Change nothing."""

    def get_usages(self) -> dict[str, bool]:
        """Both."""
        return {"rowwise": True, "columnwise": True}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The values, and None beside them where both sides are asked for."""
        return (self._hp_data, None) if rowwise_data and columnwise_data else self._hp_data


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """What :class:`IdentityQuantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return False


NO_SIDES: dict[str, Any] = {"rowwise": None, "columnwise": None}


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two sides by two quantizers."""

    _quantizer: Quantizer

    def _side(self, name: str) -> Any:
        side: Operand | None = getattr(self.operands, name)
        if side is None:
            return None
        known: dict[str, tuple[Operand, Any]] = vars(self).setdefault("_made_of_sides", {})
        if name not in known or known[name][0] is not side:
            quantizer: Quantizer = getattr(self._quantizer, f"{name}_quantizer")
            known[name] = (
                side,
                quantizer.alone(Operands(self.operands.shape, self.operands.dtype, **{**NO_SIDES, name: side})),
            )
        return known[name][1]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a side with False; True requires that it is there.

        Raises:
            RuntimeError: it is not there; then nothing has changed.
        """
        sides: dict[str, Operand | None] = {"rowwise": self.operands.rowwise, "columnwise": self.operands.columnwise}
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for name, is_wanted in wanted.items():
            if is_wanted and sides[name] is None:
                raise RuntimeError(f"update_usage({name}_usage=True): this tensor has no {name} sub-storage any more")
        kept = {name: None if wanted[name] is False else side for name, side in sides.items()}
        self.operands = Operands(self.operands.shape, self.operands.dtype, **kept)

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data tensors of both sides, one after the other."""
        asked = {"rowwise": rowwise_data, "columnwise": columnwise_data}
        parts = [self._side(name).get_data_tensors() for name in asked if asked[name] and self._side(name) is not None]
        return tuple(tensor for part in parts for tensor in (part if isinstance(part, tuple) else (part,)))

    @property
    def rowwise_sub_storage(self) -> Any:
        """The rowwise side as a tensor of its own quantizer."""
        return self._side("rowwise")

    @property
    def columnwise_sub_storage(self) -> Any:
        """The columnwise side as a tensor of its own quantizer."""
        return self._side("columnwise")

    _rowwise_storage, _columnwise_storage = rowwise_sub_storage, columnwise_sub_storage


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """What :class:`HybridQuantizer` makes."""

    @classmethod
    def _holds(cls, weight: QuantizedWeight) -> bool:
        return isinstance(weight, HybridQuantizedWeight)


class HybridQuantizedWeight(QuantizedWeight):
    """A weight that fp4engine stores by the casts of a ``HybridQuantizer``.

    Attributes:
        made_by: that quantizer.
    """

    made_by: Any

    @property
    def _quantizer(self) -> Any:
        return self.made_by

    @property
    def rowwise_sub_storage(self) -> Any:
        """The rowwise side as a tensor of its own quantizer."""
        return self.made_by.rowwise_quantizer.alone(Operands(self.shape, self.dtype, self.rowwise, None))

    @property
    def columnwise_sub_storage(self) -> Any:
        """The columnwise side as a tensor of its own quantizer."""
        return self.made_by.columnwise_quantizer.alone(Operands(self.shape, self.dtype, None, self.columnwise))

    def float(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize(dtype=torch.float32)


def _is_cast(weight: QuantizedWeight, element: str, block: int) -> bool:
    spec = weight.quantizer.rowwise_spec
    return spec is not None and spec.block[1] == block and spec.element.name.startswith(element)


def _padded_scales(side: Operand | None, *, swizzled: bool) -> Tensor | None:
    """Block scales as bytes [rows, blocks], padded with zeros to multiples of 128 and 4.

    Args:
        swizzled: let the same bytes lie as tensor cores read them.
    """
    if side is None or side.scale_inv is None:
        return None
    rows, blocks = side.scale_inv.shape
    scales = pad(side.scale_inv.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    return swizzle_scales(scales).view(scales.shape) if swizzled else scales
