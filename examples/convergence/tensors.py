"""What recipes do to the tensors of a real run: error, bias, saturation and underflow, per operand and layer.

    python examples/convergence/tensors.py                                 # tiny on a CPU, mini on a GPU
    python examples/convergence/tensors.py --recipes nvfp4 quartet2 --at 0.1 1

Trains a model in high precision. At the given shares of the run it takes input, weight and output gradient of every
linear layer, casts each by every recipe as the six GEMM operands would be, and undoes the rotation, so that all
recipes are measured against the same numbers. Writes `tensors.jsonl` and one picture per measure.

    error       |x_hat - x|^2 / |x|^2 of one draw
    bias        |mean of n draws - x|^2 / |x|^2, times n, over the error: 1 if independent and unbiased, n if the
                error is the same at every draw
    saturated   share of nonzero elements that lie beyond the largest value their block can hold
    underflow   share of nonzero elements that become zero, before the rotation is undone
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
matplotlib.use("Agg")
import matplotlib.pyplot as plt

import fp4engine
from convergence import sources
from convergence.run import SCRATCH
from convergence.studies import BASELINE, PRESETS
from convergence.task import run_of, task_of
from fp4engine import reference
from fp4engine.compare.recorder import header_of
from fp4engine.compare.training import Training
from fp4engine.formats import CastSpec
from fp4engine.recipe import Recipe, zoo
from fp4engine.reference.cast import prepare
from fp4engine.reference.hadamard import rotate
from fp4engine.reference.philox import rotation_signs
from fp4engine.roles import TENSOR_TYPES
from gpt.settings import InputError, whole

RECIPES = ("nvfp4", "nvfp4_4over6", "quartet2", "rht128_4over6_scalar", "mxfp4")
TITLES = {
    "error": "Squared error over the squared tensor",
    "bias": "Squared error of the mean over draws, times their number, over the error of one",
    "saturated": "Share of elements that saturate",
    "underflow": "Share of elements that become zero",
}
MEASURES = tuple(TITLES)
DRAWS = 16
ROWS = 2048
"""Tokens kept of each activation and gradient."""

OPERANDS = tuple((role, side) for role in TENSOR_TYPES for side in ("rowwise", "columnwise"))


@dataclass(frozen=True)
class Layer:
    """The tensors of one linear layer at one step: input [M, K], weight [N, K], grad_output [M, N], FP32 or BF16."""

    name: str
    input: Tensor
    weight: Tensor
    grad_output: Tensor


def capture(training: Training) -> Iterator[Layer]:
    """Tensors of every converted linear layer in one forward and backward pass on the last step's batch."""
    linears = {name: m for name, m in training.model.named_modules() if isinstance(m, fp4engine.Linear)}
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in linears}
    handles: list[Any] = []
    for name, module in linears.items():

        def backward(grad: Tensor, name: str = name) -> None:
            seen[name]["grad_output"] = grad.flatten(0, -2)[:ROWS]

        def forward(
            module: nn.Module, args: tuple[Tensor], output: Tensor, name: str = name, backward: Any = backward
        ) -> None:
            seen[name]["input"] = args[0].detach().to(output.dtype).flatten(0, -2)[:ROWS]
            output.register_hook(backward)

        handles.append(module.register_forward_hook(forward))
    with training.aside():
        training.backward(training.recipe)  # of the last step's batch
    for handle in handles:
        handle.remove()
    for name, module in linears.items():
        yield Layer(name, weight=module.weight.detach(), **seen[name])


def measure(x: Tensor, spec: CastSpec, stream: int, draws: int = DRAWS) -> dict[str, float]:
    """The four measures of casting operand `x` [rows, cols] by `spec`."""
    wanted = nn.functional.pad(x.double(), (0, spec.padded_cols(x.shape[1]) - x.shape[1]))
    energy = wanted.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    total = torch.zeros_like(wanted)
    errors: list[float] = []
    saturated = underflow = 0.0
    for draw in range(draws if spec.is_stochastic else 1):
        rng = torch.tensor([0, draw], device=x.device)
        cast = reference.quantize(x, spec, rng=rng, stream=stream)
        decoded = reference.decode(cast.codes, cast.scale_inv, spec) * reference.outer_factor(cast.amax, spec)
        if draw == 0:
            values = prepare(x, spec, rng, stream)
            saturated, underflow = clipping(values, decoded, cast.scale_inv, cast.amax, spec)
        undone = unrotate(decoded, spec, rng, stream).double()
        errors.append(float((undone - wanted).square().sum() / energy))
        total += undone
    error = sum(errors) / len(errors)
    mean_error = float((total / len(errors) - wanted).square().sum() / energy)
    bias = draws * mean_error / error if error else 0.0
    return {"error": error, "bias": bias, "saturated": saturated, "underflow": underflow}


def clipping(values: Tensor, decoded: Tensor, scale_inv: Tensor, amax: Tensor, spec: CastSpec) -> tuple[float, float]:
    """Shares of saturated and of underflowing elements among the nonzero ones of `values`, as they were rounded."""
    ceiling = reference.outer_factor(amax, spec) * spec.element.max_value
    if spec.block[1]:
        ceiling = ceiling * scale_inv.float().abs().repeat_interleave(spec.block[1], dim=1)
    nonzero = values != 0
    count = nonzero.sum().clamp(min=1)
    saturated = (values.abs() > ceiling * (1 + 2**-20)) & (decoded != 0)
    return float(saturated.sum() / count), float(((decoded == 0) & nonzero).sum() / count)


def unrotate(decoded: Tensor, spec: CastSpec, rng: Tensor, stream: int) -> Tensor:
    """`decoded @ (diag(s) H)^-1`: H is symmetric and orthogonal, so the signs come after it."""
    if spec.rotation is None:
        return decoded
    signs = rotation_signs(spec.rotation, rng, stream, decoded.device)
    back = rotate(decoded, torch.ones_like(signs), torch.float32)
    return back * signs.repeat(decoded.shape[1] // spec.rotation.size)


def measure_layer(layer: Layer, recipes: dict[str, Recipe], draws: int) -> Iterator[dict[str, Any]]:
    for name, recipe in recipes.items():
        for index, (role, side) in enumerate(OPERANDS):
            spec = getattr(recipe.casts(role), side)
            if spec is not None:
                x = getattr(layer, role)
                measured = measure(x if side == "rowwise" else x.T, spec, index, draws)
                rounded = {key: float(f"{value:.4g}") for key, value in measured.items()}
                yield {"layer": layer.name, "recipe": name, "operand": f"{role}.{side}", **rounded}


def rows_of_run(
    training: Training, shares: list[float], recipes: dict[str, Recipe], draws: int
) -> Iterator[dict[str, Any]]:
    steps = training.task.steps
    wanted = {max(1, round(share * steps)) for share in shares}
    for _ in tqdm(range(steps), unit="step", disable=None):
        training.train_step()
        if training.step in wanted:
            for layer in capture(training):
                for row in measure_layer(layer, recipes, draws):
                    yield {"step": training.step, **row}


def plot(rows: list[dict[str, Any]], measure_name: str, path: Path) -> None:
    """One panel per operand: the measure over the layers, a line per recipe, at the last step measured.

    Recipes that share a cast have the same curve, so each line is thinner than the one below it, which shows beside it.
    """
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    layers = list(dict.fromkeys(row["layer"] for row in last))
    recipes = list(dict.fromkeys(row["recipe"] for row in last))
    figure, panels = plt.subplots(3, 2, figsize=(11, 9), sharex=True, layout="constrained")
    for panel, (role, side) in zip(panels.flat, OPERANDS, strict=True):
        highest = 0.0
        for place, recipe in enumerate(recipes):
            points = {
                row["layer"]: row[measure_name]
                for row in last
                if (row["recipe"], row["operand"]) == (recipe, f"{role}.{side}")
            }
            width = 1 + 1.6 * (len(recipes) - 1 - place)
            course = [points.get(layer) for layer in layers]
            panel.plot(course, ".-", linewidth=width, markersize=width + 4, label=recipe)
            highest = max([highest, *points.values()])
        top = highest or 1.0
        panel.set(title=f"{role}, {side}", ylim=(-0.06 * top, 1.08 * top))  # a curve of zeros is seen
        panel.set_xticks(range(len(layers)), layers, rotation=90, fontsize=6)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"{TITLES[measure_name]}, per layer, after step {last[0]['step']}")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over layers at the last step measured, as a Markdown table."""
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    lines = [
        "| recipe | operand | error x 1e-3 | bias | saturated | underflow |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for recipe, operand in dict.fromkeys((row["recipe"], row["operand"]) for row in last):
        group = [row for row in last if (row["recipe"], row["operand"]) == (recipe, operand)]
        error, bias, saturated, underflow = (sum(row[name] for row in group) / len(group) for name in MEASURES)
        lines.append(f"| {recipe} | {operand} | {1e3 * error:.2f} | {bias:.2f} | {saturated:.2%} | {underflow:.2%} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="mini" if device == "cuda" else "tiny")
    parser.add_argument("--tokens", type=whole, help="bytes to train on, such as 1e6, instead of the preset's")
    parser.add_argument("--at", type=float, nargs="+", default=[0.02, 0.2, 1.0], help="shares of the run to measure at")
    parser.add_argument(
        "--recipes", nargs="+", choices=zoo.ZOO, default=RECIPES, metavar="RECIPE", help="rows of the zoo"
    )
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each stochastic cast (default: %(default)s)")
    parser.add_argument("--data", help="a folder of text files (default: the Python sources found here)")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where the text is kept (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=SCRATCH / "tensors", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if not all(0 < share <= 1 for share in arguments.at):
        parser.error(f"--at must be shares above 0 and at most 1, got {', '.join(map(str, arguments.at))}")
    preset = PRESETS[arguments.preset]
    tokens = preset.tokens if arguments.tokens is None else arguments.tokens
    for name, number in (("draws", arguments.draws), ("tokens", tokens)):
        if number < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    settings = dataclasses.replace(preset, device=device, tokens=tokens, evaluate_every=tokens)
    length = settings.sequence + 1
    try:
        task = task_of(settings, sources.prepare(arguments.data, length, arguments.scratch))
    except InputError as error:
        parser.error(str(error))
    run = run_of(BASELINE, settings, settings.seed)
    training = Training(task, run)
    recipes = {name: zoo.make(name) for name in arguments.recipes}
    rows = list(rows_of_run(training, arguments.at, recipes, arguments.draws))
    arguments.out.mkdir(parents=True, exist_ok=True)
    header = {**header_of(run, task.setting()), "draws": arguments.draws, "rows": ROWS}
    (arguments.out / "tensors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    for name in MEASURES:
        plot(rows, name, arguments.out / f"{name}.png")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
