"""Write one HTML page about a run that inspect.record has recorded, or about several, side by side.

The page loads nothing and holds no scripts: it can be mailed or attached. Examples:

  fp4engine report runs/look --out look.html
  fp4engine report runs/nvfp4 runs/fp8 --out both.html
"""

import argparse
import os
from pathlib import Path

from fp4engine.arguments import require_path
from fp4engine.inspect import html, read
from fp4engine.inspect.reading import FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``record [record ...] [--out FILE] [--title TEXT]``."""
    parser.add_argument("record", nargs="+", help="the folder that inspect.record wrote into, or its record.jsonl")
    parser.add_argument("--out", help="the page; without it, report.html beside the first record")
    parser.add_argument("--title", help="the page's heading; without it, the names of the folders")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    sources = [require_path("record", given) for given in arguments.record]
    folders = [source if source.is_dir() else source.parent for source in sources]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(given) for given in arguments.record]
    if len(set(names)) < len(names):
        raise ValueError(f"records must be different ones, got {', '.join(names)}")
    records = dict(zip(names, map(read, sources), strict=True))
    title = arguments.title or f"{'Runs' if len(names) > 1 else 'Run'} {' and '.join(names)}"
    page = html(records if len(names) > 1 else records[names[0]], title)
    path = folders[0] / "report.html" if arguments.out is None else require_path("--out", arguments.out)
    if any(path.exists() and path.samefile(s / FILE if s.is_dir() else s) for s in sources):
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
