"""The global state manager: which recipe is in force on this thread.

Each thread has one frozen :class:`AutocastState` in force, or none. A module reads it once per forward. A backward pass
never reads it, because the plan of the forward contains everything that the backward pass needs.
"""

import asyncio
import inspect
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fp4engine.arguments import require_member, shown
from fp4engine.ops.rng import RandomStream, catch_up, get_rng_state, manual_seed, set_rng_state
from fp4engine.private import PerThread, backward_pass, constant_when_traced
from fp4engine.quantizers.delayed import begin_step, end_step
from fp4engine.recipe import NVFP4BlockScaling, Recipe
from fp4engine.recipe.base import numbered, require_recipe

__all__ = [
    "AutocastState",
    "RandomStream",
    "autocast",
    "current_state",
    "fp8_autocast",
    "get_default_recipe",
    "get_rng_state",
    "manual_seed",
    "set_rng_state",
]


@dataclass(frozen=True)
class AutocastState:
    """What an autocast region sets.

    Attributes:
        enabled: False inside an ``autocast(enabled=False)`` region.
        recipe: the recipe in force.
        calibrating: TransformerEngine's flag. Recipes that take their scales from the tensor at hand have nothing to
            calibrate, so it changes nothing; delayed scaling does not implement it.
        amax_reduction_group: process group over which outer amaxes are reduced, or None.
        cp_group: process group whose ranks have equally many rows of every input, one after the other, or None.
    """

    enabled: bool
    recipe: Recipe
    calibrating: bool = False
    amax_reduction_group: Any = None
    cp_group: Any = None


class _Watch:
    """Notices if an asyncio task awaits while a region that it has entered is open.

    All tasks of a loop run on one thread, so other tasks would then see that region. The watch schedules a callback. If
    the task awaits, the loop runs the callback before it returns to the task.

    Attributes:
        loop: None once it has run the callback. Until then, all regions that are entered share the watch: the cells of
            a notebook run inside a loop, and would schedule a callback for each region of a training run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop: asyncio.AbstractEventLoop | None = loop
        loop.call_soon(self._look)

    def _look(self) -> None:
        self.loop = None


def _watch() -> _Watch | None:
    """A watch over the region that is being entered; None outside asyncio loops and in compiled code."""
    if torch.compiler.is_dynamo_compiling():
        return None
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    regions = _thread.held
    if regions.watch is None or regions.watch.loop is not loop:
        regions.watch = _Watch(loop)
    return regions.watch


class _Regions:
    """The regions of one thread.

    ``now`` is what is in force: the innermost region's state, and the backward pass inside which it was entered, -1 for
    none. ``outer`` holds the same of the regions to which the thread returns, each with the watch over the region
    inside it; ``watch`` is the last one. ``delayed`` says whether a recipe that may have delayed scaling has been in
    force since the outermost region was entered. What compiled code writes is lists: PyTorch 2.13 loses what it writes
    to attributes behind a hook on an intermediate tensor.
    """

    def __init__(self) -> None:
        self.now: list[Any] = [None, -1]
        self.outer: list[tuple[AutocastState | None, int, _Watch | None]] = []
        self.watch: _Watch | None = None
        self.delayed = False


_thread = PerThread(_Regions)


def current_state() -> AutocastState | None:
    """The innermost region's state on this thread; None outside every region."""
    return _thread.held.now[0]


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a module that runs there is being recomputed."""
    return _current_backward() != -1


def is_recomputed() -> bool:
    """Whether this thread is inside a backward pass and the region in force is not one entered within it.

    Activation checkpointing recomputes a forward in this situation, and the forward's own region may have closed long
    ago. This function may be called by eager code and while ``torch.compile`` traces, but may not be traced itself.
    """
    return backward_pass() not in (-1, _thread.held.now[1])


def region_depth() -> int:
    """How many regions are open on this thread."""
    return len(_thread.held.outer)


def _current_backward() -> int:
    return -1 if torch.compiler.is_dynamo_compiling() else backward_pass()


def get_default_recipe() -> NVFP4BlockScaling:
    """The recipe of ``autocast()`` without one: NVIDIA's NVFP4 recipe as the environment's flags tune it."""
    _read_default_recipe()
    return _default[0]


_default: list[NVFP4BlockScaling] = []


@constant_when_traced
def _read_default_recipe() -> None:
    """Store the default recipe in a global. ``torch.compile`` can read the global, but cannot trace making a recipe."""
    _default[:] = [NVFP4BlockScaling()]


on_entering: list[Callable[[Recipe], None]] = []
"""Called with the recipe of a region that is entered outside compiled code, for the sake of compiled code inside."""


class Region(ContextDecorator):
    """Context manager and decorator that puts ``state`` in force; None is the state outside every region.

    Attributes:
        state: what the region puts in force.

    Raises:
        RuntimeError: on leaving, if an asyncio task awaited inside, or the region is not open on this thread.
        ValueError: when it decorates a generator or coroutine function, whose body would run after the region.
    """

    def __init__(self, state: AutocastState | None) -> None:
        self.state = state

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise ValueError(
                f"autocast cannot decorate {func.__qualname__}, a generator or coroutine function: its body runs after "
                "the call, when the region is closed; enter autocast in the body"
            )
        if inspect.isclass(func):
            raise ValueError(
                f"autocast cannot decorate {func.__qualname__}, a class, which would become a function; decorate its "
                "methods"
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        catch_up()
        if self.state is not None and not torch.compiler.is_dynamo_compiling():
            for call in on_entering:
                call(self.state.recipe)
        regions = _thread.held
        regions.outer.append((*regions.now, _watch()))
        regions.now[:] = self.state, _current_backward()
        if self.state is not None and _may_remember(self.state.recipe) and not in_backward():
            regions.delayed = True
            begin_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        regions = _thread.held
        if not (regions.outer and regions.now[0] is self.state) and not torch.compiler.is_dynamo_compiling():
            self._become_innermost(regions)
        state, backward, watch = regions.outer.pop()
        regions.now[:] = state, backward
        ends_step = regions.delayed and state is None
        if ends_step and not in_backward():  # a recomputation belongs to its forward's step
            regions.delayed = False
            end_step()
        if watch is not None and watch.loop is None and kind is None:
            raise RuntimeError(
                "an asyncio task awaited inside an autocast region, which is in force for every task of its "
                "thread; leave the region before `await`, or compute in a thread of its own (asyncio.to_thread)"
            )

    def _become_innermost(self, regions: _Regions) -> None:
        """Make this region the innermost one, since generators and tasks may leave their regions in any order.

        Raises:
            RuntimeError: this region is not open on this thread.
        """
        outer = regions.outer
        after = next((i for i in reversed(range(1, len(outer))) if outer[i][0] is self.state), None)
        if after is None:
            raise RuntimeError(
                "this autocast region is not open on this thread: leave a region once, on the thread that entered it"
            )
        state, backward, watch = outer.pop(after - 1)
        outer[after - 1] = (state, backward, outer[after - 1][2])
        outer.append((*regions.now, watch))


def _may_remember(recipe: Recipe) -> bool:
    """Whether modules may keep amaxes between steps under ``recipe``; quantizers of a factory may do so unannounced."""
    return recipe.is_delayed or (recipe.reads_modules and not torch.compiler.is_dynamo_compiling())


class autocast(Region):
    """Region in which fp4engine's modules compute by ``recipe``.

    Regions can be nested, are left on exceptions, can be entered again after use and while in use, and can be traced by
    ``torch.compile(fullgraph=True)``. A region belongs to its thread, and does not depend on CUDA streams. The tasks of
    an asyncio loop share the regions of their thread: leaving a region inside which a task awaited raises a
    RuntimeError.

    Args:
        enabled: False makes modules compute in high precision inside.
        calibrating: accepted for TransformerEngine's callers; see :class:`AutocastState`.
        recipe: None means :func:`get_default_recipe`, read when the region object is made.
        amax_reduction_group: process group whose ranks share outer amaxes.
        cp_group: process group of context parallelism. Each rank has equally many rows of every input, and the ranks
            cast like one process whose matrix holds the rows of all ranks, in the order of the group.

    Raises:
        ValueError: ``recipe`` is not a :class:`~fp4engine.recipe.Recipe`, ``enabled`` or ``calibrating`` is not a bool,
            or this rank does not belong to a group.
        NotImplementedError: ``calibrating`` with delayed scaling.

    Source: TransformerEngine ``pytorch/quantization.py``, ``autocast``.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        cp_group: Any = None,
    ) -> None:
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):  # a recipe in its place would be the default one
                raise ValueError(f"{name} must be True or False, got {shown(value)}; a recipe goes in recipe=")
        if recipe is None:
            recipe = get_default_recipe()
        require_recipe(recipe)
        if calibrating and recipe.is_delayed:
            raise NotImplementedError(
                "autocast(calibrating=True) is not implemented for delayed and held scaling; leave it out"
            )
        if not torch.compiler.is_dynamo_compiling():
            recipe = numbered(recipe.number)  # the first of all equal recipes, since torch.compile guards on identity
        for name, group in (("amax_reduction_group", amax_reduction_group), ("cp_group", cp_group)):
            if group is not None:
                require_member(name, group)
        super().__init__(AutocastState(enabled, recipe, calibrating, amax_reduction_group, cp_group))


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    *,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
) -> autocast:
    """TransformerEngine's older spelling of :class:`autocast`; takes the newer names of its arguments too.

    ``fp8_recipe`` is ``recipe`` and ``fp8_group`` is ``amax_reduction_group``; the others are the same.

    It warns if it is enabled without a recipe, since TransformerEngine's default is an FP8 recipe, and the
    default of :class:`autocast` is NVFP4.

    Raises:
        ValueError: an argument is given under both of its names.
    """
    if fp8_recipe is not None and recipe is not None:
        raise ValueError(f"fp8_recipe and recipe are the same argument, got {fp8_recipe!r} and {recipe!r}")
    if fp8_group is not None and amax_reduction_group is not None:
        raise ValueError(f"fp8_group and amax_reduction_group are the same argument, got {fp8_group!r} and another")
    if enabled and fp8_recipe is None and recipe is None and not torch.compiler.is_dynamo_compiling():
        warnings.warn(
            "fp8_autocast without a recipe computes by NVFP4BlockScaling(), and TransformerEngine's by an FP8 recipe; "
            "give fp8_recipe=, or use fp4engine.te.pytorch.fp8_autocast, which takes TransformerEngine's",
            stacklevel=2,
        )
    group = fp8_group if amax_reduction_group is None else amax_reduction_group
    return autocast(enabled, calibrating, fp8_recipe if recipe is None else recipe, group)
