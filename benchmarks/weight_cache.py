"""What it costs a weight cache to compare the weight at each use, against what caching saves and against being told.

For each layer, on the GPU: microseconds of casting the weight for forward and backward, which a cache saves, of its
checksum, and of a checksum that the host waits for; and forward and backward of the layer over BF16's, in four ways:

    anew      no cache
    compared  fp4engine.weight_cache, which compares, spoils what does not fit, and looks when its region ends
    told      the same without comparing: what it would be if a cache could trust that nobody writes
    waited    the same with a host that waits for each comparison, so that it could quantize the weight anew

  python benchmarks/weight_cache.py
"""

from typing import Any
from unittest.mock import patch

import torch
from gemm import MODELS, TOKENS
from step import RECIPE, make, problem, run_nvfp4, run_step
from timing import argument_parser, environment, repeats_for, time_in_turn, write_json

import fp4engine
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops.checksum import Seal, are_broken, compare, digest

get = WeightCache.get


def told(cache: WeightCache, *arguments: Any) -> Any:
    operands, _ = get(cache, *arguments)
    return operands, None


def waited(cache: WeightCache, weight: torch.Tensor, *arguments: Any) -> Any:
    operands, seal = get(cache, weight, *arguments)
    assert seal is not None
    compare(weight, seal)
    are_broken([seal.broken])
    return operands, None


def measure(fan_in: int, fan_out: int, turn: float) -> dict[str, float]:
    """Milliseconds of each variant."""
    inp, grad = problem(fan_in, fan_out)
    dense, layers = make(torch.nn.Linear, fan_in, fan_out), [make(fp4engine.Linear, fan_in, fan_out) for _ in range(4)]
    weight = layers[0].weight.detach()
    quantizer = fp4engine.make_quantizer(RECIPE, fp4engine.QuantizerRole("linear", "weight"))
    first = digest(weight)
    assert isinstance(first, torch.Tensor)
    seal = Seal(first, torch.zeros(1, dtype=torch.int32, device=weight.device), ())
    anew, compared, trusted, waiting = layers

    def step_by(way, layer):
        with patch.object(WeightCache, "get", way):
            run_nvfp4(layer, inp, grad)

    with fp4engine.weight_cache(compared), fp4engine.weight_cache(trusted), fp4engine.weight_cache(waiting):
        return time_in_turn(
            {
                "bf16": lambda: run_step(dense, inp, grad),
                "anew": lambda: run_nvfp4(anew, inp, grad),
                "compared": lambda: run_nvfp4(compared, inp, grad),
                "told": lambda: step_by(told, trusted),
                "waited": lambda: step_by(waited, waiting),
                "cast": lambda: quantizer(weight),
                "checksum": lambda: compare(weight, seal),
                "checksum, waited for": lambda: (compare(weight, seal), are_broken([seal.broken])),
            },
            repeats_for(6.0 * TOKENS * fan_in * fan_out, turn),
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turn", type=float, default=0.01, help="seconds that a variant runs at a time")
    arguments = parser.parse_args()
    rows = []
    ways, alone = ("anew", "compared", "told", "waited"), ("cast", "checksum", "checksum, waited for")
    print(f"{'layer':28} {' '.join(f'{way:>9}' for way in ways)}   us: {', '.join(alone)}", flush=True)
    for model, layers in MODELS.items():
        for fan_in, fan_out in layers:
            times = measure(fan_in, fan_out, arguments.turn)
            rows.append(dict(model=model, fan_in=fan_in, fan_out=fan_out, ms=times))
            ratios = " ".join(f"{times[way] / times['bf16']:9.3f}" for way in ways)
            parts = ", ".join(f"{1e3 * times[name]:.0f}" for name in alone)
            print(f"{model + f' {fan_in}x{fan_out}':28} {ratios}   {parts}", flush=True)
    result = dict(environment=environment(), tokens=TOKENS, rows=rows)
    write_json(arguments.out / "weight-cache.json", result)


if __name__ == "__main__":
    main()
