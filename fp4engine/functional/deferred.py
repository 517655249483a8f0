"""The input of a linear transformation as a function of another tensor, which its cast may compute."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.activation import Activation
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import LinearPlan
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix


class Deferred(NamedTuple):
    """``function(x, *parameters)`` rounded to ``dtype``, not computed yet.

    Attributes:
        function: a norm of [..., K], or an activation to [..., K].
        x: what it reads.
        parameters: gamma and beta of a norm.
        dtype: of the value.
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

    def to(self, dtype: torch.dtype) -> "Deferred":
        return self._replace(dtype=dtype)

    def tensor(self) -> Tensor:
        """The value, by PyTorch's own functions."""
        return self.function(self.x, *self.parameters).to(self.dtype)

    def fuses(self, plan: LinearPlan) -> bool:
        """Whether kernels make ``plan.input``'s operands of the value without it.

        Not if backward reads the value itself, nor if ranks share its outer amaxes.
        """
        quantizer, rowwise, columnwise = plan.input, plan.input.rowwise_spec, plan.input.columnwise_spec
        if rowwise is None or columnwise is None or not quantizer.only_casts:
            return False
        if plan.backward_override == "high_precision" or plan.amax_reduction_group is not None:
            return False
        tensors = [t for t in (self.x, *self.parameters) if t is not None]
        return self.function.is_fusable(self.dtype) and ops.fuses(
            tensors, (rowwise, columnwise), self.dtype, quantizer.backend
        )

    def read(
        self, quantizer: Quantizer, columnwise: bool
    ) -> tuple[Tensor | ops.Source, ops.Amaxes, tuple[Tensor, ...]]:
        """What to quantize [M, K], those outer amaxes that are known, and what :meth:`gradients` needs beside x."""
        rowwise_spec, columnwise_spec = quantizer.rowwise_spec, quantizer.columnwise_spec if columnwise else None
        assert rowwise_spec is not None
        return self.function.read(as_matrix(self.x), self.dtype, (rowwise_spec, columnwise_spec), *self.parameters)
