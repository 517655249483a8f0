"""The weight of a layer whose outer amaxes ranks share, and amaxes that were found before the layer runs."""

from typing import Any, NamedTuple

from torch import Tensor

from fp4engine import ops
from fp4engine.functional import LinearPlan
from fp4engine.functional.shards import Shards
from fp4engine.private import constant_when_traced


class SharedWeight(NamedTuple):
    """A layer's weight, whose outer amaxes ranks share.

    Attributes:
        weight: a DTensor.
        plan: the layer's plan.
        group: the ``amax_reduction_group`` of the autocast region, or None.
        groups: all process groups over which the amaxes are shared.
        found_for: the plan, and the names of the groups, see :func:`found_for`.
    """

    weight: Any
    plan: LinearPlan
    group: Any
    groups: tuple[Any, ...]
    found_for: str


class WeightAmaxes(NamedTuple):
    """Amaxes that were found before a layer runs.

    Attributes:
        amaxes: FP32 [2, AMAX_STRIDE], the first of each row being the outer amax of a side; the same on all ranks.
        weight: whose amaxes these are. A forward with another weight, put in the place of this one, finds its own.
        found_for: the plan, and the names of the groups, see :func:`found_for`.
    """

    amaxes: Tensor
    weight: Any
    found_for: str


def amaxes_needed(shards: Shards, plan: LinearPlan) -> str:
    """The :attr:`WeightAmaxes.found_for` of the weight in ``shards``; empty if no other rank shares its amaxes."""
    groups = tuple([group for group, _ in shards.weight.groups])
    return found_for(plan.key, ops.names_of(groups)) if plan.shares_amaxes and groups else ""


@constant_when_traced
def found_for(plan: str, groups: str) -> str:
    """A key for the amaxes of a weight: the plan's key, and the names of the groups over which they are found."""
    return " ".join([plan, *sorted(groups.split(" "))])


def with_amaxes(shards: Shards, weight: Tensor, found: WeightAmaxes, needed: str) -> Shards:
    """``shards`` with the amaxes ``found``, if these belong to ``weight`` and were found for ``needed``."""
    if found.weight is not weight or found.found_for != needed:
        return shards
    return shards._replace(weight_amaxes=found.amaxes)
