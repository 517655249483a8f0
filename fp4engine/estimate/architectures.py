"""Models of transformers from their configuration alone, on ``meta``, with a loss to trace."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fp4engine.arguments import require_integer, require_one_of, require_path
from fp4engine.positions import positions_of, require_positions

TASKS = ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")
"""Classes of transformers whose input is known; the first that has the family, unless the configuration names one."""


def from_transformers(
    config: str | PathLike[str], *, batch: int = 1, sequence: int = 2048, parameters: str = "fp32"
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The model of a Hugging Face configuration, on ``meta``, and its loss, for :func:`fp4engine.estimate.estimate`.

    Language models and sequence-to-sequence models get ``batch`` rows of ``sequence`` tokens; speech models
    ``sequence`` tokens for the decoder, and as much audio as the encoder has positions for.

    Args:
        config: a ``config.json`` or the folder that holds it.
        parameters: ``"fp32"`` or ``"bf16"``.

    Raises:
        ValueError: transformers is not installed, cannot read the file or build the model, or builds it for no task of
            :data:`TASKS`.
    """
    batch, sequence = require_integer("batch", batch, 1), require_integer("sequence", sequence, 1)
    require_one_of("parameters", parameters, ("fp32", "bf16"))
    path = require_path("config", config)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} is of a family that transformers builds: pip install transformers") from error
    try:
        read: Any = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # of many kinds, by what the file lacks
        raise ValueError(f"transformers cannot read {path}: {error}") from error
    names = read.architectures or []
    if not isinstance(names, list):
        raise ValueError(f"architectures of {path} must be a list of names, got {names!r:.120}")
    mappings: dict[str, Any] = {task: getattr(transformers, task) for task in TASKS}
    known = {task: auto._model_mapping for task, auto in mappings.items()}
    built = {task: classes[type(read)] for task, classes in known.items() if type(read) in classes}
    named = [task for task, made in built.items() if getattr(made, "__name__", "") in names]
    task = next(iter((*named, *built)), None)
    if task is None:
        raise ValueError(
            f"transformers builds model_type {read.model_type!r} of {path} for none of {', '.join(TASKS)}; estimate a "
            "module with a loss instead"
        )
    dtype = torch.bfloat16 if parameters == "bf16" else torch.float32
    try:
        with torch.device("meta"):
            model: nn.Module = mappings[task].from_config(read, dtype=dtype).train()
    except Exception as error:  # likewise
        raise ValueError(f"transformers cannot build model_type {read.model_type!r} from {path}: {error}") from error

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros((batch, sequence), dtype=torch.int64)
        inputs = {"input_ids": tokens}
        if task == "AutoModelForSpeechSeq2Seq":
            bins, frames = getattr(read, "num_mel_bins", None), 2 * getattr(read, "max_source_positions", 0)
            if bins is None or not frames:
                raise ValueError(
                    f"the input of model_type {read.model_type!r} is not known: estimate a module with a loss instead"
                )
            inputs = {"input_features": torch.zeros((batch, bins, frames), dtype=dtype)}
        else:
            require_positions("sequence", sequence, positions_of(model))
        try:
            return model(**inputs, labels=tokens).loss
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"model_type {read.model_type!r} of {path} asks for values of a tensor, by {error.func}, and an "
                "estimate's tensors have none"
            ) from error
        except Exception as error:  # likewise
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"transformers cannot run model_type {read.model_type!r} from {path}: {said}") from error

    return model, loss
