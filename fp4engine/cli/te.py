"""Run a script that imports TransformerEngine on fp4engine instead, unedited.

The exit code is the script's own, and 1 if it ends in an exception. Example:

  fp4engine te script.py --its arguments
"""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from fp4engine.te import install_as_transformer_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``SCRIPT [ARGUMENT ...]``."""
    parser.add_argument("script", help="the script, which runs as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the script; 1 if it ends in an exception, which is printed as Python prints it.

    Raises:
        ValueError: there is no such file, or TransformerEngine is installed.
    """
    script = Path(arguments.script)
    if not script.is_file():
        raise ValueError(f"script must be a file, got {arguments.script!r}")
    try:
        install_as_transformer_engine()
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    argv, path = sys.argv, sys.path
    sys.argv = [str(script), *arguments.arguments]
    sys.path = [str(script.resolve().parent), *path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path = argv, path
    return 0
