"""A disk that is full, for tests of what is written."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(path: Path, room: int) -> Generator[None]:
    """A region in which no file can grow beyond the size of ``path`` and ``room`` bytes more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
