"""Adapters that PEFT puts on a parameter of three dimensions (``target_parameters``), beside its products.

While such a layer runs, PEFT parametrizes the parameter as ``W + s A B``. A product by that sum would cast the adapter
to FP4 with the weight, so here W is multiplied by itself, and the adapter in high precision.

Legend: G experts, N out_features, K in_features, R rank.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def original(owner: torch.nn.Module, name: str) -> Tensor:
    """``owner``'s parameter ``name`` without PEFT's adapters; other parametrizations stay in effect."""
    chain = _chain(owner, name)
    return getattr(owner, name) if chain is None else chain.original


def adapters(owner: torch.nn.Module, name: str, transposed: bool) -> Iterator[Sequence[Callable[[Tensor], Tensor]]]:
    """For each adapter on ``owner``'s parameter, what it adds to the product of each expert: [M, K] -> [M, N].

    Args:
        transposed: the parameter is [G, K, N], and not [G, N, K].
    """
    for proxy in _chain(owner, name) or ():
        if hasattr(proxy, "delta_weight"):
            delta = proxy.delta_weight.mT if transposed else proxy.delta_weight
            yield [partial(F.linear, weight=weight) for weight in delta.unbind()]
        else:
            down, up = (proxy.lhs, proxy.rhs) if transposed else (proxy.rhs.mT, proxy.lhs.mT)
            yield [partial(_low_rank, down=d, up=u, scaling=proxy.scaling) for d, u in zip(down, up, strict=True)]


def _low_rank(inp: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """[M, K] by [K, R] and [R, N]."""
    return (inp @ down) @ up * scaling


def _chain(owner: torch.nn.Module, name: str) -> Any:
    """The parametrizations of the parameter where all of them are PEFT's; else None."""
    lists: Any = getattr(owner, "parametrizations", None)
    if lists is None or name not in lists:
        return None
    chain = lists[name]
    return chain if all(type(proxy).__module__.partition(".")[0] == "peft" for proxy in chain) else None
