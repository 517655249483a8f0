"""Write a trained checkpoint in NVFP4 for servers.

The codes and scales are those that the recipe multiplied in training. Needs the extra ``export``.
"""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`run` reads."""
    try:
        from fp4engine.export import command
    except ModuleNotFoundError:  # safetensors or tqdm: a bare install lacks them, and has the other commands
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="needs the extra `export`")
    else:
        command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, and return the exit code.

    Raises:
        ValueError: what the extra ``export`` brings is not installed.
    """
    try:
        from fp4engine.export import command
    except ModuleNotFoundError as error:
        raise ValueError(f"export needs {error.name}: pip install 'fp4engine[export]'") from error
    return command.main(arguments)
