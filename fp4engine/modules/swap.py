"""What an ``nn.Linear`` does that an :class:`fp4engine.Linear` in its place would not."""

from torch import nn

from fp4engine.modules.sharded import fsdp_module


def own_forward(module: nn.Linear) -> str:
    """Why ``module`` does not compute what its class says; empty if it does."""
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the object; convert before wrapping"
    return ""


def own_attributes(module: nn.Linear) -> str:
    """What the class of ``module`` and its bases have beside ``nn.Linear``; empty if nothing.

    Left out are a constructor, which has run, and what ``fully_shard`` gives to a class, whose work is done by hooks.
    """
    kind = type(module)
    bases = [base for base in kind.__mro__ if base not in nn.Linear.__mro__ and not issubclass(base, fsdp_module())]
    lost = [name for base in bases for name in vars(base) if name not in vars(_Constructed)]
    return f"{kind.__name__} has {lost[0]!r} of its own, which a swap would lose" if lost else ""


class _Constructed:
    """What a class has that says nothing but how its objects are made."""

    size: int

    def __init__(self) -> None:
        self.size = 0
