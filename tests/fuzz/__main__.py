"""python -m tests.fuzz --cases 10000 --seed 7      random steps against the step by hand, byte for byte."""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from tqdm import tqdm

from tests.fuzz import cases, ranks, verdict


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    new.add_argument("--cases", type=int, default=2000, help="how many (default: 2000)")
    new.add_argument("--seed", type=int, default=0)
    new.add_argument("--first", type=int, default=0, help="number of the first case")
    new.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    new.add_argument("--device", help="run there, against the same steps there without moves, caches and checkpoints")
    new.add_argument("--ranks", action="store_true", help="on two processes that share outer amaxes")
    return new


def failure(seed: int, index: int, device: str | None = None) -> str:
    """What is wrong with a case, and how to run it again; empty if nothing is."""
    case = cases.draw(seed, index)
    try:
        wrong = verdict.run(case, device)
    except Exception:
        wrong = [traceback.format_exc()]
    if not wrong:
        return ""
    where = f" --device {device}" if device else ""
    again = f"python -m tests.fuzz --seed {seed} --first {index} --cases 1{where}"
    return "\n  ".join([f"case {index}: {case}", *wrong, f"again: {again}"])


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
    with tqdm(numbers, desc=f"seed {arguments.seed}", unit="case", disable=None) as bar:
        for index in bar:
            if time.monotonic() - began > arguments.seconds:
                break
            done += 1
            if text := failure(arguments.seed, index, arguments.device):
                failed += 1
                bar.write(text)
    print(f"{done} cases of seed {arguments.seed} in {time.monotonic() - began:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
