"""The command line's part: arguments, files in, files out, refusals in one line."""

import argparse
import json

import pytest
import torch

import fp4engine
from fp4engine.export import ServedCheckpoint, calibrate
from fp4engine.export.command import add_arguments, main
from fp4engine.recipe import NVFP4BlockScaling
from tests.tiny import llama


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def source(tmp_path):
    model = llama(num_hidden_layers=1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "tokenizer.json").write_text("{}")
    return model


def test_from_directory_to_directory(tmp_path, source, capsys) -> None:
    fp4engine.convert(source, NVFP4BlockScaling(), keep_high_precision=["lm_head"])
    amaxes = calibrate(source, [torch.arange(12)[None]], progress=False)
    (tmp_path / "amaxes.json").write_text(json.dumps(amaxes))
    (tmp_path / "recipe.json").write_text(NVFP4BlockScaling().to_json())
    words = ("--verify", "--inputs", tmp_path / "amaxes.json", "--recipe", tmp_path / "recipe.json")
    assert run(tmp_path / "trained", tmp_path / "served", *words) == 0
    assert "7 weights in FP4" in capsys.readouterr().out
    words = ("--inputs", "high_precision", "--no-shared-scales", "--compare-logits")
    assert run(tmp_path / "trained", tmp_path / "apart", *words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("logits of the files")]
    assert float(line.split()[6]) < 2e-5
    checkpoint = ServedCheckpoint(tmp_path / "served")
    assert len(checkpoint.layers) == 7 and (tmp_path / "served" / "tokenizer.json").read_text() == "{}"
    layer = source.model.layers[0].mlp.down_proj
    operand = fp4engine.NVFP4Quantizer(with_2d_quantization=True).quantize(layer.weight.detach()).rowwise
    assert torch.equal(checkpoint.operand("model.layers.0.mlp.down_proj")[0], operand.codes)


@pytest.mark.parametrize(
    ("change", "words", "complaint"),
    [
        ({}, [], "inputs=calibrate"),
        ({}, ["--inputs", "gone.json"], "neither a known name nor a readable file"),
        ({}, ["--recipe", "nvfp5"], "neither a known name nor a readable file"),
        ({}, ["--keep-high-precision", "head"], "'head' covers no nn.Linear"),
        ({"architectures": ["Path"]}, ["--inputs", "dynamic"], "names no architecture"),
        ({"architectures": None}, ["--inputs", "dynamic"], "names no architecture"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, ["--inputs", "dynamic"], "which is never run"),
        ({"hidden_size": 64}, ["--inputs", "dynamic"], "has shape"),
    ],
)
def test_refusals(tmp_path, source, capsys, change, words, complaint) -> None:
    path = tmp_path / "trained" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run(tmp_path / "trained", tmp_path / "served", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "served").exists()
