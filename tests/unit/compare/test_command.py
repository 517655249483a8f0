"""The command: its page, its exit codes, what it refuses, and that nothing that kills it is seen in the end."""

import argparse
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft  # noqa: F401  imports torchao, which writes to standard error
import pytest
import torch
import transformers
from safetensors.torch import save_file

from fp4engine.cli import main, make_parser
from fp4engine.compare import InputError, Recorder, Run, checkpoint, read, read_folders
from fp4engine.compare import command as command_line
from fp4engine.compare.command import check, estimates, task_of
from fp4engine.compare.data import prepare
from fp4engine.compare.files import alone_in, read_rows
from fp4engine.compare.recorder import HIGH_PRECISION
from fp4engine.compare.runner import Runner
from fp4engine.compare.task import TextTask, source_of
from fp4engine.compare.training import Places, Training
from fp4engine.estimate import Estimate
from fp4engine.recipe import Rule, RuledRecipe, ScheduledRecipe, zoo
from tests.tiny import CONFIGURATIONS
from tests.tiny_task import InThisProcess, trained

MODEL = """
import functools
import torch
from fp4engine.state import current_state
from tests.tiny_task import TinyTask

def small():
    task = TinyTask()
    return task.model(), lambda model, tokens: task.loss(model, tokens % 32)

def wrong():
    return torch.nn.Linear(2, 2)

def fails():
    raise RuntimeError("no such\\nweights")

def frozen():
    return small()[0].requires_grad_(False), small()[1]

def by_values():
    [share.item() for share in torch.linspace(0, 0.1, 2)]
    return small()

def sized(count):
    return small()

by_part = functools.partial(sized, 1)
cached = functools.cache(small)

class Builder:
    def __call__(self):
        return small()

built = Builder()

def rows():
    return small()[0], lambda model, tokens: small()[1](model, tokens).expand(3)

def no_gradient():
    return small()[0], lambda model, tokens: small()[1](model, tokens).detach()

def no_tensor():
    return small()[0], lambda model, tokens: 3.0

def mapping():
    return small()[0], lambda model, tokens: {"loss": small()[1](model, tokens)}

def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(4)), small()[1]

def without_layers():
    return torch.nn.Conv1d(2, 2, 3), small()[1]

def floats():
    return *small(), lambda text: [1.5] * len(text)

def below_zero():
    return *small(), lambda text: [-1] * len(text)

def nested():
    return *small(), lambda text: [[1, 2]]

def encode_fails():
    return *small(), lambda text: {}[text[:2]]

class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first + second)

def fails_in_a_region():
    model, loss = small()
    def of_model(model, tokens):
        state = current_state()
        if state is not None and state.enabled:
            raise SystemExit(0) if torch.initial_seed() == 2 else Odd("of two", " parts")  # line of the errors
        return loss(model, tokens)
    return model, of_model

def leaves():
    raise SystemExit(0)

def in_bfloat16():
    return small()[0].bfloat16(), small()[1]

def named_otherwise():
    model, loss = small()
    return torch.nn.Sequential(model.blocks[0], torch.nn.Linear(4, 4)), loss

class Elsewhere(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(256, 4), torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 256)

    def forward(self, tokens):
        return self.lm_head(torch.nn.functional.linear(self.embedding(tokens), self.linear.weight))

def elsewhere():
    function = torch.nn.functional.cross_entropy
    return Elsewhere(), lambda model, x: function(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

def few():
    return torch.nn.Embedding(8, 4), lambda model, x: -model(x).log_softmax(-1).gather(-1, x[..., None]).mean()
"""

RECIPES = """
from fp4engine import NVFP4Quantizer
from fp4engine.recipe import CustomRecipe, zoo

def mine():
    return zoo.make("nvfp4").replace(disable_rht=True)

def fails():
    raise KeyError("mine")

def within():
    return CustomRecipe(qfactory=lambda role: NVFP4Quantizer())

def factory(role):
    return NVFP4Quantizer()

def of_factory():
    return CustomRecipe(qfactory=factory)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with text, a function that makes a model, and recipes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(f"number {n * n % 997};" for n in range(3000)))
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "my_recipes.py").write_text(RECIPES)
    (tmp_path / "mine.json").write_text(zoo.make("nvfp4").replace(disable_stochastic_rounding=True).to_json())
    return tmp_path


SMALL = ("--model=my_model.py:small", "--data=text.txt", "--steps=6", "--batch=4", "--sequence=16", "--device=cpu")
QUICK = (*SMALL, "--recipes", "nvfp4", "--noise=0", "--sensitivity=0")


def compare(*words: str) -> int:
    return main(["compare", *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        compare(*words)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("fp4engine compare: ")
    return error


@pytest.mark.slow
def test_one_command_makes_runs_a_table_and_a_page(folder: Path, capsys, monkeypatch) -> None:
    words = (*SMALL, "--recipes", "nvfp4", "mine.json", "--seeds=3", "--out=out", "--tolerance=100%", "--jobs=1")
    assert compare(*words) == 0
    told = capsys.readouterr().out
    for label in ("baseline", "nvfp4", "mine", "baseline, again", "nvfp4, again"):
        assert f"| {label} | " in told
    page = (folder / "out" / "page.html").read_text()
    for said in (
        "nvfp4: within 100%", "Where the gap comes from", "By matrix product", "√3",
        "How much of each number survives", "on a B200", "What these runs cannot say", "gave the same bytes twice",
        "blocks.1.up", "bytes per parameter", "nats per byte",
    ):  # fmt: skip
        assert said in page, said
    assert "<script" not in page and not re.search(r'(src|href)="(?!#)', page) and "NaN" not in page
    rows = [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 3 + 2 and {row["label"] for row in rows} == {"baseline", "nvfp4", "mine"}
    files = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.jsonl") if "results" not in path.name}
    (folder / "mine.json").write_text(zoo.make("mxfp4").to_json())
    monkeypatch.setattr(command_line, "Runner", InThisProcess)
    assert compare(*words, "--sensitivity=0") == 0  # the changed recipe alone is run, and the old one stays
    after = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.jsonl") if "results" not in path.name}
    new = [path for path in after if path not in files and path.parent.name == "runs"]
    assert {path.name.split(".")[0] for path in new} == {"mine"} and len(new) == 3
    assert files.items() <= after.items()


def test_verdicts_are_exit_codes(folder: Path) -> None:
    for tolerance, code in (("0.001", 3), ("5", 0), ("2.5", 4)):
        for seed in range(3):
            for recipe, gap in ((None, 0.0), ("nvfp4", 0.015 + 0.005 * seed)):
                if tolerance == "0.001":
                    with Recorder("theirs", recipe=recipe, seed=seed) as run:
                        run.step(2.0 + 2 * gap)
        assert compare("--runs=theirs", f"--tolerance={tolerance}") == code
    page = (folder / "theirs" / "page.html").read_text()
    assert "cannot tell" in page and "seeds would tell" in page
    assert compare("--runs", "theirs", "--out=elsewhere") == 4 and (folder / "elsewhere" / "table.md").exists()


def test_pages_of_runs_say_what_a_token_is(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(command_line, "Runner", InThisProcess)
    assert compare(*QUICK, "--seeds=1", "--out=out") == 4 == compare("--runs=out/runs", "--out=again")
    for page in ((folder / name / "page.html").read_text() for name in ("out", "again")):
        assert "thousand bytes" in page and "nats per byte" in page and "bytes per parameter" in page
    counted: dict[str, Any] = {"tokens_per_step": 100}
    for number, options in enumerate((counted, {}, {**counted, "facts": {"unit": "byte"}})):
        for recipe in (None, "nvfp4"):
            with Recorder(f"{number}", recipe=recipe, **options) as run:
                run.step(2.0)
                run.step(1.0)
        assert compare(f"--runs={number}") == 4
    pages = [(folder / f"{number}" / "page.html").read_text() for number in range(3)]
    assert ["thousand tokens" in page for page in pages] == [True, False, False]
    assert ["thousand bytes" in page for page in pages] == [False, False, True]
    assert [page.count(">step</text>") for page in pages] == [0, 2, 0]
    assert ["nats per token" in page for page in pages] == [True, True, False]


def test_a_run_that_diverges_is_the_page_and_not_its_end(folder: Path, capsys) -> None:
    """NaN in the loss of one recipe: exit code 3, and all else is there."""
    for recipe, loss in ((None, 1.0), ("nvfp4", float("nan")), ("nvfp4_4over6", 1.001)):
        for seed in range(3):
            with Recorder("theirs", recipe=recipe, seed=seed) as run:
                run.note("gradient", norm=1.0, ratio=2.0)  # as a script may call what it notes
                run.step(3.0)
                run.validation(loss + 0.001 * seed)
    assert compare("--runs=theirs") == 3
    assert "nvfp4: diverged: the loss was not finite any more with 3 of 3 seeds" in capsys.readouterr().out
    assert "nvfp4_4over6: within 1%" in (folder / "theirs" / "page.html").read_text()


def test_a_plan_spends_nothing(folder: Path, capsys) -> None:
    assert compare(*SMALL, "--recipes", "nvfp4", "--plan", "--out=out", "--tolerance=2") == 0
    told = capsys.readouterr().out
    assert "8 runs of 6 steps of 64 bytes, 0 of them finished" in told
    assert "to tell a gap of 2% from none:" in told and "seeds" in told
    assert not (folder / "out" / "runs").exists()


def test_functions_of_a_file_elsewhere_reach_the_processes_that_train(folder: Path) -> None:
    """It was said that memory was wanting."""
    (folder / "elsewhere").mkdir()
    (folder / "my_recipes.py").rename(folder / "elsewhere" / "their_recipes.py")
    words = (*SMALL, "--recipes", "elsewhere/their_recipes.py:of_factory", "--noise=0", "--sensitivity=0")
    assert compare(*words, "--seeds=1", "--jobs=1") == 4


def test_fields_that_differ_are_compared_one_at_a_time(folder: Path, capsys) -> None:
    other = zoo.make("nvfp4").replace(disable_rht=True, disable_stochastic_rounding=True)
    (folder / "other.json").write_text(other.to_json())
    assert compare(*SMALL, "--ablate", "nvfp4", "other.json", "--plan", "--seeds=1") == 0
    told = capsys.readouterr().out
    assert "baseline, nvfp4, nvfp4 with disable_rht, nvfp4 with disable_stochastic_rounding, other," in told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--model=nowhere"], "there is no 'nowhere'"),
        (["--model=empty"], "there is no empty/config.json"),
        (["--model=my_model.py:none"], "has no 'none'"),
        (["--model=my_model.py:wrong"], "must return (model, loss)"),
        (["--model=my_model.py:fails"], "my_model.py:fails() fails: RuntimeError: no such weights"),
        (["--model=my_model.py:leaves"], "the code that was given has called sys.exit(0) ("),
        (["--model=my_model.py:sized"], "my_model.py:sized() fails: TypeError: sized() missing 1 required"),
        (["--model=my_model.py:frozen"], "no parameter of the model is trained"),
        (["--model=my_model.py:cached"], "my_model.py:cached() must make a new model each time"),
        (["--model=both_ways"], 'sees the tokens after it, which it is to predict; set "is_decoder": true there'),
        (["--model=xlm"], 'sees the tokens after it, which it is to predict; set "causal": true there'),
        (["--model=generation"], 'sees the tokens after it, which it is to predict; set "is_decoder": true there'),
        (["--model=xlnet"], "sees the tokens after it, which it is to predict; no setting of it changes that"),
        (["--model=pictures"], "has no vocab_size, so it is no language model; give module:function"),
        (["--recipes", "my_recipes.py:fails"], "my_recipes.py:fails() fails: KeyError: 'mine'"),
        (["--recipes", "my_recipes.py:within"], "must be at the top level of their file: AttributeError: Can't pickle"),
        (["--data=nowhere"], "--data: there is no file or folder nowhere"),
        (["--batch=5000"], "a step needs 5000; give more text"),
        (["--sequence=50000"], "and a window needs 50,001"),
        (["--recipes", "nvfp5"], "did you mean 'nvfp4'?"),
        (["--recipes", "none.json"], "cannot be read: No such file"),
        (["--recipes", "my_recipes.py:RECIPES"], "has no 'RECIPES'"),
        (["--recipes", "high_precision"], "at least one recipe other than high precision"),
        (["--recipes", "rules.json"], "rules that match no module"),
        (["--model=my_model.py:without_layers"], "--model: there is no nn.Linear below this Conv1d"),
        (["--model=my_model.py:lazy"], "--model: 0.weight is lazy"),
        (["--model=my_model.py:floats"], "floats() must return a list of integers of at least 0"),
        (["--model=my_model.py:below_zero"], "below_zero() must return a list of integers of at least 0"),
        (["--model=my_model.py:nested"], "nested() must return a list of integers of at least 0"),
        (["--model=my_model.py:encode_fails"], "encode of my_model.py:encode_fails() fails: KeyError: 'nu' ("),
        (["--model=gpt2"], "--sequence must be at most 8, the model's positions, got 16"),
        (["--model=roberta"], "--sequence must be at most 14, the model's positions, got 16"),
        (["--model=no_python.py:make"], "--model: no_python.py:make: cannot import 'no_python.py': SyntaxError: "),
        (["--lora=2"], "--lora: PEFT gives Network no adapters"),
        (["--data", ""], "--data must name files and folders, got ''"),
        (["--data=/dev/null"], "--data: /dev/null is neither a file nor a folder"),
        (["--data=.", "--out=."], "--data: what is written to --out . would be read as text there"),
        (["--recipes", "NVFP4"], "--recipes: a recipe is a row of the book"),
        (["--recipes", "NVFP4"], "did you mean 'nvfp4'?"),
        (["--ablate", "nvfp4", "nvfp5"], "--ablate: a recipe is a row of the book"),
        (["--keep-high-precision", "*"], "--keep-high-precision * leaves no layer to the recipes"),
        (["--keep-high-precision", "nothing"], "--keep-high-precision: pattern 'nothing' covers no nn.Linear of the m"),
        (["--lr=nan"], "--lr: must be a positive, finite number, got 'nan'"),
        (["--steps=0"], "--steps: must be an integer of at least 1"),
        (["--jobs=0"], "--jobs: must be an integer of at least 1"),
        (["--tolerance=-1%"], "--tolerance: must be a positive, finite number"),
        (["--model=tokens"], "transformers cannot read tokens/tokenizer.json: "),
        (["--model=garbage"], "transformers cannot read garbage/config.json: "),
        (["--out=text.txt"], "text.txt cannot be written to (File exists); give another --out"),
        (["--out=text.txt/a"], "text.txt/a cannot be written to (Not a directory); give another --out"),
        (
            ["--ablate", "nvfp4", "mine.json", "--recipes", "other/mine.json"],
            "must have different names, got 'mine' twice; rename a file",
        ),
        (["--ablate", "nvfp4", "nvfp4"], "there is nothing to change"),
        (["--runs", "nowhere"], "the page of runs that are there: leave out --model, --data, --recipes"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_spent(change: list[str], said: str, folder: Path, capsys) -> None:
    for name, file in (("empty", "none"), ("garbage", "config.json"), ("tokens", "tokenizer.json"), ("other", "none")):
        (folder / name).mkdir()
        (folder / name / file).write_text('{"a": 1}')
    CONFIGURATIONS["llama"]().save_pretrained(folder / "tokens")
    transformers.ViTConfig().save_pretrained(folder / "pictures")
    transformers.BertConfig().save_pretrained(folder / "both_ways")
    transformers.XLMConfig().save_pretrained(folder / "xlm")
    transformers.BertGenerationConfig().save_pretrained(folder / "generation")
    transformers.XLNetConfig().save_pretrained(folder / "xlnet")
    transformers.GPT2Config(n_positions=8).save_pretrained(folder / "gpt2")
    transformers.RobertaConfig(max_position_embeddings=16, is_decoder=True).save_pretrained(folder / "roberta")
    (folder / "no_python.py").write_text("def make(:")
    (folder / "other" / "mine.json").write_text(zoo.make("mxfp8").to_json())
    (folder / "rules.json").write_text(RuledRecipe(zoo.make("nvfp4"), (Rule(zoo.make("mxfp8"), "absent"),)).to_json())
    assert said in refused(capsys, *QUICK, *change)
    assert not list(folder.rglob("*.part"))


def test_a_page_of_runs_needs_their_folder(folder: Path, capsys) -> None:
    assert "there is no folder nowhere" in refused(capsys, "--runs", "nowhere")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file, tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"lack model.layers.1.mlp.up_proj.w"),
        (
            lambda file, tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}),
            "lack lm_head.weight of this shape",
        ),
        (lambda file, tensors: file.write_bytes(b""), "transformers cannot load .*/model: SafetensorError: "),
    ],
)
def test_weights_that_are_not_there_are_not_drawn(change: Any, said: str, folder: Path) -> None:
    """By transformers, which tells it to the log of a process that trains; the page said that the weights were used."""
    model = transformers.LlamaForCausalLM(CONFIGURATIONS["llama"]())
    model.config.save_pretrained(folder / "model")
    file, tensors = folder / "model" / "model.safetensors", model.state_dict()
    change(file, tensors)
    if not file.exists():
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=said):
        source_of(str(file.parent)).make(torch.float32)


def test_models_are_known_alike_in_every_process(folder: Path, capsys, monkeypatch) -> None:
    with Runner(
        Places(folder, folder), device="cpu", at_once=1
    ) as runner:  # for all, as a process takes seconds to start

        def shared(places: Places, **options: Any) -> AbstractContextManager[Runner]:
            runner.places = places
            return nullcontext(runner)

        monkeypatch.setattr(command_line, "Runner", shared)
        for name in ("by_values", "by_part", "built"):
            assert compare(*QUICK, f"--model=my_model.py:{name}", "--seeds=1", f"--out={name}") == 4
            assert f"page: {name}" in capsys.readouterr().out
            assert len(list((folder / name / "runs").glob("*.jsonl"))) == 2


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("rows", "a tensor of shape [3]"),
        ("no_gradient", "a tensor of shape [] without a gradient"),
        ("no_tensor", "a float"),
        ("mapping", "a dict"),
    ],
)
def test_a_loss_is_one_number_with_a_gradient(name: str, got: str, folder: Path) -> None:
    source = source_of(f"my_model.py:{name}")
    with pytest.raises(
        InputError, match=rf"must be one number, in nats per token, with a gradient; got {re.escape(got)}"
    ):
        source.loss(source.make(torch.float32), torch.zeros(2, 5, dtype=torch.int64))
    with torch.no_grad():
        if name == "no_gradient":
            source.loss(source.make(torch.float32), torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.parametrize("compiled", [(), ("--compile",)], ids=["eager", "compiled"])
def test_a_token_beyond_the_models_rows_or_output_is_named(compiled: tuple[str, ...], folder: Path) -> None:
    task = task_of(parsed("--model=my_model.py:few", *compiled), folder / "out")
    compute = task.compute(task.model())
    for token, error in ((7, "RuntimeError: index 7"), (8, "IndexError: index out of")):
        said = rf"the loss of my_model.py:few\(\) fails on a batch whose largest token id is {token} \({error} .*"
        with pytest.raises(InputError, match=rf"{said}an embedding needs {token + 1} rows or more, and an output as"):
            compute(torch.full((2, 5), token))


DIGESTS = """
import os
from fp4engine.compare.task import source_of

for comment in ("", "", "# scaled\\n"):
    with open("their_layers.py", "a") as file:
        file.write(comment)
    process = os.fork()  # which has imported neither file
    if process == 0:
        print(source_of("their_model:model").digest(), flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


def test_a_model_is_known_by_all_files_that_its_classes_are_in(folder: Path) -> None:
    (folder / "their_layers.py").write_text("import torch\nclass Layer(torch.nn.Linear):\n    pass\n")
    (folder / "their_model.py").write_text(
        "from their_layers import Layer\ndef model():\n    return Layer(4, 4), lambda model, x: model(x).sum()\n"
    )
    done = subprocess.run([sys.executable, "-c", DIGESTS], capture_output=True, text=True, check=True)
    digests = done.stdout.split()
    assert digests[0] == digests[1] != digests[2]


def test_a_recipe_that_no_product_followed_has_not_been_tried(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command_line, "Runner", InThisProcess)
    assert compare(*QUICK, "--model=my_model.py:elsewhere", "--tolerance=100%") == 4
    told = capsys.readouterr().out  # which a schedule that has not begun to cast gets, too
    assert "- nvfp4: did not run: no product of the model was quantized; it" in told
    assert "linear layers, or the recipe casts nothing in these steps." in told


def test_runs_say_what_the_model_computes_in(folder: Path) -> None:
    task = task_of(parsed("--model=my_model.py:in_bfloat16"), folder / "out")
    assert Training(task, Run("baseline", HIGH_PRECISION, 0)).high_precision == "BF16"
    task = task_of(parsed(), folder / "out")
    assert Training(task, Run("baseline", HIGH_PRECISION, 0)).high_precision == "FP32"


def test_a_model_without_a_known_output_layer_is_told_so(folder: Path, capsys) -> None:
    for words, told in (((), False), (("--model=my_model.py:named_otherwise",), True)):
        check(task_of(parsed(*words), folder / "out"), {})
        assert ("recipes reach all layers; --keep-high-precision" in capsys.readouterr().err) == told


def test_rules_of_a_later_phase_are_checked_before_anything_is_spent(folder: Path) -> None:
    """Rules that matched nothing ended a run at the step at which their phase began."""
    task = task_of(parsed(), folder / "out")
    for step, meets in ((task.steps - 1, pytest.raises(InputError, match="late: rules that match no module: ")),
                        (task.steps, nullcontext())):  # fmt: skip
        rules = RuledRecipe(zoo.make("nvfp4"), (Rule(HIGH_PRECISION, "absent"),))
        with meets:
            check(task, {"late": ScheduledRecipe(((0, HIGH_PRECISION), (step, rules)))})


def test_a_step_is_estimated_for_each_phase_of_a_schedule(folder: Path) -> None:
    """The first one's estimate stood for all of them."""
    task, nvfp4 = task_of(parsed(), folder / "out"), zoo.make("nvfp4")
    late = ScheduledRecipe(((0, HIGH_PRECISION), (task.steps - 1, nvfp4), (task.steps, HIGH_PRECISION)))
    found = estimates(task, {"late": late, "one": ScheduledRecipe(((0, nvfp4),)), "high": HIGH_PRECISION})
    assert list(found) == ["BF16", "late from step 0 on", f"late from step {task.steps - 1} on", "one", "high"]
    peaks = [step.peak for step in found.values() if isinstance(step, Estimate)]
    assert peaks[1] == peaks[4] != peaks[2] == peaks[3]


def parsed(*words: str) -> argparse.Namespace:
    return make_parser().parse_args(["compare", *QUICK, *words])


def test_two_commands_do_not_share_a_folder(folder: Path, capsys) -> None:
    """A page of runs that are there is written into one, too."""
    for recipe in (None, "nvfp4"):
        with Recorder("out", recipe=recipe) as run:
            run.step(1.0)
    with alone_in(folder / "out", ""):
        for words in ((*QUICK, "--out=out"), ("--runs=out",)):
            said = refused(capsys, *words)
            assert "out is in use by another process (number " in said and "or give another --out" in said
        assert not (folder / "out" / "page.html").exists()
        assert compare("--runs=out", "--out=elsewhere") == 4


def test_a_folder_that_takes_no_locks_is_named(folder: Path, capsys, monkeypatch) -> None:
    def without_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    said = refused(capsys, *QUICK, "--out=out")
    assert said.endswith("out cannot be locked (Function not implemented); give another --out\n")


@pytest.fixture
def command(folder: Path) -> Any:
    """Starts the command as a process of its own."""

    def start(*words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), str(folder)])}
        whole = [sys.executable, "-m", "fp4engine", "compare", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(whole, env=environment, cwd=folder, text=True, **pipes)

    return start


def rows_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """By run, all but times."""
    return {
        path.name: [row for row in read_rows(path)[1:] if row.get("kind") != "end"]
        for path in sorted((out / "runs").glob("*.jsonl"))
    }


LONG = (*QUICK, "--steps=40", "--seeds=1", "--save-every=0.001")


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bytes(folder: Path, command, request, monkeypatch) -> None:
    monkeypatch.setattr(command_line, "Runner", InThisProcess)
    assert compare(*LONG, "--out=whole") == 4  # one seed tells nothing
    wanted = rows_of(folder / "whole")
    assert len(wanted) == 2
    for kill in range(max(1, request.config.getoption("--kills") // 3)):  # a start takes seconds
        process = command(*LONG, "--out=killed")
        deadline = time.time() + 120
        while time.time() < deadline and process.poll() is None:
            parts = list((folder / "killed" / "runs").glob("*.part"))
            if any(sum("loss" in row for row in read_rows(part)) > 8 * (kill + 1) for part in parts):
                break
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=60)  # until the processes that train have left too, and nobody holds the pipe
    assert compare(*LONG, "--out=killed") == 4
    assert rows_of(folder / "killed") == wanted
    assert not list((folder / "killed").rglob("*.part")) and not list((folder / "killed" / "unfinished").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_what_is_under_way(folder: Path, command, number: signal.Signals) -> None:
    process = command(*QUICK, "--steps=100000", "--seeds=1", "--out=out", "--jobs=1")
    deadline = time.time() + 120
    while time.time() < deadline and not list((folder / "out" / "runs").glob("*.part")):
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal and a cluster's scheduler do
    told, _ = process.communicate()
    assert process.returncode == 130 and "2 runs are left, 1 of them begun: the same command continues" in told
    assert list((folder / "out" / "unfinished").glob("*/step-*"))


@pytest.mark.slow
def test_failing_runs_stop_no_other_and_are_told_in_one_line_with_that_of_their_error(folder: Path, capsys) -> None:
    """Whatever the kind of the error: code that left with 0 made that the verdict."""
    words = "--model=my_model.py:fails_in_a_region", "--seeds=3", "--out=out", "--jobs=1"
    told = refused(capsys, *QUICK, *words)
    assert "3 of 6 runs failed, and what finished is kept: nvfp4, seed 0 and nvfp4, seed 1: Odd: of two parts" in told
    assert "; nvfp4, seed 2: SystemExit: 0" in told
    line = 1 + MODEL[: MODEL.index("# line of the errors")].count("\n")
    assert told.count(f"my_model.py, line {line})") == 2
    assert {result.label for result in read_folders([folder / "out" / "runs"])} == {"baseline"}


@pytest.mark.parametrize(("name", "lora"), [("llama", 0), ("qwen3_moe", 0), ("llama", 2)])
def test_models_of_transformers_train_on_bytes(name: str, lora: int, folder: Path, one_thread) -> None:
    config = CONFIGURATIONS[name]()
    config.vocab_size = 260
    config.save_pretrained(folder / "model")
    how, encode = source_of("model/config.json").encoding()
    text = prepare([Path("text.txt")], encode, how, 1000, 17, "text", folder / "data")
    sizes: dict[str, Any] = {"steps": 2, "batch": 4, "sequence": 16, "learning_rate": 1e-3, "evaluate_every": 1}
    task = TextTask(name="model/config.json", text=text, lora=lora, **sizes)
    first, second = (read(trained(task, Run("nvfp4", zoo.make("nvfp4"), 0), folder / place)) for place in "ab")
    assert how == "bytes" and first.losses == second.losses and first.end["repeats"]
    assert first.end["fp4_share"] > 0.3 and not any(name.endswith("lm_head") for name in task.setting())
    assert isinstance(estimates(task, {})["BF16"], Estimate)
    with torch.device("meta"):
        model = task.model()
    trains = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in trains) if lora else len(trains) == len(list(model.parameters()))
    assert checkpoint.changing(model).keys() == set(trains)
