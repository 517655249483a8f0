"""How one forward and its backward compute, as one value: each in one launch if kernels cover it, or verb by verb."""

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.functional import program
from fp4engine.functional.activation import Activation
from fp4engine.functional.eager import Eager
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.program import CastWeight, Dtypes, Needs, cast_weight
from fp4engine.functional.record import Layout, restored, saved
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

    def eager(self, device: torch.device, state: Tensor | None = None) -> Eager:
        """The builder that computes at once, by draws from ``state`` or the process's random stream."""
        return Eager(self.plan, device, self.shards, state)

    def cast_weight(self, weight: Tensor) -> CastWeight | None:
        """The weight as it was cast before, or is cast now for its cache; None without a cache."""
        if self.weight_cache is None:
            return None
        tiles = self.weight_cache.tiles(weight)
        if tiles is not None:
            return CastWeight(tiles, tiles if self.needs.dgrad else None, weight)
        make = lambda: cast_weight(self.eager(weight.device), as_matrix(weight, "the weight"), self.needs)
        (rowwise, kept), seal = self.weight_cache.get(weight, self.plan, self.needs.dgrad, make)
        return CastWeight(rowwise, kept, weight, seal)

    def record(self, flops: int, *names: GemmName) -> None:
        """Count GEMMs that ran, each of ``flops`` FLOPs."""
        self.executed.record(self.plan.formats, flops, *names)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, given: CastWeight | None, parameters: tuple[Any, ...] = ()
    ) -> tuple[Tensor, list[Tensor], Layout]:
        """The output [M, N], what is saved for backward, and its layout.

        Args:
            x: [M, K], or what ``function`` reads.
            given: from :meth:`cast_weight`.
            parameters: gamma and beta of a norm that the input has to go through.
        """
        if self.fuses(x.device):
            made = _directions().run_forward(self, x, weight, bias, given, parameters)
            if made is not None:
                return made
        inp, statistics = x, None
        if self.function is not None:
            inp, statistics = self.function.source(x, self.dtypes[0], *parameters)
        b, matrix = self.eager(x.device), given or as_matrix(weight, "the weight")
        y, kept = program.forward(b, inp, matrix, bias, self.needs, self.dtypes[0])
        tensors, slots = saved(kept._replace(statistics=statistics if self.needs.dgrad else None))
        return y, tensors, Layout(slots)

    def backward(
        self,
        layout: Layout,
        grad_output: Tensor,
        kept: Sequence[Tensor],
        needs: Needs,
        state: Tensor | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """Gradients of input, weight and bias; see :func:`fp4engine.functional.directions.run_backward`."""
        if self.fuses(grad_output.device):
            made = _directions().run_backward(self, layout, grad_output, kept, needs, state)
            if made is not None:
                return made
        b, record, later = self.eager(grad_output.device, state), restored(layout.slots, kept), self.wgrad_is_later
        made = program.backward(b, grad_output, record, needs, self.cols, self.dtypes, later, self.wgrad_out)
        grad_input, grad_weight, grad_bias = made
        if later and needs.wgrad:
            grad_weight = partial(program.accumulate, b, grad_weight, record.weight_within, self.cols)
        return grad_input, grad_weight, grad_bias

    def fuses(self, device: torch.device) -> bool:
        """Whether a direction may be one launch, if kernels cover it."""
        is_traced = torch.compiler.is_dynamo_compiling()
        return not is_traced and self.plan.is_fused and capability.triton_runs_on(device)[0]


@cache
def _directions() -> ModuleType:
    """:mod:`fp4engine.functional.directions`, imported where kernels run: it brings Triton."""
    from fp4engine.functional import directions

    return directions
