"""Rows of words as aligned text, in which equal blocks of a model are one row; and patterns of such blocks."""

import re
from collections.abc import Collection, Iterable, Sequence

from fp4engine.names import covers, literal

NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])")
"""A part of a dotted name that is a number."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``header`` and ``rows``, one line each, in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)


def collapsed(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """``rows``, which begin with dotted names; those that differ in numbers within the name alone are one row.

    ``("layers.0.up", "high")`` to ``("layers.31.up", "high")`` become ``("layers.{0..31}.up x32", "high")``, where the
    first of them was. No name is lost: what the braces stand for, multiplied out, are the names.
    """
    alike: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name, *cells in rows:
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        alike.setdefault((NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}")), *cells), []).append(numbers)
    found: list[tuple[str, ...]] = []
    for (form, *cells), numbers in alike.items():
        for sets in _products(numbers):
            times = 1
            for values in sets:
                times *= len(values)
            name = form.format(*map(_shown, sets))
            found.append((f"{name} x{times}" if times > 1 else name, *cells))
    return found


def patterns_for(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Patterns that cover the dotted ``names`` and none of ``others``, with ``*`` for numbers where that is so."""
    found: dict[str, None] = {}
    for name in names:
        pattern = NUMBER.sub("*", literal(name))
        found[literal(name) if any(covers(pattern, other) for other in others) else pattern] = None
    return list(found)


def _products(tuples: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """``tuples``, all of one length, as products of sets."""
    if not tuples[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in tuples:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rest in rests.items():
        firsts.setdefault(tuple(_products(rest)), []).append(first)
    return [(tuple(sorted(values)), *product) for products, values in firsts.items() for product in products]


def _shown(values: Sequence[int]) -> str:
    """``3``, ``{0..31}`` or ``{0..2,5,7..9}``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return words[0] if len(values) == 1 else f"{{{','.join(words)}}}"
