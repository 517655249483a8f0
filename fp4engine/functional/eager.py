"""The builder that does at once what a verb of :mod:`fp4engine.functional.program` says: the specification.

It computes on a CPU, in code that is traced, on subclasses of tensors, and by any quantizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.functional.plan import LinearPlan
from fp4engine.functional.program import Request
from fp4engine.functional.shards import Shards, shared_amaxes
from fp4engine.ops import Operand, SquareOperand, TiledOperand
from fp4engine.ops.cast import transient_form
from fp4engine.ops.checksum import compare
from fp4engine.ops.draws import draw_from
from fp4engine.ops.operation import PLAIN
from fp4engine.ops.through_cast import clip_and_rotate_back, within_range
from fp4engine.private import is_fake
from fp4engine.quantizers import Quantizer
from fp4engine.roles import GemmName

Operands = tuple[Operand | None, Operand | None]
Stored = Operand | TiledOperand | SquareOperand
"""What is kept of a weight; operands of the last two are made when they are read."""


class Eager:
    """Verbs on tensors.

    Args:
        shards: this rank's parts of the matrices, where several ranks share them; else None.
        state: of the random stream; None for the one that the thread, or the layer in ``shards``, draws from.
    """

    def __init__(
        self, plan: LinearPlan, device: torch.device, shards: Shards | None = None, state: Tensor | None = None
    ) -> None:
        self.plan, self.device, self.shards, self.state = plan, device, shards, state

    dense = staticmethod(Operand.dense)

    def transposed(self, matrix: Tensor) -> Tensor:
        return matrix.T

    def draw(self, direction: ops.Direction, after: Tensor | None = None) -> Tensor:
        if self.state is not None:
            return draw_from(self.state)
        if self.shards is not None:
            return self.shards.draw(self.device, direction, after)
        return ops.next_draw(self.device, direction=direction, after=after)

    def cast(self, requests: Sequence[Request]) -> list[Operands]:
        """Cast tensors. The outer amaxes that ranks share are found for all of them, and reduced together."""
        shards = self.shards
        amaxes: Sequence[Tensor | None] = ()
        if shards is not None:
            requests = [shards.with_place(request) for request in requests]
            amaxes = shared_amaxes(requests, shards)
        made: list[Operands] = []
        for index, (_, quantizer, tensor, rowwise, columnwise, rng, in_codes) in enumerate(requests):
            if not (rowwise or columnwise):
                made.append((None, None))
                continue
            row_codes, col_codes = in_codes
            shared: dict[str, Any] = {}
            if shards is not None:
                shared = {"rowwise_amax": amaxes[2 * index], "columnwise_amax": amaxes[2 * index + 1]}
                shared |= {} if shards.rank is None or rng is None else {"rank": shards.rank}
            quantized = quantizer.quantize(
                tensor,
                rowwise=rowwise,
                columnwise=columnwise,
                rng=rng,
                rowwise_form="codes" if row_codes else self._form(quantizer.rowwise_spec, quantizer.backend),
                columnwise_form="codes" if col_codes else self._form(quantizer.columnwise_spec, quantizer.backend),
                **shared,
            )
            made.append((quantized.rowwise, quantized.columnwise))
        return made

    def _form(self, spec: CastSpec | None, backend: str) -> ops.Form:
        """The form, codes or values, of an operand that one product reads and that is not kept."""
        return "codes" if spec is None else transient_form(spec.key, self.device, backend)

    compare = staticmethod(compare)

    def recall(self, quantizer: Quantizer, kept: Stored, columnwise: bool) -> Operand:
        """The operand of a product, from what the forward pass kept: one side of ``kept``, or ``kept`` itself."""
        if isinstance(kept, Operand):
            return kept
        return (kept.columnwise if columnwise else kept.rowwise)(quantizer.backend)

    def in_dtype(self, operand: Operand, dtype: torch.dtype) -> Operand:
        """``operand``, converted to ``dtype`` if it is not quantized."""
        return operand if operand.spec is not None else Operand.dense(operand.data.to(dtype))

    def decode(self, operand: Operand, dtype: torch.dtype, backend: str) -> Tensor:
        return operand.dequantize(dtype, backend)

    def within(self, tensor: Tensor, operand: Operand) -> Tensor:
        """Bits that mark the elements of ``tensor`` that its cast to codes did not saturate.

        Raises:
            NotImplementedError: the tensor is stored as codes, which do not tell what saturated.
        """
        if type(tensor) not in PLAIN and not is_fake(tensor):
            kind = type(tensor).__name__
            raise NotImplementedError(f"clipped_gradient=True needs plain tensors that were cast, got a {kind}")
        return within_range(tensor, operand, self.plan.backend)

    def product(
        self,
        name: GemmName,
        left: Operand,
        right: Operand,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``left . right^T + bias`` in ``dtype``, or added to ``out``."""
        return ops.gemm(
            left,
            right,
            out_dtype=dtype,
            bias=bias,
            out=out,
            backend=self.plan.backend,
            fast_accumulation=name in self.plan.fast_accumulation,
            accumulation=self.plan.accumulation,
        )

    def undo(
        self,
        values: Tensor,
        within: Tensor | None,
        rotated: str,
        cols: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """The gradient [rows, cols] of a tensor, from FP32 ``values``, the gradient of what its cast decodes to.

            x_hat = Q(x H)      straight through:  dx = d_x_hat H^T      clipped:  dx = (d_x_hat * within) H^T

        Args:
            rotated: key of the spec whose cast rotated the tensor; empty if none did.

        Source: arXiv 2505.14669; IST-DASLab Quartet 00ccd38, ``quantizers/mxfp4.py``, ``QuestMXFP4QuantizerFn``.
        """
        wanted = dtype if out is None else torch.float32
        gradient = clip_and_rotate_back(values, within, rotated, cols, wanted, self.plan.backend)
        return gradient if out is None else out.add_(gradient)

    def column_sum(self, grad_output: Tensor, dtype: torch.dtype) -> Tensor:
        """``sum of dy over its rows``, in FP32 and in the order of :func:`fp4engine.reference.column_sums`.

        A gradient that is not quantized, or is in FP64, is summed in PyTorch's order, FP64 in FP64.
        """
        if not self.plan.sums_in_order or grad_output.dtype == torch.float64:
            accumulation = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
            return grad_output.sum(0, dtype=accumulation).to(dtype)
        return ops.column_sums(grad_output, backend=self.plan.backend)[0].to(dtype)
