"""How one forward and its backward compute, as one value."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp4engine.functional.activation import Activation
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import Make, Operands
from fp4engine.ops import TiledOperand
from fp4engine.roles import GemmName


class Call(NamedTuple):
    """All arguments of one forward and its backward except their tensors.

    Attributes:
        plan: how to compute.
        executed: where to count GEMMs.
        shards: this rank's parts of the matrices, where several ranks share them; else None.
        stored: :meth:`~fp4engine.functional.WeightCache.get` of the weight's cache; None quantizes the weight anew.
        tiles: the weight as codes with one scale per tile, if it was gathered in that form; else None.
        main_grad: where the weight's gradient goes instead of ``weight.grad``, or None.
        needs_dgrad, needs_wgrad: whether a backward pass may be asked for the gradient of the input, and of the weight.
        function: the norm or activation that the input still has to go through, or None.
        dtype: of the input, or of the value of ``function``.
    """

    plan: LinearPlan
    executed: ExecutedGemms
    shards: Shards | None
    stored: Callable[[LinearPlan, bool, Make], Operands] | None
    main_grad: MainGrad | None
    needs_dgrad: bool
    needs_wgrad: bool
    function: Norm | Activation | None
    dtype: torch.dtype
    tiles: TiledOperand | None = None

    def record(self, flops: int, *names: GemmName) -> None:
        """Count GEMMs that ran, each of ``flops`` FLOPs."""
        self.executed.record(self.plan.formats, flops, *names)
