"""What public functions ask of their arguments, said in one way: the argument, what is allowed, and what was given."""

import os
from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import nn


def require_model(model: object) -> None:
    """Raise a ValueError unless ``model`` is a module, and not its class for instance."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {shown(model)}")


def require_patterns(name: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """``patterns`` of the argument ``name``, each once they are known to be strings.

    Raises:
        ValueError: one string, or anything but strings.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{name} must be a sequence of patterns, got the string; write [{patterns!r}]")
    is_sequence = isinstance(patterns, Iterable) and not isinstance(patterns, torch.Tensor)
    given: tuple[Any, ...] | None = tuple(patterns) if is_sequence else None
    if given is None or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"{name} must be a sequence of patterns, which are strings, got {shown(patterns)}")
    return given


def require_path(name: str, path: str | os.PathLike[str]) -> Path:
    """The argument ``name`` as a path.

    Raises:
        ValueError: neither a string nor a path, an empty string, as of a shell's variable that nobody set, or one with
            a zero character, which no file's name has.
    """
    if not isinstance(path, str | os.PathLike) or path == "" or "\0" in str(path):
        raise ValueError(f"{name} must be a path, got {shown(path)}")
    return Path(path)


def require_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The argument ``name`` as an ``int``: of NumPy's integers too, and of whatever else ``operator.index`` takes.

    Raises:
        ValueError: no integer, a bool, or one that is not from ``least`` to ``most``.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except (TypeError, RuntimeError):  # the latter of a tensor on meta, which has no value
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most:,}"
        raise ValueError(f"{name} must be an integer{bounds}, got {shown(value)}")
    return number


def require_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ValueError unless ``value`` of the argument ``name`` is one of ``allowed``, and of its type."""
    words = tuple(allowed)
    for word in words:
        if value is word or (type(value) is type(word) and value == word):
            return
    raise ValueError(f"{name} must be one of {', '.join(map(shown, words))}, got {shown(value)}")


def require_bool(name: str, value: Any) -> None:
    """Raise a ValueError unless ``value`` of the argument ``name`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def require_bools(**flags: Any) -> None:
    """:func:`require_bool` of each argument, given by its name."""
    for name, value in flags.items():
        require_bool(name, value)


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, one of NumPy's included, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_rate(name: str, value: Any) -> None:
    """Raise a ValueError unless ``value`` of the argument ``name`` is a number from 0 to 1."""
    if not (is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a number from 0 to 1, got {shown(value)}")


def require_dense(name: str, tensor: Any) -> None:
    """Raise a ValueError unless ``tensor``, the argument ``name``, is a strided tensor of one shape."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {'a nested one' if tensor.is_nested else tensor.layout}")


def require_callable(name: str, function: Callable[..., Any]) -> None:
    """Raise a ValueError unless the argument ``name`` can be called."""
    if not callable(function):
        raise ValueError(f"{name} must be a function, got {shown(function)}")


def require_data(tensor: torch.Tensor, values: object) -> None:
    """Raise a TypeError, as PyTorch does, unless ``values``, which ``tensor.data`` is set to, are a tensor."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"the data of a {type(tensor).__name__} must be a tensor, got {shown(values)}")


def require_member(name: str, group: Any) -> None:
    """Raise a ValueError unless the argument ``name`` is a process group of which this process is a rank."""
    if not isinstance(group, torch.distributed.ProcessGroup) or torch.distributed.get_rank(group) < 0:
        raise ValueError(f"{name} must be a process group that this rank belongs to, got {group!r}")


def shown(value: object) -> str:
    """``repr`` in one line of bounded length; of an enumeration's member, the name by which it is written."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return f"{' '.join(repr(value).split()):.80}"


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of bearable length; its kind, where that says more than its words."""
    said = " ".join(str(error).split())
    said = f"{said[:400]} ..." if len(said) > 400 else said
    if isinstance(error, OSError):
        said = error.strerror or said
        return f"{error.filename}: {said}" if error.filename else said
    return said if isinstance(error, ValueError) and said else f"{type(error).__name__}: {said}".removesuffix(": ")
