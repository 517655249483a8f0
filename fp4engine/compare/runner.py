"""Many runs at once: a process per GPU, or per core of a CPU, each of which trains one run after the other."""

import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fp4engine.arguments import one_line
from fp4engine.compare.files import InputError, place_of
from fp4engine.compare.loop import compute_repeatably, duration, stop_on_signals
from fp4engine.compare.recorder import Run
from fp4engine.compare.task import Task
from fp4engine.compare.training import Outcome, Places, train
from fp4engine.environment import see_one_gpu, visible_gpus

LOOK_SECONDS = 0.2
"""Between two looks at how far the runs are."""

LINE_SECONDS = 15.0
"""Between two lines about progress where the output is no terminal, which gets a bar."""


@dataclass(frozen=True)
class Job:
    """A run to make; see :func:`fp4engine.compare.training.train` for ``looks`` and ``keep``."""

    task: Task
    run: Run
    looks: bool = False
    keep: Path | None = None

    def is_done(self, places: Places) -> bool:
        """Whether the run has finished, in this session or an earlier one."""
        return self.run.path(places.finished, self.task.setting()).exists()


class Stopped(Exception):
    """The user asked to stop, or time is up; what is left continues when the same is asked again."""


@dataclass
class _Worker:
    """A process, the slot in which it says how far its run is, and that run."""

    slot: int
    pool: ProcessPoolExecutor
    job: Job | None = None


class Runner:
    """Processes that make runs; a region, at whose end they end.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        at_once: processes on a CPU, each of which computes on one core; on GPUs there is one for each.
        deadline: :func:`time.monotonic` at which what is under way is saved.
    """

    def __init__(self, places: Places, *, device: str, at_once: int, deadline: float = math.inf) -> None:
        self.places, self.deadline = places, deadline
        self.names = visible_gpus(torch.cuda.device_count()) if device == "cuda" else [""] * at_once
        context = multiprocessing.get_context("spawn")  # a process with a CUDA context must not be forked
        self._steps, self._stop = context.Array("q", len(self.names)), context.Event()
        self._context = context
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.pool.shutdown(wait=True, cancel_futures=True)

    def _pool(self, slot: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _begin, (self.names[slot], self._steps, slot, self._stop))

    def make(self, jobs: Sequence[Job], what: str = "runs") -> None:
        """Make what has not been made yet.

        Args:
            what: the runs are, for the line about progress.

        Raises:
            InputError: some runs failed; the others are finished and saved.
            Stopped: some runs are left.
        """
        waiting = [job for job in jobs if not job.is_done(self.places)]
        if not waiting:
            return
        slots = range(len(self._workers), min(len(waiting), len(self.names)))
        self._workers += [_Worker(slot, self._pool(slot)) for slot in slots]
        failed: dict[str, list[str]] = {}  # the runs by why
        stopped = 0
        with _Progress(waiting, what) as progress, stop_on_signals() as asked:
            busy: dict[Future[Outcome], _Worker] = {}
            while waiting or busy:
                if asked.requested or time.monotonic() >= self.deadline:
                    self._stop.set()
                for worker in self._workers if not self._stop.is_set() else []:
                    if waiting and worker.job is None:
                        worker.job, self._steps[worker.slot] = waiting.pop(0), 0
                        busy[worker.pool.submit(_train, worker.job, self.places)] = worker
                if not busy:
                    break
                for future in wait(busy, LOOK_SECONDS, FIRST_COMPLETED).done:
                    worker = busy.pop(future)
                    assert worker.job is not None
                    told = self._outcome(future, worker)
                    stopped += told == "stopped"
                    if told not in ("finished", "stopped"):
                        failed.setdefault(told, []).append(str(worker.job.run))
                    progress.ended(worker.job, told)
                    worker.job = None
                live = [(w.job, self._steps[w.slot]) for w in self._workers if w.job is not None]
                progress.show(live, waiting)
        if failed:
            whys = "; ".join(f"{' and '.join(runs)}: {why}" for why, runs in failed.items())
            count = sum(map(len, failed.values()))
            raise InputError(f"{count} of {len(jobs)} runs failed, and what finished is kept: {whys}")
        if waiting or stopped:
            raise Stopped(
                f"{len(waiting) + stopped} runs are left, {stopped} of them begun: the same command continues"
            )

    def _outcome(self, future: Future[Outcome], worker: _Worker) -> str:
        """``"finished"``, ``"stopped"``, or why the run failed, in one line."""
        try:
            return future.result()
        except BrokenProcessPool:
            worker.pool = self._pool(worker.slot)
            return (
                "its process has died, for want of memory perhaps, if no error is above; try a smaller --batch, or "
                "fewer --jobs"
            )
        except Exception as error:
            return one_line(error)


class _Progress:
    """A bar over the steps of all runs, or a line now and then, with the time left."""

    def __init__(self, jobs: Sequence[Job], what: str) -> None:
        total = sum(job.task.steps for job in jobs)
        shape = "{desc} {percentage:3.0f}%|{bar}| {postfix}"
        self.bar = tqdm(total=total, desc=f"{len(jobs)} {what}", disable=None, bar_format=shape, dynamic_ncols=True)
        self.runs, self.what, self.done, self.ended_runs = len(jobs), what, 0, 0
        self.pace: dict[tuple[str, int], float] = {}
        self.first: dict[tuple[str, str], tuple[float, int]] = {}  # when a run was first seen to train, and its step
        self.told = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def ended(self, job: Job, told: str) -> None:
        """A run has ended."""
        self.ended_runs += 1
        self.done += job.task.steps if told == "finished" else 0
        if told not in ("finished", "stopped"):
            tqdm.write(f"failed: {job.run}: {told}")

    def show(self, live: Sequence[tuple[Job, int]], waiting: Sequence[Job]) -> None:
        """Say how far the runs are."""
        now = time.monotonic()
        for job, step in live:
            if step:
                begin, before = self.first.setdefault((str(job.run), job.run.key({})), (now, step))
                if step > before:
                    self.pace[job.run.label, job.task.steps] = (now - begin) / (step - before)
        left = self._left(live, waiting)
        named = [f"{job.run} {step}/{job.task.steps}" for job, step in live if not job.task.short]
        named = [*named[:2], *["…"] * (len(named) > 2), *([] if left is None else [f"about {duration(left)} left"])]
        words = ", ".join(named)
        done = self.done + sum(step for _, step in live)
        if not self.bar.disable:
            self.bar.n = done
            self.bar.set_postfix_str(words)
        elif now - self.told >= LINE_SECONDS:
            share = done / (self.bar.total or 1)
            print(f"{self.ended_runs} of {self.runs} {self.what}, {share:.0%} of the steps: {words}", flush=True)
            self.told = now

    def _left(self, live: Sequence[tuple[Job, int]], waiting: Sequence[Job]) -> float | None:
        """Seconds, if runs go on at the pace of those with the same label; a new label may be as slow as any."""
        if not self.pace:
            return None
        slowest = max(self.pace.values())
        todo = [(job, job.task.steps - step) for job, step in live] + [(job, job.task.steps) for job in waiting]
        seconds = [steps * self.pace.get((job.run.label, job.task.steps), slowest) for job, steps in todo]
        return max(sum(seconds) / max(len(live), 1), max(seconds, default=0.0))


_slot: list[Any] = []
"""Of a process that trains: where it says how far it is, which slot is its, and the request to stop."""


def _begin(gpu: str, steps: Any, slot: int, stop: Any) -> None:
    """Prepare a process that trains; called before anything asks for CUDA."""
    if gpu:
        see_one_gpu(gpu)
    else:
        torch.set_num_threads(1)  # as many processes as cores: faster for small models, and sums do not depend on it
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a terminal or a job; one of them deals
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", ".*does not have a deterministic implementation.*")  # the page says what repeats
    compute_repeatably(warn_only=True)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _slot[:] = [steps, slot, stop]


def _leave_with_parent() -> None:
    """End when nobody is there any more to deal, or to be told; one that waits for a run would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(job: Job, places: Places) -> Outcome:
    steps, slot, stop = _slot

    def tell(step: int) -> None:
        steps[slot] = step

    try:
        return train(job.task, job.run, places, looks=job.looks, keep=job.keep, tell=tell, stop=stop.is_set)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whose kind may be one that no other process can unpickle
        raise InputError(one_line(error) + place_of(error)) from error
