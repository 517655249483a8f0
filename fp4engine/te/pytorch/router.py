"""Which experts a token goes to, by TransformerEngine's names, in PyTorch's operations.

Legend: T tokens, E experts, k experts per token. Scores, probabilities and losses are computed in FP32.
"""

from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine.arguments import require_integer, require_one_of

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


class RoutingMapFormat(IntEnum):
    """How the chosen experts are told, of which only ``BYTEMAP``, bool [T, E], is here."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: Any = "bytemap",
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the ``topk`` experts with the highest scores, and the probability of each.

    Args:
        logits: [T, E], FP32 or 16 bits.
        use_pre_softmax: with ``"softmax"``, over all experts instead of the chosen ones.
        num_groups, group_topk: choose among the experts of ``group_topk`` of ``num_groups`` equal groups, those whose
            ``topk / group_topk`` best experts have the highest sum; None or 0, both, for one group of all.
        scaling_factor: what probabilities are multiplied by.
        score_function: ``"softmax"``; or ``"sigmoid"`` or ``"sqrtsoftplus"``, whose probabilities are divided by their
            sum where ``topk > 1``.
        expert_bias: [E], added to the scores of the last two for the choice, and not to the probabilities.
        routing_map_format: only ``"bytemap"``.
        topk_indices: an integer tensor [T, k] that the chosen experts are written to; then it is returned as well.
        qb_histogram, qb_bin_bounds, qb_histogram_mode: only None.

    Returns:
        Probabilities [T, E] in the dtype of ``logits``, zero for experts that are not chosen; and bool [T, E], True
        for those that are, or ``topk_indices``.

    Raises:
        ValueError: another ``score_function``; ``expert_bias`` beside ``"softmax"``; one of ``num_groups`` and
            ``group_topk`` without the other, or such that do not fit the experts or ``topk``; more experts asked for
            than there are, or tensors of other shapes.
        NotImplementedError: another format, or a histogram.
    """
    require_one_of("score_function", score_function, SCORE_FUNCTIONS)
    _refuse_formats(routing_map_format)
    for name, value in (
        ("qb_histogram", qb_histogram), ("qb_bin_bounds", qb_bin_bounds), ("qb_histogram_mode", qb_histogram_mode),
    ):  # fmt: skip
        if value is not None:
            raise NotImplementedError(f"fused_topk_with_score_function({name}=) is not implemented; leave it out")
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(
            "expert_bias needs score_function='sigmoid' or 'sqrtsoftplus', got score_function='softmax'; leave it out"
        )
    experts = logits.shape[-1]
    topk = require_integer("topk", topk, 1, experts)
    if expert_bias is not None and tuple(expert_bias.shape) != (experts,):
        raise ValueError(f"expert_bias must be [{experts}], got {list(expert_bias.shape)}")
    if topk_indices is not None and (
        topk_indices.is_floating_point() or tuple(topk_indices.shape) != (*logits.shape[:-1], topk)
    ):
        got = f"{topk_indices.dtype} {list(topk_indices.shape)}"
        raise ValueError(f"topk_indices must be integers {[*logits.shape[:-1], topk]}, got {got}")
    is_late = score_function == "softmax" and not use_pre_softmax
    scores = logits.float() if is_late else _scores(logits, score_function)
    biased = scores if expert_bias is None else scores + expert_bias
    chosen = _choose(biased, topk, num_groups, group_topk)
    probs = scores.gather(-1, chosen)
    if is_late:
        probs = probs.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        probs = _shares(probs)
    if scaling_factor is not None:
        probs = probs * scaling_factor
    gates = torch.zeros_like(logits).scatter(-1, chosen, probs.to(logits.dtype))
    return gates, _routing_map(chosen, logits) if topk_indices is None else topk_indices.copy_(chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Any = "bytemap"
) -> tuple[Tensor, Tensor]:
    """What the auxiliary loss is computed of: the chosen experts, bool [T, E], and all scores, FP32 [T, E].

    Raises:
        ValueError: another ``score_function``.
        NotImplementedError: another format.
    """
    require_one_of("score_function", score_function, SCORE_FUNCTIONS)
    _refuse_formats(routing_map_format)
    scores = _scores(logits, score_function)
    if score_function != "softmax":
        scores = _shares(scores)
    topk = require_integer("topk", topk, 1, logits.shape[-1])
    return _routing_map(scores.topk(topk, dim=-1).indices, logits), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """``coeff * E / (k T^2) * sum_e tokens_per_expert[e] * sum_t probs[t, e]``, a scalar in the dtype of ``probs``.

    Args:
        probs: [rows, E]; ``total_num_tokens`` is T, more than the rows where several ranks have some.
    """
    total = (probs.float().sum(0) * tokens_per_expert).sum()
    return (total * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))).to(probs.dtype)


def _scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1, dtype=torch.float32)
    return logits.float().sigmoid() if score_function == "sigmoid" else F.softplus(logits.float()).sqrt()


def _shares(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _choose(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """Indices [T, k] of the chosen experts."""
    if bool(num_groups) != bool(group_topk):
        raise ValueError(f"num_groups and group_topk go together, got num_groups={num_groups}, group_topk={group_topk}")
    if num_groups and group_topk:
        num_groups = require_integer("num_groups", num_groups, 1)
        group_topk = require_integer("group_topk", group_topk, 1)
        if scores.shape[-1] % num_groups or group_topk > num_groups:
            raise ValueError(
                f"num_groups must divide the {scores.shape[-1]} experts and be at least group_topk={group_topk}, "
                f"got {num_groups}"
            )
        if topk < group_topk:
            raise ValueError(f"topk must be at least group_topk={group_topk}, got {topk}")
        groups = scores.unflatten(-1, (num_groups, -1))
        best = groups.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        is_open = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, True)
        scores = groups.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
    return scores.topk(topk, dim=-1).indices


def _routing_map(chosen: Tensor, logits: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)


def _refuse_formats(routing_map_format: Any) -> None:
    if routing_map_format not in ("bytemap", 0):
        raise NotImplementedError(
            f"routing_map_format={routing_map_format!r} is not implemented; leave it at 'bytemap'"
        )
