"""LoRA by the real PEFT, before and after conversion, on plain weights and on weights stored as codes."""

import copy
import gc

import pytest
import torch

import fp4engine
from fp4engine.export import TensorFolder
from fp4engine.recipe import NVFP4BlockScaling
from tests.tiny import llama, tokens

accelerate = pytest.importorskip("accelerate", reason="needs the extra `integrations`")
peft = pytest.importorskip("peft", reason="needs the extra `integrations`")

RECIPE = NVFP4BlockScaling()
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base():
    torch.manual_seed(0)
    return llama(tie_word_embeddings=True)


def with_adapters(model):
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def convert(model, **arguments):
    return fp4engine.convert(model, RECIPE, keep_high_precision=["**.lm_head"], **arguments)


def adapters(model) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules() if "lora_" in name and isinstance(m, torch.nn.Linear)}


def train(model, steps=6) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adapters_stay_in_high_precision_in_either_order() -> None:
    first, second = base(), with_adapters(base())
    convert(first)
    first = with_adapters(first)
    plan = convert(second)
    assert set(adapters(first).values()) == set(adapters(second).values()) == {torch.nn.Linear}
    assert {m.name for m in plan.left_alone} == {*adapters(second), "base_model.model.lm_head"}
    assert {m.reason for m in plan.left_alone if "lora" in m.name} == {"an adapter; adapters=True converts it"}
    with torch.no_grad():
        assert torch.equal(first(tokens()).logits, second(tokens()).logits)
    asked = with_adapters(base())
    convert(asked, adapters=True)
    assert set(adapters(asked).values()) == {fp4engine.Linear}


def test_lora_on_codes_is_lora_on_the_weights_bit_for_bit() -> None:
    losses, sizes = [], []
    for stored in (False, True):
        fp4engine.manual_seed(3)
        model = base()
        convert(model)
        if stored:
            report = fp4engine.quantize_weights(model)
            assert len(report.quantized) == 14 and set(report.left_alone) == set()
            sizes = [report.nbytes_before, report.nbytes_after]
        model = with_adapters(model)
        losses.append(train(model))
        layer = model.base_model.model.model.layers[0].mlp.down_proj
        assert layer.base_layer.weight.grad is None and layer.lora_A.default.weight.grad is not None
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    kept = sum(p.nbytes for n, p in base().named_parameters() if "embed" in n or "norm" in n)
    elements = sum(p.numel() for n, p in base().named_parameters()) - kept // 4
    assert sizes[1] - kept == elements * 9 // 16 + 14 * 4  # 4.5 bits, and an amax each


def test_merging_into_codes_is_refused_and_right_after_decoding() -> None:
    model = base()
    convert(model)
    fp4engine.quantize_weights(model)
    model = with_adapters(model)
    train(model, 2)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    codes = layer.base_layer.weight.codes.clone()
    for safe in (False, True):
        with pytest.raises(RuntimeError, match=r"fp4engine\.dequantize_weights\(model\) first"):
            copy.deepcopy(model).merge_and_unload(safe_merge=safe)
    assert torch.equal(layer.base_layer.weight.codes, codes)
    with torch.no_grad():
        expected = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")
    assert len(fp4engine.dequantize_weights(model)) == 14
    merged = model.merge_and_unload()
    assert torch.equal(merged.model.layers[1].self_attn.q_proj.weight, expected)
    with pytest.raises(ValueError, match="is stored as codes"):
        fp4engine.dequantize_weights(merged)


def bytes_alive() -> int:
    """Of all plain tensors in this process that hold values, each storage once; codes among them."""
    plain = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == "cpu"}
    return sum(storages.values())


def test_the_model_in_high_precision_never_exists_at_once(tmp_path) -> None:
    plain = llama(hidden_size=128, intermediate_size=256, num_hidden_layers=6)
    plain.save_pretrained(tmp_path)
    weights, largest = sum(p.nbytes for p in plain.parameters()), max(p.nbytes for p in plain.parameters())
    with torch.device("meta"):
        empty = type(plain)._from_config(plain.config)
    del plain
    gc.collect()
    before, peak = bytes_alive(), 0

    class Watched(TensorFolder):
        def __getitem__(self, name):
            nonlocal peak
            value = super().__getitem__(name)
            peak = max(peak, bytes_alive() - before)
            return value

    convert(empty)
    report = fp4engine.quantize_weights(empty, weights=Watched(tmp_path))
    assert report.nbytes_after < 0.2 * weights
    assert peak < report.nbytes_after + 2 * largest < 0.35 * weights


@pytest.mark.parametrize("built", ["on meta", "by accelerate"])
def test_codes_are_made_layer_by_layer_from_files(tmp_path, built) -> None:
    plain = base()
    plain.save_pretrained(tmp_path)
    if built == "on meta":
        with torch.device("meta"):
            on_meta = type(plain)._from_config(plain.config)
    else:
        with accelerate.init_empty_weights():
            on_meta = base()
        on_meta.tie_weights()
    for model in (plain, on_meta):
        convert(model)
    fp4engine.quantize_weights(plain)
    largest = 0

    class Watched(TensorFolder):
        def __getitem__(self, name):
            nonlocal largest
            alive = [
                p
                for p in on_meta.parameters()
                if not p.is_meta and not isinstance(p, fp4engine.QuantizedWeight) and p.ndim == 2
            ]
            largest = max(largest, len({id(p) for p in alive}))
            return super().__getitem__(name)

    report = fp4engine.quantize_weights(on_meta, weights=Watched(tmp_path))
    assert largest == 1  # the embedding
    assert report.nbytes_after < report.nbytes_before
    assert on_meta.lm_head.weight is on_meta.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(on_meta(tokens()).logits, plain(tokens()).logits)


def test_what_cannot_be_stored_is_refused(tmp_path) -> None:
    model = base()
    with pytest.raises(ValueError, match=r"fp4engine\.convert\(model, recipe\) comes first"):
        fp4engine.quantize_weights(model)
    fp4engine.convert(model)
    with pytest.raises(ValueError, match="follows autocast regions only"):
        fp4engine.quantize_weights(model)
    with pytest.raises(ValueError, match="scales by those of earlier steps"):
        fp4engine.quantize_weights(model, fp4engine.recipe.DelayedScaling())
    with pytest.raises(ValueError, match="weights lacks"):
        fp4engine.quantize_weights(model, RECIPE, weights={})
    assert not any(isinstance(parameter, fp4engine.QuantizedWeight) for parameter in model.parameters())
    empty = base().to("meta")
    empty.tie_weights()
    convert(empty)
    empty.register_buffer("unknown", torch.zeros(3, device="meta"), persistent=False)
    plain = base()
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'unknown' is on the meta device"):
        fp4engine.quantize_weights(empty, weights=TensorFolder(tmp_path))
    tied = base()
    fp4engine.convert(tied, RECIPE)
    assert fp4engine.quantize_weights(tied).left_alone == {"lm_head": "it is also model.embed_tokens.weight"}


def test_codes_travel_in_state_dicts(tmp_path) -> None:
    model = base()
    convert(model)
    fp4engine.quantize_weights(model)
    torch.save(model.state_dict(), tmp_path / "codes.pt")
    other = base()
    torch.nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
    convert(other)
    fp4engine.quantize_weights(other)
    other.load_state_dict(torch.load(tmp_path / "codes.pt", weights_only=True))
    left, right = (m.model.layers[0].mlp.up_proj.weight for m in (model, other))
    assert torch.equal(left.codes, right.codes) and right.is_frozen
    fp4engine.revert(model)
    assert type(model.model.layers[0].mlp.up_proj.weight) is torch.nn.Parameter
