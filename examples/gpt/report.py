"""The end of a run: a table, in the terminal and as Markdown, and a picture of the loss curves."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gpt.checkpoint import read_metrics
from gpt.settings import Settings
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


def row(result: Result, first: Result) -> tuple[str, ...]:
    gap = result.validation_loss / first.validation_loss - 1
    return (
        result.precision,
        f"{result.validation_loss:.4f}",
        "" if result is first else f"{gap:+.2%}",
        "-" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
        mebibytes(result.peak_memory),
        mebibytes(result.saved_for_backward),
        f"{result.fp4_share:.1%}",
    )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def notes(settings: Settings, results: Sequence[Result]) -> str:
    memory = "CUDA's peak allocation" if settings.device == "cuda" else "the process's peak resident size"
    return (
        f"{settings.steps} steps of {settings.batch} x {settings.sequence} bytes; loss in nats per byte; outside FP4 "
        f"GEMMs compute in {results[0].high_precision_dtype}; memory is {memory}."
    )


def plot(folder: Path, settings: Settings) -> Path:
    """Training loss (thin, averaged over 1% of the run) and validation loss (dots) of every precision."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    window = max(1, settings.steps // 100)
    for name in settings.precision:
        rows = read_metrics(folder / name / "metrics.jsonl")
        losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        groups = [losses[start : start + window] for start in range(0, len(losses), window)]
        steps = [sum(step for step, _ in group) / len(group) for group in groups]
        means = [sum(loss for _, loss in group) / len(group) for group in groups]
        (line,) = axes.plot(steps, means, linewidth=1, label=f"{name}, training")
        points = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, color=line.get_color(), label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"{settings.preset}: {folder.name}", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
