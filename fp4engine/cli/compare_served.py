"""Compare a served checkpoint with the recipe that trained it, on the same tokens.

Printed are the divergence of the two distributions over the whole vocabulary, the largest difference of a
log-probability, the first layer, operand and block with other codes, and what a token's score depends on. It needs more
packages than the other commands: pip install 'fp4engine[export]'. Example:

  fp4engine compare-served runs/trained runs/served --data held-out.txt --recipe recipe.json
"""

import argparse

from fp4engine.cli.export import with_export

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``TRAINED EXPORTED --data FILE``, and how."""
    with_export(parser, "add_compare_arguments")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return 1 if the divergence is larger than ``--max-kl``."""
    return with_export(arguments, "compare")
