"""Text files as one long tensor of bytes, split into training and validation by the hash of each file."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.settings import InputError

VALIDATION_SHARE = 20
"""One file in so many is kept for validation."""

SEPARATOR = b"\0"
"""Between files; a file that contains it is not text and is left out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes of all training files and of all validation files: uint8, one dimension, on the device.

    `digest` identifies both.
    """

    training: Tensor
    validation: Tensor
    digest: str

    def batch(self, step: int, batch: int, length: int, seed: int) -> Tensor:
        """Training tokens int64 [batch, length] of `step`: a pure function of its arguments, so resuming is exact."""
        return windows(self.training, self.starts(step, batch, length, seed), length)

    def starts(self, step: int, batch: int, length: int, seed: int) -> Tensor:
        """Where the windows of :meth:`batch` begin, int64 [batch], on the CPU."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)  # it reads the low 32 bits
        return torch.randint(len(self.training) - length + 1, (batch,), generator=generator)

    def validation_batch(self, index: int, of: int, batch: int, length: int) -> Tensor:
        """Part `index` of `of * batch` windows that lie evenly over the validation bytes; the same for every run."""
        last = len(self.validation) - length
        start = torch.linspace(0, last, of * batch, dtype=torch.float64).long()
        return windows(self.validation, start[index * batch : (index + 1) * batch], length)


def windows(stream: Tensor, start: Tensor, length: int) -> Tensor:
    """int64 [len(start), length] pieces of `stream`; only `start` travels to the device."""
    index = start.to(stream.device, non_blocking=True)[:, None] + torch.arange(length, device=stream.device)
    return stream[index].long()


def load_corpus(folder: str, length: int, device: torch.device) -> Corpus:
    """Text files below `folder`, or Python's standard library if `folder` is empty.

    Raises:
        InputError: no folder, an unreadable file, no text, or too little of it for windows of `length` bytes.
    """
    root = Path(folder) if folder else Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise InputError(f"--data must be a folder of text files; there is no folder {root}")
    texts = read_texts(root, "*" if folder else "*.py")
    if len(texts) < 2:
        raise InputError(f"--data needs at least two different text files, {root} has {len(texts)}")
    return split(texts, root, length, device)


def split(texts: dict[str, bytes], root: Path, length: int, device: torch.device) -> Corpus:
    """Keep the texts with the smallest hashes for validation; `root` is where they are from.

    Raises:
        InputError: too little text for windows of `length` bytes.
    """
    digests = sorted(texts)
    held_out = set(digests[: max(1, len(digests) // VALIDATION_SHARE)])
    streams = [
        SEPARATOR.join(text for digest, text in texts.items() if (digest in held_out) == validation)
        for validation in (False, True)
    ]
    for stream, purpose in zip(streams, ("training", "validation"), strict=True):
        if len(stream) < length:
            raise InputError(f"--data {root} leaves {len(stream)} bytes for {purpose}, a window needs {length}")
    digest = hashlib.sha256(b"".join(hashlib.sha256(stream).digest() for stream in streams)).hexdigest()
    training, validation = (torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(device) for stream in streams)
    return Corpus(training, validation, digest)


def read_texts(root: Path, pattern: str) -> dict[str, bytes]:
    """`{hash of the text: text}`, in the order of paths; the same text twice counts once."""
    texts: dict[str, bytes] = {}
    for path in sorted(root.rglob(pattern)):
        below = path.relative_to(root).parts
        installed = "site-packages" in below or "__pycache__" in below
        if installed or any(part.startswith(".") for part in below) or not path.is_file():
            continue
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(f"--data: {path} cannot be read ({error.strerror})") from error
        if text and SEPARATOR not in text:
            texts.setdefault(hashlib.sha256(text).hexdigest(), text)
    return texts
