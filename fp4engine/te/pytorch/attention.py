"""Multi-head attention with TransformerEngine's arguments."""

from typing import Any

from torch import Tensor

from fp4engine import modules
from fp4engine.arguments import require_one_of
from fp4engine.functional.attention import rotary_pair
from fp4engine.modules.attention import L2Normalization
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.arguments import Arguments, rest_of
from fp4engine.te.pytorch.constants import QKV_FORMATS
from fp4engine.te.pytorch.dot_product_attention import DotProductAttention, OneContext, plain_kind
from fp4engine.te.pytorch.inference import InferenceParams
from fp4engine.te.pytorch.module import LayerNormLinear, Linear
from fp4engine.te.pytorch.norm import LayerNorm, RMSNorm
from fp4engine.te.pytorch.rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "L2Normalization",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
]


_CALLED = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "key_value": "linear_kv",
}
"""Part of attention -> what TransformerEngine tells recipes that it is called."""


FORWARD = Arguments("""hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None,
    bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False, inference_params=None,
    rotary_pos_emb=None, core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
    cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
    max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None""")


class MultiheadAttention(OneContext, modules.MultiheadAttention):
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

    ARGUMENTS = """hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-5,
        init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type="causal", window_size=None,
        bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, fuse_wgrad_accumulation=False,
        get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, return_bias=False,
        return_layernorm_output=False, input_layernorm=False, attention_type="self", set_parallel_mode=False,
        fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, rotary_pos_interleaved=False,
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        bias=True, normalization="LayerNorm", device=None, qkv_format="sbhd", name=None, qk_norm_type=None,
        qk_norm_eps=1e-6, qk_norm_before_rope=False, seq_length=None, micro_batch_size=None, softmax_type="vanilla",
        *, recipe=None"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bound(args, kwargs)
        refuse("MultiheadAttention", softmax_type=(given["softmax_type"], "vanilla"))
        layout, name = given["qkv_format"], given["name"]
        require_one_of("qkv_format", layout, QKV_FORMATS)
        kind = given["attn_mask_type"] = plain_kind(given["attn_mask_type"])
        plain = {**given, "qkv_format": "sbhd" if layout == "thd" else layout}
        super().__init__(**rest_of(plain, "window_size"))
        for part, called in _CALLED.items():
            if name and hasattr(self, part):
                getattr(self, part).name = f"{name}.{called}"
        self.layout, self.proj.return_bias = layout, given["return_bias"]
        self.core_attention = DotProductAttention(
            self.num_attention_heads,
            self.head_size,
            self.num_gqa_groups,
            given["attention_dropout"],
            layout,
            kind,
            given["window_size"],
            given["bottom_right_diagonal"],
            layer_number=given["layer_number"],
            attention_type=given["attention_type"],
        )

    @FORWARD.of
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Attend from ``hidden_states``, laid out by ``qkv_format``; arguments as in :class:`DotProductAttention`.

        Returns:
            The shape of ``hidden_states``, or a tuple ``(y[, bias][, normalised input])``.
        """
        given = FORWARD.bind("MultiheadAttention.forward", args, kwargs)
        inp, other = given.pop("hidden_states"), given.pop("encoder_output")
        is_first_microbatch, angles = given.pop("is_first_microbatch"), given.pop("rotary_pos_emb")
        for ends in ("cu_seqlens_{}", "cu_seqlens_{}_padded"):
            if given[ends.format("kv")] is None:
                given[ends.format("kv")] = given[ends.format("q")]
        is_packed = self.layout == "thd"
        if is_packed:
            inp, other = inp[:, None], None if other is None else other[:, None]
        query, key, value, normalized = self._project(inp, other, is_first_microbatch)
        back = (0, 2, 1, 3) if self.layout == "bshd" else (2, 0, 1, 3)
        query, key, value = (t.permute(back) for t in (query, key, value))
        if is_packed:
            query, key, value = (t[:, 0] for t in (query, key, value))
        if self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        if angles is not None:
            query, key = self._turned(query, key, angles, given)
        if not self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        projected = self.proj(self.core_attention(query, key, value, **given), is_first_microbatch)
        if normalized is None:
            return projected
        return (*projected, normalized) if isinstance(projected, tuple) else (projected, normalized)

    def _turned(self, query: Tensor, key: Tensor, angles: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Query and key turned by ``angles``, or each by its own of a pair, by the arguments of the forward."""
        cache: InferenceParams | None = given["inference_params"]
        starts = None if cache is None else cache.get_seqlens_pre_step()
        is_padded = given["pad_between_seqs"] is not False and given["cu_seqlens_q_padded"] is not None
        ends = [given[f"cu_seqlens_{which}{'_padded' if is_padded else ''}"] for which in ("q", "kv")]
        turned = [
            apply_rotary_pos_emb(t, own, self.layout, starts, self.rotary_pos_interleaved, cu_seqlens=end)
            for t, own, end in zip((query, key), rotary_pair(angles), ends, strict=True)
        ]
        return turned[0], turned[1]
