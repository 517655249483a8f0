"""Whether a checkpoint on the disk is the model: read back by two readers, and run.

Legend: N out_features, K in_features of a weight [N, K].
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine.arguments import require_model, require_path
from fp4engine.export.layers import Amaxes, ExportLayer, export_layers
from fp4engine.export.progress import progress_bar
from fp4engine.export.reader import CheckpointError, ServedCheckpoint
from fp4engine.export.serving_format import COMPRESSED_TENSORS, ServingFormat, is_ignored
from fp4engine.export.slabs import Slabs
from fp4engine.export.state import ModelState
from fp4engine.formats import CastSpec
from fp4engine.modules import QuantizedWeight
from fp4engine.modules.adoption import is_conv1d
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.quantizers import IdentityQuantizer, Quantizer, make_quantizer
from fp4engine.recipe import CustomRecipe, Recipe
from fp4engine.reference import decode
from fp4engine.roles import QuantizerRole
from fp4engine.state import autocast


@dataclass(frozen=True)
class Verification:
    """What :func:`verify_checkpoint` has compared and found equal.

    Attributes:
        layers: FP4 weights compared.
        bytes_compared: bytes of their codes, block scales and outer scales.
        others: tensors compared that are not FP4.
    """

    layers: int
    bytes_compared: int
    others: int

    def __str__(self) -> str:
        return (
            f"{self.layers} FP4 weights ({self.bytes_compared:,} bytes of codes and scales) and {self.others} other "
            "tensors read back: 0 bytes differ from the model, and compressed-tensors decodes them to the same values"
        )


def verify_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    keep_high_precision: Sequence[str] = (),
    shared_scales: Sequence[Sequence[str]] = SHARED_SCALES,
    requantize: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    progress: bool = True,
) -> Verification:
    """Read ``directory`` back and compare it with ``model``; arguments as in
    :func:`~fp4engine.export.export_checkpoint`.

    Codes, block scales and outer scales are compared, byte for byte, with the operand that the recipe's quantizer makes
    of the whole weight. The package ``compressed_tensors``, which shares no code with this one, then decodes what is in
    the files: without the outer scale, where BF16 holds every product of element and block scale exactly, its values
    have to be the same bits.

    Raises:
        CheckpointError: a tensor differs, is missing or should not be there; the message names the first one.
        ImportError: ``compressed_tensors`` is not installed.
        ValueError: ``model`` is no module, or ``directory`` no path.
    """
    require_model(model)
    path = require_path("directory", directory)
    state = ModelState(model, weights)
    layers, left_alone = export_layers(model, state, recipe, keep_high_precision, shared_scales, requantize)
    with Slabs() as slabs:
        return compare(path, layers, left_alone, state, slabs, progress)


def compare(
    directory: Path,
    layers: Mapping[str, ExportLayer],
    left_alone: Iterable[str],
    state: ModelState,
    slabs: Slabs,
    progress: bool,
) -> Verification:
    """As :func:`verify_checkpoint`, with the layers and tensors that it has found."""
    checkpoint = ServedCheckpoint(directory)
    _same_names(checkpoint, layers, left_alone, state)
    amaxes = Amaxes(layers, state, slabs)
    compared = others = 0
    for key in progress_bar(state.names, "verify", "tensor", progress):
        name = key.removesuffix(".weight")
        if key == name or name not in layers:
            others += 1
            _same(directory, key, checkpoint.tensors[key], state[key])
            continue
        layer, amax = layers[name], amaxes.of(layers[name].group)
        codes, scales, outer = checkpoint.operand(name)
        expected = (*_operand(layer, layers, state, amax), checkpoint.form.outer(amax, layer.spec.numerator))
        for part, got, wanted in zip(checkpoint.form.weight_parts, (codes, scales, outer), expected, strict=True):
            _same(directory, f"{name}.{part}", got, wanted)
            compared += got.nbytes
        if not torch.equal(independent_values(checkpoint.form, codes, scales), decode(codes, scales, CastSpec())):
            raise CheckpointError(f"{directory}: compressed-tensors decodes {name!r} to other values")
    return Verification(len(layers), compared, others)


def independent_values(form: ServingFormat, codes: Tensor, scales: Tensor) -> Tensor:
    """``element * block scale`` FP32 [N, K] as the package ``compressed_tensors`` decodes it, exactly.

    A ModelOpt weight goes through that package's converter first.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from compressed_tensors.compressors import NVFP4PackedCompressor
        from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.quant_scheme import NVFP4A16
    except ImportError as error:
        raise ImportError(
            "verification reads the files with the package compressed-tensors too: pip install fp4engine[export]"
        ) from error
    one = torch.ones(1, dtype=torch.float32)
    parts = dict(zip((f"layer.{part}" for part in form.weight_parts), (codes, scales, one), strict=True))
    if form is not COMPRESSED_TENSORS:
        parts = ModelOptNvfp4Converter(targets=["layer"]).process(parts)
    state = {name.removeprefix("layer."): tensor for name, tensor in parts.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4A16["weights"])
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()


def _operand(
    layer: ExportLayer, layers: Mapping[str, ExportLayer], state: ModelState, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of the layer: its rows of the whole operand of the model, which is cast in one call."""
    parts = [layers[name].weight(state).detach() for name in layer.operand]
    own = parts[layer.operand.index(layer.name)]
    if isinstance(own, QuantizedWeight) and torch.equal(own.tensors()[2].cpu(), amax):
        return own.tensors()[0], own.tensors()[1]
    values = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
    weight = values[0] if len(values) == 1 else torch.cat(values)
    operand = layer.quantizer.quantize(weight.detach(), columnwise=False, rowwise_amax=amax.to(weight.device)).rowwise
    assert operand is not None and operand.scale_inv is not None
    start = sum(layers[name].shape[0] for name in layer.operand[: layer.operand.index(layer.name)])
    rows = slice(start, start + layer.shape[0])
    return operand.codes[rows], operand.scale_inv[rows]


def _same(directory: Path, name: str, got: Tensor, wanted: Tensor) -> None:
    wanted = wanted.detach().cpu()
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
    expected = {f"{name}.{part}" for name in layers for part in form.weight_parts}
    expected |= {name for name in state.names if name.removesuffix(".weight") not in layers}
    optional = {f"{name}.{form.input_scale}" for name in layers}
    for name in sorted((set(checkpoint.tensors) ^ expected) - optional):
        fault = "is not in it" if name in expected else "is in it and not in the model"
        raise CheckpointError(f"{directory}: {name!r} {fault}")
    for name in left_alone:
        if not is_ignored(name, checkpoint.ignored):
            raise CheckpointError(f"{directory}: {name!r} stayed as it was, and the configuration does not say so")


def weights_only(recipe: Recipe) -> Recipe:
    """``recipe`` with its weights as they are in its forward pass, and inputs in high precision: W4A16."""

    def quantizer(role: QuantizerRole) -> Quantizer:
        if role.tensor_type != "weight":
            return IdentityQuantizer()
        full = make_quantizer(recipe, role)
        return Quantizer(full.rowwise_spec, backend=full.backend) if full.only_casts else full

    return CustomRecipe(qfactory=quantizer)


def logits_difference(
    model: nn.Module,
    directory: str | os.PathLike[str],
    batch: Any,
    recipe: Recipe,
    *,
    reader: Literal["transformers", "fp4engine"] = "transformers",
) -> float:
    """``|served - trained| / |trained|`` of the logits (Frobenius) of a checkpoint.

    ``served`` is what transformers computes with the decoded weights, in FP32. ``trained`` is ``model`` with the FP4
    weights of ``recipe``, inputs in high precision.

    Args:
        model: a ``PreTrainedModel`` with FP32 parameters.
        batch: ``input_ids``.
        reader: whose code decodes the checkpoint. That of transformers rounds weights to BF16, which should be the
            only difference; it reads neither ModelOpt nor ``Conv1D``, and leaves out the outer scale of experts
            (transformers 5.23). ``"fp4engine"`` is :class:`ServedCheckpoint`, in FP32.

    Raises:
        ValueError: the parameters are not FP32, whose rounding would hide what is compared; ``reader`` cannot read the
            checkpoint, or is another word.
    """
    from transformers.utils.quantization_config import CompressedTensorsConfig

    kind: Any = type(model)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("logits are compared in FP32: call model.float() first")
    checkpoint = ServedCheckpoint(Path(directory))
    if reader == "fp4engine":
        source, arguments = None, {"config": model.config, "state_dict": _decoded(checkpoint, model)}
    elif reader == "transformers":
        linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        others = [layer for layer in checkpoint.layers if layer not in linears]
        if others or checkpoint.form is not COMPRESSED_TENSORS:
            what = f"{others[0]!r}, which is no nn.Linear of the model" if others else f"a {checkpoint.form.name} one"
            raise ValueError(f"transformers does not decode {what}: pass reader='fp4engine'")
        source, arguments = directory, {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    else:
        raise ValueError(f"reader must be 'transformers' or 'fp4engine', got {reader!r}")
    served = kind.from_pretrained(source, dtype=torch.float32, **arguments)
    with torch.no_grad():
        with autocast(recipe=weights_only(recipe)):
            trained = model(batch).logits
        return float((served(batch).logits - trained).norm() / trained.norm())


def _decoded(checkpoint: ServedCheckpoint, model: nn.Module) -> dict[str, Tensor]:
    """All tensors of ``checkpoint`` by the names that checkpoints in high precision have."""
    parts = (*checkpoint.form.weight_parts, checkpoint.form.input_scale)
    stored = {f"{layer}.{part}" for layer in checkpoint.layers for part in parts}
    transposed = {name for name, module in model.named_modules() if is_conv1d(module)}
    tensors = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name not in stored}
    for layer in checkpoint.layers:
        weight = checkpoint.weight(layer)
        tensors[f"{layer}.weight"] = weight.T.contiguous() if layer in transposed else weight
    return tensors
