"""The command line: what it prints, and one line with exit code 2 for what it cannot use."""

import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm

import fp4engine
from fp4engine import estimate, inspect
from fp4engine.cli import COMMANDS, main
from fp4engine.recipe import LinearRecipe, Rule, RuledRecipe, ScheduledRecipe, recipe_from_json, zoo


def test_every_command_says_what_it_does(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for module in COMMANDS:
        assert module.__doc__.splitlines()[0].split()[0] in text


def test_commands_run_where_python_leaves_docstrings_out(monkeypatch, capsys) -> None:
    for module in COMMANDS:
        monkeypatch.setattr(module, "__doc__", None)  # as under -OO
    assert main(["recipes", "nvfp4"]) == 0 and "NVFP4BlockScaling" in capsys.readouterr().out


def test_recipes_lists_the_book_and_prints_one_as_json(capsys) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in zoo.ZOO)
    assert "by how many percent a small GPT's loss ended above BF16's" in listed
    assert main(["recipes", "quartet2", "--json"]) == 0
    assert recipe_from_json(capsys.readouterr().out) == zoo.make("quartet2")
    assert main(["recipes", "quartet2"]) == 0
    assert ", made of the rowwise operand" in capsys.readouterr().out
    assert main(["recipes", "nvfp4_fresh"]) == 0
    assert "input columnwise: e2m1 1x16 away rht16*, made of the saved tensor" in capsys.readouterr().out


def test_a_recipe_whose_backward_is_overridden_is_shown_without_the_casts_that_do_not_run(monkeypatch, capsys) -> None:
    for override, source in (("high_precision", ""), ("dequantized", ", made of the rowwise operand")):
        monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", override)
        assert main(["recipes", "nvfp4"]) == 0
        shown = capsys.readouterr().out.splitlines()
        (fprop,) = (line for line in shown if "input rowwise: " in line)
        assert fprop.endswith("e2m1 1x16")
        for operand in ("weight columnwise", "input columnwise"):
            assert any(line.endswith(f"{operand}: high precision{source}") for line in shown)
        for operand in ("grad_output rowwise", "grad_output columnwise"):
            assert any(line.endswith(f"{operand}: high precision") for line in shown)
    monkeypatch.delenv("NVTE_BACKWARD_OVERRIDE")
    assert main(["recipes", "nvfp4_forward_high_precision_backward"]) == 0
    assert "weight columnwise: high precision, made of the rowwise operand" in capsys.readouterr().out


def test_a_terminal_that_lacks_a_sign_gets_its_number(tmp_path) -> None:
    (tmp_path / "größe.json").write_text(zoo.make("nvfp4").to_json())
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    environment = {**os.environ, **locale}
    command = [sys.executable, "-m", "fp4engine", "recipes", str(tmp_path / "größe.json"), "nvfp4"]
    told = subprocess.run(command, env=environment, capture_output=True)
    assert (told.returncode, told.stderr) == (0, b"")
    assert b"gr\\udcc3" in told.stdout and b"e.json and nvfp4 are the same recipe" in told.stdout


@pytest.mark.parametrize("buffering", [1, 1 << 16])
@pytest.mark.parametrize("code", [2, 141])
def test_an_answer_that_nobody_gets_is_no_yes(code: int, buffering: int, monkeypatch) -> None:
    """Python's own code is 120 where the end of the process is what writes."""
    if code == 2:
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    output = os.fdopen(writing, "w", buffering, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", output)
    try:
        left = main(["recipes"])
    except SystemExit as ended:
        left = ended.code
    assert left == code and (sys.stdout is None or not sys.stdout.flush())  # as Python does when it ends
    with suppress(OSError):
        output.close()


def test_an_error_that_nobody_has_foreseen_is_no_answer(monkeypatch, capsys) -> None:
    """Python's exit code 1 would say of an estimate that the model does not fit."""
    monkeypatch.setattr("fp4engine.cli.estimate.estimate", lambda *_, **__: [].pop())
    with pytest.raises(SystemExit, match="70"):
        main(sized())
    told = capsys.readouterr().err
    assert "IndexError: pop from empty list" in told and told.endswith("a fault; please report it\n")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB")])
def test_memory_that_is_not_there_is_no_fault(error, monkeypatch, capsys) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fp4engine.cli.estimate.estimate", full)
    with pytest.raises(SystemExit, match="2"):
        main(sized())
    told = capsys.readouterr().err
    assert told.startswith("fp4engine estimate: not enough memory: ") and told.count("\n") == 1


def test_commands_run_without_what_only_export_needs(monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.startswith("fp4engine.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["recipes", "quartet2"]) == 0
    with pytest.raises(SystemExit) as left:
        main(["export", "model", "there"])
    assert left.value.code == 2
    assert "pip install 'fp4engine[export]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_recipe_can_be_shown(name: str, capsys) -> None:
    assert main(["recipes", name]) == 0
    assert name in capsys.readouterr().out


def test_a_config_of_another_family_is_built_by_transformers(tmp_path, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("gemma", **sizes, num_key_value_heads=2, head_dim=16, vocab_size=128)
    config.save_pretrained(tmp_path)
    command = ["estimate", "--config", str(tmp_path), "--gpu", "L4", "--sequence", "32"]
    assert main(command) == 0
    assert f"{tmp_path.name} in nvfp4, 0.07M parameters in float32" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--lora-rank", "1", "--fsdp", "2", "--checkpointing"])
    assert "--checkpointing and --fsdp and --lora-rank must be left out with" in capsys.readouterr().err


def sized(**sizes: Any) -> list[str]:
    """The words that estimate a decoder of these sizes, and of small ones for the rest."""
    sizes = {"layers": 2, "width": 64, "heads": 1, "ffn": 64, "vocabulary": 96} | sizes
    return ["estimate", *(word for name, value in sizes.items() for word in (f"--{name}", str(value)))]


def test_an_estimate_by_a_schedule_says_of_which_step_it_is(tmp_path, capsys) -> None:
    file = tmp_path / "mine.json"
    for recipe, told in ((ScheduledRecipe(((0, LinearRecipe()), (9, zoo.make("nvfp4")))), "mine.json at step 0, "),
                         (RuledRecipe(zoo.make("nvfp4")), "mine.json, ")):  # fmt: skip
        file.write_text(recipe.to_json())
        assert main([*sized(), "--recipe", str(file)]) == 0
        assert told in capsys.readouterr().out.splitlines()[0]


BAD = {
    "no command": [],
    "no such command": ["frobnicate"],
    "no such recipe": ["recipes", "nvfp5"],
    "json of all": ["recipes", "--json"],
    "no such device": ["doctor", "--device", "cuda:99"],
    "no device at all": ["doctor", "--device", "abacus"],
    "no process": ["doctor", "--device", "cpu", "--jobs", "0"],
    "no such record": ["report", "/nowhere"],
    "an empty word for a record": ["report", ""],
    "an empty word for a config": ["estimate", "--config", ""],
    "an empty word for a model": ["export", "", "/nowhere"],
    "an empty word for a checkpoint": ["export", "/nowhere", ""],
    "no model": ["estimate"],
    "half a model": ["estimate", "--layers", "3"],
    "no such model": ["estimate", "--model", "Llama-9"],
    "two models": ["estimate", "--model", "Llama-3-8B", "--config", "/nowhere"],
    "a model and a size": ["estimate", "--model", "Llama-3-8B", "--layers", "3"],
    "no such recipe to estimate": ["estimate", "--model", "Llama-3-8B", "--recipe", "nvfp5"],
    "heads that do not divide": sized(heads=3),
    "an odd head": sized(width=9, heads=3),
    "more than can be counted": ["estimate", "--model", "Llama-3-8B", "--batch", "9" * 400],
    "more tokens than can be counted": [
        "estimate",
        "--model",
        "Llama-3-8B",
        *("--batch", "16777216", "--sequence", "16777216"),
    ],
    "a size that cannot be counted": sized(vocabulary="9" * 20),
    "parameters that are no number": ["recommend", "H100", "big"],
    "no parameters": ["recommend", "H100", "-1B"],
    "not a number of parameters": ["recommend", "H100", "nan"],
    "no such risk": ["recommend", "H100", "8B", "--risk", "all"],
    "no such config": ["estimate", "--config", "/nowhere"],
    "no such GPU": ["estimate", "--gpu", "H9000"],
    "words for numbers": ["estimate", "--batch", "many"],
    "negative": sized(vocabulary=-3),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    streams = capsys.readouterr()
    assert left.value.code == 2
    assert streams.out == ""
    assert streams.err.startswith("fp4engine") and streams.err.count("\n") == 1
    assert "" not in arguments or "must be a path, got ''" in streams.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ('{"model_type": "nonsense"}', "`nonsense`"),
        ('{"model_type": "vit"}', "model_type 'vit'"),
        ('{"model_type": "llama", "hidden_size": 64}', "num_hidden_layers"),
        ("[]", "must hold a JSON object, got []"),
        ('{"model_type": ["llama"]}', "model_type"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(content: str, said: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as left:
        main(["estimate", "--config", str(path)])
    error = capsys.readouterr().err
    assert left.value.code == 2 and said in error and error.count("\n") == 1


RUN = b'{"step": 0, "kind": "run", "every": 1, "world_size": 1}\n'


def operand_row(**changed: Any) -> bytes:
    row = {"step": 0, "kind": "operand", "layer": "fc", "gemm": "fprop", "role": "input", "side": "rowwise"}
    numbers = ("amax", "sqnr_db", "zeros", "rounded_to_zero", "saturated", "scale_underflow", "scale_overflow")
    row |= dict.fromkeys((*numbers, "scale_spread_octaves", "scale_range_octaves"))
    row |= {"cast": "e2m1 1x16", "nonfinite": 0, "codes": [1] * 16, "scale_codes": {}, "worst": [], **changed}
    return json.dumps(row).encode() + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json\n",
        b'{"kind": "run"}\n',
        b'{"step": 0, "kind": "tensor"}\n',
        b"\xa4\xff\n",
        b"[" * 100_000,
        b'{"step": 0, "kind": "run"}\n',
        RUN + b'{"step": 0, "kind": "surprise", "layer": "fc"}\n',
        RUN + b'{"step": 0, "kind": "operand"}\n',
        RUN + b'{"step": 0, "kind": "gemm", "layer": "fc", "gemm": "fprop", "snr_db": "much"}\n',
        RUN + b'{"step": 0, "kind": "gemm", "layer": "fc", "gemm": "fprop", "snr_db": NaN}\n',
        RUN + b'{"step": true, "kind": "refusal", "layer": "fc", "reason": "none"}\n',
        RUN + operand_row(cast="e9m9 1x16"),
        RUN + operand_row(codes=[1] * 17),
        RUN + operand_row(codes=[10**400]),
        RUN + operand_row(amax=-(10**400)),
        RUN + b'{"step": 0, "kind": "tensor", "layer": "fc", "role": "input", "channels": [[1]]}\n',
        RUN.replace(b"}", b', "roles": {"fc": "linear"}}'),
    ],
)
def test_a_record_that_cannot_be_read_is_named(content: bytes, tmp_path: Path, capsys) -> None:
    (tmp_path / "record.jsonl").write_bytes(content)
    with pytest.raises(SystemExit) as left:
        main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1 and "record.jsonl" in error


def test_a_record_in_which_no_layer_was_seen_says_why(tmp_path: Path, capsys) -> None:
    refusal = b'{"step": 0, "kind": "refusal", "layer": "fc", "reason": "it computed in high precision"}\n'
    for rows, said in (
        (b"", "the record has no recorded step"),
        (refusal, "of 'fc' it says: it computed in high prec"),
    ):
        (tmp_path / "record.jsonl").write_bytes(RUN + rows)
        with pytest.raises(SystemExit):
            main(["report", str(tmp_path)])
        assert said in capsys.readouterr().err


def test_a_record_is_held_against_rules_by_the_names_that_recipes_see(tmp_path: Path, capsys) -> None:
    model = torch.nn.Sequential(fp4engine.GroupedLinear(2, 32, 32, name="experts"), fp4engine.Linear(32, 16, name="b"))
    rules = {"experts": Rule(zoo.make("mxfp8"), "experts"), "narrow": Rule(zoo.make("mxfp8"), narrower_than=32)}
    for name, rule in rules.items():
        recipe = RuledRecipe(zoo.make("nvfp4"), (rule,))
        (tmp_path / f"{name}.json").write_text(recipe.to_json())
        with inspect.record(torch.nn.DataParallel(model), tmp_path / name, every=1, optimizer="by hand") as recorder:
            with fp4engine.autocast(recipe=recipe):
                model[1](model[0](torch.randn(8, 32), [4, 4])).sum().backward()
            recorder.step()
    for name in rules:
        for other in rules:
            code = main(["report", str(tmp_path / name), "--recipe", str(tmp_path / f"{other}.json")])
            assert code == (name != other), capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(tmp_path: Path, capsys) -> None:
    record, shown = tmp_path / "record.jsonl", warnings.showwarning
    record.write_bytes(RUN + operand_row() + b'{"step": 1')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"fp4engine report: {record} ends within line 3, which is left out\n"
    assert warnings.showwarning is shown


def test_records_side_by_side(tmp_path: Path, capsys) -> None:
    row = {"step": 0, "kind": "gemm", "layer": "fc", "gemm": "fprop", "snr_db": 20.0}
    for name in ("a/run", "b/run", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "record.jsonl").write_bytes(RUN + json.dumps(row).encode() + b"\n")
    assert main(["report", str(tmp_path / "a/run"), str(tmp_path / "c")]) == 0
    page = tmp_path / "a/run/report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "<h1>Runs run and c</h1>" in page.read_text() and 'data-line="c:2"' in page.read_text()
    assert main(["report", str(tmp_path / "a/run"), str(tmp_path / "b/run"), "--out", str(tmp_path / "both.html")]) == 0
    assert f'data-line="{tmp_path / "b/run"}:2"' in (tmp_path / "both.html").read_text()
    for records, said in (("cc", "records must be different ones"), ("ca", "--out must be another file")):
        with pytest.raises(SystemExit):
            chosen = [str(tmp_path / {"a": "a/run"}.get(name, name)) for name in records]
            main(["report", *chosen, "--out", str(tmp_path / "c/record.jsonl")])
        assert said in capsys.readouterr().err


def test_a_report_that_cannot_be_written_leaves_the_files_alone(tmp_path: Path, capsys, monkeypatch) -> None:
    row = {"step": 0, "kind": "gemm", "layer": "fc", "gemm": "fprop", "snr_db": 20.0}
    record, page = tmp_path / "record.jsonl", tmp_path / "report.html"
    record.write_bytes(RUN + json.dumps(row).encode() + b"\n")
    page.write_text("an older page")
    before = record.read_bytes()
    for source in (tmp_path, record):
        with pytest.raises(SystemExit) as left:
            main(["report", str(source), "--out", str(record)])
        assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1

    for place in (tmp_path, tmp_path / "nowhere" / "page.html"):
        with pytest.raises(SystemExit) as left:
            main(["report", str(record), "--out", str(place)])
        assert "--out must be a file in a folder that is there, got " in capsys.readouterr().err

    def fill(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError("disk full")

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Path, "write_bytes", fill)
        main(["report", str(tmp_path)])
    assert page.read_text() == "an older page" and record.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.jsonl", "report.html"]
    assert main(["report", str(tmp_path), "--title", "a folder called \udcff"]) == 0
    assert r"a folder called \udcff" in page.read_text()
    assert main(["report", str(tmp_path), "--out", os.devnull]) == 0
    reading, writing = os.pipe()  # as a shell makes for --out >(gzip > page.html.gz)
    with os.fdopen(reading, encoding="utf-8") as reader:
        assert main(["report", str(tmp_path), "--out", f"/dev/fd/{writing}"]) == 0
        os.close(writing)
        assert reader.read() == page.read_text().replace(r"a folder called \udcff", f"Run {tmp_path.name}")


@pytest.mark.filterwarnings("ignore")  # what a library warns of when it is first used here would be on standard error
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_estimate_shows_on_terminals_how_far_it_is(checkpointing, monkeypatch, capsys) -> None:
    words = sized(layers=5, heads=2, ffn=128, vocabulary=64, sequence=32) + ["--checkpointing"] * checkpointing
    assert main(words) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    every_step = partial(tqdm.tqdm, mininterval=0, miniters=1)  # however fast the steps follow each other
    monkeypatch.setattr(tqdm, "tqdm", every_step)
    assert main(words) == 0
    shown = capsys.readouterr()
    blocks = 10 if checkpointing else 5
    assert f" {blocks}/{blocks} " in shown.err and f" {blocks + 1}/" not in shown.err
    assert shown.out == quiet.out
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(words) == 0
    assert capsys.readouterr() == quiet


def test_estimate_answers_in_its_first_line_and_by_its_exit_code(tmp_path: Path, capsys) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "llama", "num_key_value_heads": 1, "vocab_size": 96, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["estimate", "--config", str(tmp_path), "--sequence", "64", "--lora-rank", "4"]) == 0
    assert ": fits, peak " in capsys.readouterr().out.splitlines()[0]
    assert main([*sized(layers=1, vocabulary=5_000_000, sequence=2048), "--gpu", "RTX-4090"]) == 1
    assert ": does not fit, peak " in capsys.readouterr().out.splitlines()[0]
    assert estimate.GPUS["RTX-4090"].memory == 24 * 2**30


def test_one_line_answers_whether_a_model_fits_on_one_24_gib_card_with_lora(capsys) -> None:
    words = ["--model", "Llama-3.2-1B", "--lora-rank", "16", "--checkpointing", "--gpu", "RTX-4090"]
    assert main(["estimate", *words]) == 0
    answer, *rest = capsys.readouterr().out.splitlines()
    assert answer.startswith("Llama-3.2-1B in nvfp4, 1.24B parameters in bf16, 1 x 2048 tokens, LoRA of rank 16")
    assert re.search(r": fits, peak \d\.\d\d GiB of 24\.00 GiB on RTX-4090$", answer)
    assert rest[0].endswith("GiB  (1,235,814,400 frozen, 11,272,192 of adapters trained)")
    assert any("LoRA is computed and not compared with a run" in line for line in rest)
