"""The main job on a very small model: it runs, continues bit for bit, and refuses what it cannot use."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4engine
import train_gpt
from fp4engine.compare import checkpoint
from gpt import training
from gpt.data import load_corpus, windows
from gpt.measure import saved_by_linears
from gpt.metrics import Metrics, read_metrics
from gpt.model import GPT
from gpt.settings import PRESETS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZE = {"layers": 1, "width": 32, "sequence": 16, "batch": 2}
OFTEN = {"evaluate-every": 4, "checkpoint-every": 4}
TINY = ["--device=cpu", *(f"--{name}={value}" for name, value in (SIZE | OFTEN).items())]
STEPS = 12
TOKENS = 2 * 16 * STEPS


@contextmanager
def own_settings() -> Iterator[None]:
    """Undo what main() sets for the whole process; one thread, as in the processes that are started here."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def process_wide_settings() -> Iterator[None]:
    with own_settings():
        yield


def command(texts: Path, runs: Path) -> list[str]:
    return [*TINY, "--data", str(texts), "--tokens", str(TOKENS), "--runs", str(runs)]


@pytest.fixture
def arguments(tmp_path: Path, texts: Path) -> list[str]:
    return command(texts, tmp_path / "runs")


@pytest.fixture(scope="module")
def whole(shared_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing broke, in both precisions."""
    runs = tmp_path_factory.mktemp("runs")
    with own_settings():
        assert train_gpt.main([*command(shared_texts, runs), "--name", "whole"]) == 0
    return runs / "whole"


@pytest.fixture
def finished(whole: Path, shared_texts: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run of the test's own, ``runs/a``, that has just ended."""
    shutil.copytree(whole, tmp_path / "runs" / "a")
    return [*command(shared_texts, tmp_path / "runs"), "--name", "a"]


def losses(run: Path, precision: str = "nvfp4") -> list[dict[str, float]]:
    return read_metrics(run / precision / "metrics.jsonl")


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a call that is refused with exit code 2."""
    try:
        code = train_gpt.main(argv)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("train_gpt: ")
    assert error.count("\n") == 1
    return error


def test_a_run_ends_with_a_table_a_picture_and_files(arguments: list[str], tmp_path: Path, capsys) -> None:
    assert train_gpt.main([*arguments, "--name", "a"]) == 0
    run = tmp_path / "runs" / "a"
    report = (run / "report.md").read_text()
    assert report in capsys.readouterr().out
    header, rule, bf16, nvfp4 = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines()[:4]
    )
    assert header == list(train_gpt.report.HEADER)
    assert set("".join(rule)) == {"-", ":"}
    assert (bf16[0], bf16[2], bf16[-1]) == ("fp32", "", "0.0%")  # what it is on a CPU
    assert (nvfp4[0], nvfp4[2][-1], nvfp4[-1]) == ("nvfp4", "%", "66.7%")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert fp4engine.recipe.recipe_from_json((run / "nvfp4" / "recipe.json").read_text()) == (
        fp4engine.recipe.NVFP4BlockScaling()
    )
    for precision in ("bf16", "nvfp4"):
        rows = losses(run, precision)
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
        assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8, 12]
        newest = checkpoint.checkpoints(run / precision / "checkpoints")[-1]
        assert newest.name == "step-00000012"
        torch.load(newest / "training.pt", weights_only=True)
    assert "lm_head" in (run / "nvfp4" / "plan.txt").read_text()


def test_a_pipe_gets_lines_with_the_time_that_is_left(arguments, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(training, "LOG_EVERY", 1)
    assert train_gpt.main([*arguments, "--name", "a", "--precision", "nvfp4"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("nvfp4  step")]
    assert [int(line.split("/")[0].removeprefix("nvfp4  step ")) for line in lines] == list(range(1, STEPS + 1))
    assert all(re.search(r"loss \d\.\d{4}  about \d+ s left$", line) for line in lines[1:-1])
    assert "left" not in lines[0] + lines[-1]  # no pace yet, nothing left
    assert [training.duration(seconds) for seconds in (0.2, 61, 7261)] == ["1 s", "1 min 1 s", "2 h 1 min"]


def test_precisions_share_weights_and_data(arguments: list[str], whole: Path, tmp_path: Path) -> None:
    first = [losses(whole, precision)[0]["loss"] for precision in ("bf16", "nvfp4")]
    assert first[0] == pytest.approx(first[1], rel=0.01)
    assert train_gpt.main([*arguments, "--name", "b", "--precision", "nvfp4,bf16"]) == 0
    for precision in ("bf16", "nvfp4"):
        assert losses(whole, precision) == losses(tmp_path / "runs" / "b", precision)


def test_the_loss_goes_down(arguments: list[str], tmp_path: Path) -> None:
    more = ["--tokens", str(32 * 60), "--evaluate-every", "20", "--precision", "nvfp4"]
    assert train_gpt.main([*arguments, *more, "--name", "a"]) == 0
    validation = [row["validation_loss"] for row in losses(tmp_path / "runs" / "a") if "validation_loss" in row]
    assert validation[2] < validation[1] < validation[0] < 5.6


def process(argv: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    for _ in range(6000):
        if condition():
            return
        assert child.poll() is None, child.communicate()
        time.sleep(0.005)
    raise AssertionError("waited for too long")


@contextmanager
def interrupted(step: int) -> Iterator[None]:
    """Ctrl-C in this process, when a run has written the loss of ``step``; where it does not listen, nobody does."""
    append, before = Metrics.append, signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupting(metrics: Metrics, rows: list[dict[str, Any]]) -> None:
        append(metrics, rows)
        if any(row["step"] == step and "loss" in row for row in rows):
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Metrics, "append", interrupting)
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_killed_and_interrupted_runs_continue_bit_for_bit(arguments: list[str], tmp_path: Path, capsys) -> None:
    steps = 60
    argv = [*arguments, "--tokens", str(32 * steps), "--precision", "nvfp4", "--checkpoint-every", "15"]
    run = tmp_path / "runs" / "broken"

    child = process([*argv, "--name", "broken"])
    wait_for(lambda: len(losses(run)) > 20, child)  # beyond the checkpoint of step 15, before that of step 30
    child.kill()
    child.wait()
    assert 15 < losses(run)[-1]["step"] < steps
    with (run / "nvfp4" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # a line that was cut off

    with interrupted(37):
        assert train_gpt.main(["--runs", str(tmp_path / "runs"), "--resume"]) == 130  # the newest run, as it began
    output = capsys.readouterr().out
    assert "continues after step" in output
    assert "all saved; to continue: " in output
    stopped = checkpoint.checkpoints(run / "nvfp4" / "checkpoints")[-1]
    assert f"stopped after step {int(stopped.name[-8:])}" in output

    assert train_gpt.main(["--runs", str(tmp_path / "runs"), "--name", "broken", "--resume"]) == 0
    assert train_gpt.main([*argv, "--name", "whole"]) == 0
    assert losses(run) == losses(tmp_path / "runs" / "whole")
    weights = [
        tmp_path / "runs" / name / "nvfp4" / "checkpoints" / "step-00000060" / "model.safetensors"
        for name in ("whole", "broken")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


class Killed(Exception):
    pass


@pytest.mark.parametrize("call", range(1, 7))
def test_a_crash_inside_a_checkpoint_leaves_the_one_before(
    call: int, arguments: list[str], whole: Path, tmp_path: Path, monkeypatch
) -> None:
    """Fail at each sync around the second checkpoint: metrics, three files, their folder, and after the renaming."""
    argv = [*arguments, "--precision", "nvfp4"]
    saves = itertools.count(1)
    sync = checkpoint.sync

    def dying(path: Path) -> None:
        if ("checkpoints" in str(path) or path.name == "metrics.jsonl") and next(saves) == 6 + call:
            raise Killed
        sync(path)

    with monkeypatch.context() as patch:
        for module in (checkpoint, training):
            patch.setattr(module, "sync", dying)
        with pytest.raises(Killed):
            train_gpt.main([*argv, "--name", "broken"])
    run = tmp_path / "runs" / "broken"
    steps = [path.name for path in checkpoint.checkpoints(run / "nvfp4" / "checkpoints")]
    assert steps == (["step-00000004", "step-00000008"] if call == 6 else ["step-00000004"])
    assert train_gpt.main(["--runs", str(tmp_path / "runs"), "--name", "broken", "--resume"]) == 0
    assert losses(run) == losses(whole)


def same_run(one: Path, other: Path) -> None:
    """Metrics and final weights are the same bytes."""
    last = Path("checkpoints") / f"step-{STEPS:08d}" / "model.safetensors"
    for precision in ("bf16", "nvfp4"):
        assert losses(one, precision) == losses(other, precision)
        assert (one / precision / last).read_bytes() == (other / precision / last).read_bytes()


def test_two_processes_are_never_in_one_folder(arguments: list[str], tmp_path: Path, capsys) -> None:
    argv = [*arguments, "--tokens", "1000000", "--precision", "bf16", "--name", "a"]
    run = tmp_path / "runs" / "a"
    child = process(argv)
    wait_for(lambda: len(losses(run, "bf16")) > 10, child)
    refused = refusal([*argv, "--resume"], capsys)
    assert f"{run} is in use by another process (number {child.pid}); wait until it ends" in refused
    assert child.poll() is None
    steps = [row["step"] for row in losses(run, "bf16") if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    child.kill()  # a process that is killed leaves no lock behind
    child.wait()
    with interrupted(steps[-1] + 10):
        assert train_gpt.main([*argv, "--resume"]) == 130


class FullDisk:
    """From the given call on, every write of a whole file writes half of it and fails, and so does every line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        self.calls, self.first = 0, first
        write_bytes, append = Path.write_bytes, Metrics.append

        def write(path: Path, content: bytes) -> int:
            if self.is_full():
                write_bytes(path, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write_bytes(path, content)

        def add(metrics: Metrics, rows: list[dict[str, Any]]) -> None:
            if self.is_full():
                with metrics.path.open("a") as file:
                    file.write('{"step": 1')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(metrics, rows)

        monkeypatch.setattr(Path, "write_bytes", write)
        monkeypatch.setattr(Metrics, "append", add)

    def is_full(self) -> bool:
        self.calls += 1
        return self.calls >= self.first


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 9, 15, 30])
def test_a_full_disk_is_one_line_and_the_run_continues_bit_for_bit(
    first: int, arguments: list[str], whole: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    argv, run = [*arguments, "--name", "broken"], tmp_path / "runs" / "broken"
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, first)
        capsys.readouterr()
        error = refusal(argv, capsys)
        assert disk.calls == first, "it went on writing"
    begun = (run / "config.json").exists()
    rest = "what was saved before is whole, continue it with --resume" if begun else "no run has begun"
    assert f"No space left on device; {rest}" in error
    if first > 4:
        assert not list(run.rglob("*.partial")), "half a file fills the disk"
    assert train_gpt.main([*argv, "--resume"] if begun else argv) == 0
    same_run(run, whole)


def test_nothing_is_said_to_be_saved_below_a_file(arguments: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "README.md").write_text("a file")
    error = refusal([*arguments, "--runs", str(tmp_path / "README.md")], capsys)
    assert "README.md" in error and error.endswith(" (Not a directory); give another --name or --runs\n")


def test_a_file_that_the_system_refuses_to_write_is_one_line(arguments: list[str], tmp_path: Path, capsys) -> None:
    """A limit on the size of files instead of a full disk: the failing write is the kernel's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        error = refusal([*arguments, "--name", "a"], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large; what was saved before is whole" in error
    assert not list((tmp_path / "runs" / "a").rglob("*.partial"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"precision": "bf16"}', "\xff", None], ids=repr)
def test_a_broken_result_is_refused_in_one_line(
    content: str | None, finished: list[str], tmp_path: Path, capsys
) -> None:
    result = tmp_path / "runs" / "a" / "bf16" / "result.json"
    before = json.loads(result.read_text())
    result.write_bytes(
        (json.dumps({**before, "peak_memory": "much"}) if content is None else content).encode("latin-1")
    )
    error = refusal([*finished, "--resume"], capsys)
    assert f"{result} does not hold the result of a run" in error
    assert "delete it to have it made again" in error
    result.unlink()
    assert train_gpt.main([*finished, "--resume"]) == 0
    assert json.loads(result.read_text())["validation_loss"] == before["validation_loss"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"recipe": "Unheard"}', '{"recipe": "RuledRecipe"}', "\xff", None])
def test_a_broken_recipe_is_refused_in_one_line(
    content: str | None, finished: list[str], tmp_path: Path, capsys
) -> None:
    (tmp_path / "runs" / "a" / "nvfp4" / "result.json").unlink()
    recipe = tmp_path / "runs" / "a" / "nvfp4" / "recipe.json"
    recipe.unlink()
    if content is not None:
        recipe.write_bytes(content.encode("latin-1"))
    error = refusal([*finished, "--resume"], capsys)
    assert f"{recipe} {'is missing' if content is None else 'does not hold a recipe'}" in error
    assert "put back the one that the run began with, or begin another run" in error


def test_a_folder_that_holds_no_run(arguments: list[str], tmp_path: Path, capsys) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    argv = [*arguments, "--precision", "bf16", "--name", "a"]
    assert "holds no run, there is no config.json; begin one by leaving --resume out" in refusal(
        [*argv, "--resume"], capsys
    )
    (run / "notes.txt").write_text("mine")
    error = refusal(argv, capsys)
    assert "it has 'notes.txt' and no config.json" in error
    assert "give another --name, or move the folder away" in error
    (run / "notes.txt").unlink()
    (run / "lock").touch()  # as of a run that was killed before it began
    (run / "config.json.partial").write_text('{"pre')
    (run / "data.sha256").write_text("of other data")
    assert train_gpt.main(argv) == 0
    capsys.readouterr()
    (run / "data.sha256").unlink()
    assert "data.sha256 is missing" in refusal([*argv, "--resume"], capsys)


@pytest.mark.parametrize(
    "change",
    [{"layers": "2"}, {"layers": 0}, {"compile": 1}, {"precision": ["fp3"]}, {"extra": 1}, {"seed": None}],
    ids=str,
)
@pytest.mark.usefixtures("finished")
def test_a_config_of_another_form_is_refused(change, tmp_path: Path, capsys) -> None:
    config = tmp_path / "runs" / "a" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    assert "does not hold the settings of a run" in refusal(["--runs", str(tmp_path / "runs"), "--resume"], capsys)


@pytest.mark.parametrize(
    "content",
    ["no metrics\n", "[]\n", '{"loss": 3}\n', '{"step": 1, "loss": 3.0}\n', "", None],
    ids=["no JSON", "list", "no step", "one", "none", "twice"],
)
def test_metrics_that_do_not_fit_the_checkpoint_are_refused(
    content: str | None, finished: list[str], tmp_path: Path, capsys
) -> None:
    run = tmp_path / "runs" / "a" / "bf16"
    (run / "result.json").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() * 2 if content is None else content)
    assert f"{metrics} is damaged" in refusal([*finished, "--resume"], capsys)


def test_a_checkpoint_without_digests_or_of_another_step_is_refused(
    finished: list[str], tmp_path: Path, capsys
) -> None:
    (tmp_path / "runs" / "a" / "bf16" / "result.json").unlink()
    newest = checkpoint.checkpoints(tmp_path / "runs" / "a" / "bf16" / "checkpoints")[-1]
    newest.rename(newest.with_name("step-00000013"))
    assert "damaged (it is that of step 12)" in refusal([*finished, "--resume"], capsys)
    newest.with_name("step-00000013").rename(newest)
    (newest / "sha256.json").write_text("{}")
    assert f"checkpoint {newest} is damaged" in refusal([*finished, "--resume"], capsys)


@pytest.mark.gpu
def test_on_cuda_a_run_continues_bit_for_bit(arguments: list[str], tmp_path: Path, monkeypatch) -> None:
    argv = [*arguments, "--device=cuda", "--width=128", "--sequence=64", "--tokens", str(2 * 64 * STEPS)]
    assert train_gpt.main([*argv, "--name", "whole"]) == 0
    saves = itertools.count(1)
    save = checkpoint.save

    def dying(*arguments: Any) -> None:
        if next(saves) == 5:  # the first precision saves three times
            raise Killed
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying)
        with pytest.raises(Killed):
            train_gpt.main([*argv, "--name", "broken"])
    assert train_gpt.main(["--runs", str(tmp_path / "runs"), "--name", "broken", "--resume"]) == 0
    for precision in ("bf16", "nvfp4"):
        expected = losses(tmp_path / "runs" / "whole", precision)
        assert losses(tmp_path / "runs" / "broken", precision) == expected


def test_resuming_a_finished_run_only_reports(finished: list[str], tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "runs" / "a"
    report = (run / "report.md").read_text()
    monkeypatch.delattr(training.Trainer, "train")
    assert train_gpt.main([*finished, "--resume"]) == 0
    assert (run / "report.md").read_text() == report


def test_a_resumed_run_keeps_the_recipe_it_began_with(finished, whole: Path, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "runs" / "a"
    (run / "nvfp4" / "result.json").unlink()
    shutil.rmtree(run / "nvfp4" / "checkpoints" / "step-00000012")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert train_gpt.main([*finished, "--resume"]) == 0
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "sha256.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-30] + bytes([content[-30] ^ 1]) + content[-29:],
    ],
    ids=["cut off", "one bit"],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_works(
    file: str, damage: Callable[[bytes], bytes], finished: list[str], tmp_path: Path, capsys
) -> None:
    run = tmp_path / "runs" / "a"
    before = losses(run, "bf16")
    (run / "bf16" / "result.json").unlink()
    older, newest = checkpoint.checkpoints(run / "bf16" / "checkpoints")
    (newest / file).write_bytes(damage((newest / file).read_bytes()))
    error = refusal([*finished, "--resume"], capsys)
    assert f"checkpoint {newest} is damaged" in error
    assert f"delete it to continue from the one before, {older.name}" in error
    shutil.rmtree(newest)
    assert train_gpt.main([*finished, "--resume"]) == 0
    assert losses(run, "bf16") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "no/such/folder"], "must be a folder of text files; there is no folder"),
        (["--precision", "bf16,fp3"], "--precision takes bf16 and recipes: a recipe is a row of the book"),
        (["--precision", "bf16,fp3"], "or module:function, got 'fp3'"),
        (["--precision", ""], "at least one precision"),
        (["--precision", "nvfp4,nvfp4"], "each only once"),
        (["--preset", "1t"], "invalid choice: '1t'"),
        (["--tokens", "many"], "invalid whole value: 'many'"),
        (["--tokens", "inf"], "invalid whole value: 'inf'"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--width", "100"], "--width must be even, and a multiple of 64 above 64, got 100"),
        (["--seed", "-1"], "--seed must be"),
        (["--learning-rate", "nan"], "--learning-rate must be"),
        (["--keep-high-precision", "head"], "--keep-high-precision: pattern 'head' covers no nn.Linear"),
        (["--sequence", "100000"], "bytes for training, a window needs 100001"),
        (["--name", "../elsewhere"], "--name must be the name of one folder"),
        (["--resume"], "--resume: there is no run in"),
        (
            ["--resume", "--name", "none"],
            "none holds no run, there is no config.json; begin one by leaving --resume out",
        ),
        (["--faster"], "unrecognized arguments: --faster"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    options: list[str], message: str, arguments: list[str], tmp_path: Path, capsys
) -> None:
    assert message in refusal([*arguments, *options], capsys)
    assert not (tmp_path / "runs").exists()


def test_folders_without_text_are_refused(arguments: list[str], tmp_path: Path, capsys) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "needs at least two different text files" in refusal([*arguments, "--data", str(folder)], capsys)
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(b"\0binary" + name.encode())
    assert f"{folder} has 0" in refusal([*arguments, "--data", str(folder)], capsys)


def test_resume_refuses_what_contradicts_the_run(arguments: list[str], texts: Path, tmp_path: Path, capsys) -> None:
    argv = [*arguments, "--precision", "bf16", "--name", "a"]
    assert train_gpt.main(argv) == 0
    capsys.readouterr()
    assert "holds a run; continue it with --resume" in refusal(argv, capsys)
    assert "began with --seed 0, not 3" in refusal([*argv, "--resume", "--seed", "3"], capsys)
    assert "began with --precision bf16, not bf16,nvfp4" in refusal(
        [*argv, "--resume", "--precision", "bf16,nvfp4"], capsys
    )
    (texts / "one more.txt").write_text("something else")
    assert "the text files are not those" in refusal([*argv, "--resume"], capsys)


def test_a_loss_that_is_not_finite_stops_the_run(arguments: list[str], capsys) -> None:
    assert train_gpt.main([*arguments, "--learning-rate", "1e30", "--precision", "bf16"]) == 1
    assert "loss is " in capsys.readouterr().err


def test_validation_files_are_never_trained_on(texts: Path) -> None:
    (texts / "copy.txt").write_text((texts / "3.txt").read_text())
    corpus = load_corpus(str(texts), 17, torch.device("cpu"))
    split = [set(bytes(stream.tolist()).split(b"\0")) for stream in (corpus.training, corpus.validation)]
    assert len(split[0]) + len(split[1]) == 30
    assert len(split[1]) == 1
    assert not split[0] & split[1]


def test_batches_are_pure_functions_of_the_step(texts: Path) -> None:
    corpus = load_corpus(str(texts), 17, torch.device("cpu"))
    first = corpus.batch(3, 4, 17, seed=0)
    assert first.shape == (4, 17)
    assert torch.equal(first, corpus.batch(3, 4, 17, seed=0))
    assert not torch.equal(first, corpus.batch(4, 4, 17, seed=0))
    assert not torch.equal(first, corpus.batch(3, 4, 17, seed=1))
    assert torch.equal(windows(torch.arange(9).byte(), torch.tensor([0, 4]), 3), torch.tensor([[0, 1, 2], [4, 5, 6]]))


@pytest.mark.parametrize(("name", "millions"), [("10m", 10.8), ("30m", 30.1), ("85m", 85.4)])
def test_presets_have_the_size_they_are_called(name: str, millions: float) -> None:
    settings = PRESETS[name]
    with torch.device("meta"):
        model = GPT(settings.layers, settings.width, settings.sequence)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(millions * 1e6, rel=0.005)


def test_the_model_does_not_look_ahead() -> None:
    model = GPT(2, 32, 16)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 8:] = 0
    assert torch.allclose(model(tokens)[0, :8], model(changed)[0, :8], atol=1e-5)
    assert not torch.allclose(model(tokens)[0, 8:], model(changed)[0, 8:], atol=1e-5)


def test_saved_bytes_are_counted_once_and_without_parameters() -> None:
    """x [64, 32] FP32 is shared by two plain layers; in NVFP4 each keeps codes, scales and an amax of its own."""
    model = torch.nn.ModuleList([torch.nn.Linear(32, 48), torch.nn.Linear(32, 16)])
    fp4engine.convert(model)
    x = torch.randn(64, 32)

    def step() -> None:
        sum(layer(x).sum() for layer in model).backward()

    assert saved_by_linears(model, step) == 64 * 32 * 4
    with fp4engine.autocast():
        assert saved_by_linears(model, step) == 2 * (64 * 32 // 2 + 64 * 32 // 16 + 4)
