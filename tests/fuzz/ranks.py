"""Cases on two processes, by gloo, that share outer amaxes; each is held against both ranks' steps by hand."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fp4engine
from tests.fuzz.cases import (
    Case,
    Results,
    by_engine,
    by_hand,
    draw,
    make_batches,
    make_module,
)
from tests.fuzz.verdict import differences, draws_in_forward
from tests.ranks import process_group, spawn

WORLD = 2


def drawn(seed: int, index: int) -> Case:
    """A case that both ranks can run: nothing that one of them would do without the other."""
    case = draw(seed, index)
    checkpoint = "none" if draws_in_forward(case) else case.checkpoint
    how = "backward" if case.how in ("grad", "inputs") else case.how
    return replace(case, how=how, wanted=frozenset(), threads=1, checkpoint=checkpoint)


class Exchange:
    """The largest of every rank's amax, between threads that take the place of the ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD)
        self.amaxes: list[Tensor] = [torch.empty(0)] * WORLD

    def share(self, rank: int, amax: Tensor) -> Tensor:
        self.amaxes[rank] = amax
        self.barrier.wait(60)
        largest = torch.stack(self.amaxes).abs().amax(0)  # keeps NaN
        self.barrier.wait(60)
        return largest


def prepared(case: Case, rank: int) -> tuple[torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    """The same module on every rank, and the rank's own data."""
    module = make_module(case, torch.Generator().manual_seed(case.seed))
    return module, make_batches(case, torch.Generator().manual_seed(case.seed + 1 + rank))


def both_by_hand(case: Case) -> list[Results]:
    exchange, found = Exchange(), [{} for _ in range(WORLD)]

    def work(rank: int) -> None:
        found[rank] = by_hand(case, *prepared(case, rank), rank, partial(exchange.share, rank))

    together([partial(work, rank) for rank in range(WORLD)])
    return found


def together(functions: list[Callable[[], Any]]) -> None:
    """Run each on a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def work(rank: int, folder: str, seed: int, first: int, cases: int) -> None:
    warnings.simplefilter("ignore")
    wrong: list[str] = []
    with process_group(rank, WORLD, f"{folder}/store"):
        for index in range(first, first + cases):
            case = drawn(seed, index)
            want = both_by_hand(case)[rank]
            fp4engine.manual_seed(case.seed)
            got = by_engine(case, *prepared(case, rank), dist.group.WORLD)
            got["draws"] = fp4engine.get_rng_state()["draws"].get("cpu", 0)
            wrong += [f"case {index}, rank {rank}: {difference} ({case})" for difference in differences(got, want)]
    Path(folder, f"{rank}.txt").write_text("\n".join(wrong))


def run(folder: Path, seed: int, first: int, cases: int) -> list[str]:
    """What is wrong on either rank."""
    spawn(work, (str(folder), seed, first, cases), WORLD)
    return [line for rank in range(WORLD) for line in Path(folder, f"{rank}.txt").read_text().splitlines()]
