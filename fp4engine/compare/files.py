"""A folder that one process at a time writes to, and what is read there."""

import fcntl
import json
import os
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = "lock"


class InputError(ValueError):
    """Something the user gave cannot be used; its message is one line that says what and what to do."""


INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
"""Folders of the standard library and of installed packages."""


def place_of(error: BaseException) -> str:
    """Where in the user's own code ``error`` was raised, as `` (model.py, line 3)``; empty if nowhere."""
    libraries = (*INSTALLED, Path(__file__).resolve().parents[1])
    lines = [
        f" ({frame.filename}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if (file := Path(frame.filename)).is_file() and not any(map(file.resolve().is_relative_to, libraries))
    ]
    return lines[-1] if lines else ""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line, without a last line that was cut off; none if there is no file.

    Raises:
        InputError: a whole line is no JSON object.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is no object")
        return rows
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); it has to hold one JSON object per line") from error


@contextmanager
def alone_in(folder: Path, otherwise: str) -> Generator[None]:
    """Create `folder` if need be, and keep other processes out of it until the end of the region.

    The operating system holds the lock, on the file `lock`, and drops it when the process ends, however it ends.

    Args:
        otherwise: what else the user can do, such as ``"give another --out"``.

    Raises:
        InputError: another process is in the folder, or it cannot be made, written to or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}); {otherwise}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise InputError(
                f"{folder} is in use by another process (number {owner}); wait until it ends, or {otherwise}"
            ) from error
        except OSError as error:  # of file systems without locks, such as Lustre where it is mounted so
            raise InputError(f"{folder} cannot be locked ({error.strerror}); {otherwise}") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
