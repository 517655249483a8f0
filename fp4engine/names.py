"""Dotted module names, and patterns over them: the one way to say which modules, in ``convert`` and in rules."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape


def covers(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names the module ``name`` or a module above it.

    A glob over whole dotted segments: ``*`` is one segment or part of one, ``**`` any number of them, so ``layers.1.*``
    is not ``layers.10.fc1``, ``layers`` covers everything below it, and ``**.router`` finds routers at any depth.
    """
    return _covers(pattern.split("."), name.split("."))


def _covers(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_covers(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _covers(pattern[1:], name[1:])


def literal(name: str) -> str:
    """The pattern that covers the module ``name`` and what is below it, whatever characters the name has."""
    return escape(name)


class EndOfName(str):
    """The end of a dotted name whose beginning is unknown."""


def dotted(name: str | None, part: str) -> str:
    """The name of ``part`` of the module ``name``; an :class:`EndOfName` if that has no name.

    Raises:
        ValueError: ``name``, which a user may have given, is no string.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name must be a string or None, got {name!r}")
    joined = f"{name}.{part}" if name else part
    return joined if name and not isinstance(name, EndOfName) else EndOfName(joined)
