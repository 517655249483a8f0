"""Whole models, FP8 and emulated NVFP4 beside BF16 in the same run: tokens per second, peak memory, what is saved.

    python benchmarks/training.py [--models 85m 1b] [--precisions bf16 nvfp4] [--out benchmarks/results]

The model is the example's GPT (RMSNorm, rotary positions, SwiGLU, SDPA), FP32 parameters under torch.autocast(bf16),
fused AdamW, random tokens. Each model runs eager, compiled, and with the whole step replayed as one CUDA graph; the
first precision is the denominator of every ratio. Delayed scaling remembers on the host, so it runs eager only. `saved`
is all that a forward pass keeps for backward, `linears` what the linear layers do.
"""

import gc
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import argument_parser, environment, write_json

import fp4engine
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.measure import memory_of, saved_by_linears, watch_saved
from gpt.model import GPT

MODELS = {
    "85m": dict(layers=12, width=768, sequence=1024, batch=32),
    "1b": dict(layers=20, width=2048, sequence=2048, batch=4),
}
MODES = ("eager", "compiled", "graph")
WARM_UP, STEPS = 4, 10
PRECISIONS: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8_current": Float8CurrentScaling(),
    "fp8_delayed": DelayedScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def saved_bytes(model: GPT, tokens: torch.Tensor, recipe: Recipe | None) -> int:
    """Bytes that one forward pass keeps for backward."""
    watch, kept = watch_saved(model)
    with watch:
        forward(model, tokens, recipe)
    return memory_of(kept)


def forward(model: GPT, tokens: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16), fp4engine.autocast(enabled=recipe is not None, recipe=recipe):
        return model.loss(tokens)


def graphed(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``step``, captured once and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def measure(config: dict[str, int], recipe: Recipe | None, mode: str) -> dict[str, float]:
    """Tokens per second, peak bytes and bytes saved for backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config["layers"], config["width"], config["sequence"])
    if recipe is not None:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    tokens = torch.randint(0, 256, (config["batch"], config["sequence"] + 1), device="cuda")
    saved = saved_bytes(model, tokens, recipe)
    linears = saved_by_linears(model, lambda: forward(model, tokens, recipe))
    run = torch.compile(forward, fullgraph=True) if mode == "compiled" else forward

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run(model, tokens, recipe)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if mode == "graph":
        step = graphed(step)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / STEPS
    return {
        "tokens_per_second": config["batch"] * config["sequence"] / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "saved_bytes": saved,
        "saved_by_linears": linears,
        "loss": float(loss),
    }


HEADER = """| model | mode | precision | tokens/s | of bf16 | peak GiB | saved GiB | linears GiB | of bf16 |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the Markdown table; the shares are of the first precision's row."""
    peak, saved, linears = (row[name] / 2**30 for name in ("peak_bytes", "saved_bytes", "saved_by_linears"))
    return (
        f"| {row['model']} | {row['mode']} | {row['precision']} | {row['tokens_per_second']:,.0f} | {row['ratio']:.3f} "
        f"| {peak:.2f} | {saved:.2f} | {linears:.3f} | {row['saved_by_linears'] / first['saved_by_linears']:.3f} |"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    for name, mode in itertools.product(arguments.models, arguments.modes):
        first = None
        for precision in arguments.precisions:
            recipe = PRECISIONS[precision]
            if mode != "eager" and recipe is not None and recipe.is_delayed:
                continue
            row = dict(model=name, mode=mode, precision=precision, **measure(MODELS[name], recipe, mode))
            gc.collect()
            torch.cuda.empty_cache()
            first = first or row
            row["ratio"] = row["tokens_per_second"] / first["tokens_per_second"]
            rows.append(row)
            print(line(row, first), flush=True)
            # after every row: an interrupted run keeps its own
            write_json(arguments.out / "training.json", dict(environment=environment(), rows=rows))


if __name__ == "__main__":
    main()
