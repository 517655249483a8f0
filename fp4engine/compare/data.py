"""Text in files as one long row of tokens on disk: text, folders, JSON lines, Parquet, and saved data sets.

One document in twenty, by its hash, is kept for validation. Documents are read in the order of their paths until there
are as many tokens as a run needs. What was read is kept, and read again where the files have not changed.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fp4engine.arguments import one_line, shown
from fp4engine.compare.files import InputError
from fp4engine.files import write_atomically

VALIDATION_SHARE = 20
"""One document in 20 is kept for validation; where there are fewer, or one is nearly all, the text's last twentieth."""

AT_ONCE = 256
"""Documents that are tokenized together."""

Encode = Callable[[list[str]], list[Any]]
"""Texts to an array of the token ids of each, with whatever stands between two documents."""


@dataclass(frozen=True)
class Tokens:
    """Tokens on disk, which every process that trains maps into its memory.

    Attributes:
        folder: with ``training.npy`` and ``validation.npy``.
        digest: a digest of both texts.
        training, validation: how many tokens there are.
        unit: what a token is, ``"byte"`` or ``"token"``.
    """

    folder: Path
    digest: str
    training: int
    validation: int
    unit: str

    def windows(self, length: int) -> int:
        """How many windows of ``length`` tokens there are to train on, each beginning with the last one's end."""
        return (self.training - 1) // (length - 1)

    def batch(self, seed: int, step: int, count: int, length: int) -> Tensor:
        """Training tokens int64 [count, length] of ``step``: a pure function of the arguments, so resuming is exact.

        Each window comes once, in an order that the seed draws, before one comes again.
        """
        stream, windows = _map(self.folder / "training.npy"), self.windows(length)
        first = step * count
        places = [_order(windows, seed, at // windows)[at % windows] for at in range(first, first + count)]
        return _taken(stream, [place * (length - 1) for place in places], length)

    def held_out(self, count: int, length: int) -> Tensor:
        """Validation tokens int64 [count, length]: windows that lie evenly over the text, as many as there can be."""
        stream = _map(self.folder / "validation.npy")
        last = len(stream) - length
        count = min(count, max(1, last // (length - 1) + 1))
        return _taken(stream, np.linspace(0, last, count).astype(int).tolist(), length)


@cache
def _map(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


@cache
def _order(windows: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator).tolist()


def _taken(stream: Any, starts: Sequence[int], length: int) -> Tensor:
    return torch.stack([torch.from_numpy(stream[start : start + length].astype(np.int64)) for start in starts])


def prepare(
    paths: Sequence[Path], encode: Encode, name: str, wanted: int, length: int, field: str, out: Path
) -> Tokens:
    """The tokens of the text in ``paths``, read or found below ``out``, whose own files are no text.

    Args:
        encode: texts to token ids; for ``name="bytes"`` a text has a character per byte.
        name: what tells this way to make tokens from others.
        wanted: how many training tokens are enough.
        length: of a window, of which there has to be one in each part.
        field: of a record, which holds the text.

    Raises:
        InputError: a path is not there, cannot be read or holds no text, or there is too little text.
    """
    files = [file for path in paths for file in _files(path, out)]
    parts = [part for file in files for part in ([file] if file.is_file() else sorted(file.rglob("*")))]
    told = [(str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    identity = json.dumps([told, name, wanted, length, field])
    folder = out / "data" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    unit = "byte" if name == "bytes" else "token"
    if not (folder / "tokens.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        streams = _read(files, encode, wanted, length, field, name == "bytes")
        digest = hashlib.sha256()
        for part, stream in streams.items():
            if len(stream) < length:
                where = ", ".join(map(str, paths))
                raise InputError(
                    f"--data {where} leaves {len(stream):,} {unit}s for {part}, and a window needs {length:,}; "
                    "give more text, or a smaller --sequence"
                )
            content = io.BytesIO()  # numpy's own writer does not say which file a full disk has cut off
            np.save(content, stream)
            write_atomically(folder / f"{part}.npy", content.getvalue())
            digest.update(hashlib.sha256(stream.tobytes()).digest())
        counts = {part: len(stream) for part, stream in streams.items()}
        write_atomically(folder / "tokens.json", json.dumps({"digest": digest.hexdigest()[:16], **counts}))
    return Tokens(folder, **json.loads((folder / "tokens.json").read_text()), unit=unit)


def _files(path: Path, written: Path) -> list[Path]:
    """The files below a path that may hold text, without what is ``written``; of a saved data set, the folder itself.

    Raises:
        InputError: there is none.
    """
    if not path.exists():
        raise InputError(f"--data: there is no file or folder {path}")
    if path.is_file() or any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return [path]
    if not path.is_dir():
        raise InputError(f"--data: {path} is neither a file nor a folder")
    if written.resolve() == path.resolve():
        raise InputError(f"--data: what is written to --out {written} would be read as text there; give another --out")
    below = sorted(_below(path, written))
    if not below:
        raise InputError(f"--data: the folder {path} has no files")
    return below


def _below(folder: Path, written: Path) -> Iterator[Path]:
    """The files below a folder and below folders that are links there, each folder once: a link may lead back.

    Left out are names that begin as hidden ones and caches do, and what is ``written``, which would be other text for
    the next command.

    Raises:
        InputError: a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise InputError(f"--data: {error.filename} cannot be read ({error.strerror})") from error

    known = {os.path.realpath(written)}
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (place := os.path.realpath(root)) in known:
            folders.clear()
            continue
        known.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        files = (Path(root, name) for name in names if not name.startswith((".", "__")))
        yield from (file for file in files if file.is_file())


def _read(
    files: Sequence[Path], encode: Encode, wanted: int, length: int, field: str, as_bytes: bool
) -> dict[str, Any]:
    """``"training"`` and ``"validation"`` tokens, uint16 or uint32."""
    documents: dict[bytes, Any] = {}  # by hash: a text that is there twice is read once
    waiting: dict[bytes, str] = {}
    count, enough = 0, (wanted + length) * VALIDATION_SHARE // (VALIDATION_SHARE - 1)
    for text in _documents(files, field, as_bytes):
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest in documents or not text.strip():
            continue
        waiting[digest] = text
        if len(waiting) == AT_ONCE:
            documents |= zip(waiting, encode(list(waiting.values())), strict=True)
            count += sum(len(documents[digest]) for digest in waiting)
            waiting.clear()
            if count >= enough:
                break
    documents |= zip(waiting, encode(list(waiting.values())), strict=True)
    held_out = _held_out(documents, length)
    parts = [[ids for digest, ids in documents.items() if (digest in held_out) == part] for part in (False, True)]
    training, validation = (np.concatenate([np.array([], np.uint32), *part]) for part in parts)
    if not held_out:
        cut = max(len(training) - max(len(training) // VALIDATION_SHARE, length), 0)
        training, validation = training[:cut], training[cut:]
    largest = max((int(part.max()) for part in (training, validation) if len(part)), default=0)
    dtype = np.uint16 if largest < 2**16 else np.uint32
    return {"training": training.astype(dtype), "validation": validation.astype(dtype)}


def _held_out(documents: dict[bytes, Any], length: int) -> set[bytes]:
    """Documents for validation: by their hashes, until they have their share.

    There are none if there are fewer than twenty, or if these would be more than half of the text, as where one file is
    nearly all of it.
    """
    if len(documents) < VALIDATION_SHARE:
        return set()
    whole = sum(map(len, documents.values()))
    share = max(whole // VALIDATION_SHARE, length)
    found: set[bytes] = set()
    for digest in sorted(documents):
        if share <= 0:
            break
        found.add(digest)
        share -= len(documents[digest])
    return found if 2 * sum(len(documents[digest]) for digest in found) <= whole else set()


def _documents(files: Sequence[Path], field: str, as_bytes: bool) -> Iterator[str]:
    found = False
    for file in files:
        try:
            for text in _texts_of(file, field, as_bytes):
                found = True
                if as_bytes and (file.is_dir() or file.suffix in (".jsonl", ".parquet")):
                    text = text.encode("utf-8", "surrogatepass").decode("latin-1")  # a character for each byte
                elif not as_bytes:  # no tokenizer takes half of a surrogate pair, which JSON may hold
                    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                yield text
        except OSError as error:
            raise InputError(f"--data: {file} cannot be read ({error.strerror or error})") from error
    if not found:
        raise InputError(f"--data: there is no text in {', '.join(map(str, files[:3]))}{', ...' * (len(files) > 3)}")


def _texts_of(file: Path, field: str, as_bytes: bool) -> Iterator[str]:
    if file.is_dir():
        yield from (_text(record, field, file) for record in _dataset(file, field))
    elif file.suffix == ".parquet":
        yield from (_text(record, field, file) for record in _parquet(file, field))
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"--data: line {number} of {file} is not JSON ({error})") from error
                yield _text(record, field, file)
    elif b"\0" not in (content := file.read_bytes()):  # a file that has one is no text
        yield content.decode("latin-1") if as_bytes else content.decode("utf-8", "replace")


def _text(record: Any, field: str, file: Path) -> str:
    if isinstance(record, dict) and field in record and not isinstance(record[field], str):
        raise InputError(
            f"--data: {field!r} of a record of {file} must be text, and is {shown(record[field])}; leave the record "
            "out, or say which field has the text: --text-field"
        )
    if not isinstance(record, dict) or field not in record:
        known = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(
            f"--data: a record of {file} has no text in {field!r} (it has {known}); say which: --text-field"
        )
    return record[field]


def _parquet(file: Path, field: str) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise InputError(f"--data {file}: Parquet needs pyarrow: pip install 'fp4engine[datasets]'") from error
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=AT_ONCE):
            known = batch.schema.names
            yield from batch.select([field] if field in known else known).to_pylist()
    except ArrowException as error:
        raise InputError(f"--data: {file} is no Parquet file ({one_line(error)})") from error


def _dataset(folder: Path, field: str) -> Iterator[Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(f"--data {folder}: a data set needs datasets: pip install 'fp4engine[datasets]'") from error
    loaded: Any = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    yield from loaded.select_columns(field) if field in loaded.column_names else loaded  # others may be pictures
