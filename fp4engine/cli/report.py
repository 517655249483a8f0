"""Write one HTML page about a run that inspect.record has recorded, or about several, side by side.

The page loads nothing and holds no scripts: it can be mailed or attached. With --recipe the operands of the record are
held against the casts of a recipe; those that were cast otherwise are listed, and the exit code is 1. Examples:

  fp4engine report runs/look --out look.html
  fp4engine report runs/nvfp4 runs/fp8 --out both.html
"""

import argparse
from collections.abc import Sequence
from typing import Any

from fp4engine.arguments import require_path
from fp4engine.files import write_atomically
from fp4engine.inspect import html, read
from fp4engine.inspect.reading import FILE
from fp4engine.recipe import Recipe, recipe_from_argument
from fp4engine.roles import QuantizerRole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``record [record ...] [--out FILE] [--recipe RECIPE] [--title TEXT]``."""
    parser.add_argument("record", nargs="+", help="the folder that inspect.record wrote into, or its record.jsonl")
    parser.add_argument("--out", help="the page; without it, report.html beside the first record")
    parser.add_argument("--recipe", help="a row of the recipe book, a JSON file, module:function; see above")
    parser.add_argument("--title", help="the page's heading; without it, the names of the folders")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    sources = [require_path("record", given) for given in arguments.record]
    folders = [source if source.is_dir() else source.parent for source in sources]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(given) for given in arguments.record]
    if len(set(names)) < len(names):
        raise ValueError(f"records must be different ones, got {', '.join(names)}")
    records = dict(zip(names, map(read, sources), strict=True))
    title = arguments.title or f"{'Runs' if len(names) > 1 else 'Run'} {' and '.join(names)}"
    recipe = None if arguments.recipe is None else recipe_from_argument(arguments.recipe)
    page = html(records if len(names) > 1 else records[names[0]], title)
    path = folders[0] / "report.html" if arguments.out is None else require_path("--out", arguments.out)
    if any(path.exists() and path.samefile(s / FILE if s.is_dir() else s) for s in sources):
        raise ValueError(f"--out must be another file than the record, got {arguments.out!r}")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that is there, got {str(path)!r}")
    write_atomically(path, page.encode(errors="backslashreplace"))  # names of files may be no text
    print(path)
    if recipe is None:
        return 0
    otherwise = [
        f"{name}: {line}" if len(names) > 1 else line
        for name, rows in records.items()
        for line in _cast_otherwise(rows, recipe)
    ]
    print("\n".join(otherwise) or f"every recorded operand was cast as {arguments.recipe} says")
    return 1 if otherwise else 0


def _cast_otherwise(rows: Sequence[dict[str, Any]], recipe: Recipe) -> list[str]:
    """A line for every kind of operand that was not cast as ``recipe`` says, with the layers."""
    layers: dict[str, list[str]] = {}
    seen_as: dict[str, Any] = {}
    for row in rows:
        if row["kind"] == "run":
            seen_as = row.get("roles", {})
        if row["kind"] != "operand":
            continue
        own = seen_as.get(row["layer"], {"module_type": "linear", "name": row["layer"], "shape": ()})
        role = QuantizerRole(own["module_type"], row["role"], own["name"], tuple(own["shape"]))
        spec = getattr(recipe.at(row["step"]).of(role).casts(row["role"]), row["side"])
        wanted = "high precision" if spec is None else spec.label
        if row["cast"] != wanted:
            said = f"{row['gemm']} {row['role']} {row['side']} was cast as {row['cast']!r}, not as {wanted!r}"
            layers.setdefault(said, []).append(row["layer"])
    return [f"{said}: {', '.join(dict.fromkeys(names))}" for said, names in layers.items()]
