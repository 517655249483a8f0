"""Runs: what they are known by, that pairs are pairs, that a run that was stopped ends as one that was not."""

import dataclasses
import errno
import math
import random
import shutil
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp4engine.compare import HIGH_PRECISION, InputError, Recorder, Run, checkpoint, read, read_folders
from fp4engine.compare.comparison import compare
from fp4engine.compare.files import read_rows
from fp4engine.compare.training import Places, Training, gradient_noise, train
from fp4engine.recipe import (
    Casts,
    CustomRecipe,
    LinearRecipe,
    NVFP4BlockScaling,
    Rule,
    RuledRecipe,
    ScheduledRecipe,
    zoo,
)
from fp4engine.recipe.argument import imported
from fp4engine.recipe.base import Recipe
from fp4engine.recipe.identity import _plain, digest, identity
from tests.tiny_task import TOKENS, WIDTH, Network, TinyTask, trained

pytestmark = pytest.mark.usefixtures("one_thread")

NVFP4 = zoo.make("nvfp4")
TASK = TinyTask(steps=6, evaluate_every=3)


def losses(path: Path) -> list[dict]:
    """All rows of a run but those that hold times."""
    return [row for row in read_rows(path)[1:] if row.get("kind") != "end"]


def test_a_run_repeats_itself_and_its_pair_differs_in_the_recipe_alone(tmp_path) -> None:
    baseline, again, quantized, draws = (
        read(trained(TASK, run, tmp_path / str(place)))
        for place, run in enumerate(
            (
                Run("baseline", HIGH_PRECISION, 0),
                Run("baseline", HIGH_PRECISION, 0),
                Run("nvfp4", NVFP4, 0),
                Run("nvfp4", NVFP4, 0, {"draws": 1}),
            )
        )
    )
    assert baseline.losses == again.losses and baseline.validation == again.validation
    assert quantized.losses[0][1] == pytest.approx(baseline.losses[0][1], rel=0.05)  # same weights, same batch
    assert quantized.losses != baseline.losses and draws.losses != quantized.losses
    assert draws.losses[0] == quantized.losses[0]  # only gradients are rounded by chance
    assert baseline.end["repeats"] and quantized.end["repeats"]
    assert baseline.end["fp4_share"] == 0 and 0.7 < quantized.end["fp4_share"] < 1


def test_what_a_model_draws_from_python_and_numpy_repeats_too(tmp_path, monkeypatch) -> None:
    """Runs of one seed began with different weights where NumPy had drawn them."""

    def model(task: TinyTask) -> nn.Module:
        made = Network(1.0)
        with torch.no_grad():
            made.embedding.weight.copy_(torch.from_numpy(np.random.standard_normal((TOKENS, WIDTH))))
        return made

    loss = TinyTask.loss
    monkeypatch.setattr(TinyTask, "model", model)
    monkeypatch.setattr(TinyTask, "loss", lambda *given: loss(*given) * (1 + random.random() + np.random.rand()))
    run, places = (
        Run("nvfp4", NVFP4, 0),
        [Places(tmp_path / name, tmp_path / "scratch") for name in ("plain", "looked")],
    )
    for place, looks in zip(places, (False, True), strict=True):
        train(TASK, run, place, looks=looks)
    left = iter([False, True] * 3)
    for _ in range(3):
        part = trained(TASK, run, tmp_path / "parts", stop=lambda: next(left))
    plain, looked = (read(run.path(place.finished, TASK.setting())) for place in places)
    assert plain.losses == looked.losses == read(part).losses and plain.end["repeats"]


def test_the_order_of_additions_can_be_another_with_the_same_tokens(tmp_path) -> None:
    plain, other = (Training(TASK, Run("baseline", HIGH_PRECISION, 0, extra)) for extra in ({}, {"order": "reversed"}))
    given, turned = plain.train_step(), other.train_step()
    assert torch.equal(plain.inputs, other.inputs.flip(1)) and given == pytest.approx(turned.item(), rel=1e-5)


def test_accumulated_passes_are_one_batch(tmp_path) -> None:
    whole, parts = (
        Training(dataclasses.replace(TASK, batch=8 // n, accumulation=n), Run("baseline", HIGH_PRECISION, 0))
        for n in (1, 4)
    )
    assert torch.equal(whole.inputs.flatten(0, 1), parts.inputs.flatten(0, 1))
    for _ in range(3):
        assert whole.train_step().item() == pytest.approx(parts.train_step().item(), rel=1e-4)


@pytest.mark.parametrize("recipe", [NVFP4, zoo.make("fp8_delayed"), ScheduledRecipe(((0, NVFP4), (3, HIGH_PRECISION)))])
def test_a_stopped_run_ends_with_the_bytes_of_one_that_was_not(recipe: Recipe, tmp_path) -> None:
    run = Run("run", recipe, 1)
    whole = trained(TASK, run, tmp_path / "whole")
    for steps in (2, 3):
        left = iter([False] * (steps - 1) + [True] * 9)
        part = trained(TASK, run, tmp_path / "parts", stop=lambda left=left: next(left))
        assert not part.exists() and part.with_name(f"{part.name}.part").exists()
    assert losses(trained(TASK, run, tmp_path / "parts")) == losses(whole)
    assert not list((tmp_path / "parts" / "scratch").iterdir())


def test_how_to_begin_anew_without_the_losses_of_before_is_said(tmp_path) -> None:
    run = Run("run", HIGH_PRECISION, 0)
    path = trained(TASK, run, tmp_path, stop=lambda: True)
    path.with_name(f"{path.name}.part").unlink()
    with pytest.raises(InputError, match=r"or begin the run anew: delete .*scratch/[0-9a-f]{16}$") as refused:
        trained(TASK, run, tmp_path)
    shutil.rmtree(str(refused.value).rpartition(" ")[2])
    assert trained(TASK, run, tmp_path).exists()


def test_a_buffer_that_grows_is_continued(tmp_path, monkeypatch) -> None:
    def model(task: TinyTask) -> nn.Module:
        made = Network(1.0)
        made.register_buffer("seen", torch.ones(1))
        made.register_forward_hook(lambda model, *_: setattr(model, "seen", torch.cat([model.seen, model.seen[:1]])))
        return made

    loss = TinyTask.loss
    monkeypatch.setattr(TinyTask, "model", model)
    monkeypatch.setattr(TinyTask, "loss", lambda task, model, x: loss(task, model, x) * (1 + len(model.seen)))
    run = Run("nvfp4", NVFP4, 0)
    whole = trained(TASK, run, tmp_path / "whole")
    left = iter([False, True])
    trained(TASK, run, tmp_path / "parts", stop=lambda: next(left))
    assert losses(trained(TASK, run, tmp_path / "parts")) == losses(whole)


@pytest.mark.parametrize("made", ["parameter", "buffer"])
def test_what_the_first_pass_makes_is_refused(made: str, monkeypatch) -> None:
    """The optimizer did not train it, and a checkpoint with it was called damaged."""

    def model(task: TinyTask) -> nn.Module:
        network, tensor = Network(1.0), torch.ones(1)
        tensors = {"parameter": nn.Parameter(tensor), "buffer": tensor}
        network.register_forward_hook(lambda *_: getattr(network, f"register_{made}")("late", tensors[made]))
        return network

    monkeypatch.setattr(TinyTask, "model", model)
    with pytest.raises(InputError, match="the first pass has made 'late', which is neither trained nor continued"):
        Training(TASK, Run("nvfp4", NVFP4, 0)).train_step()


def test_looking_at_a_step_leaves_no_trace_and_finds_what_is_there(tmp_path) -> None:
    run = Run("nvfp4", NVFP4, 0)
    places = [Places(tmp_path / name, tmp_path / "scratch") for name in ("plain", "looked")]
    for place, looks in zip(places, (False, True), strict=True):
        train(TASK, run, place, looks=looks)
    plain, looked = (read(run.path(place.finished, TASK.setting())) for place in places)
    assert plain.losses == looked.losses and plain.validation == looked.validation and not plain.rows
    gradients = [row for row in looked.rows if row["kind"] == "gradient"]
    assert {row["step"] for row in gradients} == {2, 4, 6}
    assert all(row["ratio"] > 1 and 0 <= row["bias"] < 1 for row in gradients)
    assert (looked.records / "record.jsonl").exists()


def test_looking_at_a_step_leaves_statistics_of_batches_as_they_were() -> None:
    training = Training(TASK, Run("nvfp4", NVFP4, 0))
    block = training.model.get_submodule("blocks.1")
    block.norm = nn.BatchNorm1d(16)
    block.register_forward_pre_hook(lambda block, given: (block.norm(given[0]),))
    block.register_buffer("seen", torch.zeros(1))
    block.register_forward_hook(lambda block, *_: setattr(block, "seen", torch.cat([block.seen, block.seen])))
    before = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    training.examine()
    for name, buffer in training.model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize(("starts", "share"), [((0, 2), 2 / 3), ((0, 1000), 0), ((1000, 0), 1)])
def test_what_comes_after_the_last_step_is_no_part_of_a_run(starts: tuple[int, int], share: float) -> None:
    """A run of 6 steps of a schedule whose second phase begins at 1000 had more than 5000% of its FLOPs in FP4."""
    phases = sorted(zip(starts, (HIGH_PRECISION, NVFP4), strict=True), key=lambda phase: phase[0])
    examined = Training(TASK, Run("scheduled", ScheduledRecipe(tuple(phases)), 0)).examine()
    whole = Training(TASK, Run("nvfp4", NVFP4, 0)).examine()
    assert examined["fp4_share"] == pytest.approx(share * whole["fp4_share"])
    assert (examined["quantized_gemms"] == 0) == (share == 0)


def test_a_schedule_below_rules_counts_in_every_phase() -> None:
    """It counted as its first phase, so that a run that began in high precision was said to have quantized nothing."""
    late = RuledRecipe(ScheduledRecipe(((0, HIGH_PRECISION), (2, NVFP4))), (Rule(HIGH_PRECISION, "blocks.0"),))
    examined = Training(TASK, Run("late", late, 0)).examine()
    whole = Training(TASK, Run("from the beginning", late.at(2), 0)).examine()
    assert 0 < examined["fp4_share"] == pytest.approx(2 / 3 * whole["fp4_share"])
    assert examined["quantized_gemms"] == whole["quantized_gemms"]


def test_a_share_of_flops_that_nobody_counts_is_not_said(tmp_path, monkeypatch) -> None:
    """An LSTM counted nothing, so that a model was in FP4 by 11% of its FLOPs that was by 6%."""

    def model(task: TinyTask) -> nn.Module:
        made = Network(1.0)
        made.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        made.embedding.register_forward_hook(lambda _, given, x: made.memory(x)[0])
        return made

    monkeypatch.setattr(TinyTask, "model", model)
    runs = [Run("baseline", HIGH_PRECISION, 0), Run("nvfp4", NVFP4, 0)]
    results = [read(trained(TASK, run, tmp_path)) for run in runs]
    assert [result.end["fp4_share"] for result in results] == [None, None]
    assert "FLOPs in FP4 are unknown: no formula counts what aten::mkldnn_rnn" in compare(results, 1.0).markdown()


def test_a_loss_may_write_to_its_tokens(tmp_path, monkeypatch) -> None:
    """Later validations, and whatever else reads a batch again, met what the first had made of it."""
    places = [Places(tmp_path / name, tmp_path / "scratch") for name in ("plain", "marked")]
    run, loss = Run("nvfp4", NVFP4, 0), TinyTask.loss

    def marking(task: TinyTask, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        found = loss(task, model, tokens)
        tokens[:, 1:] = -100
        return found

    for place, made in zip(places, (loss, marking), strict=True):
        monkeypatch.setattr(TinyTask, "loss", made)
        train(TASK, run, place, looks=True)
    plain, marked = (losses(run.path(place.finished, TASK.setting())) for place in places)
    assert plain == marked


def dropping(share: float, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _, given, x: nn.functional.dropout(x, share))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_noise_and_bias_of_gradients_are_told_apart(dropout: float, monkeypatch) -> None:
    """Nearest rounding has no noise and all bias; stochastic rounding that cannot saturate has noise alone."""
    model = TinyTask.model
    monkeypatch.setattr(TinyTask, "model", lambda task: model(task).apply(partial(dropping, dropout)))
    found: list[dict] = []
    for spec in (zoo.NEAREST, zoo.GUARDED):
        recipe = LinearRecipe(grad_output=Casts(spec, spec))
        found.append(gradient_noise(Training(TASK, Run("gradients", recipe, 0)), recipe)[0])
    nearest, guarded = found
    assert nearest["noise"] == 0 and nearest["bias"] == pytest.approx(1 / nearest["ratio"], rel=0.01)
    assert guarded["bias"] < 0.3 * guarded["noise"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch) -> None:
    loss = TinyTask.loss
    monkeypatch.setattr(TinyTask, "loss", lambda *given: loss(*given) * math.nan)
    monkeypatch.setattr("fp4engine.compare.recorder.ROWS_AT_ONCE", 2)
    result = read(trained(TASK, Run("nvfp4", NVFP4, 0), tmp_path))
    assert result.diverged and result.end["diverged_at"] == 1 and result.end["steps"] == 2
    assert "NaN" not in result.path.read_text()


def test_a_key_depends_on_all_that_numbers_do() -> None:
    runs = [Run("a", NVFP4, 0), Run("a", NVFP4, 1), Run("a", NVFP4.replace(disable_rht=True), 0)]
    runs += [Run("a", NVFP4, 0, {"draws": 1})]
    settings = [
        TASK.setting(),
        dataclasses.replace(TASK, steps=7).setting(),
        dataclasses.replace(TASK, hot=2.0).setting(),
    ]
    keys = {run.key(setting) for run in runs for setting in settings}
    assert len(keys) == len(runs) * len(settings)
    assert Run("another name", NVFP4, 0).key(TASK.setting()) == runs[0].key(TASK.setting())


def test_a_changed_recipe_is_a_new_run(tmp_path) -> None:
    """Results were reused, and unfinished runs continued, after a variant's recipe had changed."""
    first = trained(TASK, Run("mine", NVFP4, 0), tmp_path)
    changed = trained(TASK, Run("mine", NVFP4.replace(disable_rht=True), 0), tmp_path)
    assert first != changed and losses(first) != losses(changed)
    with pytest.raises(InputError, match="has finished before"):
        Recorder(tmp_path / "runs", recipe=NVFP4, seed=0, label="mine", setting=TASK.setting())


def test_a_field_that_recipes_get_later_orphans_no_run(monkeypatch) -> None:
    """Its default is what was done before it was there."""
    monkeypatch.setitem(Recipe.registry, "NVFP4BlockScaling", NVFP4BlockScaling)  # so that it is that again
    run = Run("nvfp4", NVFP4, 0)
    made = dataclasses.make_dataclass(
        "NVFP4BlockScaling", [("of_2027", bool, False)], bases=(NVFP4BlockScaling,), frozen=True, eq=False
    )
    later = made()
    assert "of_2027" in later.to_json()
    assert Run("nvfp4", later, 0).key({}) == run.key({})
    assert Run("nvfp4", made(of_2027=True), 0).key({}) != run.key({})
    spec = NVFP4.casts("input").rowwise
    wider = dataclasses.make_dataclass("CastSpec", [("of_2027", int, 0)], bases=(type(spec),), frozen=True, eq=False)
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
    assert _plain(spec) == _plain(wider(**fields)) and _plain(wider(**fields, of_2027=1)) == {
        **_plain(spec),
        "of_2027": 1,
    }


def factory(role):
    raise AssertionError(role)


@dataclass(frozen=True)
class Factory:
    bits: Any

    def __call__(self, role):
        raise AssertionError(role)


class OtherFactory(Factory):
    pass


def test_a_recipe_of_functions_is_known_by_their_source(tmp_path) -> None:
    keys: list[str] = []
    key = Run("mine", CustomRecipe(factory), 0).identity({})["recipe"]["qfactory"]
    assert key.startswith("test_runs:factory#") or ":factory#" in key
    with pytest.raises(ValueError, match="has no source"):
        Run("mine", CustomRecipe(eval("lambda role: None")), 0).identity({})
    for bits in (4, 8, 4):
        (tmp_path / "mine.py").write_text(f"BITS = {bits}\n\ndef quantizer(role):\n    return BITS\n")
        keys.append(identity(CustomRecipe(imported(f"{tmp_path}/mine.py:quantizer")))["qfactory"])
    assert keys[0] == keys[2] != keys[1]
    made = [identity(CustomRecipe(kind(bits))) for kind in (Factory, OtherFactory) for bits in (4, 8)]
    assert len({digest(of_one) for of_one in made}) == 4
    with pytest.raises(ValueError, match=r"^a recipe with .{0,100} has no identity"):  # as share_amax makes them
        identity(CustomRecipe(Factory({"layer": nn.Sequential(*map(nn.Linear, range(9), range(9)))})))
    assert identity(CustomRecipe(cache(factory))) == identity(CustomRecipe(factory))
    for unsaid in (Factory(4).__call__, lambda role: made, cache(lambda role: made)):
        with pytest.raises(ValueError, match="depends on values that its source does not say"):
            identity(CustomRecipe(unsaid))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "nvfp5"}, "did you mean 'nvfp4'"),
        ({"recipe": 5}, "recipe must be"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"setting": {"a": object()}}, "setting must be a dict of plain JSON values"),
        ({"setting": "data"}, "setting must be a dict"),
        ({"first_step": 3}, "has to hold losses up to step 3"),
        ({"label": 3}, "label must be a string or None, got 3"),
        ({"tokens_per_step": "x"}, "tokens_per_step must be an integer of at least 1, got 'x'"),
        ({"facts": {"seed": 5}}, "facts must leave 'seed' to the recorder"),
        ({"facts": {"parameters": "7B"}}, "facts: parameters must be an integer of at least 0, got '7B'"),
        ({"facts": {"device": 0}}, "facts: device must be a string, got 0"),
        ({"extra": {"recipe": "mine"}}, "extra must leave 'recipe' to the recorder"),
    ],
)
def test_a_recorder_refuses(options, said, tmp_path) -> None:
    with pytest.raises(ValueError, match=said):
        Recorder(tmp_path, **options)


def test_a_recorder_takes_steps_that_rise_and_losses_of_one_number(tmp_path) -> None:
    with pytest.raises(InputError, match="nvfp4, seed 0 has noted no loss"), Recorder(tmp_path, recipe="nvfp4"):
        pass
    with Recorder(tmp_path) as run:
        run.validation(4.0)
        run.step(torch.tensor([3.0]), at=5)
        run.note("mine", value=1)
        for at in (5, 4, 5.5):
            with pytest.raises(ValueError, match="at must be an integer of at least 6, got"):
                run.step(3.0, at=at)
        for loss in (torch.zeros(2), None, "much"):
            with pytest.raises(ValueError, match="loss must be one number, got"):
                run.step(loss)
        for rounded in (torch.tensor(5.43, dtype=kind) for kind in (torch.bfloat16, torch.float16)):
            for take in (run.step, run.validation):  # whose losses were equal, and the recipe said to train
                with pytest.raises(ValueError, match=r"must be FP32 or FP64, .* compute it of logits.float\(\)"):
                    take(rounded)
        run.validation(2.0)
        run.validation(1.5)
    for late in (lambda: run.step(1.0), lambda: run.validation(1.0), lambda: run.note("mine")):
        with pytest.raises(InputError, match="has been finished"):
            late()
    assert not run.part.exists()
    result = read(run.path)
    assert (result.losses, result.validation) == (((5, 3.0),), ((0, 4.0), (5, 1.5)))
    assert [row["value"] for row in result.rows] == [1]


def test_what_a_table_cannot_show_is_refused_and_the_run_goes_on(tmp_path) -> None:
    """A tensor that was noted was a TypeError many steps later; one at the end left a run that nothing could finish."""
    run = Recorder(tmp_path)
    run.step(2.0)
    for values, said in (({"of": torch.ones(1)}, "plain JSON values"), ({"loss": 1.0}, "leave 'loss' to the")):
        with pytest.raises(ValueError, match=f"what is noted must .*{said}"):
            run.note("mine", **values)
    for facts, said in (
        ({"loss": torch.ones(1)}, "must be a dict of plain JSON values"),
        ({"status": "fine"}, "must leave 'status' to the recorder"),
        ({"peak_memory": "3 GiB"}, "peak_memory must be a number or None, got '3 GiB'"),
    ):
        with pytest.raises(ValueError, match=f"what a run finishes with:? {said}"):
            run.finish(**facts)
    run.note("mine", nothing=math.nan)
    run.finish(peak_memory=3)
    assert read(run.path).end["peak_memory"] == 3
    written = run.path.read_text()
    run.path.write_text(written.replace('"peak_memory": 3', '"peak_memory": "much"'))
    with pytest.raises(InputError, match="is damaged: peak_memory must be a number or None, got 'much'; move it away"):
        read(run.path)


def test_a_run_that_could_not_be_written_can_be_finished_later(tmp_path, monkeypatch) -> None:
    """The second call did nothing, and said nothing."""
    run = Recorder(tmp_path)
    run.step(2.0)

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device"):
            run.finish()
    run.finish()
    assert read(run.path).losses == ((1, 2.0),) and not run.part.exists()


def test_a_recorder_goes_on_where_its_run_does(tmp_path) -> None:
    run = Recorder(tmp_path, recipe="nvfp4")
    for step in range(5):
        run.step(torch.tensor(float(step)))
    run.flush()
    run = Recorder(tmp_path, recipe="nvfp4", first_step=3)  # of which a checkpoint was kept
    run.step(30.0)
    run.finish(parameters=7)
    result = read(run.path)
    assert result.losses == ((1, 0.0), (2, 1.0), (3, 2.0), (4, 30.0)) and result.end["parameters"] == 7
    assert not list(tmp_path.glob("*.part"))


def test_a_run_that_diverged_before_it_goes_on_has_diverged(tmp_path) -> None:
    run = Recorder(tmp_path)
    for loss in (3.0, float("inf"), 2.0):
        run.step(loss)
    run.flush()
    run = Recorder(tmp_path, first_step=3)
    assert run.diverged_at == 2
    run.step(1.0)
    run.finish()
    assert read(run.path).diverged and read(run.path).end["diverged_at"] == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_of_two_recorders_of_one_run_the_first_is_told(steps: int, tmp_path) -> None:
    """Each wrote into the other's file, and the losses of the one that ended later were lost without a word."""
    first = Recorder(tmp_path, recipe="nvfp4")
    for _ in range(steps):
        first.validation(2.0)
    second = Recorder(tmp_path, recipe="nvfp4")
    second.validation(3.0)
    said = r"another one makes the same run \(nvfp4, seed 0\).* need a seed, a setting"
    for late in (lambda: first.validation(2.0), first.finish):
        with pytest.raises(InputError, match=said):
            late()
    second.finish()
    assert read(second.path).validation == ((0, 3.0),)


def test_a_file_that_was_moved_is_not_begun_without_its_beginning(tmp_path) -> None:
    run = Recorder(tmp_path)
    run.part.unlink()
    with pytest.raises(InputError, match="or the file was moved"):
        run.validation(1.0)


def test_a_region_that_an_exception_ends_leaves_an_unfinished_run(tmp_path) -> None:
    with pytest.raises(KeyError), Recorder(tmp_path) as run:
        run.step(1.0)
        raise KeyError
    assert not run.path.exists() and read_rows(run.part)[-1] == {"step": 1, "loss": 1.0}


def test_a_long_run_keeps_means_over_shares(tmp_path) -> None:
    with Recorder(tmp_path) as run:
        for step in range(1200):
            run.step(float(step))
    result = read(run.path)
    assert len(result.losses) == 400 and result.losses[0] == (3, 1.0) and result.losses[-1] == (1200, 1198.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[1:], "its first line does not say label"),
        (lambda lines: lines[:-1], "does not end with a line that says how the run ended"),
        (lambda lines: [lines[0], lines[-1]], "it has no loss"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "its steps do not rise"),
        (lambda lines: [*lines[:1], "[]", *lines[1:]], "a line is no object"),
        (lambda lines: [line.replace("2.0", '"x"') for line in lines], "loss 'x' after step 2 is no number"),
        (lambda lines: [line.replace('"step": 2', '"step": "2"') for line in lines], "loss 2.0 after step '2' is no"),
    ],
)
def test_a_damaged_file_is_named(change, said, tmp_path) -> None:
    with Recorder(tmp_path) as run:
        run.step(1.0)
        run.step(2.0)
    run.path.write_text("".join(f"{line}\n" for line in change(run.path.read_text().splitlines())))
    with pytest.raises(InputError, match=said):
        read_folders([tmp_path])


def test_a_file_of_before_runs_had_keys_is_not_passed_over(tmp_path) -> None:
    rows = '{"variant": "nvfp4", "settings": {"seed": 3}}', '{"step": 1, "validation_loss": 2.0}'
    (tmp_path / "nvfp4.seed3.jsonl").write_text("".join(f"{row}\n" for row in rows))
    with pytest.raises(InputError, match=r"nvfp4\.seed3\.jsonl is damaged: its first line does not say label, key"):
        read_folders([tmp_path])


class Counted(nn.Module):
    """A module whose buffers share memory, with one that cannot be written and a state beside its tensors."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.linear, self.table, self.seen = nn.Linear(4, 4), table, 0
        self.register_buffer("weights", self.linear.weight.detach())
        self.register_buffer("ones", torch.ones(2, 1).expand(2, 3))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def counted() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    table = nn.BatchNorm1d(4)  # of two blocks, as angles of rotary embeddings are
    model = nn.Sequential(Counted(table), Counted(table))
    return model, torch.optim.AdamW(model.parameters())


def test_checkpoints_hold_buffers_in_shared_memory_and_states_of_modules(tmp_path) -> None:
    (model, optimizer), (other, its_optimizer) = counted(), counted()
    model[0].seen = 7
    model[0].table.running_mean.fill_(3.0)
    checkpoint.save(tmp_path, 5, model, optimizer)
    assert checkpoint.restore(tmp_path, other, its_optimizer) == 5
    assert other[0].seen == 7 and other[1].seen == 0
    for name, tensor in checkpoint.changing(model).items():
        assert torch.equal(tensor, checkpoint.changing(other)[name]), name
    assert other[0].table is other[1].table and other[0].weights.data_ptr() == other[0].linear.weight.data_ptr()


class Renamed(nn.Linear):
    """A layer whose files have another name for its weight."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_a_model_without_states_beside_its_tensors_loads_no_empty_file(tmp_path) -> None:
    model = Renamed(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path, 5, model, optimizer)
    assert checkpoint.restore(tmp_path, model, optimizer) == 5
