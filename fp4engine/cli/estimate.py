"""Say what a training step will take: memory, time, bytes on the wire.

The first line answers whether it fits. The model is one that is known by name, a Hugging Face config.json, or sizes
given one by one. Does 8B fit on a card with 24 GiB, with LoRA?

  fp4engine estimate --model Llama-3-8B --lora-rank 16 --checkpointing --gpu RTX-4090
"""

import argparse
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fp4engine.estimate import GPUS, MODELS, Architecture, estimate, from_config, from_transformers
from fp4engine.estimate.decoder import FAMILIES, Block, read_config
from fp4engine.estimate.request import STATES
from fp4engine.recipe import recipe_from_argument

SIZES = {
    "layers": "blocks of a decoder that neither --model nor --config describes",
    "width": "residual width",
    "heads": "query heads",
    "ffn": "inner width of the MLP",
    "vocabulary": "tokens of the embedding and of the head",
}
"""What has to be given where neither --model nor --config is."""

PASSED_ON = (
    "gpu", "batch", "sequence", "parameters", "optimizer", "checkpointing", "fsdp", "tp", "lora_rank", "quantized_base",
    "fp4_all_gather", "host_microseconds",
)  # fmt: skip
"""Arguments that :func:`fp4engine.estimate.estimate` takes as they are."""

OF_SIZES = {
    "checkpointing": False, "fsdp": 1, "tp": 1, "lora_rank": 0, "quantized_base": False, "fp4_all_gather": False,
}  # fmt: skip
"""Arguments for models that are built of sizes, with their defaults."""

OPTIONAL_SIZES = {
    "kv_heads": "key and value heads (default: as many as --heads)",
    "head_dim": "width of a head (default: --width / --heads)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the step, the machine."""
    parser.add_argument("--model", choices=tuple(MODELS), help="a model whose sizes are known")
    parser.add_argument("--config", help="a Hugging Face config.json, or its folder")
    for size, meaning in {**SIZES, **OPTIONAL_SIZES}.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--recipe",
        default="nvfp4",
        metavar="RECIPE",
        help="bf16, or a row of the recipe book, a JSON file, module:function (default: nvfp4)",
    )
    parser.add_argument("--gpu", default="H200", choices=tuple(GPUS), help="default: %(default)s")
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--batch", **count, default=1, help="sequences of one GPU's step (default: %(default)s)")
    parser.add_argument("--sequence", **count, default=2048, help="tokens of a sequence (default: %(default)s)")
    stored = "how parameters are stored (default: %(default)s)"
    parser.add_argument("--parameters", default="fp32", choices=("fp32", "bf16"), help=stored)
    parser.add_argument("--optimizer", default="adamw", choices=tuple(STATES), help="default: %(default)s")
    parser.add_argument("--checkpointing", action="store_true", help="blocks keep their inputs only")
    parser.add_argument("--fsdp", **count, default=1, help="GPUs that share parameters and optimizer")
    parser.add_argument("--fp4-all-gather", action="store_true", help="FSDP gathers weights as FP4 codes")
    parser.add_argument("--tp", **count, default=1, help="GPUs that share every layer")
    parser.add_argument("--lora-rank", **count, default=0, help="freeze the model in BF16 and train adapters of rank N")
    base = "with --lora-rank: store the frozen linear layers as codes (QLoRA, fp4engine.quantize_weights)"
    parser.add_argument("--quantized-base", action="store_true", help=base)
    parser.add_argument(
        "--host-microseconds",
        type=float,
        metavar="US",
        help="what the host takes for one quantized layer, forward and backward (default: measured beside an H200)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; 1 if it does not fit."""
    recipe = None if arguments.recipe == "bf16" else recipe_from_argument(arguments.recipe)
    of_step = " at step 0" if recipe is not None and len(recipe.starts) > 1 else ""
    loss = None
    family = read_config(arguments.config).get("model_type") if arguments.config else None
    if isinstance(family, str) and family not in FAMILIES:
        _refuse_sizes(arguments)
        if given := [
            f"--{name.replace('_', '-')}" for name, default in OF_SIZES.items() if getattr(arguments, name) != default
        ]:
            raise ValueError(
                f"{' and '.join(given)} must be left out with {arguments.config}, of which only "
                f"{', '.join(FAMILIES)} have variants"
            )
        words = {"batch": arguments.batch, "sequence": arguments.sequence, "parameters": arguments.parameters}
        model, loss = from_transformers(arguments.config, **words)
        bar = nullcontext()
    else:
        model = _architecture(arguments)
        bar = _progress(model.layers * (2 if arguments.checkpointing else 1))
    with bar:
        result = estimate(
            model,
            loss=loss,
            recipe=recipe and recipe.at(0),
            name=f"{_name(arguments)} in {arguments.recipe}{of_step}",
            **{name: getattr(arguments, name) for name in PASSED_ON},
        )
    print(result)
    return 0 if result.fits else 1


@contextmanager
def _progress(blocks: int) -> Generator[None]:
    """A bar of the blocks that have been traced, on a terminal where tqdm is installed. 80 take 15 seconds.

    Args:
        blocks: how often a block's forward pass will run: with checkpointing twice.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # which a bare install lacks
        yield
        return
    bar = tqdm(total=blocks, desc="tracing", unit="block", disable=None, leave=False, dynamic_ncols=True)

    def begins(module: nn.Module, _: Any) -> None:
        bar.update(isinstance(module, Block))

    with bar, register_module_forward_pre_hook(begins):
        yield


def _name(arguments: argparse.Namespace) -> str:
    if arguments.model is not None:
        return arguments.model
    if arguments.config is None:
        return "a decoder"
    path = Path(arguments.config).resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _refuse_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sizes that are given, which have to be none beside --model or --config, of which one may be given."""
    given = {size: getattr(arguments, size) for size in (*SIZES, *OPTIONAL_SIZES)}
    given = {size: value for size, value in given.items() if value is not None}
    whole = [name for name in ("model", "config") if getattr(arguments, name) is not None]
    if whole and (others := [*whole[1:], *given]):
        more = " and ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--{whole[0]} says all sizes; leave out {more}")
    return given


def _architecture(arguments: argparse.Namespace) -> Architecture:
    given = _refuse_sizes(arguments)
    if arguments.model is not None or arguments.config is not None:
        return MODELS[arguments.model] if arguments.model is not None else from_config(arguments.config)
    missing = [f"--{size}" for size in SIZES if size not in given]
    if missing:
        raise ValueError(f"give --model, --config, or all sizes: {', '.join(missing)} missing")
    return Architecture(**given)
