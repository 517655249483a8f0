"""A progress bar on terminals, and nothing elsewhere."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any], what: str, unit: str, shown: bool) -> Any:
    """``items`` with a bar; where standard error is no terminal, or ``shown`` is False, there is none."""
    return tqdm(items, desc=what, unit=unit, disable=None if shown else True, dynamic_ncols=True)
