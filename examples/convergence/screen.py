"""Rank recipes by what their forward pass does to a trained model's predictions, before anything is spent on training.

    python examples/convergence/screen.py "one product" board --preset micro

Trains a preset's baseline once and keeps its weights. Then every variant predicts the validation text with these
weights; its divergence is the mean Kullback-Leibler divergence of its predictions from the baseline's, in nats per
byte. Beside it stand the gap that training measured at another preset, and the rank correlation of the two. Nothing
is trained in FP4 here: what a backward pass, OsciReset or a later step of a schedule changes is not seen, nor what a
model learns to live with.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convergence import sources, tables
from convergence.run import RESULTS, SCRATCH
from convergence.studies import BASELINE, PRESETS, STUDIES, VARIANTS, Study, variants_of
from convergence.task import StudyTask, run_of, task_of
from fp4engine.compare import checkpoint
from fp4engine.compare.training import Places, train
from fp4engine.state import RandomStream, autocast


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY", help="one product, board, ...")
    new.add_argument("--preset", choices=PRESETS, default="micro", help="whose model is trained (default: micro)")
    new.add_argument("--measured", choices=("3m", "10m"), default="3m", help="whose gaps stand beside (default: 3m)")
    return new


def trained(task: StudyTask, scratch: Path) -> Path:
    """The file of the baseline's weights after training with seed 0; trains, or resumes, if it is not there."""
    kept = scratch / "screen" / f"{task.settings.preset}-{task.digest}.safetensors"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        places = Places(kept.parent / "runs", kept.parent / "unfinished")
        with tqdm(total=task.steps, unit="step", desc=task.settings.preset) as bar:

            def tell(step: int) -> None:
                bar.update(step - bar.n)

            train(task, run_of(BASELINE, task.settings, 0), places, keep=kept, tell=tell)
    return kept


@torch.no_grad()
def predictions(task: StudyTask, label: str, weights: Path) -> list[Tensor]:
    """Log-probabilities [bytes, 256] of each validation batch under a variant's recipe, in FP32."""
    run = run_of(label, task.settings, 0)
    with RandomStream(0).in_force(), task.precision(), autocast(enabled=label != BASELINE, recipe=run.recipe.at(0)):
        model = task.model()
        task.convert(model, run)
        checkpoint.load_weights(model, weights)
        logits = [model.eval()(tokens[:, :-1]) for tokens in task.validation(last=True)]
    return [F.log_softmax(batch.float().flatten(0, 1), dim=-1) for batch in logits]


def divergence(ours: list[Tensor], baseline: list[Tensor]) -> float:
    """Mean Kullback-Leibler divergence of predictions from the baseline's, in nats per byte."""
    pairs = zip(ours, baseline, strict=True)
    return fmean(F.kl_div(a, b, reduction="batchmean", log_target=True).item() for a, b in pairs)


def measured_gaps(preset: str, labels: Sequence[str]) -> dict[str, float]:
    """Mean gap to the baseline, in percent, of each variant that was trained at a preset, over up to three seeds."""
    found = tables.load(Study("", BASELINE, tuple(labels)), PRESETS[preset], 3, RESULTS)
    rows = [] if found is None else found.rows()
    return {row.label: row.gap.mean for row in rows if row.gap is not None}


def table(rows: list[tuple[str, float, float | None]], preset: str) -> str:
    """Variants with their divergences and measured gaps in percent, and what the former say of the latter.

    The line through the measured gaps is Theil and Sen's, which a few variants far from it do not turn.
    """
    default = next(divergence for label, divergence, _ in rows if label == "nvfp4")
    known = [(divergence, gap) for _, divergence, gap in rows if gap is not None]
    divergences, gaps = (list(column) for column in zip(*known, strict=True))
    statistics: Any = scipy.stats
    correlation = statistics.spearmanr(divergences, gaps).statistic
    slope, intercept, *_ = statistics.theilslopes(gaps, divergences)
    lines = [f"| variant | nats per byte | over nvfp4's | expected | gap at {preset} | by the line |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for label, divergence, gap in sorted(rows, key=lambda row: row[1]):
        expected = VARIANTS[label].expected
        cells = [f"{divergence:.4f}", f"{divergence / default:.2f}", "" if expected is None else f"{expected:.2f}"]
        cells += ["" if gap is None else f"{gap:+.2f}%", f"{intercept + slope * divergence:+.2f}%"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", f"Spearman's correlation of divergence and gap over {len(known)} variants: {correlation:.2f}."]
    return "\n".join([*lines, f"The line: {intercept:.2f}% + {slope:.1f}% x nats per byte."])


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    settings = PRESETS[arguments.preset]
    task = task_of(settings, sources.prepare(None, settings.sequence + 1, SCRATCH))
    weights = trained(task, SCRATCH)
    baseline = predictions(task, BASELINE, weights)
    labels = dict.fromkeys(label for study in arguments.studies for label in variants_of(STUDIES[study]))
    gaps = measured_gaps(arguments.measured, list(labels))
    rows: list[tuple[str, float, float | None]] = []
    for label in tqdm(labels, unit="variant"):
        if label != BASELINE and VARIANTS[label].resets is None and VARIANTS[label].outliers is None:
            moved = divergence(predictions(task, label, weights), baseline)
            rows.append((label, moved, gaps.get(label)))
    print(table(rows, arguments.measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
