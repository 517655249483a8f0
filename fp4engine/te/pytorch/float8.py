"""TransformerEngine's quantizers to FP8: by a given scale, by the tensor's own, in blocks."""

from typing import Any

import torch
from torch import Tensor

from fp4engine.arguments import require_member, shown
from fp4engine.formats import ScaleRule, fp8, fp8_block, mx
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.reference import round_outer_amax
from fp4engine.te.pytorch.constants import ELEMENTS, DType
from fp4engine.te.pytorch.quantized_tensor import Quantizer, matrix_shape, transposed_shape
from fp4engine.te.pytorch.storage import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor
from fp4engine.tensor import QuantizedTensor as Operands


def _fp8_element(name: str, dtype: DType | int) -> Any:
    dtype = DType.cast(dtype)
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise ValueError(f"{name}(fp8_dtype=) must be DType.kFloat8E4M3 or DType.kFloat8E5M2, got {dtype!r}")
    return ELEMENTS[dtype]


def with_shared_amax(quantizer: Quantizer, tensor: Tensor, group: Any) -> Operands:
    """Operands whose outer amaxes are the largest over the ranks of ``group``."""
    sides: dict[str, Any] = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    if group is not None:
        require_member("amax_reduction_group", group)
    row, col = quantizer.frozen().amax(tensor, **sides)
    for amax in (row, col):
        if amax is not None:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    return quantizer.cast_sides(tensor, **sides, rowwise_amax=row, columnwise_amax=col)


class Float8Quantizer(Quantizer):
    """FP8 by a scale that is given: ``code = fp8(x * scale)``. ``amax`` collects the largest magnitude seen.

    Args:
        scale, amax: one number each, FP32.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
    """

    tensor_class = Float8Tensor
    compatible_recipe = "DelayedScaling"

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: DType | int, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _fp8_element("Float8Quantizer", fp8_dtype)
        _require_number("Float8Quantizer", scale=scale, amax=amax)
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        spec = fp8(_fp8_element("Float8Quantizer", self.dtype))
        return _GivenScale(spec, spec, stream=stream).by(self.scale, self.amax)

    def calibrate(self, tensor: Tensor) -> None:
        _collect(self.amax, _largest(tensor))

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, FP32 [1]; NaN if there is one, 0 of nothing."""
    values = tensor.detach()
    return values.abs().amax().float().view(1) if values.numel() else values.new_zeros(1, dtype=torch.float32)


def _collect(amax: Tensor, own: Tensor) -> None:
    """Let ``amax``, one number, be the larger of itself and ``own`` [1]."""
    amax.view(1).copy_(torch.maximum(amax.view(1), own.to(amax.device)))


def _unless_not_finite(own: Tensor, given: Tensor) -> Tensor:
    """``given`` [1], or ``own`` if that is an Inf or a NaN, so that a product is not silently finite."""
    return torch.where(own.isfinite(), given, own)


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
        own = _largest(x)
        _collect(self.collected, own)
        amax = _unless_not_finite(own, (self.rowwise_spec.numerator / self.scale).view(1).to(x.device))
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
    compatible_recipe = "Float8CurrentScaling"

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
            return with_shared_amax(self, tensor, self.amax_reduction_group)
        if not self.use_existing_amax:
            return super()._operands(tensor)
        _require_number("Float8CurrentScalingQuantizer", amax=self.amax)
        assert self.amax is not None
        sides: dict[str, Any] = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        frozen = self.frozen()
        assert frozen.rowwise_spec is not None
        given = _unless_not_finite(_largest(tensor), self.amax.float().view(1).to(tensor.device))
        given = round_outer_amax(given, frozen.rowwise_spec)
        return frozen.quantize(tensor, **sides, rowwise_amax=given, columnwise_amax=given)

    def is_requantization_safe(self) -> bool:
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


def _require_number(name: str, **tensors: Any) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.numel() != 1:
            raise ValueError(f"{name}({argument}=) must be a tensor of one element, got {shown(tensor)}")


def _refuse_epsilon(name: str, amax_epsilon: float) -> None:
    if amax_epsilon != 0.0:
        raise NotImplementedError(f"{name}(amax_epsilon={amax_epsilon}) is not implemented; leave it at 0.0")


class MXFP8Quantizer(Quantizer):
    """FP8 in blocks of 32 with power-of-two scales.

    Args:
        with_2d_quantization: one scale per 32x32.
    """

    tensor_class = MXFP8Tensor
    compatible_recipe = "MXFP8BlockScaling"

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


class Float8BlockQuantizer(Quantizer):
    """FP8 in blocks of 1x128 or 128x128.

    Args:
        amax_epsilon: only 0.
        force_pow_2_scales: False keeps FP32 scales.
        block_scaling_dim: 1 for 1x128, 2 for 128x128.
    """

    tensor_class = Float8BlockwiseQTensor
    compatible_recipe = "Float8BlockScaling"

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

    def get_scale_shape(self, shape: Any, columnwise: bool) -> tuple[int, int]:
        """Shape in which TransformerEngine lays the scales of a tensor of ``shape``, its last axis padded to fours.

        Scales of tensors here are [rows, blocks], without padding.
        """
        rows, cols = matrix_shape(shape)
        rows, cols = (cols, rows) if columnwise else (rows, cols)
        blocks = -(-cols // self.block_len)
        outer, inner = (blocks, rows) if self.block_scaling_dim == 1 else (-(-rows // self.block_len), blocks)
        return outer, inner + -inner % 4

    @staticmethod
    def get_columnwise_shape(shape: Any) -> tuple[int, ...]:
        """Shape of the transposed tensor."""
        return transposed_shape(shape)

    def is_requantization_safe(self) -> bool:
        return True
