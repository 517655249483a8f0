"""What a rank hands to collectives, and what it sends of that."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENT = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1,
}
"""Collective -> what one rank of a ring sends, over what it hands in."""


class Wire(TorchDispatchMode):
    """Counts the collectives that run inside, those of DTensor and of backward passes too.

    Attributes:
        calls: ``(collective, dtype) -> [calls, bytes handed in, bytes sent in a ring]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as the operations that it is made of
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2].strip("_"), tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _count(self, operator: str, given: Iterable[Any]) -> None:
        name = next((name for name in SENT if operator.startswith((name, name.replace("_", "")))), None)
        given = list(given)
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        groups = [group for leaf in given if (group := _group(leaf)) is not None]
        if name is None or not tensors or not groups:
            return  # wait_tensor, barrier
        handed, ranks = tensors[-1], groups[-1].size()  # outputs come before inputs
        counts = self.calls.setdefault((name, str(handed.dtype).removeprefix("torch.")), [0, 0, 0])
        for index, count in enumerate((1, handed.nbytes, round(SENT[name](ranks) * handed.nbytes))):
            counts[index] += count

    def table(self) -> list[dict[str, Any]]:
        """One entry for each collective and dtype."""
        return [
            {"collective": name, "dtype": dtype, "calls": calls, "bytes": handed, "sent": sent}
            for (name, dtype), (calls, handed, sent) in self.calls.items()
        ]


def _group(leaf: Any) -> Any:
    """The process group that an argument of a collective is, or names."""
    if isinstance(leaf, str):
        try:
            return _resolve_process_group(leaf)
        except (RuntimeError, ValueError, KeyError):
            return None  # a reduction's name
    if isinstance(leaf, dist.ProcessGroup):
        return leaf
    if isinstance(leaf, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(leaf)
        except RuntimeError:
            return None  # a reduction
    return None
