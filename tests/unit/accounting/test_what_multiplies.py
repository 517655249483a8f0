"""What is said to run in FP4 is a share of everything that multiplies, in whatever module or parameter it is."""

import ast
import math
import re
from collections.abc import Sequence

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fp4engine
from fp4engine.accounting.flops import watch
from fp4engine.accounting.table import collapsed
from fp4engine.recipe import LinearRecipe, NVFP4BlockScaling, Rule, RuledRecipe

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TOKENS, LAYERS, HIDDEN = 2 * 17, 2, 32
ATTENTION = (32 + 16 + 16 + 32) * HIDDEN
"""Weights of the four projections of a layer of these sizes."""
HEAD = 64 * HIDDEN
ROUTER = 4 * HIDDEN


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def linear_modules_only(module: nn.Module, name: str) -> bool:
    """A filter that leaves every other matrix to PyTorch, which ``convert`` would take otherwise."""
    return isinstance(module, nn.Linear)


def step(model: nn.Module) -> None:
    tokens = torch.arange(TOKENS).view(2, 17)
    with fp4engine.autocast():
        logits = model(input_ids=tokens).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()


EXPERTS = {mixtral: 3 * 48 * HIDDEN, qwen3_moe: 3 * 24 * HIDDEN}
"""Weights of one expert."""


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_experts_that_are_one_parameter_are_in_the_plan_and_in_the_count(make) -> None:
    model = make()
    plan = fp4engine.convert(model, module_filter_fn=linear_modules_only, keep_high_precision=["lm_head"])
    assert [matrix.name.removeprefix("model.layers.0.mlp.") for matrix in sorted(plan.matrices, key=str)][:3] == [
        "experts.down_proj",
        "experts.gate_up_proj",
        "gate.weight",
    ]
    kind = type(model).__name__.removesuffix("ForCausalLM")
    assert {matrix.reason for matrix in plan.matrices} == {
        f"{kind}Experts is no nn.Linear",
        f"{kind}TopKRouter is no nn.Linear",
    }
    fp4 = LAYERS * ATTENTION
    every = fp4 + HEAD + LAYERS * (4 * EXPERTS[make] + ROUTER)
    assert plan.fp4_share == pytest.approx(fp4 / every)
    assert plan.fp4_share < 0.25
    assert "experts.gate_up_proj" in str(plan)
    assert "6 other matrices left alone" in plan.summary

    report = fp4engine.executed_gemms(model, lambda: step(model))
    ran = HEAD + LAYERS * (2 * EXPERTS[make] + ROUTER)  # two experts of four see a token
    assert by_weights(report) == 3 * 2 * TOKENS * ran
    assert report.flops["e2m1 x e2m1"] == 3 * 2 * TOKENS * fp4
    assert report.fp4_share == 3 * 2 * TOKENS * fp4 / report.flops.total() < 0.35


def by_weights(report) -> int:
    """FLOPs of the products that PyTorch counted, without attention's, which have no weights."""
    return sum(flops for name, flops in report.others.items() if "attention" not in name and "bmm" not in name)


def test_what_is_no_linear_module_is_in_the_plan_and_in_the_count() -> None:
    model = gpt2()
    plan = fp4engine.convert(model, module_filter_fn=linear_modules_only)
    weights = [(32, 96), (32, 32), (32, 128), (128, 32)]
    assert [matrix.shape for matrix in plan.matrices] == weights * LAYERS
    assert {matrix.reason for matrix in plan.matrices} == {"Conv1D is no nn.Linear"}
    others = LAYERS * sum(rows * cols for rows, cols in weights)
    assert plan.fp4_share == HEAD / (HEAD + others)
    report = fp4engine.executed_gemms(model, lambda: step(model))
    assert by_weights(report) == 3 * 2 * TOKENS * others
    assert report.fp4_share == 3 * 2 * TOKENS * HEAD / report.flops.total() < 0.1


@pytest.mark.parametrize(
    ("layer", "keep"),
    [(torch.nn.LazyLinear(4), ["0"]), (torch.nn.Linear(0, 4), ()), (torch.nn.Linear(4, 0), ())],
    ids=str,
)
def test_a_plan_without_products_is_printed(layer: torch.nn.Module, keep: Sequence[str]) -> None:
    plan = fp4engine.convert(torch.nn.Sequential(layer), keep_high_precision=keep)
    assert str(plan).endswith(" of 1 linear modules converted, no linear FLOPs planned in FP4")


@pytest.mark.parametrize("layer", [torch.nn.LazyLinear(4), torch.nn.LazyConv1d(4, 3)], ids=str)
def test_a_layer_without_a_shape_is_no_layer_without_flops(layer: torch.nn.Module) -> None:
    plan = fp4engine.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), layer))
    assert math.isnan(plan.fp4_share)
    assert "an unknown share of" in plan.summary and "100" not in str(plan)


def test_a_model_of_linear_modules_has_nothing_else_in_its_plan() -> None:
    model = llama()
    plan = fp4engine.convert(model, keep_high_precision=["lm_head"])
    assert plan.matrices == ()
    report = fp4engine.executed_gemms(model, lambda: step(model))
    linear = LAYERS * (ATTENTION + 3 * 48 * HIDDEN)
    assert (report.flops["e2m1 x e2m1"], by_weights(report)) == (3 * 2 * TOKENS * linear, 3 * 2 * TOKENS * HEAD)
    fp4engine.assert_quantized(model)
    fp4engine.assert_quantized(model, lambda: step(model))
    fp4engine.assert_quantized(model, lambda: step(model), min_fraction=0.7)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (mixtral, ["experts.gate_up_proj x2 (MixtralExperts is no nn.Linear)", "layers.{0..1}.mlp.gate.weight x2"]),
        (qwen3_moe, ["model.layers.{0..1}.mlp.experts.down_proj x2 (Qwen3MoeExperts is no nn.Linear)"]),
        (gpt2, ["transformer.h.{0..1}.attn.c_attn.weight x2 (Conv1D is no nn.Linear)", "mlp.c_proj.weight"]),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(make, names: list[str]) -> None:
    model = make()
    fp4engine.convert(model, module_filter_fn=linear_modules_only)
    step(model)
    for arguments in ({}, {"min_fraction": 0.01}):
        with pytest.raises(AssertionError) as refusal:
            fp4engine.assert_quantized(model, **arguments)
        assert all(name in str(refusal.value) for name in names)
    with pytest.raises(AssertionError, match=re.escape(names[0])) as refusal:  # counted, but nobody said that it may
        fp4engine.assert_quantized(model, lambda: step(model))
    told = re.search(r"keep_high_precision=(\[.*?\]);", str(refusal.value))
    assert told is not None
    fp4engine.assert_quantized(model, lambda: step(model), keep_high_precision=ast.literal_eval(told[1]))
    with pytest.raises(AssertionError, match="of the FLOPs ran in FP4, expected at least"):
        fp4engine.assert_quantized(model, lambda: step(model), min_fraction=0.8)
    fp4engine.assert_quantized(model, lambda: step(model), min_fraction=0.05)
    kept = ["transformer.h"] if make is gpt2 else ["**.experts", "**.gate"]
    fp4engine.assert_quantized(model, keep_high_precision=kept)


def test_the_names_of_many_matrices_are_cut_short() -> None:
    rows = nn.ModuleDict({f"row{index}": nn.Bilinear(4, 4, 4) for index in range(20)})
    model = nn.ModuleDict({"plain": nn.Linear(16, 16), "rows": rows})
    fp4engine.convert(model, NVFP4BlockScaling())
    model["plain"](torch.randn(4, 16))
    with pytest.raises(AssertionError, match=r"rows\.row7\.weight .*; and 12 more"):
        fp4engine.assert_quantized(model)


def test_a_pattern_to_copy_covers_nothing_that_runs_in_fp4() -> None:
    model = nn.ModuleList([nn.Linear(16, 16), nn.Bilinear(4, 4, 4)])
    model[0].weight_of_another = nn.Parameter(torch.randn(4, 4))
    model[1].register_parameter("weight_of_another", nn.Parameter(torch.randn(4, 4)))
    fp4engine.convert(model, NVFP4BlockScaling())
    model[0](torch.randn(4, 16))
    with pytest.raises(AssertionError, match=r"keep_high_precision=\['\*.weight', '\*.weight_of_another'\]"):
        fp4engine.assert_quantized(model)


def test_what_a_vision_transformer_adds_is_no_matrix_that_multiplies() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4)
    )
    plan = fp4engine.convert(model)
    assert [matrix.name for matrix in plan.matrices] == ["vit.embeddings.patch_embeddings.projection.weight"]
    names = ("pos_embed", "pos_embedding", "positional_embedding", "relative_position_bias_table", "query_tokens")
    holder = nn.ModuleList([nn.Linear(16, 16)])
    for name in (*names, "pos_proj", "composition_embed", "tokenizer"):
        holder.register_parameter(name, nn.Parameter(torch.zeros(1, 8, 16)))
    holder.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.66)))  # CLIP's, one number without dimensions
    plan = fp4engine.convert(holder)
    assert [matrix.name for matrix in plan.matrices] == ["pos_proj", "composition_embed", "tokenizer"]


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_multiplies_as_much_for_each_gradient_as_forward(kind, groups) -> None:
    """PyTorch's formula ignored groups, by which a depthwise convolution took most of a Mamba's FLOPs."""
    layer = kind(8, 16, 3, stride=2, padding=1, groups=groups)
    x = torch.randn(2, 8, *([9] * int(kind.__name__[-2])), requires_grad=True)
    forward = watch(lambda: layer(x)).flops.total()
    y = layer(x)
    assert watch(lambda: y.sum().backward()).flops.total() == 2 * forward > 0
    y = layer(x.detach())
    assert watch(lambda: y.sum().backward()).flops.total() == forward


def test_equal_blocks_are_one_row_of_a_table() -> None:
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(128)) for _ in range(3)),
            "head": nn.Linear(16, 32),
        }
    )
    plan = fp4engine.convert(model, keep_high_precision=["blocks.1.7", "head"])
    assert len(plan.modules) == 385
    names = [line.partition("  ")[0] for line in str(plan).splitlines()[1:-1]]
    assert names == ["blocks.{0,2}.{0..127} x256", "blocks.1.{0..6,8..127} x127", "blocks.1.7", "head"]
    with fp4engine.autocast():
        for block in model["blocks"]:
            for layer in block:
                layer(torch.ones(1, 16))
    assert "blocks.{0,2}.{0..127} x256" in str(fp4engine.executed_gemms(model))
    with fp4engine.autocast(enabled=False):
        model["blocks"][0][3](torch.ones(1, 16))
    with pytest.raises(AssertionError) as refusal:
        fp4engine.assert_quantized(model, keep_high_precision=["head"])
    assert "blocks.0.3: fprop was planned as e2m1 x e2m1 and ran as high_precision" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) < 12


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["a.1", "a.3", "a.2", "a.7"], ["a.{1..3,7} x4"]),
        (["0.0", "0.1", "1.0"], ["0.{0..1} x2", "1.0"]),
        (["0.1.w", "1.1.w", "1.2.w", "0.2.w"], ["{0..1}.{1..2}.w x4"]),
        (["fc1", "fc2", "a{}.0", "a{}.1", "7"], ["fc1", "fc2", "a{}.{0..1} x2", "7"]),
        (["007.x", "008.x"], ["007.x", "008.x"]),
    ],
)
def test_what_braces_stand_for(names, rows) -> None:
    assert [name for name, _ in collapsed([(name, "cell") for name in names])] == rows


def test_patterns_keep_other_matrices_by_name_and_say_so_in_the_plan() -> None:
    model = mixtral()
    plan = fp4engine.convert(model, keep_high_precision=["**.experts", "**.gate.weight"])
    assert {matrix.reason for matrix in plan.matrices} == {"kept by '**.experts'", "kept by '**.gate.weight'"}
    with pytest.raises(ValueError, match=r"pattern '\*\*.router' covers no nn.Linear"):
        fp4engine.convert(model, keep_high_precision=["**.router"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())

    def step(self) -> None:
        self(torch.randn(8, 16)).sum().backward()


def test_without_a_fraction_everything_planned_in_fp4_must_run_so() -> None:
    model = Model()
    fp4engine.convert(model)
    model.step()
    with pytest.raises(AssertionError, match="up: fprop was planned as e2m1 x e2m1 and ran as high_precision"):
        fp4engine.assert_quantized(model)
    with pytest.raises(AssertionError, match=r"every product ran in high precision: put the forward inside `with"):
        fp4engine.assert_quantized(model)  # nothing was in a region: the way out is said

    def autocast_step(recipe=None) -> None:
        with fp4engine.autocast(recipe=recipe):
            model.step()

    fp4engine.assert_quantized(model, autocast_step)  # about this step alone
    forward = NVFP4BlockScaling(backward_override="high_precision")
    with pytest.raises(AssertionError, match="down: dgrad was planned as e2m1 x e2m1 and ran as high_precision"):
        fp4engine.assert_quantized(model, lambda: autocast_step(forward))
    fp4engine.assert_quantized(model, lambda: autocast_step(forward), recipe=forward)
    with pytest.raises(AssertionError, match="no linear module is planned in FP4"):
        fp4engine.assert_quantized(model, lambda: autocast_step(LinearRecipe()), recipe=LinearRecipe())
    ruled = RuledRecipe(NVFP4BlockScaling(), (Rule(LinearRecipe(), "down"),))
    fp4engine.assert_quantized(model, lambda: autocast_step(ruled), recipe=ruled)
    fp4engine.assert_quantized(model, lambda: autocast_step(ruled), keep_high_precision=["down"])


def test_a_module_that_did_not_run_is_named() -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())
    with pytest.raises(AssertionError, match="down did not run"):
        fp4engine.assert_quantized(model, lambda: model.up(torch.randn(8, 16)))


def test_modules_that_came_later_and_weights_that_are_never_called_are_named() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    fp4engine.convert(model, NVFP4BlockScaling(), module_filter_fn=linear_modules_only)
    model.head = nn.Linear(16, 16)
    model(torch.randn(2, 4, 16)).sum().backward()
    with pytest.raises(AssertionError) as refusal:
        fp4engine.assert_quantized(model)
    for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "head.weight"):
        assert f"{name} (" in str(refusal.value)


def test_grouped_experts_and_fused_modules_are_seen() -> None:
    model = nn.ModuleDict(
        {
            "mlp": fp4engine.LayerNormMLP(16, 32, name="mlp"),
            "block": fp4engine.TransformerLayer(16, 32, 2, hidden_dropout=0.0, name="block"),
            "experts": fp4engine.GroupedLinear(3, 16, 16, name="experts"),
        }
    )
    plan = fp4engine.convert(model, NVFP4BlockScaling())
    assert plan.matrices == ()

    def step() -> None:
        x = model["block"](model["mlp"](torch.randn(4, 2, 16)))
        model["experts"](x, [8, 0, 0]).sum().backward()

    fp4engine.assert_quantized(model, step)


def test_products_inside_a_backward_override_are_counted_once() -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling(backward_override="dequantized"))
    report = fp4engine.executed_gemms(model, model.step)
    product = 2 * 8 * 16 * 32
    assert report.others == {}
    assert report.flops == {"e2m1 x e2m1": 2 * product, "high_precision": 3 * product}  # up's input needs no gradient
    plain = Model()
    fp4engine.convert(plain)
    report = fp4engine.executed_gemms(plain, plain.step)
    assert sum(report.others.values()) == report.flops["high_precision"] == 5 * product


def test_of_two_branches_the_larger_is_counted_and_the_choice_is_named() -> None:
    """As PyTorch's counter means it, which adds both up where it has counted the operator before."""

    def step() -> None:
        x = torch.ones(8, 16)
        _ = x @ x.T
        torch.cond(x.sum() > 0, lambda x: x @ x.T @ x, lambda x: x * (x @ x.T).sum(), (x,))

    watched = watch(step)
    assert watched.flops == {"aten.mm": 3 * 2 * 8 * 16 * 8} and watched.opaque == {"cond"}


@pytest.mark.no_poison
def test_a_compiled_model_runs_eagerly_while_it_is_counted() -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())
    compiled = torch.compile(model, backend="aot_eager")
    fp4engine.assert_quantized(model, lambda: compiled(torch.randn(8, 16)).sum().backward())


@torch.library.custom_op("elsewhere::product", mutates_args=())
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


def test_an_operator_that_nobody_knows_is_refused_by_name() -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())

    def step() -> None:
        with torch.no_grad():
            product(model(torch.randn(8, 16)), torch.randn(16, 8))

    for arguments in ({}, {"min_fraction": 0.1}):
        with pytest.raises(AssertionError, match="elsewhere::product"):
            fp4engine.assert_quantized(model, step, **arguments)
        fp4engine.assert_quantized(model, step, keep_high_precision=["elsewhere::*"], **arguments)


@pytest.mark.parametrize(
    ("multiply", "flops"),
    [
        (lambda x: x[0] @ x[0], 2 * 16),
        (lambda x: x @ x[0], 2 * 8 * 16),
        (lambda x: torch.addmv(x[:, 0], x, x[0]), 2 * 8 * 16),
        (lambda x: x @ x.T, 2 * 8 * 16 * 8),
        (lambda x: x[:, 0].contiguous().addmv_(x, x[0]), 2 * 8 * 16),
        (lambda x: torch.zeros(8, 8).addmm_(x, x.T), 2 * 8 * 16 * 8),
        (lambda x: torch.zeros(3, 8, 8).baddbmm_(x.expand(3, 8, 16), x.T.expand(3, 16, 8)), 3 * 2 * 8 * 16 * 8),
        (lambda x: torch.zeros(8, 8).addbmm_(x.expand(3, 8, 16), x.T.expand(3, 16, 8)), 3 * 2 * 8 * 16 * 8),
        (lambda x: torch._int_mm(x.to(torch.int8).repeat(4, 2), x.to(torch.int8).repeat(4, 2).T), 2 * 32 * 32 * 32),
        (lambda x: torch.vdot(x[0], x[0]), 2 * 16),
        (lambda x: torch.cdist(x.repeat(4, 1), x), 2 * 32 * 8 * 16),
        (lambda x: torch.cdist(x.repeat(4, 1), x, compute_mode="donot_use_mm_for_euclid_dist"), 0),
        (lambda x: nn.functional.grouped_mm(x, torch.randn(2, 16, 4), offs=torch.tensor([3, 8]).int()), 2 * 8 * 16 * 4),
        (lambda x: nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 16)] * 3), 2 * 2 * 8 * 8 * 16),
    ],
)
def test_products_outside_every_module_are_counted(multiply, flops: int) -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())
    report = fp4engine.executed_gemms(model, lambda: multiply(torch.randn(8, 16)))
    assert sum(report.others.values()) == report.flops.total() == flops
    assert report.fp4_share == 0 or not flops


@pytest.mark.parametrize(
    ("operator", "multiply"),
    [
        (
            "_native_multi_head_attention",
            lambda x: nn.MultiheadAttention(16, 2, batch_first=True).eval()(*[x[None]] * 3),
        ),
        ("linalg_matrix_exp", lambda x: torch.matrix_exp(x @ x.T)),
        ("conv_tbc", lambda x: torch.conv_tbc(x[:, None], torch.ones(3, 16, 4), torch.ones(4))),
        ("_trilinear", lambda x: torch.bilinear(x, x, torch.ones(4, 16, 16), None)),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operator_of_pytorch_without_formula_is_refused_by_name(operator: str, multiply, mode) -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())

    def step() -> None:
        with mode():
            multiply(model(torch.randn(8, 16))[:8])

    with pytest.raises(AssertionError, match=f"aten::{operator}"):
        fp4engine.assert_quantized(model, step, min_fraction=0.1)
    fp4engine.assert_quantized(model, step, keep_high_precision=[f"aten::{operator}"], min_fraction=0.01)


@pytest.mark.parametrize("converts_first", [True, False])
def test_a_parametrized_layer_is_one_layer_and_named_as_such(converts_first: bool) -> None:
    """What its weight is computed from was said to multiply besides, and counted twice in the plan."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if converts_first:
        fp4engine.convert(model, NVFP4BlockScaling())
    weight_norm(model[0])
    plan = fp4engine.convert(model, NVFP4BlockScaling())
    assert plan.fp4_share == (1.0 if converts_first else 0.5) and not plan.matrices

    def step() -> None:
        model(torch.randn(8, 16, requires_grad=True)).sum().backward()

    with pytest.raises(AssertionError, match=r"by 0\.weight \(the parametrization _WeightNorm computes it, perhaps by"):
        fp4engine.assert_quantized(model, step)
    fp4engine.assert_quantized(model, step, keep_high_precision=["0.weight"])
    fp4engine.assert_quantized(model, step, min_fraction=plan.fp4_share)


def test_products_by_buffers_are_counted_in_a_step_with_a_fraction() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    fp4engine.convert(model, NVFP4BlockScaling())
    model.register_buffer("mixed", torch.randn(16, 16))

    def step() -> None:
        nn.functional.linear(model(torch.randn(8, 16)), model.mixed)

    fp4engine.assert_quantized(model, step)
    with pytest.raises(AssertionError, match=r"50\.0% of the FLOPs ran in FP4"):
        fp4engine.assert_quantized(model, step, min_fraction=0.9)


def test_patterns_that_cover_nothing_are_refused() -> None:
    model = Model()
    fp4engine.convert(model, NVFP4BlockScaling())
    model.step()
    with pytest.raises(ValueError, match="'head' in keep_high_precision covers"):
        fp4engine.assert_quantized(model, keep_high_precision=["head"])
    with pytest.raises(ValueError, match="sequence of patterns"):
        fp4engine.assert_quantized(model, keep_high_precision="down")


def test_a_linear_module_that_does_not_count_is_named_beside_the_share() -> None:
    """A head that was put in after ``convert`` multiplied unseen, below "100.0% of FLOPs in FP4"."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    fp4engine.convert(model, NVFP4BlockScaling())
    assert not fp4engine.executed_gemms(model).uncounted
    model[1] = nn.Linear(32, 64)
    model(torch.randn(4, 16)).sum().backward()
    report = fp4engine.executed_gemms(model)
    assert report.uncounted == ("1",)
    assert "\nnot counted: 1 (convert has not seen them, or nn.MultiheadAttention never calls them)\n" in str(report)
    assert not fp4engine.executed_gemms(model, lambda: model(torch.randn(4, 16))).uncounted


def test_patterns_of_convert_cover_the_layers_of_a_wrapped_model() -> None:
    """They covered nothing of DDP(model), whose names begin with "module"."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=["1"])
    wrapped = nn.DataParallel(model)
    wrapped(torch.randn(4, 16)).sum().backward()
    fp4engine.assert_quantized(wrapped, keep_high_precision=["1"])
    with pytest.raises(ValueError, match="pattern 'head' in keep_high_precision covers no linear module"):
        fp4engine.assert_quantized(wrapped, keep_high_precision=["head"])


def test_patterns_do_not_cover_a_layer_of_a_model_that_calls_a_part_of_it_module() -> None:
    """ "head" was then "module.head", too, as if DDP had put "module" in front: it ran unseen in high precision."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"head": nn.Linear(16, 32)})
            self.head = nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.module["head"](x))

    model = Wrapper()
    fp4engine.convert(model, NVFP4BlockScaling(), keep_high_precision=["head"])
    model(torch.randn(4, 16)).sum().backward()
    fp4engine.assert_quantized(model, keep_high_precision=["head"])
    model.module["head"] = nn.Linear(16, 32)
    for wrapped in (model, nn.DataParallel(model)):
        wrapped(torch.randn(4, 16)).sum().backward()
        with pytest.raises(AssertionError, match=r"module\.head\.weight"):
            fp4engine.assert_quantized(wrapped, keep_high_precision=["head"])
