"""Train small models that differ in their recipe only, several at once, and tabulate the gap to BF16.

    python examples/convergence/run.py noise switch                 # studies, in order; see --list
    python examples/convergence/run.py ends --preset 10m --seeds 3 --workers 4
    python examples/convergence/run.py noise --preset tiny          # seconds, on a CPU

A finished run is one JSONL file below --results and is never repeated, so the same command continues what was
interrupted, and prints tables and pictures once all its runs are there.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from convergence import report, results
from convergence.sources import python_sources
from convergence.studies import PRESETS, STUDIES, variants_of
from convergence.training import train
from gpt.data import Corpus, load_corpus
from gpt.settings import InputError, Settings

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "convergence"
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Run:
    """One model to train."""

    settings: Settings
    variant: str

    def path(self, folder: Path) -> Path:
        return results.path_of(folder, self.settings, self.variant)


class Worker:
    """What a worker process holds: the data, and a counter of steps that the parent's progress bar reads."""

    corpus: Corpus
    steps_done: Any

    @classmethod
    def begin(cls, corpus: Path, steps_done: Any, device: str) -> None:
        torch.set_num_threads(1)
        cls.corpus = Corpus(**torch.load(corpus, map_location=device))
        cls.steps_done = steps_done

    @classmethod
    def run(cls, run: Run, path: Path) -> None:
        results.save(path, train(run.settings, run.variant, cls.corpus, cls.advance))

    @classmethod
    def advance(cls, steps: int) -> None:
        with cls.steps_done.get_lock():
            cls.steps_done.value += steps


def planned(studies: list[str], settings: Settings, seeds: int) -> list[Run]:
    """Every run of the studies once: study by study, and within one seed by seed."""
    runs = (
        Run(dataclasses.replace(settings, seed=seed), variant)
        for study in studies
        for seed in range(seeds)
        for variant in variants_of(STUDIES[study])
    )
    return list(dict.fromkeys(runs))


def train_all(runs: list[Run], folder: Path, corpus: Corpus, workers: int, stop_after: float) -> None:
    """Train what is not finished, `workers` at a time; begin none after `stop_after` seconds.

    Raises:
        InputError: some runs failed; the others are finished and saved.
    """
    begin = time.monotonic()
    context = torch.multiprocessing.get_context("spawn")
    steps_done = context.Value("q", 0)
    waiting = list(reversed(runs))
    running: dict[Future[None], Run] = {}
    failed: list[str] = []
    bar = tqdm(total=sum(run.settings.steps for run in runs), unit="step", disable=None)
    with tempfile.TemporaryDirectory() as scratch, bar:
        shared = Path(scratch) / "corpus.pt"
        torch.save(vars(corpus), shared)
        arguments = (shared, steps_done, runs[0].settings.device)
        with ProcessPoolExecutor(workers, context, Worker.begin, arguments) as pool:
            while running or (waiting and time.monotonic() - begin < stop_after):
                while waiting and len(running) < workers and time.monotonic() - begin < stop_after:
                    run = waiting.pop()
                    running[pool.submit(Worker.run, run, run.path(folder))] = run
                done, _ = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
                bar.update(steps_done.value - bar.n)
                for future in done:
                    name = f"{running[future].variant}, seed {running.pop(future).settings.seed}"
                    error = future.exception()
                    tqdm.write(f"{time.monotonic() - begin:6.0f} s  {name}  {'' if error is None else repr(error)}")
                    failed += [] if error is None else [name]
    if waiting:
        print(f"{len(waiting)} runs are left: the same command continues")
    if failed:
        raise InputError(f"{len(failed)} runs failed: {'; '.join(failed)}")


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    new.add_argument("--list", action="store_true", help="show studies and variants")
    new.add_argument("--preset", choices=PRESETS, help="default: mini on a GPU, tiny on a CPU")
    new.add_argument("--tokens", type=float, help="bytes to train on, instead of the preset's")
    new.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    new.add_argument("--workers", type=int, help="models trained at once (default: 8 on a GPU, 1 on a CPU)")
    new.add_argument("--data", help="a folder of text files (default: the Python sources found here)")
    new.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    new.add_argument("--results", type=Path, default=RESULTS, help="where runs are kept (default: %(default)s)")
    new.add_argument("--stop-after", type=float, default=float("inf"), help="begin no run after so many seconds")
    return new


def settings_of(arguments: argparse.Namespace) -> Settings:
    preset = PRESETS[arguments.preset or ("mini" if arguments.device == "cuda" else "tiny")]
    tokens = preset.tokens if arguments.tokens is None else int(arguments.tokens)
    settings = dataclasses.replace(preset, device=arguments.device, tokens=tokens)
    settings.check()
    return settings


def run(arguments: argparse.Namespace) -> None:
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown or not arguments.studies:
        raise InputError(f"studies are {', '.join(STUDIES)}; got {', '.join(unknown) or 'none'}")
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {arguments.seeds}")
    settings, folder = settings_of(arguments), arguments.results
    runs = planned(arguments.studies, settings, arguments.seeds)
    missing = [run for run in runs if results.load(run.path(folder), run.settings) is None]
    print(f"{len(runs)} runs of {settings.steps} steps, {len(runs) - len(missing)} of them finished before")
    if missing:
        length = settings.sequence + 1
        corpus = load_corpus(arguments.data, length, torch.device("cpu")) if arguments.data else python_sources(length)
        print(f"{len(corpus.training):,} bytes to train on, {len(corpus.validation):,} to validate")
        workers = arguments.workers or (8 if settings.device == "cuda" else 1)
        train_all(missing, folder, corpus, workers, arguments.stop_after)
    for study in arguments.studies:
        print(f"\n{report.write(study, settings, arguments.seeds, folder)}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.list:
        for name, study in STUDIES.items():
            print(f"{name}: {study.question}\n    {', '.join(study.variants)}")
        return 0
    try:
        run(arguments)
    except InputError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
