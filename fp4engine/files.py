"""Files that are whole or as they were before."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk.

    A folder that one may write into and not read cannot be opened: the system writes its names when it writes others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside `path`, sync, rename: whoever reads `path` finds the old content or the new, at any moment.

    Of a link the file that it names is replaced. What is no file, such as a pipe, is written to.

    Raises:
        OSError: that names `path`.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)  # what did not fit should not fill the disk
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync(path.parent)
