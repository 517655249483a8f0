"""What checkpoints name otherwise than models do: experts in one parameter, and ``Conv1D``."""

import json

import pytest
import torch

import fp4engine
from fp4engine.export import (
    CheckpointError,
    ServedCheckpoint,
    TensorFolder,
    calibrate,
    compare_served,
    export_checkpoint,
)
from fp4engine.export.serving_format import NVFP4
from fp4engine.export.state import ModelState
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests.tiny import CONFIGURATIONS, architecture, head, tokens

pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

SPLIT = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}", ("w1", "w3"), "w2"),
    "qwen3_moe": ("model.layers.{}.mlp.experts.{}", ("gate_proj", "up_proj"), "down_proj"),
    "deepseek_v3": ("model.layers.{}.mlp.experts.{}", ("gate_proj", "up_proj"), "down_proj"),
}
"""Names of experts in checkpoints."""


def converted(name, recipe, keep=()):
    model = architecture(name)
    fp4engine.convert(model, recipe, keep_high_precision=[*head(model), *keep])
    return model


def operands(experts, recipe, stack):
    """Every expert's operand, of the whole matrix that the model multiplies by."""
    weight = getattr(experts, stack).detach()
    name = {"gate_up_proj": experts.up_gemms, "down_proj": experts.down_gemms}[stack].gemms[0].name
    role = fp4engine.QuantizerRole("grouped_linear", "weight", name, tuple(weight.shape[1:]))
    quantizer = fp4engine.make_quantizer(recipe, role)
    return [quantizer.quantize(part, columnwise=False).rowwise for part in weight]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_1d_weight"])
@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("name", SPLIT)
def test_experts_are_written_one_by_one_with_the_bytes_that_trained(tmp_path, name, form, recipe) -> None:
    recipe = zoo.make(recipe)
    model = converted(name, recipe)
    inputs = calibrate(model, [tokens()], recipe, progress=False)
    report = export_checkpoint(
        model, tmp_path / "out", form, inputs=inputs, shared_scales=(), verify="files", force=True
    )
    assert report.rescaled == () and report.unused == ()
    checkpoint = ServedCheckpoint(tmp_path / "out")
    prefix, upper, lower = SPLIT[name]
    experts = model.model.layers[1].mlp.experts
    for index, (up, down) in enumerate(
        zip(operands(experts, recipe, "gate_up_proj"), operands(experts, recipe, "down_proj"), strict=True)
    ):
        parts = [checkpoint.operand(f"{prefix.format(1, index)}.{part}") for part in upper]
        assert torch.equal(torch.cat([codes for codes, _, _ in parts]), up.codes)
        assert torch.equal(torch.cat([scales for _, scales, _ in parts]).float(), up.scale_inv.float())
        assert torch.equal(parts[0][2], parts[1][2])  # what servers multiply as one matrix
        codes, scales, outer = checkpoint.operand(f"{prefix.format(1, index)}.{lower}")
        assert torch.equal(codes, down.codes) and torch.equal(scales.float(), down.scale_inv.float())
        assert torch.equal(outer, checkpoint.form.outer(NVFP4, down.amax, down.spec.numerator))
        seen = [checkpoint.input_amax(f"{prefix.format(1, index)}.{part}") for part in upper]
        amax = inputs["model.layers.1.mlp.experts.up_gemms"]  # one for all experts of the layer
        assert seen == pytest.approx([amax, amax], rel=1e-6)
    router = f"{prefix.format(1, 0).removesuffix('.experts.0')}.gate"
    assert router in checkpoint.ignored and f"{router}.weight" in checkpoint.tensors


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "gpt_oss"])
def test_what_is_exported_computes_what_trained(tmp_path, name) -> None:
    model = converted(name, NVFP4BlockScaling())
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "out", inputs=inputs, shared_scales=(), verify="files", force=True)
    found = compare_served(model, tmp_path / "out", [tokens()], inputs=False, progress=False)
    assert found.logits < 1e-6 and found.same_choice == 1 and not found.apart


@pytest.mark.parametrize("name", [*SPLIT, "gpt2"])
def test_what_transformers_takes_for_other_numbers_is_refused(tmp_path, name) -> None:
    model = converted(name, zoo.make("nvfp4_weight_only"))
    known = "leaves the weight of a Conv1D at random" if name == "gpt2" else "leaves out the outer scale of experts"
    found = "leaves 8 tensors at random" if name == "gpt2" else r"experts\.gate_up_proj', 3\d,\d{3} times as large"
    for verify, words in ((False, known), (True, found)):
        with pytest.raises(CheckpointError, match=f"{words}.*nothing was written: force=True"):
            export_checkpoint(model, tmp_path / "out", verify=verify)
        assert not list(tmp_path.iterdir())
    report = export_checkpoint(model, tmp_path / "out", force=True)
    assert known in str(report) and [reading.verdict for reading in report.readers] == ["agrees"]
    export_checkpoint(model, tmp_path / "other", "modelopt" if name != "gpt2" else "compressed-tensors", force=True)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt2"])
def test_values_may_come_from_the_models_own_checkpoint(tmp_path, name) -> None:
    recipe = zoo.make("nvfp4_weight_only")
    model = converted(name, recipe)
    model.save_pretrained(tmp_path / "trained")
    whole = export_checkpoint(model, tmp_path / "whole", force=True)
    empty = converted(name, recipe).to("meta")
    empty.tie_weights()
    extra = dict(TensorFolder(tmp_path / "trained")) | {"model.layers.9.mtp.weight": torch.zeros(2)}
    parts = export_checkpoint(empty, tmp_path / "parts", weights=extra, verify="files", force=True)
    assert parts.layers == whole.layers and parts.unused == ("model.layers.9.mtp.weight",)
    assert "model.layers.9.mtp.weight" in str(parts)
    left, right = ServedCheckpoint(tmp_path / "whole").tensors, ServedCheckpoint(tmp_path / "parts").tensors
    assert set(left) == set(right)
    assert all(torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)) for key in left)


def test_kept_experts_are_left_alone_by_the_names_that_servers_look_for(tmp_path) -> None:
    recipe = RuledRecipe(zoo.make("nvfp4_weight_only"), (Rule(LinearRecipe(), "model.layers.0.mlp.experts.down_proj"),))
    model = converted("mixtral", recipe, ["model.layers.1.mlp.experts"])
    report = export_checkpoint(model, tmp_path / "out", verify="files", force=True)
    layer = "model.layers.{}.block_sparse_moe.experts.{}.{}"
    kept = {layer.format(1, index, part) for index in range(4) for part in ("w1", "w2", "w3")}
    kept |= {layer.format(0, index, "w2") for index in range(4)}
    assert kept == {name for name in report.left_alone if "experts" in name}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stack = r"re:model\.layers\.{}\.block_sparse_moe\.experts\.\d+\."
    assert settings["ignore"][-3:] != kept and stack.format(1) + r"\w+$" in settings["ignore"]
    assert stack.format(0) + r"(?:w2)$" in settings["ignore"] and not any("experts.0" in n for n in settings["ignore"])
    checkpoint = ServedCheckpoint(tmp_path / "out").tensors
    assert torch.equal(
        checkpoint[layer.format(1, 2, "w3") + ".weight"], model.model.layers[1].mlp.experts.gate_up_proj[2, 64:]
    )


def test_gpt2_is_written_as_servers_multiply_it(tmp_path) -> None:
    recipe = NVFP4BlockScaling()
    model = converted("gpt2", recipe)
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "out", inputs=inputs, verify="files", force=True)
    weight = model.transformer.h[1].attn.c_attn.weight
    codes, _, _ = ServedCheckpoint(tmp_path / "out").operand("transformer.h.1.attn.c_attn")
    role = fp4engine.QuantizerRole("linear", "weight", "", (96, 32))
    expected = fp4engine.make_quantizer(recipe, role).quantize(weight.detach().T, columnwise=False).rowwise
    assert codes.shape == (96, 16) and torch.equal(codes, expected.codes)
    with pytest.raises(ValueError, match=r"c_attn' is a Conv1D, .* pass format='compressed-tensors'"):
        export_checkpoint(model, tmp_path / "more", "modelopt", inputs=inputs)


def test_what_servers_have_no_name_for_is_refused(tmp_path) -> None:
    recipe = zoo.make("nvfp4_weight_only")
    with pytest.raises(ValueError, match=r"gate_up_proj' \[4, 32, 128\]; servers know no codes of it"):
        export_checkpoint(converted("gpt_oss", recipe), tmp_path / "out")
    export_checkpoint(converted("gpt_oss", recipe, ["**.experts"]), tmp_path / "kept", verify=True)
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(32, 2))
    fp4engine.convert(attention, recipe)
    with pytest.raises(ValueError, match=r"'0\.in_proj_gemms' is a product by in_proj_weight"):
        export_checkpoint(attention, tmp_path / "out")
    export_checkpoint(attention, tmp_path / "projection", keep_high_precision=["0.in_proj_gemms"], verify=True)
    ragged = architecture("mixtral")
    experts = ragged.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 80, 32))
    fp4engine.convert(ragged, NVFP4BlockScaling(), keep_high_precision=["lm_head"])
    with pytest.raises(
        ValueError, match=r"16x16 blocks of .* hold its rows 0 to 40 apart, as .*experts\.0\.w1\.weight'"
    ):
        export_checkpoint(ragged, tmp_path / "out", inputs="high_precision")
    assert not (tmp_path / "out").exists()


def test_a_layout_that_is_no_rows_is_refused_by_name(monkeypatch) -> None:
    import fp4engine.checkpoint_names as checkpoint_names

    model = architecture("llama")
    layouts = [
        lambda tensors: {f"renamed.{name}": tensor.flip(0) for name, tensor in tensors.items()},
        lambda tensors: {f"renamed.{name}": tensor[..., :16] for name, tensor in tensors.items()},
    ]
    for layout in layouts:
        monkeypatch.setattr(checkpoint_names, "_as_written", lambda _, tensors, layout=layout: layout(tensors))
        with pytest.raises(NotImplementedError, match=r"'renamed\.model\.embed_tokens\.weight' in checkpoints"):
            ModelState(model, None)

    def joined(_, tensors):  # NomicBert's: codes of q_proj were written, and memory that held none in the other rows
        return {
            name.replace("q_proj", "Wqkv"): torch.cat([tensors[name.replace("q_p", f"{part}_p")] for part in "qkv"])
            if "q_proj" in name
            else tensor
            for name, tensor in tensors.items()
            if "k_proj" not in name and "v_proj" not in name
        }

    monkeypatch.setattr(checkpoint_names, "_as_written", joined)
    with pytest.raises(
        NotImplementedError, match=r"q_proj\.weight' of .* is written as '.*Wqkv\.weight' in checkpoints"
    ):
        ModelState(model, None)

    def renamed(_, tensors):
        return {f"renamed.{name}": tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(checkpoint_names, "_as_written", renamed)
    pieces = ModelState(model, None).pieces
    assert pieces["renamed.lm_head.weight"].source == "lm_head.weight"
