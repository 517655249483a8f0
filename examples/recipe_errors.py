"""Relative error of every recipe's three products on five distributions: the pictures of docs/recipes.md.

    python examples/recipe_errors.py --output docs/images

Runs on the CPU in about a minute. Writes recipe_errors.png and recipe_errors.csv.
"""

import argparse
import csv
import math
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import fp4engine
from fp4engine.recipe import zoo

TOKENS, IN_FEATURES, OUT_FEATURES = 256, 512, 256
PRODUCTS = ("fprop", "dgrad", "wgrad")


def gaussian(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols)


def laplace(rows: int, cols: int) -> Tensor:
    return torch.distributions.Laplace(0.0, 1.0).sample((rows, cols))


def student(rows: int, cols: int) -> Tensor:
    return torch.distributions.StudentT(4.0).sample((rows, cols))


def sparse_outliers(rows: int, cols: int) -> Tensor:
    """0.5% of the values are a hundred times as large."""
    return torch.randn(rows, cols) * torch.where(torch.rand(rows, cols) < 0.005, 100.0, 1.0)


def hot_channels(rows: int, cols: int) -> Tensor:
    """One column in a hundred is thirty times as large."""
    return torch.randn(rows, cols) * torch.where(torch.arange(cols) % 100 == 7, 30.0, 1.0)


DISTRIBUTIONS = (gaussian, laplace, student, sparse_outliers, hot_channels)


def decibels(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want).square().sum() / want.square().sum()
    return math.inf if noise < 1e-12 else -10 * math.log10(float(noise))


def errors(recipe: fp4engine.recipe.Recipe, inp: Tensor, weight: Tensor, grad: Tensor) -> list[float]:
    """SNR of y, dx and dw against the exact products of the original tensors."""
    layer = fp4engine.Linear(IN_FEATURES, OUT_FEATURES, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    leaf = inp.clone().requires_grad_()
    steps = 2 if recipe.is_delayed else 1  # a first step, to have amaxes to scale by
    for _ in range(steps):
        with fp4engine.autocast(recipe=recipe):
            output = layer(leaf)
        dx, dw = torch.autograd.grad(output, (leaf, layer.weight), grad)
    x, w, g = inp.double(), weight.double(), grad.double()
    return [decibels(output.detach(), x @ w.T), decibels(dx, g @ w), decibels(dw, g.T @ x)]


def measure() -> dict[str, dict[str, list[float]]]:
    """``recipe -> distribution -> [fprop, dgrad, wgrad]``; input and gradient follow the distribution."""
    results: dict[str, dict[str, list[float]]] = {}
    for name in tqdm(zoo.ZOO, unit="recipe", disable=None):
        results[name] = {}
        for draw in DISTRIBUTIONS:
            torch.manual_seed(2026)
            fp4engine.manual_seed(2026)
            inp, grad = draw(TOKENS, IN_FEATURES), draw(TOKENS, OUT_FEATURES) * 1e-4
            weight = torch.randn(OUT_FEATURES, IN_FEATURES) / math.sqrt(IN_FEATURES)
            results[name][draw.__name__] = errors(zoo.make(name), inp, weight, grad)
    return results


def write_csv(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recipe", "distribution", *(f"{product} dB" for product in PRODUCTS)])
        for name, by_distribution in results.items():
            for distribution, values in by_distribution.items():
                writer.writerow([name, distribution, *(f"{value:.2f}" for value in values)])


def draw_picture(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in results if name != "high_precision"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 0.29 * len(names) + 1.6), sharey=True, layout="constrained")
    for index, (product, axis) in enumerate(zip(PRODUCTS, axes, strict=True)):
        values = [[min(results[name][d.__name__][index], 40.0) for d in DISTRIBUTIONS] for name in names]
        axis.imshow(values, cmap="viridis", vmin=8, vmax=34, aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                text = "exact" if value >= 40 else f"{value:.1f}"
                axis.text(column, row, text, ha="center", va="center", color="black" if value > 22 else "white", size=8)
        axis.set_title(product)
        axis.set_xticks(range(len(DISTRIBUTIONS)), [d.__name__.replace("_", "\n") for d in DISTRIBUTIONS], size=8)
        axis.set_yticks(range(len(names)), names, size=8)
        axis.tick_params(length=0)
    figure.suptitle("Signal to noise of one product, dB (higher is better)")
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = "a folder for both files (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/recipe_errors"), help=where)
    output: Path = parser.parse_args(argv).output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output must be a folder, got {output}: {error.strerror}")
    results = measure()
    write_csv(results, output / "recipe_errors.csv")
    draw_picture(results, output / "recipe_errors.png")
    for name, by_distribution in results.items():
        print(f"{name:46}", *(f"{value:6.1f}" for values in by_distribution.values() for value in values))


if __name__ == "__main__":
    main()
