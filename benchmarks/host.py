"""Host time of a small linear step under each family of recipes, beside BF16 `nn.Linear` in the same run.

    python benchmarks/host.py [--out benchmarks/results]

A step of 64 tokens through a 64x64 layer,
forward and backward, so small that the host is the limit: medians over rounds in which all variants take turns, with
autograd's own thread, without it, and compiled by Inductor; then under NVFP4 as layers are used: with a cached weight,
with a `main_grad`, behind a norm, with a weight stored as codes. Last, a layer of a 85M-parameter GPT, 768 -> 3072 with
8,192 tokens, in milliseconds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from step import make, run_nvfp4, run_step
from timing import argument_parser, environment, host_microseconds, time_in_turn, write_json

import fp4engine
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling

RECIPES = {
    "nvfp4": NVFP4BlockScaling(),
    "fp8 current": Float8CurrentScaling(),
    "fp8 delayed": DelayedScaling(amax_history_len=16),
}


def steps(fan_in: int, fan_out: int, tokens: int, compiled: bool = False) -> dict[str, partial[None]]:
    """Steps of a layer; compiled code refuses delayed scaling."""

    def layer(kind: type[torch.nn.Module]) -> Callable[..., Any]:
        made = make(kind, fan_in, fan_out)
        return torch.compile(made, fullgraph=True) if compiled else made

    inp = torch.randn(tokens, fan_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, fan_out, device="cuda", dtype=torch.bfloat16)
    runs = {"bf16": partial(run_step, layer(torch.nn.Linear), inp, grad)}
    for name, recipe in RECIPES.items():
        if not (compiled and recipe.is_delayed):
            runs[name] = partial(run_nvfp4, layer(fp4engine.Linear), inp, grad, recipe)
    return runs


def layers_in_use() -> dict[str, torch.nn.Module]:
    """Layers of 64 features, as models have them."""
    accumulating = fp4engine.Linear(64, 64, bias=False, fuse_wgrad_accumulation=True)
    accumulating.weight.main_grad = torch.zeros(64, 64, device="cuda")
    with fp4engine.quantized_model_init(recipe=RECIPES["nvfp4"]):
        stored = fp4engine.Linear(64, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    layers = {
        "bf16": torch.nn.Linear(64, 64, bias=False),
        "plain": fp4engine.Linear(64, 64, bias=False),
        "cached": fp4engine.Linear(64, 64, bias=False),
        "main_grad": accumulating,
        "behind a norm": fp4engine.LayerNormLinear(64, 64, bias=False),
    }
    return {name: layer.to("cuda", torch.bfloat16) for name, layer in layers.items()} | {"stored": stored}


def in_use() -> dict[str, float]:
    """Microseconds of a step of each of :func:`layers_in_use`."""
    layers = layers_in_use()
    inp = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)

    def run(layer: torch.nn.Module) -> None:
        with fp4engine.autocast(recipe=RECIPES["nvfp4"]):
            output = layer(inp)
        output.backward(grad)
        inp.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    with fp4engine.weight_cache(layers["cached"]):
        return host_microseconds({name: partial(run, layer) for name, layer in layers.items()}, repeats=100)


def layers() -> dict[str, dict[str, float]]:
    """Times of steps, printed beside those of BF16."""
    small = steps(64, 64, 64)
    times = {"microseconds": host_microseconds(small, repeats=100)}
    with torch.autograd.set_multithreading_enabled(False):
        times["one_thread_microseconds"] = host_microseconds(small, repeats=100)
    times["in_use_microseconds"] = in_use()
    times["compiled_microseconds"] = host_microseconds(steps(64, 64, 64, compiled=True), repeats=100)
    times["768_to_3072_milliseconds"] = time_in_turn(steps(768, 3072, 8192), 30)
    for title, row in times.items():
        figures = "".join(f"{name} {time:9.3f} ({time / row['bf16']:.2f})  " for name, time in row.items())
        print(f"{title:26}{figures}", flush=True)
    return times


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    times = layers()
    write_json(arguments.out / "host.json", dict(environment=environment(), **times))


if __name__ == "__main__":
    main()
