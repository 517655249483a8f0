"""One linear layer, forward and backward, beside BF16 `nn.Linear` in the same run.

    python benchmarks/step.py [--quick] [--turn 0.01] [--out benchmarks/results]

The module's bytes are held to the reference quantizers before anything is timed. Rows per layer, 8,192 tokens, BF16
parameters and activations:

    bf16         torch.nn.Linear: the denominator of every ratio
    nvfp4        fp4engine.Linear, default recipe: RHT, stochastic rounding, 16x16 weights
    cached       the same inside fp4engine.weight_cache

Then the share of the step's GPU time per kernel, and the host time of a step too small to fill the GPU.
"""

from collections import defaultdict
from functools import partial

import torch
from gemm import MODELS, TOKENS
from timing import argument_parser, environment, host_microseconds, repeats_for, time_in_turn, write_json

import fp4engine
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling

RECIPE = NVFP4BlockScaling()


def make(kind: type[torch.nn.Linear], fan_in: int, fan_out: int) -> torch.nn.Linear:
    torch.manual_seed(0)
    return kind(fan_in, fan_out, bias=False, device="cuda", dtype=torch.bfloat16)


def run_step(layer: torch.nn.Linear, inp: torch.Tensor, grad: torch.Tensor) -> None:
    """Forward and backward; gradients are dropped, so that nothing accumulates."""
    layer(inp).backward(grad)
    layer.weight.grad = inp.grad = None


def run_nvfp4(layer: torch.nn.Linear, inp: torch.Tensor, grad: torch.Tensor, recipe=RECIPE) -> None:
    with fp4engine.autocast(recipe=recipe):
        output = layer(inp)
    output.backward(grad)
    layer.weight.grad = inp.grad = None


def gradients(layer, inp, grad, recipe) -> list[torch.Tensor]:
    fp4engine.manual_seed(0)
    with fp4engine.autocast(recipe=recipe):
        output = layer(inp)
    output.backward(grad)
    results = [output.detach(), inp.grad, layer.weight.grad]
    layer.weight.grad = inp.grad = None
    return results


def check() -> None:
    """Every output byte on kernels equals that on the reference quantizers."""
    layer = make(fp4engine.Linear, 1024, 1536)
    inp = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2048, 1536, device="cuda", dtype=torch.bfloat16)
    oracle = CustomRecipe(qfactory=partial(reference_quantizer, RECIPE))
    pairs = zip(gradients(layer, inp, grad, RECIPE), gradients(layer, inp, grad, oracle), strict=True)
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        raise SystemExit("the module's bytes differ from the reference quantizers': no speed is printed")


def problem(fan_in: int, fan_out: int):
    inp = torch.randn(TOKENS, fan_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(TOKENS, fan_out, device="cuda", dtype=torch.bfloat16)
    return inp, grad


def measure(fan_in: int, fan_out: int, turn: float) -> dict[str, float]:
    """Milliseconds of each variant, in turns of so many seconds."""
    inp, grad = problem(fan_in, fan_out)
    dense, layer = make(torch.nn.Linear, fan_in, fan_out), make(fp4engine.Linear, fan_in, fan_out)
    cached = make(fp4engine.Linear, fan_in, fan_out)
    with fp4engine.weight_cache(cached):
        return time_in_turn(
            {
                "bf16": lambda: run_step(dense, inp, grad),
                "nvfp4": lambda: run_nvfp4(layer, inp, grad),
                "cached": lambda: run_nvfp4(cached, inp, grad),
            },
            repeats_for(6.0 * TOKENS * fan_in * fan_out, turn),
        )


def profile(fan_in: int, fan_out: int) -> list[tuple[str, float]]:
    """Microseconds of one NVFP4 step per kernel, longest first."""
    inp, grad = problem(fan_in, fan_out)
    layer = make(fp4engine.Linear, fan_in, fan_out)
    run_nvfp4(layer, inp, grad)
    steps = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            run_nvfp4(layer, inp, grad)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in trace.events():
        times[event.name[:60]] += event.device_time_total / steps
    return sorted(times.items(), key=lambda item: -item[1])


class Nothing(torch.autograd.Function):
    """What PyTorch itself takes for a function with a gradient."""

    @staticmethod
    def forward(ctx, inp, weight):
        ctx.save_for_backward(inp, weight)
        return torch.empty_like(inp)

    @staticmethod
    def backward(ctx, *grads):
        inp, weight = ctx.saved_tensors
        return torch.empty_like(inp), torch.empty_like(weight)


def forward_nvfp4(layer: torch.nn.Linear, inp: torch.Tensor) -> None:
    with fp4engine.autocast(recipe=RECIPE):
        layer(inp)


def host_times() -> dict[str, float]:
    """Microseconds per call at a size so small that the host is the limit."""
    inp = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    dense, layer, cached = (make(kind, 64, 64) for kind in (torch.nn.Linear, fp4engine.Linear, fp4engine.Linear))

    def run_nothing() -> None:
        Nothing.apply(inp, dense.weight).backward(grad)
        dense.weight.grad = inp.grad = None

    steps = {
        "bf16": lambda: run_step(dense, inp, grad),
        "nvfp4": lambda: run_nvfp4(layer, inp, grad),
        "cached": lambda: run_nvfp4(cached, inp, grad),
        "an autograd function": run_nothing,
    }
    forwards = {"bf16, forward": lambda: dense(inp), "nvfp4, forward": lambda: forward_nvfp4(layer, inp)}
    with fp4engine.weight_cache(cached):
        times = host_microseconds(steps | forwards)
        with torch.autograd.set_multithreading_enabled(False):
            return times | {f"{name}, one thread": t for name, t in host_microseconds(steps).items()}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer per model")
    parser.add_argument(
        "--turn",
        type=float,
        default=0.01,
        help="seconds that a variant runs at a time; in 0.3 clocks settle",
    )
    arguments = parser.parse_args()
    check()
    rows = []
    print(f"{'layer':28} {'bf16 ms':>9} {'nvfp4 ms':>9} {'ratio':>6} {'cached':>6}", flush=True)
    for model, layers in MODELS.items():
        for fan_in, fan_out in layers[:1] if arguments.quick else layers:
            times = measure(fan_in, fan_out, arguments.turn)
            ratio, cached = times["nvfp4"] / times["bf16"], times["cached"] / times["bf16"]
            rows.append(dict(model=model, fan_in=fan_in, fan_out=fan_out, ms=times, ratio=ratio, cached_ratio=cached))
            name = f"{model} {fan_in}x{fan_out}"
            print(f"{name:28} {times['bf16']:9.3f} {times['nvfp4']:9.3f} {ratio:6.3f} {cached:6.3f}", flush=True)
    host = host_times()  # before the profiler, which slows launches for the rest of the process
    kernels = profile(4096, 14336)
    print("\none step of 4096x14336, microseconds per kernel")
    for name, microseconds in kernels[:14]:
        print(f"  {name:60} {microseconds:9.1f}")
    print("\nhost time of a 64x64 layer, microseconds")
    for name, microseconds in host.items():
        print(f"  {name:60} {microseconds:9.1f}")
    print(f"  {'nvfp4 / bf16':60} {host['nvfp4'] / host['bf16']:9.2f}", flush=True)
    result = dict(environment=environment(), rows=rows, kernels=kernels, host_microseconds=host)
    write_json(arguments.out / "step.json", result)


if __name__ == "__main__":
    main()
