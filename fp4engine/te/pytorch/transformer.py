"""A layer of a transformer with TransformerEngine's arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4engine import modules
from fp4engine.modules.inputs import cast_by_autocast
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.attention import MultiheadAttention
from fp4engine.te.pytorch.base import require_one_rank
from fp4engine.te.pytorch.dot_product_attention import Masked, OnOneRank, Window
from fp4engine.te.pytorch.inference import InferenceParams
from fp4engine.te.pytorch.module import LayerNormMLP
from fp4engine.te.pytorch.norm import LayerNorm, RMSNorm


class TransformerLayer(OnOneRank, modules.TransformerLayer):
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
        refuse("TransformerLayer", softmax_type=(softmax_type, "vanilla"))
        if attn_input_format == "thd" and drop_path_rate:
            raise NotImplementedError(
                f"TransformerLayer(drop_path_rate={drop_path_rate}) leaves out branches sample by sample, and "
                "attn_input_format='thd' has no axis of samples; use 'sbhd' or 'bshd'"
            )
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
