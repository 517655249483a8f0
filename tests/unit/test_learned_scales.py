"""Scales that train: their gradients, their own learning rate, and what is exported of them."""

import copy

import pytest
import torch
from torch import nn

import fp4engine
from fp4engine import qat
from fp4engine.export import ServedCheckpoint, calibrate, compare_served, export_checkpoint
from fp4engine.formats import CastSpec
from fp4engine.modules.learned_scales import LearnedScales
from fp4engine.recipe import NVFP4BlockScaling, zoo
from tests.tiny import architecture, llama, tokens

SPECS = {
    "1x16": CastSpec(),
    "tiles": zoo.TILES,
    "clipped": CastSpec(target=6 / 0.8),
    "4/6": zoo.make("nvfp4_4over6").casts("weight").rowwise,
}


def learned(spec, rows=40, learn=("block", "outer")):
    weight = torch.randn(rows, 48)
    operand = fp4engine.Quantizer(spec).quantize(weight, columnwise=False).rowwise
    return weight, operand, LearnedScales(operand, learn)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_scales_start_as_those_of_the_cast(spec) -> None:
    weight, operand, scales = learned(spec)
    torch.testing.assert_close(scales(weight), operand.dequantize(), rtol=1e-6, atol=0)
    stored = scales.operand(weight)
    assert torch.equal(stored.scale_inv.view(torch.uint8), operand.scale_inv.view(torch.uint8))
    assert torch.equal(stored.codes, operand.codes) and torch.equal(stored.dequantize(), scales(weight))
    assert scales(weight.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_are_those_of_learned_step_sizes(spec) -> None:
    """Against PyTorch's through ``clamp(w / s) + (e - clamp(w / s)).detach()``, times ``s``."""
    weight, _, scales = learned(spec)
    with torch.no_grad():
        scales.block += 0.3 * torch.randn_like(scales.block) - 0.2  # some values saturate
        step = scales.block.exp2().clamp(max=448).to(torch.float8_e4m3fn).float() * scales.outer.exp2() / spec.numerator
        edge = (weight / step.repeat_interleave(spec.block[0], 0)[:40].repeat_interleave(16, 1)).abs()
        weight[(edge - 6).abs() < 1e-5] *= 0.99  # where the last bit of a quotient would say whether it saturates
    grad = torch.randn(40, 48)
    weight.requires_grad_()
    scales(weight).backward(grad)
    found = weight.grad, scales.block.grad, scales.outer.grad
    weight.grad = scales.block.grad = scales.outer.grad = None
    exact = scales.block.exp2()
    rounded = exact.detach().clamp(max=448).to(torch.float8_e4m3fn).float()  # which torch 2.11 does not saturate
    rounded = rounded * (exact / exact.detach())  # which passes gradients straight through the rounding
    step = rounded.repeat_interleave(spec.block[0], 0)[:40] * scales.outer.exp2() / spec.numerator
    quotient = (weight.view(40, 3, 16) / step[..., None]).clamp(-6, 6)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    elements = grid[(quotient.detach().abs()[..., None] - grid).abs().argmin(-1)] * quotient.detach().sign()
    ((quotient + (elements - quotient).detach()) * step[..., None]).view(40, 48).backward(grad)
    torch.testing.assert_close(found[0], weight.grad, rtol=1e-5, atol=1e-6)
    size = spec.block[0] * 16
    torch.testing.assert_close(found[1], scales.block.grad / (6 * size) ** 0.5, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[2], scales.outer.grad / (6 * 40 * 48) ** 0.5, rtol=1e-3, atol=1e-5)


def batches(count: int):
    return [(tokens() + index) % 60 + 1 for index in range(count)]


def divergence(model, teacher) -> float:
    with torch.no_grad():
        return sum(float(qat.distillation_loss(model(x).logits, teacher(x).logits)) for x in batches(2))


@pytest.mark.parametrize("learn", ["block", "outer", ("block", "outer")], ids=str)
def test_scales_alone_are_distilled_and_exported(tmp_path, learn) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    model = llama().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # logits that differ by more than rounding
    teacher = llama()
    teacher.load_state_dict(model.state_dict())
    qat.prepare(
        model, inputs=False, clip=0.6, learn=learn, keep_high_precision=["lm_head"]
    )  # scales that are too small
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = divergence(model, teacher)
    groups = qat.parameter_groups(model, 3e-2, scales_alone=True)
    assert len(groups) == 1 and groups[0]["lr"] == 3e-2 and groups[0]["weight_decay"] == 0
    optimizer = torch.optim.Adam(groups)
    for _ in range(3):
        for x in batches(2):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x).logits
            qat.distillation_loss(model(x).logits, wanted).backward()
            optimizer.step()
    assert divergence(model, teacher) < 0.97 * start
    changed = {
        name.rpartition(".")[2] for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == ({learn} if isinstance(learn, str) else set(learn))
    with pytest.raises(ValueError, match=r"still learns the scales of its weight: call fp4engine\.qat\.finalize"):
        export_checkpoint(model, tmp_path / "out")
    with torch.no_grad():
        trained = model(tokens()).logits
        stored = qat.finalize(model)
        assert len(stored.quantized) == 14 and stored.nbytes_after < stored.nbytes_before
        torch.testing.assert_close(model(tokens()).logits, trained, rtol=1e-5, atol=1e-5)
    for form in ("compressed-tensors", "modelopt"):
        report = export_checkpoint(model, tmp_path / form, form, verify=True if form == "modelopt" else "files")
        assert report.rescaled == () and report.readers[-1].verdict == "agrees"
        assert compare_served(model, tmp_path / form, [tokens()], progress=False).logits < 1e-5
    attention = model.model.layers[0].self_attn
    assert torch.equal(
        ServedCheckpoint(tmp_path / "modelopt").operand("model.layers.0.self_attn.q_proj")[0],
        attention.q_proj.weight.codes,
    )


def test_weights_and_scales_train_at_rates_of_their_own_in_tiles(tmp_path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    model = llama(intermediate_size=80).train()
    qat.prepare(model, tiles=True, learn=("block", "outer"), keep_high_precision=["lm_head"])
    attention = model.model.layers[1].self_attn
    scales = [attention.get_submodule(f"{name}_proj.parametrizations.weight.0") for name in "qkv"]
    assert scales[0].outer is scales[1].outer is scales[2].outer and scales[0].block.shape == (2, 2)
    others, own = qat.parameter_groups(model, 1e-2)
    # 14 layers with block scales; one outer scale each of q/k/v, o, gate/up and down
    assert len(own["params"]) == 14 + 2 * 4 and len(others["params"]) == len(list(model.parameters())) - 22
    optimizer = torch.optim.AdamW([others, own], lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    resumed = llama(intermediate_size=80).eval()
    qat.prepare(resumed, tiles=True, learn=("block", "outer"), keep_high_precision=["lm_head"])
    resumed.load_state_dict(model.state_dict())
    inputs = calibrate(model, [tokens()], progress=False)
    with torch.no_grad():
        trained = model(tokens()).logits
        assert torch.equal(resumed(tokens()).logits, trained)
        qat.finalize(model)
        torch.testing.assert_close(model(tokens()).logits, trained, rtol=1e-5, atol=1e-5)
    report = export_checkpoint(model, tmp_path / "out", inputs=inputs, verify=True)
    assert report.rescaled == () and {layer.cast for layer in report.layers} == {"e2m1 16x16"}
    assert [reading.verdict for reading in report.readers] == ["agrees", "agrees"]
    model.save_pretrained(tmp_path / "codes")
    assert (tmp_path / "codes" / "model.safetensors").exists()


def test_experts_keep_the_scales_of_their_amaxes_and_are_named() -> None:
    model = architecture("mixtral")
    with pytest.warns(
        UserWarning, match=r"scales are learned of nn\.Linear: 'model\.layers\.0\.mlp\.experts\.up_gemms' and 3"
    ):
        qat.prepare(model, learn="block", keep_high_precision=["lm_head"])
    with torch.no_grad():
        trained = model(tokens()).logits
        down = model.model.layers[0].mlp.experts.down_proj
        kept, down[0, 0, 0] = float(down[0, 0, 0]), torch.nan
        with pytest.raises(ValueError, match="holds a NaN"):
            qat.finalize(model)
        assert qat.parameter_groups(model, 1e-3)  # the scales that it learned are there still
        down[0, 0, 0] = kept
        stored = qat.finalize(model)
        torch.testing.assert_close(model(tokens()).logits, trained, rtol=1e-5, atol=1e-5)
    assert len(stored.quantized) == 8 + 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_16_bits_are_stored_as_they_were_multiplied(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    qat.prepare(model, inputs=False, learn=("block", "outer"))
    model.to(dtype)
    with torch.no_grad():
        model[0].parametrizations.weight[0].outer.fill_(-2.703125)
    trained = model[0].weight.detach()
    qat.finalize(model)
    assert torch.equal(model[0].weight.dequantize(), trained)


def test_a_model_trains_on_when_a_copy_was_finalized() -> None:
    """A deep copy shares the class that PyTorch made, and lost its weight when that was removed from the copy."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    qat.prepare(model, learn="block")
    x = torch.randn(8, 32)
    before, copied = model(x), copy.deepcopy(model)
    qat.finalize(copied)
    assert torch.equal(model(x), before)
    torch.testing.assert_close(copied(x), before)
    qat.finalize(model)
    assert type(model[0]) is type(copied[0]) is fp4engine.Linear and torch.equal(model(x), copied(x))


def test_what_has_no_scales_to_learn_is_refused() -> None:
    for recipe, words in (
        (zoo.make("mxfp8"), "learned of weights in NVFP4, and '0' is cast as 'e4m3 1x32"),
        (zoo.make("nvfp4_1d_weight"), "'0' has another one in its backward pass"),
    ):
        with pytest.raises(ValueError, match=words):
            qat.prepare(nn.Sequential(nn.Linear(32, 32)), recipe, learn="block")
    qat.prepare(nn.Sequential(nn.Linear(32, 32)), NVFP4BlockScaling(), learn="block")
    ragged, x = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 32)), torch.randn(3, 24)
    before = ragged(x)
    with pytest.raises(ValueError, match="whole blocks of 16, and '0' has in_features=24"):
        qat.prepare(ragged, learn="block")
    assert torch.equal(ragged(x), before)
    qat.prepare(ragged, learn="block", keep_high_precision=["0"])
    assert next(name for name, _ in ragged.named_parameters() if name.endswith("block")).startswith("1.")
    for learn in ("all", ["block", "input"], 3, None):
        with pytest.raises(ValueError, match="learn must be"):
            qat.prepare(nn.Sequential(nn.Linear(32, 32)), learn=learn)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="learns no scales"):
        qat.parameter_groups(model, 1e-3)
    qat.prepare(model, learn="block")
    for rate in (0, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="scale_lr must be a positive finite number"):
            qat.parameter_groups(model, rate)
    with torch.no_grad():
        model[0].parametrizations.weight[0].block[0, 0] = float("nan")
    with pytest.raises(ValueError, match="'0' or its learned scales hold a NaN"):
        qat.finalize(model)
    assert qat.parameter_groups(model, 1e-3)
    with pytest.raises(ValueError, match="tiles False beside a recipe"):
        qat.prepare(nn.Sequential(nn.Linear(32, 32)), NVFP4BlockScaling(), tiles=True)


def test_weights_that_learn_their_scales_are_not_given_another_recipe() -> None:
    """It would cast the decoded weights a second time, by the scales of their amaxes."""
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q_proj", "k_proj")})
    qat.prepare(model, learn="block")
    before = model["q_proj"].recipe
    for again in (
        lambda: qat.prepare(model),
        lambda: qat.prepare(model, learn="outer"),
        lambda: fp4engine.convert(model, NVFP4BlockScaling()),
    ):
        with pytest.raises(ValueError, match=r"'q_proj' learns the scales .* call qat.finalize\(model\) first"):
            again()
        assert model["q_proj"].recipe is before
    fp4engine.convert(model)
    assert model["q_proj"].recipe is before
    qat.finalize(model)
    fp4engine.convert(model, NVFP4BlockScaling())


def test_weights_that_learn_their_scales_do_not_follow_regions() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32)
    qat.prepare(model, learn="block")
    with fp4engine.autocast(recipe=NVFP4BlockScaling()), pytest.raises(RuntimeError, match="has its own recipe, and"):
        model(x)
    with fp4engine.autocast(enabled=False):
        assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.isfinite(model(x)).all()


def test_scales_of_a_weight_that_another_module_has_too_are_refused() -> None:
    """The tie broke in finalize: after the training no export took the model, and no reader what it had saved."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    with pytest.raises(ValueError, match=r"'head' is also embed\.weight: give keep_high_precision=\['head'\]"):
        qat.prepare(model, learn="block")
    assert type(model.body) is nn.Linear
    qat.prepare(model, learn="block", keep_high_precision=["head"])
    assert qat.finalize(model).quantized == ("body.weight",)
