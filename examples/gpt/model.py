"""A byte-level GPT in plain PyTorch: RMSNorm, rotary positions, SwiGLU, scaled_dot_product_attention, nn.Linear.

Nothing here knows about FP4; `fp4engine.convert` swaps the linear layers afterwards.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte."""

HEAD_DIM = 64
INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, 256]."""

    def __init__(self, layers: int, width: int, sequence: int) -> None:
        super().__init__()
        heads = max(1, width // HEAD_DIM)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
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
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting tokens[:, 1:] from tokens[:, :-1]."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # under tensor parallelism, the heads of one rank
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, 8/3 as wide inside as outside, rounded up to a multiple of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // (3 * 64)) * 64
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


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
