"""One HTML page about a recorded run, without scripts and without anything to load.

Every number on the page sits in an element that names the line of ``record.jsonl`` that it was read from
(``data-line``), the field of that row (``data-field``) and the value there (``data-value``); pointing at it shows them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
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
"""Fields of which gradients have values a million times below those of inputs."""

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
.note { color: #7a3b00; }
"""


@dataclass(frozen=True)
class _Point:
    step: int
    value: float
    line: int


def html(rows: Sequence[Row], title: str) -> str:
    """The page about ``rows``, which :func:`fp4engine.inspect.read` returned.

    Raises:
        ValueError: ``rows`` are something else, there is no recorded step in them, or no row about the run; ``title``
            is no string.
    """
    if isinstance(rows, str | os.PathLike):
        raise ValueError(f"rows must be what fp4engine.inspect.read({shown(rows)}) returns, got the path itself")
    if not isinstance(rows, Sequence):
        raise ValueError(f"rows must be a list, as fp4engine.inspect.read returns it, got {shown(rows)}")
    for row in rows:
        if wrong := fault_of(row) or ("" if "line" in row else "it needs 'line'"):
            raise ValueError(f"rows must be what fp4engine.inspect.read returns, got {shown(row)} among them: {wrong}")
    if not isinstance(title, str):
        raise ValueError(f"title must be a string, got {shown(title)}")
    if not any(row["kind"] == "run" for row in rows):
        raise ValueError("rows must have the row of kind 'run' that a record begins with; leave it among them")
    found = [row for row in rows if row["kind"] not in ("run", "refusal")]
    if not found:
        raise ValueError("the record has no recorded step, only the row that describes the run")
    by_layer: defaultdict[str, list[Row]] = defaultdict(list)
    for row in found:
        by_layer[row["layer"]].append(row)
    last = max(row["step"] for row in found)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _about(rows, found),
        f"<h2>All layers at step {_number(max(found, key=_step), 'step')}: signal over error, dB</h2>",
        "<p>Operands on the left: what rounding adds to a tensor. Products on the right: what it adds to the result of "
        "a matrix product. A cell is darker the less signal is left.</p>",
        _overview(by_layer, last),
        _refusals(rows),
        "<h2>Layers</h2>",
        "<p>A click on a name opens the layer. A line is an operand: solid and thick where it is the tensor as it "
        "stands (rowwise), dashed and thin where it is its transpose (columnwise).</p>",
        _legend([" ".join(operand) for operand in OPERANDS], COLORS),
        *(_layer(name, layer) for name, layer in by_layer.items()),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _about(rows: Sequence[Row], found: Sequence[Row]) -> str:
    runs = [row for row in rows if row["kind"] == "run"]
    first, last = min(found, key=_step), max(found, key=_step)
    ranks = "rank" if runs[0]["world_size"] == 1 else "ranks"
    sentences = [
        f"Recorded steps {_number(first, 'step')} to {_number(last, 'step')}, every {_number(runs[0], 'every')} steps, "
        f"on {_number(runs[0], 'world_size')} {ranks}, by fp4engine {escape(str(runs[0].get('fp4engine')))} with torch "
        f"{escape(str(runs[0].get('torch')))}.",
        "Every number names the line of record.jsonl that it was read from: point at it.",
    ]
    if len(runs) > 1:
        sentences.append("The file holds several regions, one after another.")
    return f"<p>{' '.join(sentences)}</p>"


def _step(row: Row) -> int:
    return row["step"]


def _number(row: Row, field: str) -> str:
    return f"<span {_traced(row['line'], field, row[field])}>{row[field]}</span>"


def _overview(by_layer: dict[str, list[Row]], step: int) -> str:
    head = [f"<th>{gemm}<br>{role}<br>{side}</th>" for gemm, role, side in OPERANDS]
    head += [f"<th>{gemm}<br>product</th>" for gemm in GEMMS]
    body = []
    for name, rows in by_layer.items():
        now = [row for row in rows if row["step"] == step]
        cells = [_cell(_latest(now, "operand", operand), "sqnr_db") for operand in OPERANDS]
        cells += [_cell(_latest(now, "gemm", (gemm,)), "snr_db") for gemm in GEMMS]
        body.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    content = f"<thead><tr><th>layer</th>{''.join(head)}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def _latest(rows: Sequence[Row], kind: str, place: tuple[str, ...]) -> Row | None:
    """The row of a place; the later one of two, if a resumed run has recorded the step again."""
    names = ("gemm", "role", "side")[: len(place)]
    found = (r for r in reversed(rows) if r["kind"] == kind and tuple(r.get(name) for name in names) == place)
    return next(found, None)


def _cell(row: Row | None, field: str) -> str:
    value = None if row is None else row[field]
    if row is None or value is None:
        return "<td>–</td>"
    share = min(max((24 - value) / 24, 0), 1)  # 24 dB is white, 0 dB and below the darkest
    color = f"rgb({255 - round(20 * share)},{255 - round(130 * share)},{255 - round(190 * share)})"
    return f'<td style="background:{color}" {_traced(row["line"], field, value)}>{value:.1f}</td>'


def _place(line: int, field: str, value: float) -> str:
    """Attributes that name the line and field of a number, and its value there."""
    return f'data-line="{line}" data-field="{field}" data-value="{value!r}"'


def _traced(line: int, field: str, value: float) -> str:
    """:func:`_place`, with a title that shows it when one points at the number."""
    return f'{_place(line, field, value)} title="{field} = {value:.6g}, line {line}"'


def _tip(field: str, value: float, line: int) -> str:
    """That title inside of a picture, where it is an element."""
    return f"<title>{field} = {value:.6g}, line {line}</title>"


def _refusals(rows: Sequence[Row]) -> str:
    reasons: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["kind"] == "refusal":
            reasons[row["reason"]].add(row["layer"])
    items = "".join(
        f'<li class="note">Not seen in some step: {escape(", ".join(sorted(layers)))}, because {escape(reason)}.</li>'
        for reason, layers in reasons.items()
    )
    return f"<ul>{items}</ul>" if items else ""


def _legend(names: Sequence[str], colors: Sequence[str]) -> str:
    entries = (
        f'<span><span class="swatch" style="background:{color}"></span>{escape(name)}</span>'
        for name, color in zip(names, colors, strict=True)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _layer(name: str, rows: Sequence[Row]) -> str:
    charts = [_chart(caption, field, _series(rows, "operand", OPERANDS, field)) for field, caption in OPERAND_CHARTS]
    products = _series(rows, "gemm", [(gemm,) for gemm in GEMMS], "snr_db")
    charts.insert(1, _chart("Signal over error of the products, dB", "snr_db", products, every=2))
    biases = _series(rows, "rounding", OPERANDS, "bias")
    if any(biases):
        charts.append(_chart("Squared bias of stochastic rounding, share of the signal", "bias", biases))
    last = max(row["step"] for row in rows)
    now = [row for row in rows if row["step"] == last]
    shown = [
        (row, color)
        for operand, color in zip(OPERANDS, COLORS, strict=True)
        if (row := _latest(now, "operand", operand)) is not None
    ]
    codes = [_histogram(row, "codes", _by_value(row["cast"], row["codes"]), color) for row, color in shown]
    scales = [_histogram(row, "scale_codes", _by_code(row["scale_codes"]), color) for row, color in shown]
    return (
        f"<details><summary>{escape(name)}</summary>"
        f'<div class="charts">{"".join(filter(None, charts))}</div>'
        f"<p>Codes of the operands at the last step: how often each of them occurs, from the most negative number over "
        f"zero to the most positive one.</p>"
        f'<div class="charts">{"".join(codes)}</div>'
        f"<p>Codes of their block scales: how often each of them occurs, from the smallest scale to the largest.</p>"
        f'<div class="charts">{"".join(scales)}</div>{_worst(now)}{_channels(now)}</details>'
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


def _chart(caption: str, field: str, series: Sequence[Sequence[_Point]], every: int = 1) -> str:
    """Lines over steps, in every ``every``-th colour.

    Both operands of a weight often have the same figures, so columnwise lines are dashed, thin and on top.
    """
    points = [point for line in series for point in line]
    if not points:
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
