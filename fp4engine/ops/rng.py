"""The random stream's whole state: ``(seed, draw)``, an int64 [2] tensor per device, and per layer with its own draws.

A draw is taken by adding to the draw number on the device, so that a CUDA-graph replay advances it and nothing
synchronises. What a draw returns is a tensor of its own, which no later draw changes. PyTorch's generators are neither
read nor advanced; the seed defaults to ``torch.initial_seed()``. Data-parallel ranks share ``(seed, draw)`` and differ
in their stream ids.
"""

import hashlib
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.arguments import require_integer
from fp4engine.constants import KEY_STEP
from fp4engine.tracing import constant_when_traced

_RANK_SHIFT = 8
_DRAWS = 1 << 63
"""A draw number is an int64 that is not negative."""

_drew: dict[torch.device, torch.cuda.Stream] = {}
"""The stream that drew last, where Triton does not run."""

lock = threading.RLock()
"""Held while anything below is read or changed, a state on its device too: threads take draws one after the other."""
_states: dict[str, Tensor] = {}
"""By device, ``"cpu"``; what has draws of its own has its name behind, ``"cpu/backward/layers.0.up"``."""
_seed: list[int] = []
_pending: dict[str, int] = {}
"""Draws to continue from, by device or by kind of device, and name, where nothing has been drawn yet."""
_entered: list[int] = []
"""The threads that have put a stream of their own in force, the innermost last."""


def manual_seed(seed: int) -> None:
    """Start the stochastic-rounding stream of every device at ``(seed, draw 0)``.

    Args:
        seed: any integer; its low 64 bits are the Philox key.

    Raises:
        ValueError: ``seed`` is not an integer.
    """
    seed = require_integer("seed", seed)
    with lock:
        _seed[:] = [_to_int64(seed)]
        _pending.clear()
        for key, state in _states.items():
            _write(key, state, 0)


def current_seed() -> int:
    """The seed of every device's stream, an int64; reads no device."""
    with lock:
        return _current_seed()


def get_rng_state() -> dict[str, Any]:
    """``{"seed": int, "draws": {device: int}}``: plain values, all that a bit-exact resume of one process needs.

    Waits for the draws that any CUDA stream has been asked to take.
    """
    with lock:
        for state in _states.values():
            _wait_for(state)
        draws = {device: int(state[1]) for device, state in _states.items()}
        return {"seed": _current_seed(), "draws": {**_pending, **draws}}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what :func:`get_rng_state` returned, there or on another machine.

    A device that nothing has been drawn on yet, here or at all, keeps its draw until something is. A kind of device
    without an index, ``"cuda"``, stands for the one device of that kind that this process draws on.

    Raises:
        ValueError: ``state`` is not of that form, a draw is not in [0, 2^63), or a kind of device could be one of
            several; nothing is changed then.
    """
    if not isinstance(state, dict) or set(state) != {"seed", "draws"} or not isinstance(state["draws"], dict):
        raise ValueError(f"state must be {{'seed': int, 'draws': {{device: int}}}}, got {state!r}")
    seed = require_integer("state['seed']", state["seed"])
    draws = {
        name: require_integer(f"state['draws'][{name!r}]", draw, 0, _DRAWS - 1) for name, draw in state["draws"].items()
    }
    with lock:
        draws = {_device_named(name): draw for name, draw in draws.items()}
        manual_seed(seed)
        for device, draw in draws.items():
            if device in _states:
                _write(device, _states[device], draw)
            else:
                _pending[device] = draw


class RandomStream:
    """A random stream beside the process's own: a seed, and draws of every device that nothing else advances::

        stream = fp4engine.RandomStream(seed)
        with stream.in_force():
            loss.backward()

    While it is in force, every thread draws from it, that of a backward pass too, and :func:`manual_seed`,
    :func:`get_rng_state` and :func:`set_rng_state` speak of it. A CUDA graph that is captured meanwhile draws from it
    in every replay, whatever is in force by then. So models that one process trains in turn draw what each would alone.

    Args:
        seed: any integer; its low 64 bits are the Philox key.

    Raises:
        ValueError: ``seed`` is not an integer.
    """

    def __init__(self, seed: int) -> None:
        seed = require_integer("seed", seed)
        self._states: dict[str, Tensor] = {}
        self._seed = [_to_int64(seed)]
        self._pending: dict[str, int] = {}
        self._is_in_force = False

    @contextmanager
    def in_force(self) -> Generator[None]:
        """A region that draws from this stream; regions of different streams nest, those of one thread at a time.

        Raises:
            RuntimeError: this stream is in force already, or another thread has put one in force.
        """
        with lock:
            if self._is_in_force:
                raise RuntimeError("this random stream is in force already; leave its region before entering it again")
            thread = threading.get_ident()
            if _entered and _entered[-1] != thread:
                raise RuntimeError(
                    "another thread has put a random stream in force, from which every thread draws; let it leave its "
                    "region first"
                )
            _entered.append(thread)
            self._change_places()
        try:
            yield
        finally:
            with lock:
                _entered.pop()
                self._change_places()

    def __getstate__(self) -> dict[str, Any]:
        """What copies are made of.

        Raises:
            RuntimeError: the stream is in force, and what it has drawn lies elsewhere.
        """
        with lock:
            if self._is_in_force:
                raise RuntimeError("this random stream is in force; leave its region before copying or saving it")
            return dict(vars(self))

    def _change_places(self) -> None:
        """Swap contents with what is in force: the module's own containers stay, in which compiled code looks."""
        self._is_in_force = not self._is_in_force
        outside = dict(_states), dict(_pending), list(_seed)
        _states.clear()
        _states.update(self._states)
        _pending.clear()
        _pending.update(self._pending)
        _seed[:] = self._seed
        self._states, self._pending, self._seed = outside


def state_of(device: torch.device, name: str = "") -> Tensor:
    """The live state of ``device``, int64 [2], which exists from here on; or of what draws there by ``name``."""
    return _states[_started(device, name)]


def device_and_name(key: str) -> tuple[str, str]:
    """Of a key of ``get_rng_state()["draws"]`` the device, and what stands behind it."""
    device, slash, name = key.partition("/")
    return device, slash + name


def advance(state: Tensor, count: int) -> Tensor:
    """Add ``count`` to the draw number of ``state`` and return what it is then, int64 [2] ``(key, draw)``, for good.

        key = seed + (draw >> 32) * KEY_STEP        modulo 2^64

    The generator counts 32 bits of a draw, so each 2^32 draws have a key of their own. The kernel adds atomically, so
    that CUDA streams may draw at the same time. A CUDA device on which Triton does not run adds and copies in two
    launches, for which it waits for the stream that drew before.
    """
    with lock:
        if capability.triton_runs_on(state.device)[0]:
            return _kernel()(state, count)
        if state.is_cuda:
            _take_turns(state.device)
        state[1].add_(count)
        return _keyed(state.clone())


def coming(state: Tensor) -> Tensor:
    """What :func:`advance` by one would return; ``state`` stays as it is, and nothing waits for its device."""
    draw = state.clone()
    draw[1] += 1
    return _keyed(draw)


def _keyed(draw: Tensor) -> Tensor:
    """``draw``, a state's copy, in which the key of the draw takes the seed's place, see :func:`advance`."""
    draw[0] += (draw[1] >> 32) * KEY_STEP
    return draw


@cache
def _kernel() -> Callable[[Tensor, int], Tensor]:
    from fp4engine.kernels.draw import draw

    return draw


def _take_turns(device: torch.device) -> None:
    """The current stream of ``device`` waits for the one that drew before."""
    current = torch.cuda.current_stream(device)
    before = _drew.get(device)
    if before is not None and before != current:
        current.wait_stream(before)
    _drew[device] = current


def rank_bits(rank: int | None = None) -> int:
    """``rank`` in its place within a stream id; by default this process's, which is 0 outside ``torch.distributed``."""
    if rank is not None:
        return rank << _RANK_SHIFT
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank() << _RANK_SHIFT


def placed(rng: Tensor, row: int, col: int) -> Tensor:
    """The draw ``rng`` [2] for a shard that begins at ``row`` and ``col`` of the whole matrix: int64 [4]."""
    step = col - row
    if step == 0:
        place = rng.new_full((2,), row)
    else:  # one kernel for both
        place = torch.arange(row, col + step, step, dtype=torch.int64, device=rng.device)
    return torch.cat([rng, place])


def require_draw(rng: Tensor, device: torch.device) -> None:
    """Raise a ValueError unless ``rng`` is a draw for a cast on ``device``."""
    wanted = f"rng must be torch.int64 [2], (seed, draw), or [4] for a shard, on {device}, got "
    if not isinstance(rng, Tensor):
        raise ValueError(f"{wanted}{rng!r}")
    if rng.dtype != torch.int64 or rng.ndim != 1 or rng.shape[0] not in (2, 4) or rng.device != device:
        raise ValueError(f"{wanted}{rng.dtype} {list(rng.shape)} on {rng.device}")


@constant_when_traced
def _started(device: torch.device, name: str) -> str:
    """The key of a stream of the device, which exists from here on; ``torch.compile`` then finds it as a global.

    Raises:
        RuntimeError: it does not exist yet and cannot be made, since tensors made now have no memory.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = f"{device}/{name}" if name else str(device)
    if key not in _states:
        with lock:
            if key not in _states:
                _start(key, device)
    return key


def _start(key: str, device: torch.device) -> None:
    waiting = key if key in _pending else device.type + device_and_name(key)[1]
    with torch.inference_mode(False):  # a state made under inference_mode could not advance outside it
        state = torch.empty(2, dtype=torch.int64, device=device)
    if type(state) is not Tensor:
        raise RuntimeError(
            f"the random stream of {key} cannot begin while tensors are {type(state).__name__}s; "
            "run one step on real tensors first"
        )
    _write(key, state, _pending.get(waiting, 0))
    _states[key] = state
    _pending.pop(waiting, None)


def _write(key: str, state: Tensor, draw: int) -> None:
    _wait_for(state)
    seed = _to_int64(_current_seed() + _number_of(device_and_name(key)[1]))
    state.copy_(torch.tensor([seed, draw], dtype=torch.int64, device="cpu"))
    _wait_for(state)


def _number_of(name: str) -> int:
    """What is added to the seed for ``name``: 64 bits of its BLAKE2 hash, 0 for none."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") if name else 0


def _wait_for(state: Tensor) -> None:
    """Wait for the work of every stream of the state's device."""
    if state.is_cuda:
        torch.cuda.synchronize(state.device)


def _device_named(key: Any) -> str:
    """The key in ``_states`` or ``_pending`` of a device, and maybe a name, that a saved state has."""
    text, name = device_and_name(key) if isinstance(key, str) else ("", "")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or str(device) != text:
        raise ValueError(f"state['draws'] must name devices as 'cpu', 'cuda' or 'cuda:0', got {key!r}")
    known = [other for other in _states if device_and_name(other)[1] == name]
    known = [other for other in known if torch.device(device_and_name(other)[0]).type == device.type]
    if device.index is not None or key in _states or not known:
        return key
    if len(known) > 1:
        raise ValueError(f"state['draws'] names {key!r}, and this process draws on {', '.join(known)}; name one")
    return known[0]


def _current_seed() -> int:
    if not _seed:
        _seed.append(_to_int64(torch.initial_seed()))
    return _seed[0]


def _to_int64(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
