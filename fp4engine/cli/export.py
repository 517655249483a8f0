"""Write a trained checkpoint in NVFP4 for servers.

The codes and scales are those that the recipe multiplied in training. It needs more packages than the other commands:
pip install 'fp4engine[export]'
"""

import argparse
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`run` reads."""
    try:
        from fp4engine.export import command
    except ModuleNotFoundError:  # safetensors or tqdm: a bare install lacks them, and has the other commands
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="safetensors or tqdm is missing")
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
    with _terminated_as_interrupted():
        return command.main(arguments)


@contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """Region in which SIGTERM raises as Ctrl-C does, so that what was half written is removed."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only that one hears of signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
