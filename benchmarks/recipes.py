"""Every row of the recipe book: one linear layer, forward and backward, beside BF16 `nn.Linear` in the same run.

    python benchmarks/recipes.py [--rows quartet2 mxfp8] [--jobs 12] [--out benchmarks/results]

8,192 tokens, BF16 parameters and activations, 4096 -> 4096 and 4096 -> 14336. A row's bytes are held to its reference
quantizers before it is timed. Per row and layer:

    ms, ratio    of a step, and over BF16
    saved        bytes that the forward pass keeps for the backward, parameters left out
    peak         bytes that a step allocates on top of parameters, input and gradients

Kernels are compiled first, by `--jobs` processes. A line per row is printed and written as soon as it is there: a run
that is cut off keeps its rows.
"""

import copy
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from step import gradients, make, problem, run_nvfp4, run_step
from timing import argument_parser, environment, repeats_for, time_in_turn, write_json

import fp4engine
from fp4engine import ops
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, MMParams, Recipe, zoo

LAYERS = ((4096, 4096), (4096, 14336))
CHECKED_TOKENS = 1024
TURN = 0.02
"""Seconds of BF16's turn. A turn begins with steps that are not timed, so that the host is ahead of the GPU."""


def compile_row(name: str) -> str:
    """One step of a row at every size, so that its kernels are in Triton's cache."""
    for fan_in, fan_out in LAYERS:
        layer = make(fp4engine.Linear, fan_in, fan_out)
        run_nvfp4(layer, *problem(fan_in, fan_out), zoo.make(name))
    torch.cuda.synchronize()
    return name


@dataclass(frozen=True, kw_only=True, repr=False)
class _Oracle(CustomRecipe):
    """The reference quantizers of ``recipe``, and its own options of products."""

    recipe: Recipe

    def mm_params(self, gemm: str) -> MMParams:
        return self.recipe.mm_params(gemm)


def check(name: str) -> None:
    """A step's bytes equal those on the reference quantizers, whose products are the same."""
    layer = make(fp4engine.Linear, *LAYERS[0])
    inp, grad = problem(*LAYERS[0])
    inp, grad = inp[:CHECKED_TOKENS].detach().requires_grad_(), grad[:CHECKED_TOKENS]
    recipe = zoo.make(name)
    oracle = _Oracle(qfactory=partial(reference_quantizer, recipe), recipe=recipe)
    pairs = zip(
        gradients(copy.deepcopy(layer), inp, grad, recipe), gradients(copy.deepcopy(layer), inp, grad, oracle),
        strict=True,
    )  # fmt: skip
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        raise SystemExit(f"{name}: bytes differ from the reference quantizers': no speed is printed")


def memory(layer: torch.nn.Linear, inp: torch.Tensor, grad: torch.Tensor, recipe) -> dict[str, int]:
    """What one step keeps, and the most that it holds."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if recipe is None:
            run_step(layer, inp, grad)
        else:
            run_nvfp4(layer, inp, grad, recipe)
    torch.cuda.synchronize()
    return {"saved": sum(kept.values()), "peak": torch.cuda.max_memory_allocated() - before}


def measure(name: str, fan_in: int, fan_out: int) -> dict:
    inp, grad = problem(fan_in, fan_out)
    dense, layer = make(torch.nn.Linear, fan_in, fan_out), make(fp4engine.Linear, fan_in, fan_out)
    recipe = zoo.make(name)
    steps = {"bf16": partial(run_step, dense, inp, grad), "row": partial(run_nvfp4, layer, inp, grad, recipe)}
    bf16, ms = time_in_turn(steps, repeats_for(6.0 * len(inp) * fan_in * fan_out, TURN)).values()
    ops.reset_executed_paths()
    held = memory(layer, inp, grad, recipe)
    paths = ops.executed_paths()
    return {
        "row": name, "in": fan_in, "out": fan_out, "bf16_ms": bf16, "ms": ms, "ratio": ms / bf16, **held,
        "bf16_memory": memory(dense, inp, grad, None), "paths": paths,
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(zoo.ZOO), metavar="ROW", default=list(zoo.ZOO))
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compile_row, arguments.rows):
            pass
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    print(
        f"{'row':46}" + "".join(f"{f'{i} -> {o}':>14} {'ratio':>6} {'saved MB':>9} {'peak MB':>8}" for i, o in LAYERS)
    )
    rows = []
    for name in arguments.rows:
        check(name)
        line = f"{name:46}"
        for fan_in, fan_out in LAYERS:
            rows.append(measure(name, fan_in, fan_out))
            row = rows[-1]
            megabytes = f"{row['saved'] / 1e6:9.0f} {row['peak'] / 1e6:8.0f}"
            line += f"{row['ms']:11.3f} ms {row['ratio']:6.2f} {megabytes}"
        print(line, flush=True)
        write_json(arguments.out / "recipes.json", {"environment": environment(), "rows": rows})
    slowest = max((row for row in rows if row["in"] == row["out"]), key=lambda row: row["ratio"])
    print(f"slowest: {slowest['row']}, {slowest['ratio']:.2f} of BF16", flush=True)


if __name__ == "__main__":
    main()
