"""The command line ``fp4engine``: one module per subcommand.

A subcommand is a module with a docstring, whose first line is its help, and two functions:
``add_arguments(parser)`` declares its arguments and ``run(arguments)`` does the work and returns the exit code. Its
name is the module's, with hyphens. :data:`COMMANDS` lists them; a new one is a new module and one more entry there.
"""

import argparse
import io
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch

from fp4engine.cli import (
    certificates,
    compare,
    compare_served,
    doctor,
    estimate,
    export,
    recipes,
    recommend,
    report,
    te,
)
from fp4engine.version import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS = (certificates, compare, compare_served, doctor, estimate, export, recipes, recommend, report, te)

BAD_INPUT = 2
"""Exit code for arguments or files that a command cannot use; 1 is a command's own "no"."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the signal's number."""

FAULT = 70
"""Exit code after an error that nobody has foreseen, as in sysexits.h: Python's own, 1, would be a command's "no"."""

PIPE_CLOSED = 141
"""Exit code where whoever read the output has left, so that no answer was given: 128 and SIGPIPE's number."""


class Parser(argparse.ArgumentParser):
    """Reports bad arguments in one line on stderr, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and leave with exit code 2."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; bad arguments leave by ``SystemExit(2)``, Ctrl-C by another.

    Args:
        argv: the words after the program's name; None reads those of this process.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and arguments.run is not te.run:  # whose output is its script's
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no ± shows its number
    try:
        with warnings.catch_warnings():  # which restores how they are shown
            if arguments.run is not te.run:
                for of_code in (SyntaxWarning, DeprecationWarning):  # for authors of what is imported, not for users
                    warnings.simplefilter("ignore", of_code)
                warnings.showwarning = partial(_show_warning, arguments.command)
            code = arguments.run(arguments)
            _flush()
            return code
    except KeyboardInterrupt as stopped:
        parser.exit(stopped.args[0] if stopped.args else INTERRUPTED, f"fp4engine {arguments.command}: stopped\n")
    except SystemExit as left:  # of somebody's code: its 0 would be the verdict of this command
        if arguments.run is te.run:
            raise
        from fp4engine.compare.files import place_of

        parser.exit(
            BAD_INPUT,
            f"fp4engine {arguments.command}: the code that was given has called sys.exit({left.code!r}){place_of(left)}"
            "; raise an error instead\n",
        )
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        with suppress(OSError):
            _flush()
        return PIPE_CLOSED
    except (ValueError, OSError) as error:
        with suppress(OSError):
            _flush()
        parser.exit(BAD_INPUT, f"fp4engine {arguments.command}: {'; '.join(str(error).splitlines())}\n")
    except (MemoryError, torch.OutOfMemoryError) as error:
        said = " ".join(str(error).split()) or "this process may have no more"
        parser.exit(BAD_INPUT, f"fp4engine {arguments.command}: not enough memory: {said}\n")
    except Exception:
        traceback.print_exc()
        parser.exit(FAULT, f"fp4engine {arguments.command}: this is no answer, but a fault; please report it\n")


def _flush() -> None:
    """Write out what was printed. Where that fails, the process shall not try again as it ends, and change its code."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
        raise


def _show_warning(command: str, message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, as errors are, without the line of source code that gave it."""
    print(f"fp4engine {command}: {'; '.join(str(message).splitlines())}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each leaves its ``run`` in the parsed arguments."""
    parser = Parser(prog="fp4engine", description="NVFP4 training: look at machines, memory, recipes and runs.")
    parser.add_argument("--version", action="version", version=f"fp4engine {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        description = (module.__doc__ or name).strip()  # python -OO leaves docstrings out
        subparser = subparsers.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser
