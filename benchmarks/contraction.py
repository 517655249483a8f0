"""By how much sums that are added toward zero come out too small, in parts per million; on a CPU, in a minute.

    python benchmarks/contraction.py [STEP.pt] [--out benchmarks/results]

STEP.pt is what `tools/recorded_step.py record` wrote: the products of its layers are added to those of made operands.
For sums `s` and exact sums `e` of the same products, the contraction is `1 - <s, e> / <e, e>`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from timing import argument_parser, write_json
from torch import Tensor

from fp4engine import reference
from fp4engine.formats import CastSpec, Rotation, RoundingMode
from fp4engine.reference import SumRules

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.recorded_step import RECIPE

MOST = 256
"""Rows of an operand that are multiplied, at most."""
NEAREST, TILES = CastSpec(), CastSpec(block=(16, 16))
STOCHASTIC = CastSpec(rounding=RoundingMode.STOCHASTIC)


def values(x: Tensor, spec: CastSpec) -> Tensor:
    cast = reference.quantize(x, spec, rng=torch.tensor([0, 0]))
    return reference.decode(cast.codes, cast.scale_inv, spec)


def made() -> Iterator[tuple[str, Tensor, Tensor]]:
    torch.manual_seed(0)
    normal = torch.distributions.Normal(0.0, 1.0)
    draws = {"Gaussian": normal, "hot channels": normal}
    draws |= {f"Student-t, {degrees} degrees": torch.distributions.StudentT(float(degrees)) for degrees in (4, 2)}
    for name, draw in draws.items():
        for k in (1024, 6144, 16384):
            x, w = (draw.sample((MOST, k)) for _ in range(2))
            if name == "hot channels":
                x *= torch.where(torch.rand(k) < 0.08, 30.0, 1.0)
            yield name, values(x.bfloat16(), NEAREST), values(w.bfloat16(), NEAREST)


def recorded(path: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The three products of every layer, under the default recipe's casts."""
    for name, (x, w, dy) in torch.load(path, weights_only=True).items():
        rotated = {spec: spec.replace(rotation=Rotation()) for spec in (NEAREST, STOCHASTIC)}
        yield f"{name} fprop", values(x, NEAREST), values(w, TILES)
        yield f"{name} dgrad", values(dy, STOCHASTIC), values(w.T, TILES)
        yield f"{name} wgrad", values(dy.T, rotated[STOCHASTIC]), values(x.T, rotated[NEAREST])


def contraction(sums: Tensor, exact: Tensor) -> float:
    """In parts per million."""
    return float(1 - (sums.double() * exact).sum() / exact.square().sum()) * 1e6


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("step", type=Path, nargs="?", help="what tools/recorded_step.py recorded")
    arguments = parser.parse_args()
    rows = []
    operands = [*made(), *(recorded(arguments.step) if arguments.step else [])]
    print(f"{'product':36s} {'K':>6s} {'toward zero':>12s} {'nearest':>9s} {'any order':>10s}   parts per million")
    for name, left, right in operands:
        left, right = left[:MOST], right[:MOST]
        exact = left.double() @ right.double().T
        row = {
            "product": name,
            "K": left.shape[1],
            "toward zero": contraction(reference.sum_by_groups(left, right), exact),
            "nearest": contraction(reference.sum_by_groups(left, right, SumRules(nearest_totals=True)), exact),
            "any order": contraction(left @ right.T, exact),
        }
        rows.append(row)
        numbers = f"{row['toward zero']:12.4f} {row['nearest']:9.4f} {row['any order']:10.4f}"
        print(f"{name:36s} {left.shape[1]:6d} {numbers}", flush=True)
    write_json(
        arguments.out / "contraction.json", {"recipe": RECIPE.to_json(), "torch": torch.__version__, "rows": rows}
    )


if __name__ == "__main__":
    main()
