"""Attention and transformer layers against plain PyTorch, their masks, and TransformerEngine's keys."""

import math
import re
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F

import fp4engine
from fp4engine import IdentityQuantizer
from fp4engine.functional.attention import MASK_TYPES, AttentionMask, attention, rotate
from fp4engine.modules.attention import L2Normalization, MultiheadAttention
from fp4engine.modules.transformer import TransformerLayer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling
from fp4engine.te.pytorch import MultiheadAttention as TEMultiheadAttention
from fp4engine.te.pytorch import TransformerLayer as TETransformerLayer

RECIPE = NVFP4BlockScaling()
IDENTITY = CustomRecipe(qfactory=lambda role: IdentityQuantizer())


def by_hand(query, key, value, allowed=None, bias=None):
    """Attention [B, H, S, D] x [B, G, T, D] in FP64, head by head."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(ratio, dim=1) for x in (key, value))
    scores = query.double() @ key.mT / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ value


def qkv(queries=6, keys=9, heads=4, groups=2):
    return torch.randn(3, heads, queries, 8), torch.randn(3, groups, keys, 8), torch.randn(3, groups, keys, 8)


def close(left, right):
    torch.testing.assert_close(left.double(), right.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", MASK_TYPES)
def test_masks(kind, window):
    query, key, value = qkv()
    padding = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    padding[1, ..., 5:] = True
    padding[2] = True
    masked = padding if "padding" in kind else torch.rand(3, 1, 6, 9) < 0.4
    allowed = torch.ones(3, 1, 6, 9, dtype=torch.bool)
    if "padding" in kind or kind == "arbitrary":
        allowed = allowed & ~masked
    padded = torch.zeros(3, 1, 1, 6, dtype=torch.bool)
    padded[1, ..., 2:] = True
    for sample in range(3):
        shift = 0 if kind in ("causal", "padding_causal") else 3
        if shift and "padding" in kind:
            shift = int((~padding[sample]).sum() - (~padded[sample]).sum())
        for row in range(6):
            for column in range(9):
                if "causal" in kind or window:
                    allowed[sample, :, row, column] &= column <= row + shift
                if window:
                    allowed[sample, :, row, column] &= column >= row + shift - window[0]
    got = attention(query, key, value, AttentionMask(kind, window), masked, padded=padded)
    assert not got.isnan().any()
    close(got, by_hand(query, key, value, allowed))


def test_a_diagonal_that_padding_decides_needs_both_masks():
    query, key, value = qkv()
    mask, masked = AttentionMask("padding_causal_bottom_right"), torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="of 6 queries and 9 keys must be a pair"):
        attention(query, key, value, mask, masked)
    attention(query, key, value, AttentionMask("padding_causal"), masked)
    assert attention(key, key, value, mask, masked).isfinite().all()


@pytest.mark.parametrize("shape", [(9, 9), (3, 1, 9, 9), (3, 1, 1, 1), (3, 4, 1, 9)], ids=str)
def test_a_padding_mask_has_one_row_for_each_sample(shape):
    """[B, T] was taken for [S, T] where there are as many samples as queries."""
    query, key, value = qkv(queries=9)
    masked = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"of a 'padding' mask must have the shape \[batch, 1, 1, 9\], got"):
        attention(query, key, value, AttentionMask("padding"), torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must have the shape \[batch, 1, 1, 9\], got"):
        attention(query, key, value, AttentionMask("padding"), masked, padded=torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(), (6, 8), (6, 2, 1, 8), (1, 1, 1, 8), (5, 1, 1, 8), (6, 1, 1, 10), (6, 1, 1, 3)])
def test_too_few_angles_or_too_many_components_are_refused(shape):
    with pytest.raises(ValueError, match="rotary_pos_emb must have angles of 6 or more positions"):
        rotate(torch.randn(1, 2, 6, 8), torch.zeros(shape))


def test_bias_is_added_to_the_scaled_scores():
    query, key, value = qkv()
    bias = torch.randn(1, 4, 6, 9)
    close(attention(query, key, value, AttentionMask("no_mask"), bias=bias), by_hand(query, key, value, bias=bias))
    causal = torch.ones(6, 9, dtype=torch.bool).tril()
    got = attention(query, key, value, AttentionMask("causal"), bias=bias)
    close(got, by_hand(query, key, value, causal, bias))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_pairs(interleaved):
    x = torch.randn(2, 3, 5, 8)
    angle = torch.rand(7, 1, 1, 2) * 6
    angles = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    expected = x.clone()
    for index, (a, b) in enumerate(pairs):
        turn = torch.polar(torch.ones(5), angle[:5, 0, 0, index])
        turned = torch.complex(x[..., a], x[..., b]) * turn
        expected[..., a], expected[..., b] = turned.real, turned.imag
    close(rotate(x, angles, interleaved), expected)
    assert torch.equal(rotate(x.bfloat16(), angles), rotate(x.bfloat16().float(), angles).bfloat16())


@pytest.mark.parametrize(
    "mask",
    [
        ("diagonal", None),
        ("causal", (3, 1)),
        ("padding_causal", (-1, -1)),
        ("causal", (-2, 0)),
        ("no_mask", (2.5, 0)),
        ("no_mask", (1, 1, 1)),
        ("no_mask", 5),
    ],
)
def test_bad_masks_raise(mask):
    with pytest.raises(ValueError, match=r"mask|window_size"):
        AttentionMask(*mask)


@pytest.mark.parametrize("window", [0, False, (), numpy.array([2, 0]), torch.tensor([2, 0])], ids=repr)
def test_a_window_of_a_forward_is_no_less_checked(window):
    """What is false was taken for None, and all keys were read."""
    layer = fp4engine.MultiheadAttention(32, 2)
    with pytest.raises(ValueError, match="window_size of a mask must be two integers, got "):
        layer(torch.randn(4, 2, 32), window_size=window)
    with pytest.raises(ValueError, match=r"attn_mask_type must be one of .* got ''"):
        layer(torch.randn(4, 2, 32), attn_mask_type="")


def test_padding_without_a_mask_raises():
    with pytest.raises(ValueError, match="needs attention_mask"):
        attention(*qkv(), AttentionMask("padding"))


def test_what_is_no_tensor_is_refused_by_name():
    layer, inp = TransformerLayer(16, 16, 2, self_attn_mask_type="padding"), torch.randn(3, 1, 16)
    with pytest.raises(ValueError, match=r"attention_mask must be boolean, .* got str"):
        layer(inp, attention_mask="x")
    with pytest.raises(ValueError, match=r"rotary_pos_emb must be a tensor of angles, .* got str"):
        layer(inp, attention_mask=torch.zeros(1, 1, 1, 3, dtype=torch.bool), rotary_pos_emb="x")


@pytest.mark.parametrize("kind", [fp4engine.MultiheadAttention, TEMultiheadAttention], ids=["fp4engine", "te"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_pair_of_angles_is_of_two(kind, count):
    angles = (torch.zeros(4, 1, 1, 16),) * count
    said = rf"rotary_pos_emb must be a tensor of angles, or a pair of them, got a tuple of {count} \("
    with pytest.raises(ValueError, match=said):
        kind(32, 2)(torch.randn(4, 2, 32), rotary_pos_emb=angles)
    with pytest.raises(ValueError, match=r"got a tuple of 2 \(Tensor, NoneType\)"):
        kind(32, 2)(torch.randn(4, 2, 32), rotary_pos_emb=(torch.zeros(4, 1, 1, 16), None))


@pytest.mark.parametrize("batches", [(1, 3), (2, 1)], ids=str)
def test_cross_attention_is_between_equal_batches(batches):
    layer = TransformerLayer(16, 16, 2, layer_type="decoder")
    hidden, encoded = torch.randn(3, batches[0], 16), torch.randn(5, batches[1], 16)
    with pytest.raises(ValueError, match=f"encoder_output must have a batch of {batches[0]}, .* got {batches[1]}"):
        layer(hidden, encoder_output=encoded)


@pytest.mark.parametrize("shape", [(0, 6, 16), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("recipe", [None, NVFP4BlockScaling()], ids=["high precision", "NVFP4"])
def test_no_rows_give_no_rows(shape, recipe):
    inp = torch.randn(shape, requires_grad=True)
    for layer in (
        MultiheadAttention(16, 2, qkv_format="bshd"),
        TransformerLayer(16, 16, 2, attn_input_format="bshd", fuse_qkv_params=True),
    ):
        with fp4engine.autocast(recipe is not None, recipe=recipe):
            output = layer(inp)
        output.sum().backward()
        assert output.shape == inp.grad.shape == shape


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("kind", [kind for kind in MASK_TYPES if AttentionMask(kind).reads_mask])
def test_masks_of_ones_and_zeros_are_refused(kind, dtype):
    masked = torch.zeros(3, 1, 1, 9, dtype=dtype)
    with pytest.raises(ValueError, match="attention_mask must be boolean, True where NOT to attend, got torch"):
        attention(*qkv(), AttentionMask(kind), masked, padded=torch.zeros(3, 1, 1, 6, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(3, 1, 5, 9), (3, 1, 6, 8), (2, 1, 1, 9), (1, 3, 1, 6, 9)], ids=str)
def test_what_is_added_to_scores_has_their_shape(shape):
    said = r"must be broadcastable to \[batch, heads, queries, keys\], here \[3, .*, 6, 9\], got " + re.escape(
        str([*shape])
    )
    with pytest.raises(ValueError, match=f"attention_mask {said}"):
        attention(*qkv(), AttentionMask("arbitrary"), torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"core_attention_bias {said}"):
        attention(*qkv(), AttentionMask("no_mask"), bias=torch.zeros(shape))


def project(module, inp):
    """Queries, keys and values of a self-attention without a norm, by plain matrices."""
    weight, bias = module.qkv.joined()
    q, kv = (module.head_size * n for n in (module.num_attention_heads, module.num_gqa_groups))
    return F.linear(inp, weight, bias).split((q, kv, kv), dim=-1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_self_attention_by_hand(layout, groups):
    module = MultiheadAttention(32, 4, num_gqa_groups=groups, qkv_format=layout, attention_dropout=0.0)
    inp = torch.randn(5, 3, 32)
    q, k, v = project(module, inp)
    order = (0, 2, 1, 3) if layout == "bshd" else (1, 2, 0, 3)
    heads = [x.view(5, 3, -1, 8).permute(order) for x in (q, k, v)]
    length = inp.shape[1 if layout == "bshd" else 0]
    context = by_hand(*heads, torch.ones(length, length, dtype=torch.bool).tril()).float()
    context = context.permute((0, 2, 1, 3) if layout == "bshd" else (2, 0, 1, 3)).reshape(5, 3, 32)
    close(module(inp), F.linear(context, module.proj.weight, module.proj.bias))


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_interleaved_weights_are_a_permutation_of_the_rows(attention_type):
    heads, groups, size = 4, 2, 8
    make = partial(
        MultiheadAttention,
        32,
        heads,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        attention_type=attention_type,
        fuse_qkv_params=True,
        bias=False,
        attn_mask_type="no_mask",
    )
    whole, mixed = make(qkv_weight_interleaved=False), make(qkv_weight_interleaved=True)
    mixed.load_state_dict(whole.state_dict())
    name = "qkv.weight" if attention_type == "self" else "key_value.weight"
    weight = whole.get_parameter(name).detach()
    *queries, keys, values = weight.view(-1, groups * size, 32)
    query = torch.cat(queries).view(groups, -1, size, 32) if queries else weight.new_empty(groups, 0, size, 32)
    rows = torch.cat((query, keys.view(groups, 1, size, 32), values.view(groups, 1, size, 32)), dim=1)
    with torch.no_grad():
        mixed.get_parameter(name).copy_(rows.reshape(-1, 32))
    inp = torch.randn(5, 2, 32)
    other = torch.randn(7, 2, 32) if attention_type == "cross" else None
    close(mixed(inp, encoder_output=other), whole(inp, encoder_output=other))


def test_checkpointed_core_attention_changes_no_bit():
    module = MultiheadAttention(32, 4, input_layernorm=True, attention_dropout=0.5)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(2)
        fp4engine.manual_seed(2)
        inp = torch.ones(5, 2, 32).cumsum(0).requires_grad_()
        with fp4engine.autocast():
            output = module(inp, checkpoint_core_attention=checkpointed)
        output.square().sum().backward()
        results.append((output.detach(), inp.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [True, False])
def test_qk_norm(kind, before):
    module = MultiheadAttention(16, 2, attention_dropout=0.0, qk_norm_type=kind, qk_norm_before_rope=before)
    angles = torch.rand(6, 1, 1, 8)
    query, key = torch.randn(2, 3, 2, 6, 8).unbind()
    got = module._position(query, key, angles)
    for x, positioned in zip((query, key), got, strict=True):
        x = x if before else rotate(x, angles)
        x = {
            "LayerNorm": lambda x: F.layer_norm(x, (8,), eps=1e-6),
            "RMSNorm": lambda x: F.rms_norm(x, (8,), eps=1e-6),
            "L2Normalization": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        }[kind](x)
        close(positioned, rotate(x, angles) if before else x)
    assert module(torch.randn(6, 3, 16), rotary_pos_emb=angles).shape == (6, 3, 16)


def plain_layer(layer, inp):
    """A default TransformerLayer without dropout, from its parts."""
    attended = layer.self_attention(inp)
    hidden = inp + attended
    return hidden + layer.layernorm_mlp(hidden)


def make_layer(**arguments):
    layer = TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 16)
    return layer


def step(function, inp, parameters, recipe):
    fp4engine.manual_seed(5)
    inp = inp.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    with fp4engine.autocast(enabled=recipe is not None, recipe=recipe or RECIPE):
        output = function(inp)
    output.float().square().sum().backward()
    return [output.detach(), inp.grad, *(parameter.grad for parameter in parameters)]


@pytest.mark.parametrize("recipe", [RECIPE, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_its_parts(dtype, recipe):
    layer = make_layer(params_dtype=dtype, normalization="RMSNorm", activation="swiglu", num_gqa_groups=2)
    inp, parameters = torch.randn(6, 2, 32, dtype=dtype), list(layer.parameters())
    left, right = (step(f, inp, parameters, recipe) for f in (layer, partial(plain_layer, layer)))
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_quantizers_are_high_precision_bit_for_bit(dtype):
    layer = make_layer(params_dtype=dtype, layer_type="encoder", drop_path_rate=0.0)
    inp, parameters = torch.randn(6, 2, 32, dtype=dtype), list(layer.parameters())
    left, right = (step(layer, inp, parameters, recipe) for recipe in (IDENTITY, None))
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_every_projection_runs_in_fp4():
    layer = make_layer()
    step(layer, torch.randn(4, 2, 32), [], RECIPE)
    report = fp4engine.executed_gemms(layer)
    assert report.fp4_gemms == 12 and report.fp4_share == 1.0
    names = {module.name for module in report.modules}
    assert names == {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"}


def test_variants_by_formula():
    inp = torch.randn(6, 2, 32)
    parallel = make_layer(parallel_attention_mlp=True)
    close(parallel(inp), inp + parallel.self_attention(inp) + parallel.layernorm_mlp(inp))

    post = make_layer(apply_residual_connection_post_layernorm=True)
    attended, normalized = post.self_attention(inp)
    hidden = normalized + attended
    output, normalized = post.layernorm_mlp(hidden)
    close(post(inp), normalized + output)

    bert = make_layer(output_layernorm=True)
    close(bert(inp), bert.layernorm(plain_layer(bert, inp)))

    decoder = make_layer(layer_type="decoder")
    encoded = torch.randn(9, 2, 32)
    hidden = inp + decoder.self_attention(inp)
    hidden = hidden + decoder.inter_attention(hidden, encoder_output=encoded)
    close(decoder(inp, encoder_output=encoded), hidden + decoder.layernorm_mlp(hidden))
    with pytest.raises(ValueError, match="needs encoder_output"):
        decoder(inp)


def test_layouts_agree():
    first, second = make_layer(attn_input_format="sbhd"), make_layer(attn_input_format="bshd")
    second.load_state_dict(first.state_dict())
    inp = torch.randn(6, 2, 32)
    close(second(inp.transpose(0, 1)).transpose(0, 1), first(inp))


def test_drop_path_leaves_out_whole_branches():
    layer = make_layer(drop_path_rate=0.5, attn_input_format="bshd")
    inp = torch.randn(64, 3, 32)
    ran = layer._add(torch.zeros_like(inp), inp)
    dropped = (ran == 0).all(dim=(1, 2))
    assert 10 < dropped.sum() < 54
    assert torch.equal(ran[~dropped], 2 * inp[~dropped])
    layer.eval()
    assert torch.equal(layer._add(torch.zeros_like(inp), inp), inp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_drop_path_divides_what_it_keeps_with_one_rounding(dtype):
    layer, inp = make_layer(drop_path_rate=0.1, attn_input_format="bshd"), torch.randn(16, 3, 32, dtype=dtype)
    ran = layer._add(torch.zeros_like(inp), inp)
    kept = ran.any(dim=-1, keepdim=True)
    assert kept.any() and torch.equal(ran, torch.where(kept, inp / (1 - 0.1), 0.0))


def test_float64_is_not_rounded_to_float32():
    x, slopes = torch.randn(1, 3, 5, 8, dtype=torch.float64), torch.tensor([0.3, 0.1, 0.7], dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(L2Normalization()(x), expected, rtol=1e-14, atol=0)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    expected = by_hand(x, x, x, distance >= 0, -slopes[:, None, None] * distance)
    got = attention(x, x, x, AttentionMask("causal"), slopes=slopes)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_a_rate_of_one_leaves_out_every_branch():
    layer, inp = make_layer(drop_path_rate=1.0), torch.randn(6, 2, 32)
    assert torch.equal(layer(inp), inp)


def test_drop_path_keeps_cross_attention():
    """As in TransformerEngine; it was left out as well."""
    layer = make_layer(drop_path_rate=1.0, layer_type="decoder")
    inp, encoded = torch.randn(6, 2, 32), torch.randn(5, 2, 32)
    attended = layer.inter_attention(inp, encoder_output=encoded)
    assert torch.equal(layer(inp, encoder_output=encoded), inp + attended)


ATTENTION_KEYS = {
    (False, False): ["qkv.query_weight", "qkv.key_weight", "qkv.value_weight", "proj.weight"],
    (False, True): ["qkv.weight", "proj.weight"],
    (True, False): [
        "layernorm_qkv.layer_norm_weight",
        "layernorm_qkv.layer_norm_bias",
        "layernorm_qkv.query_weight",
        "layernorm_qkv.key_weight",
        "layernorm_qkv.value_weight",
        "proj.weight",
    ],
    (True, True): [
        "layernorm_qkv.layer_norm_weight",
        "layernorm_qkv.layer_norm_bias",
        "layernorm_qkv.weight",
        "proj.weight",
    ],
}


@pytest.mark.parametrize(("norm", "fuse"), ATTENTION_KEYS)
def test_keys_are_transformer_engines(norm, fuse):
    module = MultiheadAttention(16, 2, bias=False, input_layernorm=norm, fuse_qkv_params=fuse)
    assert list(module.state_dict()) == ATTENTION_KEYS[norm, fuse]


def test_keys_of_cross_attention_and_layer():
    cross = MultiheadAttention(16, 2, bias=False, attention_type="cross")
    assert list(cross.state_dict()) == [
        "query_layer.weight",
        "key_value.key_weight",
        "key_value.value_weight",
        "proj.weight",
    ]
    normed = MultiheadAttention(16, 2, attention_type="cross", input_layernorm=True, qk_norm_type="RMSNorm")
    assert {"layernorm_query.query_weight", "layernorm_query.layer_norm_bias", "q_norm.weight"} <= set(
        normed.state_dict()
    )
    layer = TransformerLayer(16, 16, 2, output_layernorm=True, fuse_qkv_params=True)
    assert list(layer.state_dict()) == [
        "self_attention.qkv.weight",
        "self_attention.qkv.bias",
        "self_attention.proj.weight",
        "self_attention.proj.bias",
        *(f"layernorm_mlp.{key}" for key in layer.layernorm_mlp.state_dict()),
        "layernorm.weight",
        "layernorm.bias",
    ]


@pytest.mark.parametrize(
    "argument",
    [{"tp_size": 2}, {"softmax_type": "learnable"}, {"ub_tp_comm_overlap": True}, {"attn_input_format": "thd"}],
)
def test_what_is_not_implemented_is_refused_by_name(argument):
    name = next(iter(argument)).replace("attn_input_format", "qkv_format")
    with pytest.raises(NotImplementedError, match=name):
        TransformerLayer(16, 16, 2, **argument)


@pytest.mark.parametrize("argument", [{"inference_params": object()}, {"core_attention_bias_type": "alibi"}])
def test_forward_arguments_that_are_not_implemented_are_refused(argument):
    with pytest.raises(NotImplementedError, match=next(iter(argument))):
        TransformerLayer(16, 16, 2)(torch.randn(3, 1, 16), **argument)


@pytest.mark.parametrize(
    "argument",
    [
        {"core_attention_bias": torch.zeros(1, 2, 3, 3)},
        {"core_attention_bias_type": "post_scale_bias"},
        {"encoder_output": torch.zeros(3, 1, 16)},
    ],
)
def test_forward_arguments_that_nothing_reads_are_refused(argument):
    for module in (TransformerLayer(16, 16, 2), MultiheadAttention(16, 2)):
        with pytest.raises(ValueError, match=f"{next(iter(argument))}.* goes with|core_attention_bias goes with"):
            module(torch.randn(3, 1, 16), **argument)


def test_every_projection_of_cross_attention_adds_to_main_grad():
    attention = MultiheadAttention(16, 2, attention_type="cross", fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    weights = [attention.query_layer.weight, attention.key_value.weight, attention.proj.weight]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    attention(torch.randn(3, 1, 16), encoder_output=torch.randn(5, 1, 16)).sum().backward()
    assert all(weight.grad is None and weight.main_grad.any() for weight in weights)


def test_unknown_and_contradicting_arguments_raise():
    with pytest.raises(TypeError, match="no_such"):
        TransformerLayer(16, 16, 2, no_such=1)
    with pytest.raises(TypeError, match="no_such"):
        TransformerLayer(16, 16, 2)(torch.randn(3, 1, 16), no_such=1)
    for arguments in (
        {"layer_type": "both"},
        {"parallel_attention_mlp": True, "output_layernorm": True},
        {"num_gqa_groups": 3},
        {"num_gqa_groups": 0},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"kv_channels": 0},
        {"hidden_dropout": 1.5},
        {"attention_dropout": -0.1},
        {"drop_path_rate": 2},
        {"drop_path_rate": "0.1"},
        {"qk_norm_type": "BatchNorm"},
        {"self_attn_mask_type": "diagonal"},
    ):
        with pytest.raises(ValueError, match=r"must be|goes with"):
            TransformerLayer(16, 16, **{"num_attention_heads": 2, **arguments})


def test_harmless_hints_are_accepted():
    hinted = TransformerLayer(16, 16, 2, layer_number=3, seq_length=8, micro_batch_size=2, ub_overlap_ag=True)
    assert list(hinted.state_dict()) == list(TransformerLayer(16, 16, 2).state_dict())


def test_a_mask_that_is_not_read_is_said_to_be_so():
    module = MultiheadAttention(32, 2)
    with pytest.warns(UserWarning, match="attention_mask is not read under attn_mask_type='causal'"):
        module(torch.randn(4, 1, 32), attention_mask=torch.zeros(1, 1, 1, 4, dtype=torch.bool))


@pytest.mark.parametrize("bias", [True, False])
def test_a_returned_bias_is_left_out_and_the_projections_hooks_are_called(bias):
    torch.manual_seed(0)
    whole = fp4engine.MultiheadAttention(64, 2, attention_dropout=0.0, bias=bias)
    parts = fp4engine.MultiheadAttention(64, 2, attention_dropout=0.0, bias=bias, return_bias=True)
    parts.load_state_dict(whole.state_dict())
    if bias:
        torch.nn.init.normal_(parts.proj.bias)
        whole.proj.bias = parts.proj.bias
    called = []
    parts.proj.register_forward_hook(lambda *_: called.append(True))
    x = torch.randn(16, 2, 64)
    with fp4engine.autocast(recipe=NVFP4BlockScaling()):
        output, added = parts(x)
        expected = whole(x)
    assert called and (added is parts.proj.bias if bias else added is None)
    torch.testing.assert_close(output if added is None else output + added, expected)


@pytest.mark.parametrize("layer_class", [TransformerLayer, TETransformerLayer])
def test_an_encoder_refuses_what_is_of_cross_attention(layer_class) -> None:
    words = {"enc_dec_attn_mask_type": "causal", "enc_dec_window_size": (1, 0), "enc_dec_bottom_right_diagonal": True}
    for name, value in words.items():
        said = re.escape(f"{name} goes with layer_type='decoder', this is 'encoder'; got {value!r}")
        refusal = pytest.raises(ValueError, match=said)
        with refusal:
            layer_class(16, 32, 2, **{name: value})
        layer_class(16, 32, 2, layer_type="decoder", **{name: value})
        with refusal:
            layer_class(16, 32, 2)(torch.randn(3, 1, 16), **{name: value})
    for name in ("encoder_output", "enc_dec_attn_mask"):
        with pytest.raises(ValueError, match=f"{name} goes with layer_type='decoder', this is 'encoder'"):
            layer_class(16, 32, 2)(torch.randn(3, 1, 16), **{name: torch.zeros(3, 1, 16)})
