"""Tensors whose two sides are made by two quantizers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fp4engine.arguments import require_one_of
from fp4engine.formats import CastSpec
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.recipe.casts import ColumnwiseSource
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.quantized_tensor import Part, QuantizedTensor, Quantizer, decoded
from fp4engine.te.pytorch.quantizer import spec_of
from fp4engine.te.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two storages, or tensors, of which each holds one side.

    Attributes:
        _rowwise_storage, _columnwise_storage: of the quantizers of either side; None where there is none.
    """

    _WORDS = {"_rowwise_storage": None, "_columnwise_storage": None}  # noqa: RUF012 - as in the base class
    _rowwise_storage: Any
    _columnwise_storage: Any

    @classmethod
    def _fill(cls, made: Any, fake_dtype: torch.dtype | None, quantizer: Any = None, **given: Any) -> Any:
        if not isinstance(quantizer, HybridQuantizer):
            raise TypeError(f"{cls.__name__} requires a parent HybridQuantizer, got {type(quantizer).__name__}")
        return super()._fill(made, fake_dtype, quantizer, **given)

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for side in cls._SIDES:
            if getattr(operands, side) is not None:
                alone = {**dict.fromkeys(cls._SIDES), side: getattr(operands, side)}
                by = getattr(quantizer, f"{side}_quantizer")
                made[f"_{side}_storage"] = by.of(Operands(operands.shape, operands.dtype, **alone))
        return made

    def _parts(self) -> dict[str, Any]:
        """The sides that are there."""
        sides = {"rowwise": self._rowwise_storage, "columnwise": self._columnwise_storage}
        return {side: part for side, part in sides.items() if part is not None}

    def _stored(self) -> list[Any]:
        return list(self._parts().values())

    def _held(self) -> list[Tensor]:
        return [tensor for part in self._stored() for tensor in part._held()]

    def has(self, side: str) -> bool:
        return side in self._parts()

    def _operand(self, side: str) -> Operand | None:
        return self._parts()[side]._operand(side) if self.has(side) else None

    def _operand_as(self, side: str, spec: CastSpec) -> Operand | None:
        return self._parts()[side]._operand_as(side, spec) if self.has(side) else None

    def values_in(self, dtype: torch.dtype) -> Tensor:
        """What the rowwise side decodes to, or the other one if that is missing."""
        for part in self._stored():
            return part.values_in(dtype)
        raise RuntimeError(f"this {type(self).__name__} holds no data to dequantize")

    def _shape_of_tensors(self) -> torch.Size:
        for part in self._stored():
            return part.shape
        raise RuntimeError(f"this {type(self).__name__} holds no data")

    def _device_of_tensors(self) -> torch.device:
        return self._stored()[0].device

    @property
    def rowwise_sub_storage(self) -> Any:
        """The rowwise side as a tensor of its own quantizer."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Any:
        """The columnwise side as a tensor of its own quantizer."""
        return self._columnwise_storage

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a side with False; True requires that it is there.

        Raises:
            RuntimeError: it is not there; then nothing has changed.
        """
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for side, is_wanted in wanted.items():
            if is_wanted and not self.has(side):
                raise RuntimeError(f"update_usage({side}_usage=True): this tensor has no {side} sub-storage any more")
        for side, is_wanted in wanted.items():
            if is_wanted is False:
                setattr(self, f"_{side}_storage", None)

    def _with_sides(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Metadata with both sides changed."""
        changed = {f"{side}_storage": change(part) for side, part in self._parts().items()}
        return {**self.get_metadata(), **changed}

    def _with_tensors(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        return self._with_sides(lambda part: part._like(change))

    def _form(self) -> Any:
        return {side: (part._form(), part.get_usages()) for side, part in self._parts().items()}

    def _take(self, source: QuantizedTensorStorage) -> bool:
        if self._form() != source._form():
            return False
        pairs = zip(self._stored(), source._stored(), strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        return all([mine._take(theirs) for mine, theirs in pairs])

    def clear(self) -> None:
        for part in self._stored():
            part.clear()

    def _require_alike(self, src: QuantizedTensorStorage) -> None:
        if not isinstance(src, HybridQuantizedTensorStorage):
            raise TypeError(f"copy_from_storage expects HybridQuantizedTensorStorage, got {type(src).__name__}")
        for mine, theirs in self._common(src):
            mine._require_alike(theirs)

    def _copy_sides(self, src: QuantizedTensorStorage) -> None:
        for mine, theirs in self._common(src):
            mine.copy_from_storage(theirs)

    def _common(self, other: Any) -> list[tuple[Any, Any]]:
        """The sides that both store."""
        return [(part, other._parts()[side]) for side, part in self._parts().items() if other.has(side)]

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        return [tensor for part in self._stored() for tensor in part.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        rest = list(tensors)
        for part in self._stored():
            rest = part.restore_from_saved(rest)
        return rest

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data tensors of both sides, one after the other."""
        asked = {"rowwise": rowwise_data, "columnwise": columnwise_data}
        parts = [part.get_data_tensors() for side, part in self._parts().items() if asked[side]]
        return tuple(tensor for part in parts for tensor in (part if isinstance(part, tuple) else (part,)))

    def _viewed(self, shape: torch.Size) -> dict[str, Any]:
        return self._with_sides(lambda part: part.view(shape))

    def __tensor_flatten__(self) -> Any:
        raise RuntimeError(f"torch.compile does not take a {type(self).__name__}, whose sides are tensors in tensors")

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the attributes that FSDP2 gathers, of the rowwise and then of the columnwise side."""
        return tuple(name for part in self._stored() for name in part.fsdp_buffer_fields())

    def _kept_by_shards(self) -> list[Tensor]:
        return [tensor for part in self._stored() for tensor in part._kept_by_shards()]

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """The tensors of both sides that FSDP2 gathers.

        Raises:
            NotImplementedError: a side is a storage, which is no tensor, or cannot be gathered.
        """
        made: dict[str, Any] = dict.fromkeys(self._SIDES, ((), None))
        for side, part in self._parts().items():
            if not isinstance(part, QuantizedTensor):
                raise NotImplementedError(
                    f"FSDP2 does not gather a storage-only {side} sub-storage, {type(part).__name__}, whose quantizer "
                    "has internal=True"
                )
            made[side] = part.fsdp_extract_buffers()
        (row, row_meta), (col, col_meta) = made.values()
        return row + col, {"count": len(row), "rowwise": row_meta, "columnwise": col_meta}

    def fsdp_assign_gathered(self, gathered: Any, meta: dict[str, Any]) -> None:
        given = {"rowwise": gathered[: meta["count"]], "columnwise": gathered[meta["count"] :]}
        for side, part in self._parts().items():
            if meta[side] is not None:
                part.fsdp_assign_gathered(given[side], meta[side])


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """What :class:`HybridQuantizer` makes."""

    @classmethod
    def _lies_like(cls, given: dict[str, Any]) -> Tensor | None:
        sides = (given.get(f"{side}_storage") for side in cls._SIDES)
        return next((part for part in sides if isinstance(part, Tensor)), None)

    def _to_be_gathered(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Any:
        whole = tuple(shape)
        given: dict[str, Any] = {**self.get_metadata(), "fake_dtype": None}
        for side, part in self._parts().items():
            given[f"{side}_storage"] = part._to_be_gathered(whole, part.dtype, device)
        return type(self)(whole, dtype, device=device, **given)

    def _has_parts(self) -> bool:
        return any(getattr(part, "_is_part", False) for part in self._stored())

    def _has_all_of(self, shape: torch.Size, given: dict[str, Any]) -> bool:
        sides = [(part, given[f"{side}_storage"].get_metadata()) for side, part in self._parts().items()]
        coded = [(part, view) for part, view in sides if part._shares_scales]  # high precision may have any view
        return bool(coded) and all(part._has_all_of(shape, view) for part, view in coded)

    def _parted(self, func: Any, args: Any, kwargs: Any) -> list[Part] | None:
        made: dict[str, list[Any]] = {}
        for side, part in self._parts().items():
            if not isinstance(part, QuantizedTensor):
                return None
            if func is torch.ops.aten.as_strided.default and _lies(part) != _lies(self):
                return None
            found = part._parted(func, args, kwargs)
            if found is None:
                return None
            made[f"{side}_storage"] = [part._with(*one) for one in found]
        return [
            (of_sides[0].shape, dict(zip(made, of_sides, strict=True))) for of_sides in zip(*made.values(), strict=True)
        ] or None


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.storage_offset()


def _of_sides(name: str, default: Any, doc: str) -> property:
    """The setting ``name`` of a side that has it; assigned to, that of every side that can have it."""

    def read(hybrid: "HybridQuantizer") -> Any:
        return next((value for _, by, _ in hybrid._each() if (value := getattr(by, name, default))), default)

    def write(hybrid: "HybridQuantizer", value: Any) -> None:
        for _, by, _ in hybrid._each():
            if hasattr(by, name):
                setattr(by, name, value)

    return property(read, write, doc=doc)


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
        sources = ("original", "rowwise_dequantized")
        require_one_of("HybridQuantizer(columnwise_source=)", columnwise_source, sources)
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer.copy(), columnwise_quantizer.copy()
        self.columnwise_source: ColumnwiseSource = columnwise_source
        self.rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        self.columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def copy(self) -> Self:
        new = super().copy()
        new.rowwise_quantizer, new.columnwise_quantizer = (by.copy() for _, by, _ in self._each())
        return new

    def _each(self) -> list[tuple[str, Quantizer, bool]]:
        """Name, quantizer and use of each side."""
        return [
            ("rowwise", self.rowwise_quantizer, self.rowwise_usage),
            ("columnwise", self.columnwise_quantizer, self.columnwise_usage),
        ]

    @property
    def only_casts(self) -> bool:
        is_own = type(self).quantize_impl is not HybridQuantizer.quantize_impl
        return not is_own and all(by.only_casts for _, by, _ in self._each())

    def columnwise_of(self, values: Tensor, **given: Any) -> Operand:
        return self.columnwise_quantizer.columnwise_of(values, **given)

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        row = spec_of(self.rowwise_quantizer, "rowwise")
        col = spec_of(self.columnwise_quantizer, "columnwise")
        return FrozenQuantizer(row, col, self.columnwise_source, stream)

    def quantize_impl(self, tensor: Tensor) -> Any:
        source, row, col = decoded(tensor), None, None
        dequantized = self.columnwise_source == "rowwise_dequantized" and self.columnwise_usage
        if self.rowwise_usage or dequantized:
            row = self.rowwise_quantizer.quantize_impl(source)
            source = row.values_in(source.dtype).view(source.shape) if dequantized else source
        if self.columnwise_usage:
            col = self.columnwise_quantizer.quantize_impl(source)
        parts = {"rowwise_storage": row if self.rowwise_usage else None, "columnwise_storage": col}
        return self.around(tensor.shape, tensor.dtype, tensor.device, parts)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """As :meth:`Quantizer.update_quantized`, but another quantizer leaves sides alone that it does not use."""
        self.require_target(src, dst)
        is_own, made_by = self is dst._quantizer, self.of_shard(dst)
        used = [(side, by) for side, by, is_used in made_by._each() if is_used or (is_own and dst.has(side))]
        for side, by in used:
            if dst.has(side):
                by.require_target(src, getattr(dst, f"_{side}_storage"))
        if noop_flag is not None and bool(noop_flag.any()):
            return dst
        values = decoded(src.detach().to(dst.device)).view(dst.shape)
        for side, by in used:
            source = values
            if side == "columnwise" and self.columnwise_source == "rowwise_dequantized":
                is_written = used[0][0] == "rowwise"
                row = dst._rowwise_storage if is_written else made_by.rowwise_quantizer.quantize_impl(values)
                source = row.values_in(values.dtype).view(dst.shape)
            if dst.has(side):
                by.update_quantized(source, getattr(dst, f"_{side}_storage"))
            else:
                setattr(dst, f"_{side}_storage", by.quantize_impl(source))
        return dst

    def make_empty(self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
        """An uninitialised tensor of ``shape`` with the sides of both quantizers."""
        whole, requires_grad = tuple(shape), others.pop("requires_grad", False)
        parts = {
            f"{side}_storage": by.make_empty(whole, dtype=dtype, **others) for side, by, used in self._each() if used
        }
        device = next((part.device for part in parts.values()), torch.device(others.get("device") or "cpu"))
        made = self.around(torch.Size(whole), dtype, device, parts)
        return made.requires_grad_(requires_grad) if requires_grad else made

    with_amax_reduction = _of_sides("with_amax_reduction", False, "Whether a side shares its amaxes.")
    amax_reduction_group = _of_sides("amax_reduction_group", None, "The group over which amaxes are shared.")

    def is_requantization_safe(self) -> bool:
        return all(by.is_requantization_safe() for _, by, _ in self._each())

    def supports_only_rowwise_all_gather(self) -> bool:
        """As the rowwise quantizer; True also where the columnwise side, of NVFP4, does not decode by itself."""
        columnwise_decodes = not isinstance(self.columnwise_quantizer, NVFP4Quantizer)
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or not columnwise_decodes

    def is_quantizable(self, inp: Tensor) -> bool:
        return all(by.is_quantizable(inp) for _, by, _ in self._each())

    def __repr__(self) -> str:
        return (
            f"HybridQuantizer(rowwise_quantizer={self.rowwise_quantizer!r}, "
            f"columnwise_quantizer={self.columnwise_quantizer!r}, columnwise_source={self.columnwise_source!r})"
        )
