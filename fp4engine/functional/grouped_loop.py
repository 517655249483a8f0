"""Grouped linear transformations as a loop over slices of rows, whose counts (``m_splits``) the host knows.

:mod:`fp4engine.functional.grouped_linear` computes the same by counts that stay on the device.
"""

from collections.abc import Callable, Sequence
from math import prod
from operator import index

import torch
from torch import Tensor

from fp4engine.arguments import require_dense


def require_counts(m_splits: Tensor, groups: int) -> None:
    """Raise a ValueError unless ``m_splits`` is a vector of ``groups`` integers, whose values are not read."""
    is_integral = not (m_splits.is_floating_point() or m_splits.is_complex() or m_splits.dtype == torch.bool)
    if m_splits.ndim != 1 or len(m_splits) != groups or not is_integral:
        raise ValueError(
            f"m_splits must be a vector of {groups} integers, got {m_splits.dtype} of shape {tuple(m_splits.shape)}"
        )


def split_sizes(m_splits: Sequence[int] | Tensor, groups: int, rows: int) -> list[int]:
    """``m_splits`` as a list of ints; a tensor is copied to the host, which waits for a device once.

    Raises:
        ValueError: not ``groups`` non-negative integers that add up to ``rows``.
    """
    if isinstance(m_splits, Tensor):
        require_counts(m_splits, groups)
        if m_splits.is_meta:
            raise ValueError("m_splits must have values, got a tensor on 'meta'")
        sizes: list[int] = m_splits.tolist()
    else:
        are_counts = isinstance(m_splits, Sequence) and not any(isinstance(size, bool) for size in m_splits)
        if not are_counts or not all(hasattr(size, "__index__") for size in m_splits):
            raise ValueError(f"m_splits must be a sequence of {groups} integers, or a tensor of them, got {m_splits!r}")
        sizes = [index(size) for size in m_splits]
    if len(sizes) != groups or min(sizes, default=0) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"m_splits must be {groups} non-negative counts that add up to the {rows} rows of the input, got {sizes}"
        )
    return sizes


def grouped(inp: Tensor, m_splits: Sequence[int] | Tensor, transforms: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """``cat(transforms[i](inp_i))`` over the consecutive slices ``inp_i`` of ``m_splits[i]`` rows.

    Args:
        inp: [..., K], seen as [M, K].
        m_splits: rows of each slice; zeros anywhere. Every transform runs, so that a slice without rows still
            gives its weight a gradient, of zeros.

    Returns:
        [..., N].

    Raises:
        ValueError: ``inp`` is no dense tensor of at least one dimension, or ``m_splits`` are not its rows.
    """
    if not isinstance(inp, Tensor) or inp.ndim == 0:
        got = "a scalar tensor" if isinstance(inp, Tensor) else type(inp).__name__
        raise ValueError(f"the input must be a tensor of at least one dimension, got {got}")
    require_dense("the input", inp)
    matrix = inp.reshape(prod(inp.shape[:-1]), inp.shape[-1])
    slices = matrix.split(split_sizes(m_splits, len(transforms), matrix.shape[0]))
    outputs = [transform(rows) for transform, rows in zip(transforms, slices, strict=True)]
    output = torch.cat(outputs)
    return output.view(*inp.shape[:-1], output.shape[-1])
