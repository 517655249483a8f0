"""The only reader of ``os.environ``.

Flags carry TransformerEngine's names. They are dataclass default factories, so a flag is read when a
recipe or quantizer is constructed, never at import; a constructor argument always wins.
"""

import dataclasses
import os
from typing import Any


def read_flag(name: str, default: bool) -> bool:
    """Value of the boolean flag ``name``: ``"1"`` or ``"0"``; ``default`` when unset.

    Raises:
        ValueError: the flag holds anything else.
    """
    text = os.environ.get(name)
    if text is None:
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


def flag(name: str, default: bool = False) -> Any:
    """Dataclass field whose default is :func:`read_flag` at construction."""
    return dataclasses.field(default_factory=lambda: read_flag(name, default))


def choice(name: str, allowed: tuple[str, ...], default: str | None) -> Any:
    """Dataclass field whose default is :func:`read_choice` at construction."""
    return dataclasses.field(default_factory=lambda: read_choice(name, allowed, default))
