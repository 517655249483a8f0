"""Which optimizer tells of its steps, and when a step has ended."""

import inspect
from traceback import walk_stack

from torch.optim import Optimizer


def hooked(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose post hooks PyTorch calls: of a wrapper without hooks, such as Accelerate's, what it wraps."""
    try:
        optimizer.register_step_post_hook(_no_hook).remove()
    except AttributeError:
        wrapped = getattr(optimizer, "optimizer", None)
        if not isinstance(wrapped, Optimizer):
            raise
        return hooked(wrapped)
    return optimizer


def _no_hook(*_: object) -> None:
    """Do nothing."""


def ends_step(optimizer: Optimizer) -> bool:
    """Whether the step of ``optimizer`` after which PyTorch calls a post hook is a whole one; the hook itself asks.

    The ``step`` of a subclass may call that of its base. If an object of the base has been made before, PyTorch calls
    post hooks after the inner ``step`` too. In code that ``torch.compile`` runs, this function cannot see that.
    """
    _, _, hook_caller, *outer = (frame for frame, _ in walk_stack(inspect.currentframe()))
    around_step = (frame for frame in outer if frame.f_code is hook_caller.f_code)
    return not any(value is optimizer for frame in around_step for value in frame.f_locals.values())
