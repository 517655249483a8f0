"""TransformerEngine's quantizers, and the tensors that they make."""

from typing import Any

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, ScaleRule, fp8, fp8_block, mx
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer as FrozenNVFP4Quantizer
from fp4engine.recipe.casts import ColumnwiseSource
from fp4engine.te.pytorch.constants import ELEMENTS, DType
from fp4engine.te.pytorch.quantized_tensor import QuantizedTensor, Quantizer, rebuild
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


def _fp8_element(name: str, dtype: DType | int) -> Any:
    dtype = DType.cast(dtype)
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise ValueError(f"{name}(fp8_dtype=) must be DType.kFloat8E4M3 or DType.kFloat8E5M2, got {dtype!r}")
    return ELEMENTS[dtype]


class NVFP4Quantizer(Quantizer):
    """E2M1 codes in blocks of 16 with E4M3 scales; arguments as in :class:`fp4engine.NVFP4Quantizer`.

    Args:
        fp4_dtype: only ``DType.kFloat4E2M1``.
        rowwise, columnwise: which sides to make.
        with_amax_reduction, amax_reduction_group: share amaxes over the group.
        with_post_rht_amax: take the columnwise amax after the transform, which is always so here.
    """

    tensor_class = NVFP4Tensor

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
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max, self.nvfp4_4over6_err_mode = nvfp4_e4m3_max, nvfp4_4over6_err_mode
        self.with_random_sign_mask = with_random_sign_mask

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
        return _with_shared_amax(self, tensor, self.amax_reduction_group)

    def is_quantizable(self, inp: Tensor) -> bool:
        rows = inp.numel() // max(inp.shape[-1], 1) if inp.ndim > 1 else 0
        return inp.ndim > 1 and rows % 16 == 0 and inp.shape[-1] % 16 == 0 and not self.row_scaled_nvfp4

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def get_scale_shape(self, shape: Any, columnwise: bool) -> tuple[int, int]:
        """Shape of the padded block scales of a tensor of ``shape``."""
        rows, cols = _matrix_shape(shape)
        rows, cols = (cols, rows) if columnwise else (rows, cols)
        blocks = -(-cols // 16)
        return rows + -rows % 128, blocks + -blocks % 4

    @staticmethod
    def get_columnwise_shape(shape: Any) -> tuple[int, ...]:
        """Shape of the transposed tensor, without which columnwise codes make no sense."""
        return (shape[-1], *shape[:-1]) if len(shape) else ()

    @staticmethod
    def convert_shape_for_fp4(shape: Any) -> tuple[int, ...]:
        """Shape of the packed codes."""
        return (*shape[:-1], shape[-1] // 2)

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import NVFP4BlockScaling

        return NVFP4BlockScaling


def _with_shared_amax(quantizer: Quantizer, tensor: Tensor, group: Any) -> Operands:
    """Operands whose outer amaxes are the largest over the ranks of ``group``."""
    frozen = quantizer.frozen()
    sides: dict[str, Any] = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    row, col = frozen.amax(tensor, **sides)
    for amax in (row, col):
        if amax is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    return frozen.quantize(tensor, **sides, rowwise_amax=row, columnwise_amax=col)


def _matrix_shape(shape: Any) -> tuple[int, int]:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


class Float8Quantizer(Quantizer):
    """FP8 by a scale that is given: ``code = fp8(x * scale)``. ``amax`` collects the largest magnitude seen.

    Args:
        scale, amax: FP32 [1].
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
    """

    tensor_class = Float8Tensor

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: DType | int, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _fp8_element("Float8Quantizer", fp8_dtype)
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        spec = fp8(_fp8_element("Float8Quantizer", self.dtype))
        return _GivenScale(spec, spec, stream=stream).by(self.scale, self.amax)

    def calibrate(self, tensor: Tensor) -> None:
        if tensor.numel():
            self.amax.copy_(torch.maximum(self.amax, tensor.detach().abs().amax().float()))

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import DelayedScaling

        return DelayedScaling


class _GivenScale(FrozenQuantizer):
    """One scale for every tensor, in place of each tensor's own."""

    scale: Tensor
    collected: Tensor

    def by(self, scale: Tensor, amax: Tensor) -> "_GivenScale":
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "collected", amax)
        return self

    def with_backend(self, backend: str) -> "_GivenScale":
        spec = self.rowwise_spec
        return _GivenScale(spec, spec, stream=self.stream, backend=backend).by(self.scale, self.collected)

    def quantize(self, x: Any, **arguments: Any) -> Operands:
        assert self.rowwise_spec is not None
        if x.numel():
            self.collected.copy_(torch.maximum(self.collected, x.detach().abs().amax().float()))
        amax = (self.rowwise_spec.numerator / self.scale).view(1).to(x.device)
        given: dict[str, Any] = arguments | {"rowwise_amax": amax, "columnwise_amax": amax}
        return super().quantize(x, **given)

    __call__ = quantize


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 by the scale of the tensor at hand.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
        device: where scales are kept in TransformerEngine; here they lie beside their tensor.
        use_existing_amax: scale by ``amax`` instead of the tensor's own.
        with_amax_reduction, amax_reduction_group: share amaxes over the group.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: only 0.
        scale, amax: FP32 [1]; ``amax`` is read with ``use_existing_amax``.
    """

    tensor_class = Float8Tensor

    def __init__(
        self,
        fp8_dtype: DType | int,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _fp8_element("Float8CurrentScalingQuantizer", fp8_dtype)
        _refuse_epsilon("Float8CurrentScalingQuantizer", amax_epsilon)
        self.dtype = DType.cast(fp8_dtype)
        self.use_existing_amax, self.amax, self.scale = use_existing_amax, amax, scale
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        element = _fp8_element("Float8CurrentScalingQuantizer", self.dtype)
        spec = fp8(element, power_of_two=self.force_pow_2_scales)
        return FrozenQuantizer(spec, spec, stream=stream)

    def _operands(self, tensor: Tensor) -> Operands:
        if self.with_amax_reduction:
            return _with_shared_amax(self, tensor, self.amax_reduction_group)
        if not self.use_existing_amax:
            return super()._operands(tensor)
        if self.amax is None:
            raise ValueError("Float8CurrentScalingQuantizer(use_existing_amax=True) needs amax=, got None")
        sides: dict[str, Any] = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        given = self.amax.float().view(1)
        return self.frozen().quantize(tensor, **sides, rowwise_amax=given, columnwise_amax=given)

    def is_requantization_safe(self) -> bool:
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import Float8CurrentScaling

        return Float8CurrentScaling


def _refuse_epsilon(name: str, amax_epsilon: float) -> None:
    if amax_epsilon != 0.0:
        raise NotImplementedError(f"{name}(amax_epsilon={amax_epsilon}) is not implemented; leave it at 0.0")


class MXFP8Quantizer(Quantizer):
    """FP8 in blocks of 32 with power-of-two scales.

    Args:
        with_2d_quantization: one scale per 32x32.
    """

    tensor_class = MXFP8Tensor

    def __init__(
        self,
        fp8_dtype: DType | int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _fp8_element("MXFP8Quantizer", fp8_dtype)
        self.dtype, self.with_2d_quantization = DType.cast(fp8_dtype), with_2d_quantization

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        rows = 32 if self.with_2d_quantization else 1
        spec = mx(_fp8_element("MXFP8Quantizer", self.dtype), ScaleRule.TOPBINADE, rows=rows)
        return FrozenQuantizer(spec, spec, stream=stream)

    def is_quantizable(self, inp: Tensor) -> bool:
        return inp.ndim > 1 and (inp.numel() // max(inp.shape[-1], 1)) % 32 == 0 and inp.shape[-1] % 32 == 0

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import MXFP8BlockScaling

        return MXFP8BlockScaling


class Float8BlockQuantizer(Quantizer):
    """FP8 in blocks of 1x128 or 128x128.

    Args:
        amax_epsilon: only 0.
        force_pow_2_scales: False keeps FP32 scales.
        block_scaling_dim: 1 for 1x128, 2 for 128x128.
    """

    tensor_class = Float8BlockwiseQTensor

    def __init__(
        self,
        fp8_dtype: DType | int,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _fp8_element("Float8BlockQuantizer", fp8_dtype)
        _refuse_epsilon("Float8BlockQuantizer", amax_epsilon)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer(block_scaling_dim=) must be 1 or 2, got {block_scaling_dim!r}")
        self.dtype, self.amax_epsilon = DType.cast(fp8_dtype), amax_epsilon
        self.force_pow_2_scales, self.block_scaling_dim, self.block_len = force_pow_2_scales, block_scaling_dim, 128

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        element = _fp8_element("Float8BlockQuantizer", self.dtype)
        spec = fp8_block(element, 128 if self.block_scaling_dim == 2 else 1, power_of_two=self.force_pow_2_scales)
        return FrozenQuantizer(spec, spec, stream=stream)

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import Float8BlockScaling

        return Float8BlockScaling


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
        values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        return self.frozen().quantize(values.to(self.dtype or values.dtype), rowwise=True, columnwise=False)

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
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
        values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        dequantized = self.columnwise_source == "rowwise_dequantized" and self.columnwise_usage
        row = col = None
        if self.rowwise_usage or dequantized:
            row = self.rowwise_quantizer.frozen().quantize(values, columnwise=False).rowwise
        if self.columnwise_usage:
            source = values
            if dequantized:
                assert row is not None
                source = row.dequantize(values.dtype).view(values.shape)
            col = self.columnwise_quantizer.frozen().quantize(source, rowwise=False).columnwise
        return Operands(values.shape, values.dtype, row if self.rowwise_usage else None, col)

    def is_requantization_safe(self) -> bool:
        return self.rowwise_quantizer.is_requantization_safe() and self.columnwise_quantizer.is_requantization_safe()

    def supports_only_rowwise_all_gather(self) -> bool:
        """As the rowwise quantizer; True also where the columnwise side, of NVFP4, does not decode by itself."""
        columnwise_decodes = not isinstance(self.columnwise_quantizer, NVFP4Quantizer)
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or not columnwise_decodes

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensor:
        return self.tensor_class.of(self._operands(tensor), self, tensor.device)

    def _get_compatible_recipe(self) -> Any:
        from fp4engine.te.common.recipe import CustomRecipe

        return CustomRecipe

    def is_quantizable(self, inp: Tensor) -> bool:
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def __repr__(self) -> str:
        return (
            f"HybridQuantizer(rowwise_quantizer={self.rowwise_quantizer!r}, "
            f"columnwise_quantizer={self.columnwise_quantizer!r}, columnwise_source={self.columnwise_source!r})"
        )


torch.serialization.add_safe_globals(
    [rebuild, DType, *(thing for name in __all__ if isinstance(thing := globals()[name], type))]
)
