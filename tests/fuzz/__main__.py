"""python -m tests.fuzz --cases 10000 --seed 7      random steps against the step by hand, byte for byte."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from tests.fuzz import ranks, verdict


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    new.add_argument("--cases", type=int, default=2000, help="how many (default: 2000)")
    new.add_argument("--seed", type=int, default=0)
    new.add_argument("--first", type=int, default=0, help="number of the first case")
    new.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    new.add_argument("--device", help="run there, against the same steps there without moves, caches and checkpoints")
    new.add_argument("--jobs", type=int, default=1, help="how many processes run cases (default: 1)")
    new.add_argument("--ranks", action="store_true", help="on two processes that share outer amaxes")
    return new


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    torch.set_num_threads(1)  # the matrices are tiny
    if arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            failures = ranks.run(Path(folder), arguments.seed, arguments.first, arguments.cases)
        print("\n".join([*failures, f"{arguments.cases} cases on {ranks.WORLD} ranks, {len(failures)} differences"]))
        return 1 if failures else 0
    began, done, failed = time.monotonic(), 0, 0
    numbers = range(arguments.first, arguments.first + arguments.cases)
    with ExitStack() as stack:
        run = partial(verdict.failure, arguments.seed, device=arguments.device)
        texts: Iterator[str] = map(run, numbers)
        if arguments.jobs > 1:
            pool = stack.enter_context(get_context("spawn").Pool(arguments.jobs, torch.set_num_threads, (1,)))
            texts = pool.imap(run, numbers, chunksize=8)
        bar = stack.enter_context(tqdm(texts, f"seed {arguments.seed}", len(numbers), unit="case", disable=None))
        for text in bar:
            done += 1
            if text:
                failed += 1
                bar.write(text)
            if time.monotonic() - began > arguments.seconds:
                break
    print(f"{done} cases of seed {arguments.seed} in {time.monotonic() - began:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
