"""Where a converted model has its weights that can be stored as codes."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from fp4engine.modules.adoption import is_conv1d
from fp4engine.modules.borrowed import BorrowedGroupedLinear
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.linear import Linear


@dataclass(frozen=True)
class WeightPlace:
    """The weight by which a module multiplies.

    Attributes:
        module: the module; of experts, what multiplies by all of them.
        owner: whose parameter the weight is: the module itself, or the one that a borrowed weight belongs to.
        name: dotted name of that parameter.
        transposed: True if the parameter is [K, N] or [G, K, N], and not [N, K] or [G, N, K].
    """

    module: nn.Module
    owner: nn.Module
    name: str
    transposed: bool

    @property
    def parameter(self) -> str:
        """Name of the parameter in its owner."""
        return self.name.rpartition(".")[2]

    @property
    def weight(self) -> Tensor | None:
        """The parameter; None where the weight is computed from others."""
        return self.owner._parameters.get(self.parameter)

    @cached_property
    def gemms(self) -> list[Gemms]:
        """What multiplies: one, or one for each expert."""
        inner = self.module.gemms if isinstance(self.module, BorrowedGroupedLinear) else [self.module]
        return [gemms for gemms in inner if isinstance(gemms, Gemms)]


def weight_places(model: nn.Module) -> dict[str, WeightPlace]:
    """``module name -> its weight``, of the modules that ``nn.Linear``, ``Conv1D`` and experts were converted to."""
    places: dict[str, WeightPlace] = {}
    for name, module in model.named_modules():
        if isinstance(module, BorrowedGroupedLinear):
            above = name.rpartition(".")[0]
            places[name] = WeightPlace(
                module, module.owner, f"{above}.{module.parameter}".removeprefix("."), module.transposed
            )
        elif isinstance(module, Linear) or is_conv1d(module):
            places[name] = WeightPlace(module, module, f"{name}.weight".removeprefix("."), is_conv1d(module))
    return places
