"""What the tensors of a model are called in its checkpoints, and which parts of them these hold; files beside them."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4engine.modules import QuantizedWeight
from fp4engine.quantizers.base import FLOATS

VOCABULARY = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "source.spm", "target.spm",
    "tekken.json", "bpe.codes", "byte_maps.json", "emoji.json", "entity_vocab.json", "normalizer.json",
    "prophetnet.tokenizer", "vocab-src.json", "vocab-tgt.json", "word_pronunciation.json", "word_shape.json",
)  # fmt: skip
"""Files that tokenizers of transformers 5.23 are made from; some of them need no other."""

TOKENIZER = (
    *VOCABULARY, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that a tokenizer may consist of."""


@dataclass(frozen=True)
class Piece:
    """What a tensor of a checkpoint is in the model.

    Attributes:
        name: in checkpoints.
        source: name of the model's tensor that it is, or is a part of.
        shape: of the tensor in checkpoints.
        expert: index in the first dimension of a source of three dimensions; None: there is none, or all.
        rows: first row, and the one past the last; None: all.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def module(self) -> str:
        """Dotted name of the module that servers give the tensor to."""
        return self.name.rpartition(".")[0]

    @property
    def operand(self) -> tuple[str, int | None]:
        """Equal for all pieces of one matrix that the model multiplies by."""
        return self.source, self.expert

    def of(self, source: Tensor) -> Tensor:
        """This part of the model's tensor, a view; of codes, where ``source`` is stored as such."""
        stored = isinstance(source, QuantizedWeight)
        part = source
        if self.expert is not None:
            part = source.matrices()[self.expert] if stored else source[self.expert]
        if self.rows is None:
            return part
        return part.rows(slice(*self.rows)) if isinstance(part, QuantizedWeight) else part[slice(*self.rows)]


def require_like(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise a ValueError unless ``value``, from a checkpoint, can be the model's tensor of that shape and dtype."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name!r} has shape {tuple(value.shape)} in weights and {shape} in the model")
    if value.dtype != dtype and not (value.dtype in FLOATS and dtype in FLOATS):
        raise ValueError(
            f"{name!r} is {value.dtype} in weights and {dtype} in the model; weights must not be quantized"
        )


def checkpoint_pieces(model: nn.Module, state: Mapping[str, Tensor]) -> Iterable[Piece]:
    """Every tensor that checkpoints of ``model`` have."""
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    written = _as_written(model, empty)
    kept = [name for name, tensor in state.items() if name in written and written[name].shape == tensor.shape]
    parts: dict[str, list[Piece]] = {name: [Piece(name, name, tuple(state[name].shape))] for name in kept}
    for piece in _parts(model, {name: state[name] for name in state if name not in parts}, written):
        parts.setdefault(piece.source, []).append(piece)
    return [
        piece
        for name in state
        for piece in sorted(parts.get(name, ()), key=lambda piece: (piece.expert or 0, piece.rows or (0, 0)))
    ]


def _as_written(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers writes for ``state``, as ``save_pretrained`` does; other models' names and tensors are kept."""
    if "transformers" not in sys.modules:
        return state
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state) if isinstance(model, PreTrainedModel) else state


def _parts(model: nn.Module, state: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> Iterable[Piece]:
    """The pieces of tensors that have other names in checkpoints, found by writing the numbers of their rows.

    Raises:
        NotImplementedError: a tensor is written in another way than as rows that follow each other.
    """
    if not state:
        return
    numbers: dict[str, Tensor] = {}
    starts: list[int] = []
    total = 0
    for name, tensor in state.items():
        outer = tensor.shape[: 2 if tensor.ndim > 2 else 1]
        ends = (1,) * (tensor.ndim - len(outer))
        numbers[name] = torch.arange(total, total + outer.numel(), dtype=torch.int32).view(*outer, *ends)
        starts.append(total)
        total += outer.numel()
    try:
        renumbered = _as_written(model, numbers)
    except (RuntimeError, ValueError, LookupError) as error:
        raise _other_layout(model, ", ".join(list(state)[:3]), "written by columns") from error
    sources = list(state)
    for name, rows in renumbered.items():
        found = rows.flatten()
        start, count = int(found[0]), found.numel()
        index = bisect_right(starts, start) - 1
        shape = tuple(state[sources[index]].shape)
        piece = _piece(name, sources[index], shape, start - starts[index], count)
        in_order = torch.equal(found, torch.arange(start, start + count, dtype=torch.int32))
        if piece is None or not in_order or tuple(written[name].shape) != piece.shape:
            raise _other_layout(model, sources[index], f"written as {name!r}")
        yield piece


def _other_layout(model: nn.Module, source: str, how: str) -> NotImplementedError:
    return NotImplementedError(
        f"{source!r} of this {type(model).__name__} is {how} in checkpoints, in another way than as rows that follow "
        "each other, which export does not implement"
    )


def _piece(name: str, source: str, shape: tuple[int, ...], first: int, count: int) -> Piece | None:
    """``count`` rows from number ``first`` of ``source``; None if others follow, or they are of a few experts only."""
    rows = torch.Size(shape[: 2 if len(shape) > 2 else 1]).numel()
    if first + count > rows:
        return None
    if count == rows:
        return Piece(name, source, shape)
    if len(shape) < 3:
        return Piece(name, source, (count, *shape[1:]), None, (first, first + count))
    expert, first = divmod(first, shape[1])
    if first + count > shape[1]:
        return None
    return Piece(name, source, (count, *shape[2:]), expert, None if count == shape[1] else (first, first + count))
