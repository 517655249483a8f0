"""How every benchmark here times, what it notes beside its figures, and where it writes them."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The milliseconds that one run takes on the GPU: a mean over ``repeats``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def time_in_turn(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each variant over rounds; each round runs every variant ``repeats`` times.

    Variants take turns. In short ones a GPU at its power limit runs all of them at one clock. In turns of some tenths
    of a second each settles at its own: a variant that takes less power runs faster, as it does when it runs alone.
    """
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            for _ in range(1 + repeats // 4):
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
    return statistics.median(milliseconds(graph.replay, 1) * 1e-3 / launches for _ in range(9))


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


def repeats_for(flops: float, seconds: float = 0.01) -> int:
    """Repeats that make a turn of one variant last about ``seconds`` at 700 TFLOP/s."""
    return max(2, min(int(3000 * seconds), int(7e14 * seconds / flops)))


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


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """A parser for the benchmark with this docstring, which knows `--out`, the folder of results."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    return parser


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write what was measured, and make the folder if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
