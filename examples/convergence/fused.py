"""The GPT with what stands between its linear layers and its attention in four compiled functions.

None of them knows what a linear layer does, so they are compiled once for all recipes of a process. Where deterministic
algorithms are asked for, no measurement of speed chooses how the compiled ones add up, so bytes can be repeated.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.model import GPT, rotate


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x + change`, and its root-mean-square norm in the dtype of the products that read it."""
    x = x if change is None else x + change
    return x, F.rms_norm(x, weight.shape, weight).to(dtype)


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, length, 3 * width] to query and key, rotated by position, and value: [batch, heads, length, head_dim]."""
    query, key, value = qkv.unflatten(-1, (3, -1, head_dim)).permute(2, 0, 3, 1, 4)
    return rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous()  # a view's gradient is a sum of its own


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Pieces(NamedTuple):
    add_norm: Any
    split_heads: Any
    gated: Any
    cross_entropy: Any


@cache
def compiled() -> Pieces:
    functions = (add_norm, split_heads, gated, cross_entropy)
    return Pieces(*map(partial(torch.compile, fullgraph=True, dynamic=False), functions))


class FusedGPT(GPT):
    """The same parameters, the same names, the same function up to rounding."""

    def forward(self, tokens: Tensor) -> Tensor:
        pieces, x, change = compiled(), self.embedding(tokens), None
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            x, normed = pieces.add_norm(x, change, block.attention_norm.weight, dtype)
            heads = pieces.split_heads(attention.qkv(normed), self.cos, self.sin, attention.head_dim)
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x, normed = pieces.add_norm(
                x, attention.projection(mixed.transpose(1, 2).flatten(2)), block.mlp_norm.weight, dtype
            )
            change = mlp.down(pieces.gated(mlp.gate(normed), mlp.up(normed)))
        _, normed = pieces.add_norm(x, change, self.norm.weight, dtype)
        return self.lm_head(normed)

    def loss(self, tokens: Tensor) -> Tensor:
        return compiled().cross_entropy(self(tokens[:, :-1]), tokens[:, 1:])
