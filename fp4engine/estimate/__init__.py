"""Memory, time and traffic of a training step, before anybody runs it.

Memory comes from one step on tensors that have shapes and no contents, so what autograd keeps is counted and not
guessed. Time comes from the same step: products at a share of the tensor cores' peak, everything else at a share of the
memory's bandwidth; the shares were fitted on one kind of GPU (:data:`~fp4engine.estimate.gpus.SHARES`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fp4engine.arguments import (
    is_number,
    require_bools,
    require_callable,
    require_integer,
    require_one_of,
    require_patterns,
)
from fp4engine.estimate.architectures import from_transformers
from fp4engine.estimate.costs import host_seconds, largest_unit, seconds_of, wire
from fp4engine.estimate.decoder import LARGEST, MODELS, Architecture, Decoder, add_lora, from_config
from fp4engine.estimate.gpus import GPU, GPUS
from fp4engine.estimate.memory import traced
from fp4engine.estimate.request import STATES, Request, of_sizes, without_memory
from fp4engine.estimate.result import Estimate, count
from fp4engine.estimate.trace import Linears, Step
from fp4engine.modules.borrowed import BorrowedGroupedLinear
from fp4engine.recipe import Recipe, zoo
from fp4engine.recipe.base import require_recipe

__all__ = ["GPU", "GPUS", "MODELS", "Architecture", "Estimate", "estimate", "from_config", "from_transformers"]

FITTED = ("nvfp4", "fp8_current")
"""Rows of the recipe book whose steps were measured, beside BF16's, and compared with estimates."""


def estimate(
    model: Architecture | nn.Module,
    *,
    recipe: Recipe | None = None,
    gpu: str = "H200",
    batch: int = 1,
    sequence: int = 2048,
    parameters: str = "fp32",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    fsdp: int = 1,
    tp: int = 1,
    lora_rank: int = 0,
    quantized_base: bool = False,
    fp4_all_gather: bool = False,
    host_microseconds: float | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
    keep_high_precision: tuple[str, ...] = ("lm_head",),
    name: str = "model",
) -> Estimate:
    """What one training step of ``model`` takes on one GPU.

    Args:
        model: sizes of a decoder; or a module of your own, on any device, ``meta`` included, which is copied.
        recipe: of the linear layers; None is BF16.
        gpu: one of :data:`GPUS`.
        batch, sequence: sequences, and tokens in each, of one GPU's step.
        parameters: ``"fp32"``, multiplied under ``torch.autocast``, or ``"bf16"``; of a module, what it has.
        optimizer: one of :data:`~fp4engine.estimate.request.STATES`.
        checkpointing: each block keeps its input only and runs again in backward.
        fsdp: over how many GPUs parameters, gradients and optimizer state are sharded.
        tp: over how many GPUs heads, the MLP's inner width and the vocabulary are split.
        lora_rank: above 0, freeze the model and train adapters of this rank beside each linear layer of its blocks.
        quantized_base: with ``lora_rank``: the frozen linear layers are stored as codes (QLoRA), as
            :func:`fp4engine.quantize_weights` has it; embedding and head stay in BF16.
        fp4_all_gather: FSDP gathers weights as :func:`fp4engine.distributed.fp4_all_gather` has it.
        host_microseconds: what the host takes for one quantized linear layer, forward and backward; a step is no faster
            than all of them. None is :data:`~fp4engine.estimate.gpus.HOST`; 0 is for CUDA graphs, which need no host.
        loss: of a module of your own, ``loss(model) -> scalar``; it makes its inputs itself, of ``batch * sequence``
            tokens.
        keep_high_precision: patterns for :func:`fp4engine.convert`; ``"lm_head"`` may cover nothing.
        name: what the answer calls the model.

    Raises:
        ValueError: an argument outside its words, sizes that do not divide, a sequence beyond learned positions, or
            options that a module of your own cannot be built anew for, or with parameters that are no plain tensors; a
            pattern that covers nothing; a ``loss`` that asks for values of a tensor, or returns something else than one
            number with a gradient.
    """
    sizes = {"batch": batch, "sequence": sequence, "fsdp": fsdp, "tp": tp}
    batch, sequence, fsdp, tp = (require_integer(size, value, 1, LARGEST) for size, value in sizes.items())
    lora_rank = require_integer("lora_rank", lora_rank, 0, LARGEST)
    require_one_of("parameters", parameters, ("fp32", "bf16"))
    require_one_of("optimizer", optimizer, STATES)
    require_one_of("gpu", gpu, GPUS)
    given = host_microseconds
    if given is not None and not (is_number(given) and 0 <= given < float("inf")):
        raise ValueError(f"host_microseconds must be a finite number of at least 0, got {host_microseconds!r}")
    step: dict[str, Any] = {
        "recipe": recipe, "gpu": GPUS[gpu], "batch": batch, "sequence": sequence, "parameters": parameters,
        "optimizer": optimizer, "checkpointing": checkpointing, "fsdp": fsdp, "tp": tp, "lora_rank": lora_rank,
        "quantized_base": quantized_base, "fp4_all_gather": fp4_all_gather, "host_microseconds": host_microseconds,
    }  # fmt: skip
    require_bools(checkpointing=checkpointing, fp4_all_gather=fp4_all_gather, quantized_base=quantized_base)
    if quantized_base and (not lora_rank or recipe is None or fsdp > 1):
        raise ValueError(
            "quantized_base=True needs lora_rank of at least 1, a recipe, and fsdp=1 (codes are not sharded), "
            f"got lora_rank={lora_rank}, recipe={recipe!r} and fsdp={fsdp}"
        )
    if fp4_all_gather and (fsdp == 1 or tp > 1 or recipe is None):
        raise ValueError(
            "fp4_all_gather=True needs fsdp of at least 2, tp=1 (weights that tensor parallelism splits are gathered "
            f"in high precision) and a recipe, got fsdp={fsdp}, tp={tp} and recipe={recipe!r}"
        )
    if not isinstance(model, Architecture | nn.Module):
        known = f", such as MODELS[{model!r}]" if isinstance(model, str) and model in MODELS else ""
        raise ValueError(f"model must be an Architecture{known}, or a torch.nn.Module, got {model!r:.80}")
    require_recipe(recipe)
    keep = require_patterns("keep_high_precision", keep_high_precision)
    if isinstance(model, nn.Module):
        if loss is None or checkpointing or tp != 1 or lora_rank or fsdp != 1:
            raise ValueError(
                "a module of your own is estimated as it is: it needs loss=..., and checkpointing, fsdp, tp and "
                "lora_rank are for an Architecture"
            )
        require_callable("loss", loss)
        request = Request(None, lambda: without_memory(model), loss, keep=keep, **step)
        numbers = _numbers(model)
    elif loss is not None:
        raise ValueError("loss goes with a module of your own; an Architecture has its own loss")
    else:
        request = of_sizes(model.split(tp) if tp > 1 else model, keep, step)
        with torch.device("meta"):
            whole = Decoder(model, lambda block: block)
            numbers = _numbers(whole)
            if lora_rank:
                add_lora(whole, lora_rank, torch.float32)
                numbers = numbers[0], _numbers(whole)[1]
    try:
        known = traced(request)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"loss(model) asks for values of a tensor, by {error.func}, and an estimate's tensors have none: give the "
            "module an input that routes nothing by values, such as counts in a list"
        ) from error
    return _assemble(request, name, numbers, *known)


def _numbers(model: nn.Module) -> tuple[int, int]:
    """How many parameters ``model`` has, and how many of them are trained."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _assemble(
    request: Request, name: str, numbers: tuple[int, int], model: nn.Module, step: Step, linears: Linears
) -> Estimate:
    gpu, fsdp = request.gpu, request.fsdp
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total, numel = _numbers(model)  # of one rank of tensor parallelism
    if fsdp == 1:
        held = sum(parameter.nbytes for parameter in model.parameters())
        gradients = sum(parameter.nbytes for parameter in trained)
        states = round(sum(parameter.numel() * request.state_bytes(parameter.itemsize) for parameter in trained))
        peak = max(step.peak, held + gradients) + states
    else:
        frozen = 2 * (total - numel)  # only adapters leave any, and beside them the model is in BF16
        held, gradients = round((frozen + numel * request.stored) / fsdp), round(numel * request.stored / fsdp)
        states = round(numel * request.state_bytes(request.stored) / fsdp)
        # gathered BF16 weights of two units, and gradients of one
        peak = max(held + step.peak - step.held + 3 * largest_unit(model), held + gradients) + states
    rest = max(step.saved - linears.saved, 0)
    temporary = max(peak - held - states - linears.saved - rest, 0)
    # a fused step reads parameters, gradients, which are as large, and moments; it writes parameters and moments
    optimizer_bytes = 3 * gradients + 2 * states
    seconds, useful = seconds_of(model, step, linears, gpu, optimizer_bytes)
    seconds = max(seconds, host_seconds(request, linears.flops))
    return Estimate(
        _label(request, name, numbers[0], model), *numbers, held, gradients, states, linears.saved, rest, temporary,
        peak, request.tokens, seconds, useful / (seconds * gpu.bf16), wire(request, model, numel), gpu,
        tuple(_notes(request, model)), request.lora_rank > 0,
    )  # fmt: skip


def _label(request: Request, name: str, whole: int, model: nn.Module) -> str:
    stored = "bf16" if request.parameters == "bf16" or request.lora_rank else "fp32"
    if request.sizes is None:
        stored = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    words = [
        f"{name}, {count(whole)} parameters in {stored or 'no dtype'}",
        f"{request.batch} x {request.sequence} tokens",
        f"LoRA of rank {request.lora_rank}" if request.lora_rank else "",
        "base stored as codes" if request.quantized_base else "",
        request.optimizer,
        "checkpointing" if request.checkpointing else "",
        f"FSDP {request.fsdp}{' of FP4 codes' * request.fp4_all_gather}" if request.fsdp > 1 else "",
        f"TP {request.tp}" if request.tp > 1 else "",
    ]
    return ", ".join(filter(None, words))


def _notes(request: Request, model: nn.Module) -> list[str]:
    gpu = request.gpu
    notes: list[str] = []
    if not gpu.measured:
        notes.append(
            f"the time is a prediction: shares of peak were measured on an H200, the peaks of {gpu.name} are from "
            f"{gpu.source}"
        )
    if request.recipe is not None and request.recipe not in map(zoo.make, (*FITTED, "high_precision")):
        notes.append(
            f"the time is that of casts and products as in {' and '.join(FITTED)}, to whose runs it was fitted; no run "
            "by this recipe was compared, and many recipes take longer (docs/limits.md)"
        )
    if gpu.fp4 and request.recipe is not None:
        notes.append("products on FP4 tensor cores have not been run by this project")
    unmeasured = {"LoRA": request.lora_rank > 0, "tensor parallelism": request.tp > 1}
    if any(unmeasured.values()):
        names = " and ".join(name for name, used in unmeasured.items() if used)
        notes.append(f"memory with {names} is computed and not compared with a run")
    if any(isinstance(module, BorrowedGroupedLinear) for module in model.modules()):
        notes.append("every expert is given the same number of tokens")
    if request.fsdp > 1 or request.tp > 1:
        notes.append("the time has no communication, and the wire no outer amaxes, which are a few bytes a layer")
    if request.fp4_all_gather:
        notes.append("the peak is that of weights gathered in BF16; weights gathered as codes take less")
    return notes
