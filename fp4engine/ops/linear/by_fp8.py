"""A linear layer by PyTorch's FP8 products: with one scale per tensor, and with block scales."""

from typing import Any

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.cast import as_it_is, casts_supported
from fp4engine.ops.linear.way import Casts, Gradients, Kept, Memories, Way, both, linear_kernels
from fp4engine.ops.tiles import TiledOperand

_ABSENT = (None, None, None, None)
"""Values and amaxes of two memories that are not there."""


class LinearByFP8(Way):
    """By PyTorch's FP8 products: casts, and the factors of the products that follow, are one launch each way."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """True: whatever its size, the same operands live as long as without."""
        return True

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the FP8 kernel casts every operand, by its own unrounded amax, and every product is FP8."""
        if casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        from fp4engine.kernels.cast_fp8 import supports

        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            specs = [CastSpec.from_key(key) for key in keys]
            if any(spec.scale_rule.is_power_of_two or not supports(spec, source)[0] for spec in specs):
                return False
        return all(gemm_fp8.supports(left, right, device)[0] for left, right, _ in casts.products(dtype, weight_dtype))

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        kernels = linear_kernels()
        assert isinstance(weight, Tensor), "what comes as tiles is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(needs_dgrad, needs_wgrad)
        pasts, recalled = ((), _ABSENT) if memories is None else _recalled(*memories)
        asked = (kernels.facts(x), kernels.facts(weight), pasts, x.device, keys)
        codes, weight_codes, alpha, one, *made = kernels.resolve_fp8_forward(*asked)(x, weight, *recalled)
        backends.record("quantize/triton", "quantize/triton", "gemm/fp8")
        y = gemm_fp8.multiply(codes, weight_codes, alpha, one, bias, x.dtype, self.casts.fast_accumulation[0])
        return y, both(unscaled(made), needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        kernels, (inp, _, inp_amax, weight, _, weight_amax) = linear_kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = self.backward_keys(inp, weight)
        pasts, recalled = ((), _ABSENT[:2]) if memory is None else _recalled(memory)
        asked = (kernels.facts(grad_output), pasts, grad_output.device, keys)
        one, *outputs = kernels.resolve_fp8_backward(*asked)(grad_output, inp_amax, weight_amax, *recalled)
        backends.record("quantize/triton", *("gemm/fp8",) * (len(outputs) // 2))
        _, *fast = self.casts.fast_accumulation
        dx = dw = None
        if weight is not None:
            dx = gemm_fp8.multiply(outputs[0], weight, outputs[1], one, None, dtypes[0], fast[0])
        if inp is not None:
            dw = gemm_fp8.multiply(outputs[-2], inp, outputs[-1], one, None, dtypes[1], fast[1])
        return dx, dw


class LinearByFP8Blocks(Way):
    """By PyTorch's FP8 products with block scales: casts, and the scales as the products read them, are one launch."""

    @staticmethod
    def takes(rows: int, outs: int, ins: int) -> bool:
        """Whether all three products fit, see :func:`fp4engine.ops.gemm_fp8.fits_blocks`."""
        return rows % 4 == outs % 16 == ins % 16 == 0 and min(rows, outs, ins) > gemm_fp8.TERMS

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels of block casts cover every operand, and every product is one of FP8 by block scales."""
        if casts.is_stateful or casts.backend not in ("auto", "native") or not capability.triton_runs_on(device)[0]:
            return False
        for keys, source in ((casts.inp, dtype), (casts.weight, weight_dtype), (casts.grad_output, dtype)):
            if not casts_supported(*keys, source)[0]:
                return False
        products = casts.products(dtype, weight_dtype)
        return all(gemm_fp8.multiplies_blocks(left, right, device) for left, right, _ in products)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        kernels = linear_kernels()
        assert isinstance(weight, Tensor), "what comes as tiles is FP4"
        x, weight = as_it_is(x), as_it_is(weight)
        keys = self.forward_keys(needs_dgrad, needs_wgrad)
        outputs = kernels.resolve_blocks_forward(kernels.facts(x), kernels.facts(weight), x.device, keys)(x, weight)
        backends.record("quantize/triton", "quantize/triton", "gemm/fp8")
        right = 4 if needs_wgrad else 1  # behind x's outputs
        *_, x_scales, weight_scales = outputs
        height = CastSpec.from_key(keys[2]).block[0]
        y = gemm_fp8.multiply_blocks(outputs[0], x_scales, outputs[right], weight_scales, height, bias, x.dtype)
        return y, both(outputs[1:right] + outputs[right + 1 : -2], needs_dgrad, needs_wgrad)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        ins: int,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        kernels, (inp, inp_scale_inv, _, weight, weight_scale_inv, _) = linear_kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = self.backward_keys(inp, weight)
        stream = self.backward_stream(rng)
        asked = (kernels.facts(grad_output), ins, grad_output.device, keys, rng is not None, stream)
        outputs = kernels.resolve_blocks_backward(*asked)(grad_output, inp_scale_inv, weight_scale_inv, rng)
        backends.record("quantize/triton", *("gemm/fp8",) * (len(outputs) // 3))
        gradients: list[Tensor | None] = []
        for data, (left, scales, others), spec, dtype in (
            (weight, outputs[:3], self.weight_spec, dtypes[0]),
            (inp, outputs[-3:], self.inp_spec, dtypes[1]),
        ):
            gradient = None
            if data is not None:
                gradient = gemm_fp8.multiply_blocks(left, scales, data, others, spec.block[0], None, dtype)
            gradients.append(gradient)
        return gradients[0], gradients[1]


def unscaled(made: list[Tensor]) -> list[Tensor | None]:
    """Of ``made``, data and amax of FP8 operands, what is kept: there are no block scales."""
    kept: list[Tensor | None] = []
    for i in range(0, len(made), 2):
        kept += made[i], None, made[i + 1]
    return kept


def _recalled(*memories: Memory | None) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """What a launch is asked about memories that it will recall; and of each values and amax."""
    past_of = linear_kernels().Past.of
    pasts: list[Any] = []
    tensors: list[Tensor | None] = []
    for memory in memories:
        if memory is None:
            pasts.append(None)
            tensors += None, None
            continue
        pasts.append(past_of(*memory))
        tensors += memory[:2]
        backends.record(*("amax/triton", "record_amax/triton")[: 1 if memory.values is None else 2])
    return tuple(pasts), tensors
