"""Runs that other scripts make: transformers' Trainer, several ranks, a disk that fills, a record beside the run."""

import errno
import json
import re
from pathlib import Path

import pytest
import torch

import fp4engine
from fp4engine import inspect
from fp4engine.cli import main
from fp4engine.compare import Recorder, Run, read, read_folders
from fp4engine.compare.comparison import compare
from fp4engine.compare.files import read_rows
from fp4engine.recipe import zoo
from tests.disk import full_disk
from tests.ranks import process_group, spawn
from tests.tiny import llama
from tests.tiny_task import TinyTask, trained

NVFP4 = zoo.make("nvfp4")


@pytest.mark.filterwarnings("ignore")  # notes about pinned memory and data loaders
def test_the_trainer_of_transformers_writes_runs_and_goes_on_with_them(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fp4engine.compare.callback import RecorderCallback

    rows = (torch.arange(9) + 5 * torch.arange(24)[:, None]) % 32
    data = [{"input_ids": row, "labels": row} for row in rows]

    def train(recipe: str | None, seed: int, steps: int, again_from: str | None = None) -> None:
        torch.manual_seed(seed)
        model = llama(vocab_size=32, num_attention_heads=2, num_key_value_heads=1)
        fp4engine.convert(model, keep_high_precision=["lm_head"])
        callback = RecorderCallback(tmp_path / "runs", recipe=recipe, setting={"data": "counting"})
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / f"{recipe}{seed}"), max_steps=steps, per_device_train_batch_size=4, save_steps=2,
            logging_steps=2, eval_strategy="steps", eval_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
            seed=seed, eval_on_start=again_from is None,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])
        with fp4engine.autocast(enabled=recipe is not None, recipe=NVFP4):
            trainer.train(resume_from_checkpoint=again_from)
            trainer.evaluate()  # of a run that has ended

    for seed in range(2):
        for recipe in (None, "nvfp4"):
            train(recipe, seed, 4)
    results = read_folders([tmp_path / "runs"])
    assert [(result.label, result.seed) for result in results] == [
        ("baseline", 0), ("baseline", 1), ("nvfp4", 0), ("nvfp4", 1),
    ]  # fmt: skip
    assert all([step for step, _ in r.losses] == [2, 4] for r in results)
    assert all([step for step, _ in r.validation] == [0, 4] for r in results) and not list(tmp_path.rglob("*.part"))
    assert main(["compare", "--runs", str(tmp_path / "runs")]) in (3, 4)  # two seeds
    file = results[0].path
    file.rename(f"{file}.part")  # as if it had been killed after step 4
    train(None, 0, 6, str(tmp_path / "None0" / "checkpoint-4"))
    assert [step for step, _ in read(file).losses] == [2, 4, 6] and read(file).losses[:2] == results[0].losses


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_trainer_that_diverges_is_told(tmp_path) -> None:
    """By default the Trainer logs the mean of earlier losses, and leaves losses out of validations."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fp4engine.compare.callback import RecorderCallback

    class Spoil(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **_) -> None:
            if state.global_step == 3:
                model.lm_head.weight.data.fill_(torch.nan)

    data = [{"input_ids": (row := torch.arange(9) + start), "labels": row} for start in range(8)]
    model = llama(vocab_size=32, num_attention_heads=2, num_key_value_heads=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callbacks = [Spoil(), RecorderCallback(tmp_path / "runs")]
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    (result,) = read_folders([tmp_path / "runs"])
    assert result.diverged and result.end["diverged_at"] == 4


def record(rank: int, folder: str) -> None:
    with process_group(rank, 2, f"{folder}/store"), Recorder(f"{folder}/runs", recipe="nvfp4") as run:
        run.step(torch.tensor(2.0))
        run.validation(1.5)


def test_the_first_of_several_ranks_writes(tmp_path) -> None:
    spawn(record, (str(tmp_path),), 2)
    (result,) = read_folders([tmp_path / "runs"])
    assert result.losses == ((1, 2.0),) and result.loss == 1.5


def test_rows_that_a_full_disk_cuts_off_are_written_later(tmp_path) -> None:
    """The file was left with half a row, the others were dropped, and nothing said which file it was."""
    with Recorder(tmp_path) as run:
        run.step(torch.tensor(torch.nan))
        run.step(2.0)
        begun = run.part.read_text()
        with full_disk(run.part, 10), pytest.raises(OSError, match=re.escape(str(run.part))):
            run.flush()
        assert run.part.read_text() == begun
        run.step(3.0)
    assert [row["loss"] for row in read_rows(run.path) if "loss" in row] == [None, 2.0, 3.0]
    assert read(run.path).end["diverged_at"] == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("write", [1, 2, 4, 5])
def test_a_disk_that_fills_loses_nothing(write: int, tmp_path, monkeypatch) -> None:
    task, run = TinyTask(steps=4, evaluate_every=2), Run("nvfp4", NVFP4, 0)
    whole = trained(task, run, tmp_path / "whole")
    write_bytes, calls = Path.write_bytes, iter(range(1, 1000))

    def full(path: Path, content: bytes) -> int:
        if next(calls) >= write:
            write_bytes(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=r"No space left on device: .*(jsonl|step-)"):
            trained(task, run, tmp_path / "broken", save_every=0)
    assert not list(tmp_path.rglob("*.partial"))
    one, other = (
        [row for row in read_rows(path)[1:] if row.get("kind") != "end"]
        for path in (whole, trained(task, run, tmp_path / "broken"))
    )
    assert one == other


def test_what_was_recorded_beside_a_run_is_on_the_page_and_held_against_recipes(tmp_path, capsys) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    fp4engine.convert(model)
    for recipe in (None, "nvfp4"):
        with Recorder(tmp_path, recipe=recipe) as run:
            with inspect.record(model, run.records, every=1, optimizer="by hand") as seen:
                with fp4engine.autocast(enabled=recipe is not None, recipe=NVFP4):
                    loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
                seen.step()
            run.step(loss)
    assert main(["compare", "--runs", str(tmp_path)]) == 4
    page = (tmp_path / "page.html").read_text()
    assert "How much of each number survives" in page and "One seed has no spread" in page
    assert "its mean training loss of the last tenth ends" in page and "validation loss ends" not in page
    assert "A gap is the mean training loss of the last tenth over" in capsys.readouterr().out
    for recipe, code, said in (("nvfp4", 0, "was cast as nvfp4 says"), ("mxfp4", 1, "not as 'e2m1 1x32 topbinade'")):
        assert main(["report", str(run.records), "--recipe", recipe]) == code
        assert said in capsys.readouterr().out


def test_runs_of_parts_are_no_runs_of_a_comparison(tmp_path) -> None:
    """The folder that `compare` wrote, given as a whole, has the short runs of its ranking of layers, too."""
    for recipe in (None, "nvfp4"):
        for setting in ({"data": "a"}, {"data": "a", "short": True}):
            with Recorder(tmp_path / json.dumps(setting)[-6:-1], recipe=recipe, setting=setting) as run:
                run.step(1.0)
    assert len(read_folders([tmp_path])) == 2 and compare(read_folders([tmp_path]), 1.0).code == 4
