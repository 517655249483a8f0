"""Host time of a small linear step under each family of recipes, beside BF16 `nn.Linear` in the same run.

    python benchmarks/host.py [--out benchmarks/results]

First, what it takes to start the kernels of an NVFP4 layer's step: by the CUDA driver, as this package does, and by
Triton's launcher with the same arguments, its descriptors made before. Then a step of 64 tokens through a 64x64 layer,
forward and backward, so small that the host is the limit: medians over rounds in which all variants take turns, with
autograd's own thread, without it, and compiled by Inductor. Last, a layer of a 85M-parameter GPT, 768 -> 3072 with
8,192 tokens, in milliseconds.

    python benchmarks/host.py --launchers        # these alone
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from step import make, run_nvfp4, run_step
from timing import argument_parser, environment, host_microseconds, time_in_turn, write_json

import fp4engine
from fp4engine.kernels import cuda_driver
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


def layers() -> dict[str, dict[str, float]]:
    """Times of steps, printed beside those of BF16."""
    small = steps(64, 64, 64)
    times = {"microseconds": host_microseconds(small, repeats=100)}
    with torch.autograd.set_multithreading_enabled(False):
        times["one_thread_microseconds"] = host_microseconds(small, repeats=100)
    times["compiled_microseconds"] = host_microseconds(steps(64, 64, 64, compiled=True), repeats=100)
    times["768_to_3072_milliseconds"] = time_in_turn(steps(768, 3072, 8192), 30)
    for title, row in times.items():
        figures = "".join(f"{name} {time:9.3f} ({time / row['bf16']:.2f})  " for name, time in row.items())
        print(f"{title:26}{figures}", flush=True)
    return times


def launchers(features: int, tokens: int) -> dict[str, float]:
    """Microseconds of the host to start the kernels of a step of a layer, and how many they are."""
    planned: list[tuple[cuda_driver.Plan, list[int], list[Callable[[], None]]]] = []
    plan = cuda_driver.plan

    def noted(calls: Any, slots: int) -> cuda_driver.Plan | None:
        made = plan(calls, slots)
        assert made is not None, "the driver starts the kernels of this layer"
        addresses = [0] * slots
        for _, _, arguments in calls:
            for index, argument in arguments:
                if index is not None and argument is not None:
                    addresses[index] = getattr(argument, "base", argument).data_ptr()
        planned.append((made, addresses, [by_triton(*call) for call in calls]))
        return made

    inp = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with patch.object(cuda_driver, "plan", noted):
        run_nvfp4(make(fp4engine.Linear, features, features), inp, torch.ones_like(inp), RECIPES["nvfp4"])
    stream = torch.cuda.current_stream().cuda_stream

    def by_driver() -> None:
        for made, addresses, _ in planned:
            made(addresses, stream, inp.device.index)

    kernels = [start for _, _, starts in planned for start in starts]
    runs: dict[str, Callable[[], object]] = {"driver": by_driver, "triton": lambda: [start() for start in kernels]}
    return {"kernels": len(kernels), **host_microseconds(runs, repeats=50)}


def by_triton(compiled: Any, programs: int, arguments: Any) -> Callable[[], None]:
    """A call of Triton's launcher, which takes addresses in place of tensors."""
    given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for _, a in arguments]
    stream = torch.cuda.current_stream().cuda_stream
    before = (programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None)
    return lambda: compiled.run(*before, *given)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--launchers", action="store_true", help="time only how kernels are started")
    arguments = parser.parse_args()
    times: dict[str, dict[str, float]] = {}
    for features, tokens in ((64, 64), (1024, 512)):
        times[f"launchers_{features}"] = found = launchers(features, tokens)
        by = ", ".join(f"{name} {found[name]:.1f} us" for name in ("driver", "triton"))
        print(f"{found['kernels']} kernels of a layer of {features} features: {by}", flush=True)
    if not arguments.launchers:
        times |= layers()  # afterwards, since a launch is planned once
    write_json(arguments.out / "host.json", dict(environment=environment(), **times))


if __name__ == "__main__":
    main()
