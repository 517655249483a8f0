"""What TransformerEngine's quantized tensors store, and how autograd saves it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp4engine.tensor import Operand, is_transposable
from fp4engine.tensor import QuantizedTensor as Operands


class QuantizedTensorStorage:
    """What has operands. In TransformerEngine it need not be a tensor to PyTorch; here it always is."""

    operands: Operands

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a side with False, or make it with True: from the other's codes, or else from its decoded values.

        Raises:
            ValueError: nothing would be left.
        """
        given = self.operands
        sides = {"rowwise": given.rowwise, "columnwise": given.columnwise}
        for name, wanted in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            if wanted and sides[name] is None:
                sides[name] = self._turned(name)
            elif wanted is False:
                sides[name] = None
        if not any(sides.values()):
            raise ValueError(
                "update_usage would leave neither a rowwise nor a columnwise operand, "
                f"got rowwise_usage={rowwise_usage} and columnwise_usage={columnwise_usage}"
            )
        self.operands = Operands(given.shape, given.dtype, sides["rowwise"], sides["columnwise"])

    def _turned(self, name: str) -> Operand | None:
        """The missing side ``name``, made from the other one."""
        given = self.operands
        quantizer: Any = self._quantizer  # pyright: ignore[reportAttributeAccessIssue]
        other, spec = given.rowwise or given.columnwise, getattr(quantizer.frozen(), f"{name}_spec")
        if other is not None and other.spec is not None and other.spec == spec and is_transposable(spec):
            return other.transposed()  # keeps its scale, even if the quantizer's has changed since
        return getattr(quantizer.cast_sides(given.dequantize(), rowwise=True, columnwise=True), name)

    def get_usages(self) -> dict[str, bool]:
        """Which sides are there."""
        return {"rowwise": self.operands.rowwise is not None, "columnwise": self.operands.columnwise is not None}

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "QuantizedTensorStorage"]:
        """The plain tensors, for ``save_for_backward``, and what :meth:`restore_from_saved` is called on."""
        return [tensor for side in self._sides() for tensor in _tensors(side)], self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take back the first of ``tensors``, and return the rest."""
        sides: list[Operand | None] = []
        for side in self._sides():
            mine, tensors = tensors[:3], tensors[3:]
            sides.append(None if side is None else with_tensors(side, mine))
        self.operands = Operands(self.operands.shape, self.operands.dtype, *sides)
        return list(tensors)

    def get_metadata(self) -> dict[str, Any]:
        """The stored tensors of both sides, the quantizer, and the dtype that the tensor has to PyTorch."""
        metadata: dict[str, Any] = {"quantizer": vars(self)["_quantizer"], "fake_dtype": self.operands.dtype}
        for name, side in zip(("rowwise", "columnwise"), self._sides(), strict=True):
            metadata |= zip((f"{name}_data", f"{name}_scale_inv", f"{name}_amax"), _tensors(side), strict=True)
        return metadata

    def _sides(self) -> tuple[Operand | None, Operand | None]:
        return self.operands.rowwise, self.operands.columnwise

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The codes of the sides asked for: a pair, or one."""
        asked = [side for side, wanted in zip(self._sides(), (rowwise_data, columnwise_data), strict=True) if wanted]
        codes = [None if side is None else side.data for side in asked]
        return tuple(codes) if len(codes) > 1 else codes[0]


def with_tensors(side: Operand, tensors: Sequence[Any]) -> Operand:
    """``side`` with other data, block scales and amax."""
    data, scale_inv, amax = tensors
    return Operand(side.spec, side.rows, side.cols, data, scale_inv, amax)


def _tensors(side: Operand | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if side is None else side.tensors


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """Plain tensors for ``save_for_backward``, and the objects that :func:`restore_from_saved` puts them back into."""
    plain: list[Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            mine, kept = tensor.prepare_for_saving()
            plain.extend(mine)
            objects.append(kept)
        else:
            plain.append(tensor)
            objects.append(None)
    return plain, objects


def restore_from_saved(
    tensors: Sequence[Any], saved_tensors: Sequence[Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """Inverse of :func:`prepare_for_saving`."""
    restored: list[Any] = []
    rest = list(saved_tensors)
    for tensor in tensors:
        if tensor is None:
            restored.append(rest.pop(0))
        else:
            rest = tensor.restore_from_saved(rest)
            restored.append(tensor)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """:func:`restore_from_saved` of ``ctx.tensor_objects``, which are dropped, and ``ctx.saved_tensors``."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx.tensor_objects must hold what prepare_for_saving returned, got nothing")
    objects, ctx.tensor_objects = ctx.tensor_objects, None
    return restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
