"""Which implementation runs, why, and a record of what ran."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch

from fp4engine import capability

logger = logging.getLogger("fp4engine")

_executed: Counter[str] = Counter()
_refusals: dict[str, str] = {}


def executed_paths() -> dict[str, int]:
    """How often each path ran in eager mode since :func:`reset_executed_paths`, e.g. ``{"quantize/triton": 12}``."""
    return dict(_executed)


def refusals() -> dict[str, str]:
    """Every fallback of ``backend="auto"`` so far: operator -> the kernel's reason for refusing."""
    return dict(_refusals)


def reset_executed_paths() -> None:
    """Forget the record of :func:`executed_paths`."""
    _executed.clear()


def record(operator: str, path: str) -> None:
    """Note that ``operator`` ran on ``path``."""
    _executed[f"{operator}/{path}"] += 1


def choose(operator: str, device: torch.device, backend: str, supports: Callable[[], tuple[bool, str]]) -> str:
    """``"triton"`` or ``"reference"`` for one call.

    Args:
        operator: for the log and the error.
        backend: ``auto`` takes the kernel where it can and falls back with the reason logged once;
            ``reference`` never; ``triton`` and ``native`` raise where the kernel refuses.
        supports: the kernel's own answer for this call; asked only if Triton runs on ``device``.

    Raises:
        RuntimeError: ``backend`` demands a kernel that refuses.
    """
    if backend == "reference":
        return "reference"
    runs, reason = capability.triton_runs_on(device)
    if runs:
        runs, reason = supports()
    if runs:
        return "triton"
    if backend != "auto":
        raise RuntimeError(f"backend={backend!r} was asked for, but {operator} has no kernel here: {reason}")
    _log_refusal(operator, reason)
    return "reference"


@cache
def _log_refusal(operator: str, reason: str) -> None:
    _refusals[operator] = reason
    logger.info("%s runs on the reference path: %s", operator, reason)
