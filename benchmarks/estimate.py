"""Estimates beside the measured runs of benchmarks/results, as Markdown tables.

    python benchmarks/estimate.py

Needs no GPU. The first table has the eager rows of training.json, by what the host took for a layer: in FP8 on that
day, the fastest step of fp8.json, whose smaller layers wait for the host; in NVFP4 by step.json, where the GPU takes
longer. The second has its rows of CUDA graphs, which need no host. The third has the eager rows of distributed.json and
distributed-tp.json without tensor parallelism. Delayed scaling remembers on the host and is not estimated.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp4engine.estimate import MODELS as KNOWN
from fp4engine.estimate import Architecture, Estimate, estimate
from fp4engine.recipe import zoo

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "85m": (Architecture(12, 768, 12, 2048, 256, fused_qkv=True), {"batch": 32, "sequence": 1024}),
    "1b": (Architecture(20, 2048, 32, 5504, 256, fused_qkv=True), {"batch": 4, "sequence": 2048}),
    "8b": (KNOWN["Llama-3-8B"], {"batch": 1, "sequence": 2048, "checkpointing": True}),
}
MEMORY = """| GPU | model | precision | peak GiB, measured | estimated | linears keep, bytes, measured | estimated \
| tokens/s, measured | estimated |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""
SPEED = """| GPU | model | precision | tokens/s in a CUDA graph, measured | estimated |
| --- | --- | --- | ---: | ---: |"""
SHARED = """| GPUs | model | precision | peak GiB, measured | estimated | tokens/s of one GPU, measured | estimated |
| --- | --- | --- | ---: | ---: | ---: | ---: |"""


def recorded(*files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(GPU, row)`` of every row."""
    for file in files:
        record = json.loads((RESULTS / file).read_text())
        gpu = record["environment"]["gpu"].removeprefix("NVIDIA ").split()[0]
        for row in record["rows"]:
            yield gpu, row


def host_microseconds() -> dict[str, float]:
    """Precision -> what the host took for a layer."""
    fp8 = min(row["current"] for row in json.loads((RESULTS / "fp8.json").read_text())["rows"]) * 1e3
    nvfp4 = json.loads((RESULTS / "step.json").read_text())["host_microseconds"]["nvfp4"]
    return {"bf16": 0.0, "fp8_current": fp8, "nvfp4": nvfp4}


def estimated(gpu: str, row: dict[str, Any], **step: Any) -> Estimate:
    sizes, batch = MODELS[row["model"]]
    recipe = None if row["precision"] == "bf16" else zoo.make(row["precision"])
    return estimate(sizes, recipe=recipe, gpu=gpu, **batch, **step)


def beside(measured: float, value: float) -> tuple[str, str]:
    """Both, in tokens per second."""
    return f"{measured:,.0f}", f"{value:,.0f} ({value / measured - 1:+.0%})"


def memory(measured: float, value: float) -> tuple[str, str]:
    """Both, in GiB."""
    return f"{measured / 2**30:.2f}", f"{value / 2**30:.2f} ({value / measured - 1:+.1%})"


def show(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    hosts = host_microseconds()
    print(MEMORY)
    for gpu, row in recorded("training.json"):
        if row["mode"] == "eager" and row["precision"] in hosts:
            result = estimated(gpu, row, host_microseconds=hosts[row["precision"]])
            kept = f"{row['saved_by_linears']:,}", f"{result.saved_by_linears:,}"
            speed = beside(row["tokens_per_second"], result.tokens_per_second)
            show(gpu, row["model"], row["precision"], *memory(row["peak_bytes"], result.peak), *kept, *speed)
    print(f"\n{SPEED}")
    for gpu, row in recorded("training.json", "training-1b.json"):
        if row["mode"] == "graph":
            result = estimated(gpu, row, host_microseconds=0.0)
            show(gpu, row["model"], row["precision"], *beside(row["tokens_per_second"], result.tokens_per_second))
    print(f"\n{SHARED}")
    for gpu, row in recorded("distributed-tp.json", "distributed.json"):
        ranks = {"one": 1, "fsdp": 2}.get(row["layout"])
        if row["compiled"] or ranks is None or row["model"] not in MODELS:
            continue
        result = estimated(gpu, row, parameters=row["parameters"], fsdp=ranks)
        speed = beside(row["tokens_per_second"] / ranks, result.tokens_per_second)
        show(f"{gpu} x {ranks}", row["model"], row["precision"], *memory(row["peak_bytes"], result.peak), *speed)


if __name__ == "__main__":
    main()
