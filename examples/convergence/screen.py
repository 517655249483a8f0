"""Rank recipes by what their forward pass does to a trained model's predictions, before anything is spent on training.

    python examples/convergence/screen.py "one product" board --preset micro

Trains a preset's baseline once and keeps its weights. Then every variant predicts the validation text with these weights,
and the divergence is the mean Kullback-Leibler divergence of its predictions from the baseline's, in nats per byte. Beside
it stand the gap that training measured at another preset, and their rank correlation. Nothing is trained in FP4 here: what
a backward pass, OsciReset or a later step of a schedule changes is not seen, nor what a model learns to live with.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

if __package__ in (None, ""):  # run as a script: the packages beside this folder are importable
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
    new.add_argument("--measured", choices=PRESETS, default="3m", help="whose gaps stand beside (default: 3m)")
    return new


def trained(task: StudyTask, scratch: Path) -> Path:
    """The file of the baseline's trained weights, seed 0; trained where it is not there, resumed where it was stopped."""
    kept = scratch / "screen" / f"{task.settings.preset}-{task.digest}.safetensors"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        places = Places(kept.parent / "runs", kept.parent / "unfinished")
        steps = f"/{task.steps} steps of {task.settings.preset}"
        tell = lambda step: print(f"\r{step}{steps}", end="", flush=True, file=sys.stderr)  # noqa: E731
        train(task, run_of(BASELINE, task.settings, 0), places, keep=kept, tell=tell)
    return kept


@torch.no_grad()
def predictions(task: StudyTask, label: str, weights: Path) -> Iterator[Tensor]:
    """Log-probabilities [bytes, 256] of each validation batch under a variant's recipe, in FP32."""
    run = run_of(label, task.settings, 0)
    with RandomStream(0).in_force():
        model = task.model()
        task.convert(model, run)
        checkpoint.load_weights(model, weights)
        model.eval()
        for tokens in task.validation(last=True):
            with task.precision(), autocast(enabled=label != BASELINE, recipe=run.recipe.at(0)):
                logits = model(tokens[:, :-1])
            yield F.log_softmax(logits.float().flatten(0, 1), dim=-1)


def divergence(task: StudyTask, label: str, weights: Path, expected: list[Tensor]) -> float:
    """Mean Kullback-Leibler divergence of a variant's predictions from the baseline's, in nats per byte."""
    pairs = zip(predictions(task, label, weights), expected, strict=True)
    means = [F.kl_div(ours, theirs, reduction="batchmean", log_target=True) for ours, theirs in pairs]
    return float(torch.stack(means).mean())


def measured_gaps(preset: str, labels: Sequence[str]) -> dict[str, float]:
    """Mean gap to the baseline of each variant that was trained at a preset, over up to three seeds."""
    found = tables.load(Study("", BASELINE, tuple(labels)), PRESETS[preset], 3, RESULTS)
    rows = [] if found is None else found.rows()
    return {row.label: row.gap.mean for row in rows if row.gap is not None}


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    settings = PRESETS[arguments.preset]
    task = task_of(settings, sources.prepare(None, settings.sequence + 1, SCRATCH))
    weights = trained(task, SCRATCH)
    expected = list(predictions(task, BASELINE, weights))
    labels = dict.fromkeys(label for study in arguments.studies for label in variants_of(STUDIES[study]))
    gaps = measured_gaps(arguments.measured, list(labels))
    rows = []
    for label in labels:
        if label != BASELINE and VARIANTS[label].resets is None and VARIANTS[label].outliers is None:
            rows.append((label, divergence(task, label, weights, expected), gaps.get(label)))
    default = next(value for label, value, _ in rows if label == "nvfp4")
    print(
        f"| variant | nats per byte | of the default's | expected | gap at {arguments.measured} |\n|---|---:|---:|---:|---:|"
    )
    for label, value, gap in sorted(rows, key=lambda row: row[1]):
        hoped = VARIANTS[label].expected
        print(
            f"| {label} | {value:.5f} | {value / default:.2f} | {'' if hoped is None else f'{hoped:.2f}'} "
            f"| {'' if gap is None else f'{gap:+.2%}'} |"
        )
    both = [(value, gap) for _, value, gap in rows if gap is not None]
    if len(both) > 2:
        result = scipy.stats.spearmanr(*zip(*both, strict=True))
        print(f"\nSpearman's correlation of divergence and gap, {len(both)} variants: {result.statistic:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
