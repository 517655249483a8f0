"""How one forward and its backward compute, as one value."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.functional.activation import Activation
from fp4engine.functional.eager import Eager
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.program import CastWeight, Dtypes, Needs, cast_weight
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops import Direction
from fp4engine.quantizers.base import as_matrix
from fp4engine.roles import GemmName


class Call(NamedTuple):
    """All arguments of one forward and its backward except their tensors.

    Attributes:
        plan: how to compute.
        executed: where to count GEMMs.
        shards: this rank's parts of the matrices, where several ranks share them; else None.
        weight_cache: holds the weight as it was cast before; None casts it anew.
        main_grad: where the weight's gradient goes instead of ``weight.grad``, or None.
        needs: which gradients a backward pass may be asked for, but for the bias's.
        function: the norm or activation that the input still has to go through, or None.
        cols: K.
        dtypes: of the input, or of the value of ``function``; of the weight; and of the bias.
    """

    plan: LinearPlan
    executed: ExecutedGemms
    shards: Shards | None
    weight_cache: WeightCache | None
    main_grad: MainGrad | None
    needs: Needs
    function: Norm | Activation | None
    cols: int
    dtypes: Dtypes

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias to its part of the output."""
        return self.shards is None or self.shards.adds_bias

    @property
    def wgrad_is_later(self) -> bool:
        """Whether a backward pass leaves wgrad to be added to ``main_grad`` later."""
        return self.main_grad is not None and self.main_grad.later is not None

    @property
    def wgrad_out(self) -> Tensor | None:
        """What a backward pass adds wgrad to; None if it returns wgrad or leaves it to later."""
        return None if self.main_grad is None or self.wgrad_is_later else self.main_grad.buffer

    def stream(self, direction: Direction) -> str:
        """The name of the random stream of a direction; empty for the process's stream."""
        return "" if self.shards is None else self.shards.stream(direction)

    def eager(self, device: torch.device) -> Eager:
        """The builder that computes at once."""
        return Eager(self.plan, device, self.shards)

    def cast_weight(self, weight: Tensor) -> CastWeight | None:
        """The weight as it was cast before, or is cast now for its cache; None without a cache."""
        if self.weight_cache is None:
            return None
        tiles = self.weight_cache.tiles(weight)
        if tiles is not None:
            return CastWeight(tiles, tiles if self.needs.dgrad else None, weight)
        make = lambda: cast_weight(self.eager(weight.device), as_matrix(weight), self.needs)
        (rowwise, kept), seal = self.weight_cache.get(weight, self.plan, self.needs.dgrad, make)
        return CastWeight(rowwise, kept, weight, seal)

    def record(self, flops: int, *names: GemmName) -> None:
        """Count GEMMs that ran, each of ``flops`` FLOPs."""
        self.executed.record(self.plan.formats, flops, *names)
