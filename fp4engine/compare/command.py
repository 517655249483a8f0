"""``fp4engine compare``: from arguments to runs, tables, a page and an exit code."""

import argparse
import math
import pickle
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp4engine.arguments import one_line
from fp4engine.compare import plan, statistics
from fp4engine.compare.comparison import Comparison, compare
from fp4engine.compare.data import prepare
from fp4engine.compare.files import InputError, alone_in
from fp4engine.compare.page import About, html, title
from fp4engine.compare.recorder import AGAIN, HIGH_PRECISION, Run
from fp4engine.compare.results import read, read_folders, require_folders
from fp4engine.compare.runner import Job, Runner, Stopped
from fp4engine.compare.sensitivity import Sensitivity, measure, short
from fp4engine.compare.task import TextTask, source_of, without_memory
from fp4engine.compare.training import Places
from fp4engine.estimate import Estimate, estimate
from fp4engine.files import write_atomically
from fp4engine.recipe import Recipe, recipe_from_argument
from fp4engine.recipe.identity import ablations, digest, identity

INTERRUPTED = 130
EVALUATIONS = 10
"""Validations of a run."""

GPU = "B200"
"""The GPU for which a step is estimated."""

RATES = {"random": 1e-3, "pretrained": 2e-5, "lora": 2e-4}
"""Peak learning rates, unless asked otherwise."""

SHORT_SHARE, FEWEST_SHORT, MOST_SHORT = 15, 8, 40
"""A short run has so small a part of a run's steps, within these bounds."""


def main(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask; returns the exit code."""
    if arguments.runs:
        idle = [name for name in ("model", "data", "recipes", "ablate", "plan") if getattr(arguments, name)]
        if idle:
            raise InputError(
                f"--runs makes the page of runs that are there: leave out {', '.join(f'--{n}' for n in idle)}"
            )
        return _page_of(arguments)
    if not arguments.model or not arguments.data:
        raise InputError("give --model and --data, or --runs for runs that another script has made")
    recipes = recipes_of(arguments.recipes, arguments.ablate)
    out = Path(arguments.out or "compare")
    with alone_in(out, "give another --out"):
        task = task_of(arguments, out)
        meta = check(task, recipes)
        parameters = sum(parameter.numel() for parameter in meta.parameters())
        if arguments.plan:
            print(_plan(arguments, task, recipes, parameters, out))
            return 0
        return _run(arguments, task, recipes, meta, parameters, out)


def _page_of(arguments: argparse.Namespace) -> int:
    """The page of runs that are there."""
    folders = [Path(folder) for folder in arguments.runs]
    require_folders(folders)  # of which one is made below, if it is not there
    out = Path(arguments.out or folders[0])
    with alone_in(out, "give another --out"):
        comparison = compare(read_folders(folders), arguments.tolerance)
        said = next(iter(comparison.baseline.runs.values())).header
        known = {name: said[name] for name in ("parameters", "unit") if name in said}
        publish(out, comparison, About(folders[0].resolve().name, **known))
    return comparison.code


def recipes_of(arguments: Sequence[str], ablate: Sequence[str] | None) -> dict[str, Recipe]:
    """Label -> recipe, each recipe once.

    Raises:
        InputError: there is no such recipe, or none at all; two have one label.
    """
    option = "--recipes"
    try:
        given = [(_label(argument), recipe_from_argument(argument)) for argument in arguments]
        if ablate:
            option = "--ablate"
            first, second = ablate
            ours, theirs = recipe_from_argument(first), recipe_from_argument(second)
            changed = [(f"{_label(first)} with {what}", recipe) for what, recipe in ablations(ours, theirs).items()]
            given += [(_label(first), ours), *changed, (_label(second), theirs)]
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error
    named: dict[str, Recipe] = {}
    for label, recipe in given:
        if identity(named.setdefault(label, recipe)) != identity(recipe):
            raise InputError(f"--recipes and --ablate must have different names, got {label!r} twice; rename a file")
    first_names = {digest(identity(HIGH_PRECISION)): "the baseline"}
    same_as = {label: first_names.setdefault(digest(identity(recipe)), label) for label, recipe in named.items()}
    kept = {label: recipe for label, recipe in named.items() if same_as[label] == label}
    if not kept:
        raise InputError("--recipes must name at least one recipe other than high precision")
    for label, recipe in kept.items():
        try:
            pickle.dumps(recipe)
        except Exception as error:  # whatever an object of somebody's raises
            raise InputError(
                f"{label} cannot be sent to the processes that train; its functions and classes must be at the top "
                f"level of their file: {one_line(error)}"
            ) from error
    for label, same in same_as.items():
        if same != label:
            print(f"{label} is the same recipe as {same}, and is not run twice", file=sys.stderr)
    return kept


def _label(argument: str) -> str:
    """What tables call a recipe: its name in the book, or its file without folder and ending."""
    return Path(argument).stem if argument.endswith(".json") else argument


def task_of(arguments: argparse.Namespace, out: Path) -> TextTask:
    """What the runs share.

    Raises:
        InputError: a model, data or a size that cannot be used.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA device here")
    if arguments.cuda_graph and arguments.device != "cuda":
        raise InputError("--cuda-graph captures what a GPU runs; leave it out with --device cpu")
    if "" in arguments.data:
        raise InputError(f"--data must name files and folders, got {' '.join(map(repr, arguments.data))}")
    source = source_of(arguments.model)
    name, encode = source.encoding()
    source.require_fit(arguments.sequence)
    of_step = arguments.batch * arguments.grad_accumulation * arguments.sequence
    paths = [Path(path) for path in arguments.data]
    wanted = arguments.steps * of_step
    text = prepare(paths, encode, name, wanted, arguments.sequence + 1, arguments.text_field, out)
    if (windows := text.windows(arguments.sequence + 1)) < arguments.batch * arguments.grad_accumulation:
        raise InputError(
            f"--data holds {windows} sequences of {arguments.sequence} {text.unit}s to train on, and a step needs "
            f"{arguments.batch * arguments.grad_accumulation}; give more text, or a smaller --batch or --sequence"
        )
    kind = "lora" if arguments.lora else "pretrained" if source.is_trained else "random"
    rate = RATES[kind] if arguments.lr is None else arguments.lr
    return TextTask(
        name=arguments.model, text=text, lora=arguments.lora, steps=arguments.steps, batch=arguments.batch,
        sequence=arguments.sequence, accumulation=arguments.grad_accumulation, learning_rate=rate,
        evaluate_every=max(1, -(-arguments.steps // EVALUATIONS)), device=arguments.device, compile=arguments.compile,
        cuda_graph=arguments.cuda_graph,
        keep=None if arguments.keep_high_precision is None else tuple(arguments.keep_high_precision),
    )  # fmt: skip


def check(task: TextTask, recipes: Mapping[str, Recipe]) -> nn.Module:
    """A model without memory, after every recipe has been tried on one.

    Raises:
        InputError: the model cannot be built, or has no layer that a recipe or a pattern is for.
    """
    for label, recipe in {"baseline": HIGH_PRECISION, **recipes}.items():
        model = without_memory(task.model)
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise InputError(
                f"--model: {lazy[0]} is lazy, and has no shape before a first forward pass; give its sizes"
            )
        try:
            plan = [task.convert(model, Run(label, recipe.at(step), 0)) for step in task.starts(recipe)][-1]
        except ValueError as error:
            given = "--model" if task.keep is None else "--model and --keep-high-precision"
            raise InputError(f"{given if label == 'baseline' else label}: {error}") from error
        if not plan.converted:
            kept = " ".join(task.keep_high_precision(model))
            raise InputError(f"--keep-high-precision {kept} leaves no layer to the recipes; leave a pattern out")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError("--model: no parameter of the model is trained; set requires_grad, or give --lora")
    meta = without_memory(task.model)
    if task.keep is None and not task.keep_high_precision(meta):
        print(
            "fp4engine compare: no layer is called lm_head, and the model tells no output layer, so recipes reach all "
            "layers; --keep-high-precision names those that they should not",
            file=sys.stderr,
        )
    return meta


def jobs_of(task: TextTask, recipes: Mapping[str, Recipe], seeds: int, noise: int, weights: Path) -> list[Job]:
    """All runs in their order: seed by seed, the baseline first, and last the repeats that measure noise."""
    first = next(iter(recipes))
    jobs: list[Job] = []
    for seed in range(seeds):
        jobs.append(Job(task, Run("baseline", HIGH_PRECISION, seed), keep=None if seed else weights))
        jobs += [Job(task, Run(label, recipe, seed), looks=seed == 0) for label, recipe in recipes.items()]
    for seed in range(min(noise, seeds)):
        jobs += [
            Job(task, Run(first, recipes[first], seed, AGAIN)),  # it takes longer, and something else can run beside it
            Job(task, Run("baseline", HIGH_PRECISION, seed, AGAIN)),
        ]
    return jobs


def _run(
    arguments: argparse.Namespace,
    task: TextTask,
    recipes: Mapping[str, Recipe],
    meta: nn.Module,
    parameters: int,
    out: Path,
) -> int:
    places = Places(out / "runs", out / "unfinished", arguments.save_every)
    baseline = Run("baseline", HIGH_PRECISION, 0)
    weights = baseline.path(out, task.setting()).with_suffix(".safetensors")
    jobs = jobs_of(task, recipes, arguments.seeds, arguments.noise, weights)
    kind = [_name(arguments.model), *(["LoRA"] if task.lora else [])]
    kind += ["a token is a byte"] if task.text.unit == "byte" else []
    about = About(
        name=_name(arguments.model),
        model=f"A model of {parameters:,} parameters ({'; '.join(kind)})",
        data=f"{', '.join(arguments.data)}: {task.text.training:,} {task.text.unit}s to train on, "
        f"{task.text.validation:,} to validate on",
        command=shlex.join(["fp4engine", *arguments.words]),
        parameters=parameters,
        unit=task.text.unit,
        keep=tuple(task.keep_high_precision(meta)),
        pretrained=source_of(arguments.model).is_trained,
        gpu=GPU,
    )
    begun = time.monotonic()
    code, stopped = statistics.CANNOT_TELL, ""
    try:
        with Runner(places, device=task.device, at_once=arguments.jobs, deadline=begun + arguments.seconds) as runner:
            runner.make(jobs)
            if arguments.sensitivity != 0:
                short_runs = replace(places, finished=out / "short")
                about = replace(about, sensitivity=_sensitivity(arguments, task, recipes, weights, runner, short_runs))
    except Stopped as left:
        stopped = str(left)
    finally:
        finished = [path for job in jobs if (path := job.run.path(places.finished, task.setting())).exists()]
        results = [read(path) for path in finished]
        if any(result.is_baseline for result in results):
            comparison = compare(results, arguments.tolerance, list(recipes))
            code = comparison.code
            about = replace(about, estimates=estimates(task, recipes))
            publish(out, comparison, about)
    if stopped:
        print(f"fp4engine compare: {stopped}", file=sys.stderr)
        return INTERRUPTED
    return code


def _sensitivity(
    arguments: argparse.Namespace,
    task: TextTask,
    recipes: Mapping[str, Recipe],
    weights: Path,
    runner: Runner,
    places: Places,
) -> dict[str, Sensitivity | str]:
    """``label of a recipe -> its sensitivity``, or a string that says why there is none."""
    if not weights.exists():
        return dict.fromkeys(recipes, f"the weights that the baseline ended with, {weights}, are not there any more")
    steps = arguments.sensitivity
    if steps is None:
        steps = min(max(task.steps // SHORT_SHARE, FEWEST_SHORT), MOST_SHORT)
    runner.places = places
    found: dict[str, Sensitivity | str] = {}
    for label, recipe in recipes.items():
        model = without_memory(task.model)
        task.convert(model, Run("baseline", HIGH_PRECISION, 0))
        try:
            found[label] = measure(short(task, weights, steps), recipe, model, runner)
        except InputError:
            raise
        except ValueError as error:
            found[label] = str(error)
    return found


def estimates(task: TextTask, recipes: Mapping[str, Recipe]) -> dict[str, Estimate | str]:
    """What a step takes on a GPU that is not here, by label; or why that is not known."""

    def loss(model: nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device
        return task.loss(model, torch.zeros(task.batch, task.sequence + 1, dtype=torch.int64, device=device))

    found: dict[str, Estimate | str] = {}
    for label, recipe in _phases(task, recipes).items():
        model = without_memory(task.model)
        options: dict[str, Any] = {"batch": task.batch, "sequence": task.sequence, "gpu": GPU, "loss": loss}
        options["host_microseconds"] = 0  # as in a CUDA graph: small models would show the host's time and no other
        try:
            keep = tuple(task.keep_high_precision(model))
            found[label] = estimate(model, recipe=recipe, keep_high_precision=keep, **options)
        except Exception as error:  # whatever a model that cannot be traced without values makes PyTorch raise
            found[label] = one_line(error)
    return found


def _phases(task: TextTask, recipes: Mapping[str, Recipe]) -> dict[str, Recipe | None]:
    """The baseline and the recipes, by label; of a schedule those of the run's phases."""
    found: dict[str, Recipe | None] = {"BF16": None}
    for label, recipe in recipes.items():
        starts = [start for start in recipe.starts if start < task.steps]
        found |= {f"{label} from step {start} on" if len(starts) > 1 else label: recipe.at(start) for start in starts}
    return found


def publish(out: Path, comparison: Comparison, about: About) -> None:
    """Write the table, the rows and the page, and print the table and where they are."""
    text = comparison.markdown()
    write_atomically(out / "table.md", f"# {title(comparison, about)}\n\n{text}\n")
    write_atomically(out / "results.jsonl", comparison.json_lines())
    write_atomically(out / "page.html", html(comparison, about))
    print(f"\n{text}\n\npage: {out / 'page.html'}")


def _plan(
    arguments: argparse.Namespace, task: TextTask, recipes: Mapping[str, Recipe], parameters: int, out: Path
) -> str:
    jobs = jobs_of(task, recipes, arguments.seeds, arguments.noise, out)
    places = Places(out / "runs", out / "unfinished")
    finished = [read(job.run.path(places.finished, task.setting())) for job in jobs if job.is_done(places)]
    tokens = task.steps * task.tokens_per_step
    own = None
    if any(result.is_baseline for result in finished):
        own = spread_of(compare(finished, math.inf), "own", parameters, tokens)
    lines = [
        f"{len(jobs)} runs of {task.steps:,} steps of {task.tokens_per_step:,} {task.text.unit}s, {len(finished)} of "
        f"them finished: {', '.join(['baseline', *recipes])}, seeds 0 to {arguments.seeds - 1}",
        f"the text is read {tokens / task.text.training:.2g} times",
        plan.advice(parameters, tokens, arguments.tolerance, own),
    ]
    return "\n".join(lines)


def spread_of(comparison: Comparison, name: str, parameters: int, tokens: int) -> plan.Spread | None:
    """The standard deviation of gaps over seeds, pooled over the recipes of a comparison; None without two seeds."""
    import statistics as stats

    values = [list(statistics.gaps(arm.runs, comparison.baseline.runs).values()) for arm in comparison.arms]
    variances = [stats.variance(gaps) for gaps in values if len(gaps) > 1 and all(map(math.isfinite, gaps))]
    if not variances:
        return None
    return plan.Spread(name, parameters, tokens, math.sqrt(stats.fmean(variances)), len(variances))


def _name(model: str) -> str:
    """What a page calls a model."""
    if ":" in model:
        return model
    path = Path(model).resolve()
    return path.parent.name if path.name == "config.json" else path.name if path.is_dir() else path.stem
