"""What cast kernels read: a matrix, or what a norm or an activation makes of one. Imports no Triton."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp4engine.kernels.load import Prologue


class Source(NamedTuple):
    """A matrix y [M, K] in place of a tensor: x, or ``prologue`` of x, which only the kernels that read it ever hold.

    Attributes:
        x: [M, K], or [M, 2K] under a gated activation; any strides without a prologue, unit stride along rows with one.
        dtype: of y.
        prologue: None for y = x.
        statistics, gamma, beta: of a norm: FP32 [2, M], ``1 / sigma`` then the mean; [K]; [K].
    """

    x: Tensor
    dtype: torch.dtype
    prologue: "Prologue | None" = None
    statistics: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None

    @staticmethod
    def of(x: "Tensor | Source") -> "Source":
        return Source(x, x.dtype) if isinstance(x, Tensor) else x

    @property
    def shape(self) -> torch.Size:
        rows, cols = self.x.shape
        return torch.Size((rows, cols // 2 if self.prologue is not None and self.prologue.gated else cols))

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """Kernel arguments, in their order."""
        return self.x, self.statistics, self.gamma, self.beta
