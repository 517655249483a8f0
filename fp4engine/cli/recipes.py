"""List the recipe book, show one recipe, or say how two differ.

Without a name: every recipe's name, where it was published, and by how many percent the loss of a small GPT trained by
it ended above BF16's, where that has been measured (docs/research/leaderboard.md). With one: the casts of the three
matrix products, the source, the limits, and the recipe as JSON; with --kernels 90 also which kernels a GPU of that
compute capability would run, on any machine. With two: the fields in which they differ. A recipe is a row of the
book, a JSON file, or module:function.
"""

import argparse
import json

from fp4engine.accounting.kernels import kernels_of
from fp4engine.accounting.table import table
from fp4engine.advice import LEADERBOARD
from fp4engine.recipe import Recipe, RuledRecipe, ScheduledRecipe, differences, recipe_from_argument, zoo
from fp4engine.recipe.casts import ColumnwiseSource
from fp4engine.recipe.linear import GEMM_OPERANDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``[recipe [recipe]] [--json] [--kernels CAPABILITY]``."""
    parser.add_argument(
        "recipes", nargs="*", metavar="recipe", help="none lists the book, one is shown, two are compared"
    )
    parser.add_argument("--json", action="store_true", help="print only the recipe as one JSON object")
    parser.add_argument(
        "--kernels", type=_capability, metavar="90", help="which kernels a GPU of this compute capability would run"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list, the one recipe, or the differences of two."""
    names: list[str] = arguments.recipes
    if len(names) > 2:
        raise ValueError(f"give at most two recipes, got {len(names)}")
    if len(names) != 1 and (arguments.json or arguments.kernels):
        raise ValueError(f"{'--json' if arguments.json else '--kernels'} needs the name of one recipe")
    if not names:
        print(_listing())
        return 0
    made = [recipe_from_argument(name) for name in names]
    if len(names) == 2:
        print(_differences(names, made))
        return 0
    if arguments.json:
        print(made[0].to_json())
        return 0
    print(_one(names[0], made[0]))
    if arguments.kernels:
        print(kernels_of(made[0], *arguments.kernels))
    return 0


def _capability(text: str) -> tuple[int, int]:
    """``"90"`` or ``"9.0"`` as (9, 0)."""
    digits = text.replace(".", "").removeprefix("sm_")
    if not digits.isdecimal() or len(digits) < 2:
        raise argparse.ArgumentTypeError(f"must be a compute capability, such as 90, got {text!r}")
    return int(digits[:-1]), int(digits[-1])


def _differences(names: list[str], recipes: list[Recipe]) -> str:
    first, second = recipes
    rows = [(field, str(ours), str(theirs)) for field, (ours, theirs) in differences(first, second).items()]
    return table(("field", *names), rows) if rows else f"{names[0]} and {names[1]} are the same recipe"


def _listing() -> str:
    text = LEADERBOARD.read_text(encoding="utf-8") if LEADERBOARD.exists() else "{}"
    measured: dict[str, dict[str, str]] = json.loads(text)
    columns = [["", *zoo.ZOO]]
    columns += [[preset, *(gaps.get(name, "") for name in zoo.ZOO)] for preset, gaps in measured.items()]
    header, *rows = zip(*columns, ["", *(row.source.replace("`", "") for row in zoo.ZOO.values())], strict=True)
    lines = table(header, rows).splitlines()
    gaps = "by how many percent a small GPT's loss ended above BF16's; 95% intervals (docs/research/leaderboard.md)"
    about = [f"{', '.join(measured)}: {gaps}."] if measured else []
    return "\n".join([*lines[not measured :], "", *about, "fp4engine recipes NAME shows the casts of one of them."])


def _one(name: str, recipe: Recipe) -> str:
    lines = [name]
    if name in zoo.ZOO:
        row = zoo.ZOO[name]
        lines.append(f"  source  {row.source.replace('`', '')}")
        lines += [f"  limits  {row.limits}"] if row.limits else []
    if isinstance(recipe, RuledRecipe | ScheduledRecipe):
        lines.append(f"  its casts depend on the {'module' if isinstance(recipe, RuledRecipe) else 'step'}: {recipe!r}")
    else:
        for gemm, operands in GEMM_OPERANDS.items():
            sides = [f"{role} {side}: {_label(recipe, gemm, role, side)}" for role, side in operands]
            lines.append(f"  {gemm}   {sides[0]}\n          {sides[1]}")
        inputs = recipe.casts("input").rowwise
        mixes = inputs is not None and inputs.mixes_rows and not recipe.is_delayed
        lines.append(f"  a token's score depends on its batch and on later tokens: {'yes' if mixes else 'no'}")
    made = "zoo.make" if name in zoo.ZOO else "recipe_from_argument"
    lines.append(f"  in Python  fp4engine.recipe.{made}({name!r})")
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
