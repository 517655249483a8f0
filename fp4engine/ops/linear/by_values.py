"""A linear layer by kernels that multiply BF16 values."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp4engine.constants import ALIGNMENT
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import as_it_is, decode_supported, transient_form
from fp4engine.ops.draws import draw_from, is_replaying
from fp4engine.ops.gemm import product_path
from fp4engine.ops.linear.kept import one_buffer
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, Gradients, Kept, LayerCasts, Sizes, Way, linear_kernels
from fp4engine.ops.operation import Output, aligned
from fp4engine.ops.reduce import share_amaxes
from fp4engine.ops.rng import lock as draw_lock
from fp4engine.ops.tiles import TiledOperand

MOST_HELD = 64 << 20
"""Bytes of values that a single launch may hold longer than single operations would hold them."""


class LinearByValues(Way):
    """The way of kernels that multiply BF16 values: casts, decodes and products are one launch each way."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """Whether the layer is small: a large one saves no time, and one launch holds all of its operands at once."""
        return 2 * min(rows, outs) * ins <= MOST_HELD

    @staticmethod
    def covers(casts: LayerCasts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether :mod:`fp4engine.kernels.quantize` casts every operand, and every product is one of values."""
        transient = (casts.inp[0], casts.weight[0], *casts.grad_output)
        if casts.is_stateful or any(transient_form(key, device, casts.backend) != "values" for key in transient):
            return False
        from fp4engine.kernels.quantize import supports

        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            if not all(supports(CastSpec.from_key(key), source)[0] for key in keys):
                return False
        if not all(decode_supported(key)[0] for key in (casts.inp[1], casts.weight[1])):
            return False
        return all(
            product_path(left, right, False, out_dtype, device, casts.backend)[0] == "triton"
            for left, right, out_dtype in casts.products(dtype, weight_dtype)
        )

    def kept_outputs(self, sizes: Sizes, needs_dgrad: bool, needs_wgrad: bool) -> list[Output]:
        """One buffer of bytes: all that a launch keeps is one allocation, and one tensor for autograd and operators."""
        return one_buffer(super().kept_outputs(sizes, needs_dgrad, needs_wgrad))

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        if isinstance(weight, TiledOperand):
            return self._tiled_forward(x, weight, bias, asked)
        kernels = linear_kernels()
        x, weight = as_it_is(x), as_it_is(weight)
        bias = bias if bias is None else bias.contiguous()
        keys, facts, given = self.forward_keys(asked), kernels.facts, asked.given
        backends.record("quantize/triton", "quantize/triton", "gemm/triton")
        amaxes = self._shared_amaxes((x, weight), keys, asked.groups, asked.shared) if asked.groups else None
        tensors = facts(x), facts(weight), facts(bias), x.device
        told = keys, self.casts.streams[:2], x.dtype, asked.shared, given is not None
        *kept, y = kernels.resolve_forward(*tensors, *told)(x, weight, bias, amaxes, given)
        return y, kept

    def _shared_amaxes(
        self,
        tensors: tuple[Tensor, ...],
        keys: tuple[str, ...],
        groups: tuple[Any, ...],
        shared: tuple[bool, bool] = (True, True),
    ) -> Tensor:
        """FP32 [sides, any]: each row begins with the outer amax of a shared side, reduced over the ranks.

        Args:
            tensors: x and weight, or the gradient.
            keys: of the rowwise and the columnwise spec of each; empty for a side that is not asked for.
            groups, shared: as in :class:`ForwardPass`.
        """
        kernels = linear_kernels()
        if not all(shared):
            one = shared.index(True)
            tensors, keys = (tensors[one],), keys[2 * one : 2 * one + 2]
        backends.record(*("amax/triton",) * len(tensors))
        launch = kernels.resolve_amaxes(tuple([kernels.facts(t) for t in tensors]), tensors[0].device, keys)
        (amaxes,) = launch(*tensors)
        share_amaxes(amaxes, groups)
        return amaxes

    def _tiled_forward(
        self, x: Tensor, weight: TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        casts, kernels = self.casts, linear_kernels()
        x, bias = as_it_is(x), bias if bias is None else bias.contiguous()
        facts, packed = kernels.facts, weight.packed
        keys = (casts.inp[0], casts.inp[1] * asked.needs_wgrad, casts.weight[0])
        told = (facts(x), facts(packed), facts(bias), x.device, keys, casts.streams[0], x.dtype)
        *kept, y = kernels.resolve_tiled_forward(*told, weight.rows, weight.parts)(x, packed, bias)
        backends.record("quantize/triton", "spread_tiles/triton", "gemm/triton")
        return y, [*kept, packed] if asked.needs_dgrad else kept

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        kernels, grad_output = linear_kernels(), as_it_is(grad_output)
        for tensor in kept:  # a call of `aligned` in every step takes the host's time
            if tensor.data_ptr() % ALIGNMENT:
                kept = aligned(kept)
                break
        tiles = amaxes = live = None
        if asked.parts and asked.needs_dgrad:
            tiles = kernels.facts(kept[-1]), asked.parts
            backends.record("spread_tiles/triton")
        rng = state = asked.state
        draws = state is not None
        place = asked.place if draws else None
        if state is not None:  # the launch takes the draw itself, unless draws have to be values
            live = None if is_replaying() else kernels.facts(state)
            rng = state if live is not None else draw_from(state, place)
        keys = self.backward_keys(asked)
        stream = self.backward_stream(draws, asked.rank)
        if asked.groups:
            row, col, *_ = keys
            sides = row * asked.needs_dgrad, col * asked.needs_wgrad
            amaxes = self._shared_amaxes((grad_output,), sides, asked.groups)
        told = (kernels.facts(grad_output), asked.ins, grad_output.device, keys, draws, stream, asked.dtypes, tiles)
        launch = kernels.resolve_backward(*told, amaxes is not None, place, live)
        with nullcontext() if live is None else draw_lock:
            outputs = launch(grad_output, rng, amaxes, *kept)
        backends.record("quantize/triton", *("gemm/triton",) * len(outputs))
        return outputs[0] if asked.needs_dgrad else None, outputs[-1] if asked.needs_wgrad else None
