"""``fp4engine export SOURCE DIRECTORY``: from a checkpoint that transformers reads to one that servers read; and
``fp4engine compare-served``, which compares the two.

The weights go from file to file one at a time, so the model never exists in memory.
"""

import argparse
import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fp4engine.arguments import require_integer
from fp4engine.checkpoint_names import TOKENIZER
from fp4engine.convert import convert
from fp4engine.export.calibration import KVCache
from fp4engine.export.checkpoint import export_checkpoint
from fp4engine.export.reader import CheckpointError, TensorFolder, read_json
from fp4engine.export.readers import quiet
from fp4engine.export.recoding import LOSSLESS, decoded_names, recode_checkpoint
from fp4engine.export.served import compare_served
from fp4engine.export.serving_format import FORMATS, MODELOPT
from fp4engine.export.state import ModelState
from fp4engine.modules.shared_amax import SHARED_SCALES
from fp4engine.positions import positions_of, require_positions
from fp4engine.recipe import recipe_from_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`main` reads."""
    parser.description = (
        "Write a trained checkpoint in NVFP4 for servers: the codes and scales that its recipe multiplied."
    )
    parser.add_argument(
        "source", type=_path, help="directory of config.json and safetensors, as save_pretrained writes"
    )
    parser.add_argument("directory", type=_path, help="where to write; must not be there, or be empty")
    parser.add_argument(
        "--recipe", default="nvfp4", help="row of the recipe book, JSON file, or module:function (default: %(default)s)"
    )
    parser.add_argument("--format", default="compressed-tensors", choices=list(FORMATS), help="default: %(default)s")
    parser.add_argument(
        "--inputs",
        default=None,
        help="'high_precision' (W4A16), 'dynamic', or a JSON file of what fp4engine.export.calibrate returns; "
        "needed where the recipe casts inputs",
    )
    parser.add_argument(
        "--keep-high-precision",
        nargs="*",
        default=None,
        metavar="PATTERN",
        help="modules to write in high precision (default: the head, such as lm_head)",
    )
    parser.add_argument("--no-shared-scales", action="store_true", help="give q/k/v and gate/up a scale each")
    parser.add_argument(
        "--requantize",
        nargs="?",
        const=True,
        default=False,
        choices=(LOSSLESS,),
        help="cast what no form holds to nearest NVFP4; 'lossless' writes MXFP4 as NVFP4 of the same values",
    )
    parser.add_argument(
        "--kv-cache",
        default=None,
        metavar="FILE",
        help="JSON file of how servers cache keys and values: the fields of what calibrate_kv_cache returns",
    )
    parser.add_argument("--force", action="store_true", help="write also what a reader takes for other numbers")
    verified = parser.add_mutually_exclusive_group()
    verified.add_argument(
        "--verify",
        dest="verified",
        action="store_const",
        const=True,
        default=False,
        help="read the files back, compare every byte, and let transformers and vLLM's rules load them and "
        "transformers run them; holds two models in memory, in FP32",
    )
    verified.add_argument(
        "--verify-files",
        dest="verified",
        action="store_const",
        const="files",
        help="compare every byte and run no reader, where memory is short",
    )
    most = "largest size of a file (default: %(default)s)"
    parser.add_argument("--max-shard-gb", type=_size, default=2.0, metavar="GIB", help=most)


def main(args: argparse.Namespace) -> int:
    """Export, and print the table of layers; return 2 after one line on standard error if that is refused."""
    try:
        if args.source.resolve() in args.directory.resolve().parents:
            raise ValueError(
                f"directory must not lie inside the source {str(args.source)!r}, got {str(args.directory)!r}"
            )
        if _is_mxfp4(args.source):
            if args.requantize != LOSSLESS or args.format != MODELOPT.name:
                raise ValueError(
                    f"{args.source} is in MXFP4 already; --requantize {LOSSLESS} --format {MODELOPT.name} writes it as "
                    "NVFP4 of the same values"
                )
            idle = {
                "--inputs": args.inputs,
                "--kv-cache": args.kv_cache,
                "--keep-high-precision": args.keep_high_precision,
            }
            if given := [name for name, value in idle.items() if value is not None]:
                raise ValueError(f"{args.source} is in MXFP4 already, and its codes stay: leave out {', '.join(given)}")
            tensors = TensorFolder(args.source)
            ModelState(_empty_model(args.source, len(tensors), True), decoded_names(tensors))  # refuses what lacks one
            size = int(args.max_shard_gb * 2**30)
            print(recode_checkpoint(args.source, args.directory, max_shard_size=size))
            return 0
        recipe = recipe_from_argument(args.recipe)
        weights = TensorFolder(args.source)
        model = _empty_model(args.source, len(weights))
        convert(model, recipe, keep_high_precision=_kept(model, args.keep_high_precision))
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
            weights=weights,
            tokenizer=args.source if any((args.source / name).is_file() for name in TOKENIZER) else None,
            max_shard_size=int(args.max_shard_gb * 2**30),
        )
    except (ValueError, ImportError, NotImplementedError) as error:
        print(f"fp4engine export: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`compare` reads."""
    parser.add_argument("trained", type=_path, help="directory of config.json and safetensors that was exported")
    parser.add_argument("exported", type=_path, help="what fp4engine export wrote of it, or a peer")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="a JSON file of a list of lists of token ids, or a text, which the trained model's tokenizer reads",
    )
    parser.add_argument("--recipe", default="nvfp4", help="what trained: a name or a JSON file, as in fp4engine export")
    parser.add_argument(
        "--keep-high-precision", nargs="*", default=None, metavar="PATTERN", help="as in fp4engine export"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave inputs in high precision on both sides")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="of a text (default: %(default)s)")
    parser.add_argument(
        "--max-kl", type=float, default=None, metavar="NATS", help="exit with 1 if a divergence is larger"
    )


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
    recipe, empty = recipe_from_argument(args.recipe), _empty_model(args.trained, len(weights))
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
    lengths = [row[: args.length] for row in rows]
    batches = [torch.tensor(lengths[i : i + args.batch], dtype=torch.int64) for i in range(0, len(lengths), args.batch)]
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
        reason = f"{type(error).__name__}: {_one_line(error):.200}"
        raise ValueError(
            f"{args.trained} has no tokenizer that reads a text ({reason}); give token ids in .json"
        ) from error
    rows = [ids[i : i + args.length] for i in range(0, len(ids) - args.length + 1, args.length)][: args.sequences]
    if not rows:
        raise ValueError(f"{args.data} has {len(ids)} tokens, fewer than one sequence of --length {args.length}")
    return rows


def _is_mxfp4(source: Path) -> bool:
    described = read_json(source / "config.json").get("quantization_config")
    return isinstance(described, dict) and described.get("quant_method") == "mxfp4"


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
        raise CheckpointError(f"{path} says that the weights are quantized already: {_one_line(settings):.120}")
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
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # an error says what is wrong, if anything
            model = kind(config)
        if (source / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    except Exception as error:  # a configuration can make transformers raise anything
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise CheckpointError(f"{path} describes no {name} that transformers can build: {reason:.300}") from error
    return model


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


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


def _inputs(value: str | None) -> Any:
    if value is None or value in ("dynamic", "high_precision"):
        return value
    amaxes = _json(value, "--inputs", "'high_precision', 'dynamic'")
    if not isinstance(amaxes, dict) or not all(type(amax) in (int, float) for amax in amaxes.values()):
        raise ValueError(f"{value} must hold one JSON object of numbers by layer")
    return amaxes


def _path(text: str) -> Path:
    """A path. An empty word, as from an unset shell variable, is refused, since it would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return Path(text)


def _size(text: str) -> float:
    """What ``--max-shard-gb`` takes: at least a byte, and no more than there is."""
    with suppress(ValueError):
        if 2**-30 <= (size := float(text)) < 2**30:
            return size
    raise argparse.ArgumentTypeError(f"must be a size in GiB, such as 0.5, got {text!r}")


def _text(path: str, argument: str, words: str) -> str:
    """The text of the file ``path``, which ``argument`` names since it is none of ``words``."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{argument} must be {words} or a JSON file, got {path!r}: {error}") from error
