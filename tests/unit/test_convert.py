"""convert, its plan, and the count of what ran."""

import copy
import io
import re
from collections.abc import Callable
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.utils.checkpoint
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import fp4engine
from fp4engine.modules.linear import _own_names
from fp4engine.quantizers import IdentityQuantizer
from fp4engine.recipe import CustomRecipe, LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe, ScheduledRecipe

FP4 = ("e2m1 x e2m1",) * 3
HIGH = ("high_precision",) * 3


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Twelve blocks, so that `layers.1` is a prefix of `layers.10` and `layers.11`."""

    def __init__(self, layers: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, 32, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def step(model: nn.Module) -> None:
    model(torch.arange(32)).square().mean().backward()


def left_alone(plan: fp4engine.ConversionPlan) -> dict[str, str]:
    return {module.name: module.reason for module in plan.left_alone}


def test_every_linear_is_swapped_and_keeps_its_parameters() -> None:
    model = Model()
    before = dict(model.named_parameters(remove_duplicate=False))
    plan = fp4engine.convert(model)
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert model.lm_head.weight is model.embedding.weight
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert [module.name for module in plan.modules] == list(linears)
    assert all(type(module) is fp4engine.Linear and module.name == name for name, module in linears.items())
    assert plan.fp4_share == 1.0
    assert {module.formats for module in plan.modules} == {FP4}


def test_outside_autocast_a_converted_model_is_the_same_bit_for_bit() -> None:
    model = Model(2)
    converted = copy.deepcopy(model)
    fp4engine.convert(converted)
    step(model)
    step(converted)
    for expected, got in zip(model.parameters(), converted.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad)


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["lm_head"], r"lm_head"),
        (["layers.1"], r"layers\.1\..*"),
        (["layers.1.*"], r"layers\.1\..*"),
        (["layers.*.up"], r"layers\.\d+\.up"),
        (["layers.1?.down"], r"layers\.1\d\.down"),
        (["**.down"], r"layers\.\d+\.down"),
        (["**.3.**"], r"layers\.3\..*"),
        (["layers.**"], r"layers\..*"),
        (["**"], r".*"),
        (["lm_head", "layers.0.up"], r"lm_head|layers\.0\.up"),
    ],
)
def test_patterns_match_whole_segments(patterns: list[str], kept: str) -> None:
    model = Model()
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plan = fp4engine.convert(model, keep_high_precision=patterns)
    assert {module.name for module in plan.left_alone} == {name for name in names if re.fullmatch(kept, name)}


@pytest.mark.parametrize("pattern", ["layer", "layers.12", "*.up", "embedding", "head", "layers.1.up.weight", ""])
def test_a_pattern_that_covers_no_linear_raises_and_swaps_nothing(pattern: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=f"pattern '{re.escape(pattern)}' covers no nn.Linear"):
        fp4engine.convert(model, keep_high_precision=["lm_head", pattern])
    assert not any(isinstance(module, fp4engine.Linear) for module in model.modules())


def test_a_pattern_that_lacks_its_beginning_is_told_how_to_go_on() -> None:
    with pytest.raises(ValueError, match=re.escape("did you mean '**.up'?")):
        fp4engine.convert(Model(), keep_high_precision=["up"])
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "up": nn.Linear(32, 32)})
    with pytest.raises(ValueError, match=re.escape("did you mean 'attention.in_proj_weight'?")):
        fp4engine.convert(attention, keep_high_precision=["attention.in_proj"])  # as rules and inspect call it
    plan = fp4engine.convert(attention, keep_high_precision=["attention.in_proj_weight"])
    assert [module.name for module in plan.converted] == ["up"]


def test_a_model_without_linears_inside_raises() -> None:
    with pytest.raises(ValueError, match="this model is itself one"):
        fp4engine.convert(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="nothing to convert"):
        fp4engine.convert(nn.Sequential(nn.ReLU()))


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class MoreMethods(nn.Linear):
    def describe(self) -> str:
        return "a plain Linear with a method"


class MoreAttributes(nn.Linear):
    tag = "head"


class OnlyAConstructor(nn.Linear):
    """It has no more than this."""

    tag: str

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.tag = "head"


def replaced_forward() -> nn.Linear:
    module = nn.Linear(16, 16)
    module.forward = lambda input: input
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnForward(16, 16), "OwnForward has a forward of its own"),
        (replaced_forward, "forward was replaced"),
        (lambda: parametrizations.weight_norm(nn.Linear(16, 16)), "weight is computed"),
        (lambda: nn.LazyLinear(16), "no shape yet"),
        (lambda: MoreMethods(16, 16), "MoreMethods has 'describe' of its own, which a swap would lose"),
        (lambda: MoreAttributes(16, 16), "MoreAttributes has 'tag' of its own, which a swap would lose"),
        (lambda: nn.Linear(16, 16, dtype=torch.complex64), "its weight is torch.complex64, which no recipe casts"),
        (lambda: OnlyAConstructor(16, 16), ""),
        (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16), ""),
    ],
)
def test_modules_that_a_swap_would_change_are_left_alone_with_a_reason(
    make: Callable[[], nn.Linear], reason: str
) -> None:
    module = make()
    model = nn.ModuleDict({"odd": module, "plain": nn.Linear(16, 16)})
    reasons = left_alone(fp4engine.convert(model))
    assert isinstance(model["plain"], fp4engine.Linear)
    assert isinstance(model["odd"], fp4engine.Linear) != bool(reason)
    assert not hasattr(module, "tag") or model["odd"].tag == "head"
    if reason:
        assert model["odd"] is module
        assert reason in reasons["odd"]


@pytest.mark.parametrize("attribute", ["shape", "executed", "module_type", "plan", "multiply", "seen_as", "name"])
def test_an_attribute_by_a_name_of_ours_is_refused_and_stays(attribute: str) -> None:
    model = nn.ModuleDict({"odd": nn.Linear(16, 16), "conv": Conv1D(16, 16), "plain": nn.Linear(16, 16)})
    said = f"must have no attribute '{attribute}', a name that fp4engine's layers use; rename it"
    for odd in ("odd", "conv"):
        setattr(model[odd], attribute, "mine")
        with pytest.raises(ValueError, match=f"^'{odd}' {said}"):
            fp4engine.convert(model)
        assert getattr(model[odd], attribute) == "mine" and type(model["plain"]) is nn.Linear
        if odd == "odd" and attribute != "executed":
            for _ in range(2):
                fp4engine.convert(model, keep_high_precision=["odd"])
            fp4engine.revert(model)
            assert getattr(model[odd], attribute) == "mine"
        delattr(model[odd], attribute)
    model["init"] = fp4engine.Linear(16, 16, init_method=nn.init.zeros_)
    fp4engine.convert(model, keep_high_precision=["plain"])
    fp4engine.revert(model)
    assert len(fp4engine.convert(model).converted) == 4


def test_the_first_convert_of_a_process_warns_of_nothing(recwarn) -> None:
    _own_names.cache_clear()
    fp4engine.convert(nn.Sequential(nn.Linear(16, 16)))
    assert not recwarn.list


def test_nothing_to_convert_is_refused_unless_that_was_asked() -> None:
    hooked = Model(12)
    for layer in hooked.modules():
        if isinstance(layer, nn.Linear):
            add_hook_to_module(layer, ModelHook())
    before = list(hooked.modules())
    said = r"nothing below this Model .* layers.{0..11}.up x12 \(its forward was replaced .*\); layers"
    with pytest.raises(ValueError, match=said):
        fp4engine.convert(hooked, NVFP4BlockScaling(), keep_high_precision=["lm_head"])
    with pytest.raises(ValueError, match=said):
        fp4engine.convert(hooked, module_filter_fn=lambda module, name: name != "lm_head")
    assert list(hooked.modules()) == before and not any(hasattr(module, "executed") for module in before)
    for asked in ({"keep_high_precision": ["**"]}, {"module_filter_fn": lambda module, name: False}):
        for model in (hooked, Model(1), nn.TransformerEncoderLayer(16, 2, 32)):
            assert not fp4engine.convert(model, **asked).converted
    with pytest.raises(ValueError, match=r"0 \(its weight has no shape yet \(lazy\); run the model once first\)"):
        fp4engine.convert(nn.Sequential(nn.LazyLinear(16)))
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2)})
    assert not fp4engine.convert(attention, keep_high_precision=["attn.in_proj_weight"]).converted
    assert len(fp4engine.convert(attention).converted) == 2
    hooked.more = fp4engine.Linear(16, 16)
    assert [module.name for module in fp4engine.convert(hooked).converted] == ["more"]


@pytest.mark.parametrize("trained", [False, True])
def test_a_spectral_norm_that_is_left_alone_goes_on_as_before_and_is_counted(trained: bool) -> None:
    """It takes a step whenever its weight is computed, and the count of products must not make it take more."""
    model = nn.ModuleDict({"odd": parametrizations.spectral_norm(nn.Linear(16, 8)), "plain": nn.Linear(16, 16)})
    model["odd"].parametrizations.weight.original.requires_grad_(trained)
    alone = copy.deepcopy(model["odd"])
    fp4engine.convert(model)
    x = torch.randn(4, 16)
    for _ in range(3):
        assert torch.equal(model["odd"](x), alone(x))
    assert all(torch.equal(got, want) for got, want in zip(model["odd"].buffers(), alone.buffers(), strict=True))
    counts = model["odd"].executed.counts
    assert counts == {(gemm, "high_precision"): 3 for gemm in ("fprop", "wgrad")[: 1 + trained]}


@pytest.mark.parametrize(
    "hold",
    [
        lambda a, b: [a, b],
        lambda a, b: ({"inner": [a]}, b),
        lambda a, b: {"first": a.forward, "second": b},
        lambda a, b: [a.__call__, b.forward],
        lambda a, b: [partial(a), partial(torch.utils.checkpoint.checkpoint, function=b.forward)],
        lambda a, b: partial(torch.utils.checkpoint.checkpoint_sequential, (a, b), 2),
        lambda a, b: lambda x: b(a(x)),
        lambda a, b: lambda x, layers=(a,): partial(b.forward)(layers[0](x)),
        lambda a, b: {a, b.forward},
    ],
    ids=[
        "list",
        "nested",
        "mapping",
        "methods",
        "partials",
        "list in a partial",
        "function",
        "default of a function",
        "set",
    ],
)
def test_modules_that_are_held_past_their_names_are_left_alone_with_a_reason(hold) -> None:
    """The list would go on multiplying by the modules that it has, in high precision, and the plan say FP4."""
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    vars(model)["layers"] = hold(model["a"], model["b"])
    reasons = left_alone(fp4engine.convert(model))
    text = "ModuleDict.layers holds it too, which a swap does not reach; make that an nn.ModuleList"
    assert reasons == {"a": text, "b": text}
    assert isinstance(model["c"], fp4engine.Linear)
    vars(model)["layers"] = hold(model["a"], model["c"])
    with pytest.raises(ValueError, match=re.escape(f"'c' would go on following recipes: {text}")):
        fp4engine.revert(model)
    del vars(model)["layers"]
    model["a"].register_forward_hook(partial(print, model["c"]))  # looks at a layer, and does not call it
    fp4engine.revert(model)
    assert type(model["c"]) is nn.Linear


def test_functions_that_hold_each_other_are_looked_into() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    layer = model["a"]

    def even(x):
        return odd(layer(x))

    def odd(x):
        return even(x)

    vars(model)["run"] = odd
    vars(model)["own"] = lambda x: model["b"](x)  # by its name, which a swap reaches
    assert left_alone(fp4engine.convert(model)).keys() == {"a"}


def test_kept_attention_is_left_alone_with_its_output_projection() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32)
    reasons = left_alone(fp4engine.convert(model, keep_high_precision=["self_attn.in_proj_weight"]))
    assert list(reasons) == ["self_attn.out_proj"]
    assert "never calls it" in reasons["self_attn.out_proj"]
    assert type(model.self_attn) is nn.MultiheadAttention


def test_the_filter_gets_module_and_name() -> None:
    model = Model(2)
    seen: list[tuple[nn.Module, str]] = []

    def only_wide(module: nn.Module, name: str) -> bool:
        seen.append((module, name))
        return isinstance(module, nn.Linear) and module.out_features > 16

    before = dict(model.named_modules())
    reasons = left_alone(fp4engine.convert(model, module_filter_fn=only_wide))
    assert reasons == dict.fromkeys(("layers.0.down", "layers.1.down"), "module_filter_fn said no")
    assert all(before[name] is module for module, name in seen)
    assert all(model.get_submodule(name) is before[name] for name in reasons)


def test_one_module_under_two_names_is_swapped_under_both() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": shared, "second": shared})
    model["inner"] = nn.Sequential(shared)
    plan = fp4engine.convert(model)
    assert len(plan.modules) == 1
    assert isinstance(model["first"], fp4engine.Linear)
    assert model["first"] is model["second"] is model["inner"][0]


def test_converting_twice_changes_nothing_but_a_recipe_that_is_given() -> None:
    model = Model(2)
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    before = list(model.modules())
    recipe = NVFP4BlockScaling(disable_rht=True)
    plan = fp4engine.convert(model, recipe, keep_high_precision=["lm_head"])
    assert all(module is old for module, old in zip(model.modules(), before, strict=True))
    assert list(left_alone(plan)) == ["lm_head"]
    assert model.layers[0].up.recipe is recipe
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    assert model.layers[0].up.recipe is recipe
    fp4engine.convert(model)
    assert isinstance(model.lm_head, fp4engine.Linear)
    with pytest.raises(ValueError, match="already"):
        fp4engine.convert(model, keep_high_precision=["lm_head"])


def test_without_a_recipe_modules_follow_autocast_only() -> None:
    model = Model(1)
    fp4engine.convert(model)
    step(model)
    assert fp4engine.executed_gemms(model).fp4_gemms == 0
    with fp4engine.autocast():
        step(model)
    report = fp4engine.executed_gemms(model)
    assert (report.fp4_gemms, report.high_precision_gemms) == (9, 9)
    assert report.fp4_share == 0.5


def test_a_recipe_is_followed_outside_autocast_and_shown_in_the_plan() -> None:
    model = Model(1)
    plan = fp4engine.convert(model, NVFP4BlockScaling(backward_override="high_precision"))
    assert {module.formats for module in plan.modules} == {("e2m1 x e2m1", "high_precision", "high_precision")}
    assert plan.fp4_share == pytest.approx(1 / 3)
    step(model)
    assert fp4engine.executed_gemms(model).fp4_share == pytest.approx(1 / 3)
    with fp4engine.autocast(enabled=False):
        step(model)
    assert fp4engine.executed_gemms(model).fp4_share == pytest.approx(1 / 6)


def test_rules_about_shapes_show_in_the_plan() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    narrow = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), narrower_than=16),))
    plan = fp4engine.convert(model, narrow)
    assert [module.formats[0] for module in plan.modules] == ["e2m1 x e2m1", "high_precision"]


def test_rules_that_match_no_module_are_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 64), fp4engine.LayerNormMLP(64, 64, name="mlp"))
    high = LinearRecipe()
    with pytest.raises(ValueError, match="rules that match no module: name='routr'"):
        fp4engine.convert(model, RuledRecipe(NVFP4BlockScaling(), (Rule(high, "routr"), Rule(high, "1.fc2"))))
    assert type(model[0]) is nn.Linear and model[1].fc2.name == "mlp.fc2"
    fp4engine.convert(model, RuledRecipe(NVFP4BlockScaling(), (Rule(high, "1.fc2"),)))
    assert model[1].fc2.name == "1.fc2"


def test_a_recipe_that_modules_cannot_follow_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    with pytest.raises(ValueError, match="needs a step"):
        fp4engine.convert(model, ScheduledRecipe(((0, NVFP4BlockScaling()),)), keep_high_precision=["1"])
    assert type(model[0]) is nn.Linear
    assert not model[1]._forward_hooks


def test_a_recipe_reaches_every_part_of_larger_modules() -> None:
    model = nn.ModuleList([fp4engine.TransformerLayer(16, 16, 2, hidden_dropout=0.0), nn.Linear(16, 16)])
    fp4engine.convert(model, NVFP4BlockScaling())
    model[1](model[0](torch.randn(4, 2, 16))).sum().backward()
    assert set(fp4engine.executed_gemms(model).counts) == {"e2m1 x e2m1"}


class Mixed(nn.Module):
    """Modules of both kinds, whose names are what recipes match."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            fp4engine.TransformerLayer(width, 2 * width, 2, name=f"blocks.{i}", fuse_qkv_params=True) for i in range(2)
        )
        self.experts = fp4engine.GroupedLinear(4, width, width, name="experts")
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.experts(x, [x.shape[0] * x.shape[1] // 4] * 4))


def test_the_plan_lists_the_parts_of_larger_modules_and_agrees_with_what_runs() -> None:
    model = Mixed()
    recipe = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "blocks.1.**"), Rule(LinearRecipe(), "experts")))
    plan = fp4engine.convert(model, recipe)
    block = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    assert {module.name: module.formats for module in plan.modules} == {
        **{f"blocks.0.{part}": FP4 for part in block},
        **{f"blocks.1.{part}": HIGH for part in block},
        "experts": HIGH,
        "head": FP4,
    }
    assert [module.shape for module in plan.modules[:4]] == [(48, 16), (16, 16), (32, 16), (16, 32)]
    assert plan.summary.startswith("10 of 10 linear modules converted")
    model(torch.randn(8, 2, 16, requires_grad=True)).sum().backward()
    assert fp4engine.executed_gemms(model).fp4_share == pytest.approx(plan.fp4_share)


def test_a_model_of_larger_modules_alone_gets_a_recipe_and_a_plan() -> None:
    model = fp4engine.LayerNormMLP(16, 32)
    plan = fp4engine.convert(model, NVFP4BlockScaling(backward_override="dequantized"))
    assert [(module.name, module.shape) for module in plan.modules] == [("fc1", (32, 16)), ("fc2", (16, 32))]
    assert plan.fp4_share == pytest.approx(1 / 3)
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert fp4engine.executed_gemms(model).fp4_share == pytest.approx(1 / 3)


def test_larger_modules_are_not_kept_in_high_precision_silently() -> None:
    with pytest.raises(ValueError, match=r"'blocks.1.self_attention.layernorm_qkv', which is fp4engine's already"):
        fp4engine.convert(Mixed(), keep_high_precision=["head", *fp4engine.last_blocks(Mixed(), 1)])


def test_rules_see_where_modules_are_whatever_they_were_called() -> None:
    model = nn.Sequential(fp4engine.Linear(16, 16), fp4engine.Linear(16, 16, name="head"), nn.Linear(16, 16))
    with pytest.raises(ValueError, match="rules that match no module: name='head'"):
        fp4engine.convert(model, RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "head"),)))
    plan = fp4engine.convert(model, RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "[01]"),)))
    assert [module.formats for module in plan.modules] == [HIGH, HIGH, FP4]
    assert [module.name for module in model] == ["0", "1", "2"]


def test_the_plan_follows_a_custom_recipe_by_name() -> None:
    def qfactory(role: fp4engine.QuantizerRole) -> fp4engine.Quantizer:
        if role.name.endswith("down"):
            return IdentityQuantizer()
        return fp4engine.NVFP4Quantizer()

    plan = fp4engine.convert(Model(1), CustomRecipe(qfactory=qfactory))
    formats = {module.name: module.formats for module in plan.modules}
    assert formats == {"layers.0.up": FP4, "layers.0.down": HIGH, "lm_head": FP4}


def test_what_ran_agrees_with_the_plan() -> None:
    model = Model(2)
    plan = fp4engine.convert(model, keep_high_precision=["lm_head", *fp4engine.last_blocks(model, 1)])
    with fp4engine.autocast():
        step(model)
    report = fp4engine.executed_gemms(model)
    assert report.fp4_share == pytest.approx(plan.fp4_share) == pytest.approx(1024 / 2560)
    for planned, executed in zip(plan.modules, report.modules, strict=True):
        assert executed.counts == dict.fromkeys(zip(("fprop", "dgrad", "wgrad"), planned.formats, strict=True), 1)
        assert set(executed.flops.values()) == {2 * 32 * planned.shape[0] * planned.shape[1]}


def test_assert_quantized() -> None:
    model = Model(1)
    with pytest.raises(AssertionError, match="no GEMM of a linear module was counted"):
        fp4engine.assert_quantized(model, min_fraction=0.5)
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    with fp4engine.autocast():
        step(model)
    fp4engine.assert_quantized(model, min_fraction=0.66)
    with pytest.raises(AssertionError, match=r"66.7% of the FLOPs ran in FP4, expected at least 70.0%\nmodule"):
        fp4engine.assert_quantized(model, min_fraction=0.7)
    with pytest.raises(ValueError, match="min_fraction must be a number from 0 to 1"):
        fp4engine.assert_quantized(model, min_fraction=70)


def test_the_tables_are_for_reading() -> None:
    model = Model(1)
    plan = fp4engine.convert(model, keep_high_precision=["lm_head"])
    assert str(plan).splitlines() == [
        "module         N x K    fprop           dgrad           wgrad           left alone because",
        "layers.0.up    32 x 16  e2m1 x e2m1     e2m1 x e2m1     e2m1 x e2m1",
        "layers.0.down  16 x 32  e2m1 x e2m1     e2m1 x e2m1     e2m1 x e2m1",
        "lm_head        32 x 16  high_precision  high_precision  high_precision  kept by 'lm_head'",
        "2 of 3 linear modules converted, 66.7% of linear FLOPs planned in FP4",
    ]
    assert str(fp4engine.executed_gemms(model)).endswith("\nno GEMM was counted")


def test_last_blocks() -> None:
    model = Model(12)
    assert fp4engine.last_blocks(model, 2) == ("layers.10", "layers.11")
    assert fp4engine.last_blocks(model, 0) == ()
    parts = {"encoder": [nn.Linear(16, 16)], "decoder": [Conv1D(48, 16)], "stem": [nn.Conv2d(64, 64, 3)]}
    mixed = nn.ModuleDict({name: nn.ModuleList(blocks) for name, blocks in parts.items()})
    assert fp4engine.last_blocks(mixed, 1) == ("decoder.0",)
    fp4engine.convert(mixed)
    assert fp4engine.last_blocks(mixed, 1) == ("decoder.0",)
    with pytest.raises(ValueError, match="between 0 and the 12 blocks"):
        fp4engine.last_blocks(model, 13)
    with pytest.raises(ValueError, match="count must be an integer of at least 0, got '1'"):
        fp4engine.last_blocks(model, "1")
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got 2"):
        fp4engine.last_blocks(2, model)
    with pytest.raises(ValueError, match=r"no|none"):
        fp4engine.last_blocks(nn.Sequential(nn.Linear(2, 2)), 1)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def test_a_hugging_face_llama_trains(tmp_path) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    plan = fp4engine.convert(model, keep_high_precision=["lm_head"])
    assert len(plan.converted) == 14
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.randint(0, 64, (2, 17))
    with fp4engine.autocast():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    fp4engine.assert_quantized(model, min_fraction=0.8)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    reference = plain(input_ids=tokens, labels=tokens).loss
    assert loss != reference
    assert loss.item() == pytest.approx(reference.item(), rel=0.05)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_copies_and_files_of_a_converted_model(tmp_path) -> None:
    model = Model(1)
    model.lm_head = nn.Linear(16, 32, bias=False)  # untied: safetensors refuses shared memory
    expected = copy.deepcopy(model.state_dict())
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    with fp4engine.autocast():
        step(model)
    copied = copy.deepcopy(model)
    with fp4engine.autocast():
        step(copied)
    assert fp4engine.executed_gemms(model).fp4_gemms == 6
    assert fp4engine.executed_gemms(copied).fp4_gemms == 6
    assert fp4engine.executed_gemms(copied).high_precision_gemms == 3

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    for state in (torch.load(file, weights_only=True), safetensors.torch.load_file(tmp_path / "model.safetensors")):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        fresh = Model(1)
        fresh.lm_head = nn.Linear(16, 32, bias=False)
        fresh.load_state_dict(state, strict=True)
        model.load_state_dict(state, strict=True)


class Adapter(nn.Module):
    """What PEFT does: wrap a frozen nn.Linear, found with isinstance, and add two small ones beside it."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base_layer = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("convert_first", [True, False])
def test_adapters_wrap_converted_modules_and_the_other_way_round(convert_first: bool) -> None:
    model = Model(2)
    if convert_first:
        fp4engine.convert(model, keep_high_precision=["lm_head"])
    for layer in model.layers:
        layer.up = Adapter(layer.up)
    if not convert_first:
        fp4engine.convert(model, keep_high_precision=["lm_head", "**.lora_a", "**.lora_b"])
    with fp4engine.autocast():
        step(model)
    counts = {module.name: module.counts for module in fp4engine.executed_gemms(model).modules}
    base = counts["layers.1.up.base_layer"]
    assert base == {("fprop", FP4[0]): 1, ("dgrad", FP4[0]): 1}  # frozen: no wgrad
    assert model.layers[1].up.lora_a.weight.grad is not None


@pytest.mark.no_poison
def test_a_converted_model_compiles_in_one_graph_and_counts_nothing() -> None:
    model = Model(1)
    fp4engine.convert(model, keep_high_precision=["lm_head"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fp4engine.autocast():
        expected = model(torch.arange(32))
        counted = fp4engine.executed_gemms(model)
        assert torch.equal(compiled(torch.arange(32)), expected)
    assert fp4engine.executed_gemms(model) == counted


def test_what_was_compiled_by_itself_computes_as_what_it_became() -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 32))
    plain = copy.deepcopy(model)
    high = plain(x)
    fp4engine.convert(plain, NVFP4BlockScaling())
    model[0].compile(backend="eager")
    fp4engine.convert(model, NVFP4BlockScaling())
    assert torch.equal(model(x), plain(x)) and not torch.equal(model(x), high)
    model[0].compile(backend="eager")
    assert torch.equal(model(x), plain(x))
    fp4engine.revert(model)
    assert torch.equal(model(x), high)


@pytest.mark.parametrize("each", [False, True])
def test_a_sharded_model_is_converted_and_reverted(group_of_one, each) -> None:
    mesh = init_device_mesh("cpu", (1,))
    x, model = torch.randn(4, 16), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    high = model(x)
    for module in (*model, model) if each else (model,):
        fully_shard(module, mesh=mesh)
    fp4engine.convert(model, NVFP4BlockScaling())
    assert not torch.equal(model(x), high)
    fp4engine.revert(model)
    output = model(x)
    output.sum().backward()
    assert torch.equal(output, high) and all(parameter.grad is not None for parameter in model.parameters())


class Scaled(fp4engine.Linear):
    def forward(self, input, is_first_microbatch=None):
        return 2 * super().forward(input, is_first_microbatch)


def test_revert_leaves_a_subclass_with_a_forward_of_its_own() -> None:
    model, x = nn.Sequential(Scaled(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    before = model(x)
    fp4engine.convert(model)
    fp4engine.revert(model)
    assert [type(module) for module in model] == [Scaled, nn.Linear] and torch.equal(model(x), before)


def test_revert_gives_a_layer_its_class_back() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    fp4engine.convert(model)
    fp4engine.revert(copy.deepcopy(model))
    fp4engine.revert(model)
    assert [type(module) for module in (model[0].out_proj, model[1])] == [NonDynamicallyQuantizableLinear, nn.Linear]
    assert "replaces" not in vars(model[1])


def test_revert_refuses_a_forward_that_was_replaced_on_the_object() -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 32))
    fp4engine.convert(model, NVFP4BlockScaling())
    expected = model(x)
    add_hook_to_module(model[0], ModelHook())
    with pytest.raises(ValueError, match="the forward of '0' was replaced on the object"):
        fp4engine.revert(model)
    assert torch.equal(model(x), expected)
    remove_hook_from_submodules(model)
    del model[0].forward
    fp4engine.revert(model)
    assert type(model[0]) is nn.Linear and not torch.equal(model(x), expected)


class Shared(torch.nn.Module):
    """One linear module by the names ``trunk`` and ``head.0``."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(32, 32)
        self.head = torch.nn.Sequential(self.trunk, torch.nn.Linear(32, 32))


def test_a_module_with_two_names_is_kept_by_either():
    for pattern in ("head", "trunk"):
        model = Shared()
        plan = fp4engine.convert(model, keep_high_precision=[pattern])
        assert {item.name: item.reason for item in plan.modules}["trunk"] == f"kept by '{pattern}'"
        assert type(model.trunk) is torch.nn.Linear and model.head[0] is model.trunk


def test_rules_that_match_one_of_two_names_are_refused():
    model = Shared()
    for name in ("head.0", "trunk"):
        recipe = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), name),))
        with pytest.raises(ValueError, match=r"'trunk' and 'head\.0' are one module"):
            fp4engine.convert(model, recipe)
    assert type(model.trunk) is torch.nn.Linear
    both = tuple(Rule(LinearRecipe(), name) for name in ("head.0", "trunk"))
    for rules in (both, (Rule(LinearRecipe(), "**"),)):
        fp4engine.convert(Shared(), RuledRecipe(NVFP4BlockScaling(), rules))
