"""TransformerEngine's quantizers, and the tensors that they make."""

from typing import Any

import torch
from torch import Tensor

from fp4engine.environment import refuse_what_is_not_implemented
from fp4engine.formats import CastSpec
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer as FrozenNVFP4Quantizer
from fp4engine.recipe.casts import ColumnwiseSource
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.float8 import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    with_shared_amax,
)
from fp4engine.te.pytorch.quantized_tensor import (
    QuantizedTensor,
    Quantizer,
    decoded,
    matrix_shape,
    rebuild,
    transposed_shape,
)
from fp4engine.te.pytorch.storage import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
)
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

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
]


class NVFP4Quantizer(Quantizer):
    """E2M1 codes in blocks of 16 with E4M3 scales; arguments as in :class:`fp4engine.NVFP4Quantizer`.

    Args:
        fp4_dtype: only ``DType.kFloat4E2M1``.
        rowwise, columnwise: which sides to make.
        with_amax_reduction, amax_reduction_group: share amaxes over the group.
        with_post_rht_amax: take the columnwise amax after the transform, which is always so here.
    """

    tensor_class = NVFP4Tensor
    compatible_recipe = "NVFP4BlockScaling"

    def __init__(
        self,
        fp4_dtype: DType | int = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp4_dtype)
        if self.dtype is not DType.kFloat4E2M1:
            raise ValueError(f"NVFP4Quantizer(fp4_dtype=) must be DType.kFloat4E2M1, got {self.dtype!r}")
        if nvfp4_use_4over6:
            refuse_what_is_not_implemented()
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = str(nvfp4_4over6_err_mode).upper()
        self.with_random_sign_mask = with_random_sign_mask
        self.frozen()  # raises for what does not go together

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        bound = self.nvfp4_e4m3_max if self.nvfp4_use_4over6 else 448
        return FrozenNVFP4Quantizer(
            with_rht=self.with_rht,
            with_2d_quantization=self.with_2d_quantization,
            stochastic_rounding=self.stochastic_rounding,
            row_scaled_nvfp4=self.row_scaled_nvfp4,
            nvfp4_use_4over6=self.nvfp4_use_4over6,
            nvfp4_e4m3_max=bound,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
            with_random_sign_mask=self.with_random_sign_mask,
            stream=stream,
        )

    def _operands(self, tensor: Tensor) -> Operands:
        if not self.with_amax_reduction:
            return super()._operands(tensor)
        return with_shared_amax(self, tensor, self.amax_reduction_group)

    def is_quantizable(self, inp: Tensor) -> bool:
        rows = inp.numel() // max(inp.shape[-1], 1) if inp.ndim > 1 else 0
        return inp.ndim > 1 and rows % 16 == 0 and inp.shape[-1] % 16 == 0 and not self.row_scaled_nvfp4

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def get_scale_shape(self, shape: Any, columnwise: bool) -> tuple[int, int]:
        """Shape of the padded block scales of a tensor of ``shape``."""
        rows, cols = matrix_shape(shape)
        rows, cols = (cols, rows) if columnwise else (rows, cols)
        blocks = -(-cols // 16)
        return rows + -rows % 128, blocks + -blocks % 4

    @staticmethod
    def get_columnwise_shape(shape: Any) -> tuple[int, ...]:
        """Shape of the transposed tensor, without which columnwise codes make no sense."""
        return transposed_shape(shape)

    @staticmethod
    def convert_shape_for_fp4(shape: Any) -> tuple[int, ...]:
        """Shape of the packed codes."""
        matrix_shape(shape)
        return (*shape[:-1], shape[-1] // 2)


class IdentityQuantizer(Quantizer):
    """High precision.

    Args:
        dtype: what values are cast to; None leaves them as they are.
    """

    tensor_class = IdentityTensor

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        return FrozenQuantizer(stream=stream)

    def alone(self, operands: Operands) -> QuantizedTensor:
        columnwise = operands.columnwise
        if columnwise is None:
            return super().alone(operands)
        values = columnwise.data.T.reshape(operands.shape)
        return super().alone(Operands(operands.shape, operands.dtype, Operand.dense(values.flatten(0, -2)), None))

    def _operands(self, tensor: Tensor) -> Operands:
        return self.frozen().quantize(self.cast(tensor), rowwise=True, columnwise=False)

    def cast(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` in this quantizer's dtype."""
        values = decoded(tensor)
        return values.to(self.dtype or values.dtype)

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """As :meth:`Quantizer.update_quantized`; values of the same dtype are written where ``dst`` has its own."""
        side, values = dst.operands.rowwise, self.cast(src.detach())
        if side is not None and side.data.dtype == values.dtype and dst.shape == src.shape and noop_flag is None:
            side.data.view(dst.shape).copy_(values)
            return dst
        super().update_quantized(src, dst, noop_flag=noop_flag)
        made = dst.operands
        dst.operands = Operands(made.shape, self.dtype or made.dtype, made.rowwise, made.columnwise)
        return dst

    def is_requantization_safe(self) -> bool:
        return True


class HybridQuantizer(Quantizer):
    """Rowwise operands by one quantizer, columnwise ones by another.

    Args:
        columnwise_source: ``"original"``, or ``"rowwise_dequantized"`` to quantize what the rowwise side decodes to.
    """

    tensor_class = HybridQuantizedTensor
    compatible_recipe = "CustomRecipe"

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: ColumnwiseSource = "original",
    ) -> None:
        super().__init__()
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "HybridQuantizer requires distinct rowwise and columnwise quantizers, got one as both; give it a copy()"
            )
        for name, quantizer in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if not isinstance(quantizer, Quantizer):
                raise TypeError(
                    f"HybridQuantizer({name}_quantizer=) must be a Quantizer, and does not support nested "
                    f"QuantizerRequests; got {quantizer!r}"
                )
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                "HybridQuantizer(columnwise_source=) must be 'original' or 'rowwise_dequantized', "
                f"got {columnwise_source!r}"
            )
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer.copy(), columnwise_quantizer.copy()
        self.columnwise_source: ColumnwiseSource = columnwise_source
        self.rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        self.columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def copy(self) -> "HybridQuantizer":
        new = HybridQuantizer(
            rowwise_quantizer=self.rowwise_quantizer,
            columnwise_quantizer=self.columnwise_quantizer,
            columnwise_source=self.columnwise_source,
        )
        new.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        new.internal, new.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return new

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        row: CastSpec | None = self.rowwise_quantizer.frozen().rowwise_spec
        col: CastSpec | None = self.columnwise_quantizer.frozen().columnwise_spec
        return FrozenQuantizer(row, col, self.columnwise_source, stream)

    def _operands(self, tensor: Tensor) -> Operands:
        values = decoded(tensor)
        dequantized = self.columnwise_source == "rowwise_dequantized" and self.columnwise_usage
        row = col = None
        if self.rowwise_usage or dequantized:
            row = self.rowwise_quantizer.cast_sides(_cast(self.rowwise_quantizer, values), columnwise=False).rowwise
        if self.columnwise_usage:
            source = values
            if dequantized:
                assert row is not None
                source = row.dequantize(values.dtype).view(values.shape)
            source = _cast(self.columnwise_quantizer, source)
            col = self.columnwise_quantizer.cast_sides(source, rowwise=False).columnwise
        return Operands(values.shape, values.dtype, row if self.rowwise_usage else None, col)

    def is_requantization_safe(self) -> bool:
        return self.rowwise_quantizer.is_requantization_safe() and self.columnwise_quantizer.is_requantization_safe()

    def supports_only_rowwise_all_gather(self) -> bool:
        """As the rowwise quantizer; True also where the columnwise side, of NVFP4, does not decode by itself."""
        columnwise_decodes = not isinstance(self.columnwise_quantizer, NVFP4Quantizer)
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or not columnwise_decodes

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensor:
        return self.tensor_class.of(self._operands(tensor), self, tensor.device)

    def is_quantizable(self, inp: Tensor) -> bool:
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def __repr__(self) -> str:
        return (
            f"HybridQuantizer(rowwise_quantizer={self.rowwise_quantizer!r}, "
            f"columnwise_quantizer={self.columnwise_quantizer!r}, columnwise_source={self.columnwise_source!r})"
        )


def _cast(quantizer: Quantizer, values: Tensor) -> Tensor:
    return quantizer.cast(values) if isinstance(quantizer, IdentityQuantizer) else values


torch.serialization.add_safe_globals(
    [rebuild, DType, *(thing for name in __all__ if isinstance(thing := globals()[name], type))]
)
