"""NVFP4 by TransformerEngine's names."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.environment import refuse_what_is_not_implemented
from fp4engine.formats import CastSpec
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.quantizers.nvfp4 import NVFP4Quantizer as FrozenNVFP4Quantizer
from fp4engine.te.pytorch.constants import DType
from fp4engine.te.pytorch.layout import ScaleLayout, matrix_shape, transposed_shape, up_to
from fp4engine.te.pytorch.quantizer import decoded
from fp4engine.te.pytorch.tensor.block_storage import BlockQuantizer, BlockStorage, BlockTensor
from fp4engine.te.pytorch.tensor.float8_tensor import share_amaxes
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = ["NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"]

_LAYOUT = ScaleLayout(1, False, (128, 4))
_SETTINGS = (
    "with_rht", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6",
    "nvfp4_4over6_err_mode", "with_random_sign_mask",
)  # fmt: skip
"""Settings that fp4engine's quantizer has by the same names."""


class NVFP4TensorStorage(BlockStorage):
    """Two codes in a byte, the columnwise ones of the transpose; E4M3 scales as bytes, and amaxes.

    Attributes:
        _rowwise_scale_inv: [M, K / 16], padded to multiples of 128 and 4.
        _columnwise_scale_inv: [K, M / 16], padded alike.
        _amax_rowwise, _amax_columnwise: FP32 [1], or [M] where rows have scales of their own.
    """

    _TENSORS = (*BlockStorage._TENSORS, "_amax_rowwise", "_amax_columnwise")
    _WORDS: ClassVar[dict[str, Any]] = {
        "_fp4_dtype": DType.kFloat4E2M1,
        "_with_gemm_swizzled_scales": False,
        "_row_scaled_nvfp4": False,
        "_nvfp4_use_4over6": False,
        "_nvfp4_e4m3_max": 448,
    }
    _PLACES = (
        *BlockStorage._PLACES, "amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales",
    )  # fmt: skip
    _SIDES: ClassVar[dict[str, tuple[str, ...]]] = {
        side: (*names, f"_amax_{side}") for side, names in BlockStorage._SIDES.items()
    }
    _amax_rowwise: Tensor | None
    _amax_columnwise: Tensor | None
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int

    @classmethod
    def _layout(cls, side: str, words: dict[str, Any]) -> ScaleLayout:
        return _LAYOUT

    @classmethod
    def _laid_codes(cls, side: str, operand: Operand, shape: Iterable[int]) -> Tensor:
        return operand.data.view(cls._empty_codes(side, shape))

    @classmethod
    def _empty_codes(cls, side: str, shape: Iterable[int]) -> torch.Size:
        *leading, last = (tuple(shape) if side == "rowwise" else transposed_shape(shape)) or (1,)
        if side == "columnwise" and (last % 16 or not leading):  # one axis for all rows, padded
            last, *leading = matrix_shape(shape)
        return torch.Size((*leading, up_to(last, 16) // 2))

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        made = super()._encoded(operands, quantizer)
        for side in ("rowwise", "columnwise"):
            operand: Operand | None = getattr(operands, side)
            if operand is not None:
                made[f"_amax_{side}"] = operand.amax
        return made

    def _amax(self, side: str, spec: CastSpec) -> Tensor:
        return getattr(self, f"_amax_{side}")

    def _read_by(self) -> Any:
        by: Any = self._quantizer
        mine = {**self._words(), "with_gemm_swizzled_scales": None}
        alike = by is not None and {**by.storage_words(), "with_gemm_swizzled_scales": None} == mine
        return by if alike else self._default_quantizer()

    def _default_quantizer(self) -> "NVFP4Quantizer":
        return NVFP4Quantizer(
            columnwise=not self._row_scaled_nvfp4,
            row_scaled_nvfp4=self._row_scaled_nvfp4,
            nvfp4_use_4over6=self._nvfp4_use_4over6,
            nvfp4_e4m3_max=self._nvfp4_e4m3_max,
        )

    def _shape_of_codes(self, side: str, shape: torch.Size) -> torch.Size:
        return super()._shape_of_codes(side, torch.Size((*shape[:-1], 2 * shape[-1])))

    def _is_square(self) -> bool:
        by = self._quantizer
        return by is not None and by.with_2d_quantization and self._spec("rowwise") == self._spec("columnwise")

    def _misread(self, made_by: Any, columnwise: bool) -> str:
        """The transform of columnwise codes, and whether blocks are square, stand in quantizers alone."""
        mine, theirs = (quantizer.frozen() for quantizer in (self._read_by(), made_by))
        if self._is_square() and theirs.rowwise_spec.block != mine.rowwise_spec.block:
            return "with_2d_quantization mismatch: True here, and False in the source"
        here, there = (quantizer.columnwise_spec.rotation for quantizer in (mine, theirs))
        if columnwise and here != there:
            return f"with_rht mismatch: columnwise codes under {here} here, and under {there} in the source"
        return ""

    def _turned(self, side: str) -> dict[str, Tensor | None] | None:
        made, other = super()._turned(side), self._amax_columnwise if side == "rowwise" else self._amax_rowwise
        return None if made is None or other is None else {**made, f"_amax_{side}": other.clone()}

    def _cut(self, side: str, rows: slice, cols: slice, shape: torch.Size) -> dict[str, Tensor] | None:
        made, amax = super()._cut(side, rows, cols, shape), getattr(self, f"_amax_{side}")
        if made is None:
            return None
        lead = rows if side == "rowwise" else cols
        return {**made, f"_amax_{side}": amax if amax.numel() == 1 else amax[lead]}

    def _packed(self, elements: slice) -> slice:
        return slice(elements.start // 2, up_to(elements.stop, 16) // 2)

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The codes, of which the columnwise ones are made after they are gathered, and their scales.

        Raises:
            NotImplementedError: blocks are 1x16, whose columnwise codes are another cast.
        """
        if self.has("columnwise") and not self._is_square():
            raise NotImplementedError(
                "NVFP4 blocks of 1x16 cannot be gathered by FSDP2, since columnwise codes are another cast: give "
                "NVFP4Quantizer(with_2d_quantization=True), or columnwise=False"
            )
        return self._SIDES["rowwise"][:2]


class NVFP4Tensor(NVFP4TensorStorage, BlockTensor):
    """What :class:`NVFP4Quantizer` makes."""


class NVFP4Quantizer(BlockQuantizer):
    """E2M1 codes in blocks of 16 with E4M3 scales; arguments as in :class:`fp4engine.NVFP4Quantizer`.

    Args:
        fp4_dtype: only ``DType.kFloat4E2M1``.
        rowwise, columnwise: which sides to make.
        with_amax_reduction, amax_reduction_group: share amaxes over the group.
        with_post_rht_amax: take the columnwise amax after the transform, which is always so here.
    """

    tensor_class = NVFP4Tensor
    compatible_recipe = "NVFP4BlockScaling"
    is_value = True

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
        settings = {name: getattr(self, name) for name in _SETTINGS}
        bound = self.nvfp4_e4m3_max if self.nvfp4_use_4over6 else 448
        return FrozenNVFP4Quantizer(**settings, nvfp4_e4m3_max=bound, stream=stream)

    def storage_words(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "with_gemm_swizzled_scales": self.optimize_for_gemm,
            "row_scaled_nvfp4": self.row_scaled_nvfp4,
            "nvfp4_use_4over6": self.nvfp4_use_4over6,
            "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
        }

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        rows = matrix_shape(shape)[0] if self.row_scaled_nvfp4 else 1
        amaxes = {f"_amax_{side}": ((rows,), torch.float32) for side in self._sides()}
        return {**super().inner_tensor_specs(shape), **amaxes}

    @property
    def only_casts(self) -> bool:
        return super().only_casts and not self.with_amax_reduction

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        if not self.with_amax_reduction:
            return super()._operands(tensor, **given)
        values = decoded(tensor)
        row, col = self.frozen().amax(values, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        share_amaxes([amax for amax in (row, col) if amax is not None], self.amax_reduction_group)
        return super()._operands(values, **{**given, "rowwise_amax": row, "columnwise_amax": col})

    def is_quantizable(self, inp: Tensor) -> bool:
        rows = inp.numel() // max(inp.shape[-1], 1) if inp.ndim > 1 else 0
        return inp.ndim > 1 and rows % 16 == 0 and inp.shape[-1] % 16 == 0 and not self.row_scaled_nvfp4

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    @staticmethod
    def convert_shape_for_fp4(shape: Any) -> tuple[int, ...]:
        """Shape of the packed codes."""
        *leading, last = tuple(shape)
        return (*leading, last // 2)
