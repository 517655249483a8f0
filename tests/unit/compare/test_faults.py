"""A planted fault is found by the ranking of parts and changes the verdict; recipes that are equal tie."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import fp4engine
from benchmarks.ties import trial
from fp4engine.compare import HIGH_PRECISION, Recorder, Run, read_folders
from fp4engine.compare.comparison import Comparison, compare
from fp4engine.compare.page import About, html
from fp4engine.compare.runner import Job
from fp4engine.compare.sensitivity import Sensitivity, measure, short, units_of
from fp4engine.compare.statistics import DOES_NOT, TRAINS
from fp4engine.compare.training import Places
from fp4engine.formats import CastSpec, Rotation
from fp4engine.inspect.search import only, without
from fp4engine.recipe import Casts, LinearRecipe, Recipe, ScheduledRecipe, zoo
from tests.tiny_task import InThisProcess, TinyTask

pytestmark = pytest.mark.usefixtures("one_thread")

NVFP4 = zoo.make("nvfp4")
CLIPPED = CastSpec(target=6 * 32.0)
"""A cast whose largest elements are cut off at a 32nd of themselves."""
BIASED = LinearRecipe(
    input=NVFP4.casts("input"),
    weight=NVFP4.casts("weight"),
    grad_output=Casts(CLIPPED, CLIPPED.replace(rotation=Rotation(16))),
)
TASK = TinyTask(steps=60, evaluate_every=30, learning_rate=3e-3)
TOLERANCE = 10.0


class Planned(InThisProcess):
    """Stands for a `Runner` whose runs have these losses."""

    def __init__(self, folder: Path, losses: Mapping[Recipe, float]) -> None:
        super().__init__(Places(folder, folder))
        self.losses = losses

    def make(self, jobs: Sequence[Job], what: str = "") -> None:
        for job in jobs:
            options = {"seed": 0, "setting": job.task.setting(), "label": "short", "extra": job.run.extra}
            if not job.is_done(self.places):
                with Recorder(self.places.finished, recipe=job.run.recipe, **options) as run:
                    run.step(self.losses.get(job.run.recipe, 1.0001))


def examined(task: TinyTask, recipes: dict[str, Recipe], folder: Path) -> tuple[Comparison, dict[str, Sensitivity]]:
    weights = folder / "weights.safetensors"
    runner = InThisProcess(Places(folder / "runs", folder / "scratch"))
    for seed in range(3):
        runner.make([Job(task, Run("baseline", HIGH_PRECISION, seed), keep=None if seed else weights)])
        runner.make([Job(task, Run(label, recipe, seed), looks=not seed) for label, recipe in recipes.items()])
    comparison = compare(read_folders([folder / "runs"]), TOLERANCE, list(recipes))
    with torch.device("meta"):
        model = task.model()
    task.convert(model, Run("", HIGH_PRECISION, 0))
    runner.places = Places(folder / "short", folder / "scratch")
    return comparison, {r: measure(short(task, weights, 12), recipes[r], model, runner) for r in recipes}


@pytest.mark.slow
def test_a_hot_channel_is_found_and_changes_the_verdict(tmp_path) -> None:
    task = dataclasses.replace(TASK, hot=64.0)
    comparison, found = examined(task, {"nvfp4": NVFP4}, tmp_path)
    assert comparison.code == DOES_NOT
    first, second, *_ = found["nvfp4"].units
    assert first.name == "blocks.1.up" and first.gap > 4 * second.gap and found["nvfp4"].is_clear(first)
    assert found["nvfp4"].keep == ("blocks.1.up",) and found["nvfp4"].gap_then < 0.5 * found["nvfp4"].gap
    divergence = found["nvfp4"].divergence
    assert max(divergence, key=lambda unit: divergence[unit]) == "blocks.1.up"
    alike = found["nvfp4"].rank_correlation
    assert alike is not None and -1 <= alike <= 1
    page = html(comparison, About("hot", sensitivity=found, keep=("lm_head",)))
    assert "Its rank correlation with the order by short runs is" in page
    untold = {"nvfp4": dataclasses.replace(found["nvfp4"], divergence="loss must be finite")}
    assert "from a few batches alone is not known: loss must be finite." in html(
        comparison, About("hot", sensitivity=untold)
    )
    assert 'keep_high_precision=["lm_head", "blocks.1.up"])' in page


@pytest.mark.slow
def test_biased_gradients_are_found_and_change_the_verdict(tmp_path) -> None:
    task = dataclasses.replace(TASK, steps=48, evaluate_every=24)
    comparison, found = examined(task, {"nvfp4": NVFP4, "biased": BIASED}, tmp_path)
    nvfp4, biased = comparison.arms
    assert (comparison.verdict(nvfp4).code, comparison.verdict(biased).code) == (TRAINS, DOES_NOT)
    gaps = {label: {unit.name: unit.gap for unit in one.products} for label, one in found.items()}
    for gemm in ("dgrad", "wgrad"):
        assert gaps["biased"][gemm] > 5 * gaps["nvfp4"][gemm]
        assert found["biased"].is_clear(next(unit for unit in found["biased"].products if unit.name == gemm))
    assert gaps["biased"]["fprop"] == gaps["nvfp4"]["fprop"]
    bias = [max(row["bias"] for row in arm.runs[0].rows if row["kind"] == "gradient") for arm in comparison.arms]
    assert bias[1] > 2 * bias[0]


def test_noise_of_gradients_has_the_step_at_which_it_was_seen(tmp_path) -> None:
    """A schedule that ends in high precision has none in the end, where the page put what there was before."""
    task = TinyTask(steps=6, evaluate_every=6)
    runner = InThisProcess(Places(tmp_path / "runs", tmp_path / "scratch"))
    schedule = ScheduledRecipe(((0, NVFP4), (3, HIGH_PRECISION)))
    for label, recipe in (("baseline", HIGH_PRECISION), ("schedule", schedule)):
        runner.make([Job(task, Run(label, recipe, 0), looks=True)])
    page = html(compare(read_folders([tmp_path / "runs"]), TOLERANCE), About(""))
    assert "schedule: noise and bias of each weight's gradient, at step 2<" in page


def test_equal_recipes_tie(tmp_path) -> None:
    """Four trials; `benchmarks/ties.py` makes a hundred."""
    task = TinyTask(steps=4, evaluate_every=4)
    assert sum(trial(task, number, tmp_path) for number in range(4)) >= 3


def test_what_brings_nothing_is_not_advised(tmp_path) -> None:
    """A part that is costly alone, and whose absence from the recipe does not help."""
    task = TinyTask(steps=4, evaluate_every=4)
    with torch.device("meta"):
        model = task.model()
    task.convert(model, Run("", HIGH_PRECISION, 0))
    losses = {HIGH_PRECISION: 1.0, NVFP4: 1.0001, only(["blocks.1.up"], NVFP4, {}): 1.01}
    losses |= {only([f"blocks.{block}.{name}"], NVFP4, {}): 1.0 for block in (0, 2) for name in ("up", "down")}

    found = measure(task, NVFP4, model, Planned(tmp_path, losses))
    assert found.is_clear(found.units[0]) and found.units[0].name == "blocks.1.up"
    assert found.gap == pytest.approx(found.gap_then) and found.keep == ()


def test_the_part_by_which_a_recipe_diverges_is_advised(tmp_path) -> None:
    """The page said that the gap falls from –%."""
    task = TinyTask(steps=4, evaluate_every=4)
    with torch.device("meta"):
        model = task.model()
    task.convert(model, Run("", HIGH_PRECISION, 0))
    parts = [f"blocks.{block}.{name}" for block in range(3) for name in ("up", "down")]
    losses = {only([part], NVFP4, {}): 1.0 for part in parts} | {HIGH_PRECISION: 1.0}
    losses |= {NVFP4: math.nan, only(["blocks.1.up"], NVFP4, {}): math.nan, without(NVFP4, ["blocks.1.up"], {}): 1.001}
    found = measure(task, NVFP4, model, Planned(tmp_path, losses))
    assert found.noise == 0 and found.keep == ("blocks.1.up",)
    assert found.gap == math.inf and found.gap_then == pytest.approx(0.1)
    for recipe, gap in ((None, 1.0), ("nvfp4", math.nan)):
        with Recorder(tmp_path / "runs", recipe=recipe) as run:
            run.step(gap)
    page = html(compare(read_folders([tmp_path / "runs"]), TOLERANCE), About("", sensitivity={"nvfp4": found}))
    assert "Keep them there, and the short runs end with a gap of 0.10%; by the whole recipe they diverge:" in page


def test_parts_have_the_names_that_rules_see(tmp_path) -> None:
    """Experts are one part, and what is called as a wrapper calls what it wraps keeps its name."""
    model = torch.nn.ModuleDict({"experts": fp4engine.GroupedLinear(2, 32, 32, device="meta")})
    model["module"] = torch.nn.Sequential(torch.nn.Linear(32, 32, device="meta"))
    fp4engine.convert(model)
    losses = {HIGH_PRECISION: 1.0, only(["experts"], NVFP4, {}): 1.01, only(["module.0"], NVFP4, {}): 1.001}
    found = measure(TinyTask(steps=4, evaluate_every=4), NVFP4, model, Planned(tmp_path, losses))
    assert [(unit.name, round(unit.gap, 4)) for unit in found.units] == [("experts", 1.0), ("module.0", 0.1)]


def test_parts_are_blocks_where_there_are_many_layers() -> None:
    few = [f"layers.{block}.{name}" for block in range(3) for name in ("q", "k")]
    many = [f"model.layers.{block}.mlp.{name}" for block in range(20) for name in ("up", "gate", "down")]
    assert units_of(few) == few
    assert units_of(many) == [f"model.layers.{block}.mlp" for block in range(20)]
