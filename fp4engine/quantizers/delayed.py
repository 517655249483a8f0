"""FP8 with scales from earlier steps: the one quantizer that remembers."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.quantizers.base import Quantizer, as_matrix
from fp4engine.recipe import DelayedScaling
from fp4engine.tensor import QuantizedTensor

_step = [0]


def next_step() -> None:
    """Close a step: every history chooses its next amax when it is used again. ``autocast`` calls this."""
    _step[0] += 1


class AmaxHistory:
    """Amaxes of one tensor of one module, newest first.

    Attributes:
        values: FP32 [length]; ``values[0]`` collects the step that is running, later ones follow by age.
        amax: FP32 [1], what scales are made of in this step.
        step: the step that ``values[0]`` belongs to.
    """

    def __init__(self, length: int, amax: float) -> None:
        with torch.inference_mode(False):  # a history made under inference_mode could not be written outside it
            self.values = torch.zeros(length)
            self.amax = torch.full((1,), amax)
        self.step = _step[0]

    def record(self, current: Tensor, recipe: DelayedScaling) -> Tensor:
        """Note ``current`` [1], and return the amax that this step's scale is made of.

        A tensor with an Inf or a NaN gets that instead, so that its product is not silently finite.
        """
        self._follow(current.device)
        if self.step != _step[0]:
            self._choose(recipe)
            self.step = _step[0]
        self.values[0] = torch.maximum(self.values[0], current[0])
        return self.scaled_by(current)

    def scaled_by(self, current: Tensor) -> Tensor:
        """The amax [1] that the running step scales a tensor with amax ``current`` [1] by."""
        self._follow(current.device)
        return torch.where(current.isfinite(), self.amax, current)

    def _follow(self, device: torch.device) -> None:
        if self.values.device != device:
            with torch.inference_mode(False):
                self.values, self.amax = self.values.to(device), self.amax.to(device)

    def resize(self, length: int) -> None:
        """Remember ``length`` steps from now on: forget the oldest, or make room."""
        if length != len(self.values):
            with torch.inference_mode(False):
                self.values = torch.nn.functional.pad(self.values[:length], (0, max(length - len(self.values), 0)))

    def _choose(self, recipe: DelayedScaling) -> None:
        if recipe.amax_compute_algo == "max":
            chosen = self.values.amax()
        elif recipe.amax_compute_algo == "most_recent":
            chosen = self.values[0]
        else:
            assert callable(recipe.amax_compute_algo)
            chosen = recipe.amax_compute_algo(self.values)
        usable = chosen.isfinite() & (chosen > 0)
        self.amax = torch.where(usable, chosen, self.amax)
        self.values = self.values.roll(1)
        self.values[0] = 0

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON or ``torch.save``."""
        return {"values": self.values.tolist(), "amax": float(self.amax), "open": self.step == _step[0]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "AmaxHistory":
        """Inverse of :meth:`state`."""
        history = cls(len(state["values"]), state["amax"])
        history.values = torch.tensor(state["values"])
        history.step = _step[0] if state["open"] else _step[0] - 1
        return history


@dataclass(frozen=True)
class DelayedQuantizer(Quantizer):
    """Scales from ``history``; both operands share one amax. Compares by its casts and recipe.

    Attributes:
        recipe: how the amax is chosen.
        history: the module's memory of this tensor.
        records: False reads the history and leaves it as it is.
    """

    recipe: DelayedScaling = field(default_factory=DelayedScaling)
    history: AmaxHistory | None = field(default=None, compare=False, repr=False)
    records: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history is None:
            assert self.rowwise_spec is not None
            object.__setattr__(self, "history", AmaxHistory(self.recipe.amax_history_len, self.rowwise_spec.numerator))

    def repeating(self) -> "DelayedQuantizer":
        """The same quantizer with the scales of the forward that is recomputed, which has been recorded."""
        return replace(self, records=False)

    @property
    def is_stateful(self) -> bool:
        """True: scales come from the history."""
        return True

    def with_backend(self, backend: str) -> "DelayedQuantizer":
        """The same casts and the same memory, by another backend."""
        return replace(self, backend=backend)

    def remembering_in(self, memory: dict[str, Any], tensor_type: str) -> "DelayedQuantizer":
        """The same quantizer with the history that ``memory`` has for this role, or lends it from now on."""
        history: AmaxHistory = memory.setdefault(tensor_type, self.history)
        history.resize(self.recipe.amax_history_len)
        return replace(self, history=history)

    def quantize(
        self, x: Tensor | ops.Source, *, rowwise_amax: Tensor | None = None, **arguments: Any
    ) -> QuantizedTensor:
        """As :meth:`Quantizer.quantize`; ``rowwise_amax`` is the amax to REMEMBER, by default that of ``x``."""
        if torch.compiler.is_compiling():
            raise RuntimeError("DelayedScaling keeps amaxes between steps, which torch.compile cannot trace")
        assert self.history is not None
        assert isinstance(x, Tensor)  # what remembers takes no source, see Deferred.fuses
        if rowwise_amax is None:
            rowwise_amax = self._own_amax(x)
        amax = self.history.record(rowwise_amax, self.recipe) if self.records else self.history.scaled_by(rowwise_amax)
        arguments["columnwise_amax"] = amax
        return super().quantize(x, rowwise_amax=amax, **arguments)

    def amax(self, x: Tensor, **sides: Any) -> tuple[Tensor | None, Tensor | None]:
        """The amax to share over ranks before :meth:`quantize`; none under ``reduce_amax=False``."""
        return (self._own_amax(x) if self.recipe.reduce_amax else None), None

    def _own_amax(self, x: Tensor) -> Tensor:
        amax, _ = ops.amax(as_matrix(x), self.rowwise_spec, None, stream=self.stream, backend=self.backend)
        assert amax is not None
        return amax
