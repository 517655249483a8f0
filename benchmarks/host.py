"""Host time of a small linear step under each family of recipes, beside BF16 `nn.Linear` in the same run.

    python benchmarks/host.py [--out benchmarks/results]

A step of 64 tokens through a 64x64 layer, forward and backward, is so small that the host is the limit. Medians over
rounds in which all variants take turns, with autograd's own thread and without it. Then a layer of a 85M-parameter GPT,
768 -> 3072 with 8,192 tokens, in milliseconds.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from step import make, run_nvfp4, run_step
from timing import environment, host_microseconds, time_in_turn

import fp4engine
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling

RECIPES = {
    "nvfp4": NVFP4BlockScaling(),
    "fp8 current": Float8CurrentScaling(),
    "fp8 delayed": DelayedScaling(amax_history_len=16),
}


def steps(fan_in: int, fan_out: int, tokens: int) -> dict[str, partial[None]]:
    inp = torch.randn(tokens, fan_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, fan_out, device="cuda", dtype=torch.bfloat16)
    runs = {"bf16": partial(run_step, make(torch.nn.Linear, fan_in, fan_out), inp, grad)}
    for name, recipe in RECIPES.items():
        runs[name] = partial(run_nvfp4, make(fp4engine.Linear, fan_in, fan_out), inp, grad, recipe)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    small = steps(64, 64, 64)
    times = {"microseconds": host_microseconds(small, repeats=100)}
    with torch.autograd.set_multithreading_enabled(False):
        times["one_thread_microseconds"] = host_microseconds(small, repeats=100)
    times["768_to_3072_milliseconds"] = time_in_turn(steps(768, 3072, 8192), 30)
    for title, row in times.items():
        figures = "".join(f"{name} {time:9.3f} ({time / row['bf16']:.2f})  " for name, time in row.items())
        print(f"{title:26}{figures}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "host.json").write_text(json.dumps(dict(environment=environment(), **times), indent=1) + "\n")


if __name__ == "__main__":
    main()
