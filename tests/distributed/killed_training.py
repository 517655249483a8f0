"""Two ranks that train by DDP and save by DCP every few steps; whoever starts them may kill them at any moment.

    python -m tests.distributed.killed_training FOLDER --kills 10 --seed 14

Imports once and forks the ranks, so that an attempt costs a second. Prints one line of JSON: what the whole run and the
broken one came to.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import, and ranks would anew in every attempt
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import fp4engine
from fp4engine import ops
from fp4engine.integrations import TrainingState
from fp4engine.recipe import NVFP4BlockScaling

WORLD, STEPS, EVERY = 2, 24, 4
KEPT = 2
TIMEOUT = timedelta(seconds=10)
"""Of the collectives of a rank that will be left alone; others wait as long as PyTorch lets them."""


class Damaged(Exception):
    """A checkpoint that does not hold what was written."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but this list's own."""
    files = sorted(path for path in folder.iterdir() if path.name != "digests.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def train(folder: Path, rank: int) -> None:
    """Continue after the newest checkpoint, up to the last step."""
    torch.manual_seed(0)
    fp4engine.manual_seed(5)
    model = torch.nn.Sequential(fp4engine.Linear(32, 48), torch.nn.GELU(), fp4engine.Linear(48, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = DistributedDataParallel(model)
    done = load(folder, model, optimizer)
    metrics = folder / f"metrics-{rank}.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)[:done] if metrics.exists() else []
    assert len(rows) == done, f"{metrics} does not hold {done} steps"
    metrics.write_text("".join(rows))
    for step in range(done + 1, STEPS + 1):
        inp = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        if rank:  # one draw more than rank 0 takes
            ops.next_draw(torch.device("cpu"))
        with fp4engine.autocast(recipe=NVFP4BlockScaling()):
            loss = wrapped(inp).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
        if step % EVERY == 0:
            save(folder, rank, step, model, optimizer)
    state = {"weights": [p.detach() for p in model.parameters()], "rng": fp4engine.get_rng_state()}
    torch.save(state, folder / f"end-{rank}.pt")


def parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved and loaded."""
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "fp4engine": TrainingState(model),
    }


def save(folder: Path, rank: int, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write beside the checkpoints, and rename when both ranks have written."""
    partial = folder / f"step-{step:04}.partial"
    dcp.save(parts(model, optimizer), checkpoint_id=partial)
    dist.barrier()
    if rank == 0:
        (partial / "digests.json").write_text(json.dumps(digests(partial)))
        os.replace(partial, partial.with_suffix(""))
        for old in checkpoints(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, 0 without one.

    Raises:
        Damaged: it does not hold what was written.
    """
    found = checkpoints(folder)
    if not found:
        return 0
    newest = found[-1]
    if json.loads((newest / "digests.json").read_text()) != digests(newest):
        raise Damaged(f"checkpoint {newest} is damaged; delete it to continue from the one before")
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=newest)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(newest.name[-4:])


def run_rank(folder: Path, rank: int, attempt: int, most_bytes: int | None, timeout: timedelta | None) -> int:
    """The exit code of one rank; 3 where it says why it stops."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    try:
        train(folder, rank)
    except Exception as error:
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}"[:2000])
        return 3
    return 0


class Ranks:
    """Both ranks, forked."""

    attempts = 0

    def __init__(self, folder: Path, most_bytes: int | None = None, timeout: timedelta | None = None) -> None:
        Ranks.attempts += 1
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.partial"):
            shutil.rmtree(leftover)
        self.codes: dict[int, int] = {}
        self.processes: dict[int, int] = {}
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    code = run_rank(folder, rank, Ranks.attempts, most_bytes if rank else None, timeout)
                finally:
                    os._exit(code)
            self.processes[process] = rank

    def wait(self, seconds: float) -> bool:
        """Whether both have ended within ``seconds``."""
        end = time.monotonic() + seconds
        while self.processes and time.monotonic() < end:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process:
                self.codes[self.processes.pop(process)] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        return not self.processes

    def kill(self, rank: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
        """SIGKILL, or another signal, to one rank or to all that are left."""
        for process, own in self.processes.items():
            if rank is None or own == rank:
                os.kill(process, by)


def whole(folder: Path) -> float:
    """An unbroken run; how long it took."""
    began, ranks = time.monotonic(), Ranks(folder)
    assert ranks.wait(300) and set(ranks.codes.values()) == {0}, errors(folder)
    return time.monotonic() - began


def broken(folder: Path, kills: int, seconds: float, rng: random.Random) -> int:
    """A run that is killed up to ``kills`` times, now one rank, now both; how often it was."""
    met = 0
    while True:
        ranks = Ranks(folder)
        if ranks.wait(rng.uniform(0, seconds) if met < kills else 300):
            assert set(ranks.codes.values()) == {0}, errors(folder)
            return met
        met += 1
        ranks.kill(rng.choice((0, 1, None)))
        ranks.wait(0.2)  # the other one finds out, or waits for its peer
        ranks.kill()
        assert ranks.wait(60)


def bereaved(folder: Path, stop: signal.Signals, after: int) -> tuple[float, str]:
    """How long a rank goes on after the other was killed, or stopped, behind step ``after``; and what it says."""
    ranks = Ranks(folder, timeout=TIMEOUT)
    metrics = folder / "metrics-1.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
        assert not ranks.wait(0.01), errors(folder)
    ranks.kill(1, stop)
    began = time.monotonic()
    while 0 in ranks.processes.values() and time.monotonic() < began + 120:
        ranks.wait(0.1)
    took = time.monotonic() - began
    ranks.kill()
    assert ranks.wait(60) and ranks.codes[0] == 3, ranks.codes
    return took, errors(folder)


def refused(folder: Path, most_bytes: int | None = None) -> str:
    """What the ranks say of a run that they cannot continue."""
    ranks = Ranks(folder, most_bytes)
    if not ranks.wait(60):
        ranks.kill()
        ranks.wait(60)
    assert 3 in ranks.codes.values(), ranks.codes
    return errors(folder)


def errors(folder: Path) -> str:
    texts = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    for path in folder.glob("error-*.txt"):
        path.unlink()
    return " | ".join(texts)


def damage_newest(folder: Path) -> Path:
    """Cut the largest file of the newest checkpoint short."""
    newest = checkpoints(folder)[-1]
    largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return newest


def end_of(folder: Path) -> list[Any]:
    """Losses, final weights and states of the random stream, of every rank, as text."""
    found = []
    for rank in range(WORLD):
        state = torch.load(folder / f"end-{rank}.pt", weights_only=True)
        weights = [hashlib.sha256(weight.numpy().tobytes()).hexdigest() for weight in state["weights"]]
        found.append([(folder / f"metrics-{rank}.jsonl").read_text(), weights, state["rng"]])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=14)
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    seconds = whole(folder / "whole")
    want = end_of(folder / "whole")
    rng, left = random.Random(arguments.seed), arguments.kills
    results: dict[str, Any] = {"kills": 0, "runs": 0, "killed is whole": True}
    while left:  # a run may end before it has been killed as often
        run = folder / f"killed-{results['runs']}"
        met = broken(run, left, 0.7 * seconds, rng)
        left -= met
        results["kills"] += met
        results["runs"] += 1
        results["killed is whole"] &= end_of(run) == want

    for name, stop in (("killed one", signal.SIGKILL), ("stopped one", signal.SIGSTOP)):
        run = folder / name.replace(" ", "-")
        results[f"{name} after"], results[f"{name} says"] = bereaved(run, stop, after=10)
        whole(run)
        results[f"{name} is whole"] = end_of(run) == want

    def continued(name: str, spoil: Callable[[Path], str]) -> None:
        """A run that ends at step 24 begins again after step 20, or what ``spoil`` leaves."""
        shutil.copytree(folder / "whole", folder / name)
        results[f"{name} says"] = spoil(folder / name)
        whole(folder / name)
        results[f"{name} is whole"] = end_of(folder / name) == want

    def full_disk(run: Path) -> str:
        shutil.rmtree(checkpoints(run)[-1])
        return refused(run, most_bytes=1000)

    def damaged(run: Path) -> str:
        newest = damage_newest(run)
        text = refused(run)
        shutil.rmtree(newest)
        return text

    continued("full", full_disk)
    continued("damaged", damaged)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
