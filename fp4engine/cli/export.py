"""Write a trained checkpoint in NVFP4 for servers.

The codes and scales are those that the recipe multiplied in training. It needs more packages than the other commands:
pip install 'fp4engine[export]'
"""

import argparse
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["add_arguments", "run", "with_export"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`run` reads."""
    with_export(parser, "add_arguments")


def run(arguments: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    with _terminated_as_interrupted():
        return with_export(arguments, "main")


def with_export(argument: argparse.ArgumentParser | argparse.Namespace, function: str) -> Any:
    """Call a function of :mod:`fp4engine.export.command`.

    Raises:
        ValueError: arguments were parsed, and what the extra ``export`` brings is not installed.
    """
    try:
        from fp4engine.export import command
    except ModuleNotFoundError as error:  # a bare install lacks it, and has the other commands
        if isinstance(argument, argparse.Namespace):
            raise ValueError(f"this command needs {error.name}: pip install 'fp4engine[export]'") from error
        argument.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=f"{error.name} is missing")
        return None
    return getattr(command, function)(argument)


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
