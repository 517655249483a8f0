"""Rows of tokens sorted by expert, and back.

Legend: T tokens, E experts, P rows after sorting, C hidden size.
"""

import torch
from torch import Tensor

from fp4engine.arguments import require_one_of

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

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
        Rows [P, C], and the row map that :func:`moe_unpermute` takes, of all rows, those that are not kept last: int
        [2, P], the token and the expert of each, or under ``"index"`` int [P], the place ``token * k + choice``.
    """
    require_one_of("map_type", map_type, MAP_TYPES)
    if routing_map.shape[0] != inp.shape[0]:
        raise ValueError(f"routing_map must have a row for each of {inp.shape[0]} tokens, got {routing_map.shape[0]}")
    if map_type == "mask" and routing_map.dtype != torch.bool and bool((routing_map * (1 - routing_map)).any()):
        raise ValueError('routing_map must be of zeros and ones under map_type="mask"; experts need map_type="index"')
    if map_type == "index":
        choices = routing_map.shape[1] if routing_map.ndim > 1 else 1
        places = torch.argsort(routing_map.reshape(-1), stable=True)
        tokens, row_map = places // choices, places
    else:
        experts, tokens = routing_map.bool().T.nonzero(as_tuple=True)
        row_map = torch.stack((tokens, experts))
    kept = tokens[:num_out_tokens] if num_out_tokens > 0 else tokens
    return inp.index_select(0, kept), row_map.to(torch.int32)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`moe_permute` by mask, with ``probs`` [T, E] of each row [P] as the second of three results."""
    rows, row_map = moe_permute(inp, routing_map, num_out_tokens)
    tokens, experts = row_map.long()[:, : rows.shape[0]]
    return rows, probs[tokens, experts], row_map


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
    place = _moved(row_map[1].long(), offsets)
    size = int(target.sum())
    padded = rows.new_zeros(size, rows.shape[1]).index_copy(0, place, rows)
    padded_probs = row_probs.new_zeros(size).index_copy(0, place, row_probs)
    return padded, padded_probs, row_map, offsets, target


def _moved(experts: Tensor, offsets: Tensor) -> Tensor:
    """Where rows of ``experts`` lie once each expert's have moved by its offset."""
    return torch.arange(experts.shape[0], device=experts.device) + offsets[experts]


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
        row_id_map: of :func:`moe_permute`, which may be of more rows than ``inp`` has: the others were not kept.
        merging_probs: [T, E] under ``"mask"``, read where a token goes; [T, k] under ``"index"``.
        restore_shape: [T, C]; None takes the shape of ``inp``.
        probs: older name of ``merging_probs``.
        pad_offsets: by how much each expert's rows moved in :func:`moe_permute_and_pad_with_probs`; None if none did.

    Raises:
        ValueError: a row map of the other ``map_type``, ``pad_offsets`` under ``"index"``, or ``merging_probs`` that
            are given twice or not for each of T tokens.
    """
    require_one_of("map_type", map_type, MAP_TYPES)
    is_mask = map_type == "mask"
    if row_id_map.ndim != 1 + is_mask:
        raise ValueError(
            f"row_id_map must be what moe_permute(map_type={map_type!r}) returned, got {list(row_id_map.shape)}"
        )
    if probs is not None and merging_probs is not None:
        raise ValueError("probs is an older name of merging_probs; give one of them")
    weights = probs if merging_probs is None else merging_probs
    wide = torch.promote_types(inp.dtype, torch.float32)
    if not is_mask:
        if pad_offsets is not None:
            raise ValueError('pad_offsets needs map_type="mask"')
        places = row_id_map.long()
        each = inp.new_zeros(places.shape[0], inp.shape[1]).index_copy(0, places[: inp.shape[0]], inp)
        if weights is None:
            return each
        return (each.view(*weights.shape, inp.shape[1]) * weights[..., None].to(wide)).sum(1).to(inp.dtype)
    tokens, experts = row_id_map.long()
    rows = inp.to(wide) if pad_offsets is None else inp.index_select(0, _moved(experts, pad_offsets)).to(wide)
    tokens, experts = tokens[: rows.shape[0]], experts[: rows.shape[0]]
    shape = tuple(inp.shape) if restore_shape is None else tuple(restore_shape)
    if weights is not None:
        if weights.ndim != 2 or weights.shape[0] != shape[0]:
            raise ValueError(
                f"merging_probs must be [{shape[0]}, E], as restore_shape has tokens, got {list(weights.shape)}"
            )
        rows = rows * weights[tokens, experts][:, None]
    return torch.zeros(shape, dtype=wide, device=inp.device).index_add(0, tokens, rows.to(wide)).to(inp.dtype)


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
