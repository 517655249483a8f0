"""A logical tensor and the operands made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fp4engine.ops import Operand


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Up to two operands of one tensor [..., K], seen as a matrix [M, K]. Frozen; not a ``torch.Tensor``.

    Attributes:
        shape: logical shape of the tensor that was quantized.
        dtype: its dtype, what :meth:`dequantize` returns.
        rowwise: the operand [M, K], contracts K; None if not made.
        columnwise: the operand [K, M], contracts M; None if not made.
    """

    shape: torch.Size
    dtype: torch.dtype
    rowwise: Operand | None
    columnwise: Operand | None

    def __repr__(self) -> str:
        """``QuantizedTensor([64, 48], torch.float32, rowwise='e2m1 1x16', columnwise=None, device='cpu')``."""
        labels = ("rowwise", self.rowwise), ("columnwise", self.columnwise)
        sides = ", ".join(f"{name}={_label(side)}" for name, side in labels)
        return f"QuantizedTensor({list(self.shape)}, {self.dtype}, {sides}, device={str(self.device)!r})"

    def dequantize(self) -> Tensor:
        """High-precision values in the original shape and dtype, from the rowwise operand where there is one.

        Raises:
            ValueError: only a rotated columnwise operand is there; it does not decode to the tensor.
        """
        if self.rowwise is not None:
            return self.rowwise.tensor(self.dtype).view(self.shape)
        assert self.columnwise is not None
        spec = self.columnwise.spec
        if spec is not None and spec.rotation is not None:
            raise ValueError("only the rotated columnwise operand is present; quantize with rowwise=True to dequantize")
        return self.columnwise.dequantize(self.dtype).T.reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of both operands."""
        return sum(side.nbytes for side in (self.rowwise, self.columnwise) if side is not None)

    @property
    def device(self) -> torch.device:
        side = self.rowwise or self.columnwise
        assert side is not None
        return side.data.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(
            f"torch.{getattr(func, '__name__', func)} got a QuantizedTensor, which has no torch operations; "
            "call .dequantize() for values, or .rowwise / .columnwise for the operands"
        )


def _label(side: Operand | None) -> str:
    if side is None:
        return "None"
    return repr("high precision" if side.spec is None else side.spec.label)
