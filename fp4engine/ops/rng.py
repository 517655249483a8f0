"""The random stream's whole state: ``(seed, draw)``, one int64 [2] tensor per device.

A draw is taken by adding one on the device, in stream order, so a CUDA-graph replay advances it and nothing
synchronises. PyTorch's generators are neither read nor advanced; the seed defaults to ``torch.initial_seed()``.
Data-parallel ranks share ``(seed, draw)`` and differ in their stream ids.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4engine.tracing import constant_when_traced

_RANK_SHIFT = 8
_states: dict[str, Tensor] = {}
_increments: dict[str, Tensor] = {}
_seed: list[int] = []
_pending: dict[str, int] = {}
"""Draws to continue from on devices that have not drawn yet, or that this machine does not have."""


def manual_seed(seed: int) -> None:
    """Start the stochastic-rounding stream of every device at ``(seed, draw 0)``.

    Args:
        seed: any integer; its low 64 bits are the Philox key.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int, got {seed!r}")
    _seed[:] = [_to_int64(seed)]
    _pending.clear()
    for device in _states:
        _start(device, 0)


def get_rng_state() -> dict[str, Any]:
    """``{"seed": int, "draws": {device: int}}``: plain values, all that a bit-exact resume needs."""
    started = {device: int(state[1]) for device, state in _states.items() if not state.is_meta}
    return {"seed": _current_seed(), "draws": {**_pending, **started}}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what :func:`get_rng_state` returned, there or on another machine.

    Devices that are not here keep their draw until they are.

    Raises:
        ValueError: ``state`` is not of that form; nothing is changed then.
    """
    if not isinstance(state, dict) or set(state) != {"seed", "draws"} or not isinstance(state["draws"], dict):
        raise ValueError(f"state must be {{'seed': int, 'draws': {{device: int}}}}, got {state!r}")
    for device, draw in state["draws"].items():
        if not isinstance(device, str) or isinstance(draw, bool) or not isinstance(draw, int):
            raise ValueError(f"state['draws'] must be {{device name: int}}, got {device!r}: {draw!r}")
    manual_seed(state["seed"])
    for device, draw in state["draws"].items():
        if device in _states:
            _start(device, draw)
        else:
            _pending[device] = draw


def next_draw(device: torch.device, count: int = 1) -> Tensor:
    """Advance the stream of ``device`` by ``count`` draws and return its live state, int64 [2] ``(seed, draw)``.

    The tensor is the state itself: use it before the next draw, or clone it.
    """
    key = _started(device)
    return _states[key].add_(_increments[key], alpha=count)


def rank_bits() -> int:
    """The data-parallel rank, in its place within a stream id; 0 outside ``torch.distributed``."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank() << _RANK_SHIFT


@constant_when_traced
def _started(device: torch.device) -> str:
    """The key of the device's stream, which exists from here on; ``torch.compile`` then finds it as a global."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = _name(device)
    if key not in _states:
        _start(key, _pending.pop(key, 0))
    return key


@cache
def _name(device: torch.device) -> str:
    return str(device)


def _start(device: str, draw: int) -> None:
    if device in _states:
        _states[device].copy_(torch.tensor([_current_seed(), draw]))
        return
    with torch.inference_mode(False):  # a state made under inference_mode could not advance outside it
        _states[device] = torch.tensor([_current_seed(), draw], dtype=torch.int64, device=device)
        _increments[device] = torch.tensor([0, 1], dtype=torch.int64, device=device)


def _current_seed() -> int:
    if not _seed:
        _seed.append(_to_int64(torch.initial_seed()))
    return _seed[0]


def _to_int64(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
