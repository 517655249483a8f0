"""Say in which precision to train, and why.

A published table answers first, by GPU, size, risk and experience; estimates of a step and the leaderboard of recipes
(docs/research/leaderboard.md) say what they know for and against it.

  fp4engine recommend B200 70B --risk some --experience advanced
"""

import argparse
import dataclasses
import json

from fp4engine.advice import EXPERIENCE, RISKS, recommend

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``gpu parameters [--risk] [--experience] [--json]``."""
    parser.add_argument("gpu", help="name of a GPU, such as H100; one that the table does not know gets BF16")
    parser.add_argument("parameters", help="of the model, such as 8B, 125M or 8030261248")
    risk = "zero: BF16 alone; low: no recipe measured more than 1%% above BF16's loss; some (default: %(default)s)"
    parser.add_argument("--risk", choices=RISKS, default="low", help=risk)
    known = "advanced: can tell a fault of numerics from others (default: %(default)s)"
    parser.add_argument("--experience", choices=EXPERIENCE, default="basic", help=known)
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the recommendation."""
    found = recommend(arguments.gpu, _number(arguments.parameters), arguments.risk, arguments.experience)
    print(json.dumps(dataclasses.asdict(found), ensure_ascii=False) if arguments.json else found)
    return 0


def _number(text: str) -> float:
    unit = UNITS.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if unit != 1 else text) * unit
    except ValueError:
        raise ValueError(f"parameters must be a number such as 8B, 125M or 8030261248, got {text!r}") from None
