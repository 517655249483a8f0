"""The command line's part: arguments, files in, files out, refusals in one line."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4engine
from fp4engine import cli
from fp4engine.export import ServedCheckpoint, TensorFolder, calibrate, export_checkpoint, writer
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, RuledRecipe, ScheduledRecipe
from tests.tiny import head, llama, served_architecture


def run(*words) -> int:
    try:
        return cli.main(["export", *map(str, words)])
    except SystemExit as left:
        return left.code


@pytest.fixture
def source(tmp_path):
    model = llama(num_hidden_layers=1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "tokenizer.json").write_text("{}")
    return model


def test_from_directory_to_directory(tmp_path, source, capsys) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    fp4engine.convert(source, NVFP4BlockScaling(), keep_high_precision=["lm_head"])
    amaxes = calibrate(source, [torch.arange(12)[None]], progress=False)
    (tmp_path / "amaxes.json").write_text(json.dumps(amaxes))
    (tmp_path / "recipe.json").write_text(NVFP4BlockScaling().to_json())
    words = ("--verify-files", "--inputs", tmp_path / "amaxes.json", "--recipe", tmp_path / "recipe.json")
    assert run(tmp_path / "trained", tmp_path / "served", *words) == 0
    said = capsys.readouterr().out
    assert "7 weights in codes" in said and "logits" not in said
    words = ("--inputs", "high_precision", "--no-shared-scales", "--verify")
    assert run(tmp_path / "trained", tmp_path / "apart", *words) == 2
    assert "one module keeps one; nothing was written: force=True (--force)" in capsys.readouterr().err
    assert run(tmp_path / "trained", tmp_path / "apart", *words, "--force") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers")]
    assert "loads and agrees: its logits in FP32 differ by 0.0e+00 (of 1 blocks, model.layers.0 by most" in line
    checkpoint = ServedCheckpoint(tmp_path / "served")
    assert len(checkpoint.layers) == 7 and (tmp_path / "served" / "tokenizer.json").read_text() == "{}"
    layer = source.model.layers[0].mlp.down_proj
    operand = fp4engine.NVFP4Quantizer(with_2d_quantization=True).quantize(layer.weight.detach()).rowwise
    assert torch.equal(checkpoint.operand("model.layers.0.mlp.down_proj")[0], operand.codes)


def test_the_files_of_a_tokenizer_go_along_whatever_they_are_called(tmp_path, source) -> None:
    (tmp_path / "trained" / "tokenizer.json").unlink()
    (tmp_path / "trained" / "tokenizer_of_another_kind").mkdir()
    assert run(tmp_path / "trained", tmp_path / "without", "--inputs", "dynamic") == 0
    (tmp_path / "trained" / "vocab.json").write_text("{}")
    assert run(tmp_path / "trained", tmp_path / "with", "--inputs", "dynamic") == 0
    there = [(tmp_path / name / "vocab.json").exists() for name in ("without", "with")]
    assert there == [False, True]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "whisper", "gpt2"])
def test_the_head_is_kept_whatever_it_is_called(tmp_path, name) -> None:
    model = served_architecture(name)
    model.save_pretrained(tmp_path / "trained")
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "dynamic", "--force") == 0
    checkpoint = ServedCheckpoint(tmp_path / "served")
    assert checkpoint.layers and set(head(model)) <= set(checkpoint.ignored)


def test_a_nan_is_refused_in_what_stays_in_high_precision_too(tmp_path, source, capsys) -> None:
    path = tmp_path / "trained" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "dynamic") == 2
    error = capsys.readouterr().err
    assert "'model.norm.weight' holds a NaN" in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"trained"}


@pytest.mark.parametrize(
    ("change", "words", "complaint"),
    [
        ({}, [], "(on the command line --inputs) 'dynamic', or 'high_precision'"),
        ({}, ["--inputs", "gone.json"], "--inputs must be 'high_precision', 'dynamic' or a JSON file, got 'gone.json'"),
        ({}, ["--recipe", "nvfp5"], "a JSON file, or module:function, got 'nvfp5'; did you mean 'nvfp4'?"),
        ({}, ["--recipe", "mxfp6", "--inputs", "dynamic"], "(on the command line --requantize) casts it"),
        ({}, ["--keep-high-precision", "head"], "'head' covers no nn.Linear"),
        ({"architectures": ["Path"]}, ["--inputs", "dynamic"], "names no architecture"),
        ({"architectures": None}, ["--inputs", "dynamic"], "names no architecture"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, ["--inputs", "dynamic"], "which is never run"),
        ({"hidden_size": 64}, ["--inputs", "dynamic"], "has shape"),
        ({"architectures": [5]}, ["--inputs", "dynamic"], "names no architecture"),
        ({"architectures": ["GPT2LMHeadModel"]}, ["--inputs", "dynamic"], "describes no GPT2LMHeadModel that"),
        ({"model_type": "bert"}, ["--inputs", "dynamic"], "its model_type is 'bert', which is another model's"),
        ({"model_type": "evil"}, ["--inputs", "dynamic"], "describes no LlamaForCausalLM that"),
        ({"hidden_size": "32"}, ["--inputs", "dynamic"], "'hidden_size' expected int"),
        ({"hidden_size": -32}, ["--inputs", "dynamic"], "negative dimension"),
        ({"num_attention_heads": 0}, ["--inputs", "dynamic"], "ZeroDivisionError"),
        ({"num_hidden_layers": None}, ["--inputs", "dynamic"], "'num_hidden_layers' expected int"),
        ({"num_hidden_layers": 10**9}, ["--inputs", "dynamic"], "1000000000 layers, and the files hold 11 tensors"),
        ({"vocab_size": 1 << 62}, ["--inputs", "dynamic"], "describes no LlamaForCausalLM that"),
        ({"hidden_act": "evil"}, ["--inputs", "dynamic"], "KeyError: 'evil'"),
        ({"quantization_config": {"quant_method": "fp8"}}, ["--inputs", "dynamic"], "are quantized already"),
    ],
)
def test_refusals(tmp_path, source, capsys, change, words, complaint) -> None:
    path = tmp_path / "trained" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run(tmp_path / "trained", tmp_path / "served", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"trained"}


def test_a_directory_inside_the_source_is_refused(tmp_path, source, capsys) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "trained")
    before = sorted((tmp_path / "trained").rglob("*"))
    for inside in (tmp_path / "trained" / "served", tmp_path / "link" / "a" / "served"):
        assert run(tmp_path / "trained", inside, "--inputs", "dynamic") == 2
        assert "directory must not lie inside the source" in capsys.readouterr().err
    assert sorted((tmp_path / "trained").rglob("*")) == before


def test_a_model_that_cannot_be_is_one_line_without_warnings(tmp_path, source, capsys) -> None:
    path = tmp_path / "trained" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 0}))
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "dynamic") == 2
    error = capsys.readouterr().err
    assert "has shape" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("signum", "handler"),
    [
        pytest.param(signal.SIGTERM, signal.SIG_IGN, id="terminated"),
        pytest.param(signal.SIGINT, signal.default_int_handler, id="interrupted"),  # a job in the background ignores it
    ],
)
def test_a_stopped_export_cleans_up_and_says_so_in_one_line(
    tmp_path, source, capsys, monkeypatch, signum, handler
) -> None:
    monkeypatch.setattr(writer, "save_file", lambda *_, **__: signal.raise_signal(signum))
    before = signal.signal(signum, handler)
    try:
        with pytest.raises(BaseException) as left:
            cli.main(["export", f"{tmp_path / 'trained'}", f"{tmp_path / 'served'}", "--inputs", "high_precision"])
        assert signal.getsignal(signum) is handler
    finally:
        signal.signal(signum, before)
    assert isinstance(left.value, SystemExit) and left.value.code == 128 + signum
    assert capsys.readouterr().err.splitlines()[-1] == "fp4engine export: stopped"
    assert {path.name for path in tmp_path.iterdir()} == {"trained"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_tensors_that_are_not_in_high_precision_are_refused_by_name(tmp_path, source, capsys, name, dtype) -> None:
    path = tmp_path / "trained" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path, {"format": "pt"})
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "high_precision") == 2
    error = capsys.readouterr().err
    assert f"{name!r} is {dtype} in weights and torch.float32 in the model" in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"trained"}
    model = llama(num_hidden_layers=1).to("meta")
    model.tie_weights()
    fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=["lm_head"])
    with pytest.raises(ValueError, match=f"is {dtype} in weights"):
        fp4engine.quantize_weights(model, weights=TensorFolder(tmp_path / "trained"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "amaxes.json is no JSON"),
        ("[" * 100_000, "amaxes.json is no JSON"),
        ("\xff", "'dynamic' or a JSON file, got"),
        ("[]", "one JSON object of numbers"),
        ('{"LAYER": true}', "one JSON object of numbers"),
        ('{"LAYER": NaN}', "finite FP32 amax"),
        ('{"LAYER": 1e39}', "finite FP32 amax"),
        ('{"LAYER": 1' + "0" * 400 + "}", "finite FP32 amax"),
    ],
)
def test_amaxes_that_are_none_are_refused(tmp_path, source, capsys, text, complaint) -> None:
    path = tmp_path / "amaxes.json"
    path.write_bytes(text.replace("LAYER", "model.layers.0.self_attn.q_proj").encode("latin-1"))
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", path) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1 and not (tmp_path / "served").exists()


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "1e300", "much"])
def test_sizes_that_are_none_are_refused(tmp_path, source, capsys, size) -> None:
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "high_precision", "--max-shard-gb", size) == 2
    assert "must be a size in GiB" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_shard_size must be an integer of at least 1, got 0"):
        export_checkpoint(source, tmp_path / "served", max_shard_size=0)


def test_files_alone_and_logits_too_are_not_asked_for_at_once(tmp_path, source, capsys) -> None:
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "dynamic", "--verify", "--verify-files") == 2
    assert "--verify-files: not allowed with argument --verify" in capsys.readouterr().err
    assert not (tmp_path / "served").exists()


def test_a_schedule_is_refused_by_the_name_of_its_argument(tmp_path, source, capsys) -> None:
    """An error named autocast, which the command has not."""
    late = ScheduledRecipe(((0, LinearRecipe()), (5, NVFP4BlockScaling())))
    (tmp_path / "late.json").write_text(RuledRecipe(late).to_json())
    assert run(tmp_path / "trained", tmp_path / "out", "--inputs", "dynamic", "--recipe", tmp_path / "late.json") == 2
    said = capsys.readouterr().err
    assert "--recipe must be the recipe of one step" in said and "late.json', that changes at step 5" in said
    (tmp_path / "one.json").write_text(ScheduledRecipe(((0, NVFP4BlockScaling()),)).to_json())  # one for all steps
    assert run(tmp_path / "trained", tmp_path / "out", "--inputs", "dynamic", "--recipe", tmp_path / "one.json") == 0


def test_a_recipe_nested_without_end_is_refused(tmp_path, source, capsys) -> None:
    path = tmp_path / "recipe.json"
    path.write_text("[" * 100_000)
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "high_precision", "--recipe", path) == 2
    error = capsys.readouterr().err
    assert f"the file '{path}' holds no recipe: text must be the JSON" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]"])
def test_generation_settings_that_are_none_are_refused(tmp_path, source, capsys, text) -> None:
    (tmp_path / "trained" / "generation_config.json").write_text(text)
    assert run(tmp_path / "trained", tmp_path / "served", "--inputs", "high_precision") == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "served").exists()
