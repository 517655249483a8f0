"""High precision as a quantized tensor."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.layout import matrix_shape
from fp4engine.te.pytorch.quantized_tensor import Part, QuantizedTensor, Quantizer, decoded, listed
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


class IdentityTensorStorage(QuantizedTensorStorage):
    """One set of values, which serves both sides.

    Attributes:
        _hp_data: the values.
    """

    _TENSORS = ("_hp_data",)
    _SIDES = {"rowwise": ("_hp_data",), "columnwise": ("_hp_data",)}  # noqa: RUF012 - as in the base class
    _hp_data: Tensor

    @classmethod
    def _fill(cls, made: Any, fake_dtype: torch.dtype | None, quantizer: Any = None, **given: Any) -> Any:
        values: Tensor | None = given.get("hp_data")
        return super()._fill(made, fake_dtype or (None if values is None else values.dtype), quantizer, **given)

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        side = operands.rowwise
        if side is None:
            assert operands.columnwise is not None
            return {"_hp_data": operands.columnwise.data.T.reshape(operands.shape)}
        return {"_hp_data": side.data.view(operands.shape)}

    def _operand(self, side: str) -> Operand | None:
        if not self.has(side):
            return None
        matrix = self._hp_data.reshape(matrix_shape(self._hp_data.shape))
        return Operand.dense(matrix if side == "rowwise" else matrix.T)

    def values_in(self, dtype: torch.dtype) -> Tensor:
        """The values themselves, cast where they have another dtype."""
        if not self.has("rowwise"):
            raise RuntimeError("this IdentityTensor holds no data to dequantize")
        return self._hp_data.to(dtype)

    def _default_quantizer(self) -> "IdentityQuantizer":
        return IdentityQuantizer()

    def _shape_of_tensors(self) -> torch.Size:
        return self._hp_data.shape

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Change nothing."""

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The values, and None beside them where both sides are asked for."""
        super().get_data_tensors(rowwise_data, columnwise_data)  # raises if neither is
        return (self._hp_data, None) if rowwise_data and columnwise_data else self._hp_data

    def _viewed(self, shape: torch.Size) -> dict[str, Any]:
        return {**self.get_metadata(), "hp_data": self._hp_data.view(shape)}

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return ("_hp_data",)


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """What :class:`IdentityQuantizer` makes; it lies in memory as its values do."""

    _shares_scales = False

    @classmethod
    def _lies_like(cls, given: dict[str, Any]) -> Tensor | None:
        return given.get("hp_data")

    def _parted(self, func: Any, args: Any, kwargs: Any) -> list[Part] | None:
        return [(part.shape, {"hp_data": part}) for part in listed(func(self._hp_data, *args, **kwargs))]


class IdentityQuantizer(Quantizer):
    """High precision.

    Args:
        dtype: what values are cast to; None keeps their dtype.
    """

    tensor_class = IdentityTensor

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        return FrozenQuantizer(stream=stream)

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        return self.cast_sides(self.cast(tensor), rowwise=True, columnwise=False)

    def cast(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` in this quantizer's dtype."""
        values = decoded(tensor)
        return values.to(self.dtype or values.dtype)

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"_hp_data": (tuple(shape), self.dtype or torch.float32)}

    def make_empty(self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
        """An uninitialised tensor of ``shape``, in the quantizer's dtype, or in ``dtype`` if it has none."""
        like = self.copy()
        like.dtype = self.dtype or dtype
        made = Quantizer.make_empty(like, shape, dtype=like.dtype, **others)
        made._quantizer = self.copy()
        return made

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """As :meth:`Quantizer.update_quantized`; a tensor of another dtype takes this quantizer's, if that has one."""
        self._require_tensor(src)
        stored: Tensor | None = getattr(dst, "_hp_data", None)
        if self.dtype is None and stored is not None:
            src = decoded(src.detach()).to(stored.dtype)  # into the memory that views share
        super().update_quantized(src, dst, noop_flag=noop_flag)
        dst._dtype = self.dtype or dst._dtype
        return dst

    def is_requantization_safe(self) -> bool:
        return True
