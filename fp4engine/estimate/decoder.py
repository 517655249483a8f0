"""A decoder-only transformer from a handful of numbers, to be traced and never to be trained."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4engine.arguments import require_bool, require_integer, require_path

LARGEST = 1 << 24
"""The most that a size may be."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder.

    Attributes:
        layers, width, heads, ffn, vocabulary: blocks, residual width, query heads, inner width of the MLP, tokens.
        kv_heads: key and value heads; None is as many as ``heads``.
        head_dim: None is ``width / heads``.
        gated: whether the MLP has a gate (SwiGLU: three matrices) or not (two).
        norm: ``"rmsnorm"`` or ``"layernorm"``.
        bias: whether the linear layers have one.
        qkv_bias, projection_bias: whether the layers of query, key and value, and the layer after attention, have a
            bias; None is as ``bias``.
        head_norm: whether each head of query and key goes through an RMSNorm, whose weight the heads share.
        tied: whether the head shares the embedding's weight.
        fused_qkv: whether query, key and value come from one matrix.
        positions: how many learned positions there are; 0 is rotary positions.

    Raises:
        ValueError: a size that is not positive, a flag that is no boolean, ``heads`` no multiple of ``kv_heads``, a
            ``width`` that ``heads`` do not divide where no ``head_dim`` is given, an odd head, which has no rotary
            positions, an unknown norm.
    """

    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    norm: str = "rmsnorm"
    bias: bool = False
    qkv_bias: bool | None = None
    tied: bool = False
    fused_qkv: bool = False
    positions: int = 0
    projection_bias: bool | None = None
    head_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("gated", "bias", "qkv_bias", "projection_bias", "tied", "fused_qkv", "head_norm"):
            value = getattr(self, name)
            if value is not None or name not in ("qkv_bias", "projection_bias"):
                require_bool(name, value)
        for name in ("layers", "width", "heads", "ffn", "vocabulary", "kv_heads", "head_dim", "positions"):
            value = getattr(self, name)
            if value is not None or name not in ("kv_heads", "head_dim"):
                least = 0 if name == "positions" else 1
                object.__setattr__(self, name, require_integer(name, value, least, LARGEST))
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}, or head_dim must be given")
        if (self.head_dim or self.width // self.heads) % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim or self.width // self.heads}")
        if self.norm not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm must be 'rmsnorm' or 'layernorm', got {self.norm!r}")

    def split(self, ways: int) -> "Architecture":
        """What one of ``ways`` tensor-parallel ranks computes.

        Raises:
            ValueError: heads, key-value heads, inner width or vocabulary do not divide.
        """
        kv_heads = self.kv_heads or self.heads
        parts = {"heads": self.heads, "kv_heads": kv_heads, "ffn": self.ffn, "vocabulary": self.vocabulary}
        for name, value in parts.items():
            if value % ways:
                raise ValueError(f"tp={ways} does not divide {name}={value}")
        head_dim = self.head_dim or self.width // self.heads
        return replace(self, **{name: value // ways for name, value in parts.items()}, head_dim=head_dim)


MODELS = {
    "Llama-3.2-1B": Architecture(16, 2048, 32, 8192, 128256, kv_heads=8, tied=True),
    "Llama-3-8B": Architecture(32, 4096, 32, 14336, 128256, kv_heads=8),
    "Llama-3-70B": Architecture(80, 8192, 64, 28672, 128256, kv_heads=8),
    "Llama-3.1-405B": Architecture(126, 16384, 128, 53248, 128256, kv_heads=8),
}
"""Models that need no config file, by name."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": False, "projection_bias": False},
    "mistral": {"kv_heads": 8},
    "qwen2": {"kv_heads": 32, "qkv_bias": True},
    "qwen3": {"kv_heads": 32, "head_dim": 128, "head_norm": True},
    "gpt2": {"gated": False, "norm": "layernorm", "bias": True, "tied": True, "fused_qkv": True},
}
"""``model_type`` of a Hugging Face config -> what the family does that its config does not say."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "tied": ("tie_word_embeddings",),
}
_POSITIONS = {"gpt2": ("n_positions", "max_position_embeddings")}
"""Family -> what its config calls the number of learned positions; others have none, whatever theirs calls so."""
_BIASES = {"qkv_bias": ("attention_bias",), "projection_bias": ("attention_bias",), "bias": ("mlp_bias",)}
_SAID_BIASES = {"llama": tuple(_BIASES), "qwen3": ("qkv_bias", "projection_bias")}
"""Family -> the biases that its config says; the layers of others have them or not."""


def read_config(config: str | Path) -> dict[str, Any]:
    """What a Hugging Face ``config.json`` holds, given as its path or its folder's.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    path = require_path("config", config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{config} must hold a JSON object, got {data!r:.80}")
    return data


def from_config(config: str | Path | dict[str, Any]) -> Architecture:
    """The sizes in a Hugging Face ``config.json`` of one of :data:`FAMILIES`, given as its path or parsed.

    Raises:
        ValueError: there is no such file, it is not a JSON object, it is of another family or has cross-attention, or a
            size is missing.
    """
    name, data = ("config", config) if isinstance(config, dict) else (str(config), read_config(config))
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type of {name} must be one of {', '.join(FAMILIES)}, got {family!r:.80}")
    if data.get("add_cross_attention"):
        raise ValueError(f"{name} asks for cross-attention (add_cross_attention), which a decoder by itself has not")
    sizes: dict[str, Any] = dict(FAMILIES[family])
    names = _NAMES | {field: _BIASES[field] for field in _SAID_BIASES.get(family, ())}
    if family in _POSITIONS:
        names["positions"] = _POSITIONS[family]
    for field, keys in names.items():
        found = [data[key] for key in keys if key in data]
        if found and (found[0] is not None or field in ("kv_heads", "head_dim")):
            sizes[field] = found[0]
    if family == "gpt2":
        sizes.setdefault("ffn", 4 * sizes.get("width", 0))
        sizes.setdefault("positions", 1024)
    missing = [f"{field} ({' or '.join(_NAMES[field])})" for field in _REQUIRED if field not in sizes]
    if missing:
        raise ValueError(f"{name} does not say {', '.join(missing)}")
    return Architecture(**sizes)


_REQUIRED = ("layers", "width", "heads", "ffn", "vocabulary")


class Decoder(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, sizes: Architecture, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.positions, sizes.width) if sizes.positions else None
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.lm_head.weight = self.embedding.weight
        self._wrap = wrap

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self._wrap(block)(x)
        return self.lm_head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting ``tokens[:, 1:]``."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(sizes), _norm(sizes)
        self.attention = Attention(sizes)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal attention, with rotary positions where none are learned."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads or sizes.heads
        self.head_dim = sizes.head_dim or sizes.width // sizes.heads
        self.is_rotary = not sizes.positions
        bias = sizes.bias if sizes.qkv_bias is None else sizes.qkv_bias
        widths = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        outputs = [sum(widths)] if sizes.fused_qkv else widths
        self.qkv = nn.ModuleList(nn.Linear(sizes.width, width, bias) for width in outputs)
        bias = sizes.bias if sizes.projection_bias is None else sizes.projection_bias
        self.projection = nn.Linear(widths[0], sizes.width, bias)
        norms = [nn.RMSNorm(self.head_dim) if sizes.head_norm else nn.Identity() for _ in range(2)]
        self.query_norm, self.key_norm = norms

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        made = torch.cat([linear(x) for linear in self.qkv], -1) if len(self.qkv) == 1 else None
        if made is not None:
            widths = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
            query, key, value = made.split(widths, -1)
        else:
            query, key, value = (linear(x) for linear in self.qkv)
        query, key, value = (t.unflatten(-1, (-1, self.head_dim)) for t in (query, key, value))
        query, key, value = (t.transpose(1, 2) for t in (self.query_norm(query), self.key_norm(key), value))
        if self.is_rotary:
            query, key = _rotate(query), _rotate(key)
        gqa = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))``."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.ffn, sizes.bias) if sizes.gated else None
        self.up = nn.Linear(sizes.width, sizes.ffn, sizes.bias)
        self.down = nn.Linear(sizes.ffn, sizes.width, sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoRA(nn.Module):
    """``base(x) + b(a(x))`` with a frozen base."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def add_lora(model: nn.Module, rank: int, dtype: torch.dtype) -> None:
    """Freeze ``model`` and put a :class:`LoRA` around each linear layer of its blocks, in place."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head" and not isinstance(parent, LoRA):
                setattr(parent, name, LoRA(child, rank, dtype))


def _norm(sizes: Architecture) -> nn.Module:
    return nn.RMSNorm(sizes.width) if sizes.norm == "rmsnorm" else nn.LayerNorm(sizes.width)


def _rotate(x: Tensor) -> Tensor:
    """What rotary positions read and write, with a table that is not kept."""
    first, second = x.chunk(2, dim=-1)
    cos = torch.ones((x.shape[-2], first.shape[-1]), dtype=x.dtype, device=x.device)
    return torch.cat((first * cos - second * cos, second * cos + first * cos), dim=-1)
