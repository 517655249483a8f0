"""What a forward and its backward are told beside their tensors: one value."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp4engine.functional.activation import Activation
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import ExecutedGemms, GemmName, LinearPlan
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import Make, Operands
from fp4engine.ops import TiledOperand


class Call(NamedTuple):
    """What one forward and its backward are told beside their tensors.

    Attributes:
        plan: how to compute.
        executed: where to count GEMMs.
        shards: what this rank has of the matrices, where several ranks share them; else None.
        stored: finds the weight's operands, or makes and keeps them, by :data:`Make`; None quantizes anew.
        tiles: what the weight is, if it came as codes with a scale of each tile; else None.
        main_grad: where the weight's gradient goes instead of ``weight.grad``, or None.
        needs_dgrad, needs_wgrad: which gradients a backward pass will be asked for.
        function: the norm or activation that the input still has to go through, or None.
        dtype: of the function's value.
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
        """Count GEMMs that ran, each of so many FLOPs."""
        self.executed.record(self.plan.formats, flops, *names)
