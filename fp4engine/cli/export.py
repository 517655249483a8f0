"""Write a trained checkpoint in NVFP4 for servers.

The codes and scales are those that the recipe multiplied in training. Needs the extra ``export``.
"""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`run` reads."""
    from fp4engine.export import command  # safetensors and tqdm, which a bare install lacks

    command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    from fp4engine.export import command

    return command.main(arguments)
