"""Whole models, FP8 and emulated NVFP4 beside BF16 in the same run: tokens per second, peak memory, what is saved.

    python benchmarks/training.py [--models 85m 1b] [--precisions bf16 nvfp4] [--out benchmarks/results]

The model is the example's GPT (RMSNorm, rotary positions, SwiGLU, SDPA), FP32 parameters under torch.autocast(bf16),
fused AdamW, random tokens. Each model runs eager, compiled, and with the whole step replayed as one CUDA graph. All
precisions of a mode are in memory together (106 GiB for 1b) and take turns of half a second, in which the GPU's clock
settles; the first precision is the denominator of every ratio. Delayed scaling remembers on the host, so it runs eager
only. `linears` is what the linear layers keep of a forward pass for backward. The table is what README and
docs/results.md quote.
"""

import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import argument_parser, environment, milliseconds, time_in_turn, write_json

import fp4engine
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.measure import saved_by_linears
from gpt.model import GPT

MODELS = {
    "85m": dict(layers=12, width=768, sequence=1024, batch=32),
    "1b": dict(layers=20, width=2048, sequence=2048, batch=4),
}
MODES = ("eager", "compiled", "graph")
WARM_UP = 4
TURN = 0.5
"""Seconds of a precision's turn."""
PRECISIONS: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8_current": Float8CurrentScaling(),
    "fp8_delayed": DelayedScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def forward(model: GPT, tokens: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16), fp4engine.autocast(enabled=recipe is not None, recipe=recipe):
        return model.loss(tokens)


class Graphed:
    """A step that is captured once and replayed. It holds the step, since a graph knows addresses of tensors alone."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.step = step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step()

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.loss


def prepare(config: dict[str, int], recipe: Recipe | None, mode: str) -> tuple[Callable[[], Any], dict[str, int]]:
    """A training step that has run a few times, and the bytes that it takes."""
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config["layers"], config["width"], config["sequence"])
    if recipe is not None:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    tokens = torch.randint(0, 256, (config["batch"], config["sequence"] + 1), device="cuda")
    linears = saved_by_linears(model, lambda: forward(model, tokens, recipe))
    run = torch.compile(forward, fullgraph=True) if mode == "compiled" else forward

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run(model, tokens, recipe)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if mode == "graph":
        step = Graphed(step)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, {"peak_bytes": torch.cuda.max_memory_allocated() - before, "saved_by_linears": linears}


def measure(model: str, mode: str, precisions: list[str]) -> list[dict[str, Any]]:
    """A row for each of ``precisions`` that runs in ``mode``."""
    torch._dynamo.reset()
    config = MODELS[model]
    steps: dict[str, Callable[[], Any]] = {}
    bytes_of: dict[str, dict[str, int]] = {}
    for precision in precisions:
        recipe = PRECISIONS[precision]
        if mode == "eager" or recipe is None or not recipe.is_delayed:
            steps[precision], bytes_of[precision] = prepare(config, recipe, mode)
    repeats = max(2, round(1000 * TURN / milliseconds(steps[precisions[0]], 2)))
    times = time_in_turn(steps, repeats)
    tokens = config["batch"] * config["sequence"]
    return [
        dict(
            model=model, mode=mode, precision=precision, tokens_per_second=1000 * tokens / times[precision],
            ratio=times[precisions[0]] / times[precision], **bytes_of[precision],
        )
        for precision in steps
    ]  # fmt: skip


NAMES = {"1b": "1B", "85m": "85M", "graph": "one CUDA graph"}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line of Markdown for each model and mode; ratios are tokens per second over the first precision's."""
    names = list(dict.fromkeys(row["precision"] for row in rows))
    lines = [
        f"| | {names[0]}, tokens/s | {' | '.join(names[1:])} | peak GiB, {' / '.join(names)} |",
        "|---|" + "---:|" * len(names) + "---|",
    ]
    for (model, mode), group in itertools.groupby(rows, lambda row: (row["model"], row["mode"])):
        found = {row["precision"]: row for row in group}
        ratios = [f"{found[name]['ratio']:.2f}" if name in found else "" for name in names[1:]]
        peaks = " / ".join(f"{found[name]['peak_bytes'] / 2**30:.1f}" if name in found else "" for name in names)
        lines.append(
            f"| {NAMES[model]}, {NAMES.get(mode, mode)} | {found[names[0]]['tokens_per_second']:,.0f} "
            f"| {' | '.join(ratios)} | {peaks if mode != 'graph' else ''} |"
        )
    return lines


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model, mode in itertools.product(arguments.models, arguments.modes):
        rows += measure(model, mode, arguments.precisions)
        gc.collect()
        torch.cuda.empty_cache()
        # After every mode: a run that is interrupted keeps what it has.
        write_json(arguments.out / "training.json", dict(environment=environment(), rows=rows))
        print(table(rows)[-1], flush=True)
    print("", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
