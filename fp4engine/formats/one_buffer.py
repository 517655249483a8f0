"""Where parts lie that share one buffer of bytes: scratch of a launch, and what launches and operators keep."""

from collections.abc import Iterable, Sequence

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


def offsets_by_lifetime(parts: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """As :func:`offsets`, of parts that are in use for some time only: those that are not in use together may overlap.

    Args:
        parts: ``(bytes, first, last)`` of each, both times included.
    """
    starts: dict[int, int] = {}
    for index in sorted(range(len(parts)), key=lambda i: -parts[i][0]):  # large ones first, each as low as it fits
        size, first, last = parts[index]
        start = 0
        for other in sorted(starts, key=lambda i: starts[i]):
            other_size, other_first, other_last = parts[other]
            if first <= other_last and other_first <= last and starts[other] < start + size:
                start = max(start, -(-(starts[other] + other_size) // SLICE) * SLICE)
        starts[index] = start
    end = max((starts[i] + size for i, (size, _, _) in enumerate(parts)), default=0)
    return [starts[i] for i in range(len(parts))], end
