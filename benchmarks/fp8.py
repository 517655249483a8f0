"""One FP8 linear layer, forward and backward, beside BF16 `nn.Linear` in the same run.

    python benchmarks/fp8.py [--quick] [--middle] [--out benchmarks/results]

The casts' bytes are held to the reference, and the products to their decoded operands, before anything is timed. Rows
per layer, 8,192 tokens, BF16 parameters and activations:

    bf16         torch.nn.Linear: the denominator of every ratio
    current      Float8CurrentScaling: fprop with the fast accumulator, dgrad and wgrad with the split one
    fast         the same with the fast accumulator everywhere
    delayed      DelayedScaling

With --middle, layers of small models, by current scaling with products in the layer's launches (`launch`) and by
PyTorch (`pytorch`), in turns: milliseconds of a step in eager mode, in one thread, and as a CUDA graph.
"""

import argparse
import statistics
from unittest.mock import patch

import torch
from gemm import MODELS, TOKENS
from step import make, problem, run_nvfp4, run_step
from timing import (
    ROUNDS,
    argument_parser,
    environment,
    graph_seconds,
    milliseconds,
    repeats_for,
    time_in_turn,
    write_json,
)

import fp4engine
from fp4engine.ops import gemm_fp8
from fp4engine.quantizers import reference_quantizer
from fp4engine.quantizers.factory import make_quantizer
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, MMParams
from fp4engine.roles import QuantizerRole

CURRENT = Float8CurrentScaling()
FAST = Float8CurrentScaling(
    fp8_gemm_fprop=MMParams(False), fp8_gemm_dgrad=MMParams(False), fp8_gemm_wgrad=MMParams(False)
)
MIDDLE = ((768, 768), (768, 2304), (768, 3072), (1024, 4096), (2048, 2048))
VARIANTS = {"current": CURRENT, "fast": FAST, "delayed": DelayedScaling(amax_history_len=16)}


def check() -> None:
    """Casts are the reference's bytes; products are their operands' up to the rounding of BF16."""
    x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((1000, 1040), (520, 1040)))
    operands = []
    for role, value in (("input", x), ("weight", w)):
        role = QuantizerRole("linear", role)
        ours = make_quantizer(CURRENT, role).quantize(value)
        theirs = reference_quantizer(CURRENT, role).quantize(value)
        for one, other in ((ours.rowwise, theirs.rowwise), (ours.columnwise, theirs.columnwise)):
            if not all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True)):
                raise SystemExit(f"the {role.tensor_type}'s bytes differ from the reference's: no speed is printed")
        operands.append(ours.rowwise)
    fp4engine.ops.reset_executed_paths()
    product = fp4engine.ops.gemm(*operands, out_dtype=torch.bfloat16).double()
    paths = fp4engine.ops.executed_paths()
    exact = operands[0].dequantize(torch.float64) @ operands[1].dequantize(torch.float64).T
    error = float((product - exact).norm() / exact.norm())
    if paths != {"gemm/fp8": 1} or error > 2 * 2.0**-9:
        raise SystemExit(f"the product is off by {error:.1e}, or did not run in FP8: no speed is printed")


def measure(fan_in: int, fan_out: int) -> dict[str, float]:
    """Milliseconds of each variant."""
    inp, grad = problem(fan_in, fan_out)
    dense = make(torch.nn.Linear, fan_in, fan_out)
    runs = {"bf16": lambda: run_step(dense, inp, grad)}
    for name, recipe in VARIANTS.items():
        layer = make(fp4engine.Linear, fan_in, fan_out)
        runs[name] = lambda layer=layer, recipe=recipe: run_nvfp4(layer, inp, grad, recipe)
    return time_in_turn(runs, repeats_for(6.0 * TOKENS * fan_in * fan_out))


def measure_middle(fan_in: int, fan_out: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each way to multiply, over rounds in which all take turns."""
    inp, grad = problem(fan_in, fan_out)
    dense, layer = make(torch.nn.Linear, fan_in, fan_out), make(fp4engine.Linear, fan_in, fan_out)
    runs = {
        "bf16": (lambda: run_step(dense, inp, grad), gemm_fp8.STEPS),
        "launch": (lambda: run_nvfp4(layer, inp, grad, CURRENT), gemm_fp8.STEPS),
        "pytorch": (lambda: run_nvfp4(layer, inp, grad, CURRENT), 0),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"eager": [], "one_thread": [], "graph": []} for name in runs}
    for _ in range(ROUNDS):
        for name, (run, steps) in runs.items():
            with patch.object(gemm_fp8, "STEPS", steps):
                times[name]["graph"].append(1e3 * graph_seconds(lambda _, run=run: run(), [inp]))
                times[name]["eager"].append(milliseconds(run, 20))
                with torch.autograd.set_multithreading_enabled(False):
                    times[name]["one_thread"].append(milliseconds(run, 20))
    return {name: {how: statistics.median(found) for how, found in row.items()} for name, row in times.items()}


def middle(arguments: argparse.Namespace) -> None:
    """Layers of small models."""
    rows = []
    for fan_in, fan_out in MIDDLE:
        times = measure_middle(fan_in, fan_out)
        rows.append({"in": fan_in, "out": fan_out, **times})
        for name, row in times.items():
            figures = "".join(f"  {how} {time:.3f}" for how, time in row.items())
            print(f"{fan_in:5} -> {fan_out:5} {name:8}{figures}", flush=True)
    write_json(arguments.out / "fp8-middle.json", {"environment": environment(), "rows": rows})


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer per model")
    parser.add_argument("--middle", action="store_true", help="layers of small models instead")
    arguments = parser.parse_args()
    check()
    if arguments.middle:
        return middle(arguments)
    rows = []
    print(f"{'layer':28} {'bf16 ms':>9}" + "".join(f"{name:>10}" for name in VARIANTS), flush=True)
    for model, layers in MODELS.items():
        for fan_in, fan_out in layers[:1] if arguments.quick else layers:
            times = measure(fan_in, fan_out)
            rows.append({"model": model, "in": fan_in, "out": fan_out, **times})
            speedups = "".join(f"{times['bf16'] / times[name]:9.2f}x" for name in VARIANTS)
            print(f"{model + f' {fan_in} -> {fan_out}':28} {times['bf16']:9.3f}{speedups}", flush=True)
    write_json(arguments.out / "fp8.json", {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
