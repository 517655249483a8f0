"""Studies as Markdown tables and pictures, put into documents; what is compared is found by `fp4engine.compare`."""

import dataclasses
import itertools
import json
import math
import os
import shlex
import statistics as stats
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from convergence.studies import BASELINE, BOARD, PRESETS, STUDIES, VARIANTS, Conditions, Study, variants_of
from convergence.task import run_of, task_of, variant_of
from fp4engine.compare import InputError, Result, pictures, read_folders, statistics
from fp4engine.compare.command import spread_of
from fp4engine.compare.comparison import Arm, Comparison, compare
from fp4engine.compare.plan import Spread
from fp4engine.compare.statistics import Interval, interval
from fp4engine.convert import convert_for_regions
from fp4engine.recipe import ScheduledRecipe, zoo
from fp4engine.recipe.identity import identity

COSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "recipes.json"
"""What `benchmarks/recipes.py` measured."""

EARLIER = ", an earlier recipe"
"""Marks runs whose recipe is not their variant's any more: evidence, and no runs of that variant."""


def load(study: Study, settings: Conditions, seeds: int, folder: Path, more: Sequence[str] = ()) -> Comparison | None:
    """The finished runs of a study, its reference first, and of other recipes; None without a baseline.

    Raises:
        InputError: a file is damaged, or runs have different data, or some are of a CPU.
    """
    place = folder / settings.preset
    wanted = task_of(settings).setting()
    found: list[Result] = []
    for result in read_folders([place]) if place.is_dir() else []:
        alike = all(
            result.header["setting"].get(name) == value for name, value in wanted.items() if name not in ("data", "on")
        )
        if not alike or result.label not in (*variants_of(study), *more) or result.seed >= seeds:
            continue
        run = run_of(result.label, settings, result.seed)
        if result.header["recipe"] == identity(run.recipe) and result.header["extra"] == dict(run.extra):
            found.append(result)
        else:
            found.append(dataclasses.replace(result, header={**result.header, "label": result.label + EARLIER}))
    if not any(result.is_baseline for result in found):
        return None
    order = [study.reference, *(name for name in (*study.variants, *more) if name != study.reference)]
    order += [name + EARLIER for name in order]
    with_draws = [_by_other_draws(result) for result in found]
    return compare(with_draws, math.inf, order)


def _by_other_draws(result: Result) -> Result:
    """The run, whose other draws are what makes it a row of its own here."""
    extra = {f"{name} of its own" if name == "draws" else name: v for name, v in result.header["extra"].items()}
    return dataclasses.replace(result, header={**result.header, "extra": extra})


def write(
    studies: Sequence[str],
    settings: Conditions,
    seeds: int,
    folder: Path,
    target: Path | None = None,
    variants: Sequence[str] | None = None,
) -> str:
    """The command that trains the studies at one preset, and their tables, as Markdown; pictures go below `folder`.

    Args:
        target: a file in which the text takes the place of what stands between `<!-- PRESET -->` and
            `<!-- end of PRESET -->`; it must have both lines.
        variants: among which may be recipes of no study, which then every study shows.

    Raises:
        InputError: as :func:`load`, or `target` has no place for them.
    """
    beside = folder if target is None else Path(os.path.relpath(folder, target.parent))
    sections: list[str] = []
    compiled = False
    for name in studies:
        found = load(STUDIES[name], settings, seeds, folder, [v for v in variants or () if v not in VARIANTS])
        picture = Path(settings.preset) / f"{name.replace(' ', '-')}.png"  # a link in Markdown has no spaces
        if found is not None:
            draw(name, found, settings, folder / picture)
            compiled |= any(run.header.get("compile") for run in found.results)
        sections.append(section(settings, name, found, beside / picture))
        if STUDIES[name].presets:
            sections.append(side_by_side(STUDIES[name], settings, seeds, folder))
    tokens = "" if settings.tokens == PRESETS[settings.preset].tokens else f" --tokens {settings.tokens}"
    arguments = f"{shlex.join(studies)} --preset {settings.preset} --seeds {seeds}{tokens}{' --compile' * compiled}"
    text = "\n".join([f"```bash\npython examples/convergence/run.py {arguments}\n```\n", *sections])
    if target is not None:
        insert(text, settings.preset, target)
    return text


def section(settings: Conditions, name: str, found: Comparison | None, picture: Path) -> str:
    """A study's question, where its runs were made, their table and picture."""
    title = f"{settings.preset}, {name}"
    heading = f"### {title}: {STUDIES[name].question}\n\n"
    missing = [v for v in variants_of(STUDIES[name]) if found is None or v not in [a.label for a in _arms(found)]]
    left = f"\n\nNot run: {'; '.join(missing)}." if missing else ""
    if found is None:
        return f"{heading}No runs.{left}\n"
    runs = found.results
    made = sorted({f"{run.header['device']}, torch {run.header['torch']}, {run.header['date']}" for run in runs})
    where = f"{len(runs)} runs of {settings.tokens:,} bytes each. {'; '.join(made)}."
    rows = board(found, settings) if name == BOARD else table(STUDIES[name], found, settings)
    told = ("device", "torch") if name == BOARD else ("device", "torch", "commit")  # the board's rows name commits
    return f"{heading}{where}{unlike(found, told)}\n\n{rows}{left}\n\n![{title}]({picture})\n"


def _arms(found: Comparison) -> tuple[Arm, ...]:
    return (found.baseline, *found.arms)


def unlike(found: Comparison, told: Sequence[str]) -> str:
    """Which runs were made where, if not all alike: part of a gap between unlike runs may be due to that."""
    places: dict[str, dict[str, list[str]]] = {}
    for arm in _arms(found):
        for seed, run in arm.runs.items():
            place = ", ".join(f"{name} {run.header.get(name, 'unknown')}" for name in told)
            places.setdefault(place, {}).setdefault(arm.label, []).append(str(seed))
    if len(places) < 2:
        return ""
    lines = [
        f"- {place}: " + "; ".join(f"{label} (seeds {', '.join(seeds)})" for label, seeds in made.items())
        for place, made in places.items()
    ]
    return "\n\nNot all were made alike, and part of a gap may be due to that:\n\n" + "\n".join(lines)


def insert(text: str, preset: str, target: Path) -> None:
    begin, end = f"<!-- {preset} -->\n", f"<!-- end of {preset} -->"
    before, found_begin, rest = target.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise InputError(f"{target} needs the lines {begin.strip()} and {end}, between which the tables go")
    target.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def markdown(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; all columns but the first ones are to the right."""
    rule = ["---" if place < left else "---:" for place in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def table(study: Study, found: Comparison, settings: Conditions) -> str:
    """A row per variant that was run; a gap and the loss beside it are of the same seeds."""
    rows = [("variant", "seeds", "loss", f"gap to {BASELINE}, %", f"to {study.reference}, points", "FP4", "seconds")]
    for row, arm in zip(found.rows(), _arms(found), strict=False):
        to_first = "" if row.to_first is None else f"{row.against_first} {row.to_first}"
        seconds = stats.fmean(run.end.get("seconds") or math.nan for run in arm.runs.values())
        gap = "" if row.gap is None else str(row.gap)
        share = fp4_share(arm.label, settings)
        rows.append((row.label, str(row.seeds), f"{row.loss:.4f}", gap, to_first, share, f"{seconds:.0f}"))
    return markdown(rows)


def places(found: Comparison) -> Iterator[tuple[Arm, Interval, Interval | None]]:
    """Arms in the order of their gaps, the baseline at its place; each with how much farther the next one is."""
    base = found.baseline.runs
    means = [(arm, interval(list(statistics.gaps(arm.runs, base).values()))) for arm in _arms(found)]
    means = sorted((m for m in means if m[1].count), key=lambda m: (not math.isfinite(m[1].mean), m[1].mean))
    for (arm, gap), after in itertools.zip_longest(means, means[1:]):
        shared = statistics.differences(after[0].runs, arm.runs, base) if after is not None else {}
        yield arm, gap, interval(list(shared.values())) if shared else None


def board(found: Comparison, settings: Conditions) -> str:
    """The leaderboard."""
    rows = [
        (
            "",
            "recipe",
            "seeds",
            "loss",
            "gap to bf16, %",
            "to the next, points",
            "FP4",
            "step",
            "saved",
            "from",
            "commit",
        )
    ]
    for number, (arm, gap, to_next) in enumerate(places(found), start=1):
        variant = variant_of(arm.label.removesuffix(EARLIER))
        step, saved = costs(variant.row)
        source = f"`{variant.row}`: {zoo.ZOO[variant.row].source}" if variant.row else variant.source
        commits = sorted({run.header.get("commit", "unknown") for run in arm.runs.values()})
        loss = f"{statistics.loss(arm.runs, found.baseline.runs):.4f}"
        cells = (str(number), arm.label, str(gap.count), loss, str(gap), told(to_next))
        rows.append((*cells, fp4_share(arm.label, settings), step, saved, source, ", ".join(commits)))
    return markdown(rows, left=2)


def told(to_next: Interval | None) -> str:
    """Whether two neighbours differ."""
    if to_next is None or not math.isfinite(to_next.mean):
        return "" if to_next is None else str(to_next)
    if to_next.count == 1:
        return "one seed: not told apart"
    return f"tie ({to_next})" if to_next.holds_zero else str(to_next)


@cache
def costs(row: str) -> tuple[str, str]:
    """A linear layer's step, and the bytes that it saves for its backward pass, over those of BF16."""
    measured = [entry for entry in json.loads(COSTS.read_text())["rows"] if entry["row"] == row]
    if not measured:
        return "", ""
    step = sum(entry["ms"] for entry in measured) / sum(entry["bf16_ms"] for entry in measured)
    saved = sum(e["saved"] for e in measured) / sum(e["bf16_memory"]["saved"] for e in measured)
    return f"{step:.2f}", f"{saved:.2f}"


def fp4_share(label: str, settings: Conditions) -> str:
    """What part of the FLOPs of all linear layers is planned in FP4, over the run; empty of an earlier recipe."""
    if label.endswith(EARLIER):
        return ""
    recipe = variant_of(label).recipe(settings)
    phases = recipe.phases if isinstance(recipe, ScheduledRecipe) else ((0, recipe),)
    ends = [*(start for start, _ in phases[1:]), settings.steps]
    share = 0.0
    for (start, of_phase), end in zip(phases, ends, strict=True):
        with torch.device("meta"):
            model = task_of(dataclasses.replace(settings, compile=False, hot=1.0)).model()
        plan = convert_for_regions(model, of_phase, None, settings.keep_high_precision)
        share += plan.fp4_share * (end - start) / settings.steps
    return f"{share:.0%}"


def ship(found: Comparison, preset: str, path: Path) -> None:
    """Tell `fp4engine recipes` the gaps of the recipe book's rows at a preset; nothing where there are none."""
    rows = {row: str(gap) for arm, gap, _ in places(found) if (row := variant_of(arm.label.removesuffix(EARLIER)).row)}
    if rows:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, preset: rows}, indent=1, ensure_ascii=False) + "\n")


def spreads(folder: Path, seeds: int) -> list[Spread]:
    """How far apart the gaps of one variant's seeds lie at each preset."""
    found: list[Spread] = []
    for preset in (preset for name, preset in PRESETS.items() if not name.endswith(("-hot", "-fast"))):  # no stress
        study = Study("", BASELINE, tuple(dict.fromkeys(v for s in STUDIES.values() for v in s.variants)))
        runs = load(study, preset, seeds, folder)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in task_of(dataclasses.replace(preset, hot=1.0)).model().parameters())
        if runs is not None and (spread := spread_of(runs, preset.preset, parameters, preset.tokens)):
            found.append(dataclasses.replace(spread, deviation=round(spread.deviation, 3)))
    return found


def side_by_side(study: Study, settings: Conditions, seeds: int, folder: Path) -> str:
    """The gaps of a study at each of its presets, a column each; empty where nothing was run."""
    gaps: dict[str, dict[str, Interval]] = {}
    for preset in study.presets:
        own = dataclasses.replace(PRESETS[preset], device=settings.device, compile=settings.compile)
        found = load(study, own, seeds, folder)
        gaps[preset] = {row.label: row.gap for row in (found.rows() if found else []) if row.gap is not None}
    shown = [v for v in variants_of(study)[1:] if any(v in of_preset for of_preset in gaps.values())]
    lines = [[f"gap to {BASELINE}, %", *gaps], *([v, *(str(of.get(v, "-")) for of in gaps.values())] for v in shown)]
    return markdown(lines) + "\n" if shown else ""


def draw(name: str, found: Comparison, settings: Conditions, path: Path) -> None:
    """The picture of a study: the gap over the run and at its end, of the board the end alone, in the order of gaps."""
    arms = [arm for arm in found.arms if statistics.gaps(arm.runs, found.baseline.runs)]
    if name == BOARD:
        arms = [arm for arm, _, _ in places(found) if arm is not found.baseline]
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.28 * max(1, len(arms))), layout="constrained")
        pictures.finals(axes, found, arms)
        # above the legend, where a title of axes is not
        figure.suptitle(f"{settings.preset}, {settings.tokens:,} bytes")
    else:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(3, 2))
        pictures.courses(left, found, arms, "byte")
        pictures.finals(right, found, arms)
        figure.suptitle(STUDIES[name].question)
    figure.savefig(path, dpi=90)
    plt.close(figure)
