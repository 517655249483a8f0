"""How every benchmark here times, and what it notes beside its figures."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 7


def time_in_turn(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each variant over rounds; each round runs every variant ``repeats`` times.

    Variants take turns, so that a GPU at its power limit treats them alike.
    """
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            run()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def repeats_for(flops: float) -> int:
    """Repeats that make a round of one variant last about 10 ms at 700 TFLOP/s."""
    return max(2, min(30, int(7e12 / flops)))


def environment() -> dict[str, str]:
    """GPU, versions, date and command of a run."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }
