"""What paired runs say: gaps to the baseline, their intervals, which recipes tie, and a verdict.

A gap is ``100 * (loss / loss of the baseline of the same seed - 1)``, in percent. Intervals are Student's: with n gaps
of mean m and standard deviation s, ``m +- t(0.975, n - 1) s / sqrt(n)`` holds the mean of infinitely many seeds in 95
of 100 comparisons, so that two recipes that are equal are called different in 5 of 100.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from fp4engine.compare.results import Result

CONFIDENCE = 0.95
FEWEST_SEEDS = 3
"""With fewer, nothing is said to train: an interval of two values is thirteen standard deviations wide."""

MOST_SEEDS = 100
"""No more seeds are ever advised."""

TRAINS, DOES_NOT, CANNOT_TELL = 0, 3, 4
"""Exit codes."""

BySeed = Mapping[int, Result]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval, in the unit of the values; without bounds for fewer than two values."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def holds_zero(self) -> bool:
        """Whether the mean may be zero; a value that never differed is zero."""
        return not (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        if not self.count:
            return "–"
        if not math.isfinite(self.mean):
            return "diverged"
        if not math.isfinite(self.high):
            return f"{self.mean:+z.2f}"
        return f"{self.mean:+z.2f} ({self.low:+z.2f} to {self.high:+z.2f})"


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean. A value that is not finite leaves nothing to say."""
    if not values or not all(map(math.isfinite, values)):
        return Interval(math.nan, -math.inf, math.inf, len(values))
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    reach = student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach, len(values))


def student(count: int) -> float:
    """How many standard errors the 95% interval of the mean of ``count`` values reaches to each side."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))


def gaps(runs: BySeed, baseline: BySeed, share: float = 1.0) -> dict[int, float]:
    """Gap by seed, in percent, over the seeds whose baseline did not diverge; infinite where the run itself did.

    Args:
        share: of the run after which the losses are compared.
    """
    paired = {seed: (run, baseline[seed]) for seed, run in runs.items() if seed in baseline}
    return {
        seed: math.inf if run.diverged else 100 * (run.loss_until(share) / other.loss_until(share) - 1)
        for seed, (run, other) in paired.items()
        if not other.diverged
    }


def differences(runs: BySeed, others: BySeed, baseline: BySeed) -> dict[int, float]:
    """``seed -> gap of runs minus gap of others`` at the same seed, in percentage points."""
    first, second = gaps(runs, baseline), gaps(others, baseline)
    shared = [seed for seed in first if seed in second]
    return {seed: first[seed] - second[seed] if first[seed] != second[seed] else 0.0 for seed in shared}


def loss(runs: BySeed, baseline: BySeed) -> float:
    """Mean loss over the seeds that :func:`gaps` counts, so that it belongs to the same runs as the gap."""
    values = [runs[seed].loss for seed in gaps(runs, baseline)]
    return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe trains as the baseline does, within a tolerance.

    Attributes:
        code: :data:`TRAINS`, :data:`DOES_NOT` or :data:`CANNOT_TELL`.
        word: in two or three words.
        text: in a sentence.
    """

    code: int
    word: str
    text: str


def verdict(runs: BySeed, baseline: BySeed, tolerance: float) -> Verdict:
    """The verdict on a recipe's runs; ``tolerance`` is the largest gap to accept, in percent."""
    by_seed = gaps(runs, baseline)
    diverged = sorted(seed for seed, gap in by_seed.items() if not math.isfinite(gap))
    if diverged:
        seeds = ", ".join(map(str, diverged))
        text = f"the loss was not finite any more with {len(diverged)} of {len(by_seed)} seeds ({seeds})"
        return Verdict(DOES_NOT, "diverged", f"{text}, and the baseline's always was")
    if not by_seed:
        return Verdict(CANNOT_TELL, "cannot tell", "no baseline with the same seed has finished with a finite loss")
    if not any(run.end.get("quantized_gemms", 1) for run in runs.values()):  # others' scripts do not say
        text = (
            "no product of the model was quantized; it multiplies by its weights without calling its linear layers, or "
            "the recipe casts nothing in these steps"
        )
        return Verdict(CANNOT_TELL, "did not run", text)
    paired = [(runs[seed], baseline[seed]) for seed in by_seed]
    if all((run.losses, run.validation) == (other.losses, other.validation) for run, other in paired):
        text = (
            "every loss is the baseline's to the last digit: the recipe was not in force, or the losses were rounded "
            "before they were noted"
        )
        return Verdict(CANNOT_TELL, "did not run", text)
    gap = interval(list(by_seed.values()))
    if gap.low > tolerance:
        return Verdict(DOES_NOT, f"beyond {tolerance:g}%", f"its gap is above {tolerance:g}%: {gap.low:z.2f}% at least")
    if gap.high < tolerance and gap.count >= FEWEST_SEEDS:
        return Verdict(TRAINS, f"within {tolerance:g}%", f"its gap is below {tolerance:g}%: {gap.high:z.2f}% at most")
    return Verdict(CANNOT_TELL, "cannot tell", _what_would_tell(runs, baseline, tolerance))


def _what_would_tell(runs: BySeed, baseline: BySeed, tolerance: float) -> str:
    values = list(gaps(runs, baseline).values())
    mean = statistics.fmean(values)
    if len(values) < FEWEST_SEEDS:
        only = "one seed has" if len(values) == 1 else "two seeds have"
        return f"{only} no spread to judge a gap of {mean:+z.2f}% by; run {FEWEST_SEEDS} seeds at least"
    deviation, distance = statistics.stdev(values), abs(tolerance - mean)
    seeds = seeds_for(deviation, distance)
    said = f"the gap of {mean:+z.2f}% is too close to {tolerance:g}% for a spread of {deviation:.2f} points over seeds"
    longer = _steps_for(runs, baseline, distance)
    if seeds is None:
        return f"{said}: even {MOST_SEEDS} seeds would not tell{longer or '; judge it at another tolerance'}"
    return f"{said}; {seeds} seeds would tell{longer}, if mean and spread stay as they are"


def seeds_for(deviation: float, distance: float) -> int | None:
    """The fewest seeds whose interval reaches less than ``distance``; None for more than :data:`MOST_SEEDS`."""
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        if student(count) * deviation / math.sqrt(count) < distance:
            return count
    return None


def _steps_for(runs: BySeed, baseline: BySeed, distance: float) -> str:
    """By how much longer runs the spread would shrink enough, if it goes on shrinking as from the half to the end."""
    if any(baseline[seed].loss_until(0.5) <= 0 for seed in gaps(runs, baseline)):
        return ""
    half, whole = (list(gaps(runs, baseline, share).values()) for share in (0.5, 1.0))
    before, after = statistics.stdev(half), statistics.stdev(whole)
    reach = student(len(whole)) * after / math.sqrt(len(whole))
    if not 0 < after < 0.95 * before or not distance:
        return ""
    power = math.log2(before / after)
    factor = (reach / distance) ** (1 / power)
    if factor > 100:
        return ""
    steps = max(series[-1][0] for run in runs.values() for series in (run.validation, run.losses) if series)
    return f", or runs of {math.ceil(steps * factor):,} steps (the spread has shrunk from {before:.2f} at half of them)"


def noise(pairs: Sequence[tuple[BySeed, BySeed]]) -> list[float]:
    """How far apart runs end that differ by nothing but their draws and the order of additions, in percent.

    Args:
        pairs: runs, and the same again.
    """
    found: list[float] = []
    for runs, again in pairs:
        for seed in sorted(runs.keys() & again.keys()):
            if not (runs[seed].diverged or again[seed].diverged):
                found.append(100 * (again[seed].loss / runs[seed].loss - 1))
    return found


def root_mean_square(values: Sequence[float]) -> float | None:
    """The root mean square of ``values``; None if there are none."""
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else None
