"""A trained model as a checkpoint that servers load: the codes and scales that its forward pass multiplied.

Legend: N out_features, K in_features of a weight [N, K].
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine.accounting.table import collapsed, table
from fp4engine.arguments import is_number, require_bools, require_integer, require_model, require_one_of, require_path
from fp4engine.checkpoint_names import TOKENIZER
from fp4engine.constants import E4M3_MAX, FLT_MAX
from fp4engine.export.calibration import KVCache, attention_modules
from fp4engine.export.layers import Amaxes, ExportLayer, Requantize, encode, export_layers
from fp4engine.export.reader import CheckpointError, ServedCheckpoint
from fp4engine.export.readers import (
    CANNOT_LOAD,
    DIFFERS,
    Reading,
    known_faults,
    needs_values_at_once,
    read_by_transformers,
    read_by_vllm,
)
from fp4engine.export.recoding import LOSSLESS
from fp4engine.export.serving_format import (
    COMPRESSED_TENSORS,
    DYNAMIC,
    NVFP4,
    STATIC,
    WEIGHT_ONLY,
    Kind,
    ServingFormat,
    compressed_tensors_config,
    expert_stack,
    form_of,
    modelopt_config,
    serving_format,
)
from fp4engine.export.slabs import Slabs, progress_bar
from fp4engine.export.state import ModelState
from fp4engine.export.verification import compare
from fp4engine.export.writer import ShardWriter, copy_files, whole_directory, write_json
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.reference.scaling import divide
from fp4engine.version import __version__

Inputs = Mapping[str, float] | Literal["dynamic", "high_precision"] | None
"""Amaxes by layer from :func:`~fp4engine.export.calibrate`, or how inputs are treated without them."""


@dataclass(frozen=True)
class ExportedLayer:
    """One weight of an exported checkpoint that is written as codes.

    Attributes:
        name: the module's dotted name in checkpoints.
        shape: (N, K).
        cast: the weight's cast, in words.
        amax: outer amax that the weight was scaled by, which is its group's if it shares scales. In a form without
            outer scales, the weight's largest magnitude.
        own_amax: outer amax of the weight itself. Gate and up of an expert, which the model multiplies as one matrix,
            have one amax in common.
        error: ``|decoded - weight| / |weight|`` (Frobenius) of what was written.
        added_error: ``error`` less the error under the weight's own amax, which is what sharing a scale costs; 0 if
            ``amax`` is its own, so that the bytes are those that trained.
        input_amax: amax that inputs are scaled by; None where no such scale is stored.
        note: why the cast is not the recipe's, or what a reader that is known makes of it; empty if there is nothing.
    """

    name: str
    shape: tuple[int, int]
    cast: str
    amax: float
    own_amax: float
    error: float
    added_error: float
    input_amax: float | None
    note: str


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export_checkpoint` wrote; ``print(report)`` shows it as a table.

    Attributes:
        directory: where the checkpoint is.
        format: ``"compressed-tensors"`` or ``"modelopt"``.
        layers: the weights in codes, in the model's order.
        left_alone: ``module in checkpoints -> why it stayed as it was``, of all other modules that multiply.
        unused: names in ``weights`` that the model has no tensor for, which were not written.
        readers: what readers made of the checkpoint: vLLM by its rules, and transformers if it was verified.
    """

    directory: Path
    format: str
    layers: tuple[ExportedLayer, ...]
    left_alone: dict[str, str]
    unused: tuple[str, ...] = ()
    readers: tuple[Reading, ...] = ()

    @property
    def rescaled(self) -> tuple[ExportedLayer, ...]:
        """The layers whose bytes differ from those that trained, since a sibling has the larger amax."""
        return tuple(layer for layer in self.layers if layer.amax != layer.own_amax)

    def __str__(self) -> str:
        header = ("layer", "N x K", "cast", "amax", "error", "added by sharing", "input amax", "note")
        alike: dict[tuple[Any, ...], list[ExportedLayer]] = {}
        for layer in self.layers:  # experts of a stack have one line for each projection
            alike.setdefault(expert_stack(layer.name) or (layer.name,), []).append(layer)
        others = collapsed((name, *[""] * 6, why) for name, why in self.left_alone.items())
        lines = [table(header, [*map(_row, alike.values()), *others])]
        if self.unused:
            lines.append(f"{len(self.unused)} tensors of weights are none of the model's, e.g. {self.unused[0]!r}")
        lines.append(
            f"{len(self.layers)} weights in codes, {len(self.rescaled)} of them rescaled by a sibling's amax, "
            f"{len(self.left_alone)} modules left alone: {self.format} in {self.directory}"
        )
        return "\n".join((*lines, *map(str, self.readers)))


def _row(layers: Sequence[ExportedLayer]) -> tuple[str, ...]:
    """A line of the table about one layer, or about one projection of a stack of experts."""
    first = layers[0]
    stack = expert_stack(first.name)
    name = first.name if stack is None else f"{stack[0]}.*.{stack[1]} ({len(layers)})"
    added = [layer.added_error for layer in layers if layer.amax != layer.own_amax]
    inputs = [layer.input_amax for layer in layers if layer.input_amax is not None]
    return (
        name,
        f"{first.shape[0]} x {first.shape[1]}",
        first.cast,
        _span([layer.amax for layer in layers], ".4g"),
        _span([layer.error for layer in layers], ".2%"),
        _span(added, "+.2%"),
        _span(inputs, ".4g"),
        first.note,
    )


def _span(values: Sequence[float], form: str) -> str:
    """The least and the largest of ``values``; ``-`` if there are none."""
    ends = dict.fromkeys(format(value, form) for value in (min(values), max(values))) if values else ("-",)
    return " to ".join(ends)


def export_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = "compressed-tensors",
    *,
    recipe: Recipe | None = None,
    inputs: Inputs = None,
    keep_high_precision: Sequence[str] = (),
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    requantize: Requantize = False,
    kv_cache: KVCache | None = None,
    verify: bool | Any = False,
    force: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    tokenizer: str | os.PathLike[str] | Any = None,
    max_shard_size: int = 2 << 30,
    progress: bool = True,
) -> ExportReport:
    """Write ``model`` as a checkpoint that servers load: sharded safetensors, index, configuration, tokenizer.

        value = element * block scale * (amax / numerator)

    Codes and scales equal the weight operand of the recipe's forward pass, bit for bit; 16x16 tiles repeat their
    scale in each row. Siblings that servers multiply as one matrix share their largest amax, so those with a smaller
    one are cast again by it: the report has the error that this adds. Experts that transformers holds in one parameter
    are written one by one, as in the model's own checkpoints. All other tensors are written unchanged.

    The checkpoint is written to a hidden directory beside ``directory`` and moved into place as the last step.

    Args:
        model: converted by :func:`fp4engine.convert`, parameters on any device, or on ``meta`` with ``weights``.
        directory: created; must not exist, or be empty.
        format: ``"compressed-tensors"`` or ``"modelopt"``.
        recipe: what the model was trained by; None takes the recipe that each module was converted with.
        inputs: how servers cast inputs to NVFP4 or FP8; needed if the recipe casts them so: amaxes by layer from
            :func:`calibrate`, ``"dynamic"`` (NVFP4 under an outer scale of 1, FP8 by token), or ``"high_precision"``,
            which casts no inputs of other forms either (W4A16).
        keep_high_precision: patterns as in :func:`fp4engine.convert`, of modules to write in high precision.
        shared_scales: names of siblings that share outer scales; ``()`` shares none.
        requantize: True casts weights and inputs that no form holds to nearest NVFP4; ``"lossless"`` writes weights in
            MXFP4 as NVFP4 of the same values. The report says so.
        kv_cache: how servers cache keys and values, from :func:`calibrate_kv_cache`; None leaves that to them.
        verify: ``"files"`` reads the files back before they are moved into place, and compares every byte. True, or a
            batch of the model's inputs, also lets transformers load and run them, see :func:`verify_checkpoint`. What
            vLLM's loader would make of them is found by its rules in any case.
        force: write also what a reader takes for other numbers, such as experts and ``Conv1D`` in transformers 5.23.
        weights: a mapping from which parameters are taken one at a time instead of from the model, by their names in
            checkpoints: ``TensorFolder(directory)`` of what ``save_pretrained`` wrote.
        tokenizer: directory to copy a tokenizer's files from, or an object with ``save_pretrained``.
        max_shard_size: bytes of a file, and about half of the memory that writing takes.
        progress: show a bar on a terminal.

    Raises:
        ValueError: the formats cannot hold what the recipe multiplies; a linear module follows no recipe or has no name
            that servers know; ``inputs`` is missing where it is needed, lacks a layer, or is given and the recipe
            casts no input; a weight holds a NaN or an Inf; ``weights`` lacks a parameter or has another shape; the
            files read back differ, or a reader takes them for other numbers; a tensor of the model has the name of a
            part of a weight in codes; ``directory`` is not empty.
        NotImplementedError: transformers writes a parameter of the model in another way than in parts of its rows.
        OSError: a file cannot be written, for example since the disk is full; nothing is left then.

    Source: vllm-project/compressed-tensors ``compressors``; NVIDIA/Model-Optimizer ``unified_export_hf.py``.
    """
    form = serving_format(format)
    require_model(model)
    require_recipe(recipe)
    max_shard_size = require_integer("max_shard_size", max_shard_size, 1)
    require_bools(force=force, progress=progress)
    require_one_of("requantize", requantize, (False, True, LOSSLESS))
    if not isinstance(verify, bool | Mapping | Tensor | tuple) and verify != "files":
        raise ValueError(f"verify must be True, False, 'files' or a batch of inputs, got {verify!r:.80}")
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(f"weights must map names to tensors, as TensorFolder does, got {weights!r:.80}")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        require_path("tokenizer", tokenizer)
    target = require_path("directory", directory)
    caches = {} if kv_cache is None else _cache_scales(form, model, kv_cache)
    tensors = ModelState(model, weights)
    layers, left_alone = export_layers(model, tensors, recipe, keep_high_precision, shared_scales, requantize)
    kinds = {name: _kind(layer, layers, inputs, requantize is True) for name, layer in layers.items()}
    _require_alike(layers, kinds)
    odd = next((layer for layer in layers.values() if layer.transposed), None)
    if odd is not None and form is not COMPRESSED_TENSORS:
        raise ValueError(
            f"{odd.name!r} is a Conv1D, whose 'weight' servers transpose as they load it, and a {form.name} checkpoint "
            f"keeps codes under that name: pass format={COMPRESSED_TENSORS.name!r}"
        )
    if inputs not in (None, "high_precision") and {way for _, way in kinds.values()} == {WEIGHT_ONLY}:
        raise ValueError("inputs has scales, and the recipe casts no input: leave it out, or pass the recipe that does")
    own = [owner for name in left_alone for owner in tensors.owners(name)]  # transformers leaves alone by these names
    ignore = list(dict.fromkeys((*left_alone, *own)))
    configuration = _configuration(form, model, kinds, ignore, kv_cache and kv_cache.format)
    is_read = verify is not False and not isinstance(verify, str)
    faults = known_faults(form, layers)
    notes = {} if is_read else faults
    _require_readable([f"{name!r}: {why}" for name, why in notes.items()], force)
    with whole_directory(target) as made, Slabs() as slabs:
        # First what takes no time and may be refused: a tokenizer that is not there, generation settings in conflict.
        for name, data in configuration.items():
            write_json(made / name, data)
        _copy_companions(made, model, tokenizer)
        writer = ShardWriter(made, max_shard_size)
        entries = _write(writer, form, layers, kinds, inputs, tensors, slabs, progress, notes)
        for name, scale in caches.items():
            writer.add(name, scale)
        writer.finish()
        checkpoint = ServedCheckpoint(made)
        if verify is not False:
            compare(checkpoint, layers, left_alone, tensors, slabs, progress)
            assert all(torch.equal(checkpoint.tensors[name], scale) for name, scale in caches.items())
        found = (read_by_vllm(checkpoint, left_alone),)
        if is_read:
            found = (read_by_transformers(checkpoint, model, None if verify is True else verify), *found)
            if found[0].verdict == CANNOT_LOAD:  # which does not clear it of what is known of it
                _require_readable([f"{name!r}: {why}" for name, why in faults.items()], force)
        _require_readable([str(reading) for reading in found if reading.verdict == DIFFERS], force)
    return ExportReport(target, form.name, entries, left_alone, tensors.unused, found)


def _require_readable(faults: Sequence[str], force: bool) -> None:
    if faults and not force:
        rest = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(
            f"a reader would take the checkpoint for other numbers: {faults[0]}{rest}; nothing was written: force=True "
            "(--force) writes it for readers that do not"
        )


def _write(
    writer: ShardWriter,
    form: ServingFormat,
    layers: Mapping[str, ExportLayer],
    kinds: Mapping[str, Kind],
    inputs: Inputs,
    tensors: ModelState,
    slabs: Slabs,
    progress: bool,
    notes: Mapping[str, str],
) -> tuple[ExportedLayer, ...]:
    """Add every tensor of the model to ``writer``, weights in codes in their parts."""
    entries: list[ExportedLayer] = []
    amaxes = Amaxes(layers, tensors, slabs)
    for key in progress_bar(tensors.names, "export", "tensor", progress):
        name = key.removesuffix(".weight")
        if key == name or name not in layers:
            writer.add(key, tensors[key])
            continue
        layer = layers[name]
        weight, amax, own_amax = layer.weight(tensors), amaxes.shared(layer), amaxes.own(layer)
        parts, error = _encoded(form, layer, weight, amax, slabs)
        for part, tensor in zip(form.parts(layer.form), parts, strict=True):
            writer.add(f"{name}.{part}", tensor)
        input_amax, scale = None, form.input_scale(layer.form)
        if kinds[name][1] == STATIC and scale is not None:
            input_amax = layer.form.spec.numerator  # dynamic NVFP4: an outer scale of 1
            if isinstance(inputs, Mapping):
                input_amax = max(inputs[layers[sibling].module] for sibling in layer.group)
            stored = torch.tensor([input_amax], dtype=torch.float32)
            writer.add(f"{name}.{scale}", form.outer(layer.form, stored, layer.form.spec.numerator))
        added = 0.0
        if not torch.equal(amax, own_amax):
            added = error - _encoded(form, layer, weight, own_amax, slabs)[1]
        note = layer.requantized or notes.get(name, "") or ("stored as NVFP4 of the same values" * layer.is_recoded)
        described = (layer.spec.label, float(amax), float(own_amax), error, added, input_amax, note)
        entries.append(ExportedLayer(name, layer.shape, *described))
    return tuple(entries)


def _encoded(
    form: ServingFormat, layer: ExportLayer, weight: Tensor, amax: Tensor, slabs: Slabs
) -> tuple[tuple[Tensor, ...], float]:
    """The tensors of a weight, scaled by ``amax``, and ``|decoded - weight| / |weight|``."""
    if not layer.form.has_outer_scale:
        return encode(layer, weight, amax, 1.0, slabs)
    outer = form.outer(layer.form, amax, layer.numerator)
    parts, error = encode(layer, weight, amax, float(form.factor(layer.form, outer)), slabs)
    return (*parts, outer), error


def _kind(layer: ExportLayer, layers: Mapping[str, ExportLayer], inputs: Inputs, requantize: bool) -> Kind:
    """The form of ``layer``, and what servers do to its inputs."""
    if inputs is not None and not isinstance(inputs, Mapping) and inputs not in (DYNAMIC, "high_precision"):
        raise ValueError(f"inputs must be amaxes by layer, 'dynamic', 'high_precision' or None, got {inputs!r}")
    form, spec = layer.form, layer.input_spec
    if spec is None or inputs == "high_precision":
        return form, WEIGHT_ONLY
    fits = spec == form.spec
    if form is not NVFP4:  # whose scales servers choose by a rule of their own
        fits = form_of(spec.replace(block=(form.spec.block[0], spec.block[1]))) is form
    if not fits and not requantize:
        raise ValueError(
            f"the input of {layer.module!r} is multiplied as {spec.label!r}, and beside {form.name} servers cast "
            f"inputs to {form.spec.label!r} only; requantize=True (--requantize) serves that instead, "
            "inputs='high_precision' (--inputs high_precision) casts none"
        )
    if STATIC not in form.inputs:
        return form, DYNAMIC
    if inputs is None:
        raise ValueError(
            f"the recipe casts the input of {layer.module!r}, so servers need to be told how: give inputs= (on the "
            "command line --inputs) 'dynamic', or 'high_precision' for weights only, or what "
            "fp4engine.export.calibrate(model, batches) returns (there in a JSON file)"
        )
    if inputs == DYNAMIC:
        return form, STATIC if form is NVFP4 else DYNAMIC
    assert isinstance(inputs, Mapping)
    for name in dict.fromkeys(layers[sibling].module for sibling in layer.group):
        amax: Any = inputs.get(name)
        if not (is_number(amax) and 0 <= amax <= FLT_MAX):
            raise ValueError(f"inputs must have a finite FP32 amax >= 0 of {name!r}, got {amax!r:.80}")
    return form, STATIC


def _cache_scales(form: ServingFormat, model: nn.Module, kv_cache: KVCache) -> dict[str, Tensor]:
    """``name -> scale`` of the keys and values of every attention."""
    if not isinstance(kv_cache, KVCache):
        raise ValueError(f"kv_cache must be a KVCache, as calibrate_kv_cache returns it, got {kv_cache!r:.80}")
    require_one_of(f"kv_cache.format of a {form.name} checkpoint", kv_cache.format, form.cache_formats)
    names = set(attention_modules(model).values())
    if odd := sorted(names.symmetric_difference(kv_cache.amaxes)):
        fault = "lacks" if odd[0] in names else "has, and the model has not,"
        raise ValueError(f"kv_cache {fault} amaxes of {odd[0]!r}")
    return {
        f"{name}.{part}": divide(torch.tensor([amax], dtype=torch.float32), E4M3_MAX)
        for name, pair in kv_cache.amaxes.items()
        for part, amax in zip(form.caches, pair, strict=True)
    }


def _require_alike(layers: Mapping[str, ExportLayer], kinds: Mapping[str, Kind]) -> None:
    """Raise unless layers that share scales have one form and outer scale, and one cast of inputs, as servers need."""
    for layer in layers.values():
        ways = {name: (layers[name].numerator, kinds[name]) for name in layer.group}
        if len(set(ways.values())) > 1:
            got = ", ".join(
                f"{name} in {form.name} with {top:g} / amax and inputs {way}"
                for name, (top, (form, way)) in ways.items()
            )
            raise ValueError(
                f"servers multiply {', '.join(ways)} as one matrix, with one outer scale and one cast of inputs, got "
                f"{got}; give them one recipe, or leave the group out of shared_scales (--no-shared-scales)"
            )


def _configuration(
    form: ServingFormat, model: nn.Module, kinds: Mapping[str, Kind], ignore: Sequence[str], kv_cache: str | None
) -> dict[str, dict[str, Any]]:
    """``file name -> contents``."""
    config: Any = getattr(model, "config", None)
    described: dict[str, Any] = {}
    if hasattr(config, "to_dict"):
        # What readers decode weights to, whatever the others are in: products need one dtype.
        described = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
        described.pop("quantization_config", None)  # of weights that are stored as codes in the model
    if form is COMPRESSED_TENSORS:
        section = compressed_tensors_config(kinds, ignore, kv_cache, needs_values_at_once(model))
        return {form.config_file: {**described, "quantization_config": section}}
    settings = {form.config_file: modelopt_config(kinds, ignore, kv_cache, __version__)}
    return settings | ({"config.json": described} if described else {})


def _copy_companions(directory: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write the generation settings, and the tokenizer."""
    settings = getattr(model, "generation_config", None)
    if settings is not None and hasattr(settings, "save_pretrained"):
        settings.save_pretrained(directory)
    if tokenizer is None:
        return
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(directory)
        return
    if not any(name in TOKENIZER for name in copy_files(Path(tokenizer), directory)):
        raise ValueError(f"tokenizer must be a directory with a tokenizer's files, or a tokenizer; got {tokenizer!r}")
