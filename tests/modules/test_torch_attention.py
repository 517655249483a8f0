"""nn.MultiheadAttention by recipes: the same numbers as torch's in high precision, its projections in FP4."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling

RECIPE = NVFP4BlockScaling()


def attention(**arguments) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(32, 4, **arguments)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    return module


def convert(module: nn.Module, recipe=None) -> nn.Module:
    holder = nn.ModuleList([copy.deepcopy(module)])
    fp4engine.convert(holder, recipe)
    return holder[0]


@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"batch_first": True}])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("inputs", ["self", "keys", "all", "unbatched"])
@pytest.mark.parametrize("masks", ["none", "boolean", "per head", "padding", "both"])
def test_in_high_precision_it_is_torchs(arguments, need_weights, inputs, masks) -> None:
    module = attention(**arguments)
    converted = convert(module)
    batch, queries, keys = 3, 5, 5 if inputs in ("self", "unbatched") else 7
    x = [torch.randn(batch, length, 32, requires_grad=True) for length in (queries, keys, keys)]
    if inputs == "unbatched":
        x = [x[0][0].detach().requires_grad_()]
    elif not arguments.get("batch_first"):
        x = [y.detach().transpose(0, 1).requires_grad_() for y in x]
    query, key, value = {"self": (0, 0, 0), "unbatched": (0, 0, 0), "keys": (0, 1, 1), "all": (0, 1, 2)}[inputs]
    options = {"need_weights": need_weights, "average_attn_weights": masks != "per head"}
    if masks in ("boolean", "both"):
        options["attn_mask"] = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    if masks == "per head":
        heads = 4 if inputs == "unbatched" else 12
        options["attn_mask"] = torch.randn(heads, queries, keys)
    if masks in ("padding", "both"):
        padding = torch.zeros(batch, keys, dtype=torch.bool)
        padding[1, -2:] = True
        options["key_padding_mask"] = padding[1] if inputs == "unbatched" else padding
    results = []
    for layer in (module, converted):
        output, weights = layer(x[query], x[key], x[value], **options)
        grads = torch.autograd.grad(output.square().sum(), [x[query], *layer.parameters()])
        results.append((output, weights, *grads))
    for expected, got in zip(*results, strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_both_projections_run_in_fp4_and_count() -> None:
    module = nn.ModuleDict({"attn": attention(batch_first=True, dropout=0.5)})
    keys = list(module.state_dict())
    plan = fp4engine.convert(module, RECIPE)
    assert list(module.state_dict()) == keys
    assert [(m.name, m.shape, m.reason) for m in plan.modules] == [
        ("attn.out_proj", (32, 32), ""),
        ("attn.in_proj_gemms", (96, 32), ""),
    ]
    assert plan.matrices == () and plan.fp4_share == 1.0
    x = torch.randn(2, 16, 32, requires_grad=True)
    report = fp4engine.executed_gemms(module, lambda: module["attn"](x, x, x, need_weights=False)[0].sum().backward())
    assert report.flops["e2m1 x e2m1"] == 3 * 2 * 32 * (96 * 32 + 32 * 32)
    fp4engine.assert_quantized(module)
    fp4engine.revert(module)
    assert type(module["attn"]) is nn.MultiheadAttention and list(module.state_dict()) == keys
    assert not module["attn"]._forward_pre_hooks and "in_proj_gemms" not in module["attn"]._modules


@pytest.mark.parametrize("pattern", ["in_proj_weight", "in_proj_gemms"])
def test_the_projection_of_a_model_that_is_attention_itself_is_kept_by_name(pattern: str) -> None:
    """Its names began with a dot there, so the projection was adopted and the pattern refused."""
    plan = fp4engine.convert(attention(), keep_high_precision=[pattern])
    assert [matrix.reason for matrix in plan.matrices] == [f"kept by {pattern!r}"]


def test_in_evaluation_a_transformer_layer_does_not_multiply_past_its_modules() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        expected = layer(x)
        fp4engine.convert(layer)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
        with fp4engine.autocast(recipe=RECIPE):
            layer(x)
    assert {formats for _, formats in layer.linear1.executed.counts} == {"high_precision", "e2m1 x e2m1"}
    assert layer.self_attn.in_proj_gemms.executed.counts[("fprop", "e2m1 x e2m1")] == 1
    assert layer.self_attn.out_proj.executed.counts[("fprop", "e2m1 x e2m1")] == 1


@pytest.mark.parametrize("arguments", [{"kdim": 16}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_would_compute_something_else_is_left_alone_and_listed(arguments) -> None:
    module = nn.ModuleDict({"attn": attention(**arguments), "linear": nn.Linear(16, 16)})
    plan = fp4engine.convert(module, RECIPE)
    assert type(module["attn"]) is nn.MultiheadAttention
    assert [m.name for m in plan.left_alone] == ["attn.out_proj"]
    assert any("in_proj" in m.name or "q_proj" in m.name for m in plan.matrices)


def test_a_pruned_projection_is_left_alone() -> None:
    module = nn.ModuleDict({"attn": attention(), "linear": nn.Linear(16, 16)})
    prune.l1_unstructured(module["attn"], "in_proj_weight", 0.5)
    plan = fp4engine.convert(module, RECIPE)
    assert type(module["attn"]) is nn.MultiheadAttention
    assert [m.name for m in plan.left_alone] == ["attn.out_proj"]


def test_an_attention_whose_forward_was_replaced_is_left_alone() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4), "head": nn.Linear(32, 32)})
    model["attn"].forward = model["attn"].forward  # as Accelerate's hooks do
    plan = fp4engine.convert(model)
    assert [m.name for m in plan.left_alone] == ["attn.out_proj"]
    assert [m.name for m in plan.matrices] == ["attn.in_proj_weight"]


def test_a_projection_that_is_computed_after_conversion_is_none_of_the_plans_parameters() -> None:
    module = nn.ModuleDict({"attn": attention(), "linear": nn.Linear(16, 16)})
    fp4engine.convert(module, RECIPE)
    prune.l1_unstructured(module["attn"], "in_proj_weight", 0.5)
    plan = fp4engine.convert(module, RECIPE)
    assert "attn.in_proj_weight_orig" in [m.name for m in plan.matrices]


@pytest.mark.parametrize("name", ["attn.in_proj_weight", "linear.weight"])
def test_what_was_parametrized_is_not_reverted(name) -> None:
    module = nn.ModuleDict({"attn": attention(), "linear": nn.Linear(16, 16)})
    fp4engine.convert(module, RECIPE)
    owner, weight = name.split(".")
    parametrize.register_parametrization(module[owner], weight, nn.Identity())
    with pytest.raises(ValueError, match=f"'{owner}' is parametrized"):
        fp4engine.revert(module)
    parametrize.remove_parametrizations(module[owner], weight)
    fp4engine.revert(module)
    assert [type(child) for child in module.values()] == [nn.MultiheadAttention, nn.Linear]


def test_an_encoder_is_told_not_to_make_nested_tensors() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 8, 32), torch.arange(8) >= torch.tensor([[8], [5]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        fp4engine.convert(encoder)
        with pytest.raises(ValueError, match=r"nn.TransformerEncoder, .* set use_nested_tensor = False"):
            encoder(x, src_key_padding_mask=padding)
        encoder.use_nested_tensor = False
        got = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


def test_refusals() -> None:
    converted = convert(attention())
    x = torch.randn(4, 2, 32)
    with pytest.raises(ValueError, match="is a hint about attn_mask"):
        converted(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(4, 32)])
    with pytest.raises(ValueError, match="takes no nested tensors"):
        converted(nested, nested, nested)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    ("shapes", "masks"),
    [
        ([(5, 3), (7, 3), (7, 3)], {"key_padding_mask": torch.zeros(7, 3, dtype=torch.bool)}),
        ([(5, 3), (7, 3), (7, 3)], {"key_padding_mask": torch.zeros(3, 7, dtype=torch.int64)}),
        ([(5, 3), (7, 3), (7, 3)], {"attn_mask": torch.zeros(5, 7, dtype=torch.uint8)}),
        ([(5, 3), (7, 3), (7, 3)], {"attn_mask": torch.zeros(1, 7)}),
        ([(5, 3), (7, 3), (7, 3)], {"attn_mask": torch.zeros(3, 4, 5, 7)}),
        ([(5,), (7,), (7,)], {"key_padding_mask": torch.zeros(1, 7, dtype=torch.bool)}),
        ([(5, 3), (7, 1), (7, 1)], {}),
        ([(5, 3), (7, 3), (2, 3)], {}),
        ([(5,), (7, 3), (7, 3)], {}),
        ([(2, 5, 3), (2, 7, 3), (2, 7, 3)], {}),
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused(shapes, masks, need_weights) -> None:
    """Converted, integers would be added to the scores, and a transposed mask read as if it were none."""
    module = attention()
    x = [torch.randn(*shape, 32) for shape in shapes]
    with pytest.raises((AssertionError, RuntimeError)):
        module(*x, need_weights=need_weights, **masks)
    with pytest.raises(ValueError, match=f"{next(iter(masks), 'query, key and value')} must be"):
        convert(module)(*x, need_weights=need_weights, **masks)
