"""A linear layer by single operations, which cover every cast."""

from itertools import count

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.ops.cast import amax, quantize, transient_form
from fp4engine.ops.draws import draw_from
from fp4engine.ops.gemm import gemm
from fp4engine.ops.linear.way import Given, Gradients, Kept, Share, Way, both, row_of
from fp4engine.ops.operand import Operand
from fp4engine.ops.reduce import packed_amaxes
from fp4engine.ops.tiles import TiledOperand


class LinearByOperations(Way):
    """By single operations, which cover every cast: the way of an operator whose layer no single launch covers."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        casts = self.casts
        of_x: Given = (None, None)
        of_weight: Given = (None, None)
        if share is not None:
            assert isinstance(weight, Tensor), "what came as tiles is not cast"
            if any(share.of):
                keys = self.forward_keys(needs_dgrad, needs_wgrad)
                *of_x, of_w, w_t = self._shared_amaxes((x, weight), keys, share)
                of_weight = of_w, w_t
            if share.given is not None:
                of_weight = row_of(share.given, 0), row_of(share.given, 1)
        left, inp = self._cast(x, casts.inp, True, needs_wgrad, None, casts.streams[0], of_x)
        if isinstance(weight, TiledOperand):
            right, weight_kept = weight.rowwise(casts.backend), weight if needs_dgrad else None
        else:
            asked = (weight, casts.weight, True, needs_dgrad, None, casts.streams[1], of_weight)
            right, weight_kept = self._cast(*asked)
        kept = [tensor for operand in (inp, weight_kept) if operand is not None for tensor in operand.tensors]
        if share is not None and share.given is not None and needs_dgrad:
            kept[-1] = None
        return self._product(left, right, 0, x.dtype, bias), both(kept, needs_dgrad, needs_wgrad)

    def _shared_amaxes(
        self,
        tensors: tuple[Tensor, ...],
        keys: tuple[str, ...],
        share: Share,
        rng: Tensor | None = None,
        stream: int = 0,
    ) -> list[Tensor | None]:
        """As :meth:`LinearByValues._shared_amaxes`, but a list: one amax for each side of ``keys``, None if not shared.

        Args:
            rng, stream: the draw and stream id of those casts.
        """
        found: list[Tensor | None] = []
        for i, tensor in enumerate(tensors):
            row, col = (CastSpec.from_key(key) if key and share.of[i] else None for key in keys[2 * i : 2 * i + 2])
            found += amax(tensor, row, col, rng=rng, stream=stream, backend=self.casts.backend)
        amaxes = packed_amaxes([value for value in found if value is not None])
        share.reduce(amaxes)
        index = count()
        return [None if value is None else row_of(amaxes, next(index)) for value in found]

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        state: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: None = None,
        rank: int | None = None,
        place: tuple[int, int] | None = None,
        share: Share | None = None,
        is_tiled: bool = False,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        casts, (rows, outs) = self.casts, grad_output.shape
        inp, inp_scale_inv, inp_amax, weight, weight_scale_inv, weight_amax = kept
        rng = None if state is None else draw_from(state, place)
        stream = self.backward_stream(rng is not None, rank)
        given: Given = (None, None)
        if share is not None:
            row, col = casts.grad_output
            sides = "" if weight is None else row, "" if inp is None else col
            given = self._shared_amaxes((grad_output,), sides, share, rng, stream)
        asked = (grad_output, casts.grad_output, weight is not None, inp is not None, rng, stream, given)
        left, left_t = self._cast(*asked, transient=True)
        dx = dw = None
        if weight is not None:
            if is_tiled:
                assert weight_scale_inv is not None and weight_amax is not None
                tiled = TiledOperand(self.weight_spec, outs, ins, weight, weight_scale_inv, weight_amax)
                right = tiled.columnwise(casts.backend)
            else:
                right = Operand(self.weight_spec, ins, outs, weight, weight_scale_inv, weight_amax)
            dx = self._product(left, right, 1, dtypes[0])
        if inp is not None:
            dw = self._product(left_t, Operand(self.inp_spec, ins, rows, inp, inp_scale_inv, inp_amax), 2, dtypes[1])
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
