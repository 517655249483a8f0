"""The whole state of the random stream: ``(seed, draw)``, an int64 [2] tensor for each device.

A layer that draws by its own name has such a state of its own. Taking a draw adds to the draw number on the device, so
that a replayed CUDA graph advances it and nothing waits for the device. A draw is a tensor of its own, which no later
draw changes. Data-parallel ranks have the same ``(seed, draw)`` and different stream ids.

The seed is PyTorch's until somebody tells another, by :func:`manual_seed` or :func:`set_rng_state`: then
``torch.manual_seed`` starts the stream anew, at draw 0 of its seed. At the end of ``torch.random.fork_rng`` the stream
goes on where it was when the region first seeded PyTorch. Where ``torch.set_rng_state`` gives PyTorch another seed, the
stream goes on where it left that seed last. PyTorch's generators are not advanced, and nothing but their seed is read.
"""

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp4engine import capability
from fp4engine.arguments import require_bool, require_integer, shown
from fp4engine.constants import KEY_STEP
from fp4engine.private import constant_when_traced

_RANK_SHIFT = 8
MOST_RANK = (1 << 32 - _RANK_SHIFT) - 1
"""The largest rank that a stream id has bits for."""
_DRAWS = 1 << 63
"""A draw number is an int64 that is not negative."""

_drew: dict[torch.device, torch.cuda.Stream] = {}
"""The CUDA stream that drew last, on devices on which Triton does not run."""

lock = threading.RLock()
"""Held while anything below, or a state on its device, is read or changed: threads take draws one after the other."""
_states: dict[str, Tensor] = {}
"""The states, by device (``"cpu"``), or by device and name of the stream (``"cpu/backward/layers.0.up"``)."""
_seed: list[int] = []
_pending: dict[str, int] = {}
"""Draw numbers to continue from, for streams that have not drawn yet: by device or kind of device, and name."""
_entered: list[tuple["RandomStream", int]] = []
"""The streams that are in force and the threads that have put them there, the innermost last."""


class _Following:
    """Whether the stream in force has PyTorch's seed, and what it knows of that.

    Attributes:
        is_on: False once somebody has told the stream another seed.
        now: which seeding PyTorch had, and its seed from 0 to 2^64 - 1, when it was looked at last.
        left: ``now -> (the stream's seed, its draw numbers by device and name)`` of what PyTorch has had before.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on, self.now = is_on, (_seeding[0], _torch_seed())
        self.left: OrderedDict[tuple[int, int], tuple[int, dict[str, int]]] = OrderedDict()


_KEPT_SEEDS = 256
"""So many seeds are remembered: a script may seed PyTorch in every step."""
_seeding = [0]
"""The number of the seeding by which PyTorch's generator has its state: that of a later one is larger."""
_seedings = itertools.count(1)


_torch_seed = torch.default_generator.initial_seed


def _to_int64(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


_following = _Following(True)


def manual_seed(seed: int) -> None:
    """Start the stochastic-rounding stream of every device at ``(seed, draw 0)``, and follow PyTorch's seed no more.

    Until then ``torch.manual_seed`` sets the seed, and starts the stream as well.

    Args:
        seed: any integer; its low 64 bits are the Philox key.

    Raises:
        ValueError: ``seed`` is not an integer.
    """
    seed = require_integer("seed", seed)
    with lock:
        _following.is_on = False
        _following.left.clear()
        _begin(_to_int64(seed), {})


def _begin(seed: int, draws: dict[str, int]) -> None:
    """Let every stream have ``seed``, at these draws and at 0 where there is none."""
    _seed[:] = [seed]
    _pending.clear()
    _pending.update({key: draw for key, draw in draws.items() if key not in _states})
    for key, state in list(_states.items()):
        if state.is_cuda and torch.cuda._is_in_bad_fork():  # a worker of a DataLoader, which cannot use the device
            del _states[key]
        else:
            _write(key, state, draws.get(key, 0))


def follows_torch() -> bool:
    """Whether the seed is PyTorch's, since nobody has told another."""
    return _following.is_on


def _follow(seed: int) -> None:
    """Take ``seed``, PyTorch's, from 0 to 2^64 - 1, if it was seeded since that was looked at, or had another."""
    known, now = _following, (_seeding[0], seed)
    if not known.is_on or now == known.now:
        return
    before, known.now = known.now, now
    is_seeded, begun = now[0] > before[0], (_to_int64(seed), dict[str, int]())
    if not _seed:  # nothing was drawn of the seed before, and will go on there
        _seed.append(_to_int64(before[1]))
    if begun[0] == _seed[0] and not is_seeded and now not in known.left:
        return
    with _disable_current_modes():  # a script may seed PyTorch under FakeTensorMode, which refuses real tensors
        known.left[before] = _seed[0], _draw_numbers()
        if len(known.left) > _KEPT_SEEDS:
            known.left.popitem(last=False)
        if not is_seeded:
            alike = now if now in known.left else next((key for key in reversed(known.left) if key[1] == seed), now)
            begun = known.left.pop(alike, begun)
        _begin(*begun)


@constant_when_traced
def catch_up() -> None:
    """Follow PyTorch's seed where it has become another without being set, as at the end of ``fork_rng``.

    Every draw does so, and every region for the sake of compiled code, which draws without asking.
    """
    if _following.is_on and _torch_seed() != _following.now[1]:
        with lock:
            _follow(_torch_seed())


def _heard(seed_others: Callable[[int], None]) -> Callable[[int], None]:
    """``seed_others``, by which ``torch.manual_seed`` seeds devices that it does not know, so that it seeds streams."""

    @wraps(seed_others)
    def seed_all(seed: int) -> None:
        seed_others(seed)
        with lock:
            _seeding[0] = next(_seedings)
            _follow(int(seed) % (1 << 64))

    return seed_all


torch.random._seed_custom_device = _heard(torch.random._seed_custom_device)


def _returning(fork_rng: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
    """``fork_rng``, at whose end PyTorch has the seeding again that it had, which its seed alone does not tell."""

    @wraps(fork_rng)
    @contextmanager
    def forked(devices: Any = None, enabled: bool = True, **options: Any) -> Generator[None]:
        before = _seeding[0]
        try:
            with fork_rng(devices, enabled, **options):
                yield
        finally:
            if enabled:
                with lock:
                    _seeding[0] = before
                    _follow(_torch_seed())

    return forked


torch.random.fork_rng = _returning(torch.random.fork_rng)


def current_seed() -> int:
    """The seed of every device's stream, an int64; reads no device."""
    with lock:
        return _current_seed()


def get_rng_state() -> dict[str, Any]:
    """``{"seed": int, "draws": {device: int}}``: plain values, all that a bit-exact resume of one process needs.

    As long as the stream follows PyTorch's seed there is a third one, ``"follows_torch": True``. Waits until all CUDA
    streams have taken the draws that they were asked for.
    """
    with lock:
        state = {"seed": _current_seed(), "draws": _draw_numbers()}
        return {**state, "follows_torch": True} if _following.is_on else state


def _draw_numbers() -> dict[str, int]:
    for state in _states.values():
        _wait_for(state)
    return {**_pending, **{key: int(state[1]) for key, state in _states.items()}}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what :func:`get_rng_state` returned, there or on another machine.

    The stream then follows PyTorch's seed if it did so there: it goes on with the seed of ``state`` until PyTorch gets
    another one than it has now, or is seeded again.

    The draw number of a device on which this process has not drawn yet is kept until it does. A kind of device without
    an index, ``"cuda"``, stands for the one device of that kind on which this process draws.

    Raises:
        ValueError: ``state`` is not of that form, a draw is not in [0, 2^63), a device draws no bits, or a kind of
            device could be one of several; nothing is changed then.
    """
    keys = set(state) - {"follows_torch"} if isinstance(state, dict) else None
    if keys != {"seed", "draws"} or not isinstance(state["draws"], dict):
        raise ValueError(f"state must be {{'seed': int, 'draws': {{device: int}}}}, got {shown(state)}")
    follows = state.get("follows_torch", False)
    require_bool("state['follows_torch']", follows)
    seed = require_integer("state['seed']", state["seed"])
    draws = {
        name: require_integer(f"state['draws'][{name!r}]", draw, 0, _DRAWS - 1) for name, draw in state["draws"].items()
    }
    with lock:
        places = {name: _device_named(name) for name in draws}
        named: dict[str, str] = {}
        for key, name in sorted((key, name) for name, key in places.items()):  # "cuda" before "cuda:0"
            text, rest = device_and_name(key)
            for known in (key, text.partition(":")[0] + rest):
                if known in named:
                    raise ValueError(f"state['draws'] names one device twice, as {named[known]!r} and as {name!r}")
            named[key] = name
        vars(_following).update(vars(_Following(follows)))
        _begin(_to_int64(seed), {places[name]: draw for name, draw in draws.items()})


class RandomStream:
    """A random stream beside the process's own: a seed, and draws of every device that nothing else advances::

        stream = fp4engine.RandomStream(seed)
        with stream.in_force():
            loss.backward()

    While it is in force, every thread draws from it, also the thread of a backward pass, and :func:`manual_seed`,
    :func:`get_rng_state` and :func:`set_rng_state` are about it. A CUDA graph that is captured while it is in force
    draws from it in every replay, whichever stream is then in force. So models that one process trains in turn draw the
    same bits as if each were trained alone.

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
        self._following = _Following(False)
        self._is_in_force = False

    @contextmanager
    def in_force(self) -> Generator[None]:
        """A region that draws from this stream. Regions of different streams may be nested, but by one thread only.

        Raises:
            RuntimeError: this stream is in force already, or another thread has put one in force.
        """
        with lock:
            if self._is_in_force:
                raise RuntimeError("this random stream is in force already; leave its region before entering it again")
            thread = threading.get_ident()
            if _entered and _entered[-1][1] != thread:
                raise RuntimeError(
                    "another thread has put a random stream in force, from which every thread draws; let it leave its "
                    "region first"
                )
            _entered.append((self, thread))
            self._change_places()
        try:
            yield
        finally:
            with lock:
                self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, for copies.

        Raises:
            RuntimeError: the stream is in force; its state is then held by the module and not by this object.
        """
        with lock:
            if self._is_in_force:
                raise RuntimeError("this random stream is in force; leave its region before copying or saving it")
            return dict(vars(self))

    def _leave(self) -> None:
        """Undo :meth:`in_force`, also before regions that were entered later are left, as generators may have it."""
        place = [stream for stream, _ in _entered].index(self)
        later = [stream for stream, _ in _entered[place + 1 :]]
        del _entered[place]
        for stream in (*reversed(later), self, *later):
            stream._change_places()

    def _change_places(self) -> None:
        """Swap contents with the state in force. The containers stay the same objects, which compiled code reads."""
        self._is_in_force = not self._is_in_force
        outside = dict(_states), dict(_pending), list(_seed)
        inside = dict(vars(self._following))
        vars(self._following).update(vars(_following))
        vars(_following).update(inside)
        _states.clear()
        _states.update(self._states)
        _pending.clear()
        _pending.update(self._pending)
        _seed[:] = self._seed
        self._states, self._pending, self._seed = outside
        _follow(_torch_seed())  # PyTorch may have been seeded while this one was not in force


def state_of(device: torch.device, name: str = "") -> Tensor:
    """The live state, int64 [2], of the stream on ``device``, or of the stream ``name`` there. Made if need be."""
    return _states[_started(device, name)]


def device_and_name(key: str) -> tuple[str, str]:
    """The device in a key of ``get_rng_state()["draws"]``, and the rest of the key: a slash and a name, or nothing."""
    device, slash, name = key.partition("/")
    return device, slash + name


def advance(state: Tensor, count: int) -> Tensor:
    """Add ``count`` to the draw number of ``state``, and return the draw, a new int64 [2] ``(key, draw)``.

        key = seed + (draw >> 32) * KEY_STEP        modulo 2^64

    The counter of the generator holds 32 bits of a draw number, so each 2^32 draws have a key of their own. The kernel
    adds atomically, so that CUDA streams may draw at the same time. On a CUDA device without Triton, adding and copying
    are two launches, before which the current stream waits for the stream that drew last.
    """
    with lock:
        if capability.triton_runs_on(state.device)[0]:
            return _kernel()(state, count)
        if state.is_cuda:
            _take_turns(state.device)
        state[1].add_(count)
        return _keyed(state.clone())


def coming(state: Tensor) -> Tensor:
    """The draw that :func:`advance` by one would return. Neither changes ``state`` nor waits for its device."""
    draw = state.clone()
    draw[1] += 1
    return _keyed(draw)


def _keyed(draw: Tensor) -> Tensor:
    """Replace the seed in ``draw``, a copy of a state, by the key of the draw, see :func:`advance`."""
    draw[0] += (draw[1] >> 32) * KEY_STEP
    return draw


@cache
def _kernel() -> Callable[[Tensor, int], Tensor]:
    from fp4engine.kernels.draw import draw

    return draw


def _take_turns(device: torch.device) -> None:
    """Let the current stream of ``device`` wait for the stream that drew last."""
    current = torch.cuda.current_stream(device)
    before = _drew.get(device)
    if before is not None and before != current:
        current.wait_stream(before)
    _drew[device] = current


_HAS_DISTRIBUTED = torch.distributed.is_available()
"""Whether PyTorch was built with ``torch.distributed``."""


def rank_bits(rank: int | None = None) -> int:
    """``rank`` as bits of a stream id; None is this process's rank, which is 0 outside ``torch.distributed``.

    Raises:
        ValueError: ``rank`` is no integer that the id has bits for.
    """
    if rank is not None:
        return require_integer("rank", rank, 0, MOST_RANK) << _RANK_SHIFT
    if not (_HAS_DISTRIBUTED and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank() << _RANK_SHIFT


def placed(rng: Tensor, row: int, col: int) -> Tensor:
    """The draw ``rng`` [2] with the ``row`` and ``col`` at which a shard begins in the whole matrix: int64 [4]."""
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
    """The key of a stream on ``device``, which is made if need be; traced code then finds it as a global.

    Raises:
        RuntimeError: the stream does not exist, and cannot be made because tensors that are made now have no memory.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = f"{device}/{name}" if name else str(device)
    if _following.is_on and _torch_seed() != _following.now[1]:  # as catch_up, without a call of Python
        catch_up()
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
    _current_seed()
    _write(key, state, _pending.get(waiting, 0))
    _states[key] = state
    _pending.pop(waiting, None)


def _write(key: str, state: Tensor, draw: int) -> None:
    _wait_for(state)
    seed = _to_int64(_seed[0] + _number_of(device_and_name(key)[1]))
    state.copy_(torch.tensor([seed, draw], dtype=torch.int64, device="cpu"))
    _wait_for(state)


def _number_of(name: str) -> int:
    """The number that the seed of the stream ``name`` has added: 64 bits of the name's BLAKE2 hash; 0 for no name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") if name else 0


def _wait_for(state: Tensor) -> None:
    """Wait until all CUDA streams of the state's device have done their work."""
    if state.is_cuda:
        torch.cuda.synchronize(state.device)


def _device_named(key: Any) -> str:
    """The key in ``_states`` or ``_pending`` for a key of a saved state."""
    text, name = device_and_name(key) if isinstance(key, str) else ("", "")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or str(device) != text or device.type == "meta":
        raise ValueError(f"state['draws'] must name devices as 'cpu', 'cuda' or 'cuda:0', got {key!r}")
    if device.type == "cpu":  # there is one, and it has no index
        return f"cpu{name}"
    known = [other for other in _states if device_and_name(other)[1] == name]
    known = [other for other in known if torch.device(device_and_name(other)[0]).type == device.type]
    if device.index is not None or key in _states or not known:
        return key
    if len(known) > 1:
        raise ValueError(f"state['draws'] names {key!r}, and this process draws on {', '.join(known)}; name one")
    return known[0]


def _current_seed() -> int:
    _follow(_torch_seed())
    if not _seed:
        _seed.append(_to_int64(_torch_seed()))
    return _seed[0]
