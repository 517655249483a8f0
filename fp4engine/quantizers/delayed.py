"""FP8 with scales from earlier steps, and what it shares with other quantizers that have a memory."""

import copy
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import shown
from fp4engine.formats import CastSpec
from fp4engine.ops.amax_history import record_amax
from fp4engine.ops.cast import require_amax
from fp4engine.private import PerThread
from fp4engine.quantizers.base import Quantizer, as_matrix
from fp4engine.recipe import DelayedScaling
from fp4engine.tensor import QuantizedTensor

Memory = dict[str, "AmaxHistory"]
"""``role -> amax history`` of one module."""


class _Step:
    """A step of delayed scaling: the time between entering and leaving an outermost region, on one thread.

    Attributes:
        memories: of the modules that took part in it, by ``id``, and of histories that were copied meanwhile.
        is_open: False once the region is left.
    """

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}
        self.is_open = True


class _Open:
    """The step that is open on one thread."""

    step: _Step | None = None


_MAGNITUDE = CastSpec()
"""A cast whose outer amax is the largest magnitude, which kernels find in one read."""

_thread = PerThread(_Open)
_lock = threading.Lock()
"""Held while a module joins a step."""


def begin_step() -> None:
    """Open a step of this thread, unless one is open. ``autocast`` calls this."""
    if _thread.held.step is None:
        _thread.held.step = _Step()


def end_step() -> None:
    """Close this thread's step. Modules that took part choose their next amaxes when they are used again."""
    step, _thread.held.step = _thread.held.step, None
    if step is not None:
        step.is_open = False
        for memory in step.memories.values():
            for history in memory.values():
                history.ended = True


def _one_element(name: str, returned: Any) -> Tensor:
    """What a function of the recipe's has returned, as [1].

    Raises:
        ValueError: it is no tensor of one element.
    """
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        got = f"a tensor {list(returned.shape)}" if isinstance(returned, Tensor) else shown(returned)
        raise ValueError(f"{name} must return a tensor of one element for the amaxes of one tensor, got {got}")
    return returned.view(1)


def _chooses_by_name(recipe: DelayedScaling) -> bool:
    """Whether no function of the recipe's chooses amaxes."""
    return not callable(recipe.amax_compute_algo) and recipe.scaling_factor_compute_algo is None


class Turn:
    """One choice of a history's amax, for checkpoints that will repeat a forward scaled by it.

    Attributes:
        amax: FP32 [1], the choice; None while the history itself still holds it, which the next choice overwrites.
    """

    amax: Tensor | None = None


class Turns:
    """By which choice of its amax each history scaled the forward that a checkpoint will repeat."""

    def __init__(self) -> None:
        self.of: dict[AmaxHistory, tuple[Turn, ...]] = {}

    def note(self, histories: Iterable["AmaxHistory"], repeated: Sequence["Turns"] = ()) -> None:
        """A forward has just been scaled by ``histories``, and as it was at first if it repeats a forward itself."""
        for history in histories:
            noted = self.of.get(history, ())
            turns = turns_of(history, repeated) or (history.turn(),)
            self.of[history] = (*noted, *(turn for turn in turns if turn not in noted))


def turns_of(history: "AmaxHistory", noted: Iterable[Turns]) -> tuple[Turn, ...]:
    """What the first of ``noted`` that knows ``history`` says of it.

    Every choice by which the forward was scaled: several if it ran in several steps, none if it is not known.
    """
    return next((turns.of[history] for turns in noted if history in turns.of), ())


class AmaxHistory:
    """Amaxes of one tensor of one module, newest first.

    Attributes:
        values: FP32 [length]; ``values[0]`` is the largest amax of the running step, and older steps follow.
        amax: FP32 [1], the amax that scales of the running step are made from.
        ended: whether the step that ``values[0]`` belongs to is over.
        kept_by: the recipe whose memory it is, for errors.
    """

    kept_by = "DelayedScaling"

    def __init__(self, length: int, amax: float) -> None:
        with torch.inference_mode(False):  # a history made under inference_mode could not be written outside it
            self.values = torch.zeros(length, dtype=torch.float32, device="cpu")
            self.amax = torch.full((1,), amax, dtype=torch.float32, device="cpu")
        self.ended = False
        self._step: _Step | None = None
        self._turn: weakref.ref[Turn] | None = None

    def turn(self) -> Turn:
        """The choice by which a forward that has just run was scaled."""
        turn = None if self._turn is None else self._turn()
        if turn is None:
            turn = Turn()
            self._turn = weakref.ref(turn)
        return turn

    def leave_turn(self) -> None:
        """Give the running choice an amax of its own, if a checkpoint needs it, before another one is made."""
        turn, self._turn = None if self._turn is None else self._turn(), None
        if turn is not None:
            with torch.inference_mode(False):
                turn.amax = self.amax.clone()

    def join(self, memory: Memory) -> "AmaxHistory":
        """Let all histories of ``memory``, this one among them, take part in this thread's open step, if there is one.

        Returns:
            This history.

        Raises:
            RuntimeError: they take part in another thread's step, which is still open.
        """
        step = _thread.held.step
        if step is None or self._step is step:
            return self
        with _lock:
            if self._step is not None and self._step.is_open:
                raise RuntimeError(
                    "DelayedScaling: two threads use one module in autocast regions that are open at the same time, "
                    "and its amaxes belong to one step; let one region close before the other opens, or give each "
                    "thread a copy of the module"
                )
            for history in memory.values():
                history._step = step
            step.memories[id(memory)] = memory
        return self

    def record(self, current: Tensor, recipe: DelayedScaling, spec: CastSpec, backend: str = "auto") -> Tensor:
        """Store ``current``, FP32 [1], and return the amax, FP32 [1], that this step's scale is made from.

        An Inf or a NaN in ``current`` is returned instead, so that the tensor's product is not silently finite.
        """
        choice, chosen = "", None
        if self._begin(current.device, recipe):
            if _chooses_by_name(recipe):
                choice = str(recipe.amax_compute_algo)
            else:
                choice, chosen = "given", self._chosen(recipe, spec)
        return record_amax(self.values, self.amax, current, choice, chosen, backend)

    def recall(self, device: torch.device, recipe: DelayedScaling) -> ops.Memory:
        """What a launch needs to do the same as :meth:`record`."""
        choice = str(recipe.amax_compute_algo) if self._begin(device, recipe) else ""
        return ops.Memory(self.values, self.amax, choice)

    def amax_of(self, turn: Turn, device: torch.device) -> Tensor:
        """The amax [1] of ``turn`` on ``device``, to which the history moves."""
        self.follow(device)
        return self.amax if turn.amax is None else turn.amax.to(device)

    def _begin(self, device: torch.device, recipe: DelayedScaling) -> bool:
        """Make room for what a forward notes; whether it begins a step, for which an amax has to be chosen."""
        if self.values.device != device or self.values.shape[0] != recipe.amax_history_len:
            self._fit(device, recipe.amax_history_len)
        begins = self.ended
        if begins:
            self.ended = False
            if self._turn is not None:  # a call of Python in every step otherwise
                self.leave_turn()
        return begins

    def follow(self, device: torch.device) -> None:
        """Move to ``device``."""
        if self.values.device != device:
            self._fit(device, self.values.shape[0])

    def _fit(self, device: torch.device, length: int) -> None:
        with torch.inference_mode(False):
            self.values, self.amax = self.resized(length).to(device), self.amax.to(device)

    def resized(self, length: int) -> Tensor:
        """The values of ``length`` steps: without the oldest, or with zeros."""
        values = self.values
        if length == values.shape[0]:
            return values
        return torch.nn.functional.pad(values[:length], (0, max(length - values.shape[0], 0)))

    def _chosen(self, recipe: DelayedScaling, spec: CastSpec) -> Tensor:
        """The amax [1] that the recipe chooses from the history for the next step."""
        algorithm, scaling = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
        if callable(algorithm):
            chosen = _one_element("amax_compute_algo", algorithm(self.values)).to(torch.float32)
        else:
            chosen = self.values[:1].clone() if algorithm == "most_recent" else self.values.amax().view(1)
        if scaling is not None:
            largest = torch.full_like(self.amax, spec.element.max_value)
            scale = scaling(chosen, spec.numerator / self.amax, largest, recipe)
            chosen = spec.numerator / _one_element("scaling_factor_compute_algo", scale)
        return chosen

    def next_amax(self, recipe: DelayedScaling, spec: CastSpec) -> Tensor:
        """The amax [1] that would scale the next step if the running one ended now."""
        following = self.apart(self.values.device)
        following.ended = True
        return following.record(torch.zeros_like(self.amax), recipe, spec)

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON or ``torch.save``."""
        return {"values": self.values.tolist(), "amax": float(self.amax), "open": not self.ended}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "AmaxHistory":
        """Inverse of :meth:`state`."""
        history = cls(len(state["values"]), state["amax"])
        history.values = torch.tensor(state["values"], dtype=torch.float32, device="cpu")
        history.ended = not state["open"]
        return history

    def __getstate__(self) -> dict[str, Any]:
        """Copies take part in no step, and no checkpoint repeats what they scaled."""
        return {**self.__dict__, "_step": None, "_turn": None}

    def apart(self, device: torch.device) -> "AmaxHistory":
        """A copy on ``device``, to which the history moves, that takes part in no step."""
        self.follow(device)
        copied = copy.copy(self)
        with torch.inference_mode(False):
            copied.values, copied.amax = self.values.clone(), self.amax.clone()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "AmaxHistory":
        """A copy, whose step ends with the step that is open on this thread if this history takes part in that."""
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        step = _thread.held.step
        if step is not None and (self._step is step or id(self) in step.memories):  # a copy that was not used itself
            step.memories[id(copied)] = {"": copied}
        return copied


@dataclass(frozen=True)
class RememberingQuantizer(Quantizer):
    """Scales both operands by one amax from a memory of earlier steps.

    Attributes:
        history: the memory of this tensor.
        memory: those of the module's tensors, which take part in the same steps.
        turn: the choice of an amax to scale by; the history is then left alone. None is the choice of the running step,
            and the tensor's amax is noted in the history.
        evaluates: whether it is noted in a copy of the history instead, which is then forgotten.
    """

    is_stateful: ClassVar[bool] = True

    history: AmaxHistory | None = field(default=None, compare=False, repr=False)
    memory: Memory = field(default_factory=dict[str, AmaxHistory], compare=False, repr=False)
    turn: Turn | None = field(default=None, compare=False, repr=False)
    evaluates: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history is None:
            history = self._new_history()
            object.__setattr__(self, "history", history)
            self.memory[""] = history

    def _new_history(self) -> AmaxHistory:
        raise NotImplementedError

    def _choose(self, current: Tensor) -> Tensor:
        """The amax [1] to scale a tensor by whose own is ``current``, which is noted."""
        raise NotImplementedError

    def evaluating(self) -> Self:
        """The same quantizer for evaluation: it does what the next forward would do, and leaves the history alone."""
        return replace(self, evaluates=True)

    def repeating(self, noted: Sequence[Turns]) -> Self:
        """The same quantizer for a forward that is recomputed: scaled as at first, and recorded already.

        Raises:
            RuntimeError: it is not known how the forward was scaled.
        """
        assert self.history is not None
        turns = turns_of(self.history, noted)
        if len(turns) != 1:
            known = "was scaled in several steps" if turns else "is not known"
            raise RuntimeError(
                f"{self.history.kept_by}: a forward runs inside a backward pass, and has to be scaled as the forward "
                f"that it repeats, which {known}; use fp4engine.checkpoint around one autocast region at most, without "
                "another kind of checkpoint around it"
            )
        return replace(self, turn=turns[0])

    def remembering_in(self, memory: dict[str, Any], tensor_type: str) -> Self:
        """The same quantizer with the history that ``memory`` has for this role; a new one is added if it has none."""
        new = self._new_history()
        if type(memory.get(tensor_type)) is not type(new):  # of another recipe
            memory[tensor_type] = new
        return replace(self, history=memory[tensor_type], memory=memory)

    def scaled_by(self, current: Tensor) -> Tensor:
        """The amax [1] by which a tensor is cast whose own is ``current``."""
        if self.turn is None:
            return self._choose(current)
        assert self.history is not None
        return torch.where(current.isfinite(), self.history.amax_of(self.turn, current.device), current)

    def quantize(
        self, x: Tensor | ops.Source, *, rowwise_amax: Tensor | None = None, **arguments: Any
    ) -> QuantizedTensor:
        """As :meth:`Quantizer.quantize`; ``rowwise_amax`` is the amax to REMEMBER, by default the amax of ``x``."""
        assert isinstance(x, Tensor)  # FusedInput.fuses refuses quantizers that do more than cast
        if rowwise_amax is None:
            rowwise_amax = self.own_amax(x)
        else:
            rows, cols = as_matrix(x).shape
            require_amax("rowwise_amax", rowwise_amax, self.rowwise_spec, rows, cols, x.device)
        amax = self.scaled_by(rowwise_amax)
        arguments["columnwise_amax"] = amax
        return super().quantize(x, rowwise_amax=amax, **arguments)

    def amax(self, x: Tensor, **sides: Any) -> tuple[Tensor | None, Tensor | None]:
        """The amax to share over ranks before :meth:`quantize`."""
        return self.own_amax(x), None

    def own_amax(self, x: Tensor) -> Tensor:
        """The amax [1] of ``x`` itself, which no cast here rotates."""
        amax, _ = ops.amax(as_matrix(x), _MAGNITUDE, None, stream=self.stream, backend=self.backend)
        assert amax is not None
        return amax


@dataclass(frozen=True)
class DelayedQuantizer(RememberingQuantizer):
    """FP8 by amaxes of earlier steps. Compares by its casts and recipe.

    Attributes:
        recipe: how the amax is chosen.
    """

    recipe: DelayedScaling = field(default_factory=DelayedScaling)

    def _new_history(self) -> AmaxHistory:
        assert self.rowwise_spec is not None
        return AmaxHistory(self.recipe.amax_history_len, self.rowwise_spec.numerator)

    def unrecorded(self) -> "DelayedQuantizer":
        """The same quantizer, which does not add to its history."""
        return replace(self, turn=Turn())

    @property
    def joins_group(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: a property of the value here
        """Whether amaxes are shared over autocast's ``amax_reduction_group``: the recipe's ``reduce_amax``."""
        return self.recipe.reduce_amax

    @property
    def is_composable(self) -> bool:
        """True unless functions of the recipe's choose the amax."""
        return type(self) is DelayedQuantizer and _chooses_by_name(self.recipe)

    def recall(self, device: torch.device) -> ops.Memory:
        """The history of this tensor, as a launch takes it."""
        assert self.history is not None
        if self.turn is not None:
            return ops.Memory(None, self.history.amax_of(self.turn, device), "")
        history = self.history.apart(device) if self.evaluates else self.history.join(self.memory)
        return history.recall(device, self.recipe)

    def _choose(self, current: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("DelayedScaling keeps amaxes between steps, which torch.compile cannot trace")
        assert self.history is not None and self.rowwise_spec is not None
        history = self.history.apart(current.device) if self.evaluates else self.history.join(self.memory)
        return history.record(current, self.recipe, self.rowwise_spec, self.backend)
