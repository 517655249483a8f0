"""Attention by TransformerEngine's names, over PyTorch's ``scaled_dot_product_attention``.

Legend: B batch, S query length, T key length, H query heads, G key-value groups, D head size, N tokens in all.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from fp4engine import modules
from fp4engine.functional.attention import AttentionMask, rotate
from fp4engine.modules.attention import L2Normalization
from fp4engine.modules.gemms import cast_by_autocast
from fp4engine.modules.te_arguments import te_device
from fp4engine.recipe.base import require
from fp4engine.te.pytorch.module import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, require_one_rank

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "L2Normalization",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]

FORMATS = ("sbhd", "bshd", "thd")
Window = tuple[int, int] | None
Masked = Tensor | tuple[Tensor, Tensor] | None


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of the rotary position embedding: ``(position + offset) / rotary_base^(2 i / dim)``, each twice.

    Args:
        dim: R, which ``rotary_percent`` makes smaller.
        seq_len_interpolation_factor, pretrained_max_position_embeddings: with both, positions are divided by the
            factor, or, for sequences longer than that makes room for, by as much as fits them in.
        interleaved: pairs are neighbours instead of the two halves of R.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=te_device(None)) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles [max_seq_len, 1, 1, R], FP32 whatever ``torch.autocast`` says."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        angles = positions[:, None] * self.inv_freq
        twice = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return twice[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first R of D components of ``t`` [S, B, H, D], [B, S, H, D] or [N, H, D].

    Args:
        freqs: angles [S or more, 1, 1, R].
        start_positions: [B], the position of each sequence's first token; None is zero.
        fused: without effect on the numbers.
        cu_seqlens: [B + 1], where sequences begin and end in ``"thd"``.
        cp_size, cp_rank: rank ``cp_rank`` of ``cp_size`` has the sequences' parts ``cp_rank`` and, from behind, again.

    Raises:
        ValueError: another format, ``"thd"`` without ``cu_seqlens``, or too few angles.
    """
    require("tensor_format", tensor_format, FORMATS)

    def turned(x: Tensor, start: int) -> Tensor:  # x [S, H, D]
        length, here = x.shape[0], freqs[start:]
        if length * cp_size > here.shape[0]:
            raise ValueError(f"freqs must have {start + length * cp_size} positions, got {freqs.shape[0]}")
        if cp_size > 1:
            half, end = length // 2, length * cp_size
            front = here[cp_rank * half : (cp_rank + 1) * half]
            here = torch.cat((front, here[end - (cp_rank + 1) * half : end - cp_rank * half]))
        return rotate(x.transpose(0, 1)[None], here, interleaved)[0].transpose(0, 1)

    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens must not be None when tensor_format is 'thd'")
        lengths = (cu_seqlens // cp_size).diff().tolist()
        starts = [0] * len(lengths) if start_positions is None else start_positions.tolist()
        parts = t.split(lengths)
        return torch.cat([turned(part, start) for part, start in zip(parts, starts, strict=True)])
    if start_positions is None and cp_size == 1:
        order = (0, 2, 1, 3) if tensor_format == "bshd" else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if tensor_format == "bshd" else (2, 0, 1, 3)
        return rotate(t.permute(order), freqs, interleaved).permute(back)
    axis = 0 if tensor_format == "bshd" else 1
    starts = [0] * t.shape[axis] if start_positions is None else start_positions.tolist()
    parts = t.unbind(axis)
    return torch.stack([turned(part, start) for part, start in zip(parts, starts, strict=True)], dim=axis)


class InferenceParams:
    """Keys and values of the sequences that are being generated.

    Args:
        max_batch_size, max_sequence_length: what may not be exceeded.
        num_heads_kv, head_dim_k, head_dim_v, dtype, max_ctx_len: told by the first keys and values that come.
        is_paged, total_num_pages, page_size: how memory is handed out; here, as much as a sequence needs.
        qkv_format: layout of what comes.

    Raises:
        NotImplementedError: a cache manager of one's own.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        if custom_cache_manager is not None:
            raise NotImplementedError("InferenceParams(custom_cache_manager=) is not implemented; leave it out")
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v or head_dim_k
        self.dtype, self.is_paged, self.page_size = dtype, is_paged, page_size
        self.total_num_pages, self.max_ctx_len = total_num_pages, max_ctx_len
        self.input_qkv_format = qkv_format
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()
        self.cache: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}

    def allocate_memory(self, layer_number: Any) -> None:
        """Make room for a layer; :meth:`step` does it too."""
        self.cache.setdefault(layer_number, {})

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> None:
        """Say which sequences go on, with how many tokens each; others are forgotten.

        Raises:
            ValueError: more sequences, or longer ones, than there may be.
        """
        if len(step_dict) > self.max_batch_size:
            raise ValueError(f"max_batch_size={self.max_batch_size} sequences may go on, got {len(step_dict)}")
        before = {name: self.sequences.get(name, 0) for name in step_dict}
        after = {name: before[name] + count for name, count in step_dict.items()}
        if max(after.values(), default=0) > self.max_sequence_length:
            raise ValueError(f"max_sequence_length={self.max_sequence_length}, got {dict(after)}")
        self.sequences_pre_step, self.sequences = OrderedDict(before), OrderedDict(after)
        for layer in self.cache.values():
            for name in set(layer) - set(step_dict):
                del layer[name]

    def get_seqlens_pre_step(self) -> Tensor:
        """[B] lengths before this step."""
        return torch.tensor(list(self.sequences_pre_step.values()), dtype=torch.int32, device=te_device(None))

    def step(self, layer_number: Any, new_k: list[Tensor], new_v: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """All keys and values [T, G, D] of each sequence, with the new ones at their end."""
        layer = self.cache.setdefault(layer_number, {})
        whole: list[tuple[Tensor, Tensor]] = []
        for name, key, value in zip(self.sequences, new_k, new_v, strict=True):
            old = layer.get(name)
            if old is not None:
                key, value = torch.cat((old[0], key)), torch.cat((old[1], value))
            layer[name] = key, value
            whole.append((key, value))
        return whole


class DotProductAttention(torch.nn.Module):
    """``softmax(q k^T * softmax_scale + bias) v``; no parameters.

    Args:
        num_attention_heads, num_gqa_groups: H and G.
        kv_channels: D, or a pair for keys and values.
        attention_dropout: of the probabilities, while training.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"`` (sequences one after the other, told apart by ``cu_seqlens``).
        attn_mask_type, window_size, bottom_right_diagonal: see
            :class:`~fp4engine.functional.attention.AttentionMask`; each also an argument of the forward.
        softmax_scale: None is 1 / sqrt(D).
        layer_number, attention_type, name, get_rng_state_tracker: without effect.
        sequence_parallel, tp_size, tp_group, cp_stream, cp_comm_type: without effect on one rank; more raise.

    Raises:
        NotImplementedError: context parallelism, another softmax, or the maximum of the scores.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        require_one_rank("DotProductAttention", tp_size=tp_size, tp_group=tp_group)
        _refuse(cp_group=(cp_group, None), softmax_type=(softmax_type, "vanilla"), max_logit=(return_max_logit, False))
        require("qkv_format", qkv_format, FORMATS)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={groups}")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        self.qkv_format, self.attention_dropout = qkv_format, attention_dropout
        self.attn_mask_type, self.window_size = _plain_kind(attn_mask_type), window_size
        self.bottom_right_diagonal, self.softmax_scale = bottom_right_diagonal, softmax_scale
        self.attention_type, self.layer_number = attention_type, 1 if layer_number is None else layer_number

    def set_context_parallel_group(self, cp_group: Any, *_: Any, **__: Any) -> None:
        """Accept no group.

        Raises:
            NotImplementedError: a group.
        """
        _refuse(cp_group=(cp_group, None))

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Masked = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        """Attend: [S, B, H, D] -> [S, B, H D], [B, S, H, D] -> [B, S, H D], or [N, H, D] -> [N, H D].

        Args:
            attention_mask: bool, True where NOT to attend; [B, 1, 1, T], or a pair for queries and keys, under padding
                kinds; broadcastable to [B, H, S, T] under ``"arbitrary"``.
            cu_seqlens_q, cu_seqlens_kv: int [B + 1], where sequences begin and end; in formats with a batch, their
                lengths, in place of a padding mask.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: where they begin if there is padding between them.
            core_attention_bias_type: ``"no_bias"``, ``"post_scale_bias"`` of ``core_attention_bias``, or ``"alibi"``
                with ``alibi_slopes`` [H] or [B, H] or the published ones.
            max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, num_splits: without effect.

        Raises:
            NotImplementedError: a quantized output, packed inputs, or a function of the scores.
        """
        _refuse(fp8_output=(fp8_output, False), score_mod=(score_mod, None), qkv_layer=(qkv_layer, None))
        _refuse(kv_layer=(kv_layer, None))
        layout = qkv_format or self.qkv_format
        require("qkv_format", layout, FORMATS)
        kind = self.attn_mask_type if attn_mask_type is None else _plain_kind(attn_mask_type)
        window = window_size or self.window_size
        if window is not None and "causal" in kind:
            window = window[0], 0
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        slopes = None
        if core_attention_bias_type == "alibi":
            slopes = alibi_slopes if alibi_slopes is not None else _slopes(self.num_attention_heads, query_layer.device)
        else:
            require("core_attention_bias_type", core_attention_bias_type, ("no_bias", "post_scale_bias"))
        call = _Call(self, kind, window, diagonal, core_attention_bias, slopes)
        if inference_params is not None:
            lengths = [query_layer.shape[0 if layout == "sbhd" else 1]] * query_layer.shape[layout.index("b")]
            starts = None
            if cu_seqlens_q is not None:
                lengths = cu_seqlens_q.diff().tolist()[: len(inference_params.sequences)]
            tensors = [_sequences(t, layout, lengths, starts) for t in (query_layer, key_layer, value_layer)]
            whole = inference_params.step(self.layer_number, tensors[1], tensors[2])
            if "bottom_right" not in call.kind:  # new tokens come after those that are there
                call.kind = call.kind.replace("causal", "causal_bottom_right")
            parts = [call.one(q, k, v) for q, (k, v) in zip(tensors[0], whole, strict=True)]
            return _put_back(parts, query_layer, layout, starts)
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
            starts_q = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).tolist()
            starts_kv = (cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded).tolist()
            queries = _sequences(query_layer, layout, cu_seqlens_q.diff().tolist(), starts_q)
            keys, values = (
                _sequences(t, layout, cu_seqlens_kv.diff().tolist(), starts_kv) for t in (key_layer, value_layer)
            )
            parts = [call.one(*qkv) for qkv in zip(queries, keys, values, strict=True)]
            return _put_back(parts, query_layer, layout, starts_q)
        order = (0, 2, 1, 3) if layout == "bshd" else (1, 2, 0, 3)
        query, key, value = (t.permute(order) for t in (query_layer, key_layer, value_layer))
        if "padding" in kind and attention_mask is None and cu_seqlens_q is not None:
            counts = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
            masks = [
                _past(lengths.diff(), size)
                for lengths, size in ((cu_seqlens_q, query.shape[2]), (counts, key.shape[2]))
            ]
            attention_mask = masks[0], masks[1]
        if checkpoint_core_attention:
            context = torch.utils.checkpoint.checkpoint(call, query, key, value, attention_mask, use_reentrant=False)
        else:
            context = call(query, key, value, attention_mask)
        return context.permute(0, 2, 1, 3).flatten(2) if layout == "bshd" else context.permute(2, 0, 1, 3).flatten(2)


class _Call:
    """One attention, with everything settled but the tensors."""

    def __init__(
        self, module: DotProductAttention, kind: str, window: Window, diagonal: bool | None, bias: Any, slopes: Any
    ) -> None:
        self.kind, self.window, self.diagonal, self.bias, self.slopes = kind, window, diagonal, bias, slopes
        self.dropout = module.attention_dropout if module.training else 0.0
        self.scale = module.softmax_scale

    def one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention [S, H, D] of one sequence, of which everything counts."""
        kind = self.kind.replace("padding_", "").replace("padding", "no_mask")
        alone = _Call.__new__(_Call)
        vars(alone).update(vars(self), kind=kind)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        context = alone(query, key, value, None)
        return context[0].transpose(0, 1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Masked) -> Tensor:
        """[B, H, S, D] by keys and values [B, G, T, D]; a query that may read nothing gives zeros."""
        mask = AttentionMask(self.kind, self.window, self.diagonal)
        pair = attention_mask if isinstance(attention_mask, tuple) else (None, attention_mask)
        arguments: dict[str, Any] = {"dropout_p": self.dropout, "scale": self.scale}
        arguments["enable_gqa"] = query.shape[1] != key.shape[1]
        if mask == AttentionMask("causal") and self.bias is None and self.slopes is None:
            return F.scaled_dot_product_attention(query, key, value, None, is_causal=True, **arguments)
        if mask.reads_mask and pair[1] is None:
            mask = AttentionMask(
                self.kind.replace("padding_", "").replace("padding", "no_mask"), self.window, self.diagonal
            )
        allowed = mask.allowed(pair[1], query.shape[2], key.shape[2], query.device)
        bias = self._scores(query, key)
        if bias is not None:
            allowed = bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))
        context = F.scaled_dot_product_attention(query, key, value, allowed, **arguments)
        if pair[0] is not None and "padding" in self.kind:
            context = context.masked_fill(pair[0].transpose(2, 3), 0.0)
        return context

    def _scores(self, query: Tensor, key: Tensor) -> Tensor | None:
        """What is added to the scaled scores, broadcastable to [B, H, S, T]."""
        bias = None if self.bias is None else self.bias.to(query.dtype)
        if self.slopes is not None:
            rows, cols = query.shape[2], key.shape[2]
            device = query.device
            distance = torch.arange(cols, device=device) - torch.arange(rows, device=device)[:, None] - (cols - rows)
            slopes = self.slopes if self.slopes.ndim == 2 else self.slopes[None]
            alibi = -(slopes.float()[:, :, None, None] * distance.abs()).to(query.dtype)
            bias = alibi if bias is None else bias + alibi
        return bias


def _refuse(**arguments: tuple[Any, Any]) -> None:
    for name, (value, neutral) in arguments.items():
        if value is not None and value is not neutral and value != neutral:
            raise NotImplementedError(f"attention with {name}={value!r} is not implemented; leave it at {neutral!r}")


def _plain_kind(kind: str) -> str:
    """TransformerEngine accepts the words of a mask in any order, joined by commas too."""
    words = set(kind.replace(",", "_").split("_"))
    if words in ({"padding", "causal"}, {"padding", "causal", "bottom", "right"}):
        return "padding_causal_bottom_right" if "bottom" in words else "padding_causal"
    return kind


def _slopes(heads: int, device: torch.device) -> Tensor:
    """The slopes of the ALiBi paper: a geometric sequence, and every second of the next one for the rest."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(first + rest, dtype=torch.float32, device=device)


def _past(lengths: Tensor, size: int) -> Tensor:
    """[B, 1, 1, size], True past each length."""
    return (torch.arange(size, device=lengths.device) >= lengths[:, None])[:, None, None, :]


def _sequences(t: Tensor, layout: str, lengths: list[int], starts: list[int] | None) -> list[Tensor]:
    """The sequences [length, H, D] of ``t``."""
    if layout == "thd":
        assert starts is not None
        return [t[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    batch = t.unbind(0 if layout == "bshd" else 1)
    return [sequence[:length] for sequence, length in zip(batch, lengths, strict=False)]


def _put_back(parts: list[Tensor], like: Tensor, layout: str, starts: list[int] | None) -> Tensor:
    """``parts`` [length, H, D] where :func:`_sequences` took them from ``like``, zeros elsewhere, heads joined."""
    if layout == "thd":
        assert starts is not None
        pieces: list[Tensor] = []
        end = 0
        for part, start in zip(parts, starts, strict=False):
            pieces += [part.new_zeros(start - end, *part.shape[1:]), part]
            end = start + part.shape[0]
        pieces.append(parts[0].new_zeros(like.shape[0] - end, *parts[0].shape[1:]))
        return torch.cat(pieces).flatten(1)
    axis = 0 if layout == "bshd" else 1
    size = like.shape[1 - axis]
    padded = [F.pad(part, (0, 0, 0, 0, 0, size - part.shape[0])) for part in parts]
    return torch.stack(padded, dim=axis).flatten(2)


_CALLED = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "key_value": "linear_kv",
}
"""Part of attention -> what TransformerEngine tells recipes that it is called."""


class MultiheadAttention(modules.MultiheadAttention):
    """:class:`fp4engine.MultiheadAttention` with all positional arguments and formats of TransformerEngine's.

    Args:
        qkv_format: also ``"thd"``: inputs [N, hidden_size].
        get_rng_state_tracker, set_parallel_mode, sequence_parallel, tp_group, tp_size, ub_overlap_ag, ub_overlap_rs,
        ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: without effect on one rank; more raise.
    """

    linear_class = Linear
    layernorm_linear_class = LayerNormLinear
    projection_class = Linear
    norm_classes = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}  # noqa: RUF012 - as in the base class

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        recipe: Any = None,
    ) -> None:
        require_one_rank("MultiheadAttention", tp_size=tp_size, tp_group=tp_group)
        require("qkv_format", qkv_format, FORMATS)
        kind = _plain_kind(attn_mask_type)
        super().__init__(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            attn_mask_type=kind,
            bottom_right_diagonal=bottom_right_diagonal,
            num_gqa_groups=num_gqa_groups,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            params_dtype=params_dtype,
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            input_layernorm=input_layernorm,
            attention_type=attention_type,
            fuse_qkv_params=fuse_qkv_params,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            bias=bias,
            normalization=normalization,
            device=device,
            qkv_format="sbhd" if qkv_format == "thd" else qkv_format,
            name=name,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            softmax_type=softmax_type,
            recipe=recipe,
        )
        for part, called in _CALLED.items():
            if name and hasattr(self, part):
                getattr(self, part).name = f"{name}.{called}"
        self.layout = qkv_format
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_size,
            self.num_gqa_groups,
            attention_dropout,
            qkv_format,
            kind,
            window_size,
            bottom_right_diagonal,
            layer_number=layer_number,
            attention_type=attention_type,
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: Masked = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attend from ``hidden_states``, laid out by ``qkv_format``; arguments as in :class:`DotProductAttention`.

        Returns:
            The shape of ``hidden_states``, or a tuple ``(y[, bias][, normalised input])``.
        """
        is_packed = self.layout == "thd"
        inp = cast_by_autocast(hidden_states)
        other = None if encoder_output is None else cast_by_autocast(encoder_output)
        if is_packed:
            inp, other = inp[:, None], None if other is None else other[:, None]
        query, key, value, normalized = self._project(inp, other, is_first_microbatch)
        back = (0, 2, 1, 3) if self.layout == "bshd" else (2, 0, 1, 3)
        query, key, value = (t.permute(back) for t in (query, key, value))
        if is_packed:
            query, key, value = (t[:, 0] for t in (query, key, value))
        if self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        if rotary_pos_emb is not None:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            starts = None if inference_params is None else inference_params.get_seqlens_pre_step()
            lengths = cu_seqlens_q, cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
            query, key = (
                apply_rotary_pos_emb(t, angles, self.layout, starts, self.rotary_pos_interleaved, cu_seqlens=ends)
                for t, angles, ends in zip((query, key), pair, lengths, strict=True)
            )
        if not self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_q_padded if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
        )
        bias = None if self.return_bias else self.proj.bias
        output = self.proj.multiply(context, self.proj.weight, bias, is_first_microbatch)
        extra = [self.proj.bias] if self.return_bias else []
        extra += [normalized] if normalized is not None else []
        return (output, *extra) if extra else output


class TransformerLayer(modules.TransformerLayer):
    """:class:`fp4engine.TransformerLayer` with all positional arguments of TransformerEngine's.

    Args:
        get_rng_state_tracker, set_parallel_mode, sequence_parallel, tp_group, tp_size and ``ub_`` flags: without effect
            on one rank; more raise.
    """

    attention_class = MultiheadAttention
    mlp_class = LayerNormMLP
    norm_classes = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}  # noqa: RUF012 - as in the base class

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Window = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        recipe: Any = None,
    ) -> None:
        require_one_rank("TransformerLayer", tp_size=tp_size, tp_group=tp_group)
        _refuse(softmax_type=(softmax_type, "vanilla"))
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            num_attention_heads,
            num_gqa_groups,
            layernorm_epsilon,
            hidden_dropout,
            attention_dropout,
            init_method,
            output_layer_init_method,
            kv_channels=kv_channels,
            self_attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            enc_dec_attn_mask_type=enc_dec_attn_mask_type,
            enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            enc_dec_window_size=enc_dec_window_size,
            params_dtype=params_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
            output_layernorm=output_layernorm,
            parallel_attention_mlp=parallel_attention_mlp,
            layer_type=layer_type,
            drop_path_rate=drop_path_rate,
            fuse_qkv_params=fuse_qkv_params,
            rotary_pos_interleaved=rotary_pos_interleaved,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            bias=bias,
            activation=activation,
            activation_params=activation_params,
            normalization=normalization,
            device=device,
            attn_input_format=attn_input_format,
            name=name,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            recipe=recipe,
        )
        self.layer_number = 1 if layer_number is None else layer_number
        for attention in (self.self_attention, self.inter_attention):
            if attention is not None:
                attention.core_attention.layer_number = self.layer_number

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: Masked = None,
        self_attn_mask_type: str | None = None,
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Masked = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """The layer's output, in the dtype of ``torch.autocast`` where that is on; arguments as in attention."""
        return super().forward(
            cast_by_autocast(hidden_states),
            attention_mask,
            self_attn_mask_type,
            window_size,
            bottom_right_diagonal,
            encoder_output,
            enc_dec_attn_mask,
            enc_dec_attn_mask_type,
            enc_dec_window_size,
            enc_dec_bottom_right_diagonal,
            is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )
