"""MXFP8 by TransformerEngine's names."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, ScaleRule, mx
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.constants import DType, fp8_element
from fp4engine.te.pytorch.layout import ScaleLayout, codes
from fp4engine.te.pytorch.tensor.block_storage import BlockQuantizer, BlockStorage, BlockTensor
from fp4engine.tensor import Operand

__all__ = ["MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage"]

_LAYOUTS = {"rowwise": ScaleLayout(1, False, (128, 4)), "columnwise": ScaleLayout(1, True, (4, 128))}


class MXFP8TensorStorage(BlockStorage):
    """Codes of both sides lie as the tensor does; scales are E8M0 bytes.

    Attributes:
        _rowwise_scale_inv: [M, K / 32], padded to multiples of 128 and 4.
        _columnwise_scale_inv: [M / 32, K], padded to multiples of 4 and 128.
        _with_gemm_swizzled_scales: whether scales lie as tensor cores read them.
    """

    _WORDS: ClassVar[dict[str, Any]] = {"_fp8_dtype": DType.kFloat8E4M3, "_with_gemm_swizzled_scales": False}
    _PLACES = (*BlockStorage._PLACES, "fp8_dtype", "quantizer", "with_gemm_swizzled_scales")
    _fp8_dtype: DType

    @classmethod
    def _layout(cls, side: str, words: dict[str, Any]) -> ScaleLayout:
        return _LAYOUTS[side]

    @classmethod
    def _laid_codes(cls, side: str, operand: Operand, shape: Iterable[int]) -> Tensor:
        if side == "rowwise":
            return super()._laid_codes(side, operand, shape)
        return operand.data[:, : operand.cols].T.reshape(tuple(shape))

    def _read_codes(self, side: str, spec: CastSpec, rows: int, cols: int) -> Tensor:
        if side == "rowwise":
            return super()._read_codes(side, spec, rows, cols)
        assert self._columnwise_data is not None
        return codes(self._columnwise_data.reshape(cols, rows).T, rows, spec, cols)

    @classmethod
    def _empty_codes(cls, side: str, shape: Iterable[int]) -> torch.Size:
        return torch.Size(shape)

    def _shape_of_codes(self, side: str, shape: torch.Size) -> torch.Size:
        return shape

    def _cut_codes(self, side: str, rows: slice, cols: slice, shape: torch.Size) -> Tensor | None:
        data: Tensor = getattr(self, f"_{side}_data")
        part = data.view(-1, data.shape[-1])[rows, cols]
        return part.view(shape) if part.is_contiguous() else part if part.shape == shape else None

    def _spec(self, side: str) -> CastSpec:
        return mx(fp8_element(type(self).__name__, self._fp8_dtype), ScaleRule.TOPBINADE)

    def _default_quantizer(self) -> "MXFP8Quantizer":
        return MXFP8Quantizer(self._fp8_dtype)


class MXFP8Tensor(MXFP8TensorStorage, BlockTensor):
    """What :class:`MXFP8Quantizer` makes."""


class MXFP8Quantizer(BlockQuantizer):
    """FP8 in blocks of 32 with power-of-two scales.

    Args:
        with_2d_quantization: one scale per 32x32.
    """

    tensor_class = MXFP8Tensor
    compatible_recipe = "MXFP8BlockScaling"
    is_value = True

    def __init__(
        self,
        fp8_dtype: DType | int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_element("MXFP8Quantizer", fp8_dtype)
        self.dtype, self.with_2d_quantization = DType.cast(fp8_dtype), with_2d_quantization

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        rows = 32 if self.with_2d_quantization else 1
        spec = mx(fp8_element("MXFP8Quantizer", self.dtype), ScaleRule.TOPBINADE, rows=rows)
        return FrozenQuantizer(spec, spec, stream=stream)

    def storage_words(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "with_gemm_swizzled_scales": self.optimize_for_gemm}

    @staticmethod
    def get_columnwise_shape(shape: Iterable[int]) -> tuple[int, ...]:
        """Shape of the columnwise codes, which lie as the tensor does."""
        return tuple(shape)

    def is_quantizable(self, inp: Tensor) -> bool:
        return inp.ndim > 1 and (inp.numel() // max(inp.shape[-1], 1)) % 32 == 0 and inp.shape[-1] % 32 == 0

    def is_requantization_safe(self) -> bool:
        return True
