"""How every benchmark here times, and what it notes beside its figures."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Of one run on the GPU, the mean over ``repeats``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


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
            times[name].append(milliseconds(run, repeats))
    return {name: statistics.median(values) for name, values in times.items()}


def graph_seconds(run: Callable[[Tensor], object], inputs: list[Tensor], launches: int = 8) -> float:
    """Median seconds per call of ``run``, inputs in rotation."""
    run(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(inputs[i % len(inputs)])
    graph.replay()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / launches)
    return statistics.median(times)


def host_microseconds(calls: dict[str, Callable[[], object]], repeats: int = 200) -> dict[str, float]:
    """Median of each call over rounds in which all take turns: the host's speed changes from one second to the next."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(25):
        for name, run in calls.items():
            run()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                run()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / repeats * 1e6)
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
