"""A byte-level GPT in plain PyTorch: RMSNorm, rotary positions, SwiGLU, scaled_dot_product_attention, nn.Linear.

Nothing here knows about FP4; `fp4engine.convert` swaps the linear layers afterwards. What stands between linear layers
and attention is four functions (:class:`Pieces`), which :func:`fused` compiles: once for all models of a process, since
none of them knows what a linear layer does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte."""

HEAD_DIM = 64
INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x + change`, and its root-mean-square norm in the dtype of the products that read it."""
    x = x if change is None else x + change
    return x, F.rms_norm(x, weight.shape, weight).to(dtype)


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, length, 3 * width] to query and key, rotated by position, and value: [batch, heads, length, -1]."""
    batch, length, width = qkv.shape
    query, key, value = qkv.view(batch, length, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    return rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous()  # a view would be added up by itself


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Pieces:
    """What a model computes between its linear layers and its attention."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, torch.dtype], tuple[Tensor, Tensor]] = add_norm
    split_heads: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]] = split_heads
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy


@cache
def fused() -> Pieces:
    """Every piece compiled, into kernels that no measurement of speed chose, so that bytes can be repeated."""
    torch._inductor.config.deterministic = True
    return Pieces(
        *map(partial(torch.compile, fullgraph=True, dynamic=False), (add_norm, split_heads, gated, cross_entropy))
    )


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, 256]."""

    def __init__(self, layers: int, width: int, sequence: int, pieces: Pieces | None = None) -> None:
        super().__init__()
        heads = max(1, width // HEAD_DIM)
        self.pieces = pieces or Pieces()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, self.pieces) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        cos, sin = rotary_table(sequence, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialize)
        for block in self.blocks:  # so that the residual stream keeps its size, however deep the model
            for projection in (block.attention.projection, block.mlp.down):
                nn.init.normal_(projection.weight, std=INITIAL_STD / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x, change = self.embedding(tokens), None
        for block in self.blocks:
            x, change = block(x, change, self.cos, self.sin)
        _, normed = self.pieces.add_norm(x, change, self.norm.weight, dtype_of_products(x))
        return self.lm_head(normed)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting tokens[:, 1:] from tokens[:, :-1]."""
        return self.pieces.cross_entropy(self(tokens[:, :-1]), tokens[:, 1:])


class Block(nn.Module):
    """The residual stream, and what is to be added to it, from one block to the next."""

    def __init__(self, width: int, heads: int, pieces: Pieces) -> None:
        super().__init__()
        self.pieces = pieces
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, pieces)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, pieces)

    def forward(self, x: Tensor, change: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        dtype = dtype_of_products(x)
        x, normed = self.pieces.add_norm(x, change, self.attention_norm.weight, dtype)
        x, normed = self.pieces.add_norm(x, self.attention(normed, cos, sin), self.mlp_norm.weight, dtype)
        return x, self.mlp(normed)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, pieces: Pieces) -> None:
        super().__init__()
        self.heads, self.pieces = heads, pieces
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.pieces.split_heads(self.qkv(x), cos, sin, self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, 8/3 as wide inside as outside, rounded up to a multiple of 64."""

    def __init__(self, width: int, pieces: Pieces) -> None:
        super().__init__()
        self.pieces = pieces
        hidden = -(-8 * width // (3 * 64)) * 64
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.pieces.gated(self.gate(x), self.up(x)))


def dtype_of_products(x: Tensor) -> torch.dtype:
    """In which linear layers multiply: autocast's where it is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2] of position times frequency."""
    frequency = ROTARY_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x [..., length, head_dim] against each other, in x's dtype."""
    length = x.shape[-2]
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:length].to(x.dtype), sin[:length].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_STD)
