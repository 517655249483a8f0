"""Train small models that differ in their recipe only, and tabulate the gap to BF16.

    python examples/convergence/run.py noise switch                 # studies, on all GPUs there are; see --list
    python examples/convergence/run.py board --preset 3m --compile --seconds 500
    python examples/convergence/run.py noise --preset tiny          # seconds, on a CPU
    python examples/convergence/run.py noise switch --report        # tables and pictures of what is there

A finished run is one JSONL file below --results and is never repeated while its recipe stays the same, and a run that
was stopped continues bit for bit, so the same command continues what was interrupted. All seeds of a variant come
before the next variant. For a model and data of one's own there is `fp4engine compare`, which this uses.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from convergence import sources
from convergence.studies import BOARD, PRESETS, STUDIES, VARIANTS, Conditions, variants_of
from convergence.task import run_of, task_of, variant_of
from fp4engine.compare import read_folders
from fp4engine.compare.runner import Job, Runner, Stopped
from fp4engine.compare.training import Places
from fp4engine.environment import cores
from gpt.settings import InputError, whole

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "convergence"
SCRATCH = ROOT / "runs" / "convergence"

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    new.add_argument("--list", action="store_true", help="show studies and variants")
    new.add_argument("--preset", choices=PRESETS, help="default: mini on a GPU, tiny on a CPU")
    new.add_argument("--tokens", type=whole, help="bytes to train on, such as 1e6, instead of the preset's")
    new.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    new.add_argument(
        "--variants",
        nargs="+",
        metavar="VARIANT",
        help="only these, in this order: variants of the studies, rows of the recipe book, JSON files, module:function",
    )
    new.add_argument("--compile", action="store_true", help="torch.compile what is between linear layers, once for all")
    new.add_argument("--data", help="a folder of text files (default: the Python sources found here)")
    new.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    new.add_argument("--jobs", type=int, default=cores(), help="runs at once on a CPU (default here: %(default)s)")
    new.add_argument("--seconds", type=float, default=math.inf, help="save and stop after so many")
    new.add_argument("--results", type=Path, default=RESULTS, help="finished runs (default: %(default)s)")
    new.add_argument("--scratch", type=Path, default=SCRATCH, help="text and unfinished runs (default: %(default)s)")
    new.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="train nothing; print tables, or put into FILE"
    )
    new.add_argument("--spreads", metavar="FILE", help="train nothing; write how far apart the gaps of seeds lie")
    return new


def settings_of(arguments: argparse.Namespace) -> Conditions:
    preset = PRESETS[arguments.preset or ("mini" if arguments.device == "cuda" else "tiny")]
    tokens = preset.tokens if arguments.tokens is None else arguments.tokens
    settings = dataclasses.replace(preset, device=arguments.device, tokens=tokens, compile=arguments.compile)
    settings.check()
    return settings


def labels_of(studies: Sequence[str], variants: Sequence[str] | None) -> list[str]:
    """The variants of the studies, each once; of those given, the ones that a study has, and all other recipes."""
    known = dict.fromkeys(label for study in studies for label in variants_of(STUDIES[study]))
    if variants is None:
        return list(known)
    others = {label for study in STUDIES.values() for label in variants_of(study)} - known.keys()
    return [label for label in dict.fromkeys(variants) if label not in others]


def train_missing(arguments: argparse.Namespace, settings: Conditions) -> None:
    deadline = time.monotonic() + arguments.seconds
    task = task_of(settings, sources.prepare(arguments.data, settings.sequence + 1, arguments.scratch))
    folder = arguments.results / settings.preset
    labels = labels_of(arguments.studies, arguments.variants)
    jobs = [Job(task, run_of(label, settings, seed)) for label in labels for seed in range(arguments.seeds)]
    results = read_folders([folder]) if folder.is_dir() else []
    require_comparable(task.setting(), [result.header["setting"] for result in results])
    finished = {result.key for result in results}
    missing = [job for job in jobs if job.run.key(task.setting()) not in finished]
    print(f"{len(jobs)} runs of {settings.steps} steps, {len(jobs) - len(missing)} of them finished before")
    places = Places(folder, arguments.scratch / "unfinished")
    with Runner(places, device=settings.device, at_once=arguments.jobs, deadline=deadline) as runner:
        runner.make(missing)


def require_comparable(setting: dict[str, object], finished: list[dict[str, object]]) -> None:
    """Check that finished runs and those to come can be compared, before any time is spent on the latter.

    Raises:
        InputError: some finished runs of this preset were trained on other text, or on a CPU, or on a GPU.
    """
    for other in finished:
        if all(other.get(name) == value for name, value in setting.items() if name not in ("data", "on")):
            for name, what in (("data", "text"), ("on", "a device")):
                if other.get(name) != setting[name]:
                    raise InputError(
                        f"finished runs were trained on {what} {other.get(name)}, these would be on {setting[name]}; "
                        "move them away, or give --results another folder"
                    )


def check(arguments: argparse.Namespace) -> None:
    """Hold what was given against what there is.

    Raises:
        InputError: no study, an unknown one, no such recipe, a number out of range, or a device that is not here.
    """
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown or not (arguments.studies or arguments.spreads):
        raise InputError(f"studies are {', '.join(STUDIES)}; got {', '.join(unknown) or 'none'}")
    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if not arguments.seconds >= 0:
        raise InputError(f"--seconds must be at least 0, got {arguments.seconds}")
    if arguments.device == "cuda" and arguments.report is None and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA device here")
    for label in arguments.variants or ():
        variant_of(label)


def run(arguments: argparse.Namespace) -> None:
    check(arguments)
    if arguments.spreads:
        from convergence import tables

        rows = [dataclasses.asdict(spread) for spread in tables.spreads(arguments.results, arguments.seeds)]
        Path(arguments.spreads).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        return
    settings = settings_of(arguments)
    try:
        if arguments.report is None:
            train_missing(arguments, settings)
    finally:
        publish(arguments, settings)


def publish(arguments: argparse.Namespace, settings: Conditions) -> None:
    from convergence import tables  # here, because every process imports this file, and matplotlib takes its time
    from fp4engine.cli.recipes import LEADERBOARD

    target = Path(arguments.report) if arguments.report else None
    text = tables.write(arguments.studies, settings, arguments.seeds, arguments.results, target, arguments.variants)
    if target is not None and BOARD in arguments.studies:
        found = tables.load(STUDIES[BOARD], settings, arguments.seeds, arguments.results)
        if found is not None:
            tables.ship(found, settings.preset, LEADERBOARD)
    if target is None:
        print(f"\n{text}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.list:
        for name, study in STUDIES.items():
            print(f"{name}: {study.question}\n    {shlex.join(study.variants)}")  # as --variants takes them
        print("Gaps that were expected before the first run, over the default's:")
        for name, variant in VARIANTS.items():
            if variant.expected is not None:
                print(f"    {name}: {variant.expected:.2f}")
        return 0
    try:
        run(arguments)
    except (KeyboardInterrupt, Stopped) as stopped:
        print(f"run: {stopped or 'stopped; the same command continues'}", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"run: {where}{error.strerror or error}; finished runs are whole", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
