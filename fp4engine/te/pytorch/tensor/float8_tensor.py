"""FP8 with one scale for a tensor, by TransformerEngine's names: storage, tensor, and its two quantizers."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.arguments import require_member, shown
from fp4engine.formats import FP32, CastSpec, fp8
from fp4engine.ops import all_reduce_amax, largest_magnitudes
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.reference import round_outer_amax
from fp4engine.reference.scaling import encode_scale
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.constants import DType, fp8_element
from fp4engine.te.pytorch.layout import codes, matrix_shape, operand_shape, remember, remembered, transposed_shape
from fp4engine.te.pytorch.quantized_tensor import Part, QuantizedTensor, Quantizer, decoded, listed
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "Float8TensorStorage"]


class Float8TensorStorage(QuantizedTensorStorage):
    """``value = code * _scale_inv``, the reciprocal of the scale that codes were made by.

    Attributes:
        _data: codes, in the shape of the tensor; None where there is no rowwise side.
        _transpose: codes of the transpose [K, ...], of the same values.
        _scale_inv: FP32 [1].
        _transpose_invalid: whether there is no transpose.
    """

    _TENSORS = ("_data", "_transpose", "_scale_inv")
    _WORDS: ClassVar[dict[str, Any]] = {"_fp8_dtype": DType.kFloat8E4M3}
    _CALLED: ClassVar[dict[str, str]] = {"_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    _SIDES: ClassVar[dict[str, tuple[str, ...]]] = {
        "rowwise": ("_data", "_scale_inv"),
        "columnwise": ("_transpose", "_scale_inv"),
    }
    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor
    _fp8_dtype: DType

    @property
    def _rowwise_data(self) -> Tensor | None:
        return self._data

    @property
    def _transpose_invalid(self) -> bool:
        return not self.has("columnwise")

    @_transpose_invalid.setter
    def _transpose_invalid(self, value: bool) -> None:
        if value:
            self._transpose = None

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        rows, cols = matrix_shape(operands.shape)
        row, col = operands.rowwise, operands.columnwise
        side = row or col
        assert side is not None and side.spec is not None and side.amax is not None
        scale_inv = quantizer.scale_inv(side.amax, side.spec.numerator)
        remember(scale_inv, side.amax)  # by which fp4engine's own layers decode
        made: dict[str, Any] = {"_fp8_dtype": quantizer.dtype, "_scale_inv": scale_inv}
        if row is not None:
            made["_data"] = row.data[:, :cols].reshape(operands.shape).contiguous()
        if col is not None:
            made["_transpose"] = col.data[:, :rows].reshape(transposed_shape(operands.shape)).contiguous()
        return made

    def _operand(self, side: str) -> Operand | None:
        if not self.has(side):
            return None
        rows, cols = operand_shape(self.shape, side)
        spec = CastSpec(fp8_element(type(self).__name__, self._fp8_dtype), (0, 0), FP32, **_AS_STORED)
        amax, data = self._scale_inv.float().view(1), getattr(self, self._SIDES[side][0])
        return Operand(spec, rows, cols, codes(data, rows, spec, cols), data.new_empty((rows, 0)), amax)

    def _as_cast(self, operand: Operand, spec: CastSpec) -> Operand:
        assert operand.amax is not None
        amax = remembered(self._scale_inv)
        return operand._replace(spec=spec, amax=operand.amax * spec.numerator if amax is None else amax)

    def _default_quantizer(self) -> "Float8CurrentScalingQuantizer":
        return Float8CurrentScalingQuantizer(self._fp8_dtype)

    def _shape_of_tensors(self) -> torch.Size:
        if self._data is not None:
            return self._data.shape
        if self._transpose is None:
            raise RuntimeError("this Float8TensorStorage holds no data")
        first, *rest = self._transpose.shape or (1,)
        return torch.Size((*rest, first))

    def _turned(self, side: str) -> dict[str, Tensor | None] | None:
        name, source = ("_data", self._transpose) if side == "rowwise" else ("_transpose", self._data)
        if source is None:
            return None
        first, last = (0, -1) if side == "rowwise" else (-1, 0)
        return {name: source.movedim(first, last).contiguous() if source.ndim else source}

    def _create_transpose(self) -> None:
        if self._data is not None:
            self.update_usage(columnwise_usage=True)

    def _viewed(self, shape: torch.Size) -> dict[str, Any]:
        metadata = self.get_metadata()
        same = matrix_shape(shape) == matrix_shape(self.shape)
        metadata["data"] = None if self._data is None else self._data.view(shape)
        turned = self._transpose is not None and same
        metadata["data_transpose"] = self._transpose.view(transposed_shape(shape)) if turned else None  # pyright: ignore[reportOptionalMemberAccess]
        if metadata["data"] is None and metadata["data_transpose"] is None:
            raise RuntimeError(
                f"a columnwise {type(self).__name__} {list(self.shape)} has no view {list(shape)}, which changes the "
                "last axis"
            )
        return metadata

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The name of the attribute with the codes, which FSDP2 gathers; the scale is the same on all ranks."""
        return ("_transpose",) if self.has("columnwise") and not self.has("rowwise") else ("_data",)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """The codes, rows first."""
        (name,) = self.fsdp_buffer_fields()
        data = getattr(self, name)
        is_turned = name == "_transpose"
        return (data.movedim(0, -1).contiguous() if is_turned else data,), {"field_names": (name,)}

    def fsdp_assign_gathered(self, gathered: Any, meta: dict[str, Any]) -> None:
        if meta["field_names"] == ("_transpose",) and len(gathered) == 1:
            gathered = (gathered[0].movedim(-1, 0).contiguous(),)
        super().fsdp_assign_gathered(gathered, meta)


_AS_STORED: dict[str, Any] = {"scale_bound": 1.0, "target": 1.0}
"""Of a spec whose amax is the scale itself, since the decode divides it by ``scale_bound * target``."""


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """What :class:`Float8Quantizer` and :class:`Float8CurrentScalingQuantizer` make."""

    @classmethod
    def _lies_like(cls, given: dict[str, Any]) -> Tensor | None:
        data, transpose = given.get("data"), given.get("data_transpose")
        if data is not None or transpose is None or transpose.ndim != 2 or transpose.stride(1) != 1:
            return data
        rows = max(transpose.stride(0), 1)  # of what the transpose is a part of
        cols = transpose.untyped_storage().nbytes() // rows
        col, row = divmod(int(transpose.storage_offset()), rows)
        whole = torch.empty(rows * cols, dtype=torch.uint8, device="meta")
        return whole.as_strided(transpose.shape[::-1], (cols, 1), row * cols + col)

    def _parted(self, func: Any, args: Any, kwargs: Any) -> list[Part] | None:
        """Any view: elements have no scales of their own."""
        like = self._lies_like(self.get_metadata())
        like = torch.empty(self.shape, dtype=torch.uint8, device="meta") if like is None else like
        made = func(like, *args, **kwargs)
        turned = None
        if self._transpose is not None and (self._data is None or self.ndim > 1):
            turned = _part_of_transpose(self, made, func, args, kwargs)
        if self._data is None and turned is None:
            return None
        parts: list[Part] = []
        for index, part in enumerate(listed(made)):
            transpose = None if turned is None or not part.ndim else listed(turned)[index].movedim(-1, 0)
            data = None if self._data is None else part
            parts.append((part.shape, {"data": data, "data_transpose": transpose}))
        return parts

    def _has_all_of(self, shape: torch.Size, given: dict[str, Any]) -> bool:
        name = "_transpose" if self._data is None else "_data"
        both: tuple[Tensor, Tensor] = getattr(self, name), given[self._argument(name)]
        # Else axes have changed their places.
        return all(codes.is_contiguous() for codes in both) and super()._has_all_of(shape, given)


def _part_of_transpose(tensor: Float8Tensor, made: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The columnwise codes of the view ``func``, which made ``made`` of the rowwise codes; None if there are none."""
    transpose = tensor._transpose
    assert transpose is not None
    if func is not torch.ops.aten.as_strided.default:
        return func(transpose.movedim(0, -1), *args, **kwargs)
    if tensor.ndim != 2 or made.ndim != 2 or not made.numel() or tensor.stride(1) != 1:
        return None
    cols, rows = tensor.stride(0), transpose.stride(0)  # of what both are parts of
    (row, col), (own_row, own_col) = (divmod(int(part.storage_offset()), cols) for part in (made, tensor))
    is_part = made.stride() == (cols, 1) and row + made.shape[0] <= rows and col + made.shape[1] <= cols
    if not is_part or transpose.storage_offset() != own_col * rows + own_row:
        return None
    return transpose.as_strided(tuple(made.shape[::-1]), (rows, 1), col * rows + row).T


def share_amaxes(amaxes: Sequence[Tensor], group: Any) -> None:
    """Let each of ``amaxes``, of one dtype, be the largest over the ranks of ``group``, by default of all; NaN is."""
    if group is not None:
        require_member("amax_reduction_group", group)
    if not amaxes:
        return
    whole = torch.cat([amax.reshape(-1) for amax in amaxes]).float()
    all_reduce_amax(whole, group)
    for amax, shared in zip(amaxes, whole.split([amax.numel() for amax in amaxes]), strict=True):
        amax.copy_(shared.view(amax.shape))


class _Float8Quantizer(Quantizer):
    """What the quantizers of one scale have in common."""

    tensor_class = Float8Tensor
    dtype: DType

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        whole = tuple(shape)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            found["_data"] = (whole, torch.uint8)
        if self.columnwise_usage:
            found["_transpose"] = (transposed_shape(whole), torch.uint8)
        return {**found, "_scale_inv": ((1,), torch.float32)}

    def storage_words(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def scale_inv(self, amax: Tensor, numerator: float) -> Tensor:
        """What codes that were scaled by ``amax`` are multiplied by: FP32 [1]."""
        return torch.where(amax.isfinite(), 1.0 / encode_scale(amax, numerator), amax)

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32, requires_grad: bool = False
    ) -> Any:
        """A tensor of codes ``data``, of a dtype of one byte, under this quantizer's own scale."""
        scale: Tensor | None = getattr(self, "scale", None)
        if scale is None:
            raise ValueError(f"{type(self).__name__} has no scale of its own; set quantizer.scale first")
        given: dict[str, Any] = {"data": data.view(torch.uint8), "fp8_dtype": self.dtype}
        given["fp8_scale_inv"] = 1.0 / scale.view(1)
        made = self.around(data.shape, fake_dtype, data.device, given)
        return made if self.internal else made.requires_grad_(requires_grad)


class Float8Quantizer(_Float8Quantizer):
    """FP8 by a scale that is given: ``code = fp8(x * scale)``. ``amax`` collects the largest magnitude seen.

    Args:
        scale, amax: one number each, FP32.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
    """

    compatible_recipe = "DelayedScaling"

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: DType | int, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_element("Float8Quantizer", fp8_dtype)
        _require_number("Float8Quantizer", scale=scale, amax=amax)
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    @property
    def only_casts(self) -> bool:
        return False

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        spec = fp8(fp8_element("Float8Quantizer", self.dtype))
        return FrozenQuantizer(spec, spec, stream=stream)

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        values = decoded(tensor)
        own = largest_magnitudes([values])
        _collect(self.amax, own)
        numerator = fp8_element("Float8Quantizer", self.dtype).max_value
        amax = _unless_not_finite(own, (numerator / self.scale).view(1).to(values.device))
        return super()._operands(values, **{**given, "rowwise_amax": amax, "columnwise_amax": amax})

    def scale_inv(self, amax: Tensor, numerator: float) -> Tensor:
        return torch.where(amax.isfinite(), 1.0 / self.scale.float().view(1).to(amax.device), amax)

    def calibrate(self, tensor: Tensor) -> None:
        _collect(self.amax, largest_magnitudes([tensor.detach()]))


def _collect(amax: Tensor, own: Tensor) -> None:
    """Let ``amax``, one number, be the larger of itself and ``own`` [1]."""
    amax.view(1).copy_(torch.maximum(amax.view(1), own.to(amax.device)))


def _unless_not_finite(own: Tensor, given: Tensor) -> Tensor:
    """``given`` [1], or ``own`` if that is an Inf or a NaN, so that a product is not silently finite."""
    return torch.where(own.isfinite(), given, own)


class Float8CurrentScalingQuantizer(_Float8Quantizer):
    """FP8 by the scale of the tensor at hand.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
        device: where scales are kept in TransformerEngine; here they lie beside their tensor.
        use_existing_amax: scale by ``amax`` instead of the tensor's own.
        with_amax_reduction, amax_reduction_group: share amaxes over the group.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: the least amax that a scale is chosen by.
        scale, amax: FP32 [1]; ``amax`` is read with ``use_existing_amax``.
    """

    compatible_recipe = "Float8CurrentScaling"
    is_value = True

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
        fp8_element("Float8CurrentScalingQuantizer", fp8_dtype)
        self.dtype = DType.cast(fp8_dtype)
        self.use_existing_amax, self.amax, self.scale = use_existing_amax, amax, scale
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = require_epsilon("Float8CurrentScalingQuantizer", amax_epsilon)

    @property
    def only_casts(self) -> bool:
        more = self.use_existing_amax or self.with_amax_reduction or self.amax_epsilon
        return super().only_casts and not more

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        spec = fp8(fp8_element("Float8CurrentScalingQuantizer", self.dtype), power_of_two=self.force_pow_2_scales)
        return FrozenQuantizer(spec, spec, stream=stream)

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        if self.only_casts:
            return super()._operands(tensor, **given)
        values = decoded(tensor)
        amax = given.get("rowwise_amax")
        if self.use_existing_amax:
            _require_number("Float8CurrentScalingQuantizer", amax=self.amax)
            assert self.amax is not None
            amax = _unless_not_finite(largest_magnitudes([values]), self.amax.float().view(1).to(values.device))
        elif amax is None:
            amax = largest_magnitudes([values])
            if self.with_amax_reduction:
                share_amaxes([amax], self.amax_reduction_group)
        spec = self.frozen().rowwise_spec
        assert spec is not None
        amax = round_outer_amax(amax.clamp(min=self.amax_epsilon), spec)
        return super()._operands(values, **{**given, "rowwise_amax": amax, "columnwise_amax": amax})

    def is_requantization_safe(self) -> bool:
        return True


def require_epsilon(name: str, amax_epsilon: float) -> float:
    """``amax_epsilon``, the least amax that a scale is chosen by.

    Raises:
        ValueError: it is no finite number, or below zero.
    """
    is_number = isinstance(amax_epsilon, int | float) and not isinstance(amax_epsilon, bool)
    if not is_number or not 0 <= amax_epsilon < float("inf"):
        raise ValueError(f"{name}(amax_epsilon=) must be a finite number, 0 or more, got {shown(amax_epsilon)}")
    return amax_epsilon


def _require_number(name: str, **tensors: Any) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.numel() != 1:
            raise ValueError(f"{name}({argument}=) must be a tensor of one element, got {shown(tensor)}")
