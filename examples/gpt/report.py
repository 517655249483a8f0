"""The end of a run: a table, in the terminal and as Markdown, and a picture of the loss curves."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fp4engine.compare.plan import one_seed
from fp4engine.files import write_atomically
from gpt.metrics import read_metrics
from gpt.settings import HIGH_PRECISION, Settings, folder_of
from gpt.training import Result

HEADER = (
    "precision",
    "validation loss",
    "gap",
    "tokens/s",
    "peak memory",
    "saved by linears",
    "GEMM FLOPs in FP4",
)


def table(results: Sequence[Result]) -> str:
    """A Markdown table; the gap is that of the validation loss, relative to the first precision."""
    rows = [HEADER, *(row(result, results[0]) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (rows[0], rule, *rows[1:])
    )


def name_of(result: Result) -> str:
    """The precision, by what it really was: without a recipe it is FP32 on a CPU."""
    return (
        "fp32" if result.precision == HIGH_PRECISION and result.high_precision_dtype == "float32" else result.precision
    )


def row(result: Result, first: Result) -> tuple[str, ...]:
    gap = result.validation_loss / first.validation_loss - 1
    return (
        name_of(result),
        f"{result.validation_loss:.4f}",
        "" if result is first else f"{gap:+.2%}",
        "-" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
        mebibytes(result.peak_memory),
        mebibytes(result.saved_for_backward),
        f"{result.fp4_share:.1%}",
    )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def notes(settings: Settings, results: Sequence[Result], parameters: int) -> str:
    """What the figures are, how slow emulation was, and what one seed means."""
    memory = "CUDA's peak allocation" if settings.device == "cuda" else "the process's peak resident size"
    lines = [
        f"{settings.steps} steps of {settings.batch} x {settings.sequence} bytes; loss in nats per byte; outside FP4 "
        f"GEMMs compute in {results[0].high_precision_dtype}; memory is {memory}."
    ]
    first, *others = results
    if settings.device == "cpu" and first.precision == HIGH_PRECISION:
        slower = [
            f"{name_of(other)} took {first.tokens_per_second / other.tokens_per_second:.1f} times as long as fp32"
            for other in others
            if first.tokens_per_second and other.tokens_per_second
        ]
        if slower:
            lines.append(
                f"{'; '.join(slower)}: a CPU emulates FP4 in many small operations. On a GPU kernels do it "
                "(docs/modules.md)."
            )
    if others:
        lines.append(
            f"{one_seed(parameters, settings.steps * settings.batch * settings.sequence)}. `fp4engine compare` runs "
            "several seeds, and says whether they tell."
        )
    return "\n\n".join(lines)


def plot(folder: Path, settings: Settings) -> Path:
    """Above: training loss (thin, averaged over 1% of the run) and validation loss (dots). Below: gaps to the first."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), layout="constrained")
    courses = {name: course(folder_of(folder, name), settings.steps) for name in settings.precision}
    first, *others = settings.precision
    for place, (name, (training, validation)) in enumerate(courses.items()):
        above.plot(*zip(*training.items(), strict=True), linewidth=1, color=f"C{place}", label=f"{name}, training")
        dots = zip(*validation.items(), strict=True)
        above.plot(*dots, "o-", markersize=4, color=f"C{place}", label=f"{name}, validation")
    for place, name in enumerate(others, start=1):
        for part, style in enumerate(({"linewidth": 1}, {"marker": "o", "markersize": 4})):
            own, base = courses[name][part], courses[first][part]
            gaps = {step: 100 * (loss / base[step] - 1) for step, loss in own.items() if step in base}
            label = f"{name}, {('training', 'validation')[part]}"
            below.plot(*zip(*gaps.items(), strict=True), color=f"C{place}", label=label, **style)
    below.axhline(0, color="C0", linewidth=1)
    above.set(ylabel="loss (nats per byte)", yscale="log", title=title(settings, courses))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    below.set(xlabel="step", ylabel=f"gap to {first} (%)")
    for axes in (above, below):
        axes.grid(alpha=0.3, which="both")
    above.legend()
    if others:
        below.legend()
    path = folder / "loss.png"
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
    plt.close(figure)
    return path


Course = tuple[dict[float, float], dict[float, float]]
"""Loss by step: of training, averaged over 1% of the run, and of validation."""


def course(folder: Path, steps: int) -> Course:
    window = max(1, steps // 100)
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    groups = [losses[start : start + window] for start in range(0, len(losses), window)]
    means = {fmean(step for step, _ in group): fmean(loss for _, loss in group) for group in groups}
    return means, {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def title(settings: Settings, courses: dict[str, Course]) -> str:
    """What was trained, and where the validation losses end."""
    ends = {name: list(validation.values())[-1] for name, (_, validation) in courses.items()}
    first = next(iter(ends.values()))
    words = [f"{loss:.4f} in {name}" + (f" ({loss / first - 1:+.2%})" if place else "")
             for place, (name, loss) in enumerate(ends.items())]  # fmt: skip
    trained = f"{settings.layers} layers of width {settings.width}, {settings.steps:,} steps"
    return f"{trained}: validation loss ends at\n{', '.join(words)}"
