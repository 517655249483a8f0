"""Write one HTML page about a run that inspect.record has recorded.

The page loads nothing and holds no scripts: it can be mailed or attached. Example:

  fp4engine report runs/look --out look.html
"""

import argparse
from pathlib import Path

from fp4engine.inspect import html, read
from fp4engine.inspect.reading import FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``record [--out FILE] [--title TEXT]``."""
    parser.add_argument("record", help="the folder that inspect.record wrote into, or its record.jsonl")
    parser.add_argument("--out", help="the page; without it, report.html beside the record")
    parser.add_argument("--title", help="the page's heading; without it, the folder's name")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    source = Path(arguments.record)
    folder = source if source.is_dir() else source.parent
    page = html(read(source), arguments.title or f"Run {folder.resolve().name}")
    path = Path(arguments.out) if arguments.out else folder / "report.html"
    if path.exists() and path.samefile(source / FILE if source.is_dir() else source):
        raise ValueError(f"--out must be another file than the record, got {arguments.out!r}")
    path.write_bytes(page.encode())  # before the file is opened, which empties it
    print(path)
    return 0
