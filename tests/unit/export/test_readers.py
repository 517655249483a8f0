"""Who loads an export, and what they make of it: every architecture, formats, and what readers get wrong."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fp4engine
from fp4engine.export import SHARED_SCALES, CheckpointError, calibrate, export_checkpoint, verify_checkpoint
from fp4engine.modules.shared_amax import sibling_groups
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.tiny import converted, llama, served_architecture, tokens

pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

ARCHITECTURES = ("llama", "qwen3", "t5", "bert", "whisper")
"""Those of which transformers reads weights in codes; test_experts has those that are refused."""


def batch(model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if model.main_input_name == "input_features":
        features = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
        return {"input_features": features.to(dtype), "decoder_input_ids": tokens(2)}
    return {"input_ids": tokens(2)} | ({"decoder_input_ids": tokens(2)} if model.config.is_encoder_decoder else {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_export_loads_in_transformers_and_computes_what_the_report_says(tmp_path, name, dtype) -> None:
    model = converted(served_architecture(name).to(dtype), zoo.make("nvfp4_weight_only"))
    sample = batch(model, dtype)
    report = export_checkpoint(model, tmp_path / "out", verify=sample)
    transformer, vllm = report.readers
    assert (transformer.verdict, vllm.verdict) == ("agrees", "agrees") and len(transformer.blocks) in (2, 4)
    assert transformer.logits < 1e-6 and 0 < transformer.as_served < 0.02
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.get_output_embeddings().weight.dtype == torch.bfloat16
    with torch.no_grad():
        meant, served = model(**sample).logits.float(), loaded(**batch(model, torch.bfloat16)).logits.float()
    # The model multiplies siblings by amaxes of their own, which random weights make differ.
    assert (served - meant).norm() < 0.1 * meant.norm()


def test_a_head_is_left_alone_by_the_names_that_both_readers_know(tmp_path) -> None:
    """GPT-NeoX's head is ``embed_out`` in checkpoints and to vLLM, and ``lm_head`` in transformers' model."""
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.GPTNeoXForCausalLM(config)
    fp4engine.convert(model, zoo.make("nvfp4_weight_only"), keep_high_precision=["lm_head"])
    report = export_checkpoint(model, tmp_path / "out", verify=True)
    assert [reading.verdict for reading in report.readers] == ["agrees", "agrees"]
    assert set(report.left_alone) == {"embed_out"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", ["calibrated", "dynamic"])
@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_scales_of_inputs_are_read_by_all(tmp_path, form, inputs) -> None:
    model = converted(llama().eval(), NVFP4BlockScaling())
    amaxes = calibrate(model, [tokens()], progress=False) if inputs == "calibrated" else inputs
    report = export_checkpoint(model, tmp_path / "out", form, inputs=amaxes, verify=True)
    verdicts = [reading.verdict for reading in report.readers]
    assert verdicts == (["agrees", "agrees"] if form == "compressed-tensors" else ["cannot load", "agrees"])
    if form == "modelopt":
        said = "cannot load: 'model.layers.0.mlp.down_proj.weight' is [32, 32] in the files and [32, 64] in its model"
        assert f"{said}, and so are 13 more" in str(report.readers[0])
    if inputs == "dynamic":
        assert {layer.input_amax for layer in report.layers} == {2688}


def test_a_head_in_codes_is_named_for_who_takes_it_for_no_linear_layer(tmp_path) -> None:
    model = llama().eval()
    fp4engine.convert(model, zoo.make("nvfp4_weight_only"))
    report = export_checkpoint(model, tmp_path / "out", verify=True)
    assert [reading.verdict for reading in report.readers] == ["agrees", "agrees"]
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["Linear", "lm_head"]
    group["targets"] = ["Linear"]
    path.write_text(json.dumps(config))
    _, vllm = verify_checkpoint(model, tmp_path / "out", progress=False).readers
    assert vllm.verdict == "cannot load" and "lm_head.weight" in vllm.why


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("verify", [True, False])
def test_what_is_known_of_a_reader_is_refused_where_it_cannot_load_too(tmp_path, verify) -> None:
    model = converted(served_architecture("gpt2"), zoo.make("mxfp8"))
    with pytest.raises(CheckpointError, match=r"leaves the weight of a Conv1D at random .*nothing was written"):
        export_checkpoint(model, tmp_path / "out", inputs="dynamic", verify=verify)
    assert not list(tmp_path.iterdir())


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def qwen3_5():
    sizes = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads = {"num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5TextConfig(**SMALL, **sizes, **heads, layer_types=["linear_attention"])
    return transformers.Qwen3_5ForCausalLM(config)


def lfm2():
    layer = {"layer_types": ["full_attention"], "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SMALL, **layer, num_key_value_heads=2))


def distilbert():
    config = transformers.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=64, n_layers=1, n_heads=4)
    return transformers.DistilBertForMaskedLM(config)


MERGED = {
    ("query", "key", "value"): lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    ("q_lin", "k_lin", "v_lin"): distilbert,
    ("w1", "w3"): lfm2,
    ("in_proj_qkv", "in_proj_z"): qwen3_5,
    ("in_proj_b", "in_proj_a"): qwen3_5,
}
"""Names of siblings that vLLM merges, beside Llama's, and a model that has them."""


@pytest.mark.parametrize("names", MERGED, ids="-".join)
def test_siblings_that_vllm_merges_share_their_scale(tmp_path, names) -> None:
    """They had scales of their own, of which vLLM keeps one, and its rules agreed."""
    model = converted(MERGED[names](), NVFP4BlockScaling())
    report = export_checkpoint(model, tmp_path / "out", inputs="dynamic")
    siblings = [layer for layer in report.layers if layer.name.rpartition(".")[2] in names]
    assert len(siblings) == len(names) and len({layer.amax for layer in siblings}) == 1
    assert len({layer.own_amax for layer in siblings}) > 1 and report.readers[0].verdict == "agrees"
    others = [group for group in SHARED_SCALES if group != names]
    with pytest.raises(CheckpointError, match=rf"{names[0]}, .*{names[1]}.* of their own, and one module keeps one"):
        export_checkpoint(model, tmp_path / "apart", inputs="dynamic", shared_scales=others)


def test_names_without_the_first_are_no_siblings() -> None:
    """RWKV's feed-forward has a key and a value of other inputs, and no query; they shared a scale."""
    parts = ["attention.query", "attention.key", "attention.value", "feed_forward.key", "feed_forward.value"]
    assert set(sibling_groups(parts, SHARED_SCALES)) == set(parts[:3])


def qwen2_moe():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = transformers.Qwen2MoeConfig(**SMALL, **experts, num_key_value_heads=2, shared_expert_intermediate_size=32)
    return converted(transformers.Qwen2MoeForCausalLM(config), NVFP4BlockScaling())


def classifier():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    fp4engine.convert(model, NVFP4BlockScaling())
    return model


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("make", "keep"),
    [(qwen2_moe, ["lm_head", "**.shared_expert_gate"]), (classifier, ["**.pooler.dense", "classifier"])],
)
def test_what_vllm_never_has_in_codes_it_cannot_load(tmp_path, format, make, keep) -> None:
    """Gates of experts, poolers and classifiers have a plain weight there, and its rules agreed with one in codes."""
    model = make()
    (vllm,) = export_checkpoint(model, tmp_path / "out", format, inputs="dynamic", force=True).readers
    assert vllm.verdict == "cannot load" and re.search(r"(expert_gate|pooler\.dense)' has no such", vllm.why)
    report = export_checkpoint(model, tmp_path / "kept", format, inputs="dynamic", force=True, keep_high_precision=keep)
    assert report.readers[0].verdict == "agrees"


def test_models_of_no_library_are_read_by_rules_alone(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    fp4engine.convert(model, zoo.make("nvfp4_weight_only"))
    transformer, vllm = export_checkpoint(model, tmp_path / "out", verify=True).readers
    assert (transformer.verdict, vllm.verdict) == ("not run", "agrees")
    assert "a Sequential is no model of transformers" in str(transformer)


@pytest.mark.filterwarnings("ignore")
def test_a_reader_that_fails_or_differs_is_named_with_what_it_says(tmp_path, monkeypatch) -> None:
    model = converted(llama().eval(), NVFP4BlockScaling())
    export_checkpoint(model, tmp_path / "out", inputs="dynamic", verify=True)
    kind = type(model)
    original = kind.from_pretrained

    def raising(*arguments, **more):
        raise RuntimeError("no\nmemory")

    def scaled(*arguments, **more):
        made = original(*arguments, **more)
        loaded = made[0] if isinstance(made, tuple) else made
        if arguments[0] is not None:  # not what this package decodes
            with torch.no_grad():
                changed(loaded)
        return made

    for change, words in (
        (None, "cannot load: RuntimeError: no memory"),
        (lambda m: m.model.norm.weight.mul_(3), "it has other values of 'model.norm.weight' than the files"),
        (lambda m: m.model.layers[1].mlp.up_proj.weight_scale.zero_(), "layers.1.mlp.up_proj.weight_scale' than the"),
        (lambda m: m.model.layers[1].register_forward_hook(lambda *a: a[2] * 2), "layers.1 is the first to compute"),
        (lambda m: m.register_forward_pre_hook(lambda *a: {}["gone"]), "loads and cannot be run: KeyError: 'gone'"),
    ):
        changed = change
        monkeypatch.setattr(kind, "from_pretrained", raising if change is None else scaled)
        reading, _ = verify_checkpoint(model, tmp_path / "out", progress=False).readers
        assert words in str(reading) and reading.verdict == ("cannot load" if change is None else "differs")


def test_rules_of_vllm_on_files_that_others_wrote(tmp_path) -> None:
    """What its loader does with them, and what its users are not told."""
    from fp4engine.export import ServedCheckpoint
    from fp4engine.export.vllm_rules import read

    model = converted(llama().eval(), NVFP4BlockScaling())
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    cases = {
        "other scales": ("compressed-tensors", "differs", f"{attention}q_proj, .*weight_global_scale of their own"),
        "other inputs": ("modelopt", "differs", f"{mlp}gate_proj, {mlp}up_proj have input_scale of their own"),
        "a part ignored": ("compressed-tensors", "cannot load", "only some of .* which are one module"),
        "a name within": (
            "modelopt",
            "cannot load",
            r"down_proj.* is in the files, and .* has no such parameter|is U8",
        ),
    }
    for number, (case, (form, verdict, words)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        export_checkpoint(model, folder, form, inputs="dynamic")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        if case == "other scales":
            tensors[f"{attention}k_proj.weight_global_scale"] *= 2
        if case == "other inputs":
            tensors[f"{mlp}up_proj.input_scale"] *= 2
        save_file(tensors, path, {"format": "pt"})
        checkpoint = ServedCheckpoint(folder)
        if case == "a part ignored":
            checkpoint.settings["ignore"].append(f"{attention}v_proj")
        if case == "a name within":
            checkpoint.settings["exclude_modules"].append("mlp.down")
        found = read(checkpoint, ["lm_head"])
        assert found[0] == verdict
        assert re.search(words, found[1])


def test_transformers_serves_what_it_was_given_as_codes(tmp_path) -> None:
    """T5 looks at weights to initialise what no file has, and is told to decode them at once."""
    model = converted(served_architecture("t5"), zoo.make("nvfp4_weight_only"))
    export_checkpoint(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dequantize"] is True
    assert transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
