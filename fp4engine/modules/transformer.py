"""One layer of a transformer: attention and a feed-forward block, each behind a norm and a residual connection."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.arguments import require_bools, require_one_of, require_rate, shown
from fp4engine.modules.attention import MultiheadAttention
from fp4engine.modules.layernorm_mlp import LayerNormMLP
from fp4engine.modules.norm import LayerNorm, RMSNorm
from fp4engine.modules.te_arguments import refuse_unimplemented
from fp4engine.names import dotted
from fp4engine.recipe import Recipe


class TransformerLayer(torch.nn.Module):
    """``h = x + dropout(attention(norm(x)))``; ``y = h + dropout(mlp(norm(h)))``.

    Args:
        hidden_size, num_attention_heads, num_gqa_groups, attention_dropout: of :class:`MultiheadAttention`.
        ffn_hidden_size, activation, activation_params: of :class:`LayerNormMLP`.
        normalization, zero_centered_gamma: of all norms.
        init_method, output_layer_init_method: initialise what reads and what writes the residual; None draws from
            N(0, 0.023).
        bias, params_dtype, device, recipe, fuse_wgrad_accumulation: of all parts, as in :class:`LayerNormMLP`.
        name: recipes see the parts below it.
        layernorm_epsilon: eps of all norms.
        hidden_dropout: dropout of all branches; ``drop_path_rate`` leaves out those of self-attention and of the MLP
            whole, sample by sample.
        self_attn_mask_type, window_size, bottom_right_diagonal: mask of self-attention, also arguments of the
            forward; ``enc_dec_attn_mask_type``, ``enc_dec_window_size`` and ``enc_dec_bottom_right_diagonal`` are those
            of cross-attention.
        layer_type: ``"encoder"``, or ``"decoder"`` with cross-attention between self-attention and MLP.
        apply_residual_connection_post_layernorm: residuals start from the normalised input.
        output_layernorm: a norm at the end instead of one before self-attention.
        parallel_attention_mlp: both branches read x, and ``y = x + dropout(attention(x) + mlp(x))``.
        attn_input_format: ``"sbhd"`` or ``"bshd"``.
        ub_overlap_ag, ub_overlap_rs, ub_bulk_wgrad, ub_bulk_dgrad: without effect while
            ``ub_tp_comm_overlap`` is False, as it must be.
        arguments: as in :class:`MultiheadAttention` and :class:`LayerNormMLP`.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: arguments that contradict each other, such as cross-attention's of an encoder, or rates that are
            none.
    """

    __call__: Callable[..., Tensor]
    attention_class: ClassVar[type[Any]] = MultiheadAttention
    mlp_class: ClassVar[type[Any]] = LayerNormMLP
    norm_classes: ClassVar[dict[str, type[Any]]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    """What it is made of, for subclasses that are made of subclasses."""

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
        *,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_wgrad_accumulation: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        recipe: Recipe | None = None,
        **arguments: Any,
    ) -> None:
        attention = {key: arguments.pop(key) for key in _ATTENTION_ARGUMENTS if key in arguments}
        for key in _WITHOUT_EFFECT:
            arguments.pop(key, None)
        refuse_unimplemented("TransformerLayer", arguments)
        require_one_of("layer_type", layer_type, ("encoder", "decoder"))
        require_bools(
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
            output_layernorm=output_layernorm,
            parallel_attention_mlp=parallel_attention_mlp,
        )
        contradictions = (layer_type == "decoder", apply_residual_connection_post_layernorm, output_layernorm)
        if parallel_attention_mlp and any(contradictions):
            raise ValueError(
                "parallel_attention_mlp=True goes with layer_type='encoder' and without "
                "apply_residual_connection_post_layernorm and output_layernorm"
            )
        if layer_type == "encoder":
            _refuse_cross_attention(
                enc_dec_attn_mask_type=None if enc_dec_attn_mask_type == "no_mask" else enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        require_rate("hidden_dropout", hidden_dropout)
        require_rate("drop_path_rate", drop_path_rate)
        super().__init__()
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.batch_dim = 0 if attn_input_format == "bshd" else 1
        self.parallel_attention_mlp = parallel_attention_mlp
        common: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "normalization": normalization,
            "device": device,
            "recipe": recipe,
        }
        attention |= {
            "num_gqa_groups": num_gqa_groups,
            "layernorm_epsilon": layernorm_epsilon,
            "attention_dropout": attention_dropout,
            "qkv_format": attn_input_format,
            **common,
        }

        def attention_by(part: str, kind: str, window: Any, diagonal: bool | None, **own: Any) -> Any:
            mask = {"attn_mask_type": kind, "window_size": window, "bottom_right_diagonal": diagonal}
            own |= {"name": dotted(name, part), **mask, **attention}
            return self.attention_class(hidden_size, num_attention_heads, **own)

        mask = self_attn_mask_type, window_size, bottom_right_diagonal
        self.self_attention = attention_by("self_attention", *mask, input_layernorm=not output_layernorm)
        self.inter_attention = None
        if layer_type == "decoder":
            mask = enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal
            self.inter_attention = attention_by("inter_attention", *mask, input_layernorm=True, attention_type="cross")
        self.layernorm_mlp = self.mlp_class(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            name=dotted(name, "layernorm_mlp"),
            **common,
        )
        self.layernorm = None
        if output_layernorm:
            self.layernorm = self.norm_classes[normalization](
                hidden_size,
                layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
                dtype=params_dtype,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        **arguments: Any,
    ) -> Tensor:
        """[S, B, hidden_size], or [B, S, hidden_size] under ``"bshd"``, to the same shape.

        Args:
            hidden_states: x.
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self-attention, as in
                :meth:`MultiheadAttention.forward`; None is the constructor's.
            encoder_output: what the cross-attention of a decoder reads, laid out as ``hidden_states``.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of
                cross-attention.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`, of all parts.
            arguments: others of :meth:`MultiheadAttention.forward`, for self- and cross-attention alike; those of
                ``encoder_output`` (``cu_seqlens_kv``) for cross-attention alone.

        Raises:
            ValueError: ``encoder_output``, or what is of cross-attention, is given to an encoder.
        """
        if self.inter_attention is None:
            _refuse_cross_attention(
                encoder_output=encoder_output,
                enc_dec_attn_mask=enc_dec_attn_mask,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        of_self = {key: value for key, value in arguments.items() if self.inter_attention is None or "_kv" not in key}
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            is_first_microbatch=is_first_microbatch,
            **of_self,
        )
        if self.parallel_attention_mlp:
            return self._add(hidden_states, attended + self.layernorm_mlp(hidden_states, is_first_microbatch))
        hidden_states = self._add(hidden_states, attended)
        if self.inter_attention is not None:
            attended = self.inter_attention(
                hidden_states,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                is_first_microbatch=is_first_microbatch,
                **arguments,
            )
            hidden_states = self._add(hidden_states, attended, is_kept=True)
        output = self._add(hidden_states, self.layernorm_mlp(hidden_states, is_first_microbatch))
        return output if self.layernorm is None else self.layernorm(output)

    def _add(self, residual: Tensor, branch: Tensor | tuple[Tensor, Tensor], is_kept: bool = False) -> Tensor:
        """The branch, with dropout, on the residual or, if the branch returns it, on its normalised input."""
        if isinstance(branch, tuple):
            branch, residual = branch
        branch = F.dropout(branch, self.hidden_dropout, self.training)
        if self.drop_path_rate and self.training and not is_kept:
            shape = [1] * branch.ndim
            shape[self.batch_dim] = branch.shape[self.batch_dim]
            kept = torch.rand(shape, dtype=torch.float32, device=branch.device) >= self.drop_path_rate
            branch = branch * kept / (1 - self.drop_path_rate or 1)
        return residual + branch


def _refuse_cross_attention(**arguments: Any) -> None:
    """Raise a ValueError if one of ``arguments``, which an encoder has no use for, is given."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} goes with layer_type='decoder', this is 'encoder'; got {shown(value)}")


_ATTENTION_ARGUMENTS = (
    "kv_channels",
    "fuse_qkv_params",
    "rotary_pos_interleaved",
    "qkv_weight_interleaved",
    "qk_norm_type",
    "qk_norm_eps",
    "qk_norm_before_rope",
)
"""Arguments that go to the attention modules as they come."""

_WITHOUT_EFFECT = (
    "layer_number",
    "seq_length",
    "micro_batch_size",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
)
"""Hints, and switches of an overlap that ``ub_tp_comm_overlap=False`` switches off."""
