"""Write a trained checkpoint in NVFP4 for servers.

The codes and scales are those that the recipe multiplied in training. It needs more packages than the other commands:
pip install 'fp4engine[export]'
"""

import argparse
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fp4engine.cli.extras import needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``SOURCE DIRECTORY``, and how."""
    parser.add_argument("source", type=path, help="directory of config.json and safetensors, as save_pretrained writes")
    parser.add_argument("directory", type=path, help="where to write; must not be there, or be empty")
    parser.add_argument(
        "--recipe", default="nvfp4", help="row of the recipe book, JSON file, or module:function (default: %(default)s)"
    )
    parser.add_argument(
        "--format",
        default="compressed-tensors",
        choices=("compressed-tensors", "modelopt"),
        help="default: %(default)s",
    )
    parser.add_argument(
        "--inputs",
        help="'high_precision' (W4A16), 'dynamic', or a JSON file of what fp4engine.export.calibrate returns; "
        "needed where the recipe casts inputs",
    )
    parser.add_argument(
        "--keep-high-precision",
        nargs="*",
        metavar="PATTERN",
        help="modules to write in high precision (default: the head, such as lm_head)",
    )
    parser.add_argument("--no-shared-scales", action="store_true", help="give q/k/v and gate/up a scale each")
    parser.add_argument(
        "--requantize",
        nargs="?",
        const=True,
        default=False,
        choices=("lossless",),
        help="cast what no form holds to nearest NVFP4; 'lossless' writes MXFP4 as NVFP4 of the same values",
    )
    parser.add_argument(
        "--kv-cache",
        metavar="FILE",
        help="JSON file of how servers cache keys and values: the fields of what calibrate_kv_cache returns",
    )
    parser.add_argument("--force", action="store_true", help="write also what a reader takes for other numbers")
    verified = parser.add_mutually_exclusive_group()
    verified.add_argument(
        "--verify",
        dest="verified",
        action="store_true",
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


def run(arguments: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    with needs("export"):
        from fp4engine.export import command
    try:
        with _terminated_as_interrupted():
            return command.main(arguments)
    except (ImportError, NotImplementedError) as error:
        raise ValueError(str(error)) from error


def path(text: str) -> Path:
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


@contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """Region in which SIGTERM raises as Ctrl-C does, so that what was half written is removed."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only that one hears of signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
