"""Reading checkpoints from untrusted sources: JSON and safetensors only, every name, dtype and shape checked.

Legend: N out_features, K in_features of a weight [N, K].
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp4engine.arguments import require_path, shown
from fp4engine.export.serving_format import (
    COMPRESSED_TENSORS,
    FORMATS,
    MODELOPT,
    STATIC,
    Kind,
    ServingFormat,
    described_cache,
    described_kind,
    is_named,
)
from fp4engine.export.writer import INDEX, SINGLE

_JSON_BYTES = 256 << 20
"""More than any index of a real model; a larger file is refused instead of read."""


_OPEN_FILES = 2


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or not what it says; the message names the file and the tensor."""


class TensorFolder(Mapping[str, Tensor]):
    """The tensors of a directory of safetensors files, by name, read when they are asked for.

    Two files at most stay open, so that pages of the others are no longer mapped into memory.

    Args:
        directory: holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file; the index names files outside the
            directory, or tensors that are not where it says.
        ValueError: ``directory`` is no path.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = require_path("directory", directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{str(directory)!r} is not a directory")
        self._files: dict[str, Any] = {}
        index = self.directory / INDEX
        self._where = self._indexed(index) if index.exists() else dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _indexed(self, index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        named = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        if not named or not weight_map:
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names, got {weight_map!r:.80}")
        files = sorted(set(weight_map.values()))
        for file in files:
            if file != Path(file).name or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index}: names {file!r}, which is no safetensors file of this directory")
        for file in files:
            there = set(self._open(file).keys())
            listed = {name for name, place in weight_map.items() if place == file}
            if there != listed:
                odd = sorted(there ^ listed)
                raise CheckpointError(f"{index}: disagrees with {file!r} about {len(odd)} tensors, e.g. {odd[0]!r}")
        return weight_map

    def _open(self, file: str) -> Any:
        if file not in self._files:
            if len(self._files) == _OPEN_FILES:
                del self._files[next(iter(self._files))]
            path = self.directory / file
            if file not in (there := os.listdir(self.directory)):
                others = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth")))
                pickled = f"; {others[0]!r} may hold a pickle, which is never opened" if others else ""
                raise CheckpointError(f"{path} is missing{pickled}")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error
        return self._files[file]

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        try:
            return self._open(file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.directory / file}: {name!r} cannot be read: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._where  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors' name of a tensor's dtype, and its shape, without reading the tensor."""
        part = self._open(self._where[name]).get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())


class ServedCheckpoint:
    """An exported checkpoint: weights in codes by layer, and all other tensors.

    Args:
        directory: what :func:`~fp4engine.export.export_checkpoint` wrote, or a peer in one of its two formats.

    Attributes:
        form: the format it is in.
        tensors: all tensors by name.
        layers: ``name -> (form of its weight, how its inputs are cast)`` of the layers whose weight is codes.
        ignored: names of linear modules that its configuration leaves alone, ``re:`` and an expression, or with ``*``.
        settings: the configuration, as its file has it.
        kv_cache: what keys and values are cached in, ``"fp8"`` or ``"nvfp4"``; None if nothing says it.
        cache_scales: names of the scales of keys and values.

    Raises:
        CheckpointError: it is in neither format, or damaged: see :class:`TensorFolder`; a weight whose parts are
            missing, or have another dtype or shape than its form gives them, or an outer scale that is not positive
            and finite; a configuration that leaves such a weight alone, does not describe it, or asks for an input
            scale that is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self.tensors = TensorFolder(directory)
        self.form, self.settings, self.ignored = _format_of(self.tensors.directory)
        self.layers: dict[str, Kind] = {}
        for layer in dict.fromkeys(self._found()):
            self.layers[layer] = self._described(layer)
            self._check(layer)
        path = self.tensors.directory / self.form.config_file
        try:
            self.kv_cache = described_cache(self.settings, self.form)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        endings = tuple(f".{name}" for name in self.form.caches)
        self.cache_scales = [name for name in self.tensors if name.endswith(endings)]
        if (self.kv_cache is None) != (not self.cache_scales):
            there = "none is there" if self.kv_cache else f"{self.cache_scales[0]!r} is there"
            raise CheckpointError(f"{path}: keys and values are cached in {self.kv_cache}, and of their scales {there}")
        for name in self.cache_scales:
            self._outer(name)

    def _found(self) -> Iterator[str]:
        """Names of the modules that have a part of a weight in codes, which some may have several times."""
        parts = {part for form in self.form.names for part in self.form.parts(form)}
        for name in self.tensors:
            layer, _, part = name.rpartition(".")
            # All other modules have a weight; a scale without one is of a damaged layer.
            if part in parts and (part != "weight" or self.tensors.described(name)[0] in ("U8", "F8_E4M3")):
                yield layer

    def _described(self, layer: str) -> Kind:
        path = self.tensors.directory / self.form.config_file
        try:
            ignored, kind = is_named(layer, self.ignored), described_kind(self.settings, self.form, layer)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if ignored:
            raise CheckpointError(f"{path}: {layer!r} is in codes, and the configuration lists it as left alone")
        if kind[0] not in self.form.names:
            raise CheckpointError(
                f"{path}: describes {layer!r} as {kind[0].name}, of which {self.form.name} has no form"
            )
        scale = self.form.input_scale(kind[0])
        if scale and (kind[1] == STATIC) != (f"{layer}.{scale}" in self.tensors):
            fault = "is not there" if kind[1] == STATIC else "is there"
            raise CheckpointError(
                f"{path}: inputs of {layer!r} are described as {kind[1]}, and '{layer}.{scale}' {fault}"
            )
        return kind

    def _check(self, layer: str) -> None:
        form = self.layers[layer][0]
        parts = [f"{layer}.{part}" for part in self.form.parts(form)]
        for part in parts:
            if part not in self.tensors:
                raise CheckpointError(f"{self.tensors.directory}: {layer!r} has no {part!r}")
        described = [self.tensors.described(part) for part in parts]
        rows, cols = (*described[0][1], 0, 0)[:2]
        expected = form.described(rows, cols * 8 // form.spec.element.storage_bits)
        if len(described[0][1]) != 2 or described[: len(expected)] != expected:
            got, wanted = (
                ", ".join(f"{part} {dtype} {list(shape)}" for part, (dtype, shape) in zip(parts, each, strict=False))
                for each in (described, expected)
            )
            raise CheckpointError(f"{self.tensors.directory}: {layer!r} in {form.name} needs {wanted}, got {got}")
        for name in (*parts[len(expected) :], f"{layer}.{self.form.input_scale(form)}"):
            if name in self.tensors:
                self._outer(name)

    def _outer(self, name: str) -> Tensor:
        outer = self.tensors[name].reshape(-1)
        if outer.dtype != torch.float32 or outer.numel() != 1 or not (outer.isfinite() & (outer > 0)).all():
            raise CheckpointError(
                f"{self.tensors.directory}: {name!r} must be one positive finite FP32 number, got {outer.dtype} "
                f"{outer.tolist()!r:.80}"
            )
        return outer

    def parts(self, layer: str) -> dict[str, Tensor]:
        """The tensors of a layer's weight by the last parts of their names, as stored."""
        return {part: self.tensors[f"{layer}.{part}"] for part in self.form.parts(self.layers[layer][0])}

    def operand(self, layer: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, block scales and outer scale FP32 [1] of a layer's weight, as stored; None for what it has not.

        Raises:
            CheckpointError: a block scale is negative, or no finite number.
        """
        names = self.form.names[self.layers[layer][0]]
        codes, scales = (None if name is None else self.tensors[f"{layer}.{name}"] for name in names[:2])
        assert codes is not None
        if scales is not None:
            numbers = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
            if wrong := numbers[~((numbers >= 0) & numbers.isfinite())].tolist():
                raise CheckpointError(
                    f"{self.tensors.directory}: '{layer}.{names[1]}' must hold finite block scales of at least 0, got "
                    f"{wrong[0]}"
                )
        return codes, scales, None if names[2] is None else self._outer(f"{layer}.{names[2]}")

    def weight(self, layer: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """``element * block scale * factor`` of a layer's weight, rounded once to ``dtype``: [N, K].

        Raises:
            ValueError: ``dtype`` is no floating-point dtype of PyTorch's.
        """
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype, got {shown(dtype)}")
        form = self.layers[layer][0]
        codes, scales, outer = self.operand(layer)
        values = form.decode(codes, scales)
        return (values if outer is None else values * self.form.factor(form, outer)).to(dtype)

    def input_amax(self, layer: str) -> float | None:
        """The amax that the layer's inputs are scaled by, from the stored scale; None if none is stored."""
        form = self.layers[layer][0]
        name = f"{layer}.{self.form.input_scale(form)}"
        if name not in self.tensors:
            return None
        return float(self.form.factor(form, self._outer(name)) * form.spec.numerator)

    def is_codes(self, name: str) -> bool:
        """Whether ``name`` is, or in high precision would be, a part of the weight of a layer in codes."""
        layer, _, part = name.rpartition(".")
        return layer in self.layers and part in ("weight", *self.form.names[self.layers[layer][0]])


def _format_of(directory: Path) -> tuple[ServingFormat, dict[str, Any], tuple[str, ...]]:
    """The format of a checkpoint, its configuration, and the modules that the configuration leaves alone."""
    modelopt = directory / MODELOPT.config_file
    if modelopt.exists():
        settings = _section(modelopt, "quantization")
        if not isinstance(settings.get("quant_algo"), str):
            raise CheckpointError(f"{modelopt}: quant_algo must be a name, got {settings.get('quant_algo')!r:.80}")
        return MODELOPT, settings, _names(modelopt, settings.get("exclude_modules"))
    path = directory / COMPRESSED_TENSORS.config_file
    settings = _section(path, "quantization_config")
    method = settings.get("quant_method")
    if method != COMPRESSED_TENSORS.name:
        allowed = " or ".join(FORMATS)
        raise CheckpointError(f"{path}: describes no checkpoint of {allowed} (quant_method={method!r:.80})")
    return COMPRESSED_TENSORS, settings, _names(path, settings.get("ignore"))


def _section(path: Path, name: str) -> dict[str, Any]:
    section = read_json(path).get(name)
    return section if isinstance(section, dict) else {}


def _names(path: Path, value: Any) -> tuple[str, ...]:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise CheckpointError(f"{path}: the modules left alone must be a list of names, got {value!r:.80}")
    return tuple(value or ())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointError: there is no such file, it is too large, or it is something else.
    """
    try:
        if path.stat().st_size > _JSON_BYTES:
            raise OSError(f"it has {path.stat().st_size} bytes, more than the {_JSON_BYTES} of any such file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is missing, truncated or no JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(data).__name__}")
    return data
