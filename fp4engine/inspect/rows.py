"""From figures on the device to lines of ``record.jsonl``: copied to the host together, and merged over ranks."""

import math
from collections.abc import Iterator
from itertools import accumulate, compress
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine.formats import CastSpec, Outer
from fp4engine.inspect import statistics
from fp4engine.inspect.statistics import Figures, Size

CHANNELS = 4
"""How many of a tensor's largest channels a row names."""


class Part(NamedTuple):
    """What one rank has of a row.

    Attributes:
        place: row and column of the whole operand at which this rank's part begins.
        elements: how many elements of a tensor this rank has.
        counts: False where another rank has the same part, and counts it.
    """

    place: tuple[int, int] = (0, 0)
    elements: int = 0
    counts: bool = True


class Row(NamedTuple):
    """One row of a record whose numbers are still on the device.

    Attributes:
        fields: what is known of the row on the host.
        figures, number: the row's numbers are row ``number`` of ``figures``.
        spec: the cast of an operand.
        part: what this rank has of it.
    """

    fields: dict[str, Any]
    figures: Figures
    number: int = 0
    spec: CastSpec | None = None
    part: Part = Part()


class _Numbers(NamedTuple):
    """A row's numbers on the host, merged over all ranks.

    Attributes:
        sums, maxima: as in :class:`fp4engine.inspect.statistics.Figures`.
        worst: blocks ``(row, col, error, signal, rank)`` of all ranks.
        elements: how many elements of a tensor were counted.
    """

    sums: list[float]
    maxima: Tensor
    worst: list[tuple[float, ...]]
    elements: int


def described(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """The rows as they are written.

    The call merges ranks and starts one copy of all numbers to the host. Iterating over the result waits for that copy
    and makes the rows.
    """
    groups = list({id(row.figures): row.figures for row in rows}.values())
    parts = [[row.part for row in rows]]
    if has_process_group():
        parts = _require_equal([[row.fields for row in rows], [figures.sizes for figures in groups]], parts[0])
    if not rows:
        return iter(())
    numbers, maxima, sizes = Figures.joined(groups)
    if has_process_group():
        if maxima is not None:
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, numbers)
        numbers = torch.cat(everyone)
    counts = [len(figures.sizes) for figures in groups]
    begins = {id(figures): end - count for figures, count, end in zip(groups, counts, accumulate(counts), strict=True)}
    places = [begins[id(row.figures)] + row.number for row in rows]
    copied = _Copy(numbers if maxima is None else torch.cat([numbers, maxima]))
    return _described(rows, places, parts, sizes, copied)


class _Copy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=tensor.is_cuda)
        self._arrived = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def _described(
    rows: list[Row], places: list[int], parts: list[list[Part]], sizes: tuple[Size, ...], copied: _Copy
) -> Iterator[dict[str, Any]]:
    """The rows as they are written.

    Args:
        places: index of each row in ``sizes``.
        parts: ``[rank][row]``.
        copied: the numbers of all ranks, one rank after another, and then the maxima.
    """
    lengths = [size.sums + 4 * size.ranked for size in sizes]
    of_ranks, *maxima = copied.wait().split([len(parts) * sum(lengths), *(size.maxima for size in sizes)])
    numbers = of_ranks.view(len(parts), -1).split(lengths, 1)
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        mine, theirs = [of_rank[index] for of_rank in parts], numbers[place].tolist()
        yield {**row.fields, **_describe(row, _merged(row, mine, theirs, sizes[place].sums, maxima[place]))}


def _merged(row: Row, parts: list[Part], of_ranks: list[list[float]], count: int, maxima: Tensor) -> _Numbers:
    """The numbers of a row, added over the ranks that count.

    Args:
        parts: of the row, by rank.
        of_ranks: by rank, ``count`` sums and then the worst blocks.
        maxima: of all ranks together.
    """
    ranks = [rank for rank, part in enumerate(parts) if part.counts]
    if row.fields.get("role") == "weight" and len(parts) > 1:
        ranks = _once([part.place for part in parts], of_ranks)
    sums = of_ranks[ranks[0]][:count]
    for rank in ranks[1:]:
        sums = list(map(add, sums, of_ranks[rank]))
    worst: list[tuple[float, ...]] = []
    for rank in ranks:
        (first, left), blocks = parts[rank].place, of_ranks[rank][count:]
        for at in range(0, len(blocks), 4):
            y, x, error, signal = blocks[at : at + 4]
            worst.append((first + y, left + x, error, signal, rank))
    return _Numbers(sums, maxima, worst, sum(parts[rank].elements for rank in ranks))


def _once(places: list[tuple[int, int]], of_ranks: list[list[float]]) -> list[int]:
    """The ranks whose figures count: of ranks with the same part of a weight and the same figures, only the first."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        holders.setdefault(place, []).append(rank)
    same = {place: all(of_ranks[rank] == of_ranks[ranks[0]] for rank in ranks[1:]) for place, ranks in holders.items()}
    return sorted(rank for place, ranks in holders.items() for rank in (ranks[:1] if same[place] else ranks))


def _require_equal(mine: Any, parts: list[Any]) -> list[list[Any]]:
    """The parts of every rank, after checking that all ranks have recorded the same rows."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, parts))
    if any(theirs != mine for theirs, _ in everyone):
        raise RuntimeError(
            "the ranks recorded different layers or shapes in one step, which cannot be merged; record layers that "
            "every rank computes in the same order"
        )
    return [theirs for _, theirs in everyone]


def _describe(row: Row, numbers: _Numbers) -> dict[str, Any]:
    """The fields of a row that are numbers."""
    kind, sums = row.fields["kind"], numbers.sums
    if kind == "tensor":
        return _tensor_fields(dict(zip(statistics.TENSOR_SUMS, sums, strict=True)), numbers.elements, numbers.maxima)
    if kind == "gemm":
        product = dict(zip(statistics.PRODUCT_SUMS, sums, strict=True))
        error = _ratio(product["error"], product["signal"])
        relative = None if error is None else math.sqrt(error)
        return {"snr_db": _decibels(product["signal"], product["error"]), "relative_error": relative}
    if kind == "rounding":
        rounding = dict(zip(statistics.ROUNDING_SUMS, sums, strict=True))
        draws = row.fields["draws"]
        noise = rounding["spread"] * (draws - 1) + rounding["mean_error"]
        bias = rounding["mean_error"] - rounding["spread"]
        return {"bias": _ratio(bias, rounding["signal"]), "noise": _ratio(noise, rounding["signal"])}
    assert row.spec is not None
    return _operand_fields(row.spec, numbers)


def _tensor_fields(sums: dict[str, float], elements: int, channels: Tensor) -> dict[str, Any]:
    squares = _ratio(sums["squares"], elements)
    found = channels.sort(descending=True, stable=True)
    values, places = (largest[:CHANNELS].tolist() for largest in found)
    median = float(found.values[len(channels) // 2]) if values else 0.0
    return {
        "amax": _finite(values[0]) if values else 0.0,
        "rms": None if squares is None else math.sqrt(squares),
        "nonfinite": int(sums["nonfinite"]),
        "channels": [[place, _ratio(value, median)] for place, value in zip(places, values, strict=True)],
    }


def _operand_fields(spec: CastSpec, numbers: _Numbers) -> dict[str, Any]:
    names, sums = statistics.OPERAND_SUMS, numbers.sums
    total = dict(zip(names, sums, strict=False))
    after_codes = len(names) + (1 << spec.element.bits)
    codes, scale_codes = sums[len(names) : after_codes], sums[after_codes:]
    occurring, times = list(compress(range(256), scale_codes)), list(filter(None, scale_codes))
    if total["nonfinite"]:  # values beside a NaN or an Inf decode to no number, so what was rounded to zero is unknown
        total["rounded_to_zero"] = math.nan
    amax, largest, minus_smallest = numbers.maxima.tolist()
    if total["nonfinite"] and spec.outer is not Outer.NONE:  # an amax that is not finite counts as 0 in the maximum
        amax = math.nan
    if scale_codes:
        of_scales, (largest, minus_smallest) = statistics.scale_spread_of_bytes(occurring, times, spec.scale)
        total |= zip(names[-3:], of_scales, strict=True)
    count = total["scales"]
    mean = total["log2_scale"] / count if count else 0.0
    variance = max(total["log2_scale_squared"] / count - mean * mean, 0.0) if count else None
    worst = sorted(numbers.worst, key=itemgetter(2), reverse=True)[: statistics.RANKED]
    return {
        "amax": _finite(amax),
        "elements": int(total["elements"]),
        "nonfinite": int(total["nonfinite"]),
        "sqnr_db": _decibels(total["signal"], total["error"]),
        **{name: _ratio(total[name], total["elements"]) for name in ("zeros", "rounded_to_zero", "saturated")},
        "blocks": int(total["blocks"]),
        **{name: _ratio(total[name], total["blocks"]) for name in ("scale_underflow", "scale_overflow")},
        "scale_spread_octaves": None if variance is None else math.sqrt(variance),
        "scale_range_octaves": _finite(largest + minus_smallest) if count else None,
        "codes": list(map(int, codes)),
        "scale_codes": dict(zip(occurring, map(int, times), strict=True)),
        "worst": [
            [int(row), int(col), _ratio(error, total["error"]), _decibels(signal, error), rank]
            for row, col, error, signal, rank in worst
            if error > 0
        ],
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole and math.isfinite(part) and math.isfinite(whole) else None


def _decibels(signal: float, error: float) -> float | None:
    """``10 log10(signal / error)``; None where there is no error, or no finite number."""
    ratio = _ratio(signal, error)
    return 10 * math.log10(ratio) if ratio else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def has_process_group() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()
