"""An input of a linear transformation that is a norm or activation of a tensor, which the cast may compute."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.activation import Activation
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import LinearPlan


class FusedInput(NamedTuple):
    """``function(x, *parameters)`` rounded to ``dtype``, not computed yet.

    Attributes:
        function: a norm of [..., K], or an activation with values [..., K].
        x: the tensor that the function reads.
        parameters: gamma and beta of a norm.
        dtype: of the function's value.
    """

    function: Norm | Activation
    x: Tensor
    parameters: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, cols = self.x.shape
        return *rows, cols // 2 if isinstance(self.function, Activation) and self.function.is_gated else cols

    @property
    def device(self) -> torch.device:
        return self.x.device

    def to(self, dtype: torch.dtype) -> "FusedInput":
        return self._replace(dtype=dtype)

    def tensor(self) -> Tensor:
        """The value of the function, computed by PyTorch's own functions."""
        return self.function(self.x, *self.parameters).to(self.dtype)

    def fuses(self, plan: LinearPlan) -> bool:
        """Whether kernels can cast the value by ``plan.input`` while they compute it; not if backward reads it."""
        quantizer, rowwise, columnwise = plan.input, plan.input.rowwise_spec, plan.input.columnwise_spec
        if rowwise is None or columnwise is None or not quantizer.only_casts or quantizer.clipped_gradient:
            return False
        if plan.keeps_original(quantizer) or not (rowwise.block[1] and columnwise.block[1]):
            return False
        tensors = [t for t in (self.x, *self.parameters) if t is not None]
        return self.function.is_fusable(self.dtype) and ops.fuses(
            tensors, (rowwise, columnwise), self.dtype, quantizer.backend
        )
