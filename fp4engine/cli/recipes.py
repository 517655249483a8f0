"""List the recipe book, or show one recipe.

Without a name: every recipe's name, where it was published, and by how many percent the loss of a small GPT trained by
it ended above BF16's (docs/leaderboard.md), where that has been measured. With a name: the casts of the three matrix
products, the source, the limits, and the recipe as JSON.
"""

import argparse
import json
from pathlib import Path

from fp4engine.accounting.table import table
from fp4engine.recipe import Recipe, zoo
from fp4engine.recipe.casts import ColumnwiseSource
from fp4engine.recipe.linear import GEMM_OPERANDS

LEADERBOARD = Path(__file__).with_name("leaderboard.json")
"""Preset -> recipe -> its gap, as it is printed. `examples/convergence/run.py board --report` writes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``[name] [--json]``."""
    parser.add_argument("name", nargs="?", help="a recipe of the book; without it, all are listed")
    parser.add_argument("--json", action="store_true", help="print only the recipe as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the list or the one recipe."""
    if arguments.name is None:
        if arguments.json:
            raise ValueError("--json needs the name of one recipe")
        print(_listing())
        return 0
    recipe = zoo.make(arguments.name)
    print(recipe.to_json() if arguments.json else _one(arguments.name, recipe))
    return 0


def _listing() -> str:
    text = LEADERBOARD.read_text(encoding="utf-8") if LEADERBOARD.exists() else "{}"
    measured: dict[str, dict[str, str]] = json.loads(text)
    columns = [["", *zoo.ZOO]]
    columns += [[preset, *(gaps.get(name, "") for name in zoo.ZOO)] for preset, gaps in measured.items()]
    header, *rows = zip(*columns, ["", *(row.source.replace("`", "") for row in zoo.ZOO.values())], strict=True)
    lines = table(header, rows).splitlines()
    gaps = "by how many percent a small GPT's loss ended above BF16's, ± standard error (docs/leaderboard.md)"
    about = [f"{', '.join(measured)}: {gaps}."] if measured else []
    return "\n".join([*lines[not measured :], "", *about, "fp4engine recipes NAME shows the casts of one of them."])


def _one(name: str, recipe: Recipe) -> str:
    row = zoo.ZOO[name]
    lines = [name, f"  source  {row.source.replace('`', '')}"]
    if row.limits:
        lines.append(f"  limits  {row.limits}")
    for gemm, operands in GEMM_OPERANDS.items():
        sides = [f"{role} {side}: {_label(recipe, gemm, role, side)}" for role, side in operands]
        lines.append(f"  {gemm}   {sides[0]}\n          {sides[1]}")
    inputs = recipe.casts("input").rowwise
    mixes = inputs is not None and inputs.mixes_rows and not recipe.is_delayed
    lines.append(f"  a token's score depends on its batch and on later tokens: {'yes' if mixes else 'no'}")
    lines.append(f"  in Python  fp4engine.recipe.zoo.make({name!r})")
    lines.append(f"  as JSON    {recipe.to_json()}")
    return "\n".join(lines)


_MADE_OF: dict[ColumnwiseSource, str] = {
    "original": "",
    "rowwise_dequantized": ", made of the rowwise operand",
    "saved_original": ", made of the saved tensor in the backward pass",
}


def _label(recipe: Recipe, gemm: str, role: str, side: str) -> str:
    casts = recipe.casts(role)
    spec = casts.rowwise if side == "rowwise" else casts.columnwise
    source = casts.columnwise_source
    if recipe.backward_override is not None and gemm != "fprop":
        spec = None
        source = "rowwise_dequantized" if recipe.backward_override == "dequantized" else "original"
    made_of = _MADE_OF[source] if role != "grad_output" and side == "columnwise" else ""
    return ("high precision" if spec is None else spec.label) + made_of
