"""The data of every study: the Python sources found on this machine."""

import sysconfig
from pathlib import Path

import torch

from gpt.data import Corpus, read_texts, split


def python_sources(length: int) -> Corpus:
    """The standard library and the installed packages, one file in twenty kept for validation.

    A text that is there twice counts once, so no validation text is trained on.
    """
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    texts = read_texts(library, "*.py") | read_texts(packages, "*.py")
    return split(texts, library, length, torch.device("cpu"))
