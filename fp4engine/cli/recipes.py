"""List the recipe book, or show one recipe.

Without a name: every recipe's name, what its six casts are, and where it was published. With a name: the casts of the
three matrix products, the source, the limits, and the recipe as JSON.
"""

import argparse

from fp4engine.recipe import Recipe, zoo
from fp4engine.recipe.linear import GEMM_OPERANDS


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
    width = max(map(len, zoo.ZOO))
    lines = [f"{name.ljust(width)}  {row.source.replace('`', '')}" for name, row in zoo.ZOO.items()]
    return "\n".join([*lines, "", "fp4engine recipes NAME shows the casts of one of them."])


def _one(name: str, recipe: Recipe) -> str:
    row = zoo.ZOO[name]
    lines = [name, f"  source  {row.source.replace('`', '')}"]
    if row.limits:
        lines.append(f"  limits  {row.limits}")
    for gemm, operands in GEMM_OPERANDS.items():
        sides = [f"{role} {side}: {_label(recipe, role, side)}" for role, side in operands]
        lines.append(f"  {gemm}   {sides[0]}\n          {sides[1]}")
    lines.append(f"  in Python  fp4engine.recipe.zoo.make({name!r})")
    lines.append(f"  as JSON    {recipe.to_json()}")
    return "\n".join(lines)


def _label(recipe: Recipe, role: str, side: str) -> str:
    casts = recipe.casts(role)
    spec = casts.rowwise if side == "rowwise" else casts.columnwise
    if spec is None:
        return "high precision"
    made_of = ", made of the rowwise operand" if side == "columnwise" and casts.columnwise_source != "original" else ""
    return spec.label + made_of
