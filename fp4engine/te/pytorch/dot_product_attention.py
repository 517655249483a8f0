"""Attention by TransformerEngine's names, over PyTorch's ``scaled_dot_product_attention``.

Legend: B batch, S query length, T key length, H query heads, G key-value groups, D head size, N tokens in all.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of, require_rate, shown
from fp4engine.functional.attention import MASK_TYPES, AttentionMask, attention, require_core_attention_bias
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.arguments import Arguments, Placed
from fp4engine.te.pytorch.constants import QKV_FORMATS, AttnTypes
from fp4engine.te.pytorch.extra_state import ExtraState
from fp4engine.te.pytorch.inference import InferenceParams

ABSENT = dict.fromkeys(
    ("backends", "context_parallel", "flex_attention", "softmax", "get_attention_backend"),
    "PyTorch's scaled_dot_product_attention is called, on one rank, and chooses its kernel; see DotProductAttention",
)
"""Names of TransformerEngine's that are not here, and why."""

Window = tuple[int, int] | None
Masked = Tensor | tuple[Tensor, Tensor] | None


class OneContext(Placed):
    """What attention modules have in common: no rank shares a sequence with another one."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Accept no group.

        Raises:
            NotImplementedError: a group.
        """
        refuse(type(self).__name__, cp_group=(cp_group, None))


FORWARD = Arguments("""query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
    cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
    attn_mask_type=None, window_size=None, bottom_right_diagonal=None, checkpoint_core_attention=False,
    core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
    inference_params=None, pad_between_seqs=None, fp8_output=False, bf16_backward=False, num_splits=1, score_mod=None,
    score_mod_bprop=None, score_mod_tensors=None, score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None,
    qkv_interleave_dim=-3""")
NOT_READ = "score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "qkv_layer", "kv_layer"
"""Arguments of a forward that are not implemented."""


class DotProductAttention(OneContext, ExtraState):
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

    __call__: Callable[..., Tensor]

    ARGUMENTS = """num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,
        get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bound(args, kwargs)
        super().__init__()
        refuse(
            "DotProductAttention",
            cp_group=(given["cp_group"], None),
            softmax_type=(given["softmax_type"], "vanilla"),
            return_max_logit=(given["return_max_logit"] or False, False),
        )
        self.qkv_format, self.attn_mask_type = given["qkv_format"], plain_kind(given["attn_mask_type"])
        self.attention_type, self.window_size = given["attention_type"], given["window_size"]
        require_one_of("qkv_format", self.qkv_format, QKV_FORMATS)
        require_one_of("attn_mask_type", self.attn_mask_type, MASK_TYPES)
        require_one_of("attention_type", self.attention_type, AttnTypes)
        _require_window(self.window_size)
        require_rate("attention_dropout", given["attention_dropout"])
        heads, groups, sizes = given["num_attention_heads"], given["num_gqa_groups"], given["kv_channels"]
        groups = heads if groups is None else groups
        if groups < 1 or heads % groups:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}")
        self.num_attention_heads, self.num_gqa_groups = heads, groups
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            sizes if isinstance(sizes, tuple) else (sizes, sizes)
        )
        self.attention_dropout, self.bottom_right_diagonal = given["attention_dropout"], given["bottom_right_diagonal"]
        self.softmax_scale, self.name = given["softmax_scale"], given["name"]
        layer_number = given["layer_number"]
        self.layer_number = 1 if layer_number is None else require_integer("layer_number", layer_number, 1)

    @FORWARD.of
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend: [S, B, H, D] -> [S, B, H D], [B, S, H, D] -> [B, S, H D], or [N, H, D] -> [N, H D].

        Args:
            attention_mask: bool, True where NOT to attend; [B, 1, 1, T], or a pair for queries and keys, under padding
                kinds; broadcastable to [B, H, S, T] under ``"arbitrary"``; not read under others, which warns.
            cu_seqlens_q, cu_seqlens_kv: int [B + 1], where sequences begin and end; in formats with a batch, their
                lengths, in place of a padding mask.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: where they begin if there is padding between them.
            core_attention_bias_type: ``"no_bias"``, ``"post_scale_bias"`` of ``core_attention_bias``, or ``"alibi"``
                with ``alibi_slopes`` [H] or [B, H] or the published ones.
            max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, num_splits: without effect.

        Raises:
            NotImplementedError: a quantized output, packed inputs, or a function of the scores.
        """
        given = FORWARD.bind("DotProductAttention.forward", args, kwargs)
        refuse(
            "DotProductAttention.forward",
            fp8_output=(given["fp8_output"] or False, False),
            **{name: (given[name], None) for name in NOT_READ},
        )
        tensors: tuple[Tensor, Tensor, Tensor] = given["query_layer"], given["key_layer"], given["value_layer"]
        layout = given["qkv_format"] or self.qkv_format
        require_one_of("qkv_format", layout, QKV_FORMATS)
        self._require_shapes(layout, *tensors)
        call, mask, cache = self._call_of(given), given["attention_mask"], given["inference_params"]
        ends_q, ends_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        call.mask.warn_if_unread(mask)
        if cache is not None:
            if not isinstance(cache, InferenceParams):
                raise ValueError(f"inference_params must be an InferenceParams or None, got {shown(cache)}")
            if mask is not None and "padding" in call.kind:
                raise ValueError("attention_mask is not read beside inference_params; pass the lengths as cu_seqlens_q")
            return self._with_cache(call, layout, tensors, cache, ends_q)
        if layout == "thd":
            padded = given["cu_seqlens_q_padded"], given["cu_seqlens_kv_padded"]
            return _packed(call, tensors, ends_q, ends_kv, *padded)
        order = (0, 2, 1, 3) if layout == "bshd" else (1, 2, 0, 3)
        query, key, value = (t.permute(order) for t in tensors)
        if "padding" in call.kind and mask is None and ends_q is not None:
            pairs = ("q", ends_q, query), ("kv", ends_q if ends_kv is None else ends_kv, key)
            for which, ends, t in pairs:
                _require_ends(which, ends, t.shape[0])
            past = [torch.arange(t.shape[2], device=ends.device) >= ends.diff()[:, None] for _, ends, t in pairs]
            mask = past[0][:, None, None, :], past[1][:, None, None, :]
        if given["checkpoint_core_attention"]:
            context = torch.utils.checkpoint.checkpoint(call, query, key, value, mask, use_reentrant=False)
        else:
            context = call(query, key, value, mask)
        return context.permute(0, 2, 1, 3).flatten(2) if layout == "bshd" else context.permute(2, 0, 1, 3).flatten(2)

    def _call_of(self, given: dict[str, Any]) -> "_Call":
        """What the arguments of a forward, and the module's own where they are None, say of masks, biases and slopes.

        Raises:
            ValueError: arguments that do not go together.
        """
        kind = self.attn_mask_type if given["attn_mask_type"] is None else plain_kind(given["attn_mask_type"])
        window = self.window_size if given["window_size"] is None else given["window_size"]
        window = None if window is None else check_set_window_size(kind, window)
        diagonal = given["bottom_right_diagonal"]
        diagonal = self.bottom_right_diagonal if diagonal is None else diagonal
        bias_type, bias, slopes = (
            given[name] for name in ("core_attention_bias_type", "core_attention_bias", "alibi_slopes")
        )
        heads: int = self.num_attention_heads
        if slopes is not None and bias_type != "alibi":
            raise ValueError(
                f"alibi_slopes goes with core_attention_bias_type='alibi' and with nothing else, got {bias_type!r}"
            )
        if bias_type != "alibi":
            require_one_of("core_attention_bias_type", bias_type, ("no_bias", "post_scale_bias"))
        elif slopes is None:
            slopes = _slopes(heads, given["query_layer"].device)
        shape = list(slopes.shape) if isinstance(slopes, Tensor) else []
        if slopes is not None and (len(shape) not in (1, 2) or shape[-1] != heads):
            got = shape or shown(slopes)
            raise ValueError(f"alibi_slopes must be a tensor [{heads}] or [batch, {heads}], got {got}")
        require_core_attention_bias(bias_type, bias)
        dropout = self.attention_dropout if self.training else 0.0
        return _Call(kind, window, diagonal, bias, slopes, dropout, self.softmax_scale)

    def _with_cache(
        self,
        call: "_Call",
        layout: str,
        tensors: tuple[Tensor, ...],
        inference_params: InferenceParams,
        cu_seqlens_q: Tensor | None,
    ) -> Tensor:
        """Attention of each sequence's new tokens to those in the cache and to themselves."""
        if layout == "thd":
            raise NotImplementedError("inference_params with qkv_format='thd' is not implemented; use 'bshd' or 'sbhd'")
        tensors = tensors if layout == "bshd" else tuple(t.transpose(0, 1) for t in tensors)
        batch, size = tensors[0].shape[:2]
        lengths = inference_params.lengths_of_step(batch, size)
        if cu_seqlens_q is not None and (given := cu_seqlens_q.diff().tolist()) != lengths:
            raise ValueError(f"cu_seqlens_q has sequences of {given} tokens, where pre_step was told of {lengths}")
        queries, new_keys, new_values = (
            [sequence[:length] for sequence, length in zip(t, lengths, strict=True)] for t in tensors
        )
        whole = inference_params.step(self.layer_number, new_keys, new_values)
        if "bottom_right" not in call.kind:  # new tokens come after those that are there
            call = call._replace(kind=call.kind.replace("causal", "causal_bottom_right"))
        parts = [
            call.of_sequence(index, len(queries), query, key, value)
            for index, (query, (key, value)) in enumerate(zip(queries, whole, strict=True))
        ]
        padded = [F.pad(part, (0, 0, 0, 0, 0, size - part.shape[0])) for part in parts]
        return torch.stack(padded, dim=layout.index("b")).flatten(2)

    def _require_shapes(self, layout: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Accept what can be attended to, with axes as ``layout`` and heads and head sizes as the module has them.

        Raises:
            ValueError: other shapes, which PyTorch may read past the end of.
        """
        of_keys = (self.num_gqa_groups, self.hidden_size_per_attention_head_k)
        of_values = (self.num_gqa_groups, self.hidden_size_per_attention_head_v)
        if (
            key.shape[:-1] != value.shape[:-1]
            or query.shape[-2:] != (self.num_attention_heads, of_keys[1])
            or key.shape[-2:] != of_keys
            or value.shape[-2:] != of_values
            or not query.ndim == key.ndim == len(layout)
            or (layout != "thd" and query.shape[layout.index("b")] != key.shape[layout.index("b")])
        ):
            raise ValueError(
                f"query_layer must end in [{self.num_attention_heads}, {of_keys[1]}], key_layer and value_layer in "
                f"{list(of_keys)} and {list(of_values)} behind the same axes, laid out by qkv_format={layout!r} with "
                f"one batch size; got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            )


class _Call(NamedTuple):
    """The arguments of one call of attention, without queries, keys, values and padding masks."""

    kind: str
    window: Window
    diagonal: bool | None
    bias: Tensor | None
    slopes: Tensor | None
    dropout: float
    scale: float | None

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(self.kind, self.window, self.diagonal)

    def of_sequence(self, index: int, count: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention [S, H, D] of one of ``count`` sequences without padding, by the slopes and the bias of its own.

        Raises:
            ValueError: there are neither as many as sequences, nor one for all; a bias is too short for the sequence.
        """
        own: dict[str, Any] = {"kind": self.kind.replace("padding_", "").replace("padding", "no_mask")}
        for name, given in (("slopes", self.slopes), ("bias", self.bias)):
            if given is None or (name == "slopes" and given.ndim == 1):
                continue
            if given.shape[0] not in (1, count):
                called = "alibi_slopes" if name == "slopes" else "core_attention_bias"
                raise ValueError(
                    f"{called} must have one entry, or one for each of {count} sequences, got {list(given.shape)}"
                )
            own[name] = given[index : index + 1] if given.shape[0] > 1 else given
        bias: Tensor | None = own.get("bias")
        if bias is not None:
            lengths = (query.shape[0], key.shape[0])
            if any(have < asked and have != 1 for have, asked in zip(bias.shape[-2:], lengths, strict=True)):
                raise ValueError(
                    f"core_attention_bias {list(bias.shape)} is too short for a sequence of {lengths[0]} queries "
                    f"and {lengths[1]} keys"
                )
            own["bias"] = bias[..., : lengths[0], : lengths[1]]
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        return self._replace(**own)(query, key, value, None)[0].transpose(0, 1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Masked) -> Tensor:
        """[B, H, S, D] by keys and values [B, G, T, D]; a query that may read nothing gives zeros."""
        padded, masked = attention_mask if isinstance(attention_mask, tuple) else (None, attention_mask)
        asked: dict[str, Any] = {"bias": self.bias, "slopes": self.slopes, "dropout": self.dropout, "scale": self.scale}
        context = attention(query, key, value, self.mask, masked, padded=padded, **asked)
        if padded is not None and "padding" in self.kind:
            context = context.masked_fill(padded.transpose(2, 3), 0.0)
        return context


def _packed(
    call: _Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
) -> Tensor:
    """Attention of sequences that are packed one after the other, each to itself: [N, H, D] -> [N, H D]."""
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
    query, key, value = tensors
    lengths_q, starts_q = _places("q", cu_seqlens_q, cu_seqlens_q_padded, query.shape[0])
    lengths_kv, starts_kv = _places("kv", cu_seqlens_kv, cu_seqlens_kv_padded, key.shape[0])
    _require_ends("kv", cu_seqlens_kv, len(lengths_q))
    pieces: list[Tensor] = []
    end = 0
    for index, (start, length) in enumerate(zip(starts_q, lengths_q, strict=False)):
        own = slice(starts_kv[index], starts_kv[index] + lengths_kv[index])
        part = call.of_sequence(index, len(lengths_q), query[start : start + length], key[own], value[own])
        pieces += [part.new_zeros(start - end, *part.shape[1:]), part]
        end = start + length
    pieces.append(pieces[-1].new_zeros(query.shape[0] - end, *pieces[-1].shape[1:]))
    return torch.cat(pieces).flatten(1)


def _require_ends(which: str, ends: Any, count: int | None = None) -> None:
    """Raise a ValueError unless ``ends``, the argument ``cu_seqlens_{which}``, are of ``count`` sequences, if told."""
    is_tensor = isinstance(ends, Tensor) and not ends.is_floating_point()
    if not is_tensor or ends.ndim != 1 or len(ends) != (max(len(ends), 1) if count is None else count + 1):
        got = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, Tensor) else shown(ends)
        size = "batch + 1" if count is None else count + 1
        raise ValueError(f"cu_seqlens_{which} must be a tensor of integers [{size}], got {got}")


def _places(which: str, ends: Tensor, padded: Tensor | None, rows: int) -> tuple[list[int], list[int]]:
    """How long the sequences of ``cu_seqlens_{which}`` are, and where they begin among ``rows`` tokens.

    Raises:
        ValueError: they are not one after the other, or not within these tokens.
    """
    _require_ends(which, ends)
    if padded is not None:
        _require_ends(f"{which}_padded", padded, len(ends) - 1)
    lengths, starts = ends.diff().tolist(), (ends if padded is None else padded).tolist()
    gaps = [after - start for start, after in pairwise(starts)]
    if starts[0] < 0 or starts[-1] > rows or any(not 0 <= n <= gap for n, gap in zip(lengths, gaps, strict=True)):
        of_padded = "" if padded is None else f" and cu_seqlens_{which}_padded={starts}"
        raise ValueError(
            f"cu_seqlens_{which}={ends.tolist()}{of_padded} must be sequences one after the other within {rows} tokens"
        )
    return lengths, starts


def plain_kind(kind: str) -> str:
    """A mask's name as here, from TransformerEngine's, whose words may be in any order and joined by commas."""
    if not isinstance(kind, str):
        return kind  # refused where a mask's name is asked for
    words = set(kind.replace(",", "_").split("_"))
    if words in ({"padding", "causal"}, {"padding", "causal", "bottom", "right"}):
        return "padding_causal_bottom_right" if "bottom" in words else "padding_causal"
    return kind


def check_set_window_size(attn_mask_type: str, window_size: Window = None) -> tuple[int, int]:
    """The window of a mask: None becomes all that the mask lets through, and a causal window ends at 0.

    Raises:
        ValueError: an unknown mask, or a window that does not suit it.
    """
    kind = plain_kind(attn_mask_type)
    require_one_of("attn_mask_type", kind, MASK_TYPES)
    is_causal = "causal" in kind
    if window_size is None:
        return -1, 0 if is_causal else -1
    _require_window(window_size)
    left, right = window_size
    if left < -1 or (left == -1 and right not in (-1, 0)) or (left >= 0 > right and not is_causal):
        raise ValueError(f"window_size={window_size} does not suit attn_mask_type={attn_mask_type!r}")
    fitting = (left, 0) if is_causal else (left, -1 if left == -1 else right)
    if fitting != (left, right):
        warnings.warn(f"window_size={window_size} is {fitting} under attn_mask_type={attn_mask_type!r}", stacklevel=2)
    return fitting


def _require_window(window_size: Any) -> None:
    """Raise a ValueError unless ``window_size`` is None or a pair of integers, which may not suit a mask."""
    if window_size is None:
        return
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise ValueError(f"window_size must be two integers (left, right) or None, got {shown(window_size)}")
    for size in window_size:
        require_integer("each of window_size", size)


def _slopes(heads: int, device: torch.device) -> Tensor:
    """The slopes of the ALiBi paper: a geometric sequence, and every second of the next one for the rest."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(first + rest, dtype=torch.float32, device=device)


def get_cu_seqlens(mask: Tensor) -> Tensor:
    """Where each sequence begins among the tokens of all, and where the last one ends: int32 [B + 1].

    Args:
        mask: [B, 1, 1, T], True where a place is padding.
    """
    lengths = mask.logical_not().flatten(1).sum(1)
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device | str | None = None) -> Tensor:
    """As :func:`get_cu_seqlens`, of sequences without padding."""
    return torch.arange(0, (batch_size + 1) * max_seqlen, max_seqlen, dtype=torch.int32, device=device)
