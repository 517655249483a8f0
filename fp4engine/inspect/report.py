"""One HTML page about recorded runs, without scripts and without anything to load.

Every number on the page sits in an element that names the line of ``record.jsonl`` that it was read from
(``data-line``), the field of that row (``data-field``) and the value there (``data-value``); pointing at it shows them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4engine.arguments import shown
from fp4engine.inspect.reading import element_of, fault_of
from fp4engine.reference.rounding import decode

Row = dict[str, Any]

OPERANDS = (
    ("fprop", "input", "rowwise"),
    ("fprop", "weight", "rowwise"),
    ("dgrad", "grad_output", "rowwise"),
    ("dgrad", "weight", "columnwise"),
    ("wgrad", "grad_output", "columnwise"),
    ("wgrad", "input", "columnwise"),
)
GEMMS = ("fprop", "dgrad", "wgrad")
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#009e73", "#e69f00", "#cc79a7")
"""One per operand, told apart by colour-blind readers too (Okabe and Ito)."""

OPERAND_CHARTS = (
    ("sqnr_db", "Signal over rounding error, dB"),
    ("rounded_to_zero", "Share of elements rounded to zero"),
    ("saturated", "Share of elements saturated"),
    ("scale_underflow", "Share of blocks whose scale underflows to zero"),
    ("scale_overflow", "Share of blocks whose scale overflows its bound"),
    ("scale_spread_octaves", "Spread of block scales, octaves"),
    ("amax", "Largest magnitude, on a logarithmic scale"),
)
LOGARITHMIC = ("amax",)
"""Fields on a logarithmic axis: a gradient's value may be a millionth of an input's."""

WIDTH, HEIGHT, LEFT, BOTTOM = 340, 180, 70, 22
"""Of a chart, in pixels: its size, and what numbers take at its left and below it."""


@dataclass(frozen=True)
class _Point:
    step: int
    value: float
    line: str


@dataclass(frozen=True)
class _Record:
    """What a page shows of one record.

    Attributes:
        name: of the record among others that the page shows; empty for the only one.
        runs, found, refusals: rows about the run, about layers, and about layers that could not be watched; without
            steps that the run took again later.
        by_layer: the rows of ``found`` by the name of their layer.
        left_out: the rows that are left out, each with the row of the region that took its step again.
    """

    name: str
    runs: list[Row]
    found: list[Row]
    by_layer: dict[str, list[Row]]
    refusals: list[Row]
    left_out: list[tuple[Row, Row]]

    def of_last_step(self, layer: str) -> list[Row]:
        """The rows of one layer at the last recorded step of all."""
        last = max(map(_step, self.found))
        return [row for row in self.by_layer.get(layer, []) if row["step"] == last]


def html(rows: Sequence[Row] | Mapping[str, Sequence[Row]], title: str) -> str:
    """The page about ``rows``, which :func:`fp4engine.inspect.read` returned; of several records, side by side.

    Where a run was resumed, steps that it has taken again are shown as they were the last time, and what it recorded
    before, from the step of the resumption on, is left out.

    Args:
        rows: of one record, or of several by their names.

    Raises:
        ValueError: ``rows`` are something else, there is no recorded step in them, or no row about the run; ``title``
            is no string.
    """
    if not isinstance(title, str):
        raise ValueError(f"title must be a string, got {shown(title)}")
    records = [_record(name, of_one) for name, of_one in (rows.items() if isinstance(rows, Mapping) else [("", rows)])]
    if not records:
        raise ValueError("rows must be those of a record, or of several by their names, got none")
    layers: dict[str, list[dict[str, Any] | None]] = {}
    for name in dict.fromkeys(name for record in records for name in record.by_layer):
        of_records = [record.by_layer.get(name, []) for record in records]
        together = [row for rows in of_records for row in rows]
        layers[name] = [_layer(rows, together) if rows else None for rows in of_records]
    return rendered(
        Path(__file__).with_name("report.html.j2"),
        **{"title": title, "records": records, "layers": layers},
        **{"operands": OPERANDS, "gemms": GEMMS, "colors": COLORS, "product_colors": COLORS[::2]},
        **{"latest": _latest, "shade": _shade, "by_value": _by_value, "by_code": _by_code},
        **{"width": WIDTH, "height": HEIGHT, "left": LEFT},
    )


def rendered(template: Path, **values: Any) -> str:
    """The page that a template of Jinja's makes of ``values``, by name; what is no markup is escaped."""
    import jinja2  # here, since what is recorded without a page does not need it

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)


def _record(name: Any, rows: Any) -> _Record:
    """Check the rows of one record, and sort them.

    Raises:
        ValueError: as :func:`html`.
    """
    if isinstance(rows, str | os.PathLike):
        raise ValueError(f"rows must be what fp4engine.inspect.read({shown(rows)}) returns, got the path itself")
    if not isinstance(rows, Sequence):
        raise ValueError(f"rows must be a list, as fp4engine.inspect.read returns it, got {shown(rows)}")
    if not isinstance(name, str):
        raise ValueError(f"the names of records must be strings, got {shown(name)}")
    for row in rows:
        if wrong := fault_of(row) or ("" if "line" in row else "it needs 'line'"):
            raise ValueError(f"rows must be what fp4engine.inspect.read returns, got {shown(row)} among them: {wrong}")
    rows = [{**row, "line": f"{name}:{row['line']}" if name else str(row["line"])} for row in rows]
    runs = [row for row in rows if row["kind"] == "run"]
    if not runs:
        raise ValueError("rows must have the row of kind 'run' that a record begins with; leave it among them")
    kept: list[Row] = []
    left_out: list[tuple[Row, Row]] = []
    for row in rows:
        if row["kind"] == "run":
            left_out += [(other, row) for other in kept if other["step"] >= row["step"]]
            kept = [other for other in kept if other["step"] < row["step"]]
        else:
            kept.append(row)
    found = [row for row in kept if row["kind"] != "refusal"]
    refusals = [row for row in kept if row["kind"] == "refusal"]
    if not found and refusals:
        of_last, why = refusals[-1]["layer"], refusals[-1]["reason"]
        raise ValueError(f"the record has no figures of a layer; of {of_last!r} it says: {why}")
    if not found:
        raise ValueError("the record has no recorded step since its last row of kind 'run', which describes the run")
    by_layer: defaultdict[str, list[Row]] = defaultdict(list)
    for row in found:
        by_layer[row["layer"]].append(row)
    return _Record(name, runs, found, dict(by_layer), refusals, left_out)


def _step(row: Row) -> int:
    return row["step"]


def _of_place(rows: Sequence[Row], kind: str, place: tuple[str, ...]) -> list[Row]:
    names = ("gemm", "role", "side")[: len(place)]
    return [r for r in rows if r["kind"] == kind and tuple(r.get(name) for name in names) == place]


def _latest(rows: Sequence[Row], kind: str, place: tuple[str, ...]) -> Row | None:
    """The row of a place; the later one of two."""
    found = _of_place(rows, kind, place)
    return found[-1] if found else None


def _shade(decibels: float | None, underflow: float | None) -> str:
    """The colour of a cell: 24 dB is white, and 0 dB and below the darkest, like blocks that are all zeros."""
    share = 0.0 if decibels is None else min(max((24 - decibels) / 24, 0), 1)
    share = max(share, underflow or 0.0)
    return f"rgb({255 - round(20 * share)},{255 - round(130 * share)},{255 - round(190 * share)})"


def _layer(rows: Sequence[Row], together: Sequence[Row]) -> dict[str, Any]:
    """What is shown of one layer's rows; ``together`` are its rows in all records, which scale the axes."""

    def charts(caption: str, field: str, kind: str, places: Sequence[tuple[str, ...]]) -> list[_Chart]:
        series = _series(rows, kind, places, field)
        scale = [point for line in _series(together, kind, places, field) for point in line]
        return [_Chart(caption, field, series, scale)] if any(series) else []

    drawn = [charts(caption, field, "operand", OPERANDS) for field, caption in OPERAND_CHARTS]
    products = [(gemm,) for gemm in GEMMS]
    drawn.insert(1, charts("Signal over error of the products, dB", "snr_db", "gemm", products))
    drawn.append(charts("Squared bias of stochastic rounding, share of the signal", "bias", "rounding", OPERANDS))
    last = max(map(_step, rows))
    now = [row for row in rows if row["step"] == last]
    latest = zip([_latest(now, "operand", operand) for operand in OPERANDS], COLORS, strict=True)
    operands = [(row, color) for row, color in latest if row is not None]
    return {
        "charts": [chart for found in drawn for chart in found],
        "shown": operands,
        "worst": [row for row, _ in operands if row["worst"] and row["worst"][0][2] is not None],
        "channels": [r for r in now if r["kind"] == "tensor" and r["channels"] and r["channels"][0][1] is not None],
    }


def _series(rows: Sequence[Row], kind: str, places: Sequence[tuple[str, ...]], field: str) -> list[list[_Point]]:
    """Points of each place, by step."""
    found = [_of_place(rows, kind, place) for place in places]
    return [[_Point(r["step"], r[field], r["line"]) for r in of if r.get(field) is not None] for of in found]


class _Chart:
    """Lines over steps, of the six operands or of the three products, on the axes of all points of ``scale``.

    Attributes:
        lines: points, colour, and whether the line is dashed.
        low, high: the points of the smallest and of the largest value.
        first, last: points of the first and of the last step.
    """

    def __init__(self, caption: str, field: str, series: Sequence[list[_Point]], scale: Sequence[_Point]) -> None:
        self.caption, self.field, self.is_of_products = caption, field, len(series) == len(GEMMS)
        if self.is_of_products:
            self.lines = [(line, color, False) for line, color in zip(series, COLORS[::2], strict=True)]
        else:
            dashed = [side == "columnwise" for _, _, side in OPERANDS]
            self.lines = list(zip(series, COLORS, dashed, strict=True))
        self.low, self.high = (end(scale, key=lambda point: point.value) for end in (min, max))
        self.first, self.last = (end(scale, key=lambda point: point.step) for end in (min, max))
        self._least = min((point.value for point in scale if point.value > 0), default=1.0)

    def x(self, step: int) -> float:
        """The place of a step, in pixels from the left."""
        return LEFT + (WIDTH - LEFT - 10) * ((step - self.first.step) / (self.last.step - self.first.step or 1))

    def y(self, value: float) -> float:
        """The place of a value, in pixels from the top."""
        top, bottom = self._height(self.high.value), self._height(self.low.value)
        part = (top - self._height(value)) / (top - bottom) if top > bottom else 0.5
        return 8 + (HEIGHT - BOTTOM - 16) * part

    def _height(self, value: float) -> float:
        return math.log10(max(value, self._least)) if self.field in LOGARITHMIC else value


def _by_value(cast: str, codes: Sequence[int]) -> list[tuple[int, int]]:
    """``(code, times)`` from the most negative value to the most positive."""
    element = element_of(cast)
    assert element is not None, "reading refuses such a row"
    values = decode(torch.arange(len(codes), dtype=torch.uint8), element)
    order = sorted(range(len(codes)), key=lambda code: (float(values[code]), not values[code].signbit()))
    return [(code, codes[code]) for code in order]


def _by_code(scale_codes: dict[str, int]) -> list[tuple[int, int]]:
    """``(code, times)`` in the order of the codes, with those that do not occur in between."""
    found = {int(code): times for code, times in scale_codes.items()}
    return [(code, found.get(code, 0)) for code in range(min(found), max(found) + 1)] if found else []
