"""Train small models that differ in their recipe only, several at once, and tabulate the gap to BF16.

    python examples/convergence/run.py noise switch                 # studies, on all GPUs there are; see --list
    python examples/convergence/run.py board --preset 3m --compile --seconds 500 --only-whole
    python examples/convergence/run.py noise --preset tiny          # seconds, on a CPU
    python examples/convergence/run.py noise switch --report        # tables and pictures of what is there

A finished run is one JSONL file below --results and is never repeated, and a run that was stopped continues bit for
bit, so the same command continues what was interrupted. All seeds of a variant come before the next variant.
"""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from convergence import results, sources
from convergence.studies import BASELINE, BOARD, PRESETS, STUDIES, VARIANTS, Conditions, variants_of
from convergence.together import Limits, Outcome, Run, Together, warm_up
from gpt.settings import InputError, whole
from gpt.training import StopRequest, compute_repeatably, stop_on_signals

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "convergence"
SCRATCH = ROOT / "runs" / "convergence"
AT_ONCE = 3
"""Models trained at the same time on each GPU: enough to fill gaps, few enough to leave something in its cache."""

MOST_COMPILERS = 12
"""Processes per GPU that compile kernels beforehand, each of which holds a model on the GPU."""

POLL_SECONDS = 0.2
LINE_SECONDS = 20.0
"""At least so long between two lines about the pace where the output is no terminal, which gets a bar."""

TRACEBACK_LINES = 15

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


class Dealer:
    """Hands runs out in their order, and keeps account of what becomes of them."""

    def __init__(self, runs: list[Run]) -> None:
        self.begin = time.time()
        self.waiting = list(runs)
        self.stopped = 0
        self.failed: dict[Run, str] = {}
        self.broken: list[str] = []
        self.told, self.steps = self.begin, 0
        self.bar = tqdm(total=sum(run.settings.steps for run in runs), unit="step", disable=None)

    def is_ready(self, run: Run) -> bool:
        return True

    def take(self, waits: bool = False) -> Run | None:
        """The first run that is ready, if any."""
        run = next(filter(self.is_ready, self.waiting), None)
        if run is not None:
            self.waiting.remove(run)
        return run

    def tell(self, outcome: Outcome) -> None:
        self.bar.update(outcome.steps)
        self.steps += outcome.steps
        if self.bar.disable and (seconds := time.time() - self.told) >= LINE_SECONDS:
            pace = 1000 * seconds / max(1, self.steps)
            print(f"{time.time() - self.begin:6.0f} s  {pace:.2f} ms per step", flush=True)
            self.told, self.steps = time.time(), 0
        if outcome.run is None:
            return
        self.stopped += outcome.kind == "stopped"
        if outcome.kind == "failed":
            self.failed[outcome.run] = outcome.traceback
        tqdm.write(f"{time.time() - self.begin:6.0f} s  {outcome.kind}: {outcome.run}")

    def end(self) -> None:
        """Close the bar; called however the run ends."""
        self.bar.close()

    def say_what_is_left(self) -> None:
        """Print which runs are left and which failed; called after the last run.

        Raises:
            InputError: some runs failed, or whole processes; the others are finished and saved.
        """
        if self.waiting or self.stopped:
            left = len(self.waiting) + self.stopped
            print(f"{left} runs are left, {self.stopped} of them begun: the same command continues")
        for run, text in self.failed.items():
            print(f"\n{run} failed:", *text.splitlines()[-TRACEBACK_LINES:], sep="\n    ", file=sys.stderr)
        if self.failed:
            raise InputError(f"{len(self.failed)} runs failed: {'; '.join(map(str, self.failed))}")
        if self.broken:
            raise InputError(f"processes failed, as said above: {', '.join(self.broken)}")


class GpuDealer(Dealer):
    """Deals to one process per GPU. A variant is ready as soon as other processes have compiled its kernels.

    The processes compile what all runs share while the data is read.
    """

    def __init__(self, runs: list[Run], compilers: int, folder: Path, scratch: Path, limits: Limits) -> None:
        super().__init__(runs)
        self.deadline = limits.deadline
        context = torch.multiprocessing.get_context("spawn")
        self.processes: dict[Connection, BaseProcess] = {}
        for gpu in gpus():
            here, there = context.Pipe()
            arguments = (gpu, there, runs[0].settings, folder, scratch, limits)
            process = context.Process(target=train_on, args=arguments, name=f"GPU {gpu}")
            process.start()
            there.close()  # so that the end of the process is the end of the connection
            self.processes[here] = process
        self.pools = [ProcessPoolExecutor(compilers, context, begin_process, (gpu,)) for gpu in gpus()]
        self.compiled: dict[str, Future[None]] = {}
        for run in runs:
            if run.variant not in self.compiled and run.variant != BASELINE:  # which has no kernels of ours
                pool = self.pools[len(self.compiled) % len(self.pools)]
                settings = dataclasses.replace(run.settings, compile=False)
                self.compiled[run.variant] = pool.submit(warm_up, settings, run.variant)

    def is_ready(self, run: Run) -> bool:
        return run.variant not in self.compiled or self.compiled[run.variant].done()

    def deal(self, corpus: Path, stop: StopRequest) -> None:
        """Hand out runs until every process has ended.

        After a request to stop no run is handed out: the processes save theirs and end.
        """
        processes = self.processes
        for connection in processes:
            self._send(connection, corpus)
        held: dict[Connection, set[Run]] = {connection: set() for connection in processes}
        asking: dict[Connection, bool] = {}
        while processes:
            for connection in wait(list(processes), POLL_SECONDS):
                assert isinstance(connection, Connection)
                try:
                    message: Any = connection.recv()
                except EOFError:
                    process = processes.pop(connection)
                    process.join()
                    if process.exitcode:
                        self.broken.append(process.name)
                    asking.pop(connection, None)
                    for run in held.pop(connection):
                        self.tell(Outcome("failed", run, traceback="the process of its GPU has ended"))
                    continue
                if isinstance(message, Outcome):
                    held[connection].discard(message.run)  # pyright: ignore[reportArgumentType]
                    self.tell(message)
                else:
                    asking[connection] = message
            for connection, waits in list(asking.items()):
                ends = stop.requested or time.time() >= self.deadline
                run = None if stop.requested else self.take()
                if run is None and waits and self.waiting and not ends:
                    continue  # until something is compiled
                del asking[connection]
                if run is not None:
                    held[connection].add(run)
                self._send(connection, run)
            if all(done.done() for done in self.compiled.values()):
                self._end_compilers()  # which frees their memory on the GPU

    def end(self) -> None:
        """Let no process wait for what will not come."""
        super().end()
        for connection in self.processes:
            connection.close()
        self._end_compilers()

    def _end_compilers(self) -> None:
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, connection: Connection, what: Path | Run | None) -> None:
        with suppress(BrokenPipeError):  # the end of a process is seen where it is received from
            connection.send(what)


def begin_process(gpu: str | None = None) -> None:
    """Prepare this process, on `gpu` or the CPU; to be called before anything asks for CUDA."""
    if gpu is not None:
        import triton  # which a CPU does without

        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # with fewer, streams wait for each other's kernels
        # Where torch.compile finds none it names another, and would not find what the other processes compile.
        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    torch.set_num_threads(1)
    compute_repeatably()


def train_on(gpu: str, dealer: Connection, like: Conditions, folder: Path, scratch: Path, limits: Limits) -> None:
    """What the process of a GPU does: compile what all runs share, ask for runs, and send what becomes of them."""

    def take(waits: bool) -> Run | None:
        dealer.send(waits)
        return dealer.recv()

    begin_process(gpu)
    with stop_on_signals() as stop:
        warm_up(like, BASELINE)
        try:
            corpus = sources.load(dealer.recv(), like.device)
        except EOFError:  # there is no data
            return
        Together(corpus, folder, scratch, limits, dealer.send).train(take, stop)


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def planned(studies: list[str], settings: Conditions, seeds: int, variants: list[str] | None = None) -> list[Run]:
    """Every run of the studies once: study by study, variant by variant, seed by seed.

    `variants` leaves out others, and says which come first.
    """
    runs = (
        Run(dataclasses.replace(settings, seed=seed), variant)
        for study in studies
        for variant in variants or variants_of(STUDIES[study])
        if variant in variants_of(STUDIES[study])
        for seed in range(seeds)
    )
    return list(dict.fromkeys(runs))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    new.add_argument("--list", action="store_true", help="show studies and variants")
    new.add_argument("--preset", choices=PRESETS, help="default: mini on a GPU, tiny on a CPU")
    new.add_argument("--tokens", type=whole, help="bytes to train on, such as 1e6, instead of the preset's")
    new.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    new.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help="only these, in this order")
    new.add_argument("--at-once", type=int, help=f"models trained at once (default: {AT_ONCE} on each GPU, else 1)")
    new.add_argument("--compile", action="store_true", help="torch.compile what is between linear layers, once for all")
    new.add_argument("--compilers", type=int, help="processes per GPU that compile kernels beforehand")
    new.add_argument("--data", help="a folder of text files (default: the Python sources found here)")
    new.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    new.add_argument("--seconds", type=float, default=float("inf"), help="save and stop after so many")
    new.add_argument("--only-whole", action="store_true", help="begin nothing that would not end within --seconds")
    new.add_argument("--results", type=Path, default=RESULTS, help="finished runs (default: %(default)s)")
    new.add_argument("--scratch", type=Path, default=SCRATCH, help="text and unfinished runs (default: %(default)s)")
    new.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="train nothing; print tables, or put into FILE"
    )
    return new


def settings_of(arguments: argparse.Namespace) -> Conditions:
    preset = PRESETS[arguments.preset or ("mini" if arguments.device == "cuda" else "tiny")]
    tokens = preset.tokens if arguments.tokens is None else arguments.tokens
    settings = dataclasses.replace(preset, device=arguments.device, tokens=tokens, compile=arguments.compile)
    settings.check()
    return settings


def train_missing(arguments: argparse.Namespace, settings: Conditions) -> None:
    deadline = time.time() + arguments.seconds
    folder, scratch = arguments.results, arguments.scratch
    runs = planned(arguments.studies, settings, arguments.seeds, arguments.variants)
    finished = {run: result for run in runs if (result := results.load(folder, run.settings, run.variant))}
    missing = [run for run in runs if run not in finished]
    print(f"{len(runs)} runs of {settings.steps} steps, {len(finished)} of them finished before")
    if not missing:
        return
    on_gpu = settings.device == "cuda"
    limits = Limits(settings.steps, arguments.at_once or (AT_ONCE if on_gpu else 1), deadline, arguments.only_whole)
    compilers = arguments.compilers or compilers_per_gpu()
    dealer = GpuDealer(missing, compilers, folder, scratch, limits) if on_gpu else Dealer(missing)
    try:
        corpus = sources.prepare(arguments.data, settings.sequence + 1, scratch)
        require_comparable(corpus, settings, finished)
        with stop_on_signals() as stop:
            if isinstance(dealer, GpuDealer):
                dealer.deal(corpus, stop)
            else:
                begin_process()
                Together(sources.load(corpus, "cpu"), folder, scratch, limits, dealer.tell).train(dealer.take, stop)
    finally:
        dealer.end()
    dealer.say_what_is_left()
    if stop.requested:
        raise KeyboardInterrupt


def require_comparable(corpus: Path, settings: Conditions, finished: dict[Run, results.Result]) -> None:
    """Check that finished runs and those to come can be compared, before any time is spent on the latter.

    Raises:
        InputError: some finished runs were trained on other text, or on a CPU where these are for a GPU, or reverse.
    """
    digest = sources.load(corpus, "cpu").digest[:16] if finished else ""
    for run, result in finished.items():
        if (result.header["device"] == "cpu") != (settings.device == "cpu"):
            raise InputError(
                f"{run} was trained on {result.header['device']}, and --device is {settings.device}: bf16 is FP32 on a "
                "CPU; give --results another folder"
            )
        if result.header["data"] != digest:
            raise InputError(
                f"the text here is {digest}, and {run} was trained on {result.header['data']}; "
                "move finished runs away, or give --results another folder"
            )


def compilers_per_gpu() -> int:
    return max(1, min(MOST_COMPILERS, len(os.sched_getaffinity(0)) // max(1, len(gpus())) - 2))


def check(arguments: argparse.Namespace) -> None:
    """Hold what was given against what there is.

    Raises:
        InputError: no study, an unknown one, a number out of range, or a device that is not here.
    """
    unknown = [name for name in arguments.studies if name not in STUDIES]
    if unknown or not arguments.studies:
        raise InputError(f"studies are {', '.join(STUDIES)}; got {', '.join(unknown) or 'none'}")
    for name, least in (("seeds", 1), ("at_once", 1), ("compilers", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not arguments.seconds >= 0:
        raise InputError(f"--seconds must be at least 0, got {arguments.seconds}")
    if arguments.device == "cuda" and arguments.report is None and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA device here")


def run(arguments: argparse.Namespace) -> None:
    check(arguments)
    settings = settings_of(arguments)
    try:
        if arguments.report is None:
            train_missing(arguments, settings)
    finally:
        publish(arguments, settings)


def publish(arguments: argparse.Namespace, settings: Conditions) -> None:
    # Here, because every process imports this file, and matplotlib takes its time.
    from convergence import gaps, leaderboard, report
    from fp4engine.cli.recipes import LEADERBOARD

    target = Path(arguments.report) if arguments.report else None
    text = report.write(arguments.studies, settings, arguments.seeds, arguments.results, target)
    if target is not None and BOARD in arguments.studies:
        found = gaps.load(STUDIES[BOARD], settings, arguments.seeds, arguments.results)
        leaderboard.ship(found, settings.preset, LEADERBOARD)
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
    except KeyboardInterrupt:
        print("run: stopped; the same command continues", file=sys.stderr)
        return INTERRUPTED
    except InputError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"run: {where}{error.strerror or error}; finished runs are whole", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
