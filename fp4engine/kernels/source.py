"""What cast kernels read: a matrix, or what a norm or an activation makes of one. Imports no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """A matrix y [M, K] that only the kernels which read it ever hold: ``kind`` of x, rounded to ``dtype``.

    Attributes:
        x: [M, K], or [M, 2K] under a gated activation; unit stride along the rows.
        dtype: of y.
        kind: ``"LayerNorm"``, ``"RMSNorm"``, or an activation of :func:`fp4engine.kernels.activation.activated`.
        gated: whether an activation's value is multiplied by the second half of its row.
        statistics, gamma, beta: of a norm: FP32 [2, M], ``1 / sigma`` then the mean; [K]; [K].
    """

    x: Tensor
    dtype: torch.dtype
    kind: str
    gated: bool = False
    statistics: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        rows, cols = self.x.shape
        return torch.Size((rows, cols // 2 if self.gated else cols))

    @property
    def device(self) -> torch.device:
        return self.x.device
