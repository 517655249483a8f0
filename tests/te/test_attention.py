"""Attention by TransformerEngine's arguments: every layout gives what the plain one gives, sequence by sequence."""

from collections import OrderedDict
from functools import partial

import numpy
import pytest
import torch

from fp4engine.te.pytorch import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from fp4engine.te.pytorch.attention import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fp4engine.te.pytorch.dot_product_attention import check_set_window_size, get_cu_seqlens, get_full_cu_seqlens

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = (5, 3)


def qkv(rows=6, batch=2, keys=None):
    torch.manual_seed(0)
    keys = rows if keys is None else keys
    return (
        torch.randn(batch, rows, HEADS, SIZE, requires_grad=True),
        torch.randn(batch, keys, GROUPS, SIZE, requires_grad=True),
        torch.randn(batch, keys, GROUPS, SIZE, requires_grad=True),
    )


def by_hand(query, key, value, allowed=None, bias=0.0, scale=None):
    """[B, S, H D] in FP64."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("bshd,bthd->bhst", query, key) * (SIZE**-0.5 if scale is None else scale) + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value).flatten(2).float()


def make(**arguments):
    return DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="bshd", **arguments)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"attn_mask_type": "no_mask"}, None),
        ({"attn_mask_type": "causal"}, CAUSAL),
        ({"attn_mask_type": "causal", "window_size": (2, 0)}, CAUSAL & ~CAUSAL.tril(-3)),
        ({"attn_mask_type": "no_mask", "window_size": (1, 1)}, CAUSAL.triu(-1) | CAUSAL.T.tril(1)),
    ],
)
def test_masks_and_windows(arguments, allowed) -> None:
    tensors = qkv()
    expected = by_hand(*tensors, allowed)
    assert torch.allclose(make(**arguments)(*tensors), expected, atol=1e-5)
    sbhd = DotProductAttention(HEADS, SIZE, GROUPS, **arguments)(*(t.transpose(0, 1) for t in tensors))
    assert torch.allclose(sbhd.transpose(0, 1), expected, atol=1e-5)


def test_scale_bias_and_slopes() -> None:
    tensors = qkv()
    bias = torch.randn(1, HEADS, 6, 6)
    with_bias = make(attn_mask_type="no_mask", softmax_scale=0.3)(
        *tensors, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    assert torch.allclose(with_bias, by_hand(*tensors, bias=bias, scale=0.3), atol=1e-5)
    distance = (torch.arange(6) - torch.arange(6)[:, None]).abs()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])
    alibi = make(attn_mask_type="causal")(*tensors, core_attention_bias_type="alibi")
    assert torch.allclose(alibi, by_hand(*tensors, CAUSAL, -slopes[:, None, None] * distance), atol=1e-5)


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_packed_sequences_are_the_padded_ones(kind) -> None:
    query, key, value = qkv(max(LENGTHS))
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = [torch.cat([t[i, :n] for i, n in enumerate(LENGTHS)]) for t in (query, key, value)]
    thd = make(attn_mask_type=kind)(*packed, qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    padded = make(attn_mask_type=kind)(query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    past = (torch.arange(5) >= torch.tensor(LENGTHS)[:, None])[:, None, None]
    masked = make(attn_mask_type=kind)(query, key, value, past)
    for index, length in enumerate(LENGTHS):
        one = [t[index : index + 1, :length] for t in (query, key, value)]
        alone = make(attn_mask_type="causal" if "causal" in kind else "no_mask")(*one)[0]
        start = int(ends[index])
        for found in (thd[start : start + length], padded[index, :length], masked[index, :length]):
            assert torch.allclose(found, alone, atol=1e-6)
    assert not padded[1, 3:].any()
    begins = torch.tensor([0, 6, 10], dtype=torch.int32)  # one token of padding after each
    spread = [torch.cat((t[:5], t[:1], t[5:], t[:1])) for t in packed]
    between = make(attn_mask_type=kind)(
        *spread, None, "thd", ends, ends, cu_seqlens_q_padded=begins, cu_seqlens_kv_padded=begins
    )
    assert torch.allclose(torch.cat((between[:5], between[6:9])), thd, atol=1e-6) and not between[5].any()


@pytest.mark.parametrize("given", ["slopes", "slopes of each", "bias", "bias of each"])
def test_packed_sequences_get_slopes_and_biases_of_their_own(given: str) -> None:
    query, key, value = qkv(max(LENGTHS))
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = [torch.cat([t[i, :n] for i, n in enumerate(LENGTHS)]) for t in (query, key, value)]
    count = 2 if "each" in given else 1
    if "slopes" in given:
        of_all = torch.rand(count, HEADS)
        others = {"core_attention_bias_type": "alibi", "alibi_slopes": of_all if count == 2 else of_all[0]}
    else:
        of_all = torch.randn(count, HEADS, max(LENGTHS), max(LENGTHS))
        others = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": of_all}
    attend = make(attn_mask_type="padding")
    thd = attend(*packed, qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **others)
    padded = attend(query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, **others)
    for index, length in enumerate(LENGTHS):
        start = int(ends[index])
        assert torch.allclose(thd[start : start + length], padded[index, :length], atol=1e-5)


def test_packed_sequences_refuse_slopes_and_biases_of_others() -> None:
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = [torch.randn(8, HEADS, SIZE), torch.randn(8, GROUPS, SIZE), torch.randn(8, GROUPS, SIZE)]
    attend = partial(make(attn_mask_type="padding"), *packed, qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with pytest.raises(ValueError, match=r"alibi_slopes must have one entry, or one for each of 2 sequences, got \[3"):
        attend(core_attention_bias_type="alibi", alibi_slopes=torch.rand(3, HEADS))
    with pytest.raises(ValueError, match="is too short for a sequence of 5 queries and 5 keys"):
        attend(core_attention_bias_type="post_scale_bias", core_attention_bias=torch.randn(1, HEADS, 4, 4))


def test_rotary_embedding_by_layout() -> None:
    angles = RotaryPositionEmbedding(SIZE)(8)
    assert angles.shape == (8, 1, 1, SIZE) and torch.equal(angles[3, 0, 0, :4], 3 / 10000 ** (torch.arange(4) / 4))
    x = torch.randn(5, 2, HEADS, SIZE)
    sbhd = apply_rotary_pos_emb(x, angles)
    assert torch.allclose(sbhd.norm(dim=-1), x.norm(dim=-1), atol=1e-5) and torch.equal(sbhd[0], x[0])
    assert torch.equal(apply_rotary_pos_emb(x.transpose(0, 1), angles, "bshd"), sbhd.transpose(0, 1))
    views = (apply_rotary_pos_emb(x.transpose(0, 1), angles, layout) for layout in ("sbhd", "bshd"))
    assert sbhd.is_contiguous() and all(turned.is_contiguous() for turned in views)
    later = apply_rotary_pos_emb(x, angles, start_positions=torch.tensor([0, 3]))
    assert torch.equal(later[:, 0], sbhd[:, 0])
    assert torch.allclose(later[:, 1:], apply_rotary_pos_emb(x[:, 1:], RotaryPositionEmbedding(SIZE)(5, 3)), atol=1e-5)
    packed = torch.cat((x[:, 0], x[:3, 1]))
    thd = apply_rotary_pos_emb(packed, angles, "thd", cu_seqlens=torch.tensor([0, 5, 8]))
    assert torch.equal(thd, torch.cat((sbhd[:, 0], sbhd[:3, 1])))
    with pytest.raises(ValueError, match="cu_seqlens"):
        apply_rotary_pos_emb(packed, angles, "thd")
    longer = RotaryPositionEmbedding(SIZE, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=16)
    assert torch.allclose(longer(8), angles / 2)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("starts", [None, [0, 3]])
def test_a_fused_rotation_is_rounded_once(tensor_format, starts) -> None:
    x = torch.randn((6, 2, SIZE) if tensor_format == "thd" else (2, 2, 2, SIZE)).bfloat16()
    options = {"start_positions": None if starts is None else torch.tensor(starts), "tensor_format": tensor_format}
    options["cu_seqlens"] = torch.tensor([0, 2, 6]) if tensor_format == "thd" else None
    angles = RotaryPositionEmbedding(SIZE)(8)
    wide = apply_rotary_pos_emb(x.float(), angles, **options).bfloat16()
    assert torch.equal(apply_rotary_pos_emb(x, angles, fused=True, **options), wide)
    assert not torch.equal(apply_rotary_pos_emb(x, angles, **options), wide)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotary_embedding_of_q_k_and_v_in_one(layout) -> None:
    torch.manual_seed(0)
    angles, other = RotaryPositionEmbedding(SIZE)(5), RotaryPositionEmbedding(SIZE, rotary_percent=0.5)(5)
    shape = (5, 2) if layout == "sbhd" else (2, 5)
    qkv = torch.randn(*shape, 3, 4 * SIZE).bfloat16().requires_grad_()  # drawn in BF16, PyTorch 2.11 has zeros
    made = apply_fused_qkv_rotary_pos_emb(qkv, angles, other, [2 * SIZE, SIZE, SIZE], layout)
    heads = [part.reshape(*shape, -1, SIZE) for part in qkv.split([2 * SIZE, SIZE, SIZE], -1)]
    expected = [
        apply_rotary_pos_emb(heads[0], angles, layout, fused=True),
        apply_rotary_pos_emb(heads[1], other, layout, fused=True),
        heads[2],
    ]
    assert all(map(torch.equal, made, expected)) and all(part.is_contiguous() for part in made)
    sum(part.float().square().sum() for part in made).backward()
    assert qkv.grad.count_nonzero() == qkv.numel()
    for sizes, words in (([SIZE, SIZE], "three sizes"), ([SIZE, 2 * SIZE, SIZE], "a multiple of the second")):
        with pytest.raises(ValueError, match=words):
            apply_fused_qkv_rotary_pos_emb(qkv, angles, other, sizes, layout)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_generating_token_by_token_is_reading_all_at_once(layout) -> None:
    torch.manual_seed(0)
    layers = [TransformerLayer(32, 64, HEADS, GROUPS, layer_number=i + 1, attn_input_format=layout) for i in range(2)]
    layers = torch.nn.ModuleList(layers).eval()
    axis = 0 if layout == "sbhd" else 1
    x = torch.randn(6, 2, 32).transpose(0, axis)
    angles = RotaryPositionEmbedding(8)(6)
    whole = x
    for layer in layers:
        whole = layer(whole, rotary_pos_emb=angles)
    cache = InferenceParams(2, 8, qkv_format=layout)
    parts = []
    for part in x.split([3, 1, 2], dim=axis):
        cache.pre_step(OrderedDict((name, part.shape[axis]) for name in (7, 9)))
        for layer in layers:
            part = layer(part, rotary_pos_emb=angles, inference_params=cache)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, dim=axis), whole, atol=1e-5)
    with pytest.raises(ValueError, match="max_sequence_length=8"):
        cache.pre_step(OrderedDict({7: 9}))
    cache.pre_step(OrderedDict({9: 1}))
    assert set(cache.cache[1]) == {9}


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_decoder_attends_to_itself_by_its_own_lengths(layout) -> None:
    """It took those of ``encoder_output``, which hid its own tokens, or raised where they were packed."""
    kinds = {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}
    sizes = (HEADS * SIZE, 64, HEADS)
    lone = TransformerLayer(*sizes, layer_type="decoder", attn_input_format="bshd").eval()
    layer = TransformerLayer(*sizes, layer_type="decoder", attn_input_format=layout, **kinds).eval()
    layer.load_state_dict(lone.state_dict())
    inputs, encoded = ([torch.randn(length, HEADS * SIZE) for length in lengths] for lengths in (LENGTHS, (7, 2)))
    ends = {"cu_seqlens_q": torch.tensor([0, 5, 8]), "cu_seqlens_kv": torch.tensor([0, 7, 9])}
    joined = torch.cat if layout == "thd" else partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    output = layer(joined(inputs), encoder_output=joined(encoded), **ends)
    found = output.split(LENGTHS) if layout == "thd" else (output[0], output[1, :3])
    for one, x, other in zip(found, inputs, encoded, strict=True):
        assert torch.allclose(one, lone(x[None], encoder_output=other[None])[0], atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"layer_type": "decoder", "layer_number": 1}], ids=["layers", "decoder"])
def test_attentions_that_would_share_a_cache_are_refused(arguments) -> None:
    """Without a layer_number, or with cross-attention, they read each other's keys."""
    layers = [TransformerLayer(32, 64, HEADS, attn_input_format="bshd", **arguments).eval() for _ in range(2)]
    cache, x = InferenceParams(2, 8, qkv_format="bshd"), torch.randn(2, 3, 32)
    cache.pre_step(OrderedDict({0: 3, 1: 3}))
    others = {"encoder_output": torch.randn(2, 5, 32)} if arguments else {}
    with pytest.raises(ValueError, match="holds 3 tokens of sequence 0, where pre_step was told of 0"):
        for layer in layers:
            x = layer(x, inference_params=cache, **others)


def test_a_cache_keeps_the_tokens_that_the_step_was_told_of() -> None:
    """Padding of a shorter sequence is neither kept nor read, whether ``cu_seqlens_q`` repeats the lengths or not."""
    attend, (query, key, value) = make(attn_mask_type="padding_causal", layer_number=1), qkv(3)
    for ends in (None, torch.tensor([0, 3, 5])):
        cache = InferenceParams(2, 32)
        cache.pre_step(OrderedDict({0: 3, 1: 2}))
        found = attend(query, key, value, inference_params=cache, cu_seqlens_q=ends)
        assert [len(kept) for kept, _ in cache.cache[1].values()] == [3, 2] and not found[1, 2].any()
    cache.pre_step(OrderedDict({0: 3, 1: 2}))
    with pytest.raises(ValueError, match=r"cu_seqlens_q has sequences of \[3, 3\] tokens, where .* told of \[3, 2\]"):
        attend(query, key, value, inference_params=cache, cu_seqlens_q=torch.tensor([0, 3, 6]))
    for told in ({0: 3}, {0: 3, 1: 4}):
        cache.pre_step(OrderedDict(told))
        with pytest.raises(ValueError, match=r"of 2 sequences of 3 tokens, and pre_step was told of"):
            attend(query, key, value, inference_params=cache)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_heads_kv": HEADS}, "num_heads_kv=4, got keys and values of num_heads_kv=2"),
        ({"head_dim_k": 4}, "head_dim_k=4, got keys and values of head_dim_k=8"),
        ({"head_dim_k": SIZE, "head_dim_v": 4}, "head_dim_v=4, got keys and values of head_dim_v=8"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16, got keys and values of dtype=torch.float32"),
        ({"num_heads_kv": "two"}, "num_heads_kv must be an integer of at least 1, got 'two'"),
        ({"dtype": "bf16"}, "dtype must be a torch.dtype or None, got 'bf16'"),
        ({"qkv_format": "bhsd"}, "qkv_format must be one of"),
    ],
)
def test_a_cache_takes_the_keys_and_values_that_it_was_made_for(arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        cache = InferenceParams(2, 16, **arguments)
        cache.pre_step(OrderedDict({0: 6, 1: 6}))
        make()(*qkv(), inference_params=cache)


def test_a_cache_that_is_told_what_comes_takes_it() -> None:
    told = InferenceParams(2, 16, num_heads_kv=GROUPS, head_dim_k=SIZE, dtype=torch.float32)
    found = []
    for cache in (told, InferenceParams(2, 16)):
        cache.pre_step(OrderedDict({0: 6, 1: 6}))
        found.append(make()(*qkv(), inference_params=cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["causal", "no_mask"])
def test_a_mask_that_is_not_read_is_said_to_be_so(kind) -> None:
    attend, mask = make(attn_mask_type=kind), torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    with pytest.warns(UserWarning, match=f"attention_mask is not read under attn_mask_type='{kind}'"):
        found = attend(*qkv(), attention_mask=mask)
    assert torch.equal(found, attend(*qkv()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": [0, 4, 14]}, r"cu_seqlens_q=\[0, 4, 14\] must be sequences .* within 10 tokens"),
        ({"cu_seqlens_kv": [0, 8, 4]}, r"cu_seqlens_kv=\[0, 8, 4\] must be sequences one after the other"),
        ({"cu_seqlens_kv": [0, 10]}, r"cu_seqlens_kv must be a tensor of integers \[3\], got torch.int64 \[2\]"),
        ({"cu_seqlens_q": [0.0, 10.0]}, r"cu_seqlens_q must be a tensor of integers \[batch \+ 1\], got .*float32"),
        ({"cu_seqlens_q_padded": [0]}, r"cu_seqlens_q_padded must be a tensor of integers \[3\], got .* \[1\]"),
        ({"cu_seqlens_kv_padded": [0, 3, 10]}, r"and cu_seqlens_kv_padded=\[0, 3, 10\] must be sequences"),
        ({"qkv_format": "bshd"}, r"laid out by qkv_format='bshd'"),
    ],
)
def test_packed_sequences_lie_within_their_tokens(arguments, message) -> None:
    query, key, value = (t[0] for t in qkv(10))
    given = {"qkv_format": "thd", "cu_seqlens_q": [0, 4, 10], "cu_seqlens_kv": [0, 4, 10], **arguments}
    tensors = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        make(attn_mask_type="padding_causal")(query, key, value, **tensors)


def test_rotary_embedding_of_padded_sequences_begins_where_they_do() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(32, HEADS, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0)
    ends, padded = torch.tensor([0, 4, 10]).int(), torch.tensor([0, 6, 14]).int()
    x, angles = torch.randn(14, 32), RotaryPositionEmbedding(8)(16)
    rows = torch.tensor([*range(4), *range(6, 12)])
    expected = module(x[rows], rotary_pos_emb=angles, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    found = module(
        x, rotary_pos_emb=angles, cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, pad_between_seqs=True,
    )  # fmt: skip
    assert torch.allclose(found[rows], expected, atol=1e-6)


def test_packed_inputs_go_through_a_module() -> None:
    torch.manual_seed(0)
    packed = MultiheadAttention(32, HEADS, num_gqa_groups=GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    plain = MultiheadAttention(32, HEADS, num_gqa_groups=GROUPS, qkv_format="bshd")
    plain.load_state_dict(packed.state_dict())
    x, ends = torch.randn(8, 32), torch.tensor([0, 5, 8], dtype=torch.int32)
    packed.eval(), plain.eval()
    found = packed(x, cu_seqlens_q=ends)
    expected = torch.cat([plain(part[None])[0] for part in x.split(LENGTHS)])
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: DotProductAttention(HEADS, SIZE, softmax_type="learnable"), "softmax_type"),
        (lambda: DotProductAttention(HEADS, SIZE, cp_group=object()), "cp_group"),
        (lambda: DotProductAttention(HEADS, SIZE, tp_size=2), "tp_size=2"),
        (lambda: make()(*qkv(), score_mod=lambda score: score), "score_mod"),
        (lambda: make()(*qkv(), score_mod_bprop=lambda score: score), "score_mod_bprop"),
        (lambda: make()(*qkv(), score_mod_tensors={}), "score_mod_tensors"),
        (
            lambda: make(attn_mask_type="padding")(
                *(t[0] for t in qkv()), qkv_format="thd", inference_params=InferenceParams(2, 16)
            ),
            "inference_params with qkv_format='thd'",
        ),
        (
            lambda: TransformerLayer(32, 64, HEADS, attn_input_format="thd", drop_path_rate=0.1),
            "drop_path_rate=0.1.* attn_input_format='thd'",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(ask, said) -> None:
    with pytest.raises(NotImplementedError, match=said):
        ask()


@pytest.mark.parametrize(
    ("kind", "given", "window", "warns"),
    [
        ("causal", None, (-1, 0), False),
        ("padding,causal", (-1, 0), (-1, 0), False),
        ("causal_bottom_right", (3, 0), (3, 0), False),
        ("no_mask", None, (-1, -1), False),
        ("arbitrary", (2, 3), (2, 3), False),
        ("causal", (3, 2), (3, 0), True),
        ("causal", (-1, -1), (-1, 0), True),
        ("padding", (-1, 0), (-1, -1), True),
    ],
)
def test_windows_are_fitted_to_their_masks(kind, given, window, warns, recwarn) -> None:
    assert check_set_window_size(kind, given) == window
    assert ["window_size" in str(warning.message) for warning in recwarn] == [True] * warns


@pytest.mark.parametrize(
    ("kind", "given"), [("causal", (-2, 0)), ("causal", (-1, 5)), ("no_mask", (3, -1)), ("all", None)]
)
def test_windows_that_suit_no_mask(kind, given) -> None:
    with pytest.raises(ValueError, match="attn_mask_type"):
        check_set_window_size(kind, given)


@pytest.mark.parametrize("window", [3, (1,), "ab", (1.5, 0), (1, 2, 3), 0, False, (), numpy.array([2, 0])])
def test_windows_that_are_no_pair_of_integers_are_refused(window) -> None:
    with pytest.raises(ValueError, match=r"window_size must be .*integer"):
        make(window_size=window)
    with pytest.raises(ValueError, match=r"window_size must be .*integer"):
        make()(*qkv(), window_size=window)


def test_a_causal_window_under_no_mask_is_no_window() -> None:
    query, key, value = qkv()
    attend = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="bshd", attn_mask_type="no_mask")
    with pytest.warns(UserWarning, match="window_size"):
        windowed = attend(query, key, value, window_size=(-1, 0))
    assert torch.equal(windowed, attend(query, key, value))


def test_where_padded_sequences_begin() -> None:
    mask = torch.zeros(3, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = True
    assert get_cu_seqlens(mask).tolist() == [0, 8, 13, 21] and get_cu_seqlens(mask).dtype is torch.int32
    assert get_full_cu_seqlens(3, 8).tolist() == [0, 8, 16, 24]


def test_one_rank_is_told_of_itself() -> None:
    for module in (make(), MultiheadAttention(32, 2), TransformerLayer(32, 64, 2)):
        module.set_tensor_parallel_group(None)
        module.set_context_parallel_group(None, None, None)
        with pytest.raises(NotImplementedError, match="cp_group"):
            module.set_context_parallel_group(object(), [0, 1], None)


@pytest.mark.parametrize("kind", ["padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("arguments", [{}, {"core_attention_bias_type": "alibi"}], ids=["plain", "alibi"])
def test_padded_queries_and_keys_of_other_lengths_are_as_each_sequence_alone(kind, arguments) -> None:
    queries, keys = (2, 4), (5, 4)
    query, key, value = qkv(4, keys=5)
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
    padded = make(attn_mask_type=kind)(query, key, value, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], **arguments)
    alone = make(attn_mask_type=kind.replace("padding_", ""))
    for i, (rows, cols) in enumerate(zip(queries, keys, strict=True)):
        expected = alone(query[i : i + 1, :rows], key[i : i + 1, :cols], value[i : i + 1, :cols], **arguments)
        assert torch.allclose(padded[i : i + 1, :rows], expected, atol=1e-6)


def test_slopes_begin_where_the_mask_does() -> None:
    query, key, value = qkv(6, keys=3)
    distance = (torch.arange(3) - torch.arange(6)[:, None]).abs()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])
    alibi = make(attn_mask_type="causal")(query, key, value, core_attention_bias_type="alibi")
    expected = by_hand(query, key, value, CAUSAL[:, :3], -slopes[:, None, None] * distance)
    assert torch.allclose(alibi, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("padding", {}, "a 'padding' mask needs attention_mask"),
        ("padding_causal", {}, "a 'padding_causal' mask needs attention_mask"),
        ("no_mask", {"core_attention_bias": torch.zeros(1, 1, 6, 6)}, "got a tensor with 'no_bias'"),
        ("no_mask", {"core_attention_bias_type": "post_scale_bias"}, "got None with 'post_scale_bias'"),
        (
            "no_mask",
            {"core_attention_bias_type": "alibi", "core_attention_bias": torch.zeros(1, 1, 6, 6)},
            "got a tensor with 'alibi'",
        ),
        ("no_mask", {"alibi_slopes": torch.ones(HEADS)}, "alibi_slopes goes with .*'alibi' and .* got 'no_bias'"),
        (
            "no_mask",
            {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)},
            r"alibi_slopes must be a tensor \[4\] or \[batch, 4\], got \[3\]",
        ),
        ("padding", {"cu_seqlens_q": torch.tensor([0, 4])}, r"cu_seqlens_q must be a tensor of integers \[3\]"),
        ("no_mask", {"attn_mask_type": 3}, "attn_mask_type must be one of .* got 3"),
        ("no_mask", {"inference_params": 3}, "inference_params must be an InferenceParams or None, got 3"),
        (
            "padding",
            {"attention_mask": torch.zeros(2, 1, 1, 6, dtype=torch.bool), "inference_params": InferenceParams(2, 16)},
            "attention_mask is not read beside inference_params; pass the lengths as cu_seqlens_q",
        ),
    ],
)
def test_masks_and_biases_go_with_their_words(kind, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(attn_mask_type=kind)(*qkv(), **arguments)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((8, 2, 4, 16), (4, 2, 2, 16), (8, 2, 2, 16)),
        ((8, 2, 4, 16), (8, 2, 4, 16), (8, 2, 2, 16)),
        ((8, 2, 2, 16), (8, 2, 2, 16), (8, 2, 2, 16)),
        ((8, 2, 4, 8), (8, 2, 2, 8), (8, 2, 2, 16)),
        ((8, 2, 4, 16), (8, 1, 2, 16), (8, 1, 2, 16)),
    ],
)
def test_keys_and_values_must_be_as_many(query, key, value) -> None:
    attend = DotProductAttention(4, 16, num_gqa_groups=2)
    with pytest.raises(ValueError, match=r"query_layer must end in \[4, 16\], key_layer and value_layer in \[2, 16\]"):
        attend(torch.ones(query), torch.ones(key), torch.ones(value))
    for name in ("attention_type", "attn_mask_type"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            DotProductAttention(4, 16, **{name: "x"})


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("axes", [2, 4])
def test_an_input_has_three_axes(layout, axes) -> None:
    module = MultiheadAttention(32, 4, qkv_format=layout)
    with pytest.raises(ValueError, match=f"and features, got {axes} axes"):
        module(torch.ones(*[2] * (axes - 1), 32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_positions": torch.tensor([-1])}, r"start_positions must be at least 0, got \[-1\]"),
        ({"cp_size": 2, "cp_rank": 5}, "cp_rank must be an integer from 0 to 1, got 5"),
        ({"cp_size": 0}, "cp_size must be an integer of at least 1, got 0"),
        ({"start_positions": torch.tensor([1, 2])}, r"start_positions must be a tensor \[1\], got tensor\(\[1, 2\]\)"),
        ({"start_positions": [1]}, r"start_positions must be a tensor \[1\], got \[1\]"),
    ],
)
def test_places_that_no_angle_has_are_refused(arguments, message) -> None:
    angles = RotaryPositionEmbedding(8)(16)
    with pytest.raises(ValueError, match=message):
        apply_rotary_pos_emb(torch.ones(4, 1, 2, 8), angles, **arguments)
    with pytest.raises(ValueError, match=r"cu_seqlens must be of 9 tokens on each of cp_size=1 ranks, got \[4, 4\]"):
        apply_rotary_pos_emb(torch.ones(9, 2, 8), angles, "thd", cu_seqlens=torch.tensor([0, 4, 8]))
