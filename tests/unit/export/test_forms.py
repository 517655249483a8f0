"""Forms of weights beside NVFP4: mixed in one checkpoint, MXFP4 as NVFP4 of the same values, scales of caches."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fp4engine
from fp4engine import cli
from fp4engine.export import (
    CheckpointError,
    KVCache,
    ServedCheckpoint,
    TensorFolder,
    calibrate,
    calibrate_kv_cache,
    compare_served,
    export_checkpoint,
    verify_checkpoint,
)
from fp4engine.export.recoding import recode_checkpoint
from fp4engine.formats import E2M1, E4M3, ScaleRule, fp8_block, mx
from fp4engine.recipe import Casts, Float8CurrentScaling, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, zoo
from tests.tiny import architecture, llama, served_architecture, tokens

pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

MXFP4 = LinearRecipe(weight=Casts(mx(E2M1)), input=Casts(mx(E2M1)))
RECIPES = {
    "mxfp4": (MXFP4, {"MXFP4"}),
    "mxfp4 in tiles": (LinearRecipe(weight=Casts(mx(E2M1, ScaleRule.MIDMAX, rows=32))), {"MXFP4"}),
    "mxfp8": (zoo.make("mxfp8"), {"MXFP8"}),
    "fp8": (zoo.make("fp8_current"), {"FP8"}),
    "fp8 by powers of two": (Float8CurrentScaling(use_power_2_scales=True), {"FP8"}),
    "fp8 in blocks": (zoo.make("fp8_block"), {"FP8 128x128"}),
    "fp8 in blocks, FP32 scales": (
        LinearRecipe(weight=Casts(fp8_block(E4M3, 128, power_of_two=False))),
        {"FP8 128x128"},
    ),
    "mixed": (
        RuledRecipe(
            NVFP4BlockScaling(),
            (
                Rule(zoo.make("fp8_current"), "model.layers.0.self_attn"),
                Rule(MXFP4, "model.layers.1.self_attn"),
                Rule(LinearRecipe(), "**.down_proj"),
            ),
        ),
        {"NVFP4", "FP8", "MXFP4"},
    ),
}
SIBLINGS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


def converted(recipe):
    """Siblings are as large as each other, so that those that share a scale have their own."""
    model = llama(hidden_size=128, intermediate_size=256).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for parent, names in SIBLINGS.items():
                for name in names:
                    getattr(getattr(layer, parent), name).weight.view(-1)[0] = 0.2
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_every_form_is_read_by_all_and_computes_what_trained(tmp_path, name) -> None:
    recipe, forms = RECIPES[name]
    model = converted(recipe)
    role = fp4engine.QuantizerRole("linear", "input", "model.layers.0.mlp.up_proj", (256, 128))
    casts_inputs = fp4engine.make_quantizer(recipe, role).rowwise_spec is not None
    inputs = calibrate(model, [tokens()], progress=False) if casts_inputs else None
    report = export_checkpoint(model, tmp_path / "out", inputs=inputs, verify=True)
    assert [reading.verdict for reading in report.readers] == ["agrees", "agrees"] and not report.rescaled
    assert all(layer.error < 0.2 for layer in report.layers)
    checkpoint = ServedCheckpoint(tmp_path / "out")
    assert {form.name for form, _ in checkpoint.layers.values()} == forms
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (settings["format"] == "mixed-precision") == (len(forms) > 1)
    found = compare_served(model, tmp_path / "out", [tokens()], inputs=False, progress=False)
    assert found.logits < 1e-6 and not found.apart
    layer = next(iter(checkpoint.layers))
    part = f"{layer}.{checkpoint.form.parts(checkpoint.layers[layer][0])[0]}"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[part].view(torch.uint8)[3, 5] ^= 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 of .* bytes of '{part}' differ"):
        verify_checkpoint(model, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("mxfp4", "dynamic", "would be MXFP4 with inputs dynamic, which ModelOpt has no name for"),
        ("fp8 in blocks", "dynamic", "would be FP8 128x128 with inputs dynamic, which ModelOpt has no name for"),
        ("fp8", "dynamic", "would be FP8 with inputs dynamic, which ModelOpt has no name for"),
        ("fp8", {}, "must have a finite FP32 amax"),
        ("fp8", "calibrated", "transformers takes codes in FP8 for numbers"),
    ],
)
def test_what_a_dialect_has_no_form_of_is_refused(tmp_path, name, inputs, words) -> None:
    model = converted(RECIPES[name][0])
    given = calibrate(model, [tokens()], progress=False) if inputs == "calibrated" else inputs
    with pytest.raises(ValueError, match=words):
        export_checkpoint(model, tmp_path / "out", "modelopt", inputs=given)
    assert not list(tmp_path.iterdir())


def test_mixed_layers_in_modelopts_dialect(tmp_path) -> None:
    model = converted(RuledRecipe(NVFP4BlockScaling(), (Rule(zoo.make("fp8_current"), "**.self_attn"),)))
    inputs = calibrate(model, [tokens()], progress=False)
    report = export_checkpoint(model, tmp_path / "out", "modelopt", inputs=inputs, verify=True)
    assert [reading.verdict for reading in report.readers] == ["cannot load", "agrees"]
    layers = ServedCheckpoint(tmp_path / "out").settings["quantized_layers"]
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert layers["model.layers.0.mlp.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert compare_served(model, tmp_path / "out", [tokens()], progress=False).logits < 1e-6


def test_a_layer_is_of_the_group_that_names_it_and_not_of_an_earlier_one_of_its_class(tmp_path) -> None:
    """As in compressed-tensors: by name, then by expression, then by class. The first group that fits was taken."""
    recipe = RuledRecipe(zoo.make("nvfp4_weight_only"), (Rule(zoo.make("mxfp8"), "**.self_attn"),))
    export_checkpoint(converted(recipe), tmp_path / "out")
    forms = ServedCheckpoint(tmp_path / "out").layers
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    attention, rest = sorted(groups.values(), key=lambda group: "self_attn" not in group["targets"][0])
    attention["targets"], rest["targets"] = [r"re:.*self_attn\..*"], ["Linear"]
    config["quantization_config"]["config_groups"] = {"group_0": rest, "group_1": attention}
    path.write_text(json.dumps(config))
    assert ServedCheckpoint(tmp_path / "out").layers == forms


def test_siblings_of_several_forms_are_refused(tmp_path) -> None:
    model = converted(RuledRecipe(zoo.make("nvfp4_weight_only"), (Rule(zoo.make("mxfp8"), "**.q_proj"),)))
    with pytest.raises(ValueError, match=r"q_proj in MXFP8 with .*k_proj in NVFP4 with"):
        export_checkpoint(model, tmp_path / "out", inputs="high_precision")


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("stored", [False, True])
def test_mxfp4_as_nvfp4_decodes_to_the_same_values(tmp_path, form, stored) -> None:
    model = converted(LinearRecipe(weight=Casts(mx(E2M1))))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:32] *= 2.0**-9
        model.model.layers[0].mlp.up_proj.weight[40, :64] = 0
    export_checkpoint(model, tmp_path / "mx")
    if stored:
        fp4engine.quantize_weights(model)
    report = export_checkpoint(model, tmp_path / "nv", form, requantize="lossless", verify="files")
    assert {layer.note for layer in report.layers} == {"stored as NVFP4 of the same values"}
    one, other = ServedCheckpoint(tmp_path / "mx"), ServedCheckpoint(tmp_path / "nv")
    for name in one.layers:
        assert other.layers[name][0].name == "NVFP4" and torch.equal(one.weight(name), other.weight(name))
    with pytest.raises(ValueError, match="is multiplied as 'e2m3 1x32"):  # nothing else is cast again
        export_checkpoint(converted(zoo.make("mxfp6")), tmp_path / "out", inputs="dynamic", requantize="lossless")


def test_powers_of_two_that_nvfp4_cannot_hold_are_refused(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 16, bias=False))
    fp4engine.convert(model, LinearRecipe(weight=Casts(mx(E2M1))))
    for span, fits in ((17, True), (18, False)):
        with torch.no_grad():
            model[0].weight.fill_(6.0)[:, 32:] *= 2.0**-span
        if fits:
            export_checkpoint(model, tmp_path / "out", requantize="lossless", verify=True)
            continue
        with pytest.raises(ValueError, match="16 of 32 blocks of '0' have a scale in MXFP4 that is none in NVFP4"):
            export_checkpoint(model, tmp_path / "more", requantize="lossless")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def gpt_oss(tmp_path):
    """A checkpoint of gpt-oss as its makers publish it: experts in MXFP4, [E, N, K/32, 16] and [E, N, K/32]."""
    architecture("gpt_oss").save_pretrained(tmp_path / "plain")
    tensors = dict(load_file(tmp_path / "plain" / "model.safetensors"))
    quantizer = fp4engine.Quantizer(mx(E2M1))
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts = [quantizer.quantize(x.T.contiguous(), columnwise=False).rowwise for x in tensors.pop(name)]
        codes, scales = (torch.stack(each) for each in zip(*((e.codes, e.scale_inv) for e in experts), strict=True))
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = scales.view(torch.uint8)
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    kept = ["lm_head", "model.layers.*.self_attn"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shutil.rmtree(tmp_path / "plain")
    return folder


def test_gpt_oss_in_mxfp4_becomes_nvfp4_of_the_same_values(tmp_path, gpt_oss, capsys) -> None:
    words = ["export", str(gpt_oss), str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert "--requantize lossless --format modelopt writes it as NVFP4 of the same values" in capsys.readouterr().err
    assert cli.main([*words, "--requantize", "lossless", "--format", "modelopt"]) == 0
    assert "4 stacks of experts, 1,536 blocks of MXFP4, are NVFP4 of the same values" in capsys.readouterr().out
    dequantized = transformers.GptOssForCausalLM.from_pretrained(
        gpt_oss, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    ).state_dict()
    tensors = TensorFolder(tmp_path / "out")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    compared = 0
    for name, wanted in dequantized.items():
        if f"{name}_weight_scale" not in tensors:
            assert torch.equal(tensors[name], wanted)
            continue
        codes, scales, outer = (tensors[name + last] for last in ("", "_weight_scale", "_weight_scale_2"))
        pairs = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2).int()
        assert torch.equal(values[pairs] * scales.float().repeat_interleave(16, dim=1) * outer, wanted)
        compared += 1
    assert compared == 4 and (tmp_path / "out" / "tokenizer.json").exists()
    settings = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert settings["exclude_modules"] == ["lm_head*", "model.layers.*.self_attn*"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("lost", "words", "complaint"),
    [
        ("model.norm.weight", [], "weights lacks 'model.norm.weight'"),
        ("model.layers.1.mlp.experts.down_proj_blocks", [], "weights lacks 'model.layers.1.mlp.experts.down_proj'"),
        ("", ["--inputs", "dynamic"], "in MXFP4 already, and its codes stay: leave out --inputs"),
    ],
    ids=["a norm", "codes", "nothing"],
)
def test_a_damaged_gpt_oss_and_options_that_do_nothing_are_refused(
    tmp_path, gpt_oss, capsys, lost, words, complaint
) -> None:
    path = gpt_oss / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != lost}, path, {"format": "pt"})
    words = ["--requantize", "lossless", "--format", "modelopt", *words]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", str(gpt_oss), str(tmp_path / "out"), *words])
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_checkpoint_that_cannot_be_recoded_leaves_nothing(tmp_path, gpt_oss) -> None:
    path = gpt_oss / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for change, words in (
        (tensors | {name: tensors[name].view(torch.int8)}, "needs uint8"),
        (tensors | {"model.norm.weight": torch.full((32,), torch.nan)}, "'model.norm.weight' holds a NaN"),
        ({key: value for key, value in tensors.items() if key != name}, "'.*down_proj_scales' is not in it"),
        (tensors | {name: torch.where(torch.arange(2) > 0, tensors[name] - 40, tensors[name])}, "none in NVFP4"),
    ):
        save_file(change, path, {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            recode_checkpoint(gpt_oss, tmp_path / "out", progress=False)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (gpt_oss / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="describes no checkpoint in MXFP4, got None"):
        recode_checkpoint(gpt_oss, tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_keys_and_values_are_cached_by_calibrated_scales(tmp_path, form) -> None:
    model = served_architecture("qwen3")
    fp4engine.convert(model, zoo.make("nvfp4_weight_only"), keep_high_precision=["lm_head"])
    seen: list[torch.Tensor] = []
    value = model.model.layers[1].self_attn.v_proj
    value.register_forward_hook(lambda module, args, output: seen.append(output.abs().max()))
    caches = calibrate_kv_cache(model, [tokens(), tokens(2) % 7], progress=False)
    name = "model.layers.1.self_attn"
    assert caches.amaxes[name][1] == float(max(seen)) and set(caches.amaxes) == {name.replace("1", "0"), name}
    report = export_checkpoint(model, tmp_path / "out", form, kv_cache=caches, verify=True)
    assert report.readers[0].verdict == ("agrees" if form == "compressed-tensors" else "cannot load")
    checkpoint = ServedCheckpoint(tmp_path / "out")
    part = "v_scale" if form == "compressed-tensors" else "v_proj.v_scale"
    assert checkpoint.kv_cache == "fp8" and len(checkpoint.cache_scales) == 4
    assert torch.equal(checkpoint.tensors[f"{name}.{part}"], torch.tensor([caches.amaxes[name][1]]) / 448)
    if form == "compressed-tensors":
        attention = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[1].self_attn
        assert torch.equal(attention.v_scale, checkpoint.tensors[f"{name}.v_scale"].bfloat16())
        with pytest.raises(ValueError, match="format of a compressed-tensors checkpoint must be one of 'fp8'"):
            export_checkpoint(model, tmp_path / "more", kv_cache=KVCache(caches.amaxes, "nvfp4"))
    else:
        export_checkpoint(model, tmp_path / "more", form, kv_cache=KVCache(caches.amaxes, "nvfp4"))
        assert ServedCheckpoint(tmp_path / "more").settings["kv_cache_quant_algo"] == "NVFP4"
    path = tmp_path / "out" / checkpoint.form.config_file
    changed = path.read_text().replace('"kv_cache_scheme": {', '"other": {').replace('algo": "FP8"', 'algo": null')
    path.write_text(changed)
    with pytest.raises(CheckpointError, match=r"cached in None, and of their scales 'model.* is there"):
        ServedCheckpoint(tmp_path / "out")


def test_scales_of_caches_that_cannot_be_are_refused(tmp_path) -> None:
    model = served_architecture("qwen3")
    fp4engine.convert(model, zoo.make("nvfp4_weight_only"), keep_high_precision=["lm_head"])
    names = [f"model.layers.{index}.self_attn" for index in range(2)]
    for amaxes, words in (
        ({}, "must be a mapping of attention modules"),
        ({names[0]: 3.0}, "must have two numbers"),
        ({names[0]: (1.0, 0.0)}, "positive finite FP32 numbers"),
        ({names[0]: (1.0, float("inf"))}, "positive finite FP32 numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            KVCache(amaxes)
    for given, words in (
        (KVCache({names[0]: (1, 1)}), f"lacks amaxes of '{names[1]}'"),
        (KVCache(dict.fromkeys([*names, "x"], (1, 1))), "has, and the model has not, amaxes of 'x'"),
        ({names[0]: (1, 1)}, "kv_cache must be a KVCache"),
    ):
        with pytest.raises(ValueError, match=words):
            export_checkpoint(model, tmp_path / "out", kv_cache=given)
    for name in ("gpt2", "deepseek_v3", "t5"):
        with pytest.raises(ValueError, match="has no attention with k_proj and v_proj"):
            calibrate_kv_cache(served_architecture(name), [tokens()])
