"""The weight of a layer whose outer amaxes ranks share, and amaxes that were found before the layer runs."""

from typing import Any, NamedTuple

from torch import Tensor

from fp4engine import ops
from fp4engine.functional import LinearPlan
from fp4engine.functional.shards import Shards
from fp4engine.modules.sharded import is_distributed, sharing_groups


class SharedWeight(NamedTuple):
    """A layer's weight, whose outer amaxes ranks share.

    Attributes:
        weight: a DTensor.
        plan: of the layer.
        group: the ``amax_reduction_group`` of the autocast region, or None.
        groups: all process groups over which the amaxes are shared.
        found_for: see :func:`fp4engine.ops.weight_amaxes_for`.
    """

    weight: Any
    plan: LinearPlan
    group: Any
    groups: tuple[Any, ...]
    found_for: str


class WeightAmaxes(NamedTuple):
    """Amaxes that were found before a layer runs.

    Attributes:
        amaxes: by :func:`fp4engine.ops.amaxes_of`, the same on all ranks.
        weight: whose amaxes these are. A forward with another weight, put in the place of this one, finds its own.
        found_for: see :func:`fp4engine.ops.weight_amaxes_for`.
    """

    amaxes: Tensor
    weight: Any
    found_for: str


def shared_weight(weight: Any, plan: LinearPlan | None, group: Any, known: SharedWeight | None) -> SharedWeight | None:
    """``weight``, if ranks share its amaxes in a forward by ``plan``, and all in one way; else None.

    Args:
        group: the ``amax_reduction_group`` of the autocast region, or None.
        known: what this returned last time, which is returned again while it holds.
    """
    if known is not None and known.weight is weight and known.plan is plan and known.group is group:
        return known
    if plan is None or plan.casts is None or plan.draws_in_forward or not is_distributed(weight):
        return None
    groups = (*sharing_groups(weight), *(() if group is None else (group,)))
    if not groups or not ops.can_share(plan.casts):
        return None
    return SharedWeight(weight, plan, group, groups, ops.weight_amaxes_for(plan.casts, ops.names_of(groups)))


def amaxes_needed(shards: Shards, plan: LinearPlan) -> str:
    """As :func:`fp4engine.ops.weight_amaxes_for`, of the weight in ``shards``; empty if no other rank shares it."""
    if plan.casts is None or not shards.weight.groups:
        return ""
    return ops.weight_amaxes_for(plan.casts, ops.names_of(tuple([group for group, _ in shards.weight.groups])))


def with_amaxes(shards: Shards, weight: Tensor, found: WeightAmaxes, needed: str) -> Shards:
    """``shards`` with the amaxes ``found``, if they are those of ``weight`` and :func:`amaxes_needed` is ``needed``."""
    if found.weight is not weight or found.found_for != needed:
        return shards
    return shards._replace(weight_amaxes=found.amaxes)
