"""Who loads a checkpoint, and whether it takes it for what trained: transformers, and vLLM by its rules."""

import contextlib
import io
import warnings
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4engine.arguments import one_line
from fp4engine.export import vllm_rules
from fp4engine.export.layers import ExportLayer
from fp4engine.export.reader import ServedCheckpoint
from fp4engine.export.serving_format import COMPRESSED_TENSORS, NVFP4, ServingFormat, expert_stack
from fp4engine.formats import E4M3
from fp4engine.modules.adoption import is_conv1d
from fp4engine.positions import positions_of

AGREES, DIFFERS, CANNOT_LOAD, NOT_RUN = "agrees", "differs", "cannot load", "not run"
_SAID = {AGREES: "loads and agrees", DIFFERS: "loads and DIFFERS", CANNOT_LOAD: "cannot load", NOT_RUN: "was not run"}

_WEIGHTS_WITHIN, _OUTPUTS_WITHIN = 2.0**-6, 0.05
"""Relative differences: of decoded weights, which readers round to BF16 up to three times; of what they compute."""


@dataclass(frozen=True)
class Reading:
    """What a reader makes of a checkpoint.

    Attributes:
        reader: its name and version.
        verdict: ``"agrees"``, ``"differs"``, ``"cannot load"`` or ``"not run"``.
        why: what differs, or fails, or is left out; may be empty.
        blocks: ``block -> |read - meant| / |meant|`` (Frobenius) of the block's output in FP32, with inputs in high
            precision, in the order in which blocks run.
        logits: the same relative difference of the logits; None if none were computed.
        as_served: the same of the logits that the reader computes in BF16, with the casts of inputs that it knows.
    """

    reader: str
    verdict: Literal["agrees", "differs", "cannot load", "not run"]
    why: str = ""
    blocks: Mapping[str, float] | None = None
    logits: float | None = None
    as_served: float | None = None

    def __str__(self) -> str:
        figures = ""
        if self.logits is not None:
            figures = f"its logits in FP32 differ by {self.logits:.1e}"
            if self.blocks:
                difference, worst = max((difference, name) for name, difference in self.blocks.items())
                figures += f" (of {len(self.blocks)} blocks, {worst} by most, {difference:.1e})"
            figures += "" if self.as_served is None else f", and as it computes them by {self.as_served:.1e}"
        words = "; ".join(filter(None, (self.why, figures)))
        return f"{self.reader} {_SAID[self.verdict]}{': ' * bool(words)}{words}"


def read_by_vllm(checkpoint: ServedCheckpoint, left_alone: Collection[str]) -> Reading:
    """What vLLM makes of a checkpoint by the rules of its loader.

    Args:
        left_alone: names of modules that multiply and are in high precision.
    """
    return Reading("vLLM (its loading rules, not run)", *vllm_rules.read(checkpoint, left_alone))


def known_faults(form: ServingFormat, layers: Mapping[str, ExportLayer]) -> dict[str, str]:
    """``layer -> why`` of the layers that transformers 5.23 would take for other numbers."""
    found: dict[str, str] = {}
    if form is not COMPRESSED_TENSORS:  # of which transformers knows nothing, and loads what has the right shape
        if any(layer.form.spec.element != E4M3 for layer in layers.values()):
            return {}
        return dict.fromkeys(layers, "transformers takes codes in FP8 for numbers in a checkpoint of ModelOpt's")
    for name, layer in layers.items():
        if layer.transposed:
            found[name] = "transformers reads codes of nn.Linear only, and leaves the weight of a Conv1D at random"
        elif layer.form is NVFP4 and expert_stack(name):
            found[name] = "transformers leaves out the outer scale of experts (5.23 does; verify=True asks yours)"
    return found


def needs_values_at_once(model: nn.Module) -> bool:
    """Whether transformers can load weights in codes of this model only if it decodes them at once.

    It removes the ``weight`` of such modules until the first forward. Some models, such as T5, have to look at the
    weights of their submodules before that, to initialise what no file has.
    """
    initialise, config = getattr(model, "_init_weights", None), getattr(model, "config", None)
    if not callable(initialise) or config is None:
        return False
    twin = on_meta(type(model), config)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("weight", None)
            del module._parameters["weight"]
    try:
        with torch.no_grad():
            for module in twin.modules():
                twin._init_weights(module)
    except AttributeError as error:
        return "weight" in str(error)
    return False


def decoded_model(checkpoint: ServedCheckpoint, kind: Any, config: Any, round_to: torch.dtype | None = None) -> Any:
    """The model of transformers with the values of a checkpoint, as this package decodes them, in FP32.

    Args:
        kind: a ``PreTrainedModel``'s class.
        config: its configuration, without quantization.
        round_to: a dtype that all values are rounded to.
    """
    transposed = {name for name, module in on_meta(kind, config).named_modules() if is_conv1d(module)}
    tensors = {name: checkpoint.tensors[name] for name in checkpoint.tensors if not checkpoint.is_codes(name)}
    for layer in checkpoint.layers:
        weight = checkpoint.weight(layer)
        tensors[f"{layer}.weight"] = weight.T.contiguous() if layer in transposed else weight
    if round_to is not None:
        tensors = {name: x.to(round_to) if x.is_floating_point() else x for name, x in tensors.items()}
    with quiet():
        return kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32).eval()


def plain_config(model: Any) -> Any:
    """The configuration of a model of transformers, without quantization."""
    described = model.config.to_dict()
    described.pop("quantization_config", None)
    return type(model.config).from_dict(described)


def on_meta(kind: Any, config: Any) -> Any:
    """A model of transformers on ``meta``, without warnings: an error says what is wrong, if anything is."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        return kind(config)


def read_by_transformers(checkpoint: ServedCheckpoint, model: nn.Module, sample: Any = None) -> Reading:
    """What transformers makes of a checkpoint by ``from_pretrained``, and what it computes.

    Args:
        model: whose checkpoint it is; its class and configuration are read.
        sample: a batch of inputs, as :func:`~fp4engine.export.calibrate` takes; None makes tokens or features up.
    """
    import compressed_tensors
    import transformers

    versions = f"transformers {transformers.__version__}, compressed-tensors {compressed_tensors.__version__}"
    kind: Any = type(model)
    if not isinstance(model, transformers.PreTrainedModel):
        return Reading(versions, NOT_RUN, f"a {kind.__name__} is no model of transformers")
    try:
        with quiet():
            # Of shapes that differ, its error says that a report has them; with this, `info` has.
            folder, settings = checkpoint.tensors.directory, {"ignore_mismatched_sizes": True}
            loaded, info = kind.from_pretrained(folder, output_loading_info=True, **settings)
    except Exception as error:  # a reader may raise anything
        return Reading(versions, CANNOT_LOAD, one_line(error))
    if odd := sorted(info["mismatched_keys"]):
        name, stored, own = odd[0]
        why = f"{name!r} is {list(stored)} in the files and {list(own)} in its model"
        return Reading(versions, CANNOT_LOAD, f"{why}, and so are {len(odd) - 1} more" if len(odd) > 1 else why)
    if missing := sorted(info["missing_keys"]):
        return Reading(versions, DIFFERS, f"it leaves {len(missing)} tensors at random, such as {missing[0]!r}")
    batch = inputs_for(loaded, sample)
    if batch is None:
        return Reading(versions, NOT_RUN, f"what inputs a {kind.__name__} takes is not known: pass verify=a batch")
    if fault := _stored_differently(checkpoint, loaded):
        return Reading(versions, DIFFERS, fault)
    try:
        with quiet():
            served = run(loaded.eval(), batch).float()
    except Exception as error:
        return Reading(versions, DIFFERS, f"it loads and cannot be run: {one_line(error)}")
    meant = decoded_model(checkpoint, kind, plain_config(model), torch.bfloat16)
    for module in loaded.modules():
        module.quantization_enabled = False  # of inputs and caches
    nn.Module.float(loaded)  # transformers' own refuses
    if fault := _other_weights(meant, loaded):
        return Reading(versions, DIFFERS, fault)
    blocks, logits = compare_runs(meant, loaded, batch)
    figures = (blocks, logits, _difference(served, run(meant, batch)))
    far = next((name for name, difference in blocks.items() if not difference <= _OUTPUTS_WITHIN), None)
    if far is not None or not logits <= _OUTPUTS_WITHIN:
        return Reading(versions, DIFFERS, f"{far or 'its head'} is the first to compute other values", *figures)
    unread = [name for name in info["unexpected_keys"] if name.endswith(("input_global_scale", "input_scale"))]
    why = f"it reads {len(unread)} input scales not, and casts no inputs there" if unread else ""
    return Reading(versions, AGREES, why, *figures)


def _stored_differently(checkpoint: ServedCheckpoint, loaded: Any) -> str:
    """The first tensor of the files that a loaded model has under the same name with other values; empty if none."""
    for name, tensor in loaded.state_dict().items():
        if name in checkpoint.tensors:
            stored = checkpoint.tensors[name]
            same = stored.dtype == tensor.dtype or stored.is_floating_point() == tensor.is_floating_point()
            if not same or stored.shape != tensor.shape or not torch.equal(stored.to(tensor.dtype), tensor):
                return f"it has other values of {name!r} than the files"
    return ""


@torch.no_grad()
def _other_weights(meant: nn.Module, read: nn.Module) -> str:
    """The first parameter that is not, but for rounding, what it was meant to be; empty if there is none."""
    others = dict(read.named_parameters())
    for name, parameter in meant.named_parameters():
        other = others.get(name)
        if other is None or other.shape != parameter.shape:
            return f"it has no {name!r} of shape {list(parameter.shape)}"
        norm, difference = parameter.norm(), (other - parameter).norm()
        if not difference <= _WEIGHTS_WITHIN * norm:
            ratio = float(other.norm() / norm)
            times = f", {ratio:,.0f} times as large" if ratio > 2 else ""
            return f"it has other values of {name!r}{times}"
    return ""


def inputs_for(model: Any, sample: Any) -> dict[str, Any] | None:
    """Arguments of a forward: ``sample``, or what fits the model; None if nothing known does."""
    if isinstance(sample, Mapping):
        return dict(sample)
    name = model.main_input_name
    if sample is not None:
        return {name: sample[0] if isinstance(sample, tuple) else sample}
    config = model.config.get_text_config()
    length = int(min(positions_of(model), 32))
    tokens = torch.arange(2 * length).view(2, -1) % config.vocab_size if hasattr(config, "vocab_size") else None
    if name == "input_features" and tokens is not None and hasattr(model.config, "num_mel_bins"):
        frames = 2 * model.config.max_source_positions
        generator = torch.Generator().manual_seed(0)
        batch: dict[str, Any] = {
            name: torch.randn(2, model.config.num_mel_bins, frames, generator=generator, dtype=torch.float32)
        }
    elif name == "input_ids" and tokens is not None:
        batch = {name: tokens}
    else:
        return None
    return batch | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})


def run(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The logits of a model of transformers, or its first output, without gradients."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        output = model(**cast)
    return output.logits if hasattr(output, "logits") else output[0]


def compare_runs(meant: Any, read: Any, batch: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Relative differences of two models of one class: ``(block -> its output's, the logits')``."""
    outputs: list[dict[str, Tensor]] = []
    logits: list[Tensor] = []
    for model in (meant, read):
        with _outputs(model) as found:
            logits.append(run(model, batch))
        outputs.append(found)
    differences = {name: _difference(outputs[1][name], output) for name, output in outputs[0].items()}
    return differences, _difference(logits[1], logits[0])


def _difference(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp(min=torch.finfo(wanted.dtype).tiny))


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Generator[dict[str, Tensor]]:
    """Region that notes what each block returns: each member of an outermost ``nn.ModuleList``."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, Tensor):
            found[name] = first

    with contextlib.ExitStack() as stack:
        for name in outermost:
            for index, block in model.get_submodule(name).named_children():
                stack.enter_context(block.register_forward_hook(partial(note, f"{name}.{index}")))
        yield found


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Region in which transformers and its bars say nothing."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
