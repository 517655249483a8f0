"""Draws as values: taken by one caller, and taken again by a forward that is recomputed."""

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from fp4engine.ops import rng
from fp4engine.ops.operation import Output, define
from fp4engine.ops.operator_order import Direction, order_token
from fp4engine.private import backward_pass


class _Source(threading.local):
    """Where this thread's draws come from: ``take(state, count)``, which :meth:`Draws.repeated` replaces by another.

    Attributes:
        repeated: while draws are repeated, those that are left, with their counts.
    """

    def __init__(self) -> None:
        self.take: Callable[[Tensor, int], Tensor] = rng.advance
        self.repeated: deque[tuple[int, Tensor]] | None = None


_source = _Source()


class _Seeding(threading.local):
    """What modules that seed the stream from PyTorch's generator know of their thread; a checkpoint repeats it.

    Attributes:
        is_done: whether they have done so in the outermost region, which takes one number of the generator.
    """

    def __init__(self) -> None:
        self.is_done = False


seeding = _Seeding()


def next_draw(
    device: torch.device,
    count: int = 1,
    name: str = "",
    direction: Direction | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Advance the stream of ``device`` by ``count`` draws, and return the last of them: int64 [2] ``(seed, draw)``.

    The tensor is the caller's own. Threads and CUDA streams that draw at the same time get different draws. Where
    tensors have no memory (the meta device, ``FakeTensorMode``), neither has the draw, and the stream does not advance.

    Args:
        name: of a stream with draws of its own, such as a layer's; empty for the stream of the process.
        direction: the pass that draws; None if it is not known. Then it is a forward if gradients are recorded, which
            they are where a checkpoint repeats one, and not in a backward pass. Compiled code cannot hand to a backward
            pass a state that a forward pass has advanced since, so an operator looks the state up when it runs, unless
            it is known to run in a backward pass.
        after: in a backward pass, the gradient at hand: compiled code draws once it is there. PyTorch may move what
            depends on no gradient into the forward pass, where it would draw out of the order of eager layers; and a
            reentrant checkpoint, whose first run has no gradients, would have no draw to repeat.

    Raises:
        RuntimeError: ``make_fx`` traces on fake tensors, and would take what has no memory for a draw; or a recomputed
            forward draws otherwise than the forward that it repeats, or cannot repeat its draws.
    """
    is_forward = torch.is_grad_enabled() if direction is None else direction == "forward"
    if torch.compiler.is_dynamo_compiling():
        if direction == "backward":
            return torch.ops.fp4engine.next_draw(rng.state_of(device, name), count, after)
        return torch.ops.fp4engine.next_forward_draw(order_token(device, "forward"), count, name, is_forward)
    if is_forward:
        require_repeated()
    like = torch.empty(0, dtype=torch.int64, device=device)
    if like.is_meta or type(like) is not Tensor:
        return _without_memory(like)
    return _source.take(rng.state_of(device, name), count)


def coming_draw(device: torch.device) -> Tensor:
    """The draw that ``next_draw(device)`` will return next on this thread; it is not taken."""
    if _source.repeated:
        _, drawn = _source.repeated[0]
        return drawn.clone()
    return rng.coming(rng.state_of(device))


def draw_from(state: Tensor) -> Tensor:
    """The next draw of the stream that has this ``state``, as :func:`next_draw`."""
    return _source.take(state, 1)


def is_replaying() -> bool:
    """Whether this thread is inside :meth:`Draws.repeated`, so that a forward run again draws what it drew.

    Its draws then have to be values. Otherwise a launch may take the next one from a stream's state itself, while
    :data:`fp4engine.ops.rng.lock` is held.
    """
    return _source.take is not rng.advance


class Draws:
    """The draws taken inside the first ``with draws.repeated()`` are taken again inside every later one.

    They are kept as values, so it does not matter what other threads draw meanwhile, or how far a device's stream has
    advanced since. Regions nest: an inner one takes its draws from the outer one. A later region begins with the
    :data:`seeding` with which the first began.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, Tensor]] | None = None
        self._began_seeded = False

    @contextmanager
    def repeated(self) -> Generator[None]:
        """First remember what is drawn; later draw that.

        Raises:
            RuntimeError: later, and more is drawn than was remembered, or something else.
        """
        outer, is_seeded = (_source.take, _source.repeated), None
        if self._taken is None:
            self._taken, self._began_seeded = [], seeding.is_done
            _source.take = _remembering(self._taken, _source.take)
        else:
            is_seeded, seeding.is_done = seeding.is_done, self._began_seeded
            _source.repeated = deque(self._taken)
            _source.take = _repeating(_source.repeated)
        try:
            yield
        finally:
            _source.take, _source.repeated = outer
            if is_seeded is not None:
                seeding.is_done = is_seeded


def _remembering(
    taken: list[tuple[int, Tensor]], take: Callable[[Tensor, int], Tensor]
) -> Callable[[Tensor, int], Tensor]:
    def remember(state: Tensor, count: int) -> Tensor:
        drawn = take(state, count)
        taken.append((count, drawn))
        return drawn.clone()  # compiled code may write to what it was given, once it has read it

    return remember


def _repeating(left: deque[tuple[int, Tensor]]) -> Callable[[Tensor, int], Tensor]:
    def repeat(state: Tensor, count: int) -> Tensor:
        was, drawn = left.popleft() if left else (0, None)
        if drawn is None or was != count or drawn.device != state.device:
            raise RuntimeError(
                f"a recomputed forward takes {count} draws on {state.device} where the forward that it repeats took "
                f"{f'{was} on {drawn.device}' if drawn is not None else 'none'}; it has to do the same work again, "
                "and where its draws depend on which tensors need a gradient, fp4engine.checkpoint needs "
                "use_reentrant=False, since the first run of a reentrant checkpoint has no gradients"
            )
        return drawn.clone()

    return repeat


def _without_memory(like: Tensor) -> Tensor:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is not None:
        raise RuntimeError("make_fx cannot trace a draw of the random stream on fake tensors; use torch.compile")
    return like.new_empty(2)


def require_repeated() -> None:
    """Raise a RuntimeError if a forward that draws is recomputed and nothing repeats its draws."""
    if backward_pass() != -1 and not is_replaying():
        raise RuntimeError(
            "a forward that draws random bits is recomputed inside a backward pass, where torch.utils.checkpoint does "
            "not repeat its draws; use fp4engine.checkpoint, around what is compiled"
        )


def _next_draw(state: Tensor, count: int, after: Tensor | None) -> Tensor:
    return _source.take(state, count)


def _next_forward_draw(token: Tensor, count: int, name: str, is_forward: bool) -> Tensor:
    if is_forward:
        require_repeated()
    return _source.take(rng.state_of(token.device, name), count)


define(_next_draw, lambda: [Output((2,), torch.int64)], mutates_args=("state",))
define(_next_forward_draw, lambda: [Output((2,), torch.int64)], mutates_args=("token",))
