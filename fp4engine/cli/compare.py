"""Say whether a model trains by a recipe: train it by recipes and by a baseline, seed by seed, and compare.

  fp4engine compare --model config.json --data texts/ --recipes nvfp4 mine.json --steps 300

Writes page.html, table.md, results.jsonl and a file per run below --out. The same command continues what was stopped,
and makes only what is not there. Exit codes: 0 if every recipe's gap is below --tolerance, 3 if one is above it or
diverged, 4 if the runs cannot tell. It needs more packages than the other commands: pip install 'fp4engine[compare]'
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from fp4engine.cli.extras import needs
from fp4engine.environment import cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the data, the recipes, the runs."""
    model = parser.add_argument_group("what is trained")
    model.add_argument(
        "--model",
        help="a Hugging Face directory, with or without weights, a config.json, or module:function, which returns a "
        "model and its loss(model, tokens)",
    )
    model.add_argument(
        "--data", nargs="+", metavar="PATH", help="text files, folders, .jsonl, .parquet, saved data sets"
    )
    model.add_argument("--text-field", default="text", metavar="NAME", help="of records (default: %(default)s)")
    model.add_argument(
        "--lora", type=_whole(0), default=0, metavar="RANK", help="freeze the model and train adapters of this rank"
    )
    model.add_argument(
        "--keep-high-precision",
        nargs="*",
        metavar="PATTERN",
        help="layers that no recipe reaches (default: the output layer that the model tells, or lm_head)",
    )
    recipes = parser.add_argument_group("what is compared")
    recipes.add_argument(
        "--recipes",
        nargs="+",
        default=[],
        metavar="RECIPE",
        help="rows of the recipe book, JSON files, module:function; beside a baseline in high precision",
    )
    recipes.add_argument(
        "--ablate",
        nargs=2,
        metavar=("A", "B"),
        help="two recipes, and A with each of the fields of B in which they differ",
    )
    recipes.add_argument(
        "--tolerance", type=_percent, default=1.0, metavar="X%", help="largest gap to accept (default: 1%%)"
    )
    runs = parser.add_argument_group("the runs")
    number: dict[str, Any] = {"type": _whole(1), "metavar": "N"}
    none_too: dict[str, Any] = {"type": _whole(0), "metavar": "N"}
    runs.add_argument("--seeds", **number, default=3, help="seeds 0, 1, ... (default: %(default)s)")
    runs.add_argument("--steps", **number, default=300, help="of the optimizer (default: %(default)s)")
    runs.add_argument("--batch", **number, default=16, help="sequences of a forward pass (default: %(default)s)")
    runs.add_argument("--sequence", **number, default=256, help="tokens of a sequence (default: %(default)s)")
    runs.add_argument(
        "--grad-accumulation", **number, default=1, help="forward passes of a step (default: %(default)s)"
    )
    runs.add_argument(
        "--lr",
        type=_positive,
        metavar="X",
        help="at its peak (default: 1e-3, 2e-5 for weights of one's own, 2e-4 for --lora)",
    )
    runs.add_argument("--compile", action="store_true", help="torch.compile the loss")
    runs.add_argument(
        "--cuda-graph", action="store_true", help="replay a captured step; for models without control flow"
    )
    runs.add_argument(
        "--noise", **none_too, default=1, help="seeds that are run again with other draws (default: %(default)s)"
    )
    runs.add_argument(
        "--sensitivity",
        **none_too,
        help="steps of the short runs that rank layers; 0 for none (default: a fifteenth of --steps, from 8 to 40)",
    )
    runs.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: all GPUs there are, or else the CPU"
    )
    runs.add_argument("--jobs", **number, default=cores(), help="runs at once on a CPU (default here: %(default)s)")
    seconds: dict[str, Any] = {"type": _positive, "metavar": "S"}
    runs.add_argument("--seconds", **seconds, default=math.inf, help="save and stop after so many")
    runs.add_argument(
        "--save-every", **seconds, default=60.0, help="seconds between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where all of it is written (default: compare, or the first of --runs)"
    )
    parser.add_argument(
        "--plan", action="store_true", help="train nothing; say how many seeds a gap of --tolerance needs"
    )
    parser.add_argument("--runs", nargs="+", metavar="DIR", help="train nothing; the page of runs that are there")


def run(arguments: argparse.Namespace) -> int:
    """Make the runs and the page; 0, 3 or 4 by the verdict.

    Raises:
        ValueError: what the extra ``compare`` brings is not installed, or an argument cannot be used.
    """
    with needs("compare"):
        from fp4engine.compare import command
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return command.main(arguments)


def _whole(least: int) -> Callable[[str], int]:
    """What reads an integer of at least ``least``."""

    def whole(text: str) -> int:
        number = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return number

    return whole


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive, finite number, got {text!r}")
    return number


def _percent(text: str) -> float:
    """``"1%"`` or ``"1"`` as 1.0."""
    return _positive(text.removesuffix("%"))
