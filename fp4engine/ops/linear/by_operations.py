"""A linear layer by single operations, which cover every cast."""

from itertools import count
from typing import Any

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops.cast import amax, quantize, transient_form
from fp4engine.ops.draws import draw_from
from fp4engine.ops.gemm import gemm
from fp4engine.ops.linear.kept import joined, one_buffer, parts
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, Given, Gradients, Kept, LayerCasts, Sizes, Way
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, aligned
from fp4engine.ops.reduce import packed_amaxes, share_amaxes
from fp4engine.ops.tiles import TiledOperand


class LinearByOperations(Way):
    """The way of an operator whose layer no single launch takes: by single operations, which cover every cast.

    Attributes:
        in_one_buffer: whether what is kept is one buffer, as :class:`LinearByValues` makes it; otherwise it is the
            tensors of the operands, as :class:`LinearByFP8Blocks` makes them.
    """

    def __init__(self, casts: LayerCasts, in_one_buffer: bool) -> None:
        super().__init__(casts)
        self.in_one_buffer = in_one_buffer

    def kept_outputs(self, sizes: Sizes, needs_dgrad: bool, needs_wgrad: bool) -> list[Output]:
        """See :attr:`in_one_buffer`."""
        outputs = super().kept_outputs(sizes, needs_dgrad, needs_wgrad)
        return one_buffer(outputs) if self.in_one_buffer else outputs

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        """As :meth:`Way.forward`, but what came as tiles is the caller's to keep."""
        casts, given = self.casts, asked.given
        of_x: Given = (None, None)
        of_weight: Given = (None, None)
        if asked.groups:
            assert isinstance(weight, Tensor), "what came as tiles is not cast"
            keys = self.forward_keys(asked)
            *of_x, of_w, w_t = self._shared_amaxes((x, weight), keys, asked.groups, asked.shared)
            of_weight = of_w, w_t
        if given is not None:
            of_weight = given[0, :1], given[1, :1]
        left, inp = self._cast(x, casts.inp, True, asked.needs_wgrad, None, casts.streams[0], of_x)
        if isinstance(weight, TiledOperand):
            right, weight_kept = weight.rowwise(casts.backend), None
        else:
            told = (weight, casts.weight, True, asked.needs_dgrad, None, casts.streams[1], of_weight)
            right, weight_kept = self._cast(*told)
        operands = [operand for operand in (inp, weight_kept) if operand is not None]
        kept = [tensor for operand in operands for tensor in operand.tensors if tensor is not None]
        return self._product(left, right, 0, x.dtype, bias), joined(kept) if self.in_one_buffer else kept

    def _shared_amaxes(
        self,
        tensors: tuple[Tensor, ...],
        keys: tuple[str, ...],
        groups: tuple[Any, ...],
        shared: tuple[bool, bool] = (True, True),
        rng: Tensor | None = None,
        stream: int = 0,
    ) -> list[Tensor | None]:
        """As :meth:`LinearByValues._shared_amaxes`, but a list: one amax for each side of ``keys``, None if not shared.

        Args:
            groups, shared: as in :class:`ForwardPass`.
            rng, stream: the draw and stream id of those casts.
        """
        found: list[Tensor | None] = []
        for i, tensor in enumerate(tensors):
            row, col = (CastSpec.from_key(key) if key and shared[i] else None for key in keys[2 * i : 2 * i + 2])
            found += amax(tensor, row, col, rng=rng, stream=stream, backend=self.casts.backend)
        amaxes = packed_amaxes([value for value in found if value is not None])
        share_amaxes(amaxes, groups)
        index = count()
        return [None if value is None else amaxes[next(index), :1] for value in found]

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        casts, (rows, outs), kept = self.casts, grad_output.shape, aligned(kept)
        needs_dgrad, needs_wgrad, ins, dtypes, state, rank, place, groups, tiles, _ = asked
        if self.in_one_buffer:
            outputs = super().kept_outputs((rows, outs, ins), needs_dgrad and not tiles, needs_wgrad)
            kept = [*parts(kept, outputs), *kept[bool(outputs) :]]
        rng = None if state is None else draw_from(state, place)
        stream = self.backward_stream(rng is not None, rank)
        given: Given = (None, None)
        if groups:
            row, col = casts.grad_output
            sides = row * needs_dgrad, col * needs_wgrad
            given = self._shared_amaxes((grad_output,), sides, groups, rng=rng, stream=stream)
        told = (grad_output, casts.grad_output, needs_dgrad, needs_wgrad, rng, stream, given)
        left, left_t = self._cast(*told, transient=True)
        dx = dw = None
        if needs_dgrad:
            if tiles:
                right = TiledOperand(self.weight_spec, outs, ins, tiles, kept[-1]).columnwise(casts.backend)
            else:
                right = Operand(self.weight_spec, ins, outs, *kept[-3:])
            dx = self._product(left, right, 1, dtypes[0])
        if needs_wgrad:
            dw = self._product(left_t, Operand(self.inp_spec, ins, rows, *kept[:3]), 2, dtypes[1])
        return dx, dw

    def _cast(
        self,
        tensor: Tensor,
        keys: tuple[str, str],
        rowwise: bool,
        columnwise: bool,
        rng: Tensor | None,
        stream: int,
        given: Given,
        transient: bool = False,
    ) -> tuple[Operand | None, Operand | None]:
        """The operands that are asked for; the columnwise one is in codes, to be kept, unless it is ``transient``."""
        row_key, col_key = keys
        backend, device = self.casts.backend, tensor.device
        return quantize(
            tensor,
            CastSpec.from_key(row_key) if rowwise else None,
            CastSpec.from_key(col_key) if columnwise else None,
            rowwise_form=transient_form(row_key, device, backend),
            columnwise_form=transient_form(col_key, device, backend) if transient else "codes",
            rowwise_amax=given[0],
            columnwise_amax=given[1],
            rng=rng,
            stream=stream,
            backend=backend,
        )

    def _product(
        self, left: Operand | None, right: Operand | None, which: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Fprop, dgrad or wgrad."""
        assert left is not None and right is not None
        fast = self.casts.fast_accumulation[which]
        return gemm(left, right, out_dtype=dtype, bias=bias, backend=self.casts.backend, fast_accumulation=fast)
