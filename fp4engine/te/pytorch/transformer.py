"""A layer of a transformer with TransformerEngine's arguments."""

from typing import Any

from torch import Tensor

from fp4engine import modules
from fp4engine.arguments import require_integer
from fp4engine.modules.inputs import cast_by_autocast
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.arguments import Arguments, rest_of
from fp4engine.te.pytorch.attention import MultiheadAttention
from fp4engine.te.pytorch.dot_product_attention import OneContext
from fp4engine.te.pytorch.module import LayerNormMLP
from fp4engine.te.pytorch.norm import LayerNorm, RMSNorm

FORWARD = Arguments("""hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None,
    bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None,
    enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None,
    checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None, core_attention_bias_type="no_bias",
    core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None""")


class TransformerLayer(OneContext, modules.TransformerLayer):
    """:class:`fp4engine.TransformerLayer` with all positional arguments of TransformerEngine's.

    Args:
        get_rng_state_tracker, set_parallel_mode, sequence_parallel, tp_group, tp_size and ``ub_`` flags: without effect
            on one rank; more raise.
    """

    attention_class = MultiheadAttention
    mlp_class = LayerNormMLP
    norm_classes = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}  # noqa: RUF012 - as in the base class

    ARGUMENTS = """hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-5,
        hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, layer_number=None,
        kv_channels=None, self_attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
        enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None, tp_group=None,
        tp_size=1, params_dtype=None, get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None,
        micro_batch_size=None, sequence_parallel=False, apply_residual_connection_post_layernorm=False,
        output_layernorm=False, parallel_attention_mlp=False, layer_type="encoder", drop_path_rate=0.0,
        set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False, zero_centered_gamma=False,
        qkv_weight_interleaved=True, ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True,
        ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation="gelu",
        activation_params=None, normalization="LayerNorm", device=None, attn_input_format="sbhd", name=None,
        qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False, softmax_type="vanilla", *, recipe=None"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bound(args, kwargs)
        refuse("TransformerLayer", softmax_type=(given["softmax_type"], "vanilla"))
        if given["attn_input_format"] == "thd" and given["drop_path_rate"]:
            raise NotImplementedError(
                f"TransformerLayer(drop_path_rate={given['drop_path_rate']}) leaves out branches sample by sample, and "
                "attn_input_format='thd' has no axis of samples; use 'sbhd' or 'bshd'"
            )
        super().__init__(**rest_of(given))
        layer_number = given["layer_number"]
        self.layer_number = 1 if layer_number is None else require_integer("layer_number", layer_number, 1)
        for attention in (self.self_attention, self.inter_attention):
            if attention is not None:
                attention.core_attention.layer_number = self.layer_number

    @FORWARD.of
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The layer's output, of the shape of ``hidden_states``, in the dtype of ``torch.autocast`` where that is on.

        Arguments are TransformerEngine's, see :class:`MultiheadAttention`.
        """
        given = FORWARD.bind("TransformerLayer.forward", args, kwargs)
        hidden_states = cast_by_autocast(given.pop("hidden_states"))
        return super().forward(hidden_states, **given)
