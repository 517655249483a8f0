"""What commands need beyond a bare install."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Generator[None]:
    """Region that imports what an extra of this package's brings.

    Raises:
        ValueError: some of that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"this command needs {error.name}: pip install 'fp4engine[{extra}]'") from error
