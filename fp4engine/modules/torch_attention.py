"""``nn.MultiheadAttention`` whose projections follow the recipe in force.

Legend: B batch, L queries, S keys, E embedding, H heads.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.modules.borrowed import BorrowedLinear
from fp4engine.modules.recompute import computed


class TorchMultiheadAttention(torch.nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` in every respect, with products of its own for both projections.

    ``softmax(q k^T / sqrt(E / H) + mask) v`` between them stays in high precision.

    Attributes:
        in_proj_gemms: multiplies by ``in_proj_weight`` [3 E, E], at once where query, key and value are one tensor.
    """

    in_proj_gemms: BorrowedLinear

    @staticmethod
    def refusal(module: torch.nn.MultiheadAttention) -> str:
        """Why ``module`` cannot become a TorchMultiheadAttention; empty if it can."""
        if type(module) is not torch.nn.MultiheadAttention:
            return f"{type(module).__name__} may have a forward of its own"
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        if not module._qkv_same_embed_dim:
            return "its queries, keys and values differ in size (kdim, vdim)"
        if module._parameters.get("in_proj_weight") is None:
            return "its in_proj_weight is computed (pruned, normalized), not a parameter"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds a bias or zeros to its keys (add_bias_kv, add_zero_attn)"
        return ""

    @staticmethod
    def adopt(module: torch.nn.MultiheadAttention) -> None:
        """Turn ``module``, which :meth:`refusal` accepts, into a TorchMultiheadAttention, in place."""
        module.__class__ = TorchMultiheadAttention
        module.in_proj_gemms = BorrowedLinear(module, "in_proj_weight")
        # nn.TransformerEncoderLayer multiplies by its children's weights without calling them, unless one has a hook.
        vars(module)["_fast_path_hook"] = module.register_forward_pre_hook(_no_fast_path)

    def release(self) -> None:
        """Become an ``nn.MultiheadAttention`` again."""
        vars(self).pop("_fast_path_hook").remove()
        del self.in_proj_gemms
        self.__class__ = torch.nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``.

        Raises:
            ValueError: ``is_causal`` is given without ``attn_mask``, or inputs are nested or of shapes and dtypes that
                ``nn.MultiheadAttention`` refuses too.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, and needs it")
        if query.is_nested:
            raise ValueError(
                "a converted nn.MultiheadAttention takes no nested tensors: pass key_padding_mask; of an "
                "nn.TransformerEncoder, which makes them in evaluation, set use_nested_tensor = False"
            )
        if query.dim() not in (2, 3) or key.dim() != query.dim() or key.shape[:-1] != value.shape[:-1]:
            raise _unfit(query, key, value)
        batched, batch_first = query.dim() == 3, self.batch_first
        q, k, v = self._projected(query, key, value)  # [..., E] each, in the caller's layout
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if q.shape[0] != k.shape[0]:
            raise _unfit(query, key, value)
        padding = key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None]
        mask = self._mask(attn_mask, padding, q, k.shape[1])
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        mixed = mixed.transpose(1, 2).flatten(2)  # [B, L, E]
        if not batched:
            output = self.out_proj(mixed.squeeze(0))
            return output, None if weights is None else weights.squeeze(0)
        return self.out_proj(mixed if batch_first else mixed.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = computed(lambda: self.in_proj_weight)
        bias, width = self.in_proj_bias, self.embed_dim

        def part(inp: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
            """Projections ``first`` to ``last`` of ``inp``."""
            rows = slice(first * width, last * width)
            whole = (first, last) == (0, 3)
            output = self.in_proj_gemms(inp, weight if whole else weight[rows], None if bias is None else bias[rows])
            return output.chunk(last - first, dim=-1)

        if query is key and key is value:
            q, k, v = part(query, 0, 3)
        elif key is value:
            (q,), (k, v) = part(query, 0, 1), part(key, 1, 3)
        else:
            (q,), (k,), (v,) = part(query, 0, 1), part(key, 1, 2), part(value, 2, 3)
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """What is added to the scores [B, H, L, S], broadcastable; None for nothing."""
        (batch, queries), heads, mask = q.shape[:2], self.num_heads, None
        if attn_mask is not None:
            _require_mask("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
            mask = _additive(attn_mask, q.dtype)
            mask = mask.view(batch, heads, queries, keys) if mask.dim() == 3 else mask
        if padding is None:
            return mask
        _require_mask("key_padding_mask", padding, (batch, keys))
        padding = _additive(padding, q.dtype).view(batch, 1, 1, keys)
        return padding if mask is None else mask + padding


def _unfit(query: Tensor, key: Tensor, value: Tensor) -> ValueError:
    """What to raise for inputs that do not go together."""
    shapes = " and ".join(str(tuple(x.shape)) for x in (query, key, value))
    return ValueError(
        "query, key and value must be of one batch or all without one, and value as long as key, got shapes " + shapes
    )


def _require_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise a ValueError unless ``mask`` is boolean or floating point, and of one of ``shapes``."""
    if tuple(mask.shape) not in shapes or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"{name} must be boolean or floating point, of shape {' or '.join(map(str, shapes))}, "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a sum: ``-inf`` where it is True, else 0; any other mask in ``dtype``."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def _no_fast_path(module: torch.nn.Module, args: Any) -> None:
    """Do nothing: a child that has a hook is called by ``nn.TransformerEncoderLayer``, whatever the hook does."""
