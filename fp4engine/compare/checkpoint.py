"""Checkpoints that are whole or not there.

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
from torch import Tensor, nn

from fp4engine.arguments import one_line
from fp4engine.compare.files import InputError
from fp4engine.compare.loop import generator_states, set_generator_states
from fp4engine.files import sync
from fp4engine.modules import get_amax_history, set_amax_history
from fp4engine.state import get_rng_state, set_rng_state

WEIGHTS, STATE, DIGESTS = "model.safetensors", "training.pt", "sha256.json"

KEPT = 2
"""Newest checkpoints to keep: one to continue from, and one to fall back on if that is damaged."""


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def step_name(step: int) -> str:
    """The name of the checkpoint's folder."""
    return f"step-{step:08d}"


class Stateful(Protocol):
    """What a run has beside its model and its optimizer, such as a hook of the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue bit for bit, as ``torch.save`` takes it."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        ...


def changing(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` that training changes: trained parameters, each under one name, and saved buffers."""
    parameters = dict(model.named_parameters())
    other = {name for name, _ in model.named_parameters(remove_duplicate=False)} | extra_state(model).keys()
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in other}
    return {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad} | buffers


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules give to ``state_dict`` by ``get_extra_state``, by its name there."""
    return {name: value for name, value in model.state_dict().items() if name.rpartition(".")[2] == "_extra_state"}


def packed(model: nn.Module) -> bytes:
    """A safetensors file of what training changes, also of buffers that share their memory with others."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in changing(model).items():
        weights[name] = tensor.contiguous()
        if (memory := weights[name].untyped_storage().data_ptr()) in seen:
            weights[name] = weights[name].clone()
        seen.add(memory)
    return safetensors.torch.save(weights)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *more: Stateful) -> None:
    """Write the checkpoint of a step.

    Raises:
        OSError: the disk is full, for instance; what was there is whole then.
    """
    final = folder / step_name(step)
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = {
        "step": step,
        "optimizer": optimizer.state_dict(),
        **generator_states(),
        "fp4_rng": get_rng_state(),
        "amax_history": get_amax_history(model),
        "extra_state": extra_state(model),
        "more": [part.state_dict() for part in more],
    }
    training = io.BytesIO()
    torch.save(state, training)
    # Bytes first, and files by Python: a full disk is then an OSError, whatever wrote the bytes.
    files = {WEIGHTS: packed(model), STATE: training.getvalue()}
    files[DIGESTS] = json.dumps({name: hashlib.sha256(content).hexdigest() for name, content in files.items()}).encode()
    try:
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        for path in (*(partial / name for name in files), partial):
            sync(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # what did not fit should not fill the disk
        raise OSError(error.errno, error.strerror, str(final)) from error
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
        load_weights(model, newest / WEIGHTS)
        # Of an empty file a model's own loading may miss what it renames.
        if extra := state["extra_state"]:
            model.load_state_dict(extra, strict=False)
        optimizer.load_state_dict(state["optimizer"])
        set_generator_states(state)
        set_rng_state(state["fp4_rng"])
        set_amax_history(model, state["amax_history"])
        for part, saved in zip(more, state["more"], strict=True):
            part.load_state_dict(saved)
    except Exception as error:  # whatever a damaged file makes its reader raise
        instead = f"the one before, {found[-2].name}" if len(found) > 1 else "the beginning"
        raise InputError(
            f"checkpoint {newest} is damaged ({one_line(error)}); delete it to continue from {instead}"
        ) from error
    return state["step"]


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into the tensors of `model` that training changes.

    Raises:
        ValueError: the file has other names, or a parameter of another shape.
    """
    saved, own = safetensors.torch.load_file(path), changing(model)
    if odd := sorted(saved.keys() ^ own.keys()):
        raise ValueError(f"the model and the file do not both have {odd[0]}")
    buffers = dict(model.named_buffers())
    for name, tensor in own.items():
        if tensor.shape == saved[name].shape:
            if not torch.equal(tensor, saved[name].to(tensor.device)):  # a constant may be a view nobody can write to
                tensor.copy_(saved[name])
        elif name in buffers:  # which may grow
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, saved[name].to(tensor.device))
        else:
            raise ValueError(f"{name} is {list(tensor.shape)} in the model and {list(saved[name].shape)} in the file")


def file_digest(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
