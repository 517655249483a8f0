"""Checkpoints that are whole or not there, and metrics that never run ahead of them.

A checkpoint is a folder `step-00000100` with `model.safetensors`, `training.pt` (optimizer, random streams) and the
digests of both. It is written under another name, synced to disk and renamed, so that a crash at any moment leaves the
one before in place.
"""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import nn

import fp4engine
from gpt.files import sync, write_atomically
from gpt.settings import InputError

WEIGHTS, STATE, DIGESTS = "model.safetensors", "training.pt", "sha256.json"

KEPT = 2
"""Newest checkpoints to keep: one to continue from, and one to fall back on if that is damaged."""


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class Stateful(Protocol):
    """What a run has beside its model and its optimizer, such as a hook of the optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *more: Stateful) -> None:
    final = folder / step_name(step)
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = {
        "step": step,
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if next(model.parameters()).is_cuda else None,
        "fp4_rng": fp4engine.get_rng_state(),
        "amax_history": fp4engine.get_amax_history(model),
        "more": [part.state_dict() for part in more],
    }
    training = io.BytesIO()
    torch.save(state, training)
    # Bytes first, and files by Python: a full disk is then an OSError, whatever wrote the bytes.
    files = {WEIGHTS: safetensors.torch.save(model.state_dict()), STATE: training.getvalue()}
    files[DIGESTS] = json.dumps({name: hashlib.sha256(content).hexdigest() for name, content in files.items()}).encode()
    try:
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        for path in (*(partial / name for name in files), partial):
            sync(path)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # what did not fit should not fill the disk
        raise
    os.replace(partial, final)
    sync(folder)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *more: Stateful) -> int:
    """Load the newest checkpoint of `folder` and return its step; 0 and nothing loaded if there is none.

    Raises:
        InputError: the checkpoint cannot be read, or does not fit the model.
    """
    found = checkpoints(folder)
    if not found:
        return 0
    newest = found[-1]
    try:
        digests = json.loads((newest / DIGESTS).read_text())
        for name in (WEIGHTS, STATE):
            if file_digest(newest / name) != digests[name]:
                raise ValueError(f"{name} is not what was saved")
        state = torch.load(newest / STATE, map_location="cpu", weights_only=True)
        if newest.name != step_name(state["step"]):
            raise ValueError(f"it is that of step {state['step']}")
        model.load_state_dict(safetensors.torch.load_file(newest / WEIGHTS))
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])
        fp4engine.set_rng_state(state["fp4_rng"])
        fp4engine.set_amax_history(model, state["amax_history"])
        for part, saved in zip(more, state.get("more", []), strict=True):
            part.load_state_dict(saved)
    except Exception as error:  # whatever a damaged file makes its reader raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        instead = f"the one before, {found[-2].name}" if len(found) > 1 else "the beginning"
        raise InputError(f"checkpoint {newest} is damaged ({why}); delete it to continue from {instead}") from error
    return state["step"]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Metrics:
    """One JSON object per line, each with a `step`."""

    def __init__(self, path: Path, up_to: int) -> None:
        """Continue the file at `path` after step `up_to`, and drop what a run that was killed wrote beyond.

        Raises:
            InputError: the file does not have one loss for each step up to there.
        """
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= up_to]
        if [row["step"] for row in kept if "loss" in row] != list(range(1, up_to + 1)):
            raise InputError(
                f"{path} is damaged (it has to hold one loss for each of the {up_to} steps of the newest checkpoint); "
                "put it back, or begin another run"
            )
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))

    def append(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, each with its step, without a last line that was cut off; none if there is no file."""
    rows = read_rows(path)
    for row in rows:
        if type(row.get("step")) is not int:
            raise InputError(f"{path} is damaged ({row!r} has no step); it has to hold one JSON object per line")
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """As :func:`read_metrics`, of any rows."""
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is no object")
        return rows
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); it has to hold one JSON object per line") from error
