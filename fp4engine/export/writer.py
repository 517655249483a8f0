"""Sharded safetensors and their index, in a directory that appears whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fp4engine.checkpoint_names import TOKENIZER
from fp4engine.files import sync

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONFIGURATIONS = ("generation_config.json", "preprocessor_config.json", "processor_config.json")


@contextmanager
def whole_directory(directory: Path) -> Generator[Path]:
    """A new directory to write into, which becomes ``directory`` when the block ends and is removed when it raises.

    It is a hidden directory ``.<name>.<random>.incomplete`` beside ``directory``, or beside what a link of that name
    points to. Its files are synced to the disk before it is renamed.

    Raises:
        ValueError: ``directory`` is there and not empty, is a file, or is the current directory.
    """
    _require_absent(directory)
    directory = directory.resolve()
    if directory == Path.cwd():
        raise ValueError(
            f"directory must not be the current one, which a new one would replace, got {str(directory)!r}"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.", suffix=".incomplete"))
    try:
        yield made
        mask = os.umask(0)
        os.umask(mask)
        made.chmod(0o777 & ~mask)  # mkdtemp's directories are for one user only, and so are the files of safetensors
        for path in (*made.iterdir(), made):
            if path.is_file():
                path.chmod(0o666 & ~mask)
            sync(path)
        _require_absent(directory)
        os.replace(made, directory)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    sync(directory.parent)


def _require_absent(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"directory {str(directory)!r} is there already and not empty; choose another or remove it")


class ShardWriter:
    """Collects tensors and writes a file whenever ``max_shard_size`` bytes have come together.

    Args:
        directory: where files go.
        max_shard_size: bytes; one tensor that is larger has a file to itself.
    """

    def __init__(self, directory: Path, max_shard_size: int) -> None:
        self.directory, self.max_shard_size = directory, max_shard_size
        self._pending: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._storages: set[int] = set()
        self._shards: list[list[str]] = []
        self._bytes = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write ``tensor`` under ``name``, now or later.

        Raises:
            ValueError: there is a tensor of that name already, or it holds a NaN.
        """
        if name in self._names:
            raise ValueError(f"{name!r} is a part of an FP4 weight, and the model has a tensor of that name; rename it")
        self._names.add(name)
        # Safetensors writes what is in memory, where PyTorch may have a sign or a conjugate still to be taken.
        tensor = tensor.detach().to("cpu").contiguous().resolve_neg().resolve_conj()
        # FP8, of one byte, is scales that a cast has just made.
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() and tensor.aminmax().max.isnan():
            raise ValueError(f"{name!r} holds a NaN: there is nothing to serve")
        storage = tensor.untyped_storage()
        # Safetensors refuses a storage twice in a file, and a small part of a mapped file would keep all of it mapped.
        if storage.data_ptr() in self._storages or storage.nbytes() > 2 * tensor.nbytes:
            tensor = tensor.clone()
        if self._pending and self._bytes + tensor.nbytes > self.max_shard_size:
            self._flush()
        self._pending[name] = tensor
        self._storages.add(tensor.untyped_storage().data_ptr())
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the files their names, and write the index where there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._part(1), self.directory / SINGLE)
            return
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names, start=1):
            os.replace(self._part(number), self.directory / name)
        weight_map = {key: name for name, keys in zip(names, self._shards, strict=True) for key in keys}
        write_json(self.directory / INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})

    def _flush(self) -> None:
        if self._pending:
            self._shards.append(list(self._pending))
            path = self._part(len(self._shards))
            try:
                save_file(self._pending, path, metadata={"format": "pt"})
            except SafetensorError as error:  # which safetensors makes of a full disk
                raise OSError(f"{path} cannot be written: {error}") from error
            self._pending, self._bytes = {}, 0
            self._storages.clear()

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05}.safetensors"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write ``data``, indented."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def copy_files(source: Path, directory: Path) -> list[str]:
    """Copy a tokenizer and the configurations beside it; the names of what was there."""
    found = [name for name in (*TOKENIZER, *_CONFIGURATIONS) if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    return found
