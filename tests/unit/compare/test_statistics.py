"""Gaps, intervals and verdicts say what they may, and no more."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from fp4engine.cli import main
from fp4engine.compare import HIGH_PRECISION, InputError, Recorder, Result, plan, read_folders, statistics
from fp4engine.compare.comparison import Comparison, compare
from fp4engine.compare.recorder import AGAIN
from fp4engine.compare.statistics import CANNOT_TELL, DOES_NOT, TRAINS, interval, seeds_for
from fp4engine.recipe import Recipe, zoo


def record(folder: Path, recipe: Recipe | str | None, losses: list[float], first: int = 0, **options) -> None:
    """A run per loss, with seeds from `first` on; its loss was twice as high at half of its steps."""
    for seed, loss in enumerate(losses, first):
        with Recorder(folder, recipe=recipe, seed=seed, **options) as run:
            run.step(9.0 if recipe is None else 9.001)
            run.validation(2 * loss)
            run.step(8.0)
            run.validation(loss)


def compared(folder: Path, tolerance: float = 1.0) -> Comparison:
    return compare(read_folders([folder]), tolerance)


def verdict_of(folder: Path, losses: list[float], baseline: list[float], tolerance: float = 1.0):
    record(folder, None, baseline)
    record(folder, "nvfp4", losses)
    found = compared(folder, tolerance)
    verdict = found.verdict(found.arms[0])
    assert found.code == verdict.code
    return verdict


@pytest.mark.parametrize(
    ("losses", "code", "said"),
    [
        ([1.001, 1.002, 1.003], TRAINS, "its gap is below 1%: 0.45% at most"),
        ([1.030, 1.031, 1.032], DOES_NOT, "its gap is above 1%: 2.85% at least"),
        ([1.001, 1.008, 1.011], CANNOT_TELL, r"too close to 1% for a spread of 0\.51 points over seeds; 12 seeds"),
        ([1.001, 1.0011], CANNOT_TELL, "two seeds have no spread to judge a gap of .0.10% by; run 3 seeds at least"),
        ([1.05], CANNOT_TELL, "one seed has no spread"),
        ([1.05, 1.0501], DOES_NOT, "above 1%"),
        ([1.001, math.nan, 1.0], DOES_NOT, r"not finite any more with 1 of 3 seeds \(1\)"),
        ([1.0, 1.0, 1.0], TRAINS, "0.00% at most"),
    ],
)
def test_the_verdict_is_the_intervals(losses, code, said, tmp_path) -> None:
    verdict = verdict_of(tmp_path, losses, [1.0] * len(losses))
    assert verdict.code == code and re.search(said, verdict.text)


def test_a_recipe_whose_losses_are_all_the_baselines_was_not_in_force(tmp_path) -> None:
    """A script that labels a run and converts nothing had the verdict that the recipe trains."""
    for recipe in (None, "nvfp4"):
        for seed in range(3):
            with Recorder(tmp_path, recipe=recipe, seed=seed) as run:
                run.step(3.0 + seed)
                run.validation(2.0)
    found = compared(tmp_path)
    verdict = found.verdict(found.arms[0])
    assert found.code == verdict.code == CANNOT_TELL and verdict.word == "did not run"
    assert "every loss is the baseline's to the last digit: the recipe was not in force, or" in verdict.text


def test_losses_of_zero_on_the_way_and_signs_in_labels_end_no_page(tmp_path, capsys) -> None:
    for recipe, losses in ((None, [1.0, 1.0, 1.0]), ("nvfp4", [1.001, 1.02, 1.03])):
        label = recipe and "of $1 | $\\frac{\n"
        for seed, loss in enumerate(losses):
            with Recorder(tmp_path, recipe=recipe, seed=seed, label=label) as run:
                for value in (2.0, 0.0, 3.0, loss):
                    run.step(value)
    assert main(["compare", "--runs", str(tmp_path)]) == CANNOT_TELL
    told = capsys.readouterr()
    assert "\n| of $1 \\| $\\frac{ | +1.70 (" in told.out and not told.err and "or runs of" not in told.out


def test_a_baseline_that_diverged_blames_no_recipe(tmp_path) -> None:
    verdict = verdict_of(tmp_path, [math.nan, math.nan], [math.nan, math.nan])
    assert verdict.code == CANNOT_TELL and "no baseline with the same seed" in verdict.text


def test_longer_runs_are_advised_where_the_spread_has_shrunk(tmp_path) -> None:
    for seed, (half, whole) in enumerate(((1.04, 1.013), (1.0, 1.003), (1.02, 1.008))):
        for recipe, losses in ((None, (2.0, 1.0)), ("nvfp4", (2 * half, whole))):
            with Recorder(tmp_path, recipe=recipe, seed=seed) as run:
                for loss in losses:
                    run.step(1.0)
                    run.validation(loss)
    found = compared(tmp_path)
    text = found.verdict(found.arms[0]).text
    assert "or runs of" in text and "shrunk from 2.00 at half of them" in text


def test_the_loss_beside_a_gap_is_of_the_same_seeds(tmp_path) -> None:
    """A seed that the baseline lacks was averaged into the loss and left out of the gap."""
    record(tmp_path, None, [1.0, 1.0, 1.0])
    record(tmp_path, "nvfp4", [1.01, 1.02, 1.03, 5.0])
    row = compared(tmp_path).rows()[1]
    assert row.seeds == 3 and row.loss == pytest.approx(1.02) and row.gap.mean == pytest.approx(2.0)


def test_a_gap_that_is_always_zero_is_a_tie(tmp_path) -> None:
    record(tmp_path, None, [1.0, 1.1, 1.2])
    record(tmp_path, "nvfp4", [1.1, 1.2, 1.3])
    record(tmp_path, "nvfp4_4over6", [1.1, 1.2, 1.3])
    _, second = compared(tmp_path).rows()[1:]
    assert second.against_first == "tie" and (second.to_first.low, second.to_first.high) == (0, 0)
    assert not interval([5.0, 5.0, 5.0]).holds_zero


@pytest.mark.parametrize("seeds", [3, 5])
def test_equal_recipes_are_ties_in_95_of_100_comparisons(seeds: int) -> None:
    """Twice the standard error called them different in 18 of 100 with three seeds."""
    draws = np.random.default_rng(0).normal(size=(2000, seeds))
    ties = sum(interval(row.tolist()).holds_zero for row in draws) / len(draws)
    assert 0.935 < ties < 0.965


def test_as_many_seeds_are_advised_as_tell() -> None:
    assert seeds_for(deviation=0.1, distance=1.0) == 3
    assert seeds_for(1.0, 1.0) == 7  # t(0.975, 6) / sqrt(7) = 0.92
    assert seeds_for(1.0, 0.01) is None


def test_rows_say_what_ran_again_and_how_far_chance_goes(tmp_path) -> None:
    record(tmp_path, None, [1.0, 1.0])
    record(tmp_path, "nvfp4", [1.02, 1.02])
    record(tmp_path, "nvfp4", [1.03], extra=AGAIN)
    record(tmp_path, None, [1.01], extra=AGAIN)
    found = compared(tmp_path)
    assert [(row.label, row.kind, row.seeds) for row in found.rows()] == [
        ("baseline", "baseline", 2),
        ("nvfp4", "recipe", 2),
        ("baseline, again", "noise", 1),
        ("nvfp4, again", "noise", 1),
    ]
    assert found.noise == pytest.approx([1.0, 100 * (1.03 / 1.02 - 1)])
    assert "draws and the order of additions alone end 0.99% apart" in found.markdown()


def test_runs_that_differ_in_more_than_the_recipe_are_refused(tmp_path) -> None:
    record(tmp_path, None, [1.0], setting={"data": "a"})
    record(tmp_path, "nvfp4", [1.0], setting={"data": "b"})
    with pytest.raises(InputError, match="differ in more than recipe and seed: data 'a' and 'b'"):
        compared(tmp_path)


def test_what_cannot_be_compared_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="no finished run"):
        compared(tmp_path)
    record(tmp_path, "nvfp4", [1.0])
    with pytest.raises(InputError, match="is of a baseline"):
        compared(tmp_path)


def test_runs_that_ended_elsewhere_or_were_judged_otherwise_are_refused(tmp_path) -> None:
    for name, more in (("longer", 1), ("unvalidated", 0)):
        record(tmp_path / name, None, [1.0])
        with Recorder(tmp_path / name, recipe="nvfp4") as run:
            run.step(9.0)
            if more:
                run.step(8.0)
                run.step(7.0)
                run.validation(0.9)
        with pytest.raises(
            InputError, match=r"judged at different ends: .*baseline.* by a validation after step 2; .*nvfp4"
        ):
            compared(tmp_path / name)


def test_a_run_that_diverged_may_have_ended_early(tmp_path) -> None:
    record(tmp_path, None, [1.0])
    with Recorder(tmp_path, recipe="nvfp4") as run:
        run.step(math.nan)
    assert compared(tmp_path).code == DOES_NOT


def test_two_files_of_one_run_agree_or_are_refused(tmp_path) -> None:
    record(tmp_path / "a", "nvfp4", [1.0])
    record(tmp_path / "b", "nvfp4", [1.0], label="renamed")
    assert len(read_folders([tmp_path])) == 1
    record(tmp_path / "c", "nvfp4", [1.1], label="with my trick")
    with pytest.raises(InputError, match=r"have the same setting, recipe and seed, and other losses; .*extra say what"):
        read_folders([tmp_path])


def test_a_validation_before_the_first_step_judges_nothing(tmp_path) -> None:
    for recipe, last in ((None, 1.0), ("nvfp4", 1.5)):
        with Recorder(tmp_path, recipe=recipe) as run:
            run.validation(7.0)
            run.step(last)
    found = compared(tmp_path)
    assert [run.loss for run in found.results] == [1.0, 1.5]


def test_noise_that_is_small_is_not_called_none(tmp_path) -> None:
    record(tmp_path, None, [1.0])
    record(tmp_path, None, [1.000005], extra=AGAIN)
    assert "alone end 0.0005% apart" in compared(tmp_path).markdown()


def test_two_recipes_of_one_name_are_two_rows(tmp_path) -> None:
    record(tmp_path, None, [1.0])
    for recipe in ("nvfp4", "mxfp4"):
        record(tmp_path, zoo.make(recipe), [1.0], label="mine")
    first, second = compared(tmp_path).arms
    assert first.label == "mine" and second.label.startswith("mine (")


def test_plans_name_seeds_by_the_spread_at_that_size() -> None:
    spreads = {spread.name: spread for spread in plan.known_spreads()}
    assert plan.nearest(3_000_000, 300_000_000).name == "3m" and plan.nearest(150_000, 10**5).name == "cpu"
    small, large = (plan.advice(spreads[name].parameters, spreads[name].tokens, 1.0) for name in ("cpu", "3m"))
    seeds = [int(re.search(r"from none: (\d+) seeds", text)[1]) for text in (small, large)]
    assert seeds[0] > seeds[1] >= 3
    own = plan.Spread("own", 10, 10, 0.01, 1)
    assert "from none: 3 seeds" in plan.advice(10, 10, 1.0, own) and "of this setting" in plan.advice(10, 10, 1.0, own)
    assert "1.2 points apart" in plan.one_seed(150_000, 300_000)


def test_a_baseline_is_known_by_what_it_does(tmp_path) -> None:
    with Recorder(tmp_path, recipe=HIGH_PRECISION, label="bf16") as run:
        run.step(1.0)
    (result,) = read_folders([tmp_path])
    assert isinstance(result, Result) and result.is_baseline
    assert statistics.gaps({0: result}, {0: result}) == {0: 0.0}
