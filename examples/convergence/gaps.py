"""Finished runs of a study, and their paired relative gaps to BF16."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from convergence import results
from convergence.results import Result
from convergence.studies import BASELINE, Conditions, Study, variants_of
from gpt.settings import InputError

Results = dict[str, dict[int, Result]]
"""variant -> seed -> its finished run."""


def load(study: Study, settings: Conditions, seeds: int, folder: Path) -> Results:
    """The finished runs of a study, variants in its order.

    Raises:
        InputError: a file is damaged or of another run, or runs have different data, or some are of a CPU.
    """
    found: Results = {}
    for variant in variants_of(study):
        for seed in range(seeds):
            own = dataclasses.replace(settings, seed=seed)
            result = results.load(folder, own, variant)
            if result is not None:
                found.setdefault(variant, {})[seed] = result
    headers = [run.header for of_variant in found.values() for run in of_variant.values()]
    data = sorted({header["data"] for header in headers})
    if len(data) > 1:
        raise InputError(f"runs below {folder / settings.preset} were trained on different data: {', '.join(data)}")
    devices = sorted({header["device"] for header in headers})
    if len(devices) > 1 and "cpu" in devices:
        raise InputError(
            f"runs below {folder / settings.preset} were trained on {' and '.join(devices)}: bf16 is FP32 on a CPU, so "
            "they have no gap to each other; move some of them away, or give --results another folder"
        )
    return found


def with_missing(lines: Sequence[str], study: Study, found: Results) -> str:
    """The lines of a study's table, if anything was found, and below it the variants that have not been run."""
    missing = [variant for variant in variants_of(study) if variant not in found]
    parts = ["\n".join(lines)] if found else []
    parts += [f"Not run: {'; '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def gaps(found: Results, variant: str) -> dict[int, float]:
    """Relative gap to the baseline of the same seed, in percent, by seed."""
    baseline = found.get(BASELINE, {})
    return {
        seed: 100 * (result.loss / baseline[seed].loss - 1)
        for seed, result in found.get(variant, {}).items()
        if seed in baseline
    }


def differences(found: Results, variant: str, reference: str) -> dict[int, float]:
    """Gap of `variant` minus gap of `reference` at the same seed, in percentage points, by seed."""
    own, others = gaps(found, variant), gaps(found, reference)
    return {seed: own[seed] - others[seed] for seed in own if seed in others}


def deviation_of(values: Sequence[float]) -> float | None:
    """The standard deviation; None for fewer than two values, and where a run diverged."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
