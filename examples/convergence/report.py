"""A study as a Markdown table and a picture: paired relative gaps, mean and standard deviation over seeds."""

import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from convergence import leaderboard
from convergence.gaps import Results, deviation_of, differences, gaps, load, with_missing
from convergence.studies import BASELINE, BOARD, PRESETS, STUDIES, Conditions, Study, variants_of
from gpt.settings import InputError


def write(studies: Sequence[str], settings: Conditions, seeds: int, folder: Path, target: Path | None = None) -> str:
    """The command that trains the studies at one preset, and their tables, as Markdown; pictures go below `folder`.

    Args:
        target: a file in which the text takes the place of what stands between `<!-- PRESET -->` and
            `<!-- end of PRESET -->`; it must have both lines.

    Raises:
        InputError: runs of one preset were trained on different data, or `target` has no place for them.
    """
    beside = folder if target is None else Path(os.path.relpath(folder, target.parent))
    sections: list[str] = []
    compiled = False
    for name in studies:
        found = load(STUDIES[name], settings, seeds, folder)
        picture = Path(settings.preset) / f"{name}.png"
        if found:
            draw(name, found, settings, folder / picture)
        compiled |= any(run.header.get("compile") for of_variant in found.values() for run in of_variant.values())
        sections.append(section(settings, name, found, beside / picture))
        if STUDIES[name].presets:
            sections.append(side_by_side(STUDIES[name], settings, seeds, folder))
    text = "\n".join([command(studies, settings, seeds, compiled), *sections])
    if target is not None:
        insert(text, settings.preset, target)
    return text


def command(studies: Sequence[str], settings: Conditions, seeds: int, compiled: bool) -> str:
    tokens = "" if settings.tokens == PRESETS[settings.preset].tokens else f" --tokens {settings.tokens}"
    fused = " --compile" if compiled else ""
    arguments = f"{' '.join(studies)} --preset {settings.preset} --seeds {seeds}{tokens}{fused}"
    return f"```bash\npython examples/convergence/run.py {arguments}\n```\n"


def section(settings: Conditions, name: str, found: Results, picture: Path) -> str:
    """A study's question, where its runs were made, their table and picture."""
    runs = [run for of_variant in found.values() for run in of_variant.values()]
    made = {f"{run.header['device']}, torch {run.header['torch']}, {run.header['date']}" for run in runs}
    where = f"{len(runs)} runs of {settings.tokens:,} bytes each. {'; '.join(sorted(made))}." if runs else "No runs."
    title = f"{settings.preset}, {name}"
    image = f"\n![{title}]({picture})\n" if runs else ""
    rows = leaderboard.table(found) if name == BOARD else table(STUDIES[name], found)
    told = ("device", "torch") if name == BOARD else ("device", "torch", "commit")  # the board's rows name commits
    return f"### {title}: {STUDIES[name].question}\n\n{where}{unlike(found, told)}\n\n{rows}\n{image}"


def unlike(found: Results, told: Sequence[str]) -> str:
    """Which runs were made where, if not all alike: part of a gap between unlike runs may be due to that."""
    places: dict[str, dict[str, list[str]]] = {}
    for variant, of_variant in found.items():
        for seed, run in of_variant.items():
            place = ", ".join(f"{name} {run.header.get(name, 'unknown')}" for name in told)
            places.setdefault(place, {}).setdefault(variant, []).append(str(seed))
    if len(places) < 2:
        return ""
    lines = [
        f"- {place}: " + "; ".join(f"{variant} (seeds {', '.join(seeds)})" for variant, seeds in made.items())
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


def spread(values: Sequence[float], unit: str) -> str:
    """`mean ± standard deviation`, the latter where there are at least two values and none diverged."""
    if not values:
        return "-"
    deviation = deviation_of(values)
    return f"{statistics.fmean(values):+.2f}{'' if deviation is None else f' ± {deviation:.2f}'}{unit}"


def table(study: Study, found: Results) -> str:
    """A row per variant that was run, means over its seeds; a difference is over the seeds that both variants have."""
    minus = f"minus that of {study.reference}, same seeds"
    header = ("variant", "seeds", "loss (nats/byte)", f"gap to {BASELINE}", minus, "seconds")
    rows: list[tuple[str, ...]] = [header, ("---", *["---:"] * (len(header) - 1))]
    for variant in found:
        runs = list(found[variant].values())
        of_interest = variant not in (BASELINE, study.reference)
        rows.append(
            (
                variant,
                str(len(runs)),
                f"{statistics.fmean(run.loss for run in runs):.4f}",
                "" if variant == BASELINE else spread(list(gaps(found, variant).values()), " %"),
                spread(list(differences(found, variant, study.reference).values()), " pt") if of_interest else "",
                f"{statistics.fmean(run.header['seconds'] for run in runs):.0f}",
            )
        )
    return with_missing([f"| {' | '.join(row)} |" for row in rows], study, found)


def side_by_side(study: Study, settings: Conditions, seeds: int, folder: Path) -> str:
    """The gaps of a study at each of its presets, a column each; empty where nothing was run."""
    found = {}
    for preset in study.presets:
        own = dataclasses.replace(PRESETS[preset], device=settings.device, compile=settings.compile)
        found[preset] = load(study, own, seeds, folder)
    lines = ["| gap to bf16 (%) | " + " | ".join(found) + " |", "| --- |" + " ---: |" * len(found)]
    shown = [v for v in variants_of(study)[1:] if any(gaps(of_preset, v) for of_preset in found.values())]
    for variant in shown:
        cells = [spread(list(gaps(of_preset, variant).values()), "") for of_preset in found.values()]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" if shown else ""


def draw(name: str, found: Results, settings: Conditions, path: Path) -> None:
    """The picture of a study."""
    if name == BOARD:
        leaderboard.plot(found, settings, path)
    else:
        plot(STUDIES[name], found, settings, path)


def plot(study: Study, found: Results, settings: Conditions, path: Path) -> None:
    """Left: gap over the run, of every seed (thin) and their mean. Right: final gap of every seed, from 0 on."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(3, 2))
    shown = [variant for variant in variants_of(study) if variant != BASELINE and gaps(found, variant)]
    for place, variant in enumerate(shown):
        color = f"C{place}"
        _plot_course(left, found, variant, settings.batch * settings.sequence, color)
        final = list(gaps(found, variant).values())
        right.plot(final, [place] * len(final), "o", color=color, alpha=0.5)
        right.plot([statistics.fmean(final)], [place], "|", markersize=18, markeredgewidth=2, color=color)
    left.set(xlabel="million bytes trained on", ylabel="validation gap to bf16 (%)")
    figure.suptitle(study.question)
    left.grid(alpha=0.3)
    right.set(xlabel="final gap to bf16 (%)", yticks=range(len(shown)), yticklabels=shown)
    right.set_ylim(len(shown) - 0.5, -0.5)
    right.axvline(0, color="black", linewidth=0.8)  # in sight, so that a distance is not taken for a large one
    right.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _plot_course(axes: Axes, found: Results, variant: str, tokens_per_step: int, color: str) -> None:
    courses = []
    for seed in gaps(found, variant):
        pairs = zip(found[variant][seed].validation, found[BASELINE][seed].validation, strict=False)
        courses.append({step: 100 * (loss / baseline - 1) for (step, loss), (_, baseline) in pairs})
    steps = sorted(set.intersection(*map(set, courses)))
    means = [statistics.fmean(course[step] for course in courses) for step in steps]
    millions = [step * tokens_per_step / 1e6 for step in steps]
    for course in courses:
        axes.plot(millions, [course[step] for step in steps], color=color, linewidth=0.6, alpha=0.5)
    axes.plot(millions, means, color=color, linewidth=1.6)
