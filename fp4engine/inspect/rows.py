"""From figures on the device to what a line of ``record.jsonl`` says: brought over at once, merged over ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine.formats import CastSpec, ElementFormat
from fp4engine.inspect import statistics
from fp4engine.inspect.statistics import Figures

CHANNELS = 4
"""How many of a tensor's largest channels a row names."""


@dataclass(frozen=True)
class Row:
    """What is known of a row on the host, and its numbers, which are still on the device."""

    fields: dict[str, Any]
    figures: Figures
    spec: CastSpec | None = None
    place: tuple[int, int] = (0, 0)
    """Row and column of the whole operand at which this rank's part begins."""
    elements: int = 0
    """How many of a tensor this rank has counted."""


class _Numbers(NamedTuple):
    """A row's figures on the host, those of all ranks together.

    Attributes:
        sums, maxima: FP64, as in :class:`fp4engine.inspect.statistics.Figures`.
        ranked: the worst blocks of each rank.
        elements: how many of a tensor were counted.
    """

    sums: Tensor
    maxima: Tensor
    ranked: dict[int, list[list[float]]]
    elements: int


class _Channels(NamedTuple):
    """Of a tensor's channels the median of their maxima, and the largest with their places, in falling order."""

    median: float
    largest: list[float]
    places: list[int]


def described(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """The rows as they are written: all numbers are brought to the host at once, merged over ranks."""
    parts_of = [[(row.place, row.elements) for row in rows]]
    if is_distributed():
        fields = [(row.fields, [part.numel() for part in row.figures]) for row in rows]
        parts_of = _require_equal(fields, parts_of[0])
    if not rows:
        return
    sums = torch.cat([row.figures.sums for row in rows])
    maxima = torch.cat([row.figures.maxima for row in rows])
    ranked = torch.cat([row.figures.ranked for row in rows])
    if is_distributed():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    host = (_of_all_ranks(sums).cpu(), maxima.cpu(), _of_all_ranks(ranked).cpu())
    sizes = [[row.figures[kind].shape[0] for row in rows] for kind in range(3)]
    parts, largest, blocks = (part.split(size, dim) for part, size, dim in zip(host, sizes, (1, 0, 1), strict=True))
    numbers: list[_Numbers] = []
    for index, row in enumerate(rows):
        ranks = list(range(len(host[0])))
        if row.fields.get("role") == "weight" and len(ranks) > 1:
            figures = torch.cat([parts[index], blocks[index].flatten(1)], 1)
            ranks = _once([mine[index][0] for mine in parts_of], figures)
        elements = sum(parts_of[rank][index][1] for rank in ranks)
        added = parts[index][ranks].sum(0) if len(ranks) > 1 else parts[index][ranks[0]]
        worst = {rank: blocks[index][rank].tolist() if sizes[2][index] else [] for rank in ranks}
        numbers.append(_Numbers(added, largest[index], worst, elements))
    spreads, channels = _spreads(rows, numbers), _channels(rows, numbers)
    for index, row in enumerate(rows):
        yield {**row.fields, **_describe(row, numbers[index], spreads.get(index), channels.get(index))}


def _spreads(rows: list[Row], numbers: list[_Numbers]) -> dict[int, tuple[list[float], list[float]]]:
    """What follows from histograms of one-byte scales, by the index of the row: of many rows at once."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    by_scale: dict[ElementFormat, list[int]] = {}
    for index, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        if row.spec is not None and row.fields["kind"] == "operand" and len(number.sums) > _scale_codes(row.spec):
            by_scale.setdefault(row.spec.scale, []).append(index)
    for scale, indices in by_scale.items():
        times = torch.stack([numbers[index].sums[-256:] for index in indices])
        sums, maxima = statistics.byte_scale_spreads(times, scale)
        found |= zip(indices, zip(sums.tolist(), maxima.tolist(), strict=True), strict=True)
    return found


def _scale_codes(spec: CastSpec) -> int:
    """Where the histogram of an operand's one-byte scales begins, if there is one."""
    return len(statistics.OPERAND_SUMS) + (1 << spec.element.bits)


def _channels(rows: list[Row], numbers: list[_Numbers]) -> dict[int, _Channels]:
    """The maxima of tensors' channels, by the index of the row: of all tensors with as many channels at once."""
    found: dict[int, _Channels] = {}
    by_count: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.fields["kind"] == "tensor" and numbers[index].maxima.numel():
            by_count.setdefault(numbers[index].maxima.numel(), []).append(index)
    for count, indices in by_count.items():
        maxima = torch.stack([numbers[index].maxima for index in indices])
        values, places = maxima.topk(min(CHANNELS, count), dim=1)
        medians = maxima.median(1).values
        for index, *row in zip(indices, medians.tolist(), values.tolist(), places.tolist(), strict=True):
            found[index] = _Channels(*row)
    return found


def _once(places: list[tuple[int, int]], figures: Tensor) -> list[int]:
    """The ranks whose figures count: of those that hold the same part of a weight with the same figures, the first."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        holders.setdefault(place, []).append(rank)
    same = {place: bool((figures[ranks] == figures[ranks[:1]]).all()) for place, ranks in holders.items()}
    return sorted(rank for place, ranks in holders.items() for rank in (ranks[:1] if same[place] else ranks))


def _of_all_ranks(mine: Tensor) -> Tensor:
    """[ranks, ...]: what every rank has."""
    if not is_distributed():
        return mine[None]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)


def _require_equal(mine: Any, parts: list[Any]) -> list[list[Any]]:
    """The parts of every rank, once it is known that all of them have recorded the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, parts))
    if any(theirs != mine for theirs, _ in everyone):
        raise RuntimeError(
            "the ranks recorded different layers or shapes in one step, which cannot be merged; record layers that "
            "every rank computes in the same order"
        )
    return [theirs for _, theirs in everyone]


def _describe(
    row: Row, numbers: _Numbers, spread: tuple[list[float], list[float]] | None, channels: _Channels | None
) -> dict[str, Any]:
    """The fields of a row that are numbers."""
    kind, sums = row.fields["kind"], numbers.sums.tolist()
    if kind == "tensor":
        return _tensor_fields(dict(zip(statistics.TENSOR_SUMS, sums, strict=True)), numbers.elements, channels)
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
    return _operand_fields(row.spec, sums, numbers.maxima.tolist(), numbers.ranked, spread)


def _tensor_fields(sums: dict[str, float], elements: int, channels: _Channels | None) -> dict[str, Any]:
    squares = _ratio(sums["squares"], elements)
    median, values, places = channels or _Channels(0.0, [], [])
    return {
        "amax": _finite(values[0]) if values else 0.0,
        "rms": None if squares is None else math.sqrt(squares),
        "nonfinite": int(sums["nonfinite"]),
        "channels": [[place, _ratio(value, median)] for place, value in zip(places, values, strict=True)],
    }


def _operand_fields(
    spec: CastSpec,
    sums: list[float],
    maxima: list[float],
    ranked: dict[int, list[list[float]]],
    spread: tuple[list[float], list[float]] | None,
) -> dict[str, Any]:
    """Numbers of an operand; ``ranked`` has the worst blocks by rank, ``spread`` what follows from ``scale_codes``."""
    names = statistics.OPERAND_SUMS
    total = dict(zip(names, sums, strict=False))
    codes, scale_codes = sums[len(names) : _scale_codes(spec)], sums[_scale_codes(spec) :]
    amax, largest, minus_smallest = maxima
    if spread is not None:
        of_scales, (largest, minus_smallest) = spread
        total |= zip(names[-3:], of_scales, strict=True)
    count = total["scales"]
    mean = total["log2_scale"] / count if count else 0.0
    variance = max(total["log2_scale_squared"] / count - mean * mean, 0.0) if count else None
    found = [(*block, rank) for rank, blocks in ranked.items() for block in blocks]
    worst = sorted(found, key=itemgetter(2), reverse=True)[: statistics.RANKED]
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
        "codes": [int(times) for times in codes],
        "scale_codes": {str(code): int(times) for code, times in enumerate(scale_codes) if times},
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


def is_distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()
