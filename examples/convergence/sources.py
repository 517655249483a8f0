"""The data of every study: the Python sources found on this machine, or a folder of text files."""

import os
import sysconfig
from functools import cache
from pathlib import Path

import torch

from gpt.data import Corpus, load_corpus, read_texts, split


def python_sources(length: int) -> Corpus:
    """The standard library and the installed packages, one file in twenty kept for validation.

    A text that is there twice counts once, so no validation text is trained on.
    """
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    texts = read_texts(library, "*.py") | read_texts(packages, "*.py")
    return split(texts, library, length, torch.device("cpu"))


def prepare(data: str | None, length: int, scratch: Path) -> Path:
    """The corpus as one file below `scratch`, for :func:`load`.

    Python sources are read once and kept, so that a study continued after an installation trains on the same bytes.
    """
    path = scratch / ("folder.pt" if data else "python-sources.pt")
    if data or not path.exists():
        corpus = load_corpus(data, length, torch.device("cpu")) if data else python_sources(length)
        scratch.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(vars(corpus), partial)
        partial.replace(path)
    return path


def load(path: Path, device: str) -> Corpus:
    """What :func:`prepare` wrote, read once."""
    return _read(path, device, path.stat().st_mtime_ns)


@cache
def _read(path: Path, device: str, written: int) -> Corpus:
    return Corpus(**torch.load(path, map_location=device))
