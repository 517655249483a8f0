"""``fp4engine export SOURCE DIRECTORY``: from a checkpoint that transformers reads to one that servers read; and
``fp4engine compare-served``, which compares the two.

The weights go from file to file one at a time, so the model never exists in memory.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fp4engine.arguments import one_line, require_integer
from fp4engine.checkpoint_names import TOKENIZER
from fp4engine.convert import convert
from fp4engine.export.calibration import KVCache
from fp4engine.export.checkpoint import export_checkpoint
from fp4engine.export.reader import CheckpointError, TensorFolder, read_json
from fp4engine.export.readers import on_meta, quiet
from fp4engine.export.recoding import LOSSLESS, decoded_names, recode_checkpoint
from fp4engine.export.served import compare_served
from fp4engine.export.serving_format import MODELOPT
from fp4engine.export.state import ModelState
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.positions import positions_of, require_positions
from fp4engine.recipe import Recipe, recipe_from_argument


def main(args: argparse.Namespace) -> int:
    """Export, and print the table of layers.

    Raises:
        ValueError, ImportError, NotImplementedError: as :func:`~fp4engine.export.export_checkpoint`; files that are
            none, or options that do nothing.
    """
    if args.source.resolve() in args.directory.resolve().parents:
        raise ValueError(f"directory must not lie inside the source {str(args.source)!r}, got {str(args.directory)!r}")
    size = int(args.max_shard_gb * 2**30)
    tensors = TensorFolder(args.source)
    described = read_json(args.source / "config.json").get("quantization_config")
    if isinstance(described, dict) and described.get("quant_method") == "mxfp4":
        if args.requantize != LOSSLESS or args.format != MODELOPT.name:
            raise ValueError(
                f"{args.source} is in MXFP4 already; --requantize {LOSSLESS} --format {MODELOPT.name} writes it as "
                "NVFP4 of the same values"
            )
        idle = [name for name in ("inputs", "kv_cache", "keep_high_precision") if getattr(args, name) is not None]
        if idle:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
            raise ValueError(f"{args.source} is in MXFP4 already, and its codes stay: leave out {given}")
        ModelState(_empty_model(args.source, len(tensors), True), decoded_names(tensors))  # refuses what lacks one
        print(recode_checkpoint(args.source, args.directory, max_shard_size=size))
        return 0
    model = _empty_model(args.source, len(tensors))
    convert(model, _recipe(args.recipe), keep_high_precision=_kept(model, args.keep_high_precision))
    report = export_checkpoint(
        model,
        args.directory,
        args.format,
        inputs=_inputs(args.inputs),
        shared_scales=() if args.no_shared_scales else SHARED_SCALES,
        requantize=args.requantize,
        kv_cache=_kv_cache(args.kv_cache),
        verify=args.verified,
        force=args.force,
        weights=tensors,
        tokenizer=args.source if any((args.source / name).is_file() for name in TOKENIZER) else None,
        max_shard_size=size,
    )
    print(report)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print how far the two are apart; 1 if that is further than ``--max-kl``.

    Raises:
        ValueError: files that are none, or settings that cannot be.
    """
    for name in ("length", "batch", "sequences"):
        require_integer(f"--{name}", getattr(args, name), 1)
    if args.max_kl is not None and not 0 <= args.max_kl < float("inf"):
        raise ValueError(f"--max-kl must be a finite number of at least 0, got {args.max_kl}")
    weights = TensorFolder(args.trained)
    recipe, empty = _recipe(args.recipe), _empty_model(args.trained, len(weights))
    state = ModelState(empty, weights)  # refuses what lacks one, which transformers would draw at random
    for name in state.names:
        state[name]  # refuses one of another shape
    kind, is_encoder_decoder = type(empty), empty.config.is_encoder_decoder
    if kind.main_input_name != "input_ids" or is_encoder_decoder:
        raise ValueError(
            f"compare-served runs models on tokens alone, and a {kind.__name__} takes more: call "
            "fp4engine.export.compare_served with batches of its inputs"
        )
    rows = _tokens(args)
    require_positions("--length", max(min(len(row), args.length) for row in rows), positions_of(empty))
    with quiet():
        model: Any = kind.from_pretrained(args.trained, dtype="auto", use_safetensors=True).eval()
    convert(model, recipe, keep_high_precision=_kept(model, args.keep_high_precision))
    largest = model.config.get_text_config().vocab_size
    if bad := next((token for row in rows for token in row if not 0 <= token < largest), None):
        raise ValueError(f"--data must hold token ids from 0 to {largest - 1}, got {bad}")
    batches = torch.tensor([row[: args.length] for row in rows], dtype=torch.int64).split(args.batch)
    found = compare_served(model, args.exported, batches, recipe, inputs=not args.weights_only)
    print(found)
    return int(args.max_kl is not None and not found.kl_max <= args.max_kl)


def _kept(model: Any, patterns: list[str] | None) -> list[str]:
    """What stays in high precision: ``patterns``, or the model's head where none are given."""
    if patterns is not None:
        return patterns
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head and isinstance(module, torch.nn.Linear)]


def _tokens(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the sequences in ``--data``, all of one length within a batch."""
    if args.data.endswith(".json"):
        rows = _json(args.data, "--data", "token ids")
        whole = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
        if not rows or not whole or not all(type(token) is int for row in rows for token in row):
            raise ValueError(f"{args.data} must hold a list of lists of token ids")
        if len({min(len(row), args.length) for row in rows}) > 1:
            raise ValueError(
                f"{args.data} must hold lists of one length, of which --length (now {args.length}) is taken"
            )
        return rows
    from transformers import AutoTokenizer

    text = _text(args.data, "--data", "a .json file of token ids")
    try:
        ids = AutoTokenizer.from_pretrained(args.trained)(text)["input_ids"]
    except Exception as error:  # a tokenizer's files can make transformers raise anything
        raise ValueError(
            f"{args.trained} has no tokenizer that reads a text ({one_line(error)}); give token ids in .json"
        ) from error
    rows = [ids[i : i + args.length] for i in range(0, len(ids) - args.length + 1, args.length)][: args.sequences]
    if not rows:
        raise ValueError(f"{args.data} has {len(ids)} tokens, fewer than one sequence of --length {args.length}")
    return rows


def _empty_model(source: Path, tensors: int, quantized: bool = False) -> Any:
    """The model that ``config.json`` describes, without values.

    Args:
        tensors: how many the checkpoint has; more layers than that are not built.
        quantized: whether its weights may be quantized.

    Raises:
        CheckpointError: transformers cannot build it, or it is quantized, or code would have to be run.
    """
    import transformers

    path = source / "config.json"
    described = read_json(path)
    if "auto_map" in described:
        raise CheckpointError(f"{path} asks for code of its own (auto_map), which is never run")
    if not quantized and (settings := described.get("quantization_config")):
        raise CheckpointError(f"{path} says that the weights are quantized already: {settings!r:.120}")
    names = described.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(f"{path} names no architecture that transformers has, got {names!r:.120}")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        if kind.config_class is not None and not isinstance(config, kind.config_class):
            raise ValueError(f"its model_type is {config.model_type!r}, which is another model's")
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if layers > tensors:
            raise ValueError(f"it has {layers} layers, and the files hold {tensors} tensors")
        model = on_meta(kind, config)
        if (source / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    except Exception as error:  # a configuration can make transformers raise anything
        raise CheckpointError(f"{path} describes no {name} that transformers can build: {one_line(error)}") from error
    return model


def _kv_cache(value: str | None) -> KVCache | None:
    if value is None:
        return None
    fields = _json(value, "--kv-cache", "the fields of a KVCache")
    if not isinstance(fields, dict) or not {"amaxes"} <= fields.keys() <= {"amaxes", "format"}:
        raise ValueError(f"{value} must hold one JSON object with amaxes and, if it is not fp8, format")
    return KVCache(**fields)


def _json(path: str, argument: str, words: str) -> Any:
    text = _text(path, argument, words)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def _recipe(argument: str) -> Recipe:
    """The recipe that ``--recipe`` names.

    Raises:
        ValueError: as :func:`recipe_from_argument`; it is another one at another step.
    """
    recipe = recipe_from_argument(argument)
    if len(recipe.starts) > 1:
        raise ValueError(
            "--recipe must be the recipe of one step, which recipe.at(step).to_json() writes, got a schedule, "
            f"{argument!r}, that changes at step {recipe.starts[1]}"
        )
    return recipe.at(0)


def _inputs(value: str | None) -> Any:
    if value is None or value in ("dynamic", "high_precision"):
        return value
    amaxes = _json(value, "--inputs", "'high_precision', 'dynamic'")
    if not isinstance(amaxes, dict) or not all(type(amax) in (int, float) for amax in amaxes.values()):
        raise ValueError(f"{value} must hold one JSON object of numbers by layer")
    return amaxes


def _text(path: str, argument: str, words: str) -> str:
    """The text of the file ``path``, which ``argument`` names since it is none of ``words``."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{argument} must be {words} or a JSON file, got {path!r}: {error}") from error
