"""Train small models that differ in their recipe only, several at once, and tabulate the gap to BF16.

    python examples/convergence/run.py noise switch                 # studies, on all GPUs there are; see --list
    python examples/convergence/run.py ends --preset micro --seeds 3 --stop-after 500
    python examples/convergence/run.py noise --preset tiny          # seconds, on a CPU
    python examples/convergence/run.py noise switch --report        # tables and pictures of what is there

A finished run is one JSONL file below --results and is never repeated, and a run that was stopped continues bit for
bit, so the same command continues what was interrupted. Seeds are finished one after the other, each for all variants.
"""

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from convergence import results, sources
from convergence.studies import PRESETS, STUDIES, VARIANTS, variants_of
from convergence.training import train
from gpt.data import Corpus
from gpt.settings import InputError, Settings
from gpt.training import compute_repeatably

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "convergence"
SCRATCH = ROOT / "runs" / "convergence"
WORKERS_PER_GPU = 4
POLL_SECONDS = 0.5
TRACEBACK_LINES = 15


@dataclass(frozen=True)
class Run:
    """One model to train."""

    settings: Settings
    variant: str

    def path(self, folder: Path) -> Path:
        return results.path_of(folder, self.settings, self.variant)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.settings.seed}"


class Worker:
    """What a worker process holds: its GPU, the data, and a counter of steps that the parent's progress bar reads."""

    corpus: Corpus
    scratch: Path
    steps_done: Any

    @classmethod
    def begin(cls, gpu: str, scratch: Path, steps_done: Any) -> None:
        if gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything asks for CUDA
        torch.set_num_threads(1)
        compute_repeatably()
        cls.scratch, cls.steps_done = scratch, steps_done

    @classmethod
    def run(cls, run: Run, corpus: Path, folder: Path, deadline: float) -> bool:
        """Whether the run is finished; if not, it was stopped."""
        if not hasattr(cls, "corpus"):
            cls.corpus = sources.load(corpus, run.settings.device)
        unfinished = results.unfinished(cls.scratch, run.settings, run.variant, cls.corpus.digest)
        rows = train(run.settings, run.variant, cls.corpus, cls.advance, unfinished, deadline)
        if rows is None:
            return False
        results.save(run.path(folder), rows)
        shutil.rmtree(unfinished, ignore_errors=True)
        return True

    @classmethod
    def advance(cls, steps: int) -> None:
        with cls.steps_done.get_lock():
            cls.steps_done.value += steps


class Lanes:
    """Worker processes, dealt out to the GPUs. One in which a run failed is replaced: a CUDA error stays for good."""

    def __init__(self, number: int, device: str, scratch: Path) -> None:
        self.context = torch.multiprocessing.get_context("spawn")
        self.steps_done = self.context.Value("q", 0)
        self.gpus = gpus() if device == "cuda" else [""]
        self.scratch = scratch
        self.lanes = [self._lane(index) for index in range(number)]

    def _lane(self, index: int) -> ProcessPoolExecutor:
        arguments = (self.gpus[index % len(self.gpus)], self.scratch, self.steps_done)
        lane = ProcessPoolExecutor(1, self.context, Worker.begin, arguments)
        lane.submit(int)  # starts the process, which imports while the parent reads the data
        return lane

    def submit(self, index: int, *arguments: Any) -> Future[bool]:
        return self.lanes[index].submit(Worker.run, *arguments)

    def replace(self, index: int) -> None:
        self.lanes[index].shutdown(wait=False)
        self.lanes[index] = self._lane(index)

    def shutdown(self) -> None:
        for lane in self.lanes:
            lane.shutdown()


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def planned(studies: list[str], settings: Settings, seeds: int, variants: list[str] | None = None) -> list[Run]:
    """Every run of the studies once: seed by seed, and for each seed study by study. `variants` leaves out others."""
    runs = (
        Run(dataclasses.replace(settings, seed=seed), variant)
        for seed in range(seeds)
        for study in studies
        for variant in variants_of(STUDIES[study])
        if variants is None or variant in variants
    )
    return list(dict.fromkeys(runs))


def train_all(runs: list[Run], lanes: Lanes, corpus: Path, folder: Path, deadline: float) -> None:
    """Train what is not finished, one run per lane; at `deadline` save what is under way and begin nothing.

    Raises:
        InputError: some runs failed; the others are finished and saved.
    """
    begin = time.time()
    waiting = list(reversed(runs))
    idle = list(reversed(range(len(lanes.lanes))))
    running: dict[Future[bool], tuple[Run, int]] = {}
    failed: dict[Run, str] = {}
    stopped = 0
    with tqdm(total=sum(run.settings.steps for run in runs), unit="step", disable=None) as bar:
        while running or (waiting and time.time() < deadline):
            while waiting and idle and time.time() < deadline:
                run, lane = waiting.pop(), idle.pop()
                running[lanes.submit(lane, run, corpus, folder, deadline)] = run, lane
            done, _ = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
            bar.update(lanes.steps_done.value - bar.n)
            for future in done:
                run, lane = running.pop(future)
                error = future.exception()
                if error is not None:
                    failed[run] = "".join(traceback.format_exception(error))
                    lanes.replace(lane)
                finished = error is None and future.result()
                stopped += error is None and not finished
                idle.append(lane)
                outcome = "failed" if error is not None else "finished" if finished else "stopped"
                tqdm.write(f"{time.time() - begin:6.0f} s  {outcome}: {run}")
    if waiting or stopped:
        print(f"{len(waiting) + stopped} runs are left, {stopped} of them begun: the same command continues")
    for run, text in failed.items():
        print(f"\n{run} failed:", *text.splitlines()[-TRACEBACK_LINES:], sep="\n    ", file=sys.stderr)
    if failed:
        raise InputError(f"{len(failed)} runs failed: {'; '.join(map(str, failed))}")


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    new.add_argument("--list", action="store_true", help="show studies and variants")
    new.add_argument("--preset", choices=PRESETS, help="default: mini on a GPU, tiny on a CPU")
    new.add_argument("--tokens", type=float, help="bytes to train on, instead of the preset's")
    new.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    new.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help="train these only")
    new.add_argument("--workers", type=int, help=f"models trained at once (default: {WORKERS_PER_GPU} per GPU, else 1)")
    new.add_argument("--compile", action="store_true", help="torch.compile the model: pays for runs of minutes")
    new.add_argument("--data", help="a folder of text files (default: the Python sources found here)")
    new.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    new.add_argument("--stop-after", type=float, default=float("inf"), help="save and stop after so many seconds")
    new.add_argument("--results", type=Path, default=RESULTS, help="finished runs (default: %(default)s)")
    new.add_argument("--scratch", type=Path, default=SCRATCH, help="text and unfinished runs (default: %(default)s)")
    new.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="train nothing; print tables, or put into FILE"
    )
    return new


def settings_of(arguments: argparse.Namespace) -> Settings:
    preset = PRESETS[arguments.preset or ("mini" if arguments.device == "cuda" else "tiny")]
    tokens = preset.tokens if arguments.tokens is None else int(arguments.tokens)
    settings = dataclasses.replace(preset, device=arguments.device, tokens=tokens, compile=arguments.compile)
    settings.check()
    return settings


def train_missing(arguments: argparse.Namespace, settings: Settings) -> None:
    deadline = time.time() + arguments.stop_after
    folder = arguments.results
    runs = planned(arguments.studies, settings, arguments.seeds, arguments.variants)
    missing = [run for run in runs if results.load(run.path(folder), run.settings) is None]
    print(f"{len(runs)} runs of {settings.steps} steps, {len(runs) - len(missing)} of them finished before")
    if not missing:
        return
    default = WORKERS_PER_GPU * len(gpus()) if settings.device == "cuda" else 1
    lanes = Lanes(min(arguments.workers or default, len(missing)), settings.device, arguments.scratch)
    try:
        corpus = sources.prepare(arguments.data, settings.sequence + 1, arguments.scratch)
        train_all(missing, lanes, corpus, folder, deadline)
    finally:
        lanes.shutdown()


def run(arguments: argparse.Namespace) -> None:
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown or not arguments.studies:
        raise InputError(f"studies are {', '.join(STUDIES)}; got {', '.join(unknown) or 'none'}")
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {arguments.seeds}")
    settings = settings_of(arguments)
    try:
        if arguments.report is None:
            train_missing(arguments, settings)
    finally:
        publish(arguments, settings)


def publish(arguments: argparse.Namespace, settings: Settings) -> None:
    from convergence import report  # here, because every worker imports this file, and matplotlib takes its time

    target = Path(arguments.report) if arguments.report else None
    text = report.write(arguments.studies, settings, arguments.seeds, arguments.results, target)
    if target is None:
        print(f"\n{text}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.list:
        for name, study in STUDIES.items():
            print(f"{name}: {study.question}\n    {shlex.join(study.variants)}")  # as --variants takes them
        return 0
    try:
        run(arguments)
    except InputError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
