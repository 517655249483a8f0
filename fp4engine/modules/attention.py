"""Multi-head attention: projections by the recipe in force, the softmax in high precision.

Legend: S query length, T key length, B batch, H query heads, G key-value groups, D head size.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from fp4engine.arguments import require_bool, require_bools, require_integer, require_one_of, require_rate
from fp4engine.functional.attention import AttentionMask, attention, require_core_attention_bias, rotary_pair, rotate
from fp4engine.modules.layernorm_linear import LayerNormLinear
from fp4engine.modules.linear import Linear
from fp4engine.modules.norm import LayerNorm, RMSNorm
from fp4engine.modules.split_linear import SplitLinear
from fp4engine.modules.te_arguments import FORWARD_NEUTRAL, initializer, refuse_unimplemented, te_device
from fp4engine.names import dotted
from fp4engine.recipe import Recipe


class L2Normalization(torch.nn.Module):
    """``y = x / sqrt(sum(x^2) + eps)`` over the last axis; no parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class MultiheadAttention(torch.nn.Module):
    """Self- or cross-attention over PyTorch's ``scaled_dot_product_attention``.

    Args:
        hidden_size: of inputs and outputs.
        num_attention_heads, num_gqa_groups, kv_channels: H, G (None: H) and D (None: hidden_size / H).
        attention_dropout: dropout of the attention probabilities while training.
        attn_mask_type, window_size, bottom_right_diagonal: see
            :class:`~fp4engine.functional.attention.AttentionMask`; each also an argument of the forward.
        input_layernorm, normalization, layernorm_epsilon, zero_centered_gamma: the norm before the projections.
        attention_type: ``"self"``, or ``"cross"`` for keys and values from ``encoder_output``.
        fuse_qkv_params: one parameter for all projections instead of one each.
        qkv_weight_interleaved: with it, whether the rows of the weight go head group by head group.
        qkv_format: ``"sbhd"`` for inputs [S, B, hidden_size], ``"bshd"`` for [B, S, hidden_size].
        qk_norm_type: ``"LayerNorm"``, ``"RMSNorm"`` or ``"L2Normalization"`` of queries and keys, with ``qk_norm_eps``,
            before or after the rotary embedding (``qk_norm_before_rope``).
        rotary_pos_interleaved: whether a rotary embedding turns neighbours, and not the two halves of a head.
        bias: whether the projections have biases; they start at zero.
        return_bias: leave the bias of the output projection out and return it.
        return_layernorm_output: also return the normalised input, as the last item of a tuple.
        init_method, output_layer_init_method: initialise the projections in and out; None draws from N(0, 0.023).
        params_dtype, device: of the parameters; ``device=None`` is the current CUDA device where there is one.
        name: recipes see the projections below it.
        recipe, fuse_wgrad_accumulation: as in :class:`~fp4engine.Linear`, of all projections.
        layer_number, seq_length, micro_batch_size: hints of TransformerEngine's that change nothing here.
        te_arguments: TransformerEngine's other arguments, at the values that ask for nothing.

    Raises:
        NotImplementedError: an argument of TransformerEngine's that is not implemented.
        ValueError: sizes that do not fit, unknown words, or flags that are no bools.
    """

    __call__: Callable[..., Tensor]  # for type checkers; a tuple of tensors where a return_ flag asks for one

    linear_class: ClassVar[type[Any]] = SplitLinear
    layernorm_linear_class: ClassVar[type[Any]] = LayerNormLinear
    projection_class: ClassVar[type[Any]] = Linear
    norm_classes: ClassVar[dict[str, type[Any]]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    """What it is made of, for subclasses that are made of subclasses."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        fuse_wgrad_accumulation: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        recipe: Recipe | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        layer_number: int | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **te_arguments: Any,
    ) -> None:
        refuse_unimplemented("MultiheadAttention", te_arguments)
        if qkv_format == "thd":
            raise NotImplementedError("MultiheadAttention(qkv_format='thd') is not implemented; use 'sbhd' or 'bshd'")
        require_one_of("qkv_format", qkv_format, ("sbhd", "bshd"))
        require_one_of("attention_type", attention_type, ("self", "cross"))
        require_bools(
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            input_layernorm=input_layernorm,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            qk_norm_before_rope=qk_norm_before_rope,
        )
        require_rate("attention_dropout", attention_dropout)
        hidden_size = require_integer("hidden_size", hidden_size, 0)
        num_attention_heads = require_integer("num_attention_heads", num_attention_heads, 1)
        groups = require_integer("num_gqa_groups", num_attention_heads if num_gqa_groups is None else num_gqa_groups, 1)
        kv_channels = None if kv_channels is None else require_integer("kv_channels", kv_channels, 1)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_attention_heads}, "
                "or kv_channels be given"
            )
        if num_attention_heads % groups:
            raise ValueError(f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={groups}")
        super().__init__()
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.head_size = kv_channels or hidden_size // num_attention_heads
        self.attention_dropout = attention_dropout
        self.mask = AttentionMask(attn_mask_type, window_size, bottom_right_diagonal)
        self.attention_type, self.qkv_format = attention_type, qkv_format
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.return_bias = return_bias
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        place: dict[str, Any] = {"device": te_device(device), "params_dtype": params_dtype}
        self.q_norm, self.k_norm = self._qk_norms(qk_norm_type, qk_norm_eps, place)
        common: dict[str, Any] = {"bias": bias, "recipe": recipe, **place}
        common["fuse_wgrad_accumulation"] = fuse_wgrad_accumulation

        norm: dict[str, Any] = {"eps": layernorm_epsilon, "normalization": normalization}
        norm |= {"zero_centered_gamma": zero_centered_gamma, "return_layernorm_output": return_layernorm_output}

        def projection(suffix: str, normalized: bool, **rows: int) -> SplitLinear:
            own: dict[str, Any] = {"init_method": init_method, "name": dotted(name, suffix)}
            own["parameters_split"] = None if fuse_qkv_params else rows
            if not normalized:
                return self.linear_class(hidden_size, sum(rows.values()), **own, **common)
            return self.layernorm_linear_class(hidden_size, sum(rows.values()), **norm, **own, **common)

        q, kv = self.head_size * num_attention_heads, self.head_size * groups
        if attention_type == "self":
            self._query_name = "layernorm_qkv" if input_layernorm else "qkv"
            linear = projection(self._query_name, input_layernorm, query=q, key=kv, value=kv)
            self.add_module(self._query_name, linear)
        elif input_layernorm:
            self._query_name = "layernorm_query"
            self.layernorm_query = projection("layernorm_query", True, query=q)
            self.key_value = projection("key_value", False, key=kv, value=kv)
        else:
            self._query_name, query_init = "query_layer", initializer("init_method", init_method)
            self.query_layer = self.projection_class(
                hidden_size, q, init_method=query_init, name=dotted(name, "query_layer"), **common
            )
            self.key_value = projection("key_value", False, key=kv, value=kv)
        kind, returned = (self.linear_class, {"return_bias": True}) if return_bias else (self.projection_class, {})
        init, name = initializer("output_layer_init_method", output_layer_init_method), dotted(name, "proj")
        self.proj = kind(q, hidden_size, init_method=init, name=name, **common, **returned)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        **te_arguments: Any,
    ) -> Any:
        """Attend from ``hidden_states``.

        Args:
            hidden_states: [S, B, hidden_size], or [B, S, hidden_size] under ``"bshd"``.
            attention_mask: bool, True where NOT to attend; read by padding masks ([B, 1, 1, T], or a pair whose
                first mask, [B, 1, 1, S], is about queries) and arbitrary ones (broadcastable to [B, H, S, T]).
            encoder_output: what cross-attention reads, laid out as ``hidden_states``.
            attn_mask_type, window_size, bottom_right_diagonal: of this call, in place of the constructor's.
            is_first_microbatch: as in :meth:`fp4engine.Linear.forward`, of all projections.
            checkpoint_core_attention: recompute scores and probabilities in backward.
            rotary_pos_emb: angles as :func:`~fp4engine.functional.attention.rotate` takes them, or a pair for queries
                and keys.
            core_attention_bias_type: ``"no_bias"`` or ``"post_scale_bias"``, which adds ``core_attention_bias``
                [1 or B, 1 or H, S, T] to the scaled scores.

        Returns:
            The shape of ``hidden_states``, or a tuple ``(y[, bias][, normalised input])``.

        Raises:
            NotImplementedError: an argument of TransformerEngine's that is not implemented.
            ValueError: a mask, a bias or an ``encoder_output`` that is missing, or not asked for.
        """
        refuse_unimplemented("MultiheadAttention.forward", te_arguments, FORWARD_NEUTRAL)
        if core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            raise NotImplementedError(f"core_attention_bias_type={core_attention_bias_type!r} is not implemented")
        require_core_attention_bias(core_attention_bias_type, core_attention_bias)
        require_bool("checkpoint_core_attention", checkpoint_core_attention)
        mask = AttentionMask(
            self.mask.kind if attn_mask_type is None else attn_mask_type,
            self.mask.window_size if window_size is None else window_size,
            self.mask.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        mask.warn_if_unread(attention_mask)
        query, key, value, normalized = self._project(hidden_states, encoder_output, is_first_microbatch)
        query, key = self._position(query, key, rotary_pos_emb)

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            padded, masked = attention_mask if isinstance(attention_mask, tuple) else (None, attention_mask)
            dropout = self.attention_dropout if self.training else 0.0
            return attention(query, key, value, mask, masked, padded=padded, bias=core_attention_bias, dropout=dropout)

        if checkpoint_core_attention:
            context = torch.utils.checkpoint.checkpoint(core, query, key, value, use_reentrant=False)
        else:
            context = core(query, key, value)
        context = context.transpose(1, 2) if self.qkv_format == "bshd" else context.permute(2, 0, 1, 3)
        context = context.flatten(-2)
        output = self.proj(context, is_first_microbatch)  # with its bias, if that is returned
        outputs = output if self.return_bias else (output,)
        outputs += () if normalized is None else (normalized,)
        return outputs if len(outputs) > 1 else output

    def _project(
        self, hidden_states: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, S, D], keys and values [B, G, T, D], and the normalised input if it is to be returned."""
        projected = getattr(self, self._query_name)(hidden_states, is_first_microbatch)
        normalized = None
        if isinstance(projected, tuple):
            projected, normalized = projected
        ratio = self.num_attention_heads // self.num_gqa_groups
        if self.attention_type == "self":
            if encoder_output is not None:
                raise ValueError(
                    f"encoder_output goes with attention_type='cross', this is 'self'; got {list(encoder_output.shape)}"
                )
            query, key, value = self._split(projected, (ratio, 1, 1))
        else:
            if encoder_output is None:
                raise ValueError("attention_type='cross' needs encoder_output, got None")
            (query,) = self._split(projected, (ratio,))
            key, value = self._split(self.key_value(encoder_output, is_first_microbatch), (1, 1))
            if len(key) != len(query):
                raise ValueError(
                    f"encoder_output must have a batch of {len(query)}, as hidden_states has, got {len(key)}"
                )
        return query, key, value, normalized

    def _split(self, projected: Tensor, heads_per_group: tuple[int, ...]) -> list[Tensor]:
        """[.., .., sum(heads_per_group) G D] -> tensors [B, heads G, length, D].

        Raises:
            ValueError: it has not three axes.
        """
        if projected.ndim != 3:
            axes = {"bshd": "batch, sequence", "sbhd": "sequence, batch"}[self.qkv_format]
            raise ValueError(f"an input of attention must have the axes {axes} and features, got {projected.ndim} axes")
        groups, size = self.num_gqa_groups, self.head_size
        leading = projected.shape[:2]
        if self.interleaved:
            parts = projected.view(*leading, groups, sum(heads_per_group), size).split(heads_per_group, dim=-2)
        else:
            parts = projected.split([heads * groups * size for heads in heads_per_group], dim=-1)
        order = (0, 2, 1, 3) if self.qkv_format == "bshd" else (1, 2, 0, 3)
        return [
            part.reshape(*leading, heads * groups, size).permute(order)
            for part, heads in zip(parts, heads_per_group, strict=True)
        ]

    def _position(
        self, query: Tensor, key: Tensor, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised and rotated, in the order that is configured."""
        if self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        if rotary_pos_emb is not None:
            of_query, of_key = rotary_pair(rotary_pos_emb)
            query = rotate(query, of_query, self.rotary_pos_interleaved)
            key = rotate(key, of_key, self.rotary_pos_interleaved)
        return (query, key) if self.qk_norm_before_rope else self._normalize(query, key)

    def _normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _qk_norms(
        self, kind: str | None, eps: float, place: dict[str, Any]
    ) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            norm = L2Normalization(eps)
            return norm, norm
        require_one_of("qk_norm_type", kind, (None, "L2Normalization", "RMSNorm", "LayerNorm"))
        make = self.norm_classes[kind]
        return make(self.head_size, eps, **place), make(self.head_size, eps, **place)
