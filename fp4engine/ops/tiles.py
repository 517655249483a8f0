"""Operands of FP4 codes that have one scale per tile, as an all-gather brings them."""

from functools import cache

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops.operand import Operand


def spread_tiles(
    codes: Tensor,
    scales: Tensor,
    spec: CastSpec,
    cols: int,
    scale_inv: Tensor,
    columnwise: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> None:
    """Write what is missing to memory that is there: each tile's scale for all its rows, and the transposed operand.

    What is written keeps its version, since FSDP2 brings back what graphs refer to. Nothing here is traced.

    Args:
        codes: uint8 [rows, padded cols / 2], contiguous.
        scales: bytes, one of each block: uint8 [rows / block rows, blocks], contiguous.
        spec: how both were cast; square blocks if a transposed operand is asked for.
        cols: of the matrix without its padding.
        scale_inv: block scales of the rowwise operand.
        columnwise: codes and block scales of the transposed operand.
        backend: see :func:`fp4engine.ops.backend.choose`.
    """
    key = spec.key
    if backends.choose("spread_tiles", codes.device, backend, (key,), _supported) == "triton":
        from fp4engine.kernels.transpose import transpose

        transpose(codes, scales, key, cols, scale_inv, *(columnwise or (None, None)))
        return
    rows = codes.shape[0]
    spread = scales.repeat_interleave(spec.block[0], 0)[:rows]
    scale_inv.data.view(torch.uint8).copy_(spread)  # .data has a version of its own
    if columnwise is not None:
        made = Operand(spec, rows, cols, codes, spread.view(scale_inv.dtype)).transposed()
        assert made.scale_inv is not None
        columnwise[0].data.copy_(made.data)
        columnwise[1].data.view(torch.uint8).copy_(made.scale_inv.view(torch.uint8))


@cache
def _supported(key: str) -> tuple[bool, str]:
    from fp4engine.kernels.transpose import supports

    return supports(CastSpec.from_key(key))
