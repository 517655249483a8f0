"""Optimizers as users write and wrap them, whose steps hooks and recorders have to count once."""

from typing import Any

import torch


class Decaying(torch.optim.SGD):
    """Its step calls that of its base, so that PyTorch calls hooks after each of the two."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        torch.optim.SGD(self.param_groups)  # only where an object of the base has been made

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.9
        return super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """A wrapper as Accelerate's: an optimizer to ``isinstance``, without hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """A wrapper with hooks of its own, which changes weights after the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.fill_(7)
