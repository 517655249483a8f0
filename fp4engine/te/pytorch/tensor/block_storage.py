"""What storages with a scale for each block of codes have in common: MXFP8, FP8 in blocks of 128, and NVFP4."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.formats import CastSpec
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.layout import ScaleLayout, codes, matrix_shape, operand_shape, rectangle, transposed_shape
from fp4engine.te.pytorch.quantized_tensor import WHOLE, Part, QuantizedTensor, Quantizer, listed
from fp4engine.te.pytorch.quantizer import spec_of
from fp4engine.te.pytorch.tensor.identity_tensor import IdentityQuantizer
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

SIDES = ("rowwise", "columnwise")


class BlockStorage(QuantizedTensorStorage):
    """Codes and block scales of either side."""

    _TENSORS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    _PLACES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    _SIDES: ClassVar[dict[str, tuple[str, ...]]] = {side: (f"_{side}_data", f"_{side}_scale_inv") for side in SIDES}
    _rowwise_data: Tensor | None
    _columnwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _with_gemm_swizzled_scales: bool = False
    _scale_dtype: ClassVar[torch.dtype] = torch.uint8

    @classmethod
    def _layout(cls, side: str, words: dict[str, Any]) -> ScaleLayout:
        """How the block scales of ``side`` lie, by what :meth:`Quantizer.storage_words` says."""
        raise NotImplementedError(f"{cls.__name__} does not say how its scales lie")

    def _words(self) -> dict[str, Any]:
        return {name.removeprefix("_"): getattr(self, name) for name in self._WORDS}

    @classmethod
    def _laid_codes(cls, side: str, operand: Operand, shape: Iterable[int]) -> Tensor:
        """The stored codes of a tensor of ``shape``: in its own shape, or columnwise in the transposed shape."""
        return operand.data[:, : operand.cols].reshape(cls._empty_codes(side, shape)).contiguous()

    def _read_codes(self, side: str, spec: CastSpec, rows: int, cols: int) -> Tensor:
        """Inverse of :meth:`_laid_codes`."""
        return codes(getattr(self, f"_{side}_data"), rows, spec, cols)

    def _amax(self, side: str, spec: CastSpec) -> Tensor:
        """The amax of an operand: what stands for it where there is no outer scale."""
        return torch.full((1,), spec.constant_amax, dtype=torch.float32, device=getattr(self, f"_{side}_data").device)

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        words = quantizer.storage_words()
        made = {f"_{name}": value for name, value in words.items()}
        for side in SIDES:
            operand: Operand | None = getattr(operands, side)
            if operand is not None:
                assert operand.scale_inv is not None
                made[f"_{side}_data"] = cls._laid_codes(side, operand, operands.shape)
                swizzled = words.get("with_gemm_swizzled_scales", False)
                made[f"_{side}_scale_inv"] = cls._layout(side, words).lay(operand.scale_inv, swizzled)
        return made

    def _spec(self, side: str) -> CastSpec:
        """What the codes of ``side`` were cast by, as far as decoding asks."""
        spec = spec_of(self._read_by(), side)
        assert spec is not None
        return spec

    def _operand(self, side: str) -> Operand | None:
        if not self.has(side):
            return None
        rows, cols = operand_shape(self.shape, side)
        spec, layout = self._spec(side), self._layout(side, self._words())
        laid: Tensor = getattr(self, f"_{side}_scale_inv")
        scale_inv = layout.read(laid, rows, spec, cols, self._with_gemm_swizzled_scales)
        return Operand(spec, rows, cols, self._read_codes(side, spec, rows, cols), scale_inv, self._amax(side, spec))

    def _padded(self) -> dict[str, Tensor | None]:
        made = self._tensors()
        for side in filter(self.has, SIDES):
            name, spec, layout = f"_{side}_scale_inv", self._spec(side), self._layout(side, self._words())
            rows, cols = operand_shape(self.shape, side)
            laid: Tensor = getattr(self, name)
            if laid.shape != layout.shape(rows, spec.num_blocks(cols)):  # of a part
                made[name] = layout.lay(layout.read(laid, rows, spec, cols))
        return made

    def _shape_of_tensors(self) -> torch.Size:
        for side, data in zip(SIDES, (self._rowwise_data, self._columnwise_data), strict=True):
            if data is not None:
                return self._shape_of_codes(side, data.shape)
        raise RuntimeError(f"this {type(self).__name__} holds no data")

    def _shape_of_codes(self, side: str, shape: torch.Size) -> torch.Size:
        """The logical shape of codes of ``shape``."""
        return shape if side == "rowwise" else torch.Size((*shape[1:], *shape[:1]))

    def _turned(self, side: str) -> dict[str, Tensor | None] | None:
        """Square blocks: one side is the other one's transpose."""
        other = self._operand("columnwise" if side == "rowwise" else "rowwise")
        if other is None or not self._is_square():
            return None
        sides = {**dict.fromkeys(SIDES), side: other.transposed()}
        made = self._encoded(Operands(self.shape, self._dtype, **sides), self._get_quantizer())
        return {name: tensor for name, tensor in made.items() if name in self._SIDES[side]}

    def _is_square(self) -> bool:
        """Whether a block is as high as it is wide, so that its transpose is one."""
        return False

    def _create_columnwise(self) -> None:
        self.update_usage(columnwise_usage=True)

    def _viewed(self, shape: torch.Size) -> dict[str, Any]:
        if matrix_shape(shape) != matrix_shape(self.shape):
            raise RuntimeError(
                f"{type(self).__name__} does not support reshaping the inner dimension, along which blocks lie: "
                f"{list(self.shape)} to {list(shape)}"
            )
        metadata = self.get_metadata()
        for side in SIDES:
            data: Tensor | None = getattr(self, f"_{side}_data")
            if data is not None:
                like = type(self)._empty_codes(side, shape)
                metadata[f"{side}_data"] = data.view(like) if data.numel() == like.numel() else data
        return metadata

    @classmethod
    def _empty_codes(cls, side: str, shape: Iterable[int]) -> torch.Size:
        """The shape of the codes of a tensor of ``shape``."""
        return torch.Size(tuple(shape) if side == "rowwise" else transposed_shape(shape))

    def _cut(self, side: str, rows: slice, cols: slice, shape: torch.Size) -> dict[str, Tensor] | None:
        """The tensors of ``side`` of a rectangle that has ``shape``, in the same bytes; None if it tears blocks."""
        if not self.has(side) or self._with_gemm_swizzled_scales:
            return None
        is_turned = side == "columnwise"
        lead, along = (cols, rows) if is_turned else (rows, cols)
        end, block = operand_shape(self.shape, side)[1], self._spec(side).block[1]
        if along.start % block or (along.stop % block and along.stop != end):
            return None
        scales: Tensor = getattr(self, f"_{side}_scale_inv")
        blocks = slice(along.start // block, -(-along.stop // block))
        cut = self._layout(side, self._words()).cut(scales, lead, blocks)
        data = self._cut_codes(side, rows, cols, shape)
        return None if cut is None or data is None else {f"_{side}_data": data, f"_{side}_scale_inv": cut}

    def _cut_codes(self, side: str, rows: slice, cols: slice, shape: torch.Size) -> Tensor | None:
        """A view of the codes of a rectangle; None if it cannot have ``shape``."""
        data: Tensor = getattr(self, f"_{side}_data")
        like = type(self)._empty_codes(side, shape)
        if len(like) != 2:  # rows of several axes; whole ones
            return data.flatten(0, -2)[rows].view(like) if side == "rowwise" and like[-1] == data.shape[-1] else None
        per_byte = self.shape[-1] // max(data.shape[-1], 1) if side == "rowwise" else 1
        if side == "rowwise":
            return data.view(-1, data.shape[-1])[rows, cols.start // per_byte : -(-cols.stop // per_byte)]
        return data.view(data.shape[0], -1)[cols, self._packed(rows)]

    def _packed(self, elements: slice) -> slice:
        """The bytes of ``elements`` of a row of columnwise codes."""
        return elements

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return tuple(name for side in SIDES if self.has(side) for name in self._SIDES[side])

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """What :meth:`fsdp_buffer_fields` names, scales without padding rows, for FSDP2's gather.

        Raises:
            NotImplementedError: scales lie as tensor cores read them.
        """
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError(
                f"FSDP2 gathers scales of a {type(self).__name__} row by row, and GEMM-swizzled ones are not"
            )
        names, rows = self.fsdp_buffer_fields(), matrix_shape(self.shape)[0]
        lengths = {"_rowwise_scale_inv": rows, "_columnwise_scale_inv": -(-rows // self._spec("columnwise").block[1])}
        buffers = [(getattr(self, name), lengths.get(name)) for name in names]
        # Codes are given as they are, and not as views of them: who gathers may know them by identity.
        kept = tuple(tensor if length is None else tensor[:length] for tensor, length in buffers)
        return kept, {"field_names": names}

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor | None], meta: dict[str, Any]) -> None:
        """Take codes and scales of all ranks, and pad the scales."""
        super().fsdp_assign_gathered(gathered, meta)
        for side in SIDES:
            name, multiple = f"_{side}_scale_inv", self._layout(side, self._words()).multiples[0]
            if name in meta["field_names"]:
                scales: Tensor = getattr(self, name)
                setattr(self, name, pad(scales, (0, 0, 0, -scales.shape[0] % multiple)))


class BlockTensor(BlockStorage, QuantizedTensor):
    """A tensor of blocks; a rectangle of whole blocks is a tensor of the same bytes."""

    def _view_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in WHOLE or len(args[0]) != 1 or self.ndim == 1:
            return super()._view_by(func, args, kwargs)
        # FSDP2 makes this view of each shard and does not use it; blocks lie along the inner dimension, which it lacks
        view = IdentityQuantizer().quantize(self.values_in(self.dtype).flatten())
        view._is_part = True
        return view

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        """As the base class's.

        Raises:
            RuntimeError: the rows of this rank do not end where a block ends.
        """
        is_high = self.has("columnwise")
        height = self._spec("columnwise" if is_high else "rowwise").block[int(is_high)]
        rows = matrix_shape(self.shape)[0]
        if mesh is not None and mesh.size() > 1 and rows % height:
            raise RuntimeError(
                f"FSDP2 cannot gather a {type(self).__name__} of which a rank has {rows} rows, not a multiple of "
                f"{height}"
            )
        return super().fsdp_pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)

    def _parted(self, func: Any, args: Any, kwargs: Any) -> list[Part] | None:
        parts: list[Part] = []
        for part in listed(func(torch.empty(self.shape, dtype=torch.uint8, device="meta"), *args, **kwargs)):
            found = rectangle(part, self.shape[-1]) if self.ndim else None
            if found is None:
                return None
            cuts = {side: self._cut(side, *found, part.shape) for side in SIDES}
            if cuts["rowwise"] is None and (self.has("rowwise") or cuts["columnwise"] is None):
                return None
            given = {
                name.removeprefix("_"): None if cut is None else cut[name]
                for side, cut in cuts.items()
                for name in self._SIDES[side]
            }
            parts.append((part.shape, given))
        return parts


class BlockQuantizer(Quantizer):
    """What the quantizers of these formats have in common."""

    tensor_class: type[BlockTensor]

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, int]:
        """Shape of the block scales of a tensor of ``shape``, with their padding."""
        side = SIDES[columnwise]
        rows, cols = operand_shape(shape, side)
        spec = spec_of(self, side)
        assert spec is not None
        return self.tensor_class._layout(side, self.storage_words()).shape(rows, spec.num_blocks(cols))

    @staticmethod
    def get_columnwise_shape(shape: Iterable[int]) -> tuple[int, ...]:
        """``shape`` with the last axis first, as columnwise codes are stored: two of NVFP4 in a byte."""
        return transposed_shape(shape)

    def _sides(self) -> list[str]:
        return [side for side, is_used in self.get_usages().items() if is_used]

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        whole = tuple(shape)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for side in self._sides():
            found[f"_{side}_data"] = tuple(self.tensor_class._empty_codes(side, whole)), torch.uint8
            scales = self.get_scale_shape(whole, side == "columnwise")
            found[f"_{side}_scale_inv"] = scales, self.tensor_class._scale_dtype
        return found
