"""What training loops have in common: the optimizer and its rate, the pace, memory, signals, bytes that repeat."""

import math
import random
import resource
import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from fp4engine.environment import set_unless_set

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05
FINAL_SHARE = 0.1
"""Learning rate at the end, as a share of its peak."""

STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")


def compute_repeatably(warn_only: bool = False) -> None:
    """From here on equal runs give equal bytes, also on a GPU; call it before anything multiplies there.

    Args:
        warn_only: go on, where an operator of PyTorch's has no way to give equal bytes.
    """
    set_unless_set("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then adds in the same order every time
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # a debugging aid that would cost a pass over memory


def seed_generators(seed: int) -> None:
    """Seed what a model may draw from: PyTorch's generators, Python's and NumPy's, which some weights are drawn by."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_states() -> dict[str, Any]:
    """The states of what :func:`seed_generators` seeds, as ``torch.save`` takes them."""
    numpy_state: Any = np.random.get_state()
    name, key, *rest = numpy_state
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python_rng": random.getstate(),
        "numpy_rng": (name, key.tolist(), *rest),
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Undo what was drawn since :func:`generator_states`."""
    torch.set_rng_state(states["torch_rng"])
    if states["cuda_rng"] is not None:
        torch.cuda.set_rng_state(states["cuda_rng"])
    random.setstate(states["python_rng"])
    np.random.set_state(states["numpy_rng"])


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW on what is trained, with decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, fused=trained[0].is_cuda)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over :data:`WARMUP_SHARE`, then half a cosine down to :data:`FINAL_SHARE` of the peak."""
    warmup = max(1, round(steps * WARMUP_SHARE))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


class Pace:
    """Tokens per second of training steps, between looks at the GPU; the first stretch is warm-up."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.steps, self.measured = 0, 0.0
        self.warm = False
        self.begin = 0.0

    def start(self) -> None:
        """Begin to time a stretch of steps."""
        self.begin = time.perf_counter()

    def stop(self, steps: int) -> None:
        """End a stretch of ``steps`` steps, and begin the next."""
        now = time.perf_counter()
        if self.warm:
            self.steps += steps
            self.measured += now - self.begin
        self.warm = True
        self.begin = now

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over all stretches but the first; None until the second has ended."""
        return self.steps * self.tokens_per_step / self.measured if self.steps else None

    def seconds(self, steps: int) -> float | None:
        """Seconds that ``steps`` more steps will take at the mean pace; None until the second stretch has ended."""
        return steps * self.measured / self.steps if self.steps else None


def duration(seconds: float) -> str:
    """The time in whole seconds, minutes and hours, the largest two of them."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory` count from now on. On a CPU without Linux it counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_PEAK.exists():
        CLEAR_PEAK.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: what CUDA's allocator held on a GPU, the resident size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        kilobytes = next(line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kilobytes) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; a second one ends the process at once."""

    requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Hear a signal."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Turn signals into a request that the training loop looks at between steps."""
    stop = StopRequest()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
