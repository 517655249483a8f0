"""Write one HTML page about a run that inspect.record has recorded.

The page loads nothing and holds no scripts: it can be mailed or attached. Example:

  fp4engine report runs/look --out look.html
"""

import argparse
import os
from pathlib import Path

from fp4engine.arguments import require_path
from fp4engine.inspect import html, read
from fp4engine.inspect.reading import FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``record [--out FILE] [--title TEXT]``."""
    parser.add_argument("record", help="the folder that inspect.record wrote into, or its record.jsonl")
    parser.add_argument("--out", help="the page; without it, report.html beside the record")
    parser.add_argument("--title", help="the page's heading; without it, the folder's name")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    source = require_path("record", arguments.record)
    folder = source if source.is_dir() else source.parent
    page = html(read(source), arguments.title or f"Run {folder.resolve().name}")
    path = folder / "report.html" if arguments.out is None else require_path("--out", arguments.out)
    if path.exists() and path.samefile(source / FILE if source.is_dir() else source):
        raise ValueError(f"--out must be another file than the record, got {arguments.out!r}")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that is there, got {str(path)!r}")
    _write(path, page.encode(errors="backslashreplace"))  # names of files may be no text
    print(path)
    return 0


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there whole or as it was before; what is no file, such as a pipe, is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()  # of a link, the file that it names is replaced; a pipe has no such name
    part = path.with_name(f".{path.name}.incomplete")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
