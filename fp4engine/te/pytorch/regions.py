"""Regions of TransformerEngine's: ``autocast`` and ``quantized_model_init``, over fp4engine's own."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fp4engine import state
from fp4engine.modules import model_init
from fp4engine.modules.recompute import follow_seeding
from fp4engine.ops.draws import seeding
from fp4engine.ops.rng import follows_torch, state_of
from fp4engine.quantizers.delayed import begin_step, end_step
from fp4engine.te.common.recipe import as_frozen, default_recipe
from fp4engine.te.pytorch.recipe_state import AnyRecipe

__all__ = ["autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init"]


class Open:
    """A region that is open on this thread.

    Attributes:
        owner: the :class:`autocast` that was entered; None for a state that was set outside all regions.
        region: the region that is in force for it, which :func:`put_in_force` may replace.
        recipe: the recipe as it was given, or None.
        is_captured: whether the region is entered to capture a CUDA graph.
    """

    def __init__(self, owner: Any, region: state.Region, recipe: AnyRecipe | None, is_captured: bool) -> None:
        self.owner, self.region, self.recipe, self.is_captured = owner, region, recipe, is_captured


class _Thread(threading.local):
    """What is in force on one thread.

    Attributes:
        open: the open regions, innermost last.
        is_first: whether no module has asked yet whether it is the first one of the outermost region.
        to_show: functions to call when the outermost region is left.
    """

    def __init__(self) -> None:  # not class attributes, as in fp4engine.private
        self.open: list[Open] = []
        self.is_first = False
        self.to_show: list[Callable[[], None]] = []


thread = _Thread()
autocast_arguments: dict[str, tuple[AnyRecipe, Any]] = {}
"""Recipe and group of every region that has been entered, by :func:`autocast_key`."""


def autocast_key(recipe: AnyRecipe | None = None, group: Any = None) -> str:
    """A word that is equal for regions of equal recipes and the same group."""
    return f"recipe={recipe},group={None if group is None else id(group)}"


def _refuse_recipe(flag: str, value: Any) -> None:
    """Raise a ValueError if ``value`` is a recipe: it is true, and would leave the default one in force."""
    if isinstance(value, AnyRecipe):
        raise ValueError(f"{flag} must be True or False, got {value!r}; a recipe goes in recipe=")


class autocast(state.autocast):
    """:class:`fp4engine.autocast` that takes recipes of either kind.

    Args:
        enabled: anything that is true or false.
        calibrating: noted, and without effect: modules run in high precision or by the recipe as ``enabled`` says.
        recipe: None is :func:`get_default_recipe`.
        amax_reduction_group: as there.

    Raises:
        ValueError: a recipe in the place of ``enabled`` or ``calibrating``.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: AnyRecipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        _refuse_recipe("enabled", enabled)
        _refuse_recipe("calibrating", calibrating)
        chosen = as_frozen(default_recipe() if recipe is None else recipe)
        super().__init__(bool(enabled), bool(calibrating) and not chosen.is_delayed, chosen, amax_reduction_group)
        self._given, self._is_captured = recipe, bool(_graph)
        self._arguments = chosen if recipe is None else recipe, amax_reduction_group
        self._steps = chosen.custom()

    def __enter__(self) -> "autocast":  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.current_state() is None:
            seeding.is_done = False
        if not state.region_depth():
            thread.is_first = True
        super().__enter__()
        thread.open.append(Open(self, self, self._given, self._is_captured))
        autocast_arguments[autocast_key(*self._arguments)] = self._arguments
        if self._steps and not state.in_backward():
            begin_step()  # a factory may have asked for delayed scaling
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region: state.Region = self
        for opened in reversed(thread.open):  # not always the last: tasks and generators may cross
            if opened.owner is self:
                thread.open.remove(opened)
                region = opened.region
                break
        state.Region.__exit__(region, kind, error, trace)
        if state.current_state() is None and not state.in_backward():
            if self._steps:
                end_step()
            waiting, thread.to_show = thread.to_show, []
            for show in waiting:
                show()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: AnyRecipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """TransformerEngine's older spelling of :class:`autocast`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def quantized_model_init(
    enabled: bool = True, recipe: AnyRecipe | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """:func:`fp4engine.quantized_model_init` that takes recipes of either kind, and any ``enabled`` but a recipe."""
    _refuse_recipe("enabled", enabled)
    chosen = as_frozen(default_recipe() if recipe is None else recipe)
    return model_init.quantized_model_init(bool(enabled), chosen, preserve_high_precision_init_val)


fp8_model_init = quantized_model_init
"""TransformerEngine's older spelling."""


def put_in_force(enabled: bool, calibrating: bool, recipe: AnyRecipe | None, group: Any, is_captured: bool) -> None:
    """Let the innermost region have another state, or the thread if no region is open.

    The frozen state of the region is not changed: another one takes its place, until the region is left.
    """
    asked = None
    if enabled or recipe is not None:
        asked = autocast(enabled, calibrating, recipe, group).state
    opened = thread.open[-1] if thread.open else None
    if opened is None and asked is None:
        return
    new = state.Region(asked)
    new.__enter__()
    if opened is None:
        thread.open.append(Open(None, new, recipe, is_captured))
        return
    opened.region, old = new, opened.region
    state.Region.__exit__(old, None, None, None)
    opened.recipe, opened.is_captured = recipe, is_captured
    if opened.owner is None and asked is None:
        thread.open.remove(opened)
        state.Region.__exit__(new, None, None, None)


def recipe_as_given() -> AnyRecipe | None:
    """The recipe of the region in force, as it was given; None outside regions."""
    current = state.current_state()
    for innermost in thread.open[-1:]:
        if innermost.recipe is not None and innermost.region.state is current:
            return innermost.recipe
    return None if current is None else current.recipe


def seed(device: torch.device) -> None:
    """Seed the random stream of ``device`` from PyTorch's generator for it, once in an outermost region.

    After ``torch.manual_seed`` or ``torch.set_rng_state``, a module then repeats its stochastic rounding. A
    recomputation takes as much of the generator as its forward took, so that dropout after it repeats its mask, and
    does not seed the stream. Once ``fp4engine.manual_seed`` or ``fp4engine.set_rng_state`` has told the stream a seed
    of its own, or a :class:`fp4engine.RandomStream` is in force, this function does nothing.
    """
    if not follows_torch():
        return
    place = torch.empty(0, dtype=torch.int64, device=device)
    if place.is_meta or type(place) is not Tensor:
        return
    follow_seeding()
    if not seeding.is_done:
        seeding.is_done = True
        stream = state_of(device)
        drawn = torch.empty_like(stream).random_()  # in both runs: selective checkpointing compares their operators
        if not state.in_backward():
            stream.copy_(drawn)


def show_when_left(show: Callable[[], None]) -> None:
    """Call ``show`` when the outermost region is left; in a recomputation do nothing, as its forward did this."""
    if show not in thread.to_show and not state.in_backward():
        thread.to_show.append(show)


def leave_all() -> None:
    """Leave all open regions, as tests do between each other."""
    while state.region_depth():
        state.Region(state.current_state()).__exit__(None, None, None)
    thread.__init__()
    seeding.is_done = False
