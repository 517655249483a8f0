"""The table of docs/recipes.md, from the recipe book itself.

python tools/recipe_table.py            prints it
python tools/recipe_table.py --write    puts it into the page
"""

import argparse
from pathlib import Path

import torch

from fp4engine.formats import CastSpec
from fp4engine.ops.cast import casts_supported
from fp4engine.recipe import Recipe, zoo
from fp4engine.recipe.linear import GEMM_OPERANDS
from fp4engine.roles import TENSOR_TYPES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- table: python tools/recipe_table.py --write -->\n", "<!-- end of table -->\n"


def operand(spec: CastSpec | None) -> str:
    return "high precision" if spec is None else spec.label


def path(recipe: Recipe) -> str:
    """How many quantize calls a Triton kernel covers whole; the others run on the reference."""
    calls: list[tuple[CastSpec | None, CastSpec | None]] = []
    for casts in map(recipe.casts, TENSOR_TYPES):
        if casts.columnwise_source == "original":
            calls.append((casts.rowwise, casts.columnwise))
        else:
            calls += [(casts.rowwise, None), (None, casts.columnwise)]
    calls = [call for call in calls if call != (None, None)]
    keys = [["" if spec is None else spec.key for spec in call] for call in calls]
    covered = sum(casts_supported(row, col, torch.bfloat16)[0] for row, col in keys)
    if not calls:
        return "PyTorch"
    if covered == len(calls):
        return "kernel"
    return f"kernel in {covered} of {len(calls)} calls" if covered else "reference"


def row(name: str) -> str:
    recipe = zoo.make(name)
    cells = [f"`{name}`"]
    for pair in GEMM_OPERANDS.values():
        cells.append(" · ".join(operand(getattr(recipe.casts(role), side)) for role, side in pair))
    requantized = [role for role in TENSOR_TYPES if recipe.casts(role).columnwise_source == "rowwise_dequantized"]
    kept = any(recipe.casts(role).columnwise_source == "saved_original" for role in TENSOR_TYPES)
    cells.append("saved " + ", ".join(requantized) if requantized else "saved original input" if kept else "originals")
    inputs = recipe.casts("input").rowwise
    cells.append("yes" if inputs is not None and inputs.mixes_rows and not recipe.is_delayed else "no")
    cells += [path(recipe), zoo.ZOO[name].source, zoo.ZOO[name].limits]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    header = (
        "recipe",
        "fprop: input · weight",
        "dgrad: grad_output · weight",
        "wgrad: grad_output · input",
        "backward operands from",
        "a score depends on its batch",
        "casts run on",
        "follows",
        "known limits",
    )
    return "\n".join((f"| {' | '.join(header)} |", "|---" * len(header) + "|", *map(row, zoo.ZOO))) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/recipes.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
