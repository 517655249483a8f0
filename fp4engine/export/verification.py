"""Whether a checkpoint on the disk is the model, byte for byte, and what each reader makes of it.

Legend: N out_features, K in_features of a weight [N, K].
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine.arguments import require_model, require_path
from fp4engine.export.layers import Amaxes, ExportLayer, Requantize, export_layers
from fp4engine.export.reader import CheckpointError, ServedCheckpoint
from fp4engine.export.readers import Reading, read_by_transformers, read_by_vllm
from fp4engine.export.serving_format import COMPRESSED_TENSORS, NVFP4, compression_format, is_named
from fp4engine.export.slabs import Slabs, progress_bar
from fp4engine.export.state import ModelState
from fp4engine.formats import Outer
from fp4engine.modules import QuantizedWeight
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.recipe import Recipe


@dataclass(frozen=True)
class Verification:
    """What :func:`verify_checkpoint` has compared and found equal.

    Attributes:
        layers: weights in codes compared.
        bytes_compared: bytes of their codes, block scales and outer scales.
        others: tensors compared that are in high precision.
        readers: what each reader makes of the checkpoint.
    """

    layers: int
    bytes_compared: int
    others: int
    readers: tuple[Reading, ...] = ()

    def __str__(self) -> str:
        own = (
            f"{self.layers} weights ({self.bytes_compared:,} bytes of codes and scales) and {self.others} other "
            "tensors read back: 0 bytes differ from the model, and compressed-tensors decodes them to the same values"
        )
        return "\n".join((own, *map(str, self.readers)))


def verify_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    keep_high_precision: Sequence[str] = (),
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    requantize: Requantize = False,
    weights: Mapping[str, Tensor] | None = None,
    sample: Any = None,
    progress: bool = True,
) -> Verification:
    """Read ``directory`` back and compare it with ``model``, then let readers load and run it; arguments as in
    :func:`~fp4engine.export.export_checkpoint`.

    Codes, block scales and outer scales are compared, byte for byte, with the operand that the recipe's quantizer makes
    of the whole weight. The package ``compressed_tensors``, which shares no code with this one, then decodes what is in
    the files: without the outer scale, where every product of element and block scale is exact, its values have to be
    the same bits. Scales of inputs come from a calibration, which this does not repeat, and are compared with those of
    siblings alone.

    Transformers loads the directory by ``from_pretrained`` alone and runs it. Then every weight that it decoded, and in
    FP32 the output of every block and the logits, are compared with the same model's under the weights that this
    package decodes. vLLM is not run: the rules of its loader are followed on the names, shapes and scales in the files.

    Raises:
        CheckpointError: a tensor differs, is missing or should not be there; the message names the first one.
        ImportError: ``compressed_tensors`` is not installed.
        ValueError: ``model`` is no module, or ``directory`` no path.
    """
    require_model(model)
    path = require_path("directory", directory)
    state = ModelState(model, weights)
    layers, left_alone = export_layers(model, state, recipe, keep_high_precision, shared_scales, requantize)
    checkpoint = ServedCheckpoint(path)
    with Slabs() as slabs:
        found = compare(checkpoint, layers, left_alone, state, slabs, progress)
    readers = (read_by_transformers(checkpoint, model, sample), read_by_vllm(checkpoint, left_alone))
    return Verification(*found, readers)


def compare(
    checkpoint: ServedCheckpoint,
    layers: Mapping[str, ExportLayer],
    left_alone: Iterable[str],
    state: ModelState,
    slabs: Slabs,
    progress: bool,
) -> tuple[int, int, int]:
    """``(weights in codes, their bytes, other tensors)`` that are the same in the model, if all are.

    Raises:
        CheckpointError: a tensor differs, is missing or should not be there.
    """
    directory = checkpoint.tensors.directory
    _same_names(checkpoint, layers, left_alone, state)
    amaxes = Amaxes(layers, state, slabs)
    compared = others = 0
    for key in progress_bar(state.names, "verify", "tensor", progress):
        name = key.removesuffix(".weight")
        if key == name or name not in layers:
            others += 1
            _same(directory, key, checkpoint.tensors[key], state[key])
            continue
        layer, amax = layers[name], amaxes.shared(layers[name])
        expected = layer.stored(*_operand(layer, layers, state, amax), amax)
        if layer.form.has_outer_scale:
            expected = (*expected, checkpoint.form.outer(layer.form, amax, layer.numerator))
        stored = checkpoint.parts(name)
        for (part, got), wanted in zip(stored.items(), expected, strict=True):
            _same(directory, f"{name}.{part}", got, wanted)
            compared += got.nbytes
        codes, scales, _ = checkpoint.operand(name)
        if not torch.equal(independent_values(checkpoint, name), layer.form.decode(codes, scales)):
            raise CheckpointError(f"{directory}: compressed-tensors decodes {name!r} to other values")
    return len(layers), compared, others


def independent_values(checkpoint: ServedCheckpoint, layer: str) -> Tensor:
    """``element * block scale`` FP32 [N, K] as the package ``compressed_tensors`` decodes it, exactly.

    A weight in NVFP4 of ModelOpt's goes through that package's converter first.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
        from compressed_tensors.quantization import QuantizationScheme
    except ImportError as error:
        raise ImportError(
            "verification reads the files with the package compressed-tensors too: pip install fp4engine[export]"
        ) from error
    kind, state = checkpoint.layers[layer], checkpoint.parts(layer)
    outer = checkpoint.form.names[kind[0]][2]
    if outer is not None:
        state[outer] = torch.ones(1, dtype=torch.float32)
    if kind[0] is NVFP4 and checkpoint.form is not COMPRESSED_TENSORS:
        converted = ModelOptNvfp4Converter(targets=["layer"]).process({f"layer.{k}": v for k, v in state.items()})
        state = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": kind[0].arguments})
    compressor: Any = BaseCompressor.get_value_from_registry(compression_format(kind))
    return compressor.decompress(state, scheme)["weight"].float()


def _operand(
    layer: ExportLayer, layers: Mapping[str, ExportLayer], state: ModelState, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of the layer: its rows of the whole operand of the model, which is cast in one call."""
    parts = [layers[name].weight(state).detach() for name in layer.operand]
    own = parts[layer.operand.index(layer.name)]
    if isinstance(own, QuantizedWeight):
        codes, scales, outer = own.tensors()[:3]
        if layer.spec.outer is Outer.NONE or torch.equal(outer.cpu(), amax):
            return codes, scales
    values = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
    weight = values[0] if len(values) == 1 else torch.cat(values)
    operand = layer.quantizer.quantize(weight.detach(), columnwise=False, rowwise_amax=amax.to(weight.device)).rowwise
    assert operand is not None and operand.scale_inv is not None
    start = sum(layers[name].shape[0] for name in layer.operand[: layer.operand.index(layer.name)])
    rows = slice(start, start + layer.shape[0])
    return operand.codes[rows], operand.scale_inv[rows]


def _same(directory: Path, name: str, got: Tensor, wanted: Tensor) -> None:
    wanted = wanted.detach().cpu().resolve_neg().resolve_conj()
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise CheckpointError(
            f"{directory}: {name!r} is {got.dtype} {list(got.shape)}, the model has {wanted.dtype} {list(wanted.shape)}"
        )
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (got, wanted))
    if differing := int((left != right).sum()):
        raise CheckpointError(f"{directory}: {differing} of {left.numel()} bytes of {name!r} differ from the model's")


def _same_names(
    checkpoint: ServedCheckpoint, layers: Mapping[str, ExportLayer], left_alone: Iterable[str], state: ModelState
) -> None:
    form, directory = checkpoint.form, checkpoint.tensors.directory
    expected = {f"{name}.{part}" for name, layer in layers.items() for part in form.parts(layer.form)}
    expected |= {name for name in state.names if name.removesuffix(".weight") not in layers}
    optional = set(checkpoint.cache_scales) | {
        f"{name}.{form.input_scale(layer.form)}" for name, layer in layers.items()
    }
    for name in sorted((set(checkpoint.tensors) ^ expected) - optional):
        fault = "is not in it" if name in expected else "is in it and not in the model"
        raise CheckpointError(f"{directory}: {name!r} {fault}")
    for name in left_alone:
        if not is_named(name, checkpoint.ignored):
            raise CheckpointError(f"{directory}: {name!r} stayed as it was, and the configuration does not say so")
