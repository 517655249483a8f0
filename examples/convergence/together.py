"""Several runs in one process on one device, a step of each in turn: kernels of one fill the gaps of another."""

import gc
import math
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from convergence import results
from convergence.studies import Conditions
from convergence.training import Feed, Training
from gpt.data import Corpus
from gpt.training import StopRequest

STEPS_PER_LOOK = 20
"""Steps of each run on a GPU between two looks at it; the host waits there, so that a deadline means something."""

PACE_MEMORY = 0.8
"""Weight of what is known when the seconds of a step are measured once more."""

MARGIN = 1.1
"""A run is begun if it would end in time even so much slower than expected, and given up if only so much faster."""


@dataclass(frozen=True)
class Run:
    """One model to train."""

    settings: Conditions
    variant: str

    def path(self, folder: Path) -> Path:
        return results.path_of(folder, self.settings, self.variant)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.settings.seed}"


class Outcome(NamedTuple):
    """What became of a run, or, without one, how many steps were done since the last time."""

    kind: Literal["finished", "stopped", "failed", "steps"]
    run: Run | None = None
    steps: int = 0
    traceback: str = ""


Take = Callable[[bool], Run | None]
"""The next run, if any is ready; asked with True it waits for one, and None means that there are no more."""

Tell = Callable[[Outcome], None]


@dataclass(frozen=True)
class Limits:
    """How many runs at once, and when to end.

    Attributes:
        steps: of a run.
        deadline: :func:`time.time` at which what is under way is saved.
        only_whole: begin nothing that, by the pace so far, would not end before the deadline, and stop what turns out
            too slow for it.
    """

    steps: int
    at_once: int = 1
    deadline: float = math.inf
    only_whole: bool = False


class Together:
    """Trains what it is given. A finished run is a file below `folder`, a stopped one waits below `scratch`."""

    def __init__(self, corpus: Corpus, folder: Path, scratch: Path, limits: Limits, tell: Tell) -> None:
        self.feed, self.folder, self.scratch, self.limits, self.tell = Feed(corpus), folder, scratch, limits, tell
        self.live: dict[Run, Training] = {}
        self.pace: dict[str, float] = {}  # seconds that the device needs for a step of a variant

    def train(self, take: Take, stop: StopRequest | None = None) -> None:
        """Train runs until there are no more, the deadline has come, or somebody asks to stop."""
        stop = stop or StopRequest()
        while time.time() < self.limits.deadline and not stop.requested:
            while len(self.live) < self.limits.at_once and self._would_end():
                run = take(not self.live)
                if run is None:
                    break
                self._attempt(run, self._begin)
            if not self.live:
                return
            self._round()
        for run in list(self.live):
            self._attempt(run, self._stop)

    def _would_end(self) -> bool:
        """Whether one more run would end before the deadline, if all share the device evenly."""
        if not self.limits.only_whole:
            return True
        if not self.pace:
            return not self.live
        seconds = self._seconds_left() + min(self.pace.values()) * self.limits.steps
        return time.time() + MARGIN * seconds <= self.limits.deadline

    def _seconds_left(self) -> float:
        """What the device needs for the rest of the runs that are under way; an unknown variant may be the fastest."""
        fastest = min(self.pace.values(), default=0.0)
        return sum(
            self.pace.get(run.variant, fastest) * (training.settings.steps - training.step)
            for run, training in self.live.items()
        )

    def _stop_what_would_not_end(self) -> None:
        """The run with the fewest steps, if by their pace not all would end before the deadline."""
        left = self.limits.deadline - time.time()
        if self.limits.only_whole and self.live and self._seconds_left() > MARGIN * max(left, 0.0):
            last = min(self.live, key=lambda run: self.live[run].step)
            self._attempt(last, self._stop)

    def _attempt(self, run: Run, work: Callable[[Run], None]) -> None:
        """Do `work`; an error ends this run alone.

        Raises:
            RuntimeError: CUDA keeps the error, so that no run could go on in this process.
        """
        try:
            work(run)
        except Exception:
            self.live.pop(run, None)
            self.tell(Outcome("failed", run, traceback=traceback.format_exc()))
            if torch.device(run.settings.device).type == "cuda":
                torch.cuda.synchronize()

    def _begin(self, run: Run) -> None:
        self.live[run] = Training(run.settings, run.variant, self.feed)
        self.live[run].restore(self._waiting_place(run))

    def _round(self) -> None:
        """Some steps of every run, and then a look at each."""
        begin = time.time()
        before = {run: (training.step, len(training.validation)) for run, training in self.live.items()}
        is_warm = all(training.is_warm for training in self.live.values())
        on_gpu = any(training.on_gpu for training in self.live.values())
        for work in (*[Training.train_step] * (STEPS_PER_LOOK if on_gpu else 1), Training.settle):
            for run in list(self.live):
                self._attempt(run, lambda run, work=work: work(self.live[run]))
        seconds = time.time() - begin
        steps = sum(training.step - before[run][0] for run, training in self.live.items())
        validated = any(len(training.validation) > before[run][1] for run, training in self.live.items())
        variants = {run.variant for run in self.live}
        if is_warm and steps:  # a validation ends a round, which then has few steps and takes long
            for variant in variants if len(variants) == 1 and not validated else variants - self.pace.keys():
                known = self.pace.get(variant, seconds / steps)
                self.pace[variant] = PACE_MEMORY * known + (1 - PACE_MEMORY) * seconds / steps
        self.tell(Outcome("steps", steps=steps))
        for run, training in list(self.live.items()):
            training.seconds += seconds / len(before)
            if training.has_ended:
                self._attempt(run, self._finish)
        self._stop_what_would_not_end()

    def _finish(self, run: Run) -> None:
        results.save(run.path(self.folder), self.live.pop(run).rows())
        gc.collect()  # frees the memory of its graphs now, and not while another is captured
        shutil.rmtree(self._waiting_place(run), ignore_errors=True)
        self.tell(Outcome("finished", run))

    def _stop(self, run: Run) -> None:
        self.live.pop(run).save(self._waiting_place(run))
        self.tell(Outcome("stopped", run))

    def _waiting_place(self, run: Run) -> Path:
        return results.unfinished(self.scratch, run.settings, run.variant, self.feed.corpus.digest)


def warm_up(settings: Conditions, variant: str) -> None:
    """Compile the kernels of a variant, on bytes that mean nothing: for this process, and into the cache on disk."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (2**16,), generator=generator, dtype=torch.uint8).to(settings.device)
    Training(settings, variant, Feed(Corpus(noise, noise, ""))).warm_up()
    torch.cuda.empty_cache()
