"""Where parts lie that share one buffer of bytes: scratch of a launch, and what launches and operators keep."""

from collections.abc import Iterable

SLICE = 256
"""Bytes. Parts begin at multiples of this, where kernels read and write whole lines of the cache."""


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The byte at which each of parts of ``sizes`` bytes begins, and the size of the buffer."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(-(-end // SLICE) * SLICE)
        end = starts[-1] + size
    return starts, end
