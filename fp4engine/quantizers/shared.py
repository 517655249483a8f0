"""One outer amax for several tensors, such as weights that servers multiply as one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.quantizers.base import Quantizer
from fp4engine.tensor import QuantizedTensor


def _is_spread(tensor: Tensor) -> bool:
    return type(tensor.data).__name__ == "DTensor"  # whose module takes a second to import


@dataclass(frozen=True)
class SharedAmaxQuantizer(Quantizer):
    """A quantizer whose outer amax is the largest of its tensor's and of ``siblings()``.

    Attributes:
        siblings: returns the other tensors, as they are when something is quantized; part of the value, so it has to be
            hashable and equal where the tensors are the same.
    """

    siblings: Callable[[], Sequence[Tensor]] = field(default=tuple, repr=False)

    def with_backend(self, backend: str) -> "SharedAmaxQuantizer":
        """The same casts and siblings, by another backend."""
        return replace(self, backend=backend)

    def amax(self, x: Tensor, **sides: Any) -> tuple[Tensor | None, Tensor | None]:
        """Outer amax of the sides asked for, over ``x`` and its siblings; those that are DTensors are reduced."""
        found = [self._amax(tensor, sides) for tensor in (x, *self.siblings())]
        row, col = ([amax for amax in side if amax is not None] for side in zip(*found, strict=True))
        return tuple(torch.stack(side).amax(0) if side else None for side in (row, col))  # pyright: ignore[reportReturnType]

    def _amax(self, tensor: Tensor, sides: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Outer amaxes of one tensor, of all its shards."""
        if not _is_spread(tensor):
            return super().amax(tensor, **sides)
        spread: Any = tensor
        found = super().amax(spread.to_local(), **sides)
        for dimension, placement in enumerate(spread.placements):
            for amax in found:
                if placement.is_shard() and amax is not None:
                    ops.all_reduce_amax(amax, spread.device_mesh.get_group(dimension))
        return found

    def quantize(
        self,
        x: Tensor | ops.Source,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rowwise_amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        **arguments: Any,
    ) -> QuantizedTensor:
        """As :meth:`Quantizer.quantize`; an amax that is given is taken as it is."""
        assert isinstance(x, Tensor)  # what is cast by siblings is a parameter, not a product of the forward pass
        row, col = self.amax(
            x, rowwise=rowwise and rowwise_amax is None, columnwise=columnwise and columnwise_amax is None
        )
        return super().quantize(
            x,
            rowwise=rowwise,
            columnwise=columnwise,
            rowwise_amax=row if rowwise_amax is None else rowwise_amax,
            columnwise_amax=col if columnwise_amax is None else columnwise_amax,
            **arguments,
        )
