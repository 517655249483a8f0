"""LoRA by the real PEFT, before and after conversion, on plain weights and on weights stored as codes."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fp4engine
from fp4engine import qat
from fp4engine.export import TensorFolder, export_checkpoint, share_amax
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe
from tests.tiny import architecture, llama, tokens

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


@pytest.mark.parametrize("saved", [None, ["down_proj"]])
def test_adapters_and_layers_saved_beside_them_change_no_name(saved) -> None:
    """A rule by name went on being about a layer that an adapter has been put around, and about PEFT's copy of one."""
    model = base()
    fp4engine.convert(model)
    recipe = RuledRecipe(RECIPE, (Rule(LinearRecipe(), "model.layers.1.**.down_proj"), Rule(LinearRecipe(), "lm_head")))
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", *([] if saved else ["down_proj"])], modules_to_save=saved)
    tuned = peft.get_peft_model(model, settings)
    for each in (tuned, copy.deepcopy(tuned)):
        with fp4engine.autocast(recipe=recipe):
            each(tokens()).logits.sum().backward()
        ran = {m.name: {formats for _, formats in m.counts} for m in fp4engine.executed_gemms(each).modules if m.counts}
        high = [name for name, formats in ran.items() if formats == {"high_precision"} and "lora" not in name]
        assert [name.partition("layers.")[2].partition("_proj")[0] for name in high] == ["1.mlp.down", ""]
        assert len(ran) == 15 and all(len(formats) == 1 for formats in ran.values()) and high[-1].endswith("lm_head")


@pytest.mark.parametrize("flag", [False, True], ids=["region", "flag"])
def test_adapters_merge_and_unmerge_within_a_cache(flag: bool, monkeypatch) -> None:
    """PEFT writes through ``weight.data``, which moves no version counter."""
    model = base()
    convert(model)
    tuned = with_adapters(model)
    layers = [m for m in model.modules() if isinstance(m, fp4engine.Linear)]
    if flag:
        for layer in layers:
            layer.forward = partial(fp4engine.Linear.forward, layer, is_first_microbatch=False)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return tuned(tokens()).logits

    with nullcontext() if flag else fp4engine.weight_cache(tuned):
        for change in (lambda: None, tuned.merge_adapter, tuned.unmerge_adapter):
            change()
            found = logits()
            with monkeypatch.context() as plain:
                plain.setattr(fp4engine.modules.Gemms, "_cache", lambda *_: None)
                assert torch.equal(found, logits())


@pytest.mark.parametrize("has_run", [False, True])
def test_siblings_share_their_amax_under_adapters_that_came_later(has_run: bool) -> None:
    """Before its first forward, a model was told that its siblings were another model's."""
    model = base()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    qat.prepare(model, keep_high_precision=["lm_head"])
    expected = copy.deepcopy(model)(tokens()).logits
    if has_run:
        model(tokens())
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))  # adds 0 before it has trained
    assert torch.equal(tuned(tokens()).logits, expected)
    with pytest.raises(ValueError, match=r"share the amaxes of .* of another model"):
        recipe = share_amax(base(), RECIPE)
        with fp4engine.autocast(recipe=recipe):
            tuned(tokens())


def test_an_attention_that_peft_adapts_is_planned_once() -> None:
    """PEFT makes the parameters of ``nn.MultiheadAttention`` anew whenever somebody asks for modules."""
    attention = torch.nn.MultiheadAttention(16, 2)
    model = peft.get_peft_model(torch.nn.ModuleList([attention]), peft.LoraConfig(r=4, target_modules=["0"]))
    plan = fp4engine.convert(model, RECIPE)
    assert plan.matrices == () and len(plan.converted) == 2
    x = torch.randn(4, 2, 16)
    model.base_model.model[0](x, x, x)[0].sum().backward()
    fp4engine.assert_quantized(model)


def test_adapters_that_are_not_merged_are_not_left_out_of_what_is_served(tmp_path) -> None:
    for stored in (False, True):
        model = base()
        convert(model)
        if stored:
            fp4engine.quantize_weights(model)
        model = with_adapters(model)
        for part in (model, model.base_model.model):
            with pytest.raises(ValueError, match=r"q_proj' has an adapter of PEFT, .* merge first"):
                export_checkpoint(part, tmp_path / "out", inputs="high_precision")
        if stored:
            fp4engine.dequantize_weights(model)
        merged = model.merge_and_unload()
        assert len(export_checkpoint(merged, tmp_path / f"{stored}", inputs="high_precision", verify=True).layers) == 14


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
    held = [t.untyped_storage() for t in plain if t.device.type == "cpu" and t.layout == torch.strided and not lost(t)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def lost(tensor: torch.Tensor) -> bool:
    """Whether it is what FakeTensorMode has left behind, which has no memory."""
    try:
        return tensor.untyped_storage().data_ptr() < 0
    except RuntimeError:
        return True


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

    class Watched(TensorFolder):
        def __getitem__(self, name):
            assert all(parameter.is_meta for parameter in on_meta.parameters())  # until all are made
            return super().__getitem__(name)

    report = fp4engine.quantize_weights(on_meta, weights=Watched(tmp_path))
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


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model):
    """Adapters on attention and on every expert, or on ``Conv1D``."""
    torch.manual_seed(1)
    if type(model).__name__.startswith("GPT2"):
        targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    else:
        targets = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))


def order(name, steps):
    torch.manual_seed(0)
    fp4engine.manual_seed(3)
    model = architecture(name)
    for step in steps:
        model = step(model) or model
    return model


def keep_head(model) -> None:
    fp4engine.convert(model, RECIPE, keep_high_precision=["**.lm_head"])


def store(model) -> None:
    fp4engine.quantize_weights(model)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gpt_oss"])
def test_adapters_on_experts_and_conv1d_are_the_same_in_any_order_and_on_codes(name) -> None:
    orders = [(keep_head, adapted), (adapted, keep_head), (keep_head, store, adapted), (adapted, keep_head, store)]
    losses = []
    for steps in orders:
        model = order(name, steps)
        losses.append(train(model.train(), 3))
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert losses[0] == losses[1] == losses[2] == losses[3] and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gpt_oss"])
def test_merging_into_stored_experts_is_refused_and_right_after_decoding(name) -> None:
    model = adapted(order(name, [keep_head, store]))
    for safe in (False, True):
        with pytest.raises(RuntimeError, match=r"fp4engine\.dequantize_weights\(model\) first"):
            copy.deepcopy(model).merge_and_unload(safe_merge=safe)
    fp4engine.dequantize_weights(model)
    with torch.no_grad(), fp4engine.autocast(enabled=False):
        expected = model(tokens()).logits
        merged = model.merge_and_unload()
        fp4engine.revert(merged)
        torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_adapter_on_experts_is_multiplied_in_high_precision_beside_the_weight(name) -> None:
    """A product by ``W + s A B`` would round the adapter to FP4: so small a one would change nothing but the codes."""
    model = adapted(order(name, [keep_head]))
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    seen = {}

    def outputs(module, args, output) -> None:
        seen.setdefault(module, []).append((args[0].detach(), args[1].tolist(), output.detach()))

    for gemms in (experts.up_gemms, experts.down_gemms):
        gemms.register_forward_hook(outputs)
    with torch.no_grad():
        model(tokens())
        with model.disable_adapter():
            wrapper = model.base_model.model.model.layers[0].mlp.experts
            up = next(w for w in (wrapper, wrapper.base_layer) if w.parameter_name == "gate_up_proj")
            inp, counts, output = seen[experts.up_gemms][0]
            base = experts.up_gemms(inp, torch.tensor(counts))
            delta = up.get_delta_weight("default")
            delta = delta.mT if experts.is_transposed else delta
            rows = zip(inp.split(counts), delta, strict=True)
            torch.testing.assert_close(output - base, torch.cat([x @ d.T for x, d in rows]), rtol=1e-4, atol=1e-5)


def test_two_adapters_on_experts_add_up() -> None:
    model = adapted(order("mixtral", [keep_head, store]))
    torch.manual_seed(2)
    settings = model.peft_config["default"]
    model.add_adapter("second", settings)
    logits = []
    with torch.no_grad():
        for active in (["default"], ["second"], ["default", "second"]):
            model.base_model.set_adapter(active)
            logits.append(model(tokens()).logits)
        fp4engine.dequantize_weights(model)
        with fp4engine.autocast(enabled=False):
            expected = model(tokens()).logits
            merged = model.merge_and_unload(adapter_names=["default", "second"])
            torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[2]) and not torch.equal(logits[1], logits[2])
