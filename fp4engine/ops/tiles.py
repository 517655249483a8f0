"""FP4 codes that have one scale per tile, as an all-gather brings them, and the operands that are made of them."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import codes_outputs
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, define, is_plain


class TiledOperand(NamedTuple):
    """A matrix [rows, cols] of FP4 codes with one scale of each block: a 16x16 tile has one where an operand has 16.

    Products read the operands that :meth:`rowwise` and :meth:`columnwise` make of it each time, and nobody keeps.

    Attributes:
        spec: how it was cast; square blocks where the transposed operand is asked for.
        rows, cols: logical shape.
        data: codes, uint8 [rows, padded cols / 2], contiguous.
        scales: bytes of the scales, uint8 [rows / block rows, blocks], contiguous.
        amax: FP32 [1].
    """

    spec: CastSpec
    rows: int
    cols: int
    data: Tensor
    scales: Tensor
    amax: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(data, scales, amax)``."""
        return self.data, self.scales, self.amax

    def rowwise(self, backend: str = "auto") -> Operand:
        """The operand [rows, cols], with each tile's scale for all its rows."""
        (scale_inv,) = _spread(self, False, backend)
        return Operand(self.spec, self.rows, self.cols, self.data, scale_inv, self.amax)

    def columnwise(self, backend: str = "auto") -> Operand:
        """The operand of the transposed matrix under the same cast."""
        data, scale_inv = _spread(self, True, backend)
        return Operand(self.spec, self.cols, self.rows, data, scale_inv, self.amax)


def _spread(tiled: TiledOperand, transposed: bool, backend: str) -> list[Tensor]:
    run = _spread_tiles if is_plain(tiled.data) else torch.ops.fp4engine.spread_tiles
    return run(tiled.data, tiled.scales, tiled.spec.key, tiled.rows, tiled.cols, transposed, backend)


def _spread_tiles(
    codes: Tensor, scales: Tensor, spec: str, rows: int, cols: int, transposed: bool, backend: str
) -> list[Tensor]:
    """Block scales of the operand [rows, cols]; if ``transposed``, codes and block scales of the one [cols, rows]."""
    if backends.choose("spread_tiles", codes.device, backend, (spec,), _supported) == "triton":
        from fp4engine.kernels.transpose import spread_tiles

        return spread_tiles(codes, scales, spec, cols, transposed)
    cast = CastSpec.from_key(spec)
    spread = scales.repeat_interleave(cast.block[0], 0)[:rows].view(cast.scale.torch_dtype)
    if not transposed:
        return [spread]
    made = Operand(cast, rows, cols, codes, spread).transposed()
    assert made.scale_inv is not None
    return [made.data, made.scale_inv.contiguous()]


def _spread_tiles_outputs(codes: Tensor, spec: str, rows: int, cols: int, transposed: bool) -> list[Output]:
    cast = CastSpec.from_key(spec)
    return codes_outputs(cast, cols, rows) if transposed else codes_outputs(cast, rows, cols)[1:]


@cache
def _supported(key: str) -> tuple[bool, str]:
    from fp4engine.kernels.transpose import supports

    return supports(CastSpec.from_key(key))


define(_spread_tiles, _spread_tiles_outputs)
