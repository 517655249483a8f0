"""Train a small byte-level GPT in NVFP4 beside its BF16 twin, on any machine.

    make train                                             # the standard library's source, in minutes, CPU or GPU
    python examples/train_gpt.py --preset 10m --name big   # a GPU preset
    python examples/train_gpt.py --name big --resume       # continue bit for bit after Ctrl-C or a crash

Every precision starts from the same weights and sees the same bytes in the same order. A run's folder `runs/NAME`
gets `config.json`, `report.md`, `loss.png`, and per precision `metrics.jsonl`, `recipe.json` and `checkpoints/`.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

import fp4engine
from fp4engine.compare.files import LOCK, alone_in
from fp4engine.compare.loop import compute_repeatably
from fp4engine.files import write_atomically
from gpt import report
from gpt.data import Corpus, load_corpus
from gpt.model import GPT
from gpt.settings import PRESETS, InputError, Settings, folder_of, whole
from gpt.training import Diverged, Interrupted, Result, Trainer

CONFIG, DATA_DIGEST = "config.json", "data.sha256"

REFUSED, DIVERGED, INTERRUPTED = 2, 1, 130
"""Exit codes."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage: `--help` is for that."""
        self.exit(REFUSED, f"train_gpt: {message}\n")


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parser() -> Parser:
    new = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--name", help="folder below --runs (default: preset and time; with --resume the newest)")
    new.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    new.add_argument("--resume", action="store_true", help="continue a run with the settings it began with")
    settings = new.add_argument_group("settings", "fixed when a run begins; a preset gives the defaults")

    def add(name: str, **options: Any) -> None:
        settings.add_argument(name, default=argparse.SUPPRESS, **options)

    add("--preset", choices=PRESETS, help="cpu: minutes on two cores; 10m, 30m, 85m parameters: for a GPU")
    add(
        "--data",
        type=lambda text: str(Path(text).resolve()),
        help="a folder of text files (default: the source of Python's standard library)",
    )
    add(
        "--precision",
        type=words,
        help="bf16 and recipes (rows of the book, JSON files, module:function), by commas; gaps are to the first",
    )
    add("--keep-high-precision", type=words, help="patterns of linear layers that stay out of FP4 (default: lm_head)")
    add("--tokens", type=whole, help="bytes to train on, e.g. 1e9")
    for name in ("--layers", "--width", "--sequence", "--batch", "--evaluate-every", "--checkpoint-every", "--seed"):
        add(name, type=whole)
    add("--learning-rate", type=float, help="at its peak")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--compile", action="store_true", help="torch.compile the model")
    return new


def written(value: Any) -> str:
    """A setting as it is written on the command line."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def begin(given: dict[str, Any], folder: Path) -> Settings:
    """Settings of a new run in `folder`; nothing is written yet."""
    require_unbegun(folder)
    device = given.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    preset = PRESETS[given.get("preset", "10m" if device == "cuda" else "cpu")]
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA device here")
    settings = dataclasses.replace(preset, **{"device": device, **given})
    settings.check()
    with torch.device("meta"):
        model = GPT(settings.layers, settings.width, settings.sequence)
    try:
        fp4engine.convert(model, keep_high_precision=settings.keep_high_precision)
    except ValueError as error:
        raise InputError(f"--keep-high-precision: {error}") from error
    return settings


def require_unbegun(folder: Path) -> None:
    """A run begins in a folder that is not there, or in which one was stopped before it began.

    Raises:
        InputError: there is a run in `folder`, or something else.
    """
    if (folder / CONFIG).exists():
        raise InputError(f"{folder} holds a run; continue it with --resume, or give another --name")
    if folder.exists():
        ours = {name + end for name in (LOCK, CONFIG, DATA_DIGEST) for end in ("", ".partial")}
        others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if others:
            raise InputError(
                f"{folder} exists and holds no run: it has {others[0]!r} and no {CONFIG}, so that nothing can begin or "
                "be resumed there; give another --name, or move the folder away"
            )


def resume(given: dict[str, Any], folder: Path) -> Settings:
    """Settings of the run in `folder`, which must not contradict those given."""
    if not (folder / CONFIG).exists():
        raise InputError(f"--resume: {folder} holds no run, there is no {CONFIG}; begin one by leaving --resume out")
    settings = Settings.load(folder / CONFIG)
    for name, value in given.items():
        begun_with = getattr(settings, name)
        if value != begun_with:
            option = name.replace("_", "-")
            raise InputError(f"--resume: {folder} began with --{option} {written(begun_with)}, not {written(value)}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--resume: {folder} ran on CUDA, and PyTorch finds no CUDA device here")
    return settings


def choose_folder(arguments: argparse.Namespace) -> Path:
    if arguments.name:
        if Path(arguments.name).name != arguments.name or arguments.name == "..":
            raise InputError(f"--name must be the name of one folder, got {arguments.name!r}")
        return arguments.runs / arguments.name
    if not arguments.resume:
        return arguments.runs / time.strftime("%Y%m%d-%H%M%S")
    begun = sorted(arguments.runs.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    if not begun:
        raise InputError(f"--resume: there is no run in {arguments.runs}")
    return begun[-1].parent


def train_all(settings: Settings, folder: Path, corpus: Corpus) -> list[Result]:
    results: list[Result] = []
    for precision in settings.precision:
        finished = folder_of(folder, precision) / "result.json"
        if finished.exists():
            results.append(Result.load(finished))
            continue
        trainer = Trainer(settings, precision, folder, corpus)
        if trainer.recipe is not None:
            write_atomically(folder_of(folder, precision) / "plan.txt", f"{trainer.plan}\n")
            print(f"{precision}: {trainer.plan.summary}")
        if trainer.step:
            print(f"{precision}: continues after step {trainer.step}")
        results.append(trainer.train())
    return results


def run(arguments: argparse.Namespace, folder: Path) -> None:
    options = vars(arguments)
    given = {name: value for name, value in options.items() if name not in ("name", "runs", "resume")}
    settings = resume(given, folder) if arguments.resume else begin(given, folder)
    corpus = load_corpus(settings.data, settings.sequence + 1, torch.device(settings.device))
    print(f"{folder}: {len(corpus.training):,} bytes to train on, {len(corpus.validation):,} to validate")
    with alone_in(folder, "give another --name or --runs"):
        if arguments.resume:
            require_same_text(folder, corpus)
        else:
            remember(folder, settings, corpus)
        try:
            results = train_all(settings, folder, corpus)
        except Interrupted as stop:
            again = [sys.executable, sys.argv[0], "--runs", str(arguments.runs), "--name", folder.name, "--resume"]
            print(f"stopped after step {stop.step}, all saved; to continue: {shlex.join(again)}")
            raise
        with torch.device("meta"):
            model = GPT(settings.layers, settings.width, settings.sequence)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        text = f"{report.table(results)}\n\n{report.notes(settings, results, parameters)}\n"
        write_atomically(folder / "report.md", text)
        print(f"\n{text}\nloss curves: {report.plot(folder, settings)}")


def remember(folder: Path, settings: Settings, corpus: Corpus) -> None:
    """Write what the data is, and last the settings, which make the folder that of a run."""
    require_unbegun(folder)  # asked again, now that no other process can begin here
    write_atomically(folder / DATA_DIGEST, corpus.digest + "\n")
    write_atomically(folder / CONFIG, settings.to_json())


def require_same_text(folder: Path, corpus: Corpus) -> None:
    """Hold the data against what it was.

    Raises:
        InputError: it is other data, or nobody can tell.
    """
    digest = folder / DATA_DIGEST
    if not digest.exists():
        raise InputError(f"--resume: {digest} is missing, which tells whether the text files are still the same")
    if digest.read_bytes().decode(errors="replace").strip() != corpus.digest:
        raise InputError(f"--resume: the text files are not those that {folder} began with")


def main(argv: list[str] | None = None) -> int:
    compute_repeatably()
    arguments = parser().parse_args(argv)
    folder = None
    try:
        folder = choose_folder(arguments)
        run(arguments, folder)
    except InputError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        saved = folder is not None and (folder / CONFIG).exists()
        rest = "what was saved before is whole, continue it with --resume" if saved else "no run has begun"
        print(f"train_gpt: {where}{error.strerror or error}; {rest}", file=sys.stderr)
        return REFUSED
    except Diverged as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return DIVERGED
    except Interrupted:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
