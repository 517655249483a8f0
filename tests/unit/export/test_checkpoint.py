"""Checkpoints for servers: what is in the files, read back by two readers; what is refused."""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import fp4engine
from fp4engine.export import (
    CheckpointError,
    ServedCheckpoint,
    TensorFolder,
    calibrate,
    compare_served,
    export_checkpoint,
    share_amax,
    verify_checkpoint,
)
from fp4engine.export.serving_format import NVFP4
from fp4engine.formats import CastSpec, Outer
from fp4engine.recipe import (
    Casts,
    CustomRecipe,
    LinearRecipe,
    NVFP4BlockScaling,
    Rule,
    RuledRecipe,
    ScheduledRecipe,
    zoo,
)
from tests.tiny import VOCABULARY, llama, tokens

pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

WEIGHT_ONLY = zoo.make("nvfp4_weight_only")
HELD = ["nvfp4", "nvfp4_1d_weight", "nvfp4_4over6", "nvfp4_weight_only"]
FORMATS = ["compressed-tensors", "modelopt"]


def converted(recipe=WEIGHT_ONLY, **changes):
    model = llama(intermediate_size=80, **changes).eval()
    fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    return model


def operand(module: fp4engine.Linear, recipe):
    role = fp4engine.QuantizerRole("linear", "weight", module.name, tuple(module.weight.shape))
    return fp4engine.make_quantizer(recipe, role).quantize(module.weight.detach(), columnwise=False).rowwise


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", HELD)
def test_the_files_hold_the_operands_of_the_forward_pass_bit_for_bit(tmp_path, form, name) -> None:
    recipe = zoo.make(name)
    model = converted(recipe)
    inputs = None if name == "nvfp4_weight_only" else "high_precision"
    report = export_checkpoint(
        model, tmp_path / "out", form, inputs=inputs, shared_scales=(), verify="files", force=True
    )
    checkpoint = ServedCheckpoint(tmp_path / "out")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, fp4engine.Linear)}
    assert set(checkpoint.layers) == set(linears) == {layer.name for layer in report.layers}
    for name, module in linears.items():
        codes, scales, outer = checkpoint.operand(name)
        trained = operand(module, recipe)
        assert torch.equal(codes, trained.codes)
        assert torch.equal(scales.view(torch.uint8), trained.scale_inv.view(torch.uint8))
        if form == "modelopt":  # the multiplier is the decode's own: the values are the same bits too
            assert torch.equal(outer, trained.amax / torch.full((1,), trained.spec.numerator))
            assert torch.equal(checkpoint.weight(name), trained.dequantize())
        else:
            assert torch.equal(outer, torch.full((1,), trained.spec.numerator) / trained.amax)
            torch.testing.assert_close(checkpoint.weight(name), trained.dequantize(), rtol=2**-22, atol=0)
    state = model.state_dict()
    for name in set(checkpoint.tensors) & set(state):
        if name.removesuffix(".weight") not in linears:
            assert torch.equal(checkpoint.tensors[name], state[name])
    assert "lm_head.weight" in checkpoint.tensors and "lm_head" in checkpoint.ignored


@pytest.mark.parametrize("form", FORMATS)
def test_siblings_share_the_larger_scale_and_the_report_says_what_it_costs(tmp_path, form) -> None:
    model = converted()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(5)
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-5)
    report = export_checkpoint(model, tmp_path / "out", form, verify=True)
    checkpoint = ServedCheckpoint(tmp_path / "out")
    for index, block in enumerate(model.model.layers):
        for parent, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            layers = [f"model.layers.{index}.{parent}.{name}" for name in names]
            outers = [checkpoint.operand(layer)[2] for layer in layers]
            assert all(torch.equal(outers[0], other) for other in outers)
            largest = max(getattr(getattr(block, parent), name).weight.abs().max() for name in names)
            assert {entry.amax for entry in report.layers if entry.name in layers} == {float(largest)}
    kept = [entry for entry in report.layers if entry.amax == entry.own_amax]
    assert len(kept) + len(report.rescaled) == 14 and len(report.rescaled) == 2 * (2 + 1)
    assert all(entry.added_error == 0 for entry in kept)
    (small,) = [entry for entry in report.layers if entry.name == "model.layers.0.mlp.up_proj"]
    assert small.added_error > 0.001 and small.name in str(report) and f"{small.added_error:+.2%}" in str(report)


def test_inputs_are_scaled_by_the_amaxes_that_were_seen(tmp_path) -> None:
    model = converted(NVFP4BlockScaling()).train()
    seen: dict[str, float] = {}
    module = model.model.layers[1].mlp.down_proj
    module.register_forward_pre_hook(lambda _, args: seen.update(amax=float(args[0].abs().max())))
    inputs = calibrate(model, [{"input_ids": tokens()}, (tokens() + 1) % VOCABULARY], progress=False)
    assert model.training and module.training
    assert set(inputs) == {name for name, m in model.named_modules() if isinstance(m, fp4engine.Linear)}
    largest = 0.0
    for batch in (tokens(), (tokens() + 1) % VOCABULARY):
        model.eval()(batch)
        largest = max(largest, seen["amax"])
    assert inputs["model.layers.1.mlp.down_proj"] == largest
    for form in FORMATS:
        export_checkpoint(model, tmp_path / form, form, inputs=inputs, verify=True)
        stored = ServedCheckpoint(tmp_path / form).input_amax("model.layers.1.mlp.down_proj")
        assert stored == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_byte_of_a_file(tmp_path, default) -> None:
    model = converted(NVFP4BlockScaling())
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "usual", inputs=inputs, verify=True)
    torch.set_default_dtype(default)
    try:
        export_checkpoint(model, tmp_path / "other", inputs=calibrate(model, [tokens()], progress=False), verify=True)
    finally:
        torch.set_default_dtype(torch.float32)
    usual, other = (load_file(tmp_path / name / "model.safetensors") for name in ("usual", "other"))
    assert usual.keys() == other.keys()
    for name, tensor in usual.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_calibration_is_of_the_layers_that_servers_know() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.experts = fp4engine.GroupedLinear(2, 16, 16, device="cpu", name="experts")
            self.mlp = fp4engine.LayerNormMLP(16, 32, device="cpu", name="mlp")

        def forward(self, x):
            return self.mlp(inp=self.experts(inp=self.fc(input=x), m_splits=[1, 3]))

    model = Mixed()
    fp4engine.convert(model, WEIGHT_ONLY)
    x = torch.randn(4, 16)
    found = calibrate(model, [x], NVFP4BlockScaling(), progress=False)
    assert found.keys() == {"fc", "experts"} and found["fc"] == float(x.abs().amax())


def test_calibration_sees_the_projection_of_attention() -> None:
    model = nn.Sequential(fp4engine.MultiheadAttention(32, 2, attn_mask_type="no_mask", device="cpu"))
    assert calibrate(model, [torch.randn(4, 2, 32)], NVFP4BlockScaling(), progress=False).keys() == {"0.proj"}


def test_arguments_of_another_type_are_refused_before_anything_is_written(tmp_path) -> None:
    for shared in ([3], 3, "q_proj", ["q_proj"]):
        with pytest.raises(ValueError, match="shared_scales must be sequences of names"):
            export_checkpoint(converted(), tmp_path / "out", shared_scales=shared)
    with pytest.raises(ValueError, match="tokenizer must be a path, got 3"):
        export_checkpoint(converted(), tmp_path / "out", tokenizer=3)
    with pytest.raises(ValueError, match="verify must be True, False, 'files' or a batch of inputs, got 'no'"):
        export_checkpoint(converted(), tmp_path / "out", verify="no")
    assert not (tmp_path / "out").exists()


def test_calibration_refuses_to_guess() -> None:
    model = converted(NVFP4BlockScaling())
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(model, [])
    with pytest.raises(ValueError, match="batches must be a sequence of batches"):
        calibrate(model, {"input_ids": tokens()})
    with pytest.raises(ValueError, match="has no converted module"):
        calibrate(llama(), [tokens()])

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.used(x)

    idle = Unused()
    fp4engine.convert(idle, NVFP4BlockScaling())
    with pytest.raises(ValueError, match="1 of 2 layers saw no input in 1 batches"):
        calibrate(idle, [torch.randn(2, 16)], progress=False)
    with pytest.raises(ValueError, match="'used' holds a NaN"):
        calibrate(idle, [torch.full((2, 16), float("inf"))], progress=False)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (zoo.make("mxfp6"), "its elements, scales or blocks are none that servers read"),
        (zoo.make("nvfp4_razer"), "its elements, scales or blocks are none that servers read"),
        (zoo.make("quartet"), "it is rotated"),
        (zoo.make("fp8_delayed"), "its scale comes from earlier steps"),
        (LinearRecipe(weight=Casts(CastSpec(outer=Outer.ROW))), "its outer scale is by row"),
        (zoo.make("tetrajet2"), "its outer scale is by 1x128"),
        (LinearRecipe(weight=Casts(zoo.STOCHASTIC)), "its codes are drawn anew"),
    ],
)
def test_what_the_formats_cannot_hold_is_refused_or_requantized(tmp_path, recipe, words) -> None:
    model = converted(None)
    with pytest.raises(ValueError, match=words):
        export_checkpoint(model, tmp_path / "out", recipe=recipe, inputs="high_precision")
    assert not list(tmp_path.iterdir())
    report = export_checkpoint(
        model, tmp_path / "out", recipe=recipe, inputs="high_precision", requantize=True, verify=False
    )
    assert all(words.split()[0] in layer.note for layer in report.layers)
    name = report.layers[-1].name
    codes, _, _ = ServedCheckpoint(tmp_path / "out").operand(name)
    assert torch.equal(codes, operand(model.get_submodule(name), WEIGHT_ONLY).codes)


def test_what_cannot_be_known_is_refused(tmp_path) -> None:
    out = tmp_path / "out"
    model = converted(NVFP4BlockScaling())
    cases = [
        (model, {}, r"give inputs= .* what fp4engine.export.calibrate"),
        (model, {"inputs": {}}, "finite FP32 amax"),
        (model, {"inputs": {"model.layers.0.self_attn.q_proj": "3"}}, "finite FP32 amax .* got '3'"),
        (model, {"inputs": "static"}, "inputs must be"),
        (model, {"format": "gguf"}, "format must be one of"),
        (model, {"inputs": "high_precision", "keep_high_precision": ["gone"]}, "'gone' covers no linear module"),
        (model, {"inputs": "high_precision", "keep_high_precision": "lm_head"}, "sequence of patterns"),
        (model, {"inputs": "high_precision", "keep_high_precision": ["**.q_proj"]}, "as one matrix"),
        (model, {"inputs": "high_precision", "weights": {}}, "weights lacks"),
        (model, {"inputs": "high_precision", "tokenizer": tmp_path}, "tokenizer must be"),
        (converted(), {"inputs": "dynamic"}, "the recipe casts no input"),
        (converted(), {"inputs": {}}, "the recipe casts no input"),
        (llama(), {}, "no weight of this LlamaForCausalLM is cast"),
        (model, {"requantize": "nearest"}, "requantize must be one of False, True, 'lossless'"),
        (model, {"force": 1}, "force must be True or False"),
        (converted(None), {}, "pass recipe="),
        (converted(None), {"recipe": ScheduledRecipe(((0, WEIGHT_ONLY),))}, "schedule.at"),
        (converted(zoo.make("nvfp4_4over6")), {"inputs": "dynamic"}, "beside NVFP4 servers cast inputs"),
    ]
    for model, arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            export_checkpoint(model, out, **arguments)
        assert not list(tmp_path.iterdir()), words


@pytest.mark.no_poison
def test_a_wrapper_is_no_part_of_a_name(tmp_path) -> None:
    whole, part, in_place = converted(), converted(), converted()
    part.model.layers[0] = torch.compile(part.model.layers[0])
    in_place.compile()
    recomputed = converted()
    recomputed.model.layers[1] = checkpoint_wrapper(recomputed.model.layers[1])
    for model, words in (
        (torch.compile(whole), "torch.compile has wrapped the model, and '_orig_mod' would be"),
        (part, "torch.compile has wrapped model.layers.0, and '_orig_mod' would be"),
        (recomputed, r"PyTorch has wrapped model\.layers\.1, and '_checkpoint_wrapped_module' is a part of"),
        (nn.DataParallel(whole), "the model is a DataParallel; export what it wraps"),
        (AveragedModel(whole), "the model is a AveragedModel; export what it wraps"),
    ):
        with pytest.raises(ValueError, match=words):
            export_checkpoint(model, tmp_path / "out")
        assert not list(tmp_path.iterdir())
    export_checkpoint(in_place, tmp_path / "out", verify=True)
    assert all(name.startswith("model.layers.") for name in ServedCheckpoint(tmp_path / "out").layers)


class WithExtraState(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"a": fp4engine.Linear(32, 32, recipe=WEIGHT_ONLY)})

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_weights_that_cannot_be_served_are_refused_by_name(tmp_path) -> None:
    tied = llama(tie_word_embeddings=True)
    fp4engine.convert(tied, WEIGHT_ONLY)
    with pytest.raises(ValueError, match=r"'lm_head' is cast and shares its parameter with model\.embed_tokens"):
        export_checkpoint(tied, tmp_path / "out")
    sizes = ((24, 16), (16, 40), (40, 24), (24, 24), (40, 8), (16, 16))
    ragged = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    fp4engine.convert(ragged, WEIGHT_ONLY, keep_high_precision=["1"])
    held = "and NVFP4 holds whole blocks of 16 only"
    with pytest.raises(ValueError) as error:
        export_checkpoint(ragged, tmp_path / "out", keep_high_precision=["4"])
    assert str(error.value) == (
        f"{{0,3}} x2 has in_features=24, {held}; 2 has in_features=40, {held}: "
        "pass keep_high_precision=['4', '1', '0', '2', '3']"
    )
    fused = nn.Sequential(fp4engine.LayerNormLinear(16, 16, recipe=WEIGHT_ONLY))
    empty = nn.Sequential(fp4engine.Linear(32, 0, recipe=WEIGHT_ONLY))
    with pytest.raises(ValueError, match=r"multiplies by '0.weight' \[0, 32\], which has no values to write"):
        export_checkpoint(empty, tmp_path / "out")
    with pytest.raises(ValueError, match="'0' is a LayerNormLinear, whose parameters no server knows"):
        export_checkpoint(fused, tmp_path / "out")
    computed = nn.Sequential(fp4engine.Linear(32, 32, recipe=WEIGHT_ONLY), fp4engine.Linear(32, 32, recipe=WEIGHT_ONLY))
    weight_norm(computed[0])
    with pytest.raises(ValueError, match="'0' multiplies by a weight that it computes, which no checkpoint has"):
        export_checkpoint(computed, tmp_path / "out")
    odd = nn.ModuleDict({"a": fp4engine.Linear(32, 32, recipe=WEIGHT_ONLY)})
    odd.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"'graph' of the model's state must be a dense tensor, got torch.sparse_coo"):
        export_checkpoint(odd, tmp_path / "out")
    with pytest.raises(ValueError, match=r"'_extra_state' of the model's state must be a tensor, got dict"):
        export_checkpoint(WithExtraState(), tmp_path / "out")
    broken = converted()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj' holds a NaN"):
        export_checkpoint(broken, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_rules_leave_layers_alone_and_weight_only_ones_beside(tmp_path) -> None:
    recipe = RuledRecipe(
        NVFP4BlockScaling(), (Rule(LinearRecipe(), "**.down_proj"), Rule(WEIGHT_ONLY, "model.layers.0.mlp"))
    )
    model = converted(recipe)
    inputs = calibrate(model, [tokens()], progress=False)
    report = export_checkpoint(model, tmp_path / "out", inputs=inputs, verify=True)
    assert set(report.left_alone) == {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = {bool(group["input_activations"]): set(group["targets"]) for group in settings["config_groups"].values()}
    assert targets[False] == {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    assert len(targets[True]) == 10
    export_checkpoint(model, tmp_path / "more", "modelopt", inputs=inputs, verify=True)
    settings = json.loads((tmp_path / "more" / "hf_quant_config.json").read_text())["quantization"]
    algorithms = {name: layer["quant_algo"] for name, layer in settings["quantized_layers"].items()}
    assert settings["quant_algo"] == "MIXED_PRECISION" and len(algorithms) == 12
    assert {name for name in algorithms if algorithms[name] == "W4A16_NVFP4"} == targets[False]


BOUNDED_BY_256 = NVFP4BlockScaling(nvfp4_4over6="weights")


@pytest.mark.parametrize(
    ("recipe", "words", "verdict"),
    [
        (BOUNDED_BY_256, "up_proj in NVFP4 with 2688 / amax and inputs static", "differs"),
        (WEIGHT_ONLY, "gate_proj in NVFP4 with 2688 / amax and inputs weight-only", "cannot load"),
    ],
    ids=["outer scale", "inputs"],
)
def test_siblings_that_servers_could_not_multiply_as_one_matrix_are_refused(tmp_path, recipe, words, verdict) -> None:
    model = converted(RuledRecipe(NVFP4BlockScaling(), (Rule(recipe, "**.gate_proj"),)))
    inputs = calibrate(model, [tokens()], progress=False)
    with pytest.raises(ValueError, match=f"one outer scale and one cast of inputs, got .*{words}.*shared_scales"):
        export_checkpoint(model, tmp_path / "out", inputs=inputs)
    assert not list(tmp_path.iterdir())
    report = export_checkpoint(model, tmp_path / "out", inputs=inputs, shared_scales=(), verify=True, force=True)
    assert report.rescaled == () and [reading.verdict for reading in report.readers] == ["agrees", verdict]


def test_siblings_of_other_bounds_cannot_share_their_amax() -> None:
    recipe = RuledRecipe(NVFP4BlockScaling(), (Rule(BOUNDED_BY_256, "**.q_proj"),))
    with pytest.raises(ValueError, match=r"k_proj' has outer scales 2688 / amax and .*q_proj' 1536 / amax"):
        share_amax(llama(), recipe)


@dataclass(frozen=True)
class Clipping(fp4engine.Quantizer):
    def quantize(self, x, **arguments):
        return super().quantize(x.clamp(-0.02, 0.02), **arguments)

    def amax(self, x, **arguments):
        return super().amax(x.clamp(-0.02, 0.02), **arguments)


def test_what_a_quantizer_does_before_its_cast_is_served_and_not_lost_by_sharing_an_amax(tmp_path) -> None:
    def qfactory(role):
        return Clipping(CastSpec()) if role.tensor_type == "weight" else fp4engine.IdentityQuantizer()

    recipe = CustomRecipe(qfactory=qfactory)
    model = converted(recipe)
    export_checkpoint(model, tmp_path / "out", shared_scales=(), verify="files", force=True)
    assert compare_served(model, tmp_path / "out", [tokens()], recipe, inputs=False, progress=False).logits < 1e-5
    with pytest.raises(ValueError, match=r"q_proj' has a Clipping, which does more than cast"):
        share_amax(llama(), recipe)


def test_zeros_and_stored_weights(tmp_path) -> None:
    with fp4engine.quantized_model_init(recipe=WEIGHT_ONLY):
        model = nn.ModuleDict({"a": fp4engine.Linear(32, 16, recipe=WEIGHT_ONLY), "b": nn.Linear(16, 16)})
    zero = fp4engine.Linear(32, 16, recipe=WEIGHT_ONLY)
    nn.init.zeros_(zero.weight)
    model["zero"] = zero
    for form in FORMATS:
        export_checkpoint(model, tmp_path / form, form, verify=True)
        checkpoint = ServedCheckpoint(tmp_path / form)
        assert torch.equal(checkpoint.operand("a")[0], model["a"].weight.codes)
        assert torch.equal(checkpoint.weight("zero"), torch.zeros(16, 32))
        for dtype in (torch.int8, torch.bool, torch.complex64, None, "bfloat16"):
            with pytest.raises(ValueError, match=rf"dtype must be a floating-point torch\.dtype, got {dtype!r}"):
                checkpoint.weight("a", dtype)
        assert torch.equal(checkpoint.tensors["b.weight"], model["b"].weight)


@pytest.mark.parametrize("form", FORMATS)
def test_the_smallest_amaxes_have_scales_that_readers_take(tmp_path, form) -> None:
    model = nn.Sequential(fp4engine.Linear(32, 16, bias=False, recipe=NVFP4BlockScaling()))
    for number, amplitude in enumerate((1e-45, 1e-38, 3e38)):
        with torch.no_grad():
            model[0].weight.copy_(torch.rand(16, 32).div_(2)).view(-1)[:1] = 1.0
            model[0].weight.mul_(amplitude)
        weight = model[0].weight.detach().double()
        inputs = {"0": np.float32(amplitude)}
        (entry,) = export_checkpoint(model, tmp_path / str(number), form, inputs=inputs, verify=True).layers
        served = ServedCheckpoint(tmp_path / str(number))
        assert entry.error == pytest.approx(
            float((served.weight("0").double() - weight).norm() / weight.norm()), rel=1e-4
        )


def test_parameters_that_share_memory_are_written_one_by_one(tmp_path) -> None:
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2)).append(nn.LayerNorm(16))
    flat = torch.randn(2 * 256 + 16)
    for parameter, part in zip(model.parameters(), flat.split([256, 256, 16]), strict=False):
        parameter.data = part.view(parameter.shape)
    fp4engine.convert(model, WEIGHT_ONLY, keep_high_precision=["0"])
    export_checkpoint(model, tmp_path / "out", verify=True)
    assert torch.equal(ServedCheckpoint(tmp_path / "out").tensors["2.weight"], flat[-16:])


def test_signs_and_conjugates_that_pytorch_has_still_to_take_are_written(tmp_path) -> None:
    model = nn.Sequential(fp4engine.Linear(16, 16, recipe=WEIGHT_ONLY))
    phases = torch.polar(torch.ones(4), torch.arange(4.0))
    model.register_buffer("phases", phases.conj())
    model.register_buffer("sines", torch._neg_view(phases.imag.contiguous()))
    export_checkpoint(model, tmp_path / "out", verify=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["phases"], phases.conj())
    assert torch.equal(tensors["sines"], -phases.imag)


def test_an_export_in_inference_mode_writes_the_same_bytes(tmp_path) -> None:
    model = converted()
    export_checkpoint(model, tmp_path / "out")
    with torch.inference_mode():
        export_checkpoint(model, tmp_path / "inference", verify=True)
        verify_checkpoint(model, tmp_path / "out")
    files = [tmp_path / name / "model.safetensors" for name in ("out", "inference")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_no_reader_would_tie_is_written_by_each_of_its_names(tmp_path) -> None:
    model = llama(num_hidden_layers=2)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    fp4engine.convert(model, WEIGHT_ONLY, keep_high_precision=["lm_head"])
    export_checkpoint(model, tmp_path / "out", verify=True)
    tensors = ServedCheckpoint(tmp_path / "out").tensors
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    assert "model.layers.1.input_layernorm.weight" in tensors


@pytest.mark.parametrize("by_weights", [False, True])
def test_a_head_that_is_not_what_readers_tie_it_to_is_refused(tmp_path, by_weights: bool) -> None:
    model = llama(tie_word_embeddings=True)
    fp4engine.convert(model, WEIGHT_ONLY, keep_high_precision=["lm_head"])
    export_checkpoint(model, tmp_path / "tied")
    assert "lm_head.weight" not in ServedCheckpoint(tmp_path / "tied").tensors
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = torch.randn(64, 32)
    if not by_weights:
        model.lm_head.weight = nn.Parameter(weights["lm_head.weight"])
    with pytest.raises(ValueError, match=r"'lm_head.weight' has other values than 'model.embed_tokens.weight'"):
        export_checkpoint(model, tmp_path / "out", weights=weights if by_weights else None)


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "input_global_scale"])
def test_a_tensor_with_the_name_of_a_part_is_refused(tmp_path, name) -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32)})
    model["a"].register_buffer(name, torch.ones(1))
    fp4engine.convert(model, NVFP4BlockScaling())
    with pytest.raises(ValueError, match=rf"'a\.{name}' is a part of an FP4 weight, and the model has a tensor"):
        export_checkpoint(model, tmp_path / "out", inputs={"a": 5.0})
    assert not list(tmp_path.iterdir())


def test_values_may_come_from_files_in_shards(tmp_path) -> None:
    model = converted()
    model.save_pretrained(tmp_path / "trained")
    empty = converted().to("meta")
    with pytest.raises(ValueError, match="meta device, without values"):
        export_checkpoint(empty, tmp_path / "empty")
    whole = export_checkpoint(model, tmp_path / "whole")
    parts = export_checkpoint(
        empty, tmp_path / "parts", weights=TensorFolder(tmp_path / "trained"), max_shard_size=5000, verify=True
    )
    assert parts.layers == whole.layers
    left, right = ServedCheckpoint(tmp_path / "whole").tensors, ServedCheckpoint(tmp_path / "parts").tensors
    assert set(left) == set(right)
    assert all(torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left)
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "parts" / file).stat().st_size < 12_000 for file in files)


def test_tokenizers_and_generation_settings_go_along(tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "model.safetensors").write_text("not copied")
    export_checkpoint(converted(), tmp_path / "out", tokenizer=source)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_what_may_be_refused_beside_the_weights_is_refused_before_they_are_cast(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fp4engine.export.checkpoint.encode", lambda *arguments: pytest.fail("hours are lost"))
    with pytest.raises(ValueError, match="tokenizer must be a directory with a tokenizer's files"):
        export_checkpoint(converted(), tmp_path / "out", tokenizer=tmp_path)
    model = converted()
    model.generation_config.temperature = 0.5  # without do_sample, which transformers refuses to save
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        export_checkpoint(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["encode", "write_json", "compare", "save_file"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch, moment, error) -> None:
    import fp4engine.export.checkpoint as checkpoint
    import fp4engine.export.writer as writer

    owner = writer if moment == "save_file" else checkpoint
    original, calls = getattr(owner, moment), []

    def interrupted(*arguments, **more):
        calls.append(moment)
        if moment != "encode" or len(calls) > 5:
            raise error
        return original(*arguments, **more)

    monkeypatch.setattr(owner, moment, interrupted)
    with pytest.raises(error):
        export_checkpoint(converted(), tmp_path / "out", verify=True)
    assert calls and not list(tmp_path.iterdir())


def test_a_full_disk_raises_an_error_that_names_the_file_and_leaves_nothing(tmp_path) -> None:
    model = converted()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file of more bytes, for the reason of a full disk
    try:
        with pytest.raises(OSError, match=r"part-00001\.safetensors cannot be written: .*too large"):
            export_checkpoint(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_killed_export_leaves_no_directory_of_that_name(tmp_path) -> None:
    script = """
import sys, time, torch, fp4engine
import fp4engine.export.checkpoint as checkpoint
from fp4engine.recipe import zoo
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
fp4engine.convert(model, zoo.make("nvfp4_weight_only"))
original, count = checkpoint.encode, [0]
def slow(*arguments):
    count[0] += 1
    if count[0] == 6:
        print("half way", flush=True)
        time.sleep(600)
    return original(*arguments)
checkpoint.encode = slow
checkpoint.export_checkpoint(model, sys.argv[1], max_shard_size=3000)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half way\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".incomplete")
    assert list(left.glob("part-*.safetensors"))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fp4engine.convert(model, WEIGHT_ONLY)
    export_checkpoint(model, tmp_path / "out")
    assert list(ServedCheckpoint(tmp_path / "out").layers) == list(map(str, range(8)))


def test_what_is_there_is_never_overwritten(tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ValueError, match="there already and not empty"):
        export_checkpoint(converted(), tmp_path / "out")
    assert (tmp_path / "out" / "precious").read_text() == "x" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "empty").mkdir()
    export_checkpoint(converted(), tmp_path / "empty")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(tmp_path, is_there) -> None:
    if is_there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    export_checkpoint(converted(), tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and ServedCheckpoint(tmp_path / "disk").layers
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "out"}


def test_the_current_directory_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="directory must not be the current one"):
        export_checkpoint(converted(), ".")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_configuration_says_the_dtype_that_readers_decode_to(tmp_path, form, dtype) -> None:
    export_checkpoint(converted().to(dtype), tmp_path / "out", form)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


PLACES = ("../out/model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin")
"""Of tensors, by the index of a checkpoint that is not to be trusted."""


class TestHostile:
    """One clear error for each way in which a checkpoint can be wrong."""

    @pytest.fixture(params=FORMATS)
    def folder(self, request, tmp_path) -> Path:
        self.model = converted()
        export_checkpoint(self.model, tmp_path / "out", request.param, max_shard_size=20_000)
        return tmp_path / "out"

    def change(self, folder: Path, name: str, change) -> None:
        """Apply ``change`` to one tensor in its file."""
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = folder / index["weight_map"][name]
        tensors = load_file(file)
        tensors[name] = change(tensors[name])
        save_file(tensors, file)

    def test_verified_as_it_is(self, folder) -> None:
        result = verify_checkpoint(self.model, folder, progress=False)
        assert result.layers == 14 and result.others == 7 and "0 bytes differ" in str(result)
        assert result.readers[1].verdict == "agrees"

    @pytest.mark.parametrize("kept", [0, 7, 100, -1])
    def test_truncated_files(self, folder, kept) -> None:
        file = sorted(folder.glob("*.safetensors"))[1]
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(CheckpointError, match=f"{file.name} is truncated or no safetensors file"):
            ServedCheckpoint(folder)

    def test_a_header_that_promises_terabytes(self, folder) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        file.write_bytes((1 << 50).to_bytes(8, "little") + file.read_bytes()[8:])
        with pytest.raises(CheckpointError, match="is truncated or no safetensors file"):
            ServedCheckpoint(folder)

    def test_missing_file(self, folder) -> None:
        sorted(folder.glob("*.safetensors"))[1].unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            ServedCheckpoint(folder)

    def test_pickles_are_never_opened(self, tmp_path) -> None:
        (tmp_path / "pickle").mkdir()
        (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
        with pytest.raises(CheckpointError, match=r"'pytorch_model\.bin' may hold a pickle, which is never opened"):
            ServedCheckpoint(tmp_path / "pickle")

    @pytest.mark.parametrize(
        ("place", "said"),
        [
            *((place, "no safetensors file of this directory") for place in PLACES),
            ("m" * 400 + ".safetensors", r"m\.safetensors is missing"),
            (None, r"disagrees with .* about 1 tensors, e\.g\. 'made\.up'"),
        ],
    )
    def test_an_index_that_points_elsewhere_or_lies(self, folder, place, said) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        files = index["weight_map"]
        files["made.up" if place is None else "lm_head.weight"] = place or files["lm_head.weight"]
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=said):
            ServedCheckpoint(folder)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[1]",
            '{"weight_map": 3}',
            '{"weight_map": {}}',
            '{"weight_map": {"a": 1}}',
            '{"weight_map": ' + "9" * 10_000 + "}",
            "[" * 100_000,
            "\x00",
        ],
    )
    def test_an_index_that_is_none(self, folder, text) -> None:
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            ServedCheckpoint(folder)

    def test_a_configuration_that_is_none(self, folder) -> None:
        form = ServedCheckpoint(folder).form
        for text in ("", "null", "{}", '{"quantization_config": 3}', '{"quantization": {"quant_algo": "FP8"}}'):
            (folder / form.config_file).write_text(text)
            with pytest.raises(CheckpointError, match=form.config_file):
                ServedCheckpoint(folder)

    @pytest.mark.parametrize(
        ("part", "change"),
        [
            (0, lambda t: t.int()),
            (0, lambda t: t[:, :-1].contiguous()),
            (0, lambda t: t[None]),
            (1, lambda t: t.float()),
            (1, lambda t: t.T.contiguous()),
            (2, lambda t: t.half()),
            (2, lambda t: t * 0),
            (2, lambda t: -t),
            (2, lambda t: t * float("nan")),
            (2, lambda t: t / 0),
            (2, lambda t: t.repeat(2)),
        ],
    )
    def test_parts_of_other_types_shapes_and_values(self, folder, part, change) -> None:
        form = ServedCheckpoint(folder).form
        self.change(folder, f"model.layers.0.mlp.up_proj.{form.parts(NVFP4)[part]}", change)
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj"):
            ServedCheckpoint(folder)

    @pytest.mark.parametrize(("byte", "value"), [(0x7F, "nan"), (0xB8, "-1.0")])
    def test_a_block_scale_that_is_no_number_or_negative(self, folder, byte, value) -> None:
        layer, spoilt = "model.layers.0.mlp.up_proj", torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.change(folder, f"{layer}.weight_scale", lambda t: torch.cat([spoilt.expand(1, t.shape[1]), t[1:]]))
        with pytest.raises(CheckpointError, match=f"'{layer}.weight_scale' must hold finite .* 0, got {value}"):
            ServedCheckpoint(folder).weight(layer)


def test_others_may_read_what_the_umask_lets_them(tmp_path) -> None:
    before = os.umask(0o022)
    try:
        export_checkpoint(converted(), tmp_path / "out", progress=False)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644} and (tmp_path / "out").stat().st_mode & 0o777 == 0o755


LAYER = "model.layers.0.mlp.up_proj"
LISTED = f"'{LAYER}' is in codes, and .* lists it as left alone"
GROUP = ("quantization_config", "config_groups", "group_0")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("quantization_config", "ignore"), ["lm_head", LAYER], LISTED),
        (("quantization_config", "ignore"), ["re:("], "is no regular expression"),
        (("quantization_config", "ignore"), [], "'lm_head' stayed as it was, and the configuration does not say so"),
        (("quantization_config", "config_groups"), [], "none of its config_groups has"),
        ((*GROUP, "targets"), ["Conv2d"], "none of its config_groups has"),
        ((*GROUP, "targets"), "Linear", "none of its config_groups has"),
        ((*GROUP, "targets"), [3], "none of its config_groups has"),
        ((*GROUP, "weights", "strategy"), "channel", "describes the weight of .* which is of no known form"),
        ((*GROUP, "weights", "symmetric"), False, "describes the weight of .* which is of no known form"),
        ((*GROUP, "weights"), {"num_bits": 8}, "describes the weight of .* which is of no known form"),
        ((*GROUP, "weights"), None, "describes the weight of .* which is of no known form"),
        ((*GROUP, "input_activations"), {"num_bits": 8}, "describes the input of .* which is no input beside NVFP4"),
        ((*GROUP, "input_activations"), None, "are described as weight-only, and .*global_scale' is there"),
        (("quantization", "exclude_modules"), ["lm_head", LAYER], LISTED),
        (("quantization", "exclude_modules"), [], "'lm_head' stayed as it was, and the configuration does not say so"),
        (("quantization", "group_size"), 32, "group_size must be 16, got 32"),
        (("quantization", "quant_algo"), "W4A16_NVFP4", r"are described as weight-only, and .*input_scale' is there"),
    ],
)
def test_a_configuration_that_servers_would_read_otherwise_is_found(tmp_path, place, value, words) -> None:
    model, form = converted(NVFP4BlockScaling()), FORMATS[place[0] == "quantization"]
    inputs = calibrate(model, [tokens()], progress=False)
    export_checkpoint(model, tmp_path / "out", form, inputs=inputs, verify=True)
    path = tmp_path / "out" / ("config.json" if place[0] == "quantization_config" else "hf_quant_config.json")
    data = json.loads(path.read_text())
    section = data
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=words):
        verify_checkpoint(model, tmp_path / "out", progress=False)


@pytest.mark.parametrize("index", [1, 2, None], ids=["block scales", "outer scale", "input scale"])
@pytest.mark.parametrize("form", FORMATS)
def test_scales_that_are_missing_are_found(tmp_path, form, index) -> None:
    model = converted(NVFP4BlockScaling())
    export_checkpoint(model, tmp_path / "out", form, inputs=calibrate(model, [tokens()], progress=False))
    path = tmp_path / "out" / "model.safetensors"
    parts = ServedCheckpoint(tmp_path / "out").form
    part = f"{LAYER}.{parts.input_scale(NVFP4) if index is None else parts.parts(NVFP4)[index]}"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != part}, path)
    said = f"described as static, and '{part}' is not there" if index is None else f"'{LAYER}' has no '{part}'"
    with pytest.raises(CheckpointError, match=said):
        ServedCheckpoint(tmp_path / "out")


def test_no_bar_where_there_is_no_terminal(tmp_path, capfd) -> None:
    export_checkpoint(converted(), tmp_path / "out")
    assert "export" not in capfd.readouterr().err


@pytest.mark.parametrize("amplitude", [1e-30, 1e-25, 1e25])
def test_the_report_tells_the_error_of_weights_whose_squares_leave_fp32(tmp_path, amplitude) -> None:
    layer, sibling = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
    model = nn.ModuleDict({"q_proj": layer, "k_proj": sibling})
    with torch.no_grad():
        layer.weight.mul_(amplitude)
    fp4engine.convert(model, LinearRecipe(weight=Casts(CastSpec())))
    for name, shared in (("alone", ()), ("shared", [("q_proj", "k_proj")])):
        entry, _ = export_checkpoint(model, tmp_path / name, shared_scales=shared, force=True).layers
        codes, scales, _ = ServedCheckpoint(tmp_path / name).operand("q_proj")
        weight = model["q_proj"].weight.detach().double()
        decoded = fp4engine.reference.decode(codes, scales, CastSpec()).double() * entry.amax / CastSpec().numerator
        assert entry.error == pytest.approx(float((decoded - weight).norm() / weight.norm()), rel=1e-4)
