"""Estimates against what a small model really keeps, and against the recorded runs of benchmarks/training.py."""

import json
from pathlib import Path

import pytest
import torch

import fp4engine
from fp4engine.estimate import MODELS as KNOWN
from fp4engine.estimate import Architecture, estimate, from_config
from fp4engine.estimate.decoder import Decoder
from fp4engine.recipe import zoo
from gpt.measure import saved_by_linears
from gpt.model import GPT

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODELS = {
    "85m": (Architecture(12, 768, 12, 2048, 256, fused_qkv=True), {"batch": 32, "sequence": 1024}),
    "1b": (Architecture(20, 2048, 32, 5504, 256, fused_qkv=True), {"batch": 4, "sequence": 2048}),
}
SMALL = Architecture(2, 128, 2, 384, 256, fused_qkv=True)


def recipe_of(precision: str):
    return None if precision == "bf16" else zoo.make(precision)


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "quartet2", "mxfp8", "fp8_current"])
def test_what_linears_keep_is_exact(precision: str) -> None:
    recipe = recipe_of(precision)
    model = GPT(2, 128, 48)
    if recipe is not None:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    tokens = torch.zeros((3, 49), dtype=torch.int64)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), fp4engine.autocast(enabled=recipe is not None, recipe=recipe):
            return model.loss(tokens)

    result = estimate(SMALL, recipe=recipe, batch=3, sequence=48)
    assert result.saved_by_linears == saved_by_linears(model, forward)
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert result.optimizer_bytes == 8 * result.parameters


def measured() -> list[dict]:
    rows = json.loads((RESULTS / "training.json").read_text())["rows"]
    return [row for row in rows if row["mode"] == "eager" and row["precision"] != "fp8_delayed"]


@pytest.mark.slow
@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['model']}-{row['precision']}")
def test_estimates_meet_the_recorded_runs(row: dict) -> None:
    sizes, step = MODELS[row["model"]]
    result = estimate(sizes, recipe=recipe_of(row["precision"]), gpu="H200", **step)
    assert result.saved_by_linears == row["saved_by_linears"]
    assert result.saved_by_linears + result.saved_by_rest == pytest.approx(row["saved_bytes"], rel=0.001)
    assert result.peak == pytest.approx(row["peak_bytes"], rel=0.05)
    if (row["model"], row["precision"]) != ("85m", "fp8_current"):  # docs/command-line.md says why
        assert result.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=0.15)


@pytest.mark.no_poison  # a poisoned torch.empty makes no meta tensors
def test_a_module_of_ones_own_is_estimated_without_its_memory() -> None:
    with torch.device("meta"):
        model = GPT(2, 128, 48)
    tokens = torch.zeros((3, 49), dtype=torch.int64)
    own = estimate(model, recipe=zoo.make("nvfp4"), batch=3, sequence=48, loss=lambda model: model.loss(tokens + 0))
    sizes = estimate(SMALL, recipe=zoo.make("nvfp4"), batch=3, sequence=48)
    assert own.saved_by_linears == sizes.saved_by_linears
    assert own.parameters == sizes.parameters
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(model.blocks[0].mlp.up) is torch.nn.Linear


def test_nothing_of_an_estimate_stays_behind() -> None:
    fp4engine.manual_seed(3)
    before = fp4engine.get_rng_state()
    estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=32)
    assert fp4engine.get_rng_state() == before
    layer = fp4engine.Linear(32, 32, recipe=zoo.make("nvfp4"))
    layer(torch.randn(16, 32)).sum().backward()
    assert bool(layer.weight.grad.isfinite().all())
    assert fp4engine.get_rng_state()["draws"]["cpu"] == 1


def test_checkpointing_lora_and_sharding_change_what_they_should() -> None:
    plain = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64)
    checkpointed = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64, checkpointing=True)
    assert checkpointed.saved_by_rest < plain.saved_by_rest
    assert checkpointed.seconds > plain.seconds
    lora = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64, lora_rank=4)
    linear = 2 * (128 * 384 + 128 * 128 + 3 * 128 * 384)
    assert lora.trained == 2 * 4 * ((128 + 384) + (128 + 128) + 3 * (128 + 384))
    assert lora.parameter_bytes == 2 * lora.parameters + 4 * lora.trained
    assert lora.saved_by_linears < plain.saved_by_linears + linear
    sharded = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64, fsdp=8)
    assert sharded.optimizer_bytes == plain.optimizer_bytes // 8
    assert sharded.wire_bytes == 7 / 8 * 8 * sharded.parameters
    codes = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64, fsdp=8, fp4_all_gather=True)
    shapes = [(384, 128), (128, 128), *3 * [(384, 128)]]  # 384 rows are 8 x 48, which are whole tiles
    as_codes = 2 * sum(rows * cols for rows, cols in shapes)
    assert sharded.wire["weights"] - codes.wire["weights"] == 7 / 8 * 2 * as_codes * (2 - 0.5 - 1 / 256)
    assert codes.wire["gradients"] == sharded.wire["gradients"]
    split = estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=64, tp=2)
    assert split.parameters == plain.parameters and split.parameter_bytes < plain.parameter_bytes
    assert any("computed and not compared" in note for note in split.notes)


def test_predictions_are_marked() -> None:
    assert estimate(SMALL, sequence=32, gpu="H200").notes == ()
    (note,) = estimate(SMALL, sequence=32, gpu="H100").notes
    assert "prediction" in note and "data sheet" in note
    assert len(estimate(SMALL, recipe=zoo.make("nvfp4"), sequence=32, gpu="B200").notes) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gpu": "H9000"}, "gpu must be one of"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"parameters": "fp4"}, "parameters must be one of"),
        ({"batch": 0}, "batch must be"),
        ({"tp": 3}, "tp=3 does not divide heads=2"),
        ({"loss": lambda model: model}, "loss goes with"),
        ({"fp4_all_gather": True, "fsdp": 2}, "fp4_all_gather=True needs .* recipe=None"),
    ],
)
def test_arguments_outside_their_words_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate(SMALL, sequence=32, **arguments)


def test_models_known_by_name_have_the_parameters_that_their_makers_count() -> None:
    counts = {
        "Llama-3.2-1B": 1_235_814_400, "Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496,
        "Llama-3.1-405B": 405_853_388_800,
    }  # fmt: skip
    assert set(KNOWN) == set(counts)
    for name, sizes in KNOWN.items():
        with torch.device("meta"):
            model = Decoder(sizes, lambda block: block)
        assert sum(parameter.numel() for parameter in model.parameters()) == counts[name]


def test_configs_of_several_families_are_read() -> None:
    gpt2 = from_config({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257})
    assert (gpt2.ffn, gpt2.gated, gpt2.tied) == (3072, False, True)
    qwen = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    read = from_config({**qwen, "intermediate_size": 128, "num_key_value_heads": 2})
    assert (read.qkv_bias, read.bias, read.kv_heads) == (True, False, 2)
