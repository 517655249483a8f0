"""FP8 in blocks of 1x128 or 128x128 by TransformerEngine's names."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.arguments import require_one_of
from fp4engine.formats import CastSpec, fp8, fp8_block
from fp4engine.quantizers.base import Quantizer as FrozenQuantizer
from fp4engine.reference import round_outer_amax
from fp4engine.reference.scaling import block_amax
from fp4engine.te.pytorch.constants import DType, fp8_element
from fp4engine.te.pytorch.layout import ScaleLayout, matrix_shape, remember, remembered
from fp4engine.te.pytorch.quantizer import decoded, spec_of
from fp4engine.te.pytorch.tensor.block_storage import SIDES, BlockQuantizer, BlockStorage, BlockTensor
from fp4engine.te.pytorch.tensor.float8_tensor import require_epsilon
from fp4engine.tensor import Operand
from fp4engine.tensor import QuantizedTensor as Operands

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"]

_OF_LINES, _OF_SQUARES = ScaleLayout(1, True, (1, 4)), ScaleLayout(128, False, (1, 4))


class Float8BlockwiseQTensorStorage(BlockStorage):
    """FP8 codes, columnwise ones of the transposed tensor [K, ...], and FP32 scales.

    Attributes:
        _rowwise_scale_inv: of 1x128, [K / 128, M], with M padded to a multiple of 4; of 128x128, [M / 128, K / 128],
            with the last axis padded to a multiple of 4.
        _columnwise_scale_inv: the same of the transpose: [M / 128, K] or [K / 128, M / 128].
    """

    _WORDS: ClassVar[dict[str, Any]] = {"_fp8_dtype": DType.kFloat8E4M3, "_is_2D_scaled": True}
    _PLACES = (*BlockStorage._PLACES, "fp8_dtype", "quantizer", "is_2D_scaled")
    _fp8_dtype: DType
    _is_2D_scaled: bool
    _scale_dtype = torch.float32

    @classmethod
    def _layout(cls, side: str, words: dict[str, Any]) -> ScaleLayout:
        return _OF_SQUARES if words["is_2D_scaled"] else _OF_LINES

    @classmethod
    def _encoded(cls, operands: Operands, quantizer: Any) -> dict[str, Any]:
        given = {side: getattr(operands, side) for side in SIDES}
        wide = {side: own and own._replace(scale_inv=_wide_scales(own)) for side, own in given.items()}
        made = super()._encoded(Operands(operands.shape, operands.dtype, **wide), quantizer)
        for side, own in given.items():
            if own is not None and own.scale_inv.dtype != torch.float32:
                remember(made[f"_{side}_scale_inv"], own.scale_inv)
        return made

    def _spec(self, side: str) -> CastSpec:
        element = fp8_element(type(self).__name__, self._fp8_dtype)
        return fp8_block(element, 128 if self._is_2D_scaled else 1, power_of_two=False)

    def _operand(self, side: str) -> Operand | None:
        made, by = super()._operand(side), self._quantizer
        if made is None or by is None or by.storage_words() != self._words():
            return made
        powers = remembered(getattr(self, f"_{side}_scale_inv"))
        return made if powers is None else made._replace(spec=spec_of(by, side), scale_inv=powers)

    def _as_cast(self, operand: Operand, spec: CastSpec) -> Operand:
        """``operand``, with powers of two as scales if ``spec`` has them.

        Raises:
            ValueError: they are none.
        """
        assert operand.scale_inv is not None
        scales = operand.scale_inv.to(spec.scale.torch_dtype)
        if not torch.equal(*(each.float().nan_to_num(nan=-1.0) for each in (scales, operand.scale_inv))):
            raise ValueError(
                f"the scales of a {type(self).__name__} have been written, to others than powers of two, and the "
                "recipe in force multiplies by powers of two; give Float8BlockScaling(use_f32_scales=True)"
            )
        return operand._replace(spec=spec, scale_inv=scales)

    def _default_quantizer(self) -> "Float8BlockQuantizer":
        dim = 2 if self._is_2D_scaled else 1
        return Float8BlockQuantizer(self._fp8_dtype, rowwise=True, columnwise=True, block_scaling_dim=dim)

    def _is_square(self) -> bool:
        return self._is_2D_scaled

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the attributes that FSDP2 gathers: codes and scales of the sides that are stored.

        Raises:
            NotImplementedError: blocks are 1x128, whose scales do not have the rows first.
        """
        if not self._is_2D_scaled:
            raise NotImplementedError("FSDP2 gathers FP8 in blocks of 128x128 only: give block_scaling_dim=2")
        return super().fsdp_buffer_fields()

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Codes and scales of one side, rows first and without padding.

        Raises:
            RuntimeError: the rows of this rank do not end where a block ends.
        """
        names = self.fsdp_buffer_fields()
        rows, cols = matrix_shape(self.shape)
        if rows % 128:
            raise RuntimeError(
                f"FSDP2 cannot gather FP8 in blocks of 128x128 of which a rank has {rows} rows, not a multiple of 128"
            )
        tiles = -(-rows // 128), -(-cols // 128)
        if self.has("rowwise"):
            assert self._rowwise_scale_inv is not None
            made = self._rowwise_data, self._rowwise_scale_inv[:, : tiles[1]].contiguous()
            return made, {"direction": "rowwise", "field_names": names}
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        data = self._columnwise_data.movedim(0, -1).contiguous()
        scales = self._columnwise_scale_inv[:, : tiles[0]].T.contiguous()
        return (data, scales), {"direction": "columnwise", "field_names": names}

    def fsdp_assign_gathered(self, gathered: Any, meta: dict[str, Any]) -> None:
        """Take codes and scales of all ranks.

        Raises:
            RuntimeError: the number of scales is not the number of blocks.
        """
        data, scales = gathered
        rows, cols = matrix_shape(data.shape)
        tiles = -(-rows // 128), -(-cols // 128)
        if tuple(scales.shape) != tiles:
            raise RuntimeError(
                f"gathered scale geometry {list(scales.shape)} is not that of the blocks of {list(data.shape)}, "
                f"{list(tiles)}"
            )
        if meta["direction"] == "columnwise":
            data, scales = data.movedim(-1, 0).contiguous(), scales.T
        scales = pad(scales, (0, -scales.shape[1] % 4)).contiguous()
        setattr(self, f"_{meta['direction']}_data", data)
        setattr(self, f"_{meta['direction']}_scale_inv", scales)


def _wide_scales(side: Operand) -> Tensor:
    """The scales of ``side`` in FP32; the power of two of a block of zeros is 1, as in TransformerEngine.

    A block with an Inf or a NaN, whose codes are zeros too, keeps its NaN.
    """
    assert side.spec is not None and side.scale_inv is not None
    scales = side.scale_inv.float()
    if side.scale_inv.dtype == torch.float32:
        return scales
    is_zero = block_amax((side.data & 0x7F).float(), side.spec.block) == 0
    return torch.where(is_zero & ~scales.isnan(), 1.0, scales)


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, BlockTensor):
    """What :class:`Float8BlockQuantizer` makes."""


class Float8BlockQuantizer(BlockQuantizer):
    """FP8 in blocks of 1x128 or 128x128.

    Args:
        amax_epsilon: the least amax that a scale is chosen by.
        force_pow_2_scales: False keeps FP32 scales.
        block_scaling_dim: 1 for 1x128, 2 for 128x128.
    """

    tensor_class = Float8BlockwiseQTensor
    compatible_recipe = "Float8BlockScaling"
    is_value = True

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
        fp8_element("Float8BlockQuantizer", fp8_dtype)
        require_one_of("Float8BlockQuantizer(block_scaling_dim=)", block_scaling_dim, (1, 2))
        self.dtype = DType.cast(fp8_dtype)
        self.amax_epsilon = require_epsilon("Float8BlockQuantizer", amax_epsilon)
        self.force_pow_2_scales, self.block_scaling_dim, self.block_len = force_pow_2_scales, block_scaling_dim, 128

    def frozen(self, stream: int = 0) -> FrozenQuantizer:
        element = fp8_element("Float8BlockQuantizer", self.dtype)
        spec = fp8_block(element, 128 if self.block_scaling_dim == 2 else 1, power_of_two=self.force_pow_2_scales)
        return FrozenQuantizer(spec, spec, stream=stream)

    @property
    def only_casts(self) -> bool:
        return super().only_casts and not self.amax_epsilon

    def _operands(self, tensor: Tensor, **given: Any) -> Operands:
        """A block whose amax is below ``amax_epsilon`` is cast as a whole tensor of that amax would be."""
        made = super()._operands(tensor, **given)
        if not self.amax_epsilon:
            return made
        matrix = decoded(tensor).reshape(matrix_shape(made.shape))
        row = made.rowwise and _with_floor(made.rowwise, matrix, self.amax_epsilon)
        col = made.columnwise and _with_floor(made.columnwise, matrix.T, self.amax_epsilon)
        return Operands(made.shape, made.dtype, row, col)

    def storage_words(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "is_2D_scaled": self.block_scaling_dim == 2}

    def is_requantization_safe(self) -> bool:
        return True


def _with_floor(side: Operand, matrix: Tensor, epsilon: float) -> Operand:
    """``side`` of ``matrix`` with blocks whose amax is below ``epsilon`` as if that were their amax."""
    spec = side.spec
    assert spec is not None and side.scale_inv is not None
    whole = fp8(spec.element, power_of_two=spec.scale_rule.is_power_of_two)
    amax = round_outer_amax(torch.full((1,), epsilon, dtype=torch.float32, device=matrix.device), whole)
    other = FrozenQuantizer(whole, whole).quantize(matrix, columnwise=False, rowwise_amax=amax).rowwise
    assert other is not None
    values = pad(matrix.float(), (0, side.data.shape[1] - side.cols))
    is_small = block_amax(values.contiguous(), spec.block) < amax
    codes = pad(other.data, (0, side.data.shape[1] - other.data.shape[1]))
    data = torch.where(is_small.repeat_interleave(spec.block[1], 1), codes, side.data)
    scale_inv = torch.where(is_small, (amax / whole.numerator).to(side.scale_inv.dtype), side.scale_inv)
    return side._replace(data=data, scale_inv=scale_inv)
