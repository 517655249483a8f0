"""Files that are whole or not there, in a folder that one process at a time writes to."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt.settings import InputError

LOCK = "lock"


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside `path`, sync, rename: whoever reads `path` finds the old content or the new, at any moment."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
    except OSError:
        partial.unlink(missing_ok=True)  # what did not fit should not fill the disk
        raise
    os.replace(partial, path)
    sync(path.parent)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Create `folder` if need be, and keep other processes out of it until the end of the region.

    The operating system holds the lock, on the file `lock`, and drops it when the process ends, however it ends.

    Raises:
        InputError: another process is in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise InputError(
                f"{folder} is in use by another process (number {owner}); wait until it ends, or give another --name"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
