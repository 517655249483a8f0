"""Which implementation runs, why, and a record of what ran."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp4engine import capability

logger = logging.getLogger("fp4engine")

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What kernels read and write."""

_executed: dict[tuple[str, ...], int] = defaultdict(int)
"""How often these paths ran in one launch: one entry for all of them takes the host less time than one for each."""
_refusals: dict[str, str] = {}


def executed_paths() -> dict[str, int]:
    """How often each path ran since :func:`reset_executed_paths`, e.g. ``{"quantize/triton": 12}``.

    Replays of CUDA graphs are not counted.
    """
    paths: Counter[str] = Counter()
    for together, times in _executed.copy().items():
        for path in together:
            paths[path] += times
    return dict(paths)


def refusals() -> dict[str, str]:
    """Every fallback of ``backend="auto"`` so far: operator -> the kernel's reason for refusing."""
    return dict(_refusals)


def reset_executed_paths() -> None:
    """Forget the record of :func:`executed_paths`."""
    _executed.clear()


def choose(
    operator: str,
    device: torch.device,
    backend: str,
    question: tuple[Any, ...],
    supports: Callable[..., tuple[bool, str]],
) -> str:
    """``"triton"`` or ``"reference"`` for one call; the answer is recorded.

    Args:
        operator: for the record, the log and the error.
        backend: ``auto`` takes the kernel where it can and falls back with the reason logged once;
            ``reference`` never; ``triton`` and ``native`` raise where the kernel refuses.
        question: hashable arguments of ``supports``.
        supports: the kernel's own answer; asked once per question, and only if Triton runs on ``device``.

    Raises:
        RuntimeError: ``backend`` demands a kernel that refuses.
    """
    path, reason = decide(device, backend, question, supports)
    enter(operator, path, reason, backend)
    return path


def enter(operator: str, path: str, reason: str, backend: str) -> None:
    """Record that ``operator`` runs on ``path``, and the ``reason`` why it does not on a faster one.

    Raises:
        RuntimeError: there is a reason, and ``backend`` demands the faster one.
    """
    if reason:
        if backend in ("triton", "native"):
            raise RuntimeError(f"backend={backend!r} was asked for, but {operator} has no kernel here: {reason}")
        refuse(operator, reason, "on the reference path")
    _executed[f"{operator}/{path}",] += 1


def refuse(operator: str, reason: str, instead: str) -> None:
    """Note why ``operator`` has no kernel here, and log it once: it runs ``instead``."""
    if _refusals.get(operator) != reason:
        _refusals[operator] = reason
        logger.info("%s runs %s: %s", operator, instead, reason)


def record(*paths: str) -> None:
    """Note what ran, each an ``"operator/path"``; not for code that ``torch.compile`` traces."""
    _executed[paths] += 1


@cache
def decide(
    device: torch.device, backend: str, question: tuple[Any, ...], supports: Callable[..., tuple[bool, str]]
) -> tuple[str, str]:
    """``(path, reason for refusing the kernel)``."""
    if backend == "reference":
        return "reference", ""
    runs, reason = capability.triton_runs_on(device)
    if runs:
        runs, reason = supports(*question)
    return ("triton", "") if runs else ("reference", reason)


def always() -> tuple[bool, str]:
    """The answer, for :func:`choose`, of kernels that refuse nothing."""
    return True, ""


def takes(dtype: torch.dtype) -> tuple[bool, str]:
    """The answer, for :func:`choose`, of kernels that refuse nothing but other dtypes than :data:`KERNEL_DTYPES`."""
    return dtype in KERNEL_DTYPES, f"the Triton kernels neither read nor write {dtype}"
