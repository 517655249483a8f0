"""Multi-head attention with TransformerEngine's arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4engine import modules
from fp4engine.arguments import require_one_of
from fp4engine.modules.attention import L2Normalization
from fp4engine.modules.inputs import cast_by_autocast
from fp4engine.te.pytorch.base import require_one_rank
from fp4engine.te.pytorch.constants import QKV_FORMATS
from fp4engine.te.pytorch.dot_product_attention import DotProductAttention, Masked, OnOneRank, Window, plain_kind
from fp4engine.te.pytorch.inference import InferenceParams
from fp4engine.te.pytorch.module import LayerNormLinear, Linear
from fp4engine.te.pytorch.norm import LayerNorm, RMSNorm
from fp4engine.te.pytorch.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "L2Normalization",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]


_CALLED = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "key_value": "linear_kv",
}
"""Part of attention -> what TransformerEngine tells recipes that it is called."""


class MultiheadAttention(OnOneRank, modules.MultiheadAttention):
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
        require_one_of("qkv_format", qkv_format, QKV_FORMATS)
        kind = plain_kind(attn_mask_type)
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
        self.layout, self.proj.return_bias = qkv_format, return_bias
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
            of_query, of_key = cu_seqlens_q, cu_seqlens_kv
            if pad_between_seqs is not False and cu_seqlens_q_padded is not None:
                of_query, of_key = cu_seqlens_q_padded, cu_seqlens_kv_padded
            ends = of_query, of_query if of_key is None else of_key
            query, key = (
                apply_rotary_pos_emb(t, angles, self.layout, starts, self.rotary_pos_interleaved, cu_seqlens=end)
                for t, angles, end in zip((query, key), pair, ends, strict=True)
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
        projected = self.proj(context, is_first_microbatch)
        if normalized is None:
            return projected
        return (*projected, normalized) if isinstance(projected, tuple) else (projected, normalized)
