"""Which way computes a linear layer."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, ScaleRule
from fp4engine.ops.cast import amax, as_it_is
from fp4engine.ops.linear.by_fp8 import LinearByFP8, LinearByFP8Blocks
from fp4engine.ops.linear.by_operations import LinearByOperations
from fp4engine.ops.linear.by_values import LinearByValues
from fp4engine.ops.linear.way import LayerCasts, Sizes
from fp4engine.ops.operation import PLAIN
from fp4engine.ops.reduce import largest_magnitudes, packed_amaxes
from fp4engine.ops.tiles import TiledOperand

LinearAtOnce = LinearByValues | LinearByFP8 | LinearByFP8Blocks


def linear_at_once(casts: LayerCasts, x: Tensor, weight: Tensor, tiles: TiledOperand | None) -> LinearAtOnce | None:
    """What computes ``x @ weight.T`` and its gradients with few launches; None where single operations have to.

    Not for code that is traced.

    Args:
        x: a matrix.
        tiles: what ``weight`` was cast to by its rowwise spec, if it has no values; by square blocks.
    """
    if type(x) not in PLAIN or type(weight if tiles is None else tiles.packed) not in PLAIN:
        return None
    found = covering(casts, x.dtype, weight.dtype, x.device)
    if tiles is not None and not isinstance(found, LinearByValues):
        return None
    return found if found is not None and found.takes(x.shape[0], *weight.shape) else None


def way_of(
    casts: LayerCasts, sizes: Sizes, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> LinearAtOnce | LinearByOperations:
    """What computes a layer of plain tensors: few launches, or single operations where these do not take it.

    What is kept does not depend on the sizes. Where nothing covers the casts it is one buffer, since an operator that
    writes to a token has to return a fixed number of tensors.
    """
    found = covering(casts, dtype, weight_dtype, device)
    if found is not None and found.takes(*sizes):
        return found
    return LinearByOperations(casts, in_one_buffer=not isinstance(found, LinearByFP8Blocks))


@cache
def covering(
    casts: LayerCasts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> LinearAtOnce | None:
    """What computes layers of some sizes by few launches; None if nothing covers the casts."""
    for left, right, _ in casts.products(dtype, weight_dtype):
        if CastSpec.from_key(left).rotation != CastSpec.from_key(right).rotation:
            return None  # the product itself says what is wrong
    for kind in (LinearByValues, LinearByFP8, LinearByFP8Blocks):
        if kind.covers(casts, dtype, weight_dtype, device):
            return kind(casts)
    return None


def amaxes_of(weights: Sequence[Tensor], casts: Sequence[LayerCasts]) -> Tensor:
    """FP32 [2 n, AMAX_STRIDE], first in two rows the outer amaxes that both casts of a weight need, none negative.

    Args:
        casts: of the layer of each, whose amaxes ranks can share (:func:`fp4engine.ops.linear.way.shares_amaxes`).
    """
    if all(map(_needs_magnitudes_alone, casts)):
        found = largest_magnitudes([as_it_is(weight) for weight in weights])
        return packed_amaxes([found.repeat_interleave(2)])
    values: list[Tensor] = []
    for weight, own in zip(weights, casts, strict=True):
        row, col = (CastSpec.from_key(key) for key in own.weight)
        values += [value for value in amax(weight, row, col, backend=own.backend) if value is not None]
    return packed_amaxes(values)


@cache
def _needs_magnitudes_alone(casts: LayerCasts) -> bool:
    """Whether the outer amaxes of both casts of a weight are its largest magnitude."""
    specs = [CastSpec.from_key(key) for key in casts.weight]
    return all(spec.rotation is None and spec.scale_rule is not ScaleRule.ALIGNED for spec in specs)
