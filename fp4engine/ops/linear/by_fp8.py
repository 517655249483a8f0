"""A linear layer in FP8: with one scale per tensor, and with block scales, whose products are PyTorch's."""

from typing import Any

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.cast import as_it_is, casts_supported
from fp4engine.ops.draws import draw_from
from fp4engine.ops.linear.way import BackwardPass, ForwardPass, Gradients, Kept, LayerCasts, Way, linear_kernels
from fp4engine.ops.operation import Output, aligned
from fp4engine.ops.tiles import TiledOperand

_ABSENT = (None, None, None, None)
"""Values and amaxes of two memories that are not there."""


class LinearByFP8(Way):
    """The way of FP8 with one scale per tensor: casts and small products are one launch each way.

    PyTorch multiplies what is not small (:func:`fp4engine.ops.gemm_fp8.is_small`); the casts then write the factors.
    """

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """True for every size, since a launch holds no operand longer than single operations do."""
        return True

    @staticmethod
    def covers(casts: LayerCasts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the FP8 kernel casts every operand, by its own unrounded amax, and every product is FP8."""
        if casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        from fp4engine.kernels.cast_fp8 import supports

        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            specs = [CastSpec.from_key(key) for key in keys]
            if any(spec.scale_rule.is_power_of_two or not supports(spec, source)[0] for spec in specs):
                return False
        return all(gemm_fp8.supports(left, right, device)[0] for left, right, _ in casts.products(dtype, weight_dtype))

    def operand_outputs(self, spec: CastSpec, rows: int, cols: int) -> list[Output]:
        """Codes in PyTorch's FP8 and amax: there are no block scales."""
        return [Output((rows, spec.padded_cols(cols)), spec.element.torch_dtype), Output((1,), torch.float32)]

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        kernels, memories = linear_kernels(), asked.memories
        assert isinstance(weight, Tensor) and not asked.groups, "what comes as tiles, or shares amaxes, is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(asked)
        pasts, recalled, paths = ((), _ABSENT, ()) if memories is None else _recalled(*memories)
        (rows, ins), outs = x.shape, weight.shape[0]
        is_small = gemm_fp8.is_small(rows, outs, ins, self.casts.backend, x.device)
        bias = bias if bias is None else bias.contiguous()
        facts, dtype = kernels.facts, x.dtype if is_small else None
        launch = kernels.resolve_fp8_forward(facts(x), facts(weight), facts(bias), pasts, x.device, keys, dtype)
        made = launch(x, weight, bias, *recalled)
        backends.record(*paths, "quantize/triton", "quantize/triton", "gemm/triton" if is_small else "gemm/fp8")
        if is_small:
            *made, y = made
        else:
            codes, weight_codes, alpha, one, *made = made
            y = gemm_fp8.multiply(codes, weight_codes, alpha, one, bias, x.dtype, self.casts.fast_accumulation[0])
        return y, made

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        kernels, grad_output, kept = linear_kernels(), as_it_is(grad_output), aligned(kept)
        assert not asked.groups and not asked.parts, "what comes as tiles, or shares amaxes, is FP4"
        needs_dgrad, needs_wgrad, ins, dtypes = asked.needs_dgrad, asked.needs_wgrad, asked.ins, asked.dtypes
        inp, inp_amax = kept[:2] if needs_wgrad else (None, None)
        weight, weight_amax = kept[-2:] if needs_dgrad else (None, None)
        keys = self.backward_keys(asked)
        pasts, recalled, paths = ((), _ABSENT[:2], ()) if asked.memory is None else _recalled(asked.memory)
        rows, outs = grad_output.shape
        is_small = gemm_fp8.is_small(rows, outs, ins, self.casts.backend, grad_output.device)
        told = (kernels.facts(grad_output), ins, pasts, grad_output.device, keys, dtypes if is_small else None)
        launch = kernels.resolve_fp8_backward(*told)
        outputs = launch(grad_output, inp, inp_amax, weight, weight_amax, *recalled)
        products = needs_dgrad + needs_wgrad
        backends.record(*paths, "quantize/triton", *("gemm/triton" if is_small else "gemm/fp8",) * products)
        if is_small:
            return outputs[0] if needs_dgrad else None, outputs[-1] if needs_wgrad else None
        one, *outputs = outputs
        _, *fast = self.casts.fast_accumulation
        dx = dw = None
        if weight is not None:
            dx = gemm_fp8.multiply(outputs[0], weight, outputs[1], one, None, dtypes[0], fast[0])
        if inp is not None:
            dw = gemm_fp8.multiply(outputs[-2], inp, outputs[-1], one, None, dtypes[1], fast[1])
        return dx, dw


class LinearByFP8Blocks(Way):
    """The way of PyTorch's FP8 products with block scales: one launch casts, and lays scales out for the products."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """Whether all three products fit, see :func:`fp4engine.ops.gemm_fp8.fits_blocks`."""
        return rows % 4 == outs % 16 == ins % 16 == 0 and min(rows, outs, ins) > gemm_fp8.TERMS

    @staticmethod
    def covers(casts: LayerCasts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels of block casts cover every operand, and every product is one of FP8 by block scales."""
        if casts.is_stateful or casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            if not casts_supported(*keys, source)[0]:
                return False
        products = casts.products(dtype, weight_dtype)
        return all(gemm_fp8.multiplies_blocks(left, right, device) for left, right, _ in products)

    def forward(
        self, x: Tensor, weight: Tensor | TiledOperand, bias: Tensor | None, asked: ForwardPass
    ) -> tuple[Tensor, Kept]:
        kernels = linear_kernels()
        assert isinstance(weight, Tensor) and not asked.groups, "what comes as tiles, or shares amaxes, is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(asked)
        outputs = kernels.resolve_blocks_forward(kernels.facts(x), kernels.facts(weight), x.device, keys)(x, weight)
        backends.record("quantize/triton", "quantize/triton", "gemm/fp8")
        right = 4 if asked.needs_wgrad else 1  # behind x's outputs
        *_, x_scales, weight_scales = outputs
        height = CastSpec.from_key(keys[2]).block[0]
        y = gemm_fp8.multiply_blocks(outputs[0], x_scales, outputs[right], weight_scales, height, bias, x.dtype)
        return y, outputs[1:right] + outputs[right + 1 : -2]

    def backward(self, grad_output: Tensor, kept: Kept, asked: BackwardPass) -> Gradients:
        kernels, grad_output, kept = linear_kernels(), as_it_is(grad_output), aligned(kept)
        assert not asked.groups and not asked.parts, "what comes as tiles, or shares amaxes, is FP4"
        inp, inp_scale_inv, _ = kept[:3] if asked.needs_wgrad else (None, None, None)
        weight, weight_scale_inv, _ = kept[-3:] if asked.needs_dgrad else (None, None, None)
        keys = self.backward_keys(asked)
        rng = None if asked.state is None else draw_from(asked.state)
        stream = self.backward_stream(rng is not None)
        told = (kernels.facts(grad_output), asked.ins, grad_output.device, keys, rng is not None, stream)
        outputs = kernels.resolve_blocks_backward(*told)(grad_output, inp_scale_inv, weight_scale_inv, rng)
        products = asked.needs_dgrad + asked.needs_wgrad
        backends.record("quantize/triton", *("gemm/fp8",) * products)
        gradients: list[Tensor | None] = []
        for data, left, (scales, others), spec, dtype in (
            (weight, outputs[0], outputs[products : products + 2], self.weight_spec, asked.dtypes[0]),
            (inp, outputs[products - 1], outputs[-2:], self.inp_spec, asked.dtypes[1]),
        ):
            gradient = None
            if data is not None:
                gradient = gemm_fp8.multiply_blocks(left, scales, data, others, spec.block[0], None, dtype)
            gradients.append(gradient)
        return gradients[0], gradients[1]


def _recalled(*memories: Memory | None) -> tuple[tuple[Any, ...], list[Tensor | None], list[str]]:
    """What a resolver is asked about the memories, then ``values`` and ``amax`` of each, and the paths to record."""
    past_of = linear_kernels().Past.of
    pasts: list[Any] = []
    tensors: list[Tensor | None] = []
    paths: list[str] = []
    for memory in memories:
        if memory is None:
            pasts.append(None)
            tensors += None, None
            continue
        values, amax, choice = memory
        pasts.append(past_of(values, amax, choice))
        tensors += values, amax
        paths.append("amax/triton")
        if values is not None:
            paths.append("record_amax/triton")
    return tuple(pasts), tensors, paths
