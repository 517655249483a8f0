"""The only reader of ``os.environ``.

Flags carry TransformerEngine's names. They are dataclass default factories, so a flag is read when a
recipe or quantizer is constructed, never at import; a constructor argument always wins.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from fp4engine.private import constant_when_traced

NOT_IMPLEMENTED = {
    "NVTE_USE_FAST_MATH": "quotients and rotated values are rounded as they are without it, on every machine",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "4over6 compares exact errors, so that every machine chooses alike",
    "NVTE_KEEP_BACKWARD_UNQUANTIZED": "versions since have NVTE_BACKWARD_OVERRIDE='high_precision' for it",
    "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE": "norms add 1 to a zero-centered gamma in FP32",
    "NVTE_DPA_FP8_RECIPE_DPA": "attention stays in high precision",
    "NVTE_DPA_FP8_RECIPE_MHA": "attention stays in high precision",
}
"""Flags of TransformerEngine's that would change numbers, and why they cannot: only unset or ``"0"``."""

_PREFIXES = ("NVTE_NVFP4_", "NVTE_FP4_")
_ALIKE = 0.9
"""How alike another name that begins with ``NVTE_`` and a flag are if it is that flag misspelled."""
_fields: set[str] = set()
_looked_at: set[str] = set()
_flags_count_as_unset: ContextVar[bool] = ContextVar("flags_count_as_unset", default=False)


def read_flag(name: str, default: bool) -> bool:
    """Value of the boolean flag ``name``: ``"1"`` or ``"0"``; ``default`` when unset or empty.

    Raises:
        ValueError: the flag holds anything else.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"environment flag {name} must be '0' or '1', got {text!r}")
    return text == "1"


def read_choice(name: str, allowed: tuple[str, ...], default: str | None) -> str | None:
    """Value of the flag ``name`` out of the words ``allowed``; ``default`` when unset or empty.

    Words compare without regard to case and come back as spelled in ``allowed``.

    Raises:
        ValueError: the flag holds a word that is not allowed.
    """
    text = os.environ.get(name)
    if not text:
        return default
    for word in allowed:
        if text.lower() == word.lower():
            return word
    words = ", ".join(repr(word) for word in allowed)
    raise ValueError(f"environment flag {name} must be one of {words}, got {text!r}")


def flags_set() -> dict[str, str]:
    """Flags of this package, and of Triton, that are set in this process, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NVTE_", "TRITON_"))}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_unless_set(name: str, value: str) -> None:
    """Set a variable of another library's, which that library is yet to read, unless the user has set it."""
    os.environ.setdefault(name, value)


def see_one_gpu(name: str) -> None:
    """Let this process, which has not asked for CUDA yet, see one GPU, given as in ``CUDA_VISIBLE_DEVICES``."""
    os.environ["CUDA_VISIBLE_DEVICES"] = name


def visible_gpus(count: int) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each of the ``count`` GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


@contextmanager
def flags_unset() -> Generator[None]:
    """Region in which recipes are made as if no flag were set."""
    before = _flags_count_as_unset.set(True)
    try:
        yield
    finally:
        _flags_count_as_unset.reset(before)


@constant_when_traced
def _count_as_unset() -> bool:
    return _flags_count_as_unset.get()


def flag(name: str) -> Any:
    """Dataclass field whose default is :func:`read_flag` at construction, without the flag False."""
    return _field(name, False, lambda: read_flag(name, False))


def choice(name: str, allowed: tuple[str, ...], default: str | None) -> Any:
    """Dataclass field whose default is :func:`read_choice` at construction."""
    return _field(name, default, lambda: read_choice(name, allowed, default))


def _field(name: str, default: Any, read: Callable[[], Any]) -> Any:
    """Field of the flag ``name``; the name, and what the field is without the flag, are in its metadata."""
    _fields.add(name)

    def factory() -> Any:
        if _count_as_unset():
            return default
        _look_for_names_that_nobody_reads()
        return read()

    return dataclasses.field(default_factory=factory, metadata={"default": default, "flag": name})


def refuse_what_is_not_implemented() -> None:
    """Look for flags that would change numbers, and cannot.

    Raises:
        ValueError: one of :data:`NOT_IMPLEMENTED` asks for something.
    """
    for name, reason in NOT_IMPLEMENTED.items():
        if os.environ.get(name, "") not in ("", "0"):
            raise ValueError(
                f"environment flag {name}={os.environ[name]!r} is not implemented: {reason}; unset it, or set it to '0'"
            )


def _look_for_names_that_nobody_reads() -> None:
    """Warn of each once per process.

    Raises:
        ValueError: see :func:`refuse_what_is_not_implemented`.
    """
    refuse_what_is_not_implemented()
    for name in sorted(name for name in os.environ if name.startswith("NVTE_")):
        if name in NOT_IMPLEMENTED or name in _fields or name in _looked_at:
            continue
        _looked_at.add(name)
        cutoff = 0.0 if name.startswith(_PREFIXES) else _ALIKE
        if nearest := get_close_matches(name, sorted(_fields), n=1, cutoff=cutoff):
            warnings.warn(
                f"nobody reads the environment flag {name}; did you mean {nearest[0]}? "
                f"The flags are {', '.join(sorted(_fields))}",
                stacklevel=5,
            )
