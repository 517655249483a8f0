"""Which optimizer tells of its steps, and when a step has ended."""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Lock
from traceback import walk_stack

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Listener = Callable[[Optimizer], object]
"""Is called with an optimizer after each of its steps, on the thread of the step."""

_listeners: tuple[Listener, ...] = ()
_lock = Lock()
"""Held while listeners come and go."""


def _tell(optimizer: Optimizer, *_: object) -> None:
    for listener in _listeners:
        listener(optimizer)


# At import and for good: a hook that comes or goes while an optimizer of another thread goes through them raises there.
register_optimizer_step_post_hook(_tell)


def hear_steps(listener: Listener) -> None:
    """Let ``listener`` hear of every step of every ``torch.optim`` optimizer from here on."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)


@contextmanager
def hearing_steps(listener: Listener) -> Generator[None]:
    """Region in which ``listener`` hears of every step of every ``torch.optim`` optimizer, on any thread."""
    global _listeners
    hear_steps(listener)
    try:
        yield
    finally:
        with _lock:
            left = list(_listeners)
            left.remove(listener)
            _listeners = tuple(left)


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


_STEP = Optimizer.profile_hook_step(_no_hook).__code__
"""The function that PyTorch puts around each ``step``; in compiled code another one, from the same line."""


def ends_step(optimizer: Optimizer) -> bool:
    """Whether the ``step`` of ``optimizer`` that has called a hook is a whole one; for the hook itself to call.

    The ``step`` of a subclass may call its base's. If an object of the base has been made before, PyTorch calls
    post hooks after the inner ``step`` too.
    """
    line = _STEP.co_filename, _STEP.co_firstlineno
    frames = (frame for frame, _ in walk_stack(inspect.currentframe()))
    around_step = (
        frame.f_locals for frame in frames if (frame.f_code.co_filename, frame.f_code.co_firstlineno) == line
    )
    values = ((*known.values(), *known.get("args", ())) for known in around_step)
    return sum(any(value is optimizer for value in known) for known in values) <= 1
