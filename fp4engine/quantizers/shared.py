"""One outer amax for several tensors, such as weights that servers multiply as one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.quantizers.base import Quantizer
from fp4engine.tensor import QuantizedTensor


def _is_spread(tensor: Tensor) -> bool:
    return type(tensor.data).__name__ == "DTensor"  # by name, since importing the class takes a second


def _shared(spec: CastSpec | None, amaxes: Sequence[Tensor | None]) -> Tensor | None:
    """The largest of ``amaxes`` of one side; or the first, the tensor's own, if an amax is not one number."""
    found = [amax for amax in amaxes if amax is not None]
    if spec is None or spec.outer is not Outer.TENSOR or not found:
        return found[0] if found else None
    return torch.stack(found).amax(0)


def _settings(quantizer: Quantizer) -> dict[str, Any]:
    """The arguments of a plain quantizer of the same casts."""
    return {setting.name: getattr(quantizer, setting.name) for setting in fields(Quantizer) if setting.init}


@dataclass(frozen=True)
class SharedAmaxQuantizer(Quantizer):
    """A quantizer whose outer amax, if it is one number, is the largest of its tensor's and of ``siblings()``.

    Attributes:
        siblings: returns the other tensors, and is called at every cast. Quantizers are compared by it, so
            it has to be hashable, and equal if it returns the same tensors.
    """

    siblings: Callable[[], Sequence[Tensor]] = field(default=tuple, repr=False)

    @classmethod
    def of(cls, quantizer: Quantizer, siblings: Callable[[], Sequence[Tensor]]) -> "SharedAmaxQuantizer":
        """The casts of ``quantizer``, scaled with ``siblings``."""
        return cls(**_settings(quantizer), siblings=siblings)

    @property
    def alone(self) -> Quantizer:
        """The same casts without siblings, for a tensor that has been quantized for good."""
        return Quantizer(**_settings(self))

    def amax(self, x: Tensor, **sides: Any) -> tuple[Tensor | None, Tensor | None]:
        """Outer amax of the sides asked for, over ``x`` and its siblings; a DTensor's amax is reduced over ranks."""
        found = zip(*(self._amax(tensor, sides) for tensor in (x, *self.siblings())), strict=True)
        row, col = map(_shared, (self.rowwise_spec, self.columnwise_spec), found)
        return row, col

    def _amax(self, tensor: Tensor, sides: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Outer amaxes of one tensor, over all its shards if it is a DTensor."""
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
        rng: Tensor | None = None,
        rowwise_amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        **arguments: Any,
    ) -> QuantizedTensor:
        """As :meth:`Quantizer.quantize`; a given amax is not compared with siblings."""
        assert isinstance(x, Tensor)  # a weight, and never a source
        if rng is None and self.takes_draw(rowwise, columnwise):  # so that amax and cast rotate by the same signs
            rng = ops.next_draw(x.device)
        sides = {"rowwise": rowwise and rowwise_amax is None, "columnwise": columnwise and columnwise_amax is None}
        row, col = self.amax(x, **sides, rng=rng, rank=arguments.get("rank"))
        arguments["rowwise_amax"] = row if rowwise_amax is None else rowwise_amax
        arguments["columnwise_amax"] = col if columnwise_amax is None else columnwise_amax
        return super().quantize(x, rowwise=rowwise, columnwise=columnwise, rng=rng, **arguments)


@dataclass(frozen=True)
class ModulePlace:
    """Where a module is: conversions and adapters replace it there, and blocks may be moved, added and taken out.

    Attributes:
        parent: the module that holds it.
        name: its dotted name in the model, of which the last part is its name in ``parent``.
    """

    parent: torch.nn.Module
    name: str

    @property
    def _last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def module(self) -> torch.nn.Module:
        """The module that is at this place now."""
        return self.parent.get_submodule(self._last)

    @property
    def weight(self) -> Tensor:
        """The weight of the module that is at this place now."""
        return self.parent.get_parameter(f"{self._last}.weight").detach()


@dataclass(frozen=True)
class Siblings:
    """``() ->`` the weights at ``others``, siblings of the module at ``own``; equal to another with the same places."""

    own: ModulePlace
    others: tuple[ModulePlace, ...]

    def __call__(self) -> list[Tensor]:
        return [place.weight for place in self.others]


def require_own_siblings(quantizer: Quantizer, module: torch.nn.Module) -> None:
    """Refuse to cast the weight of ``module`` by amaxes of another module's siblings, as a copied module would.

    Raises:
        ValueError: ``quantizer`` is of a recipe that :func:`share_amax` made for another model.
    """
    siblings = quantizer.siblings if isinstance(quantizer, SharedAmaxQuantizer) else None
    if not isinstance(siblings, Siblings):
        return
    found = siblings.own.module  # or what holds the module since, such as an adapter's
    if all(below is not module for below in found.modules()):
        raise ValueError(
            f"{siblings.own.name} is to share the amaxes of {' and '.join(place.name for place in siblings.others)} of "
            "another model: give the recipe to convert before the model is copied, or make one for the copy, by "
            "share_amax"
        )
