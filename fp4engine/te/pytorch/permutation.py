"""Rows of tokens sorted by expert, and back.

Legend: T tokens, E experts, P rows after sorting, C hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from fp4engine.recipe.base import require

MAP_TYPES = ("mask", "index")


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Rows of ``inp`` [T, C] once for every expert that they go to, expert by expert.

    Args:
        routing_map: [T, E] of zeros and ones under ``"mask"``; [T, k] experts under ``"index"``.
        num_out_tokens: how many rows to keep, none or less for all.
        max_token_num: without effect.

    Returns:
        Rows [P, C], and the row map that :func:`moe_unpermute` takes: int [P], for each row the token that it is, or
        under ``"index"`` the place ``token * k + choice``.
    """
    require("map_type", map_type, MAP_TYPES)
    if routing_map.shape[0] != inp.shape[0]:
        raise ValueError(f"routing_map must have a row for each of {inp.shape[0]} tokens, got {routing_map.shape[0]}")
    if map_type == "index":
        choices = routing_map.shape[1] if routing_map.ndim > 1 else 1
        places = torch.argsort(routing_map.reshape(-1), stable=True)
        places = places[:num_out_tokens] if num_out_tokens > 0 else places
        return inp.index_select(0, places // choices), places.to(torch.int32)
    tokens, _ = _routed(routing_map)
    tokens = tokens[:num_out_tokens] if num_out_tokens > 0 else tokens
    return inp.index_select(0, tokens), tokens.to(torch.int32)


def _routed(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Token and expert of each row, expert by expert."""
    experts, tokens = routing_map.bool().T.nonzero(as_tuple=True)
    return tokens, experts


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`moe_permute` by mask, with ``probs`` [T, E] of each row [P] as the second of three results."""
    rows, row_map = moe_permute(inp, routing_map, num_out_tokens)
    tokens, experts = _routed(routing_map)
    return rows, probs[tokens, experts][: rows.shape[0]], row_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """:func:`moe_permute_with_probs` with zeros after each expert's rows, up to a multiple of ``align_size``.

    Returns:
        Rows, probabilities and row map as there, by how much each expert's rows moved [E] (None if none did), and how
        many rows each expert has now [E].
    """
    rows, row_probs, row_map = moe_permute_with_probs(inp, probs, routing_map)
    counts = routing_map.bool().sum(0).to(tokens_per_expert.dtype)
    target = -(-counts // align_size) * align_size
    offsets = torch.cumsum(target - counts, 0) - (target - counts)
    if bool((target == counts).all()):
        return rows, row_probs, row_map, None, target
    _, experts = _routed(routing_map)
    place = torch.arange(rows.shape[0], device=rows.device) + offsets[experts]
    size = int(target.sum())
    padded = rows.new_zeros(size, rows.shape[1]).index_copy(0, place, rows)
    padded_probs = row_probs.new_zeros(size).index_copy(0, place, row_probs)
    return padded, padded_probs, row_map, offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """The sum, for each token, of its rows in ``inp`` [P, C], each times its probability if those are given.

    Args:
        merging_probs: [T, E] under ``"mask"``, with zeros where a token does not go; [T, k] under ``"index"``.
        restore_shape: [T, C]; None is that of ``inp``.
        probs: older name of ``merging_probs``.

    Raises:
        NotImplementedError: ``pad_offsets``; drop the padding with ``Fp8Unpadding`` first.
        ValueError: ``merging_probs`` that are not zero exactly where ``row_id_map`` sends no token.
    """
    require("map_type", map_type, MAP_TYPES)
    if pad_offsets is not None:
        raise NotImplementedError("moe_unpermute(pad_offsets=) is not implemented; drop the padding first")
    weights = probs if merging_probs is None else merging_probs
    places = row_id_map.long()
    if map_type == "index":
        if weights is None:
            return inp.new_zeros(places.shape[0], inp.shape[1]).index_copy(0, places[: inp.shape[0]], inp)
        each = inp.new_zeros(weights.numel(), inp.shape[1]).index_copy(0, places[: inp.shape[0]], inp)
        merged = each.view(*weights.shape, -1) * weights[..., None].to(torch.promote_types(weights.dtype, inp.dtype))
        return merged.sum(1).to(inp.dtype)
    rows: Any = inp
    if weights is not None:
        tokens, experts = _routed(weights != 0)
        if tokens.shape[0] != places.shape[0]:
            raise ValueError(
                f"merging_probs must be zero where a token does not go: {tokens.shape[0]} of them are not, "
                f"for {places.shape[0]} rows"
            )
        if not torch.equal(tokens, places):
            raise ValueError("merging_probs are not zero where row_id_map sends no token: the two are of other routes")
        rows = inp * weights[tokens, experts][:, None]
    shape = tuple(inp.shape) if restore_shape is None else tuple(restore_shape)
    total = torch.zeros(shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=inp.device)
    return total.index_add(0, places, rows.to(total.dtype)).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of ``inp`` of ``split_sizes`` rows, in the order ``sorted_index``."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`moe_sort_chunks_by_index` of ``inp`` and of ``probs``."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )
