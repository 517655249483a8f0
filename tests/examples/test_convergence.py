"""Studies of convergence: pairs are pairs, nothing is repeated, and gaps are what they say."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import fp4engine
from convergence import gaps, leaderboard, report, results, run, sources, tensors, together, training
from convergence.studies import (
    BASELINE,
    HIGH_PRECISION,
    PRESETS,
    STUDIES,
    SWITCH_AT,
    VARIANTS,
    Conditions,
    Outliers,
    Resets,
    variants_of,
)
from convergence.together import Limits, Outcome, Run, Together
from convergence.training import Feed, Training, precision, thinned
from fp4engine import cli
from fp4engine.cli import recipes
from fp4engine.formats import CastSpec, Rotation, RoundingMode, Signs
from fp4engine.optimizer_hooks import OsciReset
from fp4engine.recipe import Recipe, zoo
from fp4engine.roles import QuantizerRole
from gpt.data import Corpus, load_corpus
from gpt.settings import InputError
from gpt.training import StopRequest
from tests.ranks import start_method

SMALL = dataclasses.replace(PRESETS["tiny"], layers=1, width=32, sequence=16, batch=2, tokens=2 * 16 * 11)


@pytest.fixture(autouse=True)
def short_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "VALIDATION_BYTES", 256)


@pytest.fixture
def corpus(texts: Path) -> Corpus:
    return load_corpus(str(texts), SMALL.sequence + 1, torch.device("cpu"))


NOWHERE = Path("nowhere")


def pipe() -> tuple[MagicMock, MagicMock]:
    return MagicMock(), MagicMock()


def train(runs: list[Run], corpus: Corpus, folder: Path, at_once: int = 1, deadline: float = math.inf) -> list[Outcome]:
    """What is told of the runs, as they are trained in this process."""
    told: list[Outcome] = []
    waiting = list(reversed(runs))
    limits = Limits(runs[0].settings.steps, at_once, deadline)
    crew = Together(corpus, folder, folder / "scratch", limits, told.append)
    crew.train(lambda _: waiting.pop() if waiting else None)
    return told


def rows(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Of a finished run, without its header."""
    return [json.loads(line) for line in run.path(folder).read_text().splitlines()[1:]]


def losses(settings: Conditions, variant: str, corpus: Corpus) -> list[float]:
    training = Training(settings, variant, Feed(corpus))
    while not training.has_ended:
        training.train_step()
        training.settle()
    return training.losses.values.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_variant_answers_for_every_linear_layer_at_every_step(variant: str, preset: str) -> None:
    settings = PRESETS[preset]
    schedule = VARIANTS[variant].recipe(settings)
    for step in (0, settings.steps - 1):
        recipe: Recipe = schedule.at(step)
        for block in (0, settings.layers - 1):
            role = QuantizerRole("linear", "input", f"blocks.{block}.mlp.up", (64, 64))
            assert recipe.of(role).casts("input") is not None


def test_studies_name_variants_and_their_reference() -> None:
    for study in STUDIES.values():
        assert set(study.variants) <= set(VARIANTS)
        assert study.reference in study.variants
        assert variants_of(study)[0] == BASELINE


def test_a_late_switch_changes_the_pass_it_names_at_the_step_it_names() -> None:
    settings = PRESETS["tiny"]
    schedule = VARIANTS["forward to bf16 at 82%"].recipe(settings)
    first = round(SWITCH_AT * settings.steps)
    assert schedule.at(first - 1).casts("input").rowwise is not None
    assert schedule.at(first).casts("input").rowwise is None
    assert schedule.at(first).casts("grad_output").rowwise is not None
    assert VARIANTS["both to bf16 at 82%"].recipe(settings).at(first) == HIGH_PRECISION


def test_kept_blocks_are_as_many_first_as_last() -> None:
    settings = PRESETS["10m"]
    names = [f"blocks.{block}.mlp.up" for block in range(settings.layers)]
    for variant, kept in (("first blocks in bf16", names[0]), ("last blocks in bf16", names[-1])):
        recipe = VARIANTS[variant].recipe(settings)
        assert [n for n in names if recipe.of(QuantizerRole("linear", "", n, (64, 64))) == HIGH_PRECISION] == [kept]


def test_runs_are_planned_once_and_in_order() -> None:
    runs = run.planned(["noise", "switch"], SMALL, seeds=2)
    assert len(set(runs)) == len(runs)
    assert [r.variant for r in runs[:6:2]] == list(STUDIES["noise"].variants)
    variants = {*variants_of(STUDIES["noise"]), *variants_of(STUDIES["switch"])}
    assert [r.settings.seed for r in runs] == [0, 1] * len(variants)
    few = run.planned(["noise", "switch"], SMALL, seeds=2, variants=[BASELINE])
    assert [(r.variant, r.settings.seed) for r in few] == [(BASELINE, 0), (BASELINE, 1)]
    chosen = run.planned(["board"], SMALL, seeds=1, variants=["UFP4", "both to bf16 at 82%", BASELINE])
    assert [r.variant for r in chosen] == ["UFP4", BASELINE]  # in the order given, and the other is not of that study


def test_a_run_repeats_itself_and_its_pair_differs_in_the_recipe_only(corpus: Corpus) -> None:
    baseline = losses(SMALL, BASELINE, corpus)
    assert losses(SMALL, BASELINE, corpus) == baseline
    quantized = losses(SMALL, "nvfp4", corpus)
    assert quantized != baseline
    assert quantized[0] == pytest.approx(baseline[0], rel=0.01)  # same weights, same batch
    assert losses(SMALL, "nvfp4, other draws", corpus) != quantized
    assert losses(dataclasses.replace(SMALL, seed=1), BASELINE, corpus) != baseline


def test_a_late_switch_is_the_reference_run_until_then(corpus: Corpus) -> None:
    switched = losses(SMALL, "forward to bf16 at 82%", corpus)
    reference = losses(SMALL, "nvfp4", corpus)
    first = round(SWITCH_AT * SMALL.steps)
    assert switched[:first] == reference[:first]
    assert switched[first:] != reference[first:]


def test_delayed_scaling_trains(corpus: Corpus) -> None:
    assert all(map(math.isfinite, losses(SMALL, "FP8 delayed", corpus)))


def test_runs_beside_each_other_leave_the_bytes_of_each_alone(corpus: Corpus, tmp_path: Path) -> None:
    """Three recipes that draw, one of them begun when another has ended; two of one recipe under other seeds."""
    settings = dataclasses.replace(SMALL, evaluate_every=3)
    variants = ("nvfp4", "TetraJet-v2", "nvfp4, other draws", BASELINE)
    runs = [Run(settings, variant) for variant in variants]
    runs.append(Run(dataclasses.replace(settings, seed=1), "nvfp4"))
    train(runs, corpus, tmp_path / "together", at_once=2)
    for one in runs:
        train([one], corpus, tmp_path / "alone")
        assert rows(one, tmp_path / "together") == rows(one, tmp_path / "alone")


def assert_continues(
    settings: Conditions, variants: list[str], corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are stopped three times, once before they begin, leave the rows of ones that are not."""
    runs = [Run(settings, variant) for variant in variants]
    told = train(runs, corpus, folder / "whole", at_once=2)
    assert sum(outcome.steps for outcome in told) == len(runs) * settings.steps
    steps = 0
    for stop in (0, 6, 4, 1000):
        clock = iter(range(10000))
        with monkeypatch.context() as patch:
            patch.setattr(together.time, "time", lambda clock=clock: next(clock))
            told = train(runs, corpus, folder / "parts", at_once=2, deadline=stop)
        steps += sum(outcome.steps for outcome in told)
        assert [one.path(folder / "parts").exists() for one in runs] == [stop == 1000] * len(runs)
    assert steps == len(runs) * settings.steps
    for one in runs:
        assert rows(one, folder / "parts") == rows(one, folder / "whole")
    assert not list((folder / "parts" / "scratch").glob("unfinished/*"))


def test_stopped_runs_continue_bit_for_bit(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SMALL, evaluate_every=3)
    variants = ["nvfp4", "forward to bf16 at 82%", "FP8 delayed"]
    assert_continues(settings, variants[:2], corpus, tmp_path / "a", monkeypatch)
    assert_continues(settings, variants[1:], corpus, tmp_path / "b", monkeypatch)


def test_oscillating_weights_are_reset_late_in_a_run_that_may_stop_within_a_window(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nvfp4, OsciReset"
    eager = dataclasses.replace(VARIANTS[name], resets=Resets(threshold=0.5))
    monkeypatch.setitem(VARIANTS, name, eager)
    assert_continues(SMALL, [name], corpus, tmp_path, monkeypatch)
    header = json.loads(Run(SMALL, name).path(tmp_path / "whole").read_text().splitlines()[0])
    assert header["resets"] == {"start": 0.64, "periods": 48, "threshold": 0.5}
    training, plain = (Training(SMALL, variant, Feed(corpus)) for variant in (name, "nvfp4"))
    for step in range(SMALL.steps):
        for one in (training, plain):
            one.train_step()
            one.settle()
        pairs = zip(training.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (step < SMALL.steps - 1)
    (hook,) = training.hooks
    assert hook.reset_share and not hook.state_dict()["oscillations"]


def test_outlying_channels_are_chosen_early_in_a_run_that_may_stop_while_it_looks(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TetraJet-v2, both hooks"
    early = dataclasses.replace(VARIANTS[name], outliers=Outliers(start=0.2, length=0.3, multiple=16))
    monkeypatch.setitem(VARIANTS, name, early)
    assert_continues(SMALL, [name], corpus, tmp_path, monkeypatch)
    header = json.loads(Run(SMALL, name).path(tmp_path / "whole").read_text().splitlines()[0])
    assert header["outliers"] == {"start": 0.2, "length": 0.3, "share": 0.1, "multiple": 16}
    training, start, length = Training(SMALL, name, Feed(corpus)), *early.outliers.times(SMALL.steps)
    _, control = training.hooks
    for step in range(SMALL.steps):
        looks, chosen = step > start, step > start + length
        assert training.looks == looks + chosen
        state = control.state_dict()
        assert bool(state["norms"]) == (looks and not chosen) and bool(state["channels"]) == chosen
        training.train_step()
        training.settle()
    assert {len(outlying) for outlying, _ in control.state_dict()["channels"].values()} == {16}


@pytest.mark.parametrize("role", ["weight", "input"])
def test_two_terms_are_a_second_product_in_fprop_alone(role: str, corpus: Corpus) -> None:
    plain, two = (Training(SMALL, name, Feed(corpus)) for name in ("1x16 + 4/6", f"1x16 + 4/6, two-term {role}s"))
    assert list(plain.model.state_dict()) == list(two.model.state_dict())
    said = [training.beside_the_recipe(VARIANTS[one.variant]) for one in (plain, two)]
    assert said == [{}, {"two_terms": role}]
    recipe, seen = two.recipe, {}
    layers = [training.model.blocks[0].mlp.up for training in (plain, two)]
    torch.manual_seed(0)
    x, dy = torch.randn(4, SMALL.width), torch.randn(4, layers[0].out_features)
    for one, layer in zip((plain, two), layers, strict=True):
        inp = x.clone().requires_grad_()
        with one.alone(), precision(recipe, one.device):
            y = layer(inp)
        with one.alone():
            y.backward(dy)
        seen[one] = y.detach(), inp.grad, layer.weight.grad
    (y, *gradients), (better, *same) = seen[plain], seen[two]
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    weight, other = layers[0].weight.detach(), "input" if role == "weight" else "weight"
    exact = {"input": x, "weight": weight}
    exact[other] = fp4engine.cast(exact[other], recipe.casts(other).rowwise)
    wanted = exact["input"] @ exact["weight"].T
    assert (better - wanted).norm() < 0.15 * (y - wanted).norm()


def test_a_warm_up_resets_too(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[OsciReset] = []
    reset = OsciReset._reset
    monkeypatch.setattr(OsciReset, "_reset", lambda hook: (seen.append(hook), reset(hook)))
    Training(SMALL, "nvfp4, OsciReset", Feed(corpus)).warm_up()
    name = "TetraJet-v2, both hooks"
    monkeypatch.setitem(VARIANTS, name, dataclasses.replace(VARIANTS[name], outliers=Outliers(multiple=16)))
    both = Training(SMALL, name, Feed(corpus))
    both.warm_up()
    assert len(seen) == 2 and both.hooks[1].state_dict()["channels"]


def test_a_run_that_fails_takes_no_other_with_it_unless_cuda_keeps_the_error(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Run(SMALL, variant) for variant in ("nvfp4", BASELINE, "MXFP8")]
    runs[0].path(tmp_path).with_name(f"{runs[0].path(tmp_path).name}.partial").mkdir(parents=True)
    told = [outcome for outcome in train(runs, corpus, tmp_path, at_once=2) if outcome.run is not None]
    assert [(str(outcome.run), outcome.kind) for outcome in told] == [
        ("nvfp4, seed 0", "failed"), ("bf16, seed 0", "finished"), ("MXFP8, seed 0", "finished"),
    ]  # fmt: skip
    assert "IsADirectoryError" in told[0].traceback
    monkeypatch.setattr(together, "Training", MagicMock(side_effect=RuntimeError("of a kernel")))
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        train([Run(dataclasses.replace(SMALL, device="cuda"), "nvfp4")], corpus, tmp_path)


def test_nothing_is_begun_that_would_not_end_in_time(corpus: Corpus, tmp_path: Path) -> None:
    limits = Limits(steps=100, at_once=4, deadline=1000.0, only_whole=True)
    crew = Together(corpus, tmp_path, tmp_path, limits, lambda outcome: None)
    crew.limits = dataclasses.replace(limits, deadline=together.time.time() + 1000)
    assert crew._would_end()
    crew.live[Run(SMALL, BASELINE)] = Training(SMALL, BASELINE, crew.feed)
    assert not crew._would_end()  # nobody knows yet how long a step takes
    crew.pace = {BASELINE: 1.0}
    assert crew._would_end()
    crew.pace = {BASELINE: 1000 / (100 + SMALL.steps)}  # what is under way takes its share of the time
    assert not crew._would_end()


def test_a_run_that_turns_out_too_slow_is_stopped_and_faster_ones_go_on(corpus, tmp_path: Path) -> None:
    told: list[together.Outcome] = []
    limits = Limits(steps=SMALL.steps, at_once=4, deadline=together.time.time() + 1000, only_whole=True)
    crew = Together(corpus, tmp_path, tmp_path, limits, told.append)
    fast, slow = Run(SMALL, BASELINE), Run(SMALL, "nvfp4")
    crew.live = {run: Training(SMALL, run.variant, crew.feed) for run in (fast, slow)}
    crew.live[fast].step = 1
    crew.pace = {BASELINE: 100 / SMALL.steps}
    crew._stop_what_would_not_end()
    assert not told  # a variant that nobody has timed may be as fast as the others
    crew.pace["nvfp4"] = 2000 / SMALL.steps
    crew._stop_what_would_not_end()
    assert [(outcome.kind, outcome.run) for outcome in told] == [("stopped", slow)] and list(crew.live) == [fast]
    crew._stop_what_would_not_end()
    assert len(told) == 1


def test_a_round_with_a_validation_does_not_slow_the_pace(corpus: Corpus, tmp_path: Path, monkeypatch) -> None:
    """Such a round may be one step and a validation: by its pace a run that would end in time was stopped."""
    crew = Together(corpus, tmp_path, tmp_path, Limits(steps=SMALL.steps), lambda outcome: None)
    clock = iter(range(0, 1_000_000, 100))
    monkeypatch.setattr(together, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(Training, "is_warm", True)
    training = crew.live[Run(SMALL, BASELINE)] = Training(SMALL, BASELINE, crew.feed)
    training.step, crew.pace = SMALL.evaluate_every - 1, {BASELINE: 1.0}
    crew._round()
    assert training.validation and crew.pace == {BASELINE: 1.0}
    crew._round()
    assert crew.pace[BASELINE] > 1.0


def test_where_a_stopped_run_waits_depends_on_all_that_it_is(tmp_path: Path) -> None:
    runs = [(SMALL, "nvfp4", "a"), (SMALL, BASELINE, "a"), (SMALL, "nvfp4", "b")]
    runs += [(dataclasses.replace(SMALL, **change), "nvfp4", "a") for change in ({"seed": 1}, {"tokens": 4096})]
    assert len({results.unfinished(tmp_path, *of_run) for of_run in runs}) == len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_hot_channels_stay_hot(fused: bool, corpus: Corpus) -> None:
    """One channel in a thousand of what linear layers read of a norm, whatever its weight learns."""
    hot = dataclasses.replace(SMALL, hot=64.0, compile=fused)
    run = Training(hot, "nvfp4", Feed(corpus))
    read: list[torch.Tensor] = []
    run.model.blocks[0].mlp.up.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    while not run.has_ended:
        run.train_step()
        run.settle()
    first, *others = read[-1].flatten(0, 1).square().mean(0).sqrt().tolist()
    assert first > 30 * max(others)
    assert run.rows()[0]["settings"]["hot"] == 64.0
    assert "hot" not in results.of_settings(SMALL)


def test_fused_pieces_train_every_recipe_and_are_compiled_once(corpus: Corpus) -> None:
    compiled = dataclasses.replace(SMALL, compile=True)
    assert losses(compiled, "nvfp4", corpus) == pytest.approx(losses(SMALL, "nvfp4", corpus), rel=0.01)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert losses(compiled, "MXFP8", corpus) == pytest.approx(losses(SMALL, "MXFP8", corpus), rel=0.01)


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


ON_GPU = dataclasses.replace(SMALL, device="cuda", width=128, batch=16, tokens=16 * 16 * 30)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "variant",
    ["nvfp4", "forward to bf16 at 82%", "FP8 current", "Quartet II", "MXFP4", "TetraJet-v2, both hooks"],
)
def test_a_replayed_step_is_the_eager_step(variant: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = Corpus(corpus.training.cuda(), corpus.validation.cuda(), corpus.digest)
    replayed = losses(ON_GPU, variant, on_gpu)
    monkeypatch.setattr(training, "EAGER_STEPS", ON_GPU.steps)
    assert losses(ON_GPU, variant, on_gpu) == replayed


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_runs_beside_each_other_stop_and_continue_on_a_gpu(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = Corpus(corpus.training.cuda(), corpus.validation.cuda(), corpus.digest)
    monkeypatch.setattr(together, "STEPS_PER_LOOK", 2)
    assert_continues(ON_GPU, ["nvfp4", "TetraJet-v2, OsciReset"], on_gpu, tmp_path / "run", monkeypatch)
    train([Run(ON_GPU, "nvfp4")], on_gpu, tmp_path / "alone")
    assert rows(Run(ON_GPU, "nvfp4"), tmp_path / "alone") == rows(Run(ON_GPU, "nvfp4"), tmp_path / "run" / "whole")


def test_thinned_losses_are_means_at_the_end_of_their_share() -> None:
    rows = list(thinned([float(n) for n in range(250)]))
    assert rows[0] == {"step": 3, "loss": 1.0}
    assert rows[-1] == {"step": 250, "loss": 249.0}


def options(texts: Path, folder: Path, *more: str) -> list[str]:
    common = ["--preset=tiny", "--device=cpu", "--tokens=2048", "--seeds=1"]
    return [*common, f"--data={texts}", f"--results={folder}", f"--scratch={folder / 'scratch'}", *more]


@pytest.mark.slow
def test_the_command_trains_once_and_then_only_reports(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    assert run.main(["noise", *options(texts, folder)]) == 0
    table = capsys.readouterr().out.partition("How far")[2]
    assert "| nvfp4 | 1 |" in table
    assert (folder / "tiny" / "noise.png").exists()
    header = json.loads((folder / "tiny" / "nvfp4.seed0.jsonl").read_text().splitlines()[0])
    assert header["variant"] == "nvfp4" and header["device"] == "cpu" and header["settings"]["seed"] == 0
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    assert run.main(["noise", *options(texts, folder)]) == 0
    assert capsys.readouterr().out.partition("How far")[2] == table
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == times
    assert run.main(["noise", *options(texts, folder, "--tokens=4096")]) == 2
    assert "move it away" in capsys.readouterr().err
    (texts / "another.txt").write_text("more text")
    assert run.main(["noise", *options(texts, folder, "--seeds=2")]) == 2
    assert "was trained on" in capsys.readouterr().err and len(list(folder.rglob("*.jsonl"))) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["noise", "--seeds=0"],
        ["noise", "--tokens=0"],
        ["noise", "--at-once=0"],
        ["noise", "--seconds=nan"],
        ["noise", "--seconds=-1"],
        ["noise", "--report=/nowhere/page.md"],
    ],
)
def test_the_command_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device=cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("run: ") and error.count("\n") == 1


@pytest.mark.parametrize("tokens", ["nan", "inf", "1.5", "many"])
def test_bytes_are_a_whole_number(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["noise", f"--tokens={tokens}"])
    assert "invalid whole value" in capsys.readouterr().err
    assert run.parser().parse_args(["noise", "--tokens=1e6"]).tokens == 1_000_000


def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["noise", "--device=cuda"]) == 2
    assert capsys.readouterr() == ("", "run: --device cuda: PyTorch finds no CUDA device here\n")


def test_ctrl_c_saves_what_is_under_way_and_the_same_command_continues(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    train_step = Training.train_step

    def interrupted(training: Training) -> None:
        train_step(training)
        if training.step == 2:
            signal.raise_signal(signal.SIGINT)

    only = ["--variants", BASELINE]
    monkeypatch.setattr(Training, "train_step", interrupted)
    assert run.main(["noise", *options(texts, folder), *only]) == 130
    out, err = capsys.readouterr()
    assert "1 runs are left, 1 of them begun" in out and err == "run: stopped; the same command continues\n"
    monkeypatch.setattr(Training, "train_step", train_step)
    assert run.main(["noise", *options(texts, folder), *only]) == 0
    assert run.main(["noise", *options(texts, tmp_path / "whole"), *only]) == 0
    one, other = (
        (place / "tiny" / "bf16.seed0.jsonl").read_text().splitlines() for place in (folder, tmp_path / "whole")
    )
    assert one[1:] == other[1:]


def test_stopping_early_begins_nothing(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["noise", *options(texts, tmp_path / "results", "--seconds=0")]) == 0
    out = capsys.readouterr().out
    assert "3 runs are left, 0 of them begun" in out
    assert "Not run: bf16; nvfp4; nvfp4, other draws." in out


def test_a_run_waits_until_its_variant_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    assert run.gpus() == ["2", "GPU-5"]
    submitted: list[tuple[str, Future[None]]] = []

    class Pool:
        def __init__(self, jobs: int, context: object, initializer: object, arguments: tuple[str]) -> None:
            self.gpu = arguments[0]

        def submit(self, work: object, settings: Conditions, variant: str) -> Future[None]:
            submitted.append((f"{variant} on {self.gpu}", Future()))
            return submitted[-1][1]

    monkeypatch.setattr(run, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(run.torch.multiprocessing, "get_context", lambda method: MagicMock(Pipe=pipe))
    runs = run.planned(["board"], SMALL, 2, [BASELINE, "nvfp4", "MXFP8"])
    dealer = run.GpuDealer(runs, 1, NOWHERE, NOWHERE, Limits(SMALL.steps))
    assert [name for name, _ in submitted] == ["nvfp4 on 2", "MXFP8 on GPU-5"]
    assert [str(dealer.take()) for _ in range(3)] == ["bf16, seed 0", "bf16, seed 1", "None"]
    submitted[1][1].set_result(None)
    assert str(dealer.take()) == "MXFP8, seed 0"
    submitted[0][1].set_exception(RuntimeError())  # the run itself will tell
    assert [str(dealer.take()) for _ in range(4)] == ["nvfp4, seed 0", "nvfp4, seed 1", "MXFP8, seed 1", "None"]


@pytest.mark.slow
def test_processes_compile_into_one_folder() -> None:
    """torch.compile would name another, and what is compiled beforehand would be compiled again."""
    pytest.importorskip("triton")
    code = """
import os
from convergence import run

for given in (None, "/somewhere"):
    if given:
        os.environ["TRITON_CACHE_DIR"] = given
    run.begin_process("0")
    print(os.environ["TRITON_CACHE_DIR"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert child.stdout.split() == [str(Path.home() / ".triton" / "cache"), "/somewhere"], child.stderr


def test_processes_share_the_runs_and_one_that_ends_is_told(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two GPUs, but that these processes compute on the CPU."""
    context = torch.multiprocessing.get_context(start_method())
    monkeypatch.setattr(run.torch.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = dataclasses.replace(SMALL, sequence=64, batch=128, tokens=16_384)
    runs = run.planned(["noise"], settings, 2, [BASELINE, "nvfp4"])
    data = sources.prepare(str(texts), settings.sequence + 1, tmp_path / "scratch")
    dealer = run.GpuDealer(runs, 1, tmp_path, tmp_path / "scratch", Limits(settings.steps, at_once=2))
    dealer.deal(data, StopRequest())
    dealer.end()
    dealer.say_what_is_left()
    assert all(one.path(tmp_path).exists() for one in runs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    dealer = run.GpuDealer(runs[:1], 1, tmp_path, tmp_path / "scratch", Limits(settings.steps))
    dealer.deal(tmp_path / "no data", StopRequest())
    dealer.end()
    with pytest.raises(InputError, match="processes failed, as said above: GPU 1"):
        dealer.say_what_is_left()
    dealer = run.GpuDealer(runs[:1], 1, tmp_path, tmp_path / "scratch", Limits(settings.steps))
    processes = list(dealer.processes.values())
    dealer.end()  # before there is data
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_the_board_names_ties_and_puts_what_diverged_last(tmp_path: Path) -> None:
    losses = {
        BASELINE: (1.0, 1.0, 1.0),
        "MXFP8": (1.001, 0.999, 1.002),
        "nvfp4": (1.0400, 1.0410, 1.0420),
        "no RHT": (1.0401, 1.0409, 1.0424),
        "no SR": (1.05, 1.051, 1.052),
        "MXFP4": (math.nan,),
        "Quartet II": (1.02,),
    }
    for variant, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            saved(tmp_path, variant, seed, loss)
    found = gaps.load(STUDIES["board"], SMALL, 3, tmp_path)
    rows = leaderboard.places(found)
    assert [row.variant for row in rows] == [BASELINE, "MXFP8", "Quartet II", "nvfp4", "no RHT", "no SR", "MXFP4"]
    assert [leaderboard.verdict(row.to_next) for row in rows] == [
        "tie (+0.07 ± 0.09)", "one seed: not told apart", "one seed: not told apart", "tie (+0.01 ± 0.01)",
        "+0.99 ± 0.01", "diverged", "",
    ]  # fmt: skip
    assert rows[3].gap.mean == pytest.approx(4.1) and rows[3].gap.error == pytest.approx(0.1 / math.sqrt(3))
    text = report.write(["board"], SMALL, 3, tmp_path)
    step, bytes_saved = leaderboard.costs("nvfp4")
    assert f"| 4 | nvfp4 | 3 | 1.0410 | +4.10 ± 0.06 | tie (+0.01 ± 0.01) | {step} | {bytes_saved} | `nvfp4`: " in text
    assert "| 7 | MXFP4 | 1 | nan | diverged | " in text
    assert (tmp_path / "tiny" / "board.png").exists() and "Not run: nvfp4 + 4/6; " in text


def test_every_row_of_the_board_says_where_it_is_from() -> None:
    assert all(leaderboard.source(variant) for variant in variants_of(STUDIES["board"]))


def test_the_page_holds_expectations_and_the_tables_of_the_rows_under_version_control(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "leaderboard.md"
    page.parent.mkdir()
    shutil.copy(run.ROOT / "docs" / "leaderboard.md", page)
    expected = page.read_text().index("## Expected, written down before the runs")
    assert expected > page.read_text().index("## Results")
    shutil.copytree(run.RESULTS, tmp_path / "benchmarks" / "results" / "convergence")
    shipped = tmp_path / "leaderboard.json"
    for preset in ("3m", "10m"):
        folder = tmp_path / "benchmarks" / "results" / "convergence"
        report.write(["board"], PRESETS[preset], 3, folder, page)
        leaderboard.ship(gaps.load(STUDIES["board"], PRESETS[preset], 3, folder), preset, shipped)
    assert page.read_text() == (run.ROOT / "docs" / "leaderboard.md").read_text()
    assert shipped.exists() == recipes.LEADERBOARD.exists()
    assert not shipped.exists() or json.loads(shipped.read_text()) == json.loads(recipes.LEADERBOARD.read_text())


def test_the_command_line_prints_the_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "LEADERBOARD", tmp_path / "leaderboard.json")
    assert cli.main(["recipes"]) == 0
    assert capsys.readouterr().out.startswith("high_precision")
    for seed in range(2):
        saved(tmp_path, BASELINE, seed, 1.0)
        saved(tmp_path, "nvfp4", seed, 1.04 + 0.01 * seed)
        saved(tmp_path, "no SR", seed, 1.05)
    leaderboard.ship(gaps.load(STUDIES["board"], SMALL, 3, tmp_path), "3m", recipes.LEADERBOARD)
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["3m"]
    assert any(re.match(r"nvfp4 +\+4\.50 ± 0\.50  arXiv 2509", line) for line in lines)
    assert any(re.match(r"quartet2  +arXiv", line) for line in lines)


def test_the_board_is_one_command(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--variants", BASELINE, "nvfp4", "nvfp4 + 4/6", "--seeds=2", "--at-once=3"]
    assert run.main(["board", *options(texts, tmp_path), *few]) == 0
    assert capsys.readouterr().out.count("| 2 |") == 3 + 1  # a place, and seeds of three rows


@pytest.mark.slow
def test_a_failing_run_is_told_at_the_end_and_stops_no_other(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    blocked = folder / "tiny" / "nvfp4.seed0.jsonl.partial"
    blocked.mkdir(parents=True)  # where the run would be written
    assert run.main(["noise", *options(texts, folder)]) == 2
    out, err = capsys.readouterr()
    assert "1 runs failed: nvfp4, seed 0" in err and "IsADirectoryError" in err
    assert "Not run: nvfp4." in out and "| nvfp4, other draws | 1 |" in out


def saved(
    folder: Path, variant: str, seed: int, loss: float, data: str = "d", like: Conditions = SMALL, **made: Any
) -> None:
    settings = dataclasses.replace(like, seed=seed)
    made = {"device": "cpu", "torch": "2", "date": "today", "data": data, **made}
    header = {"variant": variant, "settings": results.of_settings(settings), "seconds": 1.0, **made}
    rows = [header, {"step": 1, "loss": 9.0}, {"step": 1, "validation_loss": 2 * loss}]
    results.save(results.path_of(folder, settings, variant), [*rows, {"step": like.steps, "validation_loss": loss}])


def test_a_seed_that_diverged_leaves_the_others_a_report(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.02, math.nan)):
        saved(tmp_path, BASELINE, seed, 1.0)
        saved(tmp_path, "nvfp4", seed, loss)
    assert "| 2 | nvfp4 | 2 | nan | diverged | " in report.write(["board"], SMALL, 2, tmp_path)
    assert "| nvfp4 | 2 | nan | +nan % |" in report.write(["ablations"], SMALL, 2, tmp_path)


def test_a_run_that_diverged_before_its_end_leaves_the_others_a_report(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(SMALL, evaluate_every=2)
    runs = [Run(settings, BASELINE), Run(settings, "nvfp4")]
    loss = Training.loss
    monkeypatch.setattr(
        Training, "loss", lambda self, *given: loss(self, *given) * (math.inf if self.variant == "nvfp4" else 1)
    )
    train(runs, corpus, tmp_path)
    assert math.isnan(results.load(tmp_path, settings, "nvfp4").loss)
    assert rows(runs[1], tmp_path)[-1]["step"] < settings.steps
    assert "| 2 | nvfp4 | 1 | nan | diverged | " in report.write(["board"], settings, 1, tmp_path)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"seconds": "x"}, "does not say seconds"),
        ({"data": []}, "does not say data"),
        ({"variant": "nvfp4"}, "is a run of 'nvfp4', not of 'bf16'"),
        ({"loss": 0.0}, "must end with the loss after 11 steps"),
        ({"loss": -1.0}, "must end with the loss after 11 steps"),
        ({"step": 0}, "must end with the loss after 11 steps"),
        ({"step": SMALL.steps}, "must end with the loss after 11 steps"),
    ],
)
def test_a_run_that_cannot_be_is_refused(broken: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(tmp_path, BASELINE, 0, 1.0)
    (path,) = (tmp_path / "tiny").iterdir()
    header, training_loss, first, last = map(json.loads, path.read_text().splitlines())
    header.update({name: value for name, value in broken.items() if name in header})
    first["step"] = broken.get("step", first["step"])
    last["validation_loss"] = broken.get("loss", last["validation_loss"])
    results.save(path, [header, training_loss, first, last])
    with pytest.raises(InputError, match=said):
        report.write(["noise"], SMALL, 1, tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (slice(0), "does not say settings, data, "),
        (slice(1, None), "does not say settings, data, "),
        (slice(1), "must end with the loss after 11 steps"),
        (slice(-1), "must end with the loss after 11 steps"),
    ],
)
def test_a_run_that_is_not_whole_is_refused(rows: slice, said: str, tmp_path: Path) -> None:
    saved(tmp_path, BASELINE, 0, 1.0)
    (path,) = (tmp_path / "tiny").iterdir()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[rows]))
    with pytest.raises(InputError, match=f"{path} is damaged: .*{said}"):
        report.write(["noise"], SMALL, 1, tmp_path)


def test_gaps_are_paired_by_seed(tmp_path: Path) -> None:
    for seed, baseline in enumerate((1.0, 2.0)):
        saved(tmp_path, BASELINE, seed, baseline)
        saved(tmp_path, "nvfp4", seed, baseline * (1.02 + 0.02 * seed))
        saved(tmp_path, "no SR", seed, baseline * (1.03 + 0.02 * seed))
    saved(tmp_path, "no RHT", 0, 1.5)
    found = report.load(STUDIES["ablations"], SMALL, 2, tmp_path)
    assert report.gaps(found, "nvfp4") == pytest.approx({0: 2.0, 1: 4.0})
    assert report.differences(found, "no SR", "nvfp4") == pytest.approx({0: 1.0, 1: 1.0})
    text = report.write(["ablations"], SMALL, 2, tmp_path)
    assert "| nvfp4 | 2 | 1.5500 | +3.00 ± 1.41 % |" in text
    assert "| no SR | 2 | 1.5650 | +4.00 ± 1.41 % | +1.00 ± 0.00 pt |" in text
    assert "| no RHT | 1 | 1.5000 | +50.00 % | +48.00 pt |" in text


def test_gaps_of_several_presets_stand_side_by_side(tmp_path: Path) -> None:
    losses = {"3m-20": (1.0, 1.1), "3m": (1.0, 1.05)}
    for preset, of_preset in losses.items():
        for variant, loss in zip((BASELINE, "nvfp4"), of_preset, strict=True):
            saved(tmp_path, variant, 0, loss, like=PRESETS[preset])
    text = report.write(["horizon"], PRESETS["3m"], 1, tmp_path)
    lines = text.splitlines()
    at = lines.index("| gap to bf16 (%) | 3m-20 | 3m | 3m-400 |")
    assert lines[at + 2] == "| nvfp4 | +10.00 | +5.00 | - |"


def test_tables_take_their_place_in_a_document(tmp_path: Path) -> None:
    folder, target = tmp_path / "results", tmp_path / "docs" / "evidence.md"
    saved(folder, BASELINE, 0, 1.0)
    target.parent.mkdir()
    target.write_text("before\n<!-- tiny -->\nold\n<!-- end of tiny -->\nafter\n")
    text = report.write(["noise"], SMALL, 1, folder, target)
    assert target.read_text() == f"before\n<!-- tiny -->\n\n{text}\n<!-- end of tiny -->\nafter\n"
    assert "](../results/tiny/noise.png)" in text and (folder / "tiny" / "noise.png").exists()
    assert f"1 runs of {SMALL.tokens} bytes each. cpu, torch 2, today." in text and "| bf16 | 1 | 1.0000 |" in text
    with pytest.raises(InputError, match="needs the lines <!-- mini -->"):
        report.write(["noise"], PRESETS["mini"], 1, folder, target)


def test_runs_on_different_data_are_not_compared(tmp_path: Path) -> None:
    saved(tmp_path, BASELINE, 0, 1.0)
    saved(tmp_path, "nvfp4", 0, 1.0, data="other")
    with pytest.raises(InputError, match="different data"):
        report.write(["noise"], SMALL, 1, tmp_path)


def test_runs_of_a_cpu_and_of_a_gpu_are_not_compared(tmp_path: Path) -> None:
    saved(tmp_path, BASELINE, 0, 1.0)
    saved(tmp_path, "nvfp4", 0, 1.0, device="NVIDIA H200")
    with pytest.raises(InputError, match="trained on NVIDIA H200 and cpu: bf16 is FP32 on a CPU"):
        report.write(["noise"], SMALL, 1, tmp_path)


def test_runs_that_were_not_made_alike_are_told_apart(tmp_path: Path) -> None:
    for seed in range(2):
        saved(tmp_path, BASELINE, seed, 1.0, device="NVIDIA H200", commit="a")
        saved(tmp_path, "nvfp4", seed, 1.0, device="NVIDIA H200", commit="b")
    assert "made alike" not in report.write(["board"], SMALL, 2, tmp_path)
    assert "- device NVIDIA H200, torch 2, commit b: nvfp4 (seeds 0, 1)\n" in report.write(
        ["noise"], SMALL, 2, tmp_path
    )
    saved(tmp_path, "nvfp4", 1, 1.0, device="NVIDIA H100", commit="b")
    text = report.write(["board"], SMALL, 2, tmp_path)
    assert "- device NVIDIA H200, torch 2: bf16 (seeds 0, 1); nvfp4 (seeds 0)\n" in text
    assert "- device NVIDIA H100, torch 2: nvfp4 (seeds 1)\n" in text


def test_python_sources_are_read_once(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    small = load_corpus(str(texts), 17, torch.device("cpu"))
    monkeypatch.setattr(sources, "python_sources", lambda length: reads.append(length) or small)
    for _ in range(2):
        found = sources.load(sources.prepare(None, 17, tmp_path), "cpu")
        assert found.digest == small.digest and torch.equal(found.training, small.training)
    assert reads == [17]
    assert sources.load(sources.prepare(str(texts), 17, tmp_path), "cpu").digest == small.digest


def test_every_variant_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert len({results.path_of(tmp_path, SMALL, variant) for variant in VARIANTS}) == len(VARIANTS)


X = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [16, 128])
def test_the_rotation_is_undone(size: int) -> None:
    spec = CastSpec(rotation=Rotation(size, Signs.DGRAD))
    rng = torch.tensor([0, 3])
    rotated = tensors.prepare(X, spec, rng, 0)
    torch.testing.assert_close(tensors.unrotate(rotated, spec, rng, 0), X)
    assert not torch.allclose(rotated, X)


def test_bias_is_one_if_unbiased_and_the_number_of_draws_if_deterministic() -> None:
    guarded = CastSpec(rounding=RoundingMode.STOCHASTIC, target=6 * 16 / 17)
    assert tensors.measure(X, guarded, 0)["bias"] == pytest.approx(1, abs=0.1)
    assert tensors.measure(X, CastSpec(), 0)["bias"] == pytest.approx(tensors.DRAWS)


def test_errors_are_the_yardsticks() -> None:
    assert tensors.measure(X, CastSpec(), 0)["error"] == pytest.approx(9.05e-3, rel=0.05)
    rotated = CastSpec(rotation=Rotation(16))
    assert tensors.measure(X, rotated, 0)["error"] == pytest.approx(9.05e-3, rel=0.05)


def test_saturation_and_underflow_are_counted() -> None:
    x = torch.full((1, 32), 0.01)
    x[0, 0] = 6.0
    measured = tensors.measure(x, CastSpec(), 0)
    assert measured["underflow"] == pytest.approx(15 / 32)  # the block of the large value
    assert measured["saturated"] == 0
    stochastic = zoo.make("nvfp4").casts("grad_output").rowwise
    assert isinstance(stochastic, CastSpec)
    assert tensors.measure(X, stochastic, 0)["saturated"] > 0
    assert tensors.measure(X, stochastic.replace(target=6 * 16 / 17), 0)["saturated"] == 0


def test_nothing_is_measured_on_zeros() -> None:
    measured = tensors.measure(torch.zeros(16, 32), CastSpec(), 0)
    assert measured == {"error": 0.0, "bias": 0.0, "saturated": 0.0, "underflow": 0.0}


@pytest.mark.slow
def test_the_tensors_of_a_run_are_measured_and_drawn(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--preset=tiny",
        f"--data={texts}",
        f"--out={tmp_path}",
        f"--scratch={tmp_path}",
        "--tokens=2048",
        "--recipes",
        "nvfp4",
    ]
    assert tensors.main([*arguments, "--at", "0.5", "1"]) == 0
    assert "| nvfp4 | grad_output.columnwise |" in capsys.readouterr().out
    header, *rows = [json.loads(line) for line in (tmp_path / "tensors.jsonl").read_text().splitlines()]
    assert header["settings"]["preset"] == "tiny"
    assert len(rows) == 2 * 10 * 6  # steps, linear layers, operands
    assert all((tmp_path / f"{name}.png").exists() for name in tensors.MEASURES)
