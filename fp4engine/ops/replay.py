"""Draws taken again: a recomputed forward repeats the random bits of the first one."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from fp4engine.ops import rng


class _Replay(threading.local):
    active: bool = False


_replay = _Replay()


def is_replaying() -> bool:
    """Whether this thread is inside :meth:`Draws.replayed`."""
    return _replay.active


class Draws:
    """The draws taken inside ``with draws.recorded()``, to be taken again inside ``with draws.replayed()``.

    Only devices on which something was drawn are touched, on the device and in stream order; nothing synchronises.
    """

    def __init__(self) -> None:
        self._starts: dict[str, Tensor] = {}

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Remember where the stream of each device stands, if it moves inside."""
        before = {device: (state._version, state.clone()) for device, state in rng._states.items()}
        yield
        for device, state in rng._states.items():
            if device not in before:
                self._starts[device] = state.clone()
                self._starts[device][1] = 0
            elif state._version != before[device][0]:
                self._starts[device] = before[device][1]

    @contextmanager
    def replayed(self) -> Generator[None]:
        """Inside, the stream stands where it stood; afterwards it goes on as if nothing had been drawn."""
        now = {device: rng._states[device].clone() for device in self._starts}
        outer, _replay.active = _replay.active, True
        for device, start in self._starts.items():
            rng._states[device].copy_(start)
        try:
            yield
        finally:
            _replay.active = outer
            for device, state in now.items():
                rng._states[device].copy_(state)
