"""FP4 codes that have one scale per tile, as an all-gather brings them, and the operands that are made of them."""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, Outer
from fp4engine.formats.tiles import Part
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import as_it_is, casts_supported, codes_outputs, fused_casts_supported, kernels, quantize
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, define, is_plain
from fp4engine.private import constant_when_traced


class TiledOperand(NamedTuple):
    """A matrix [rows, cols] of FP4 codes with one scale of each block: a 16x16 tile has one where an operand has 16.

    Products read the operands that :meth:`rowwise` and :meth:`columnwise` make of it each time, and nobody keeps.

    Attributes:
        spec: how it was cast; square blocks where the transposed operand is asked for.
        rows, cols: logical shape.
        parts: how many parts it consists of, one behind another, each of as many rows: whole blocks, if several.
        packed: uint8 [parts * bytes of a part], contiguous: codes, scales and the outer amax, see
            :class:`fp4engine.formats.tiles.Part`.
    """

    spec: CastSpec
    rows: int
    cols: int
    parts: int
    packed: Tensor

    @property
    def tensors(self) -> tuple[Tensor]:
        """The one tensor that it consists of."""
        return (self.packed,)

    @property
    def amax(self) -> Tensor:
        """FP32 [1], a view."""
        start = _amax_at(self.spec.key, self.rows // self.parts, self.cols)
        return self.packed[start : start + torch.float32.itemsize].view(torch.float32)

    def rowwise(self, backend: str = "auto") -> Operand:
        """The operand [rows, cols], with each tile's scale for all its rows."""
        return self._spread(False, backend)

    def columnwise(self, backend: str = "auto") -> Operand:
        """The operand of the transposed matrix under the same cast."""
        return self._spread(True, backend)

    def _spread(self, transposed: bool, backend: str) -> Operand:
        spec, rows, cols, parts, packed = self
        run = _spread_tiles if is_plain(packed) else torch.ops.fp4engine.spread_tiles
        made = run(packed, spec.key, rows, cols, parts, transposed, backend)
        rows, cols = (cols, rows) if transposed else (rows, cols)
        return Operand(spec, rows, cols, made[0], made[1], self.amax)


@constant_when_traced
def _amax_at(spec: str, rows: int, cols: int) -> int:
    return Part.of(CastSpec.from_key(spec), rows, cols).amax


def _spread_tiles(
    packed: Tensor, spec: str, rows: int, cols: int, parts: int, transposed: bool, backend: str
) -> list[Tensor]:
    """Codes and block scales of the operand [rows, cols]; if ``transposed``, of the one [cols, rows]."""
    if backends.choose("spread_tiles", packed.device, backend, (spec,), _supported) == "triton":
        from fp4engine.kernels.tiles import spread_tiles

        return spread_tiles(packed, spec, rows, cols, parts, transposed)
    cast, part = CastSpec.from_key(spec), Part.of(CastSpec.from_key(spec), rows // parts, cols)
    by_part, dtype = packed.view(parts, part.size), cast.scale.torch_dtype
    codes = by_part[:, : part.codes].reshape(rows, cast.padded_cols(cols) // 2)
    shape = -(-rows // cast.block[0]), cast.num_blocks(cols) * dtype.itemsize
    scales = by_part[:, part.codes : part.codes + part.scales].reshape(shape)
    spread = scales.repeat_interleave(cast.block[0], 0)[:rows].view(dtype)
    if not transposed:
        return [codes.clone() if parts == 1 else codes, spread]  # an operator's output is no part of an input
    made = Operand(cast, rows, cols, codes, spread).transposed()
    assert made.scale_inv is not None
    return [made.data, made.scale_inv.contiguous()]


def _spread_tiles_outputs(packed: Tensor, spec: str, rows: int, cols: int, transposed: bool) -> list[Output]:
    cast = CastSpec.from_key(spec)
    return codes_outputs(cast, cols, rows) if transposed else codes_outputs(cast, rows, cols)


@cache
def _supported(key: str) -> tuple[bool, str]:
    from fp4engine.kernels.tiles import supports

    return supports(CastSpec.from_key(key))


define(_spread_tiles, _spread_tiles_outputs)


def quantize_tiles(
    matrices: Sequence[Tensor], specs: Sequence[CastSpec], amaxes: Sequence[Tensor | None], backend: str = "auto"
) -> list[TiledOperand]:
    """Matrices on one device, cast along their rows, in one part each; in one launch if FP4 kernels cover all of them.

    Args:
        matrices, specs, amaxes: equally many of each, as for :func:`quantize`; no cast may draw. Not to be traced.
    """
    together = [
        amax is not None and not spec.is_stochastic and _casts_together(spec.key, matrix.dtype, matrix.device, backend)
        for matrix, spec, amax in zip(matrices, specs, amaxes, strict=True)
    ]
    if not all(together):
        return [_packed(*one, backend) for one in zip(matrices, specs, amaxes, strict=True)]
    from fp4engine.kernels.tiles import resolve_tiles

    meta_of, inputs = kernels().meta_of, list(map(as_it_is, matrices))
    asked = tuple(map(meta_of, inputs)), tuple(map(meta_of, amaxes))
    launch = resolve_tiles(*asked, inputs[0].device, tuple([spec.key for spec in specs]))
    outputs = launch(*chain.from_iterable(zip(inputs, amaxes, strict=True)))
    backends.record(*("quantize/triton",) * len(inputs))
    return [
        TiledOperand(spec, matrix.shape[0], matrix.shape[1], 1, packed)
        for matrix, spec, packed in zip(inputs, specs, outputs, strict=True)
    ]


def _packed(matrix: Tensor, spec: CastSpec, amax: Tensor | None, backend: str) -> TiledOperand:
    operand, _ = quantize(matrix, spec, None, rowwise_amax=amax, backend=backend)
    assert operand is not None and operand.scale_inv is not None and operand.amax is not None
    rows, cols = matrix.shape
    part = Part.of(spec, rows, cols)
    packed = operand.data.new_zeros(part.size)
    packed[: part.codes] = operand.data.view(-1)
    packed[part.codes : part.codes + part.scales] = operand.scale_inv[:: spec.block[0]].reshape(-1).view(torch.uint8)
    tiled = TiledOperand(spec, rows, cols, 1, packed)
    tiled.amax.copy_(operand.amax)
    return tiled


@cache
def _casts_together(key: str, dtype: torch.dtype, device: torch.device, backend: str) -> bool:
    if backends.decide(device, backend, (key, "", dtype), casts_supported)[0] != "triton":
        return False
    spec = CastSpec.from_key(key)
    return fused_casts_supported(key, dtype)[0] and spec.block[1] > 0 and spec.outer is Outer.TENSOR
