"""Which implementation runs, why, and a record of what ran."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.kernels.tape import note

logger = logging.getLogger("fp4engine")

_executed: Counter[str] = Counter()
_refusals: dict[str, str] = {}


def executed_paths() -> dict[str, int]:
    """How often each path ran since :func:`reset_executed_paths`, e.g. ``{"quantize/triton": 12}``.

    Replays of CUDA graphs are not counted.
    """
    return dict(_executed)


def refusals() -> dict[str, str]:
    """Every fallback of ``backend="auto"`` so far: operator -> the kernel's reason for refusing."""
    return dict(_refusals)


def reset_executed_paths() -> None:
    """Forget the record of :func:`executed_paths`."""
    _executed.clear()


def call(operator: Any, implementation: Callable[..., Any], like: Tensor, *arguments: Any) -> Any:
    """``operator(*arguments)``, past the dispatcher where nothing listens to it.

    In eager mode on plain tensors the dispatcher of a Python operator costs more host time than a kernel launch, and
    ``implementation`` is what it would reach. Tracers and tensor subclasses get the operator.
    """
    if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
        return operator(*arguments)
    return implementation(*arguments)


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
    path, reason = _decide(device, backend, question, supports)
    if reason and backend in ("triton", "native"):
        raise RuntimeError(f"backend={backend!r} was asked for, but {operator} has no kernel here: {reason}")
    if reason:
        refuse(operator, reason, "on the reference path")
    record(operator, path)
    return path


def refuse(operator: str, reason: str, instead: str) -> None:
    """Note why ``operator`` has no kernel here, and log it once: it runs ``instead``."""
    if _refusals.get(operator) != reason:
        _refusals[operator] = reason
        logger.info("%s runs %s: %s", operator, instead, reason)


def record(operator: str, path: str) -> None:
    """Note that ``operator`` ran on ``path``. Does nothing while ``torch.compile`` traces."""
    if torch.compiler.is_compiling():
        return
    key = f"{operator}/{path}"
    note(_count, key)
    _count(key)


def _count(key: str) -> None:
    _executed[key] += 1


@cache
def _decide(
    device: torch.device, backend: str, question: tuple[Any, ...], supports: Callable[..., tuple[bool, str]]
) -> tuple[str, str]:
    """``(path, reason for refusing the kernel)``."""
    if backend == "reference":
        return "reference", ""
    runs, reason = capability.triton_runs_on(device)
    if runs:
        runs, reason = supports(*question)
    return ("triton", "") if runs else ("reference", reason)
