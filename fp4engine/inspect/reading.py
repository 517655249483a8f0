"""Reading the rows of a record from its file; :data:`FIELDS` says what each kind of row must have."""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fp4engine.arguments import require_path
from fp4engine.formats import FORMATS, ElementFormat

FILE = "record.jsonl"

Form = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def element_of(cast: str) -> ElementFormat | None:
    """The format that the label of a cast begins with; None if it begins with none."""
    return FORMATS.get(cast.partition(" ")[0])


def _is_cast(value: Any) -> bool:
    return isinstance(value, str) and element_of(value) is not None


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number that FP64 holds, or None for a number that does not exist."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return value is None or (isinstance(value, float) and math.isfinite(value))


def are(form: Form) -> Form:
    return lambda value: isinstance(value, list) and all(map(form, value))


def _are_each(*forms: Form) -> Form:
    """A list with an entry of each form, in their order."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(forms)
        and all(form(entry) for form, entry in zip(forms, value, strict=True))
    )


def _is_histogram(value: Any) -> bool:
    return isinstance(value, dict) and all(code.isdecimal() and is_count(times) for code, times in value.items())


_OPERAND: dict[str, Form] = dict.fromkeys(("layer", "gemm", "role", "side"), is_text)
_SHARES = ("zeros", "rounded_to_zero", "saturated", "scale_underflow", "scale_overflow")
_NUMBERS = ("amax", "sqnr_db", *_SHARES, "scale_spread_octaves", "scale_range_octaves")


def _are_roles(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(role, dict)
        and is_text(role.get("module_type"))
        and is_text(role.get("name"))
        and _are_each(is_count, is_count)(role.get("shape"))
        for role in value.values()
    )


FIELDS: dict[str, dict[str, Form]] = {
    "run": {"every": is_count, "world_size": is_count},
    "tensor": {"layer": is_text, "role": is_text, "channels": are(_are_each(is_count, _is_number))},
    "operand": {
        **_OPERAND,
        **dict.fromkeys(_NUMBERS, _is_number),
        "cast": _is_cast,
        "nonfinite": is_count,
        "codes": are(is_count),
        "scale_codes": _is_histogram,
        "worst": are(_are_each(is_count, is_count, _is_number, _is_number, is_count)),
    },
    "gemm": {"layer": is_text, "gemm": is_text, "snr_db": _is_number},
    "rounding": {**_OPERAND, "bias": _is_number},
    "refusal": {"layer": is_text, "reason": is_text},
}
"""``kind of row -> field -> check of its value``. Rows may have other fields, which are not read here."""


def stamp(file: Path) -> tuple[int, int] | None:
    """What tells ``file`` from another one in its place, and from a longer one; None if it is not there."""
    if not file.exists():
        return None
    stat = file.stat()
    return stat.st_ino, stat.st_size


def append(file: Path, lines: Iterable[str]) -> tuple[int, int] | None:
    """Append ``lines`` to ``file``, all of them or none; returns its new :func:`stamp`.

    Raises:
        OSError: the disk is full, for instance; it names the file, which is then as it was.
    """
    before = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.writelines(lines)
    except OSError as error:
        if file.exists():
            os.truncate(file, before)
        raise OSError(error.errno, error.strerror, str(file)) from error
    return stamp(file)


def cut_unfinished_line(file: Path) -> None:
    """Remove an unfinished last line from ``file``, which a killed process leaves; do nothing without a file."""
    if not file.is_file():
        return
    with file.open("rb+") as record:
        end = record.seek(0, os.SEEK_END)
        while end:  # rows are far shorter than a step of this
            begin = max(end - (1 << 16), 0)
            record.seek(begin)
            found = record.read(end - begin).rfind(b"\n") + 1
            end = begin + found
            if found:
                break
        record.truncate(end)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a ``record.jsonl`` or of the folder that holds it; each gets its ``line``, counted from 1.

    Raises:
        ValueError: there is no such file, or a line is no row of a record.

    Warns:
        UserWarning: the file ends within a line, since a process was killed; that line is left out.
    """
    given = require_path("path", path)
    file = given / FILE if given.is_dir() else given
    if not file.is_file():
        raise ValueError(f"there is no {file}; inspect.record(model, out) writes {FILE} into the folder out")
    try:
        *lines, unfinished = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: {error}") from error
    rows: list[dict[str, Any]] = []
    for line, text in enumerate(lines, start=1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {line} of {file} is not JSON: {error}") from error
        if wrong := fault_of(row):
            raise ValueError(f"line {line} of {file} is no row of a record: {wrong}")
        rows.append({**row, "line": line})
    if not rows or rows[0]["kind"] != "run":
        raise ValueError(f"{file} does not begin with a row of kind 'run'; it was not written by inspect.record")
    if unfinished:
        warnings.warn(f"{file} ends within line {len(lines) + 1}, which is left out", stacklevel=2)
    return rows


def fault_of(row: Any) -> str:
    """Why ``row`` is no row of a record; empty if it is one."""
    if not isinstance(row, dict) or not is_count(row.get("step")) or not is_text(row.get("kind")):
        return "it needs a step and a kind"
    fields = FIELDS.get(row["kind"])
    if fields is None:
        return f"kind must be one of {', '.join(FIELDS)}, got {row['kind']!r:.80}"
    for name, fits in fields.items():
        if name not in row:
            return f"a row of kind {row['kind']!r} needs {name!r}"
        if not fits(row[name]):
            return f"{name!r} of a row of kind {row['kind']!r} cannot be {row[name]!r:.80}"
    if row["kind"] == "run" and not _are_roles(row.get("roles", {})):  # which records of November 2026 have not
        return f"'roles' of a row of kind 'run' cannot be {row['roles']!r:.80}"
    if row["kind"] == "operand":
        element, found = element_of(row["cast"]), len(row["codes"])
        if element is not None and found > 1 << element.bits:
            return f"{element} has {1 << element.bits} codes, and 'codes' has {found}"
    return ""
