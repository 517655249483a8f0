"""The weights with which a linear module shares its amax, wherever their modules are put."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.shared import SharedAmaxQuantizer


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
