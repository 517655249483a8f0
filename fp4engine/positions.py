"""How long a sequence a language model takes: the rows of its tables of positions."""

import math
from typing import Any

from torch import nn

TABLES = frozenset(("embed_positions", "pos_encoding", "position_embeddings", "positions_embed", "wpe"))
"""What models of transformers call their tables of positions, as modules or as buffers."""


def positions_of(model: nn.Module) -> float:
    """How many positions a model of transformers has rows for; infinity without tables, as with rotary positions.

    It has no more than its configuration says, since some tables have rows before the first position's. RoBERTa's rows
    up to that of its padding are among those that the configuration counts.
    """
    rows: list[int] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding):  # some are not for positions
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            rows.append(module.num_embeddings - before)
    rows += [len(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] in TABLES]
    if not rows:
        return math.inf
    config: Any = model.config
    said = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(*rows, said or math.inf)


def require_positions(name: str, sequence: int, positions: float) -> None:
    """Raise a ValueError unless a model with ``positions`` takes ``sequence`` tokens, as the argument ``name`` says."""
    if sequence > positions:
        raise ValueError(f"{name} must be at most {positions}, the model's positions, got {sequence}")
