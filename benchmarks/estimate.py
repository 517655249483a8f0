"""Estimates beside the measured runs of benchmarks/results/training.json, as a Markdown table.

    python benchmarks/estimate.py

Needs no GPU. Eager rows only; delayed scaling remembers on the host and is not estimated.
"""

import json
from pathlib import Path

from fp4engine.estimate import Architecture, estimate
from fp4engine.recipe import zoo

RESULTS = Path(__file__).parent / "results" / "training.json"
MODELS = {
    "85m": (Architecture(12, 768, 12, 2048, 256, fused_qkv=True), {"batch": 32, "sequence": 1024}),
    "1b": (Architecture(20, 2048, 32, 5504, 256, fused_qkv=True), {"batch": 4, "sequence": 2048}),
}
HEADER = """| model | precision | peak GiB, measured | estimated | linears keep, bytes, measured | estimated \
| tokens/s, measured | estimated |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    recorded = json.loads(RESULTS.read_text())
    gpu = recorded["environment"]["gpu"].removeprefix("NVIDIA ")
    print(HEADER)
    for row in recorded["rows"]:
        if row["mode"] != "eager" or row["precision"] == "fp8_delayed":
            continue
        sizes, step = MODELS[row["model"]]
        recipe = None if row["precision"] == "bf16" else zoo.make(row["precision"])
        result = estimate(sizes, recipe=recipe, gpu=gpu, **step)
        peaks, speeds = (row["peak_bytes"], result.peak), (row["tokens_per_second"], result.tokens_per_second)
        print(
            f"| {row['model']} | {row['precision']} | {peaks[0] / 2**30:.2f} "
            f"| {peaks[1] / 2**30:.2f} ({peaks[1] / peaks[0] - 1:+.1%}) | {row['saved_by_linears']:,} "
            f"| {result.saved_by_linears:,} | {speeds[0]:,.0f} | {speeds[1]:,.0f} ({speeds[1] / speeds[0] - 1:+.0%}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
