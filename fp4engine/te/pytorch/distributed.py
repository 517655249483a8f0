"""Random states by name, and recomputation."""

from collections.abc import Callable, Generator
from contextlib import ContextDecorator, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4engine.arguments import require_callable
from fp4engine.checkpoint import checkpoint as _checkpoint
from fp4engine.te.pytorch.quantization import FP8GlobalStateManager


class CudaRNGStatesTracker:
    """States of PyTorch's generator, of the current CUDA device or, without one, of the CPU, by name."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state of ``seed``.

        Raises:
            RuntimeError: the seed or the name is taken.
        """
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        read, write, sow = _generator()
        before = read()
        sow(seed)
        self.states_[name] = read()
        write(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Generator[None]:
        """Region that draws from the state ``name``, which is where it was when the region is entered again.

        Raises:
            KeyError: there is no such state.
        """
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        read, write, _ = _generator()
        before = read()
        write(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = read()
            write(before)


def _generator() -> tuple[Callable[[], Tensor], Callable[[Tensor], None], Callable[[int], Any]]:
    """Read, write and seed the generator."""
    if torch.cuda.is_available():
        return torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed
    return torch.get_rng_state, torch.set_rng_state, torch.manual_seed


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """:func:`fp4engine.checkpoint`, which repeats the random states of a tracker as well.

    Args:
        get_rng_state_tracker: returns the :class:`CudaRNGStatesTracker` that ``function`` draws from.
        distribute_saved_activations: only False.
        tp_group: without effect.
    """
    require_callable("function", function)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    if tracker is not None:
        require_callable("get_rng_state_tracker", tracker)
    kwargs.pop("tp_group", None)
    if torch.compiler.is_compiling() and tracker is None:
        return _checkpoint(function, *args, **kwargs)
    return _checkpoint(_Repeated(function, tracker or CudaRNGStatesTracker), *args, **kwargs)


class _Repeated:
    """A function that, when it runs again, finds the tracker's states as it found them first.

    Both runs are told by :class:`activation_recompute_forward`.
    """

    def __init__(self, function: Callable[..., Any], get_tracker: Callable[[], CudaRNGStatesTracker]) -> None:
        self.function, self.get_tracker = function, get_tracker
        self.states: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with activation_recompute_forward(activation_recompute=True, recompute_phase=self.states is not None):
            tracker = self.get_tracker()
            now = tracker.get_states()
            if self.states is None:
                self.states = now
                return self.function(*args, **kwargs)
            tracker.set_states(self.states)
            try:
                return self.function(*args, **kwargs)
            finally:
                tracker.set_states(now)


class activation_recompute_forward(ContextDecorator):
    """Around a forward that is to be recomputed, and around the recomputation; nests.

    A recomputation needs a region of its own around it, as every forward does; that is all that fp4engine needs. These
    flags are for scripts that ask.

    Args:
        activation_recompute: whether FP8 or FP4 is recomputed.
        recompute_phase: whether this is the recomputation.
    """

    _open: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self._flags = (activation_recompute, recompute_phase)

    def __enter__(self) -> None:
        self._open.append(self._flags)

    def __exit__(self, *_: object) -> None:
        self._open.pop()


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the innermost :class:`activation_recompute_forward` recomputes, and a region for FP8 or FP4 is open."""
    is_recomputed = bool(activation_recompute_forward._open) and activation_recompute_forward._open[-1][0]
    return is_recomputed and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether the innermost :class:`activation_recompute_forward` is a recomputation."""
    return bool(activation_recompute_forward._open) and activation_recompute_forward._open[-1][1]


def get_distributed_world_size(group: Any = None) -> int:
    """Ranks of ``group``, one without PyTorch's process groups."""
    return torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """This rank of ``group``, zero without PyTorch's process groups."""
    return torch.distributed.get_rank(group) if torch.distributed.is_initialized() else 0


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Do nothing: modules keep no sharded tensors of their own."""
