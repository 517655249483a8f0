"""What casts read, a matrix or what a norm or an activation makes of one, and are asked for. Imports no Triton."""

from functools import cache
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


class Asked(NamedTuple):
    """A request for a cast, without its tensors and its stream id.

    Attributes:
        rowwise, columnwise: keys of the specs, empty for a side that is not to be made.
        rowwise_form, columnwise_form: ``"codes"`` or ``"values"``, see :data:`fp4engine.ops.Form`.
        backend: see :func:`fp4engine.ops.backend.choose`.
        kind, gated, dtype: of the :class:`Source`; ``""``, False and the matrix's dtype if a plain matrix is cast.
    """

    rowwise: str
    columnwise: str
    rowwise_form: str
    columnwise_form: str
    backend: str
    kind: str
    gated: bool
    dtype: torch.dtype

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Key and form of the rowwise side and of the columnwise side."""
        return (self.rowwise, self.rowwise_form), (self.columnwise, self.columnwise_form)

    @property
    def key(self) -> str:
        """This as operators take it: the dispatcher takes less time over one argument than over eight."""
        *words, gated, dtype = self
        return " ".join([*words, str(int(gated)), str(dtype).removeprefix("torch.")])

    @staticmethod
    @cache
    def from_key(key: str) -> "Asked":
        """What printed ``key``."""
        *words, gated, dtype = key.split(" ")
        return Asked(*words, gated == "1", getattr(torch, dtype))
