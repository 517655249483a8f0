"""The pictures of docs/nvfp4.md, drawn from what fp4engine computes.

python tools/nvfp4_pictures.py            into docs/images
python tools/nvfp4_pictures.py --out DIR  into another folder
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fp4engine
from fp4engine.formats import E2M1, CastSpec, Outer, Rotation, RoundingMode, ScaleRule
from fp4engine.recipe import zoo
from fp4engine.recipe.linear import GEMM_OPERANDS
from fp4engine.reference.hadamard import rotate
from fp4engine.reference.philox import rotation_signs
from fp4engine.reference.rounding import decode

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BLUE, ORANGE, GREEN, RED, GRAY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#888888"

NEAREST = CastSpec()
STOCHASTIC = CastSpec(rounding=RoundingMode.STOCHASTIC)
ONE_SCALE = CastSpec(outer=Outer.ROW, block=(1, 128))
"""As near as a CastSpec comes to one scale for 128 values."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(x: Tensor, spec: CastSpec) -> float:
    return float((fp4engine.cast(x, spec) - x).norm() / x.norm())


def grid_values() -> list[float]:
    return sorted(set(decode(torch.arange(16), E2M1).tolist()))


def on_grid(values: Tensor, spec: CastSpec, draw: int = 0) -> Tensor:
    """What values between -6 and 6 become beside a 6 in their block, whose scale is then 1."""
    blocks = torch.nn.functional.pad(values[:, None], (0, 15))
    blocks[:, 15] = 6.0
    return fp4engine.cast(blocks, spec, rng=torch.tensor([0, draw]))[:, 0]


def values() -> Figure:
    figure, (line, stairs) = plt.subplots(2, 1, figsize=(8, 6.2), height_ratios=(1, 3.4), layout="constrained")
    grid = grid_values()
    line.plot(grid, [0] * len(grid), "o", color=BLUE, markersize=9)
    line.set(yticks=[], xticks=grid, xlim=(-6.6, 6.6), title="The fifteen numbers that four bits can say")
    line.set_xticks(grid, [f"{value:g}" for value in grid], fontsize=8)
    for side in ("left", "right", "top"):
        line.spines[side].set_visible(False)
    x = torch.linspace(-6, 6, 2401)
    stairs.plot(x.numpy(), x.numpy(), color=GRAY, linewidth=1, label="the number itself")
    stairs.plot(x.numpy(), on_grid(x, NEAREST).numpy(), color=BLUE, linewidth=1.6, label="what it is rounded to")
    stairs.set(xlabel="a number", ylabel="its nearest neighbour", xlim=(-6.6, 6.6), title="Steps widen with the number")
    stairs.grid(alpha=0.3)
    stairs.legend()
    return figure


def blocks() -> Figure:
    x = torch.randn(1, 128, generator=generator(3))
    x[0, 40] = 60.0
    figure, panels = plt.subplots(2, 1, figsize=(9, 5.6), sharex=True, layout="constrained")
    cases = (
        (ONE_SCALE, "One scale for all 128 numbers"),
        (NEAREST, "One scale for every 16 numbers"),
    )
    for axes, (spec, title) in zip(panels, cases, strict=True):
        cast = fp4engine.cast(x, spec)
        axes.plot(x[0].numpy(), "o", color=GRAY, markersize=4, label="before")
        axes.plot(cast[0].numpy(), ".", color=BLUE, markersize=6, label="after")
        zeros = int((cast == 0).sum())
        axes.set(title=f"{title}: {zeros} of 128 become zero", ylim=(-3.4, 3.4), ylabel="value")
        for edge in range(0, 129, 16 if spec is NEAREST else 128):
            axes.axvline(edge - 0.5, color=ORANGE, linewidth=0.8)
        axes.annotate("60 stands here,\nfar above", (40, 3.3), (52, 2.2), fontsize=8, arrowprops={"arrowstyle": "->"})
        axes.legend(loc="upper left", ncols=2, fontsize=8)
    panels[1].set_xlabel("position; the lines are borders between blocks")
    return figure


def outer() -> Figure:
    x = torch.randn(64, 256, generator=generator(4))
    sizes = [10.0**power for power in torch.arange(-7, 6.01, 0.25).tolist()]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    cases = (
        (CastSpec(outer=Outer.NONE), "block scales only", RED),
        (NEAREST, "block scales and one scale for the tensor", BLUE),
    )
    for spec, label, color in cases:
        axes.plot(sizes, [100 * relative_error(x * size, spec) for size in sizes], color=color, label=label)
    axes.set(xscale="log", ylim=(0, 105), xlabel="size of a typical number of the tensor", ylabel="error (%)")
    axes.grid(alpha=0.3)
    axes.legend(loc="center", bbox_to_anchor=(0.57, 0.5), fontsize=8)
    return figure


def hadamard() -> Figure:
    x = 0.3 * torch.randn(1, 16, generator=generator(5))
    x[0, 5] = 6.0
    signs = rotation_signs(Rotation(), None, 0, x.device)
    figure, (before, after, errors) = plt.subplots(
        1, 3, figsize=(11, 3.8), width_ratios=(1, 1, 1.2), layout="constrained"
    )
    turned = rotate(x, signs, torch.float32)
    for axes, block, title in ((before, x, "One block"), (after, turned, "The same block, rotated")):
        axes.bar(range(16), block[0].numpy(), color=GRAY, label="before the cast")
        axes.plot(
            fp4engine.cast(block, NEAREST)[0].numpy(), "_", color=BLUE, markersize=11, markeredgewidth=2, label="after"
        )
        axes.set(title=title, xlabel="position", ylim=(-2.3, 6.5))
        axes.legend(fontsize=8)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for name, color in (("as it stands", RED), ("rotated", BLUE)):
        errors.plot(sizes, [100 * lost(size, name == "rotated") for size in sizes], "o-", color=color, label=name)
    errors.set(xscale="log", xlabel="how much larger the large number is", ylim=(-4, 104), ylabel="%")
    errors.set_xticks(sizes, [str(size) for size in sizes])
    errors.set(title="Others that become zero")
    errors.minorticks_off()
    errors.grid(alpha=0.3)
    errors.legend(fontsize=8, loc="upper left")
    return figure


def lost(size: float, rotated: bool) -> float:
    """Share of zeros after the cast, leaving out the one number of each block that is ``size`` times larger."""
    x = torch.randn(4096, 16, generator=generator(6))
    x[:, 5] *= size
    signs = rotation_signs(Rotation(), None, 0, x.device)
    if rotated:
        cast = rotate(fp4engine.cast(rotate(x, signs, torch.float32), NEAREST), torch.ones(16), torch.float32) * signs
    else:
        cast = fp4engine.cast(x, NEAREST)
    return float((cast[:, torch.arange(16) != 5] == 0).float().mean())


def rounding() -> Figure:
    figure, (mean, course) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    x = torch.linspace(2, 6, 81)
    draws = torch.stack([on_grid(x, STOCHASTIC, draw) for draw in range(200)])
    mean.plot(x.numpy(), draws[0].numpy(), ".", color=ORANGE, markersize=4, label="stochastic, one draw")
    mean.plot(x.numpy(), on_grid(x, NEAREST).numpy(), color=RED, linewidth=1.5, label="nearest")
    mean.plot(x.numpy(), draws.mean(0).numpy(), color=BLUE, linewidth=1.5, label="stochastic, mean of 200 draws")
    mean.set(xlabel="a number", ylabel="what it becomes", title="Every draw is a grid value; the mean is the number")
    mean.grid(alpha=0.3)
    mean.legend(fontsize=8)
    gradient = torch.full((400,), 0.1)
    exact = gradient.cumsum(0)
    course.plot(exact.numpy(), color=GRAY, linewidth=3, label="exact")
    stochastic = torch.stack([on_grid(gradient[:1], STOCHASTIC, draw)[0] for draw in range(400)])
    course.plot(stochastic.cumsum(0).numpy(), color=BLUE, label="stochastic")
    course.plot(on_grid(gradient, NEAREST).cumsum(0).numpy(), color=RED, label="nearest")
    course.set(xlabel="steps", ylabel="sum", title="400 gradients of 0.1, added up")
    course.grid(alpha=0.3)
    course.legend(fontsize=8)
    return figure


def tiles() -> Figure:
    weight = torch.randn(64, 64, generator=generator(8))
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    for axes, block in zip(panels, ((1, 16), (16, 16)), strict=True):
        spec = CastSpec(block=block)
        forward = fp4engine.cast(weight, spec)
        backward = fp4engine.cast(weight.T.contiguous(), spec).T
        differ = (forward - backward).abs()
        image = axes.imshow(differ.numpy(), cmap="magma_r", vmin=0, vmax=0.6)
        share = float((differ > 0).float().mean())
        axes.set(title=f"{block[0]}x{block[1]} blocks: {share:.0%} of the weights differ", xlabel="input feature")
    panels[0].set_ylabel("output feature")
    figure.colorbar(image, ax=panels, label="difference of the two casts", shrink=0.8)
    return figure


PRODUCTS = {
    "fprop": ("output", "y = x wᵀ", "input features"),
    "dgrad": ("gradient of the input", "dx = dy w", "output features"),
    "wgrad": ("gradient of the weight", "dw = dyᵀ x", "tokens"),
}
COLORS = {"input": BLUE, "weight": GREEN, "grad_output": ORANGE}


def products() -> Figure:
    recipe = zoo.make("nvfp4")
    figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
    for row, (gemm, operands) in enumerate(GEMM_OPERANDS.items()):
        made, formula, summed = PRODUCTS[gemm]
        y = -1.5 * row
        axes.text(-0.1, y, f"{gemm}\n{formula}", ha="right", va="center", fontsize=11)
        for place, (role, side) in enumerate(operands):
            spec = getattr(recipe.casts(role), side)
            words = spec.label.split(" ", 1)[1].replace(" ", ", ")
            box = {"boxstyle": "round,pad=0.5", "facecolor": COLORS[role], "alpha": 0.3, "edgecolor": COLORS[role]}
            text = f"{role}, {side}\nblocks of {words}"
            axes.text(1.2 + 2.9 * place, y, text, ha="center", va="center", fontsize=10, bbox=box)
        axes.text(2.65, y, "x", ha="center", va="center", fontsize=12)
        axes.text(5.6, y, f"=  {made}\n    sums over the {summed}", ha="left", va="center", fontsize=10)
    axes.set(xlim=(-1.2, 8.2), ylim=(-3.8, 0.8))
    axes.axis("off")
    return figure


def formats() -> Figure:
    """Error by number of bits: what blocks and scales buy."""
    x = torch.randn(256, 1024, generator=generator(9))
    heavy = x * torch.randn(256, 1024, generator=generator(10)).exp()
    cases = {
        "E2M1, one scale per 128": ONE_SCALE,
        "MXFP4: blocks of 32, powers of two": CastSpec.from_key(zoo.make("mxfp4_ocp").casts("input").rowwise.key),
        "NVFP4: blocks of 16, E4M3 scales": NEAREST,
        "NVFP4, 4/6": CastSpec(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=256.0),
    }
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for place, (data, color, label) in enumerate(((x, BLUE, "normal"), (heavy, ORANGE, "heavy tails"))):
        errors = [100 * relative_error(data, spec) for spec in cases.values()]
        places = [index + 0.38 * (place - 0.5) for index in range(len(cases))]
        bars = axes.barh(places, errors, 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f%%", fontsize=8, padding=3)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set(xlabel="error of the tensor (%)")
    axes.margins(x=0.12)
    axes.legend()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "values": values,
    "blocks": blocks,
    "outer": outer,
    "formats": formats,
    "products": products,
    "tiles": tiles,
    "hadamard": hadamard,
    "rounding": rounding,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to draw into")
    arguments = parser.parse_args()
    for name, draw in PICTURES.items():
        figure = draw()
        path = arguments.out / f"nvfp4-{name}.png"
        figure.savefig(path, dpi=90)
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
