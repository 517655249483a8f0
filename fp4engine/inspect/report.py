"""One HTML page about recorded runs, without scripts and without anything to load.

Every number on the page sits in an element that names the line of ``record.jsonl`` that it was read from
(``data-line``), the field of that row (``data-field``) and the value there (``data-value``); pointing at it shows them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; font-weight: normal; }
th:first-child, td:first-child { text-align: left; } thead th { color: #555; }
.wide { overflow-x: auto; }
details { border: 1px solid #ddd; border-radius: 6px; margin: .5rem 0; padding: .3rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: .6rem 0; max-width: 22rem; }
figcaption { font-size: .85rem; color: #444; } svg text { font: 11px system-ui, sans-serif; fill: #555; }
.legend { font-size: .85rem; } .legend > span { margin-right: 1rem; white-space: nowrap; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem; }
.note { color: #7a3b00; } td .note { font-size: .75rem; }
.beside { display: flex; gap: 2rem; } .beside > section { flex: 1; min-width: 0; }
"""


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

    @property
    def last(self) -> int:
        """The last recorded step."""
        return max(map(_step, self.found))


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
    layers = list(dict.fromkeys(name for record in records for name in record.by_layer))
    steps = [_number(max(record.found, key=_step), "step") for record in records]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *map(_about, records),
        f"<h2>All layers at step {' and '.join(steps)}: signal over error, dB</h2>",
        "<p>Operands on the left: what rounding adds to a tensor. Products on the right: what it adds to the result of "
        "a matrix product. A cell is darker the less signal is left, and the more blocks of an operand have a scale "
        "that underflows: all of their elements are zero, which the signal of the other blocks hides.</p>",
        _overview(layers, records),
        *map(_refusals, records),
        "<h2>Layers</h2>",
        "<p>A click on a name opens the layer. A line is an operand: solid and thick where it is the tensor as it "
        "stands (rowwise), dashed and thin where it is its transpose (columnwise).</p>",
        _legend([" ".join(operand) for operand in OPERANDS], COLORS),
        *(_layer(name, records) for name in layers),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


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
    if not found:
        raise ValueError("the record has no recorded step since its last row of kind 'run', which describes the run")
    by_layer: defaultdict[str, list[Row]] = defaultdict(list)
    for row in found:
        by_layer[row["layer"]].append(row)
    return _Record(name, runs, found, dict(by_layer), [row for row in kept if row["kind"] == "refusal"], left_out)


def _about(record: _Record) -> str:
    runs, found = record.runs, record.found
    first, last = min(found, key=_step), max(found, key=_step)
    ranks = "rank" if runs[0]["world_size"] == 1 else "ranks"
    sentences = [
        f"{escape(record.name)}: recorded" if record.name else "Recorded",
        f"steps {_number(first, 'step')} to {_number(last, 'step')}, every {_number(runs[0], 'every')} steps, "
        f"on {_number(runs[0], 'world_size')} {ranks}, by fp4engine {escape(str(runs[0].get('fp4engine')))} with torch "
        f"{escape(str(runs[0].get('torch')))}.",
        "Every number names the line of record.jsonl that it was read from: point at it.",
    ]
    if len(runs) > 1:
        sentences.append("The file holds several regions, one after another.")
    if record.left_out:
        rows = [row for row, _ in record.left_out]
        again = min((run for _, run in record.left_out), key=_step)
        sentences.append(
            f"The run began again at step {_number(again, 'step')}; what it had recorded of steps "
            f"{_number(min(rows, key=_step), 'step')} to {_number(max(rows, key=_step), 'step')} before is left out."
        )
    return f"<p>{' '.join(sentences)}</p>"


def _step(row: Row) -> int:
    return row["step"]


def _number(row: Row, field: str) -> str:
    return f"<span {_traced(row['line'], field, row[field])}>{row[field]}</span>"


def _overview(layers: Sequence[str], records: Sequence[_Record]) -> str:
    head = ["<th>layer</th>", *(["<th>run</th>"] if len(records) > 1 else [])]
    head += [f"<th>{gemm}<br>{role}<br>{side}</th>" for gemm, role, side in OPERANDS]
    head += [f"<th>{gemm}<br>product</th>" for gemm in GEMMS]
    body: list[str] = []
    for name in layers:
        for record in records:
            now = [row for row in record.by_layer.get(name, []) if row["step"] == record.last]
            cells = [f"<td>{escape(name)}</td>", *([f"<td>{escape(record.name)}</td>"] if len(records) > 1 else [])]
            cells += [_cell(_latest(now, "operand", operand), "sqnr_db") for operand in OPERANDS]
            cells += [_cell(_latest(now, "gemm", (gemm,)), "snr_db") for gemm in GEMMS]
            body.append(f"<tr>{''.join(cells)}</tr>")
    content = f"<thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def _latest(rows: Sequence[Row], kind: str, place: tuple[str, ...]) -> Row | None:
    """The row of a place; the later one of two."""
    names = ("gemm", "role", "side")[: len(place)]
    found = (r for r in reversed(rows) if r["kind"] == kind and tuple(r.get(name) for name in names) == place)
    return next(found, None)


def _cell(row: Row | None, field: str) -> str:
    value, underflow = (None, None) if row is None else (row[field], row.get("scale_underflow"))
    if row is None or (value is None and not underflow):
        return "<td>–</td>"
    share = 0.0 if value is None else min(max((24 - value) / 24, 0), 1)  # 24 dB is white, 0 dB and below the darkest
    share = max(share, underflow or 0.0)
    color = f"rgb({255 - round(20 * share)},{255 - round(130 * share)},{255 - round(190 * share)})"
    words = ["–"] if value is None else [f"<span {_traced(row['line'], field, value)}>{value:.1f}</span>"]
    if underflow:
        traced = _traced(row["line"], "scale_underflow", underflow)
        words.append(f'<span class="note" {traced}>{underflow:.2g} of blocks are zero</span>')
    return f'<td style="background:{color}">{"<br>".join(words)}</td>'


def _place(line: str, field: str, value: float) -> str:
    """Attributes that name the line and field of a number, and its value there."""
    return f'data-line="{escape(line)}" data-field="{field}" data-value="{value!r}"'


def _traced(line: str, field: str, value: float) -> str:
    """:func:`_place`, with a title that shows it when one points at the number."""
    return f'{_place(line, field, value)} title="{field} = {value:.6g}, line {escape(line)}"'


def _tip(field: str, value: float, line: str) -> str:
    """The tooltip of a mark inside an SVG picture, where a title is an element and not an attribute."""
    return f"<title>{field} = {value:.6g}, line {escape(line)}</title>"


def _refusals(record: _Record) -> str:
    reasons: defaultdict[str, set[str]] = defaultdict(set)
    for row in record.refusals:
        reasons[row["reason"]].add(row["layer"])
    of_record = f" of {escape(record.name)}" if record.name else ""
    items = "".join(
        f'<li class="note">Not seen in some step{of_record}: {escape(", ".join(sorted(layers)))}, because '
        f"{escape(reason)}.</li>"
        for reason, layers in reasons.items()
    )
    return f"<ul>{items}</ul>" if items else ""


def _legend(names: Sequence[str], colors: Sequence[str]) -> str:
    entries = (
        f'<span><span class="swatch" style="background:{color}"></span>{escape(name)}</span>'
        for name, color in zip(names, colors, strict=True)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _layer(name: str, records: Sequence[_Record]) -> str:
    of_records = [record.by_layer.get(name, []) for record in records]
    together = [row for rows in of_records for row in rows]
    bodies = [_of_layer(rows, together) if rows else "<p>Not recorded.</p>" for rows in of_records]
    if len(records) > 1:
        named = zip(records, bodies, strict=True)
        bodies = [f"<section><h3>{escape(record.name)}</h3>{body}</section>" for record, body in named]
        bodies = [f'<div class="beside">{"".join(bodies)}</div>']
    return f"<details><summary>{escape(name)}</summary>{''.join(bodies)}</details>"


def _of_layer(rows: Sequence[Row], together: Sequence[Row]) -> str:
    """Charts and tables of one layer's rows; ``together`` are its rows in all records, which scale the axes."""

    def chart(caption: str, field: str, kind: str, places: Sequence[tuple[str, ...]], every: int = 1) -> str:
        line = _series(rows, kind, places, field)
        return _chart(caption, field, line, _series(together, kind, places, field), every)

    charts = [chart(caption, field, "operand", OPERANDS) for field, caption in OPERAND_CHARTS]
    products = [(gemm,) for gemm in GEMMS]
    charts.insert(1, chart("Signal over error of the products, dB", "snr_db", "gemm", products, every=2))
    charts.append(chart("Squared bias of stochastic rounding, share of the signal", "bias", "rounding", OPERANDS))
    last = max(map(_step, rows))
    now = [row for row in rows if row["step"] == last]
    shown = [
        (row, color)
        for operand, color in zip(OPERANDS, COLORS, strict=True)
        if (row := _latest(now, "operand", operand)) is not None
    ]
    codes = [_histogram(row, "codes", _by_value(row["cast"], row["codes"]), color) for row, color in shown]
    scales = [_histogram(row, "scale_codes", _by_code(row["scale_codes"]), color) for row, color in shown]
    return (
        f'<div class="charts">{"".join(filter(None, charts))}</div>'
        f"<p>Codes of the operands at the last step: how often each of them occurs, from the most negative number over "
        f"zero to the most positive one.</p>"
        f'<div class="charts">{"".join(codes)}</div>'
        f"<p>Codes of their block scales: how often each of them occurs, from the smallest scale to the largest.</p>"
        f'<div class="charts">{"".join(scales)}</div>{_worst(now)}{_channels(now)}'
    )


def _series(rows: Sequence[Row], kind: str, places: Sequence[tuple[str, ...]], field: str) -> list[list[_Point]]:
    """Points of each place, by step."""
    series: list[list[_Point]] = []
    for place in places:
        names = ("gemm", "role", "side")[: len(place)]
        chosen = [r for r in rows if r["kind"] == kind and tuple(r.get(name) for name in names) == place]
        series.append([_Point(r["step"], r[field], r["line"]) for r in chosen if r.get(field) is not None])
    return series


WIDTH, HEIGHT, LEFT, BOTTOM = 340, 180, 70, 22


def _chart(
    caption: str,
    field: str,
    series: Sequence[Sequence[_Point]],
    scale: Sequence[Sequence[_Point]],
    every: int = 1,
) -> str:
    """Lines over steps, in every ``every``-th colour, on the axes of all points of ``scale``.

    Both operands of a weight often have the same figures, so columnwise lines are dashed, thin and on top.
    """
    points = [point for line in scale for point in line]
    if not any(series):
        return ""
    low, high = min(points, key=lambda point: point.value), max(points, key=lambda point: point.value)
    first, last = min(points, key=lambda point: point.step), max(points, key=lambda point: point.step)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * ((step - first.step) / (last.step - first.step or 1))

    least = min((point.value for point in points if point.value > 0), default=1.0)

    def height(value: float) -> float:
        return math.log10(max(value, least)) if field in LOGARITHMIC else value

    def y(value: float) -> float:
        top, bottom = height(high.value), height(low.value)
        part = (top - height(value)) / (top - bottom) if top > bottom else 0.5
        return 8 + (HEIGHT - BOTTOM - 16) * part

    drawn = [_axes(field, [low, high] if high.value > low.value else [low], first, last, y)]
    for place, (line, color) in enumerate(zip(series, COLORS[::every], strict=False)):
        columnwise = every == 1 and OPERANDS[place][2] == "columnwise"
        stroke = 'stroke-width="1.3" stroke-dasharray="5 3"' if columnwise else 'stroke-width="3.2"'
        path = " ".join(f"{x(point.step):.1f},{y(point.value):.1f}" for point in line)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" {stroke}/>')
        for point in line:
            title = f"step {point.step}: {point.value:.6g}, line {point.line}"
            drawn.append(
                f'<circle cx="{x(point.step):.1f}" cy="{y(point.value):.1f}" r="{2 if columnwise else 3.4}" '
                f'fill="{color}" {_place(point.line, field, point.value)}><title>{title}</title></circle>'
            )
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(caption)}">{"".join(drawn)}</svg>'
    legend = _legend(GEMMS, COLORS[::every]) if every == 2 else ""
    return f"<figure>{svg}<figcaption>{escape(caption)}{legend}</figcaption></figure>"


def _axes(field: str, values: Sequence[_Point], first: _Point, last: _Point, y: Callable[[float], float]) -> str:
    """The smallest and the largest value, and the first and the last step: numbers of the record, and no others."""
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(point.value):.1f}" y2="{y(point.value):.1f}" stroke="#e4e4e4"/>'
        f'<text x="{LEFT - 8}" y="{y(point.value) + 4:.1f}" text-anchor="end" '
        f"{_place(point.line, field, point.value)}>{point.value:.3g}{_tip(field, point.value, point.line)}</text>"
        for point in values
    )
    tip = _tip("step", first.step, first.line)
    steps = f'<text x="{LEFT}" y="{HEIGHT - 6}" {_place(first.line, "step", first.step)}>step {first.step}{tip}</text>'
    if last.step > first.step:
        where = f'x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end"'
        tip = _tip("step", last.step, last.line)
        steps += f"<text {where} {_place(last.line, 'step', last.step)}>{last.step}{tip}</text>"
    return lines + steps


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


def _histogram(row: Row, field: str, times_of: Sequence[tuple[int, int]], color: str) -> str:
    if not times_of:
        return ""
    total = sum(times for _, times in times_of) or 1
    most = max(times for _, times in times_of) or 1
    width, height = 220, 90
    bar = width / len(times_of)
    bars = "".join(
        f'<rect x="{place * bar:.1f}" y="{height - height * times / most:.1f}" width="{max(bar - 1, 0.5):.1f}" '
        f'height="{height * times / most:.1f}" fill="{color}" {_place(row["line"], f"{field}.{code}", times)}>'
        f"<title>code {code}: {times:,} ({times / total:.2%}), line {row['line']}</title></rect>"
        for place, (code, times) in enumerate(times_of)
        if times
    )
    caption = f"{row['gemm']} {row['role']} {row['side']}: {row['cast']}"
    axis = f'<line x1="0" x2="{width}" y1="{height}" y2="{height}" stroke="#bbb"/>'
    label = escape(caption)
    svg = f'<svg width="{width}" height="{height + 1}" role="img" aria-label="{label}">{bars}{axis}</svg>'
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"


def _worst(now: Sequence[Row]) -> str:
    lines = []
    for operand in OPERANDS:
        row = _latest(now, "operand", operand)
        if row is not None and row["worst"] and row["worst"][0][2] is not None:
            written = ("{}", "{}", "{:.2%}")
            cells = (
                f"<td {_traced(row['line'], f'worst.0.{place}', row['worst'][0][place])}>"
                f"{form.format(row['worst'][0][place])}</td>"
                for place, form in enumerate(written)
            )
            lines.append(f"<tr><td>{' '.join(operand)}</td>{''.join(cells)}</tr>")
    if not lines:
        return ""
    head = "<tr><th>operand</th><th>row</th><th>column</th><th>share of its error</th></tr>"
    return f"<p>The block with the largest error of each operand:</p><table>{head}{''.join(lines)}</table>"


def _channels(now: Sequence[Row]) -> str:
    lines = []
    for row in now:
        if row["kind"] == "tensor" and row["channels"] and row["channels"][0][1] is not None:
            channel, ratio = row["channels"][0]
            lines.append(
                f"<tr><td>{row['role']}</td><td {_traced(row['line'], 'channels.0.0', channel)}>{channel}</td>"
                f"<td {_traced(row['line'], 'channels.0.1', ratio)}>{ratio:.3g}</td></tr>"
            )
    head = "<tr><th>tensor</th><th>channel</th><th>its amax over the median channel's</th></tr>"
    return f"<p>The channel that sticks out most:</p><table>{head}{''.join(lines)}</table>" if lines else ""
