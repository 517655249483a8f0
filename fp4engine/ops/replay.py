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
    """Whether this thread is inside :meth:`Draws.repeated`, so that a forward run again draws what it drew."""
    return _replay.active


class Draws:
    """The draws taken inside the first ``with draws.repeated()`` are taken again inside every later one.

    Only devices on which something was drawn are touched, on the device and in stream order; nothing synchronises.
    """

    def __init__(self) -> None:
        self._starts: dict[str, Tensor] | None = None

    @contextmanager
    def repeated(self) -> Generator[None]:
        """First remember where each stream stands; later start from there, and leave it where it was."""
        outer, _replay.active = _replay.active, True
        try:
            with self._recorded() if self._starts is None else self._replayed(self._starts):
                yield
        finally:
            _replay.active = outer

    @contextmanager
    def _recorded(self) -> Generator[None]:
        before = {device: (state._version, state.clone()) for device, state in rng._states.items()}
        pending = dict(rng._pending)
        self._starts = {}
        try:
            yield
        finally:
            for device, state in rng._states.items():
                if device not in before:
                    self._starts[device] = state.clone()
                    self._starts[device][1] = pending.get(device, 0)
                elif state._version != before[device][0]:
                    self._starts[device] = before[device][1]

    @contextmanager
    def _replayed(self, starts: dict[str, Tensor]) -> Generator[None]:
        now = {device: rng._states[device].clone() for device in starts}
        for device, start in starts.items():
            rng._states[device].copy_(start)
        try:
            yield
        finally:
            for device, state in now.items():
                rng._states[device].copy_(state)
