"""A trained model as a checkpoint that servers load: the codes and scales that its forward pass multiplied.

Legend: N out_features, K in_features of a weight [N, K].
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine.accounting.table import table
from fp4engine.arguments import is_number, require_bool, require_integer, require_model, require_path
from fp4engine.constants import FLT_MAX
from fp4engine.export.layers import Amaxes, ExportLayer, encode, export_layers
from fp4engine.export.progress import progress_bar
from fp4engine.export.serving_format import (
    COMPRESSED_TENSORS,
    DYNAMIC,
    STATIC,
    WEIGHT_ONLY,
    ServingFormat,
    compressed_tensors_config,
    modelopt_config,
    serving_format,
)
from fp4engine.export.slabs import Slabs
from fp4engine.export.state import ModelState
from fp4engine.export.verification import compare
from fp4engine.export.writer import ShardWriter, whole_directory, write_json
from fp4engine.formats import CastSpec
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.version import __version__

Inputs = Mapping[str, float] | Literal["dynamic", "high_precision"] | None
"""Amaxes by layer from :func:`~fp4engine.export.calibrate`, or how inputs are treated without them."""

_CONFIGURATIONS = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a tokenizer may consist of."""


@dataclass(frozen=True)
class ExportedLayer:
    """One FP4 weight of an exported checkpoint.

    Attributes:
        name: the module's dotted name in checkpoints.
        shape: (N, K).
        cast: the weight's cast, in words.
        amax: outer amax that the weight was scaled by: that of its group, if it shares scales.
        own_amax: outer amax of the weight itself. Gate and up of an expert, which the model multiplies as one matrix,
            have that of both.
        error: ``|decoded - weight| / |weight|`` (Frobenius) of what was written.
        added_error: ``error`` less the error under the weight's own amax, which is what sharing a scale costs; 0 if
            ``amax`` is its own, so that the bytes are those that trained.
        input_amax: amax that inputs are scaled by; None under weight-only and dynamic inputs.
        requantized: why the cast is not the recipe's; empty if it is.
    """

    name: str
    shape: tuple[int, int]
    cast: str
    amax: float
    own_amax: float
    error: float
    added_error: float
    input_amax: float | None
    requantized: str


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export_checkpoint` wrote; ``print(report)`` shows it as a table.

    Attributes:
        directory: of the checkpoint.
        format: ``"compressed-tensors"`` or ``"modelopt"``.
        layers: the FP4 weights, in the model's order.
        left_alone: ``module in checkpoints -> why it stayed as it was``, of all other modules that multiply.
        unused: names in ``weights`` that the model has no tensor for, which were not written.
    """

    directory: Path
    format: str
    layers: tuple[ExportedLayer, ...]
    left_alone: dict[str, str]
    unused: tuple[str, ...] = ()

    @property
    def rescaled(self) -> tuple[ExportedLayer, ...]:
        """The layers whose bytes differ from those that trained, since a sibling has the larger amax."""
        return tuple(layer for layer in self.layers if layer.amax != layer.own_amax)

    def __str__(self) -> str:
        header = ("layer", "N x K", "cast", "amax", "error", "added by sharing", "input amax", "note")
        others = [(name, *("",) * 6, why) for name, why in self.left_alone.items()]
        lines = [table(header, [*map(_row, self.layers), *others])]
        if self.unused:
            lines.append(f"{len(self.unused)} tensors of weights are none of the model's, e.g. {self.unused[0]!r}")
        lines.append(
            f"{len(self.layers)} weights in FP4, {len(self.rescaled)} of them rescaled by a sibling's amax, "
            f"{len(self.left_alone)} modules left alone: {self.format} in {self.directory}"
        )
        return "\n".join(lines)


def _row(layer: ExportedLayer) -> tuple[str, ...]:
    shared = f"{layer.added_error:+.2%}" if layer.amax != layer.own_amax else "-"
    inputs = "-" if layer.input_amax is None else f"{layer.input_amax:.4g}"
    shape = f"{layer.shape[0]} x {layer.shape[1]}"
    return layer.name, shape, layer.cast, f"{layer.amax:.4g}", f"{layer.error:.2%}", shared, inputs, layer.requantized


def export_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = "compressed-tensors",
    *,
    recipe: Recipe | None = None,
    inputs: Inputs = None,
    keep_high_precision: Sequence[str] = (),
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    requantize: bool = False,
    verify: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    tokenizer: str | os.PathLike[str] | Any = None,
    max_shard_size: int = 2 << 30,
    progress: bool = True,
) -> ExportReport:
    """Write ``model`` as a checkpoint that servers load: sharded safetensors, index, configuration, tokenizer.

        value = element * block scale * (amax / numerator)

    Codes and scales are those of the weight operand in the recipe's forward pass, bit for bit; 16x16 tiles repeat their
    scale in each row. Siblings that servers multiply as one matrix share their largest amax, so those with a smaller
    one are cast again by it: the report has the error that this adds. Experts that transformers holds in one parameter
    are written one by one, as in the model's own checkpoints. All other tensors stay as they are.

    The checkpoint is written to a hidden directory beside ``directory`` and moved into place as the last step.

    Args:
        model: converted by :func:`fp4engine.convert`, parameters on any device, or on ``meta`` with ``weights``.
        directory: created; must not exist, or be empty.
        format: ``"compressed-tensors"`` or ``"modelopt"``.
        recipe: what the model was trained by; None takes the recipe that each module was converted with.
        inputs: how servers cast inputs; needed if the recipe casts them: amaxes by layer from :func:`calibrate`,
            ``"dynamic"`` (block scales without an outer scale) or ``"high_precision"`` (W4A16).
        keep_high_precision: patterns as in :func:`fp4engine.convert`: modules to write as they are.
        shared_scales: names of siblings that share outer scales; ``()`` shares none.
        requantize: cast weights and inputs that the formats cannot hold to nearest NVFP4, and say so in the report.
        verify: read the files back before they are moved into place, see :func:`verify_checkpoint`.
        weights: a mapping from which parameters are taken one at a time instead of from the model, by their names in
            checkpoints: ``TensorFolder(directory)`` of what ``save_pretrained`` wrote.
        tokenizer: directory to copy a tokenizer's files from, or an object with ``save_pretrained``.
        max_shard_size: bytes of a file, and about half of the memory that writing takes.
        progress: show a bar on a terminal.

    Raises:
        ValueError: the formats cannot hold what the recipe multiplies; a linear module follows no recipe or has no name
            that servers know; ``inputs`` is missing where it is needed, lacks a layer, or is given and the recipe
            casts no input; a weight holds a NaN or an Inf; ``weights`` lacks a parameter or has another shape; the
            files read back differ; a tensor of the model has the name of a part of an FP4 weight; ``directory`` is not
            empty.
        NotImplementedError: transformers writes a parameter of the model in another way than in parts of its rows.
        OSError: a file cannot be written, for example since the disk is full; nothing is left then.

    Source: vllm-project/compressed-tensors ``compressors/nvfp4``; NVIDIA/Model-Optimizer ``unified_export_hf.py``.
    """
    form = serving_format(format)
    require_model(model)
    require_recipe(recipe)
    max_shard_size = require_integer("max_shard_size", max_shard_size, 1)
    for flag, value in (("requantize", requantize), ("verify", verify), ("progress", progress)):
        require_bool(flag, value)
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(f"weights must map names to tensors, as TensorFolder does, got {weights!r:.80}")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        require_path("tokenizer", tokenizer)
    target = require_path("directory", directory)
    tensors = ModelState(model, weights)
    layers, left_alone = export_layers(model, tensors, recipe, keep_high_precision, shared_scales, requantize)
    _require_form(form, layers)
    schemes = {name: _scheme(layer, layers, inputs, requantize) for name, layer in layers.items()}
    _require_alike(layers, schemes)
    if inputs not in (None, "high_precision") and set(schemes.values()) == {WEIGHT_ONLY}:
        raise ValueError("inputs has scales, and the recipe casts no input: leave it out, or pass the recipe that does")
    configuration = _configuration(form, model, tensors, schemes, list(left_alone))
    with whole_directory(target) as made, Slabs() as slabs:
        writer = ShardWriter(made, max_shard_size)
        entries = _write(writer, form, layers, schemes, inputs, tensors, slabs, progress)
        writer.finish()
        for name, data in configuration.items():
            write_json(made / name, data)
        _copy_companions(made, model, tokenizer)
        if verify:
            compare(made, layers, left_alone, tensors, slabs, progress)
    return ExportReport(target, form.name, entries, left_alone, tensors.unused)


def _require_form(form: ServingFormat, layers: Mapping[str, ExportLayer]) -> None:
    """Raise if servers would misread a layer in this format."""
    odd = next((layer for layer in layers.values() if layer.transposed), None)
    if odd is not None and form is not COMPRESSED_TENSORS:
        raise ValueError(
            f"{odd.name!r} is a Conv1D, whose 'weight' servers transpose as they load it, and a {form.name} checkpoint "
            f"keeps codes under that name: pass format={COMPRESSED_TENSORS.name!r}"
        )


def _write(
    writer: ShardWriter,
    form: ServingFormat,
    layers: Mapping[str, ExportLayer],
    schemes: Mapping[str, str],
    inputs: Inputs,
    tensors: ModelState,
    slabs: Slabs,
    progress: bool,
) -> tuple[ExportedLayer, ...]:
    """Add every tensor of the model to ``writer``, FP4 weights in their parts."""
    entries: list[ExportedLayer] = []
    amaxes = Amaxes(layers, tensors, slabs)
    for key in progress_bar(tensors.names, "export", "tensor", progress):
        name = key.removesuffix(".weight")
        if key == name or name not in layers:
            writer.add(key, tensors[key])
            continue
        layer = layers[name]
        weight, amax, own_amax = layer.weight(tensors), amaxes.of(layer.group), amaxes.of(layer.operand)
        outer, own_outer = (form.outer(each, layer.spec.numerator) for each in (amax, own_amax))
        codes, scales, error = encode(layer, weight, amax, float(form.factor(outer)), slabs)
        for part, tensor in zip(form.weight_parts, (codes, scales, outer), strict=True):
            writer.add(f"{name}.{part}", tensor)
        input_amax = None
        if schemes[name] == STATIC:
            assert isinstance(inputs, Mapping)
            input_amax = max(inputs[layers[sibling].module] for sibling in layer.group)
            stored = form.outer(torch.tensor([input_amax], dtype=torch.float32), CastSpec().numerator)
            writer.add(f"{name}.{form.input_scale}", stored)
        added = 0.0
        if not torch.equal(amax, own_amax):
            added = error - encode(layer, weight, own_amax, float(form.factor(own_outer)), slabs)[2]
        described = (layer.spec.label, float(amax), float(own_amax), error, added, input_amax, layer.requantized)
        entries.append(ExportedLayer(name, layer.shape, *described))
    return tuple(entries)


def _scheme(layer: ExportLayer, layers: Mapping[str, ExportLayer], inputs: Inputs, requantize: bool) -> str:
    """What servers do to the inputs of ``layer``."""
    if inputs is not None and not isinstance(inputs, Mapping) and inputs not in (DYNAMIC, "high_precision"):
        raise ValueError(f"inputs must be amaxes by layer, 'dynamic', 'high_precision' or None, got {inputs!r}")
    if layer.input_spec is None or inputs == "high_precision":
        return WEIGHT_ONLY
    if layer.input_spec != CastSpec() and not requantize:
        raise ValueError(
            f"the input of {layer.module!r} is multiplied as {layer.input_spec.label!r}, and servers cast inputs to "
            f"{CastSpec().label!r} only; requantize=True (--requantize) serves that instead, "
            "inputs='high_precision' (--inputs high_precision) casts none"
        )
    if inputs is None:
        raise ValueError(
            f"the recipe casts the input of {layer.module!r}, so servers need to be told how: give inputs= (on the "
            "command line --inputs) 'dynamic', or 'high_precision' for FP4 weights only, or what "
            "fp4engine.export.calibrate(model, batches) returns (there in a JSON file)"
        )
    if inputs == DYNAMIC:
        return DYNAMIC
    assert isinstance(inputs, Mapping)
    for name in dict.fromkeys(layers[sibling].module for sibling in layer.group):
        amax: Any = inputs.get(name)
        if not (is_number(amax) and 0 <= amax <= FLT_MAX):
            raise ValueError(f"inputs must have a finite FP32 amax >= 0 of {name!r}, got {amax!r:.80}")
    return STATIC


def _require_alike(layers: Mapping[str, ExportLayer], schemes: Mapping[str, str]) -> None:
    """Raise unless layers that share scales have one outer scale, and one way to cast inputs, as servers need them."""
    for layer in layers.values():
        ways = {name: (layers[name].spec.numerator, schemes[name]) for name in layer.group}
        if len(set(ways.values())) > 1:
            got = ", ".join(f"{name} with {top:g} / amax and inputs {scheme}" for name, (top, scheme) in ways.items())
            raise ValueError(
                f"servers multiply {', '.join(ways)} as one matrix, with one outer scale and one cast of inputs, got "
                f"{got}; give them one recipe, or leave the group out of shared_scales (--no-shared-scales)"
            )


def _configuration(
    form: ServingFormat, model: nn.Module, tensors: ModelState, schemes: Mapping[str, str], ignore: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """``file name -> contents``."""
    config: Any = getattr(model, "config", None)
    described: dict[str, Any] = {}
    if hasattr(config, "to_dict"):
        dtypes = (tensors[name].dtype for name in tensors.names)
        dtype = next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point), None)
        described = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}  # as save_pretrained
        described.pop("quantization_config", None)  # of weights that are stored as codes in the model
    if form is COMPRESSED_TENSORS:
        return {form.config_file: {**described, "quantization_config": compressed_tensors_config(schemes, ignore)}}
    settings = {form.config_file: modelopt_config(schemes, ignore, __version__)}
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
    source = Path(tokenizer)
    found = [name for name in (*TOKENIZER, *_CONFIGURATIONS) if (source / name).is_file()]
    if not any(name in TOKENIZER for name in found):
        raise ValueError(f"tokenizer must be a directory with a tokenizer's files, or a tokenizer; got {tokenizer!r}")
    for name in found:
        shutil.copyfile(source / name, directory / name)
