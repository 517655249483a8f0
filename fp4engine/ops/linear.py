"""A linear layer's forward, and its backward, with one launch for all of its casts: where the host is the limit.

The bytes are those of :mod:`fp4engine.ops.cast` and :mod:`fp4engine.ops.gemm`, whose kernels run. Legend: x is [M, K],
weight [N, K].
"""

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.amax_history import Memory
from fp4engine.ops.cast import as_it_is, decode_supported, transient_form
from fp4engine.ops.gemm import product_path
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import is_plain
from fp4engine.ops.rng import rank_bits

MOST_HELD = 16 << 20
"""Bytes of values that one launch may hold longer than single operations would."""

Gradients = tuple[Tensor | None, Tensor | None]
Kept = tuple[Operand | None, Operand | None]
Memories = tuple[Memory | None, Memory | None]


class Casts(NamedTuple):
    """The six casts of a linear layer and what else its products depend on.

    Attributes:
        inp, weight, grad_output: keys of the rowwise and the columnwise spec of each role.
        streams: stream ids of the roles.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: of fprop, dgrad and wgrad, see :func:`fp4engine.ops.gemm`.
        is_stateful: whether scales of some are made of amaxes of earlier steps.
    """

    inp: tuple[str, str]
    weight: tuple[str, str]
    grad_output: tuple[str, str]
    streams: tuple[int, int, int]
    backend: str
    fast_accumulation: tuple[bool, bool, bool]
    is_stateful: bool = False

    def products(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[tuple[str, str, torch.dtype]]:
        """Keys of left and right, and the result's dtype, of fprop, dgrad and wgrad."""
        return [
            (self.inp[0], self.weight[0], dtype),
            (self.grad_output[0], self.weight[1], dtype),
            (self.grad_output[1], self.inp[1], weight_dtype),
        ]


class LinearByValues:
    """By kernels that multiply BF16 values: casts, decodes and products are one launch each way."""

    def __init__(self, casts: Casts) -> None:
        self.casts = casts

    @staticmethod
    def takes(x: Tensor, weight: Tensor) -> bool:
        """Whether the layer is small: a large one gains nothing, and one launch holds all its operands at once."""
        return 2 * min(x.shape[0], weight.shape[0]) * weight.shape[1] <= MOST_HELD

    @staticmethod
    def covers(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
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

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """``y = x @ weight.T + bias``, and the operands that backward needs: of x for wgrad, of weight for dgrad.

        Args:
            memories: of x and weight, where delayed scaling scales them.
        """
        casts, kernels = self.casts, _kernels()
        x, weight = as_it_is(x), as_it_is(weight)
        bias = bias if bias is None else bias.contiguous()
        keys = (casts.inp[0], casts.inp[1] * needs_wgrad, casts.weight[0], casts.weight[1] * needs_dgrad)
        facts = kernels.facts
        asked = (facts(x), facts(weight), facts(bias), x.device, keys, casts.streams[:2], x.dtype)
        outputs = kernels.resolve_forward(*asked)(x, weight, bias)
        backends.record("quantize", "triton", 2)
        backends.record("gemm", "triton")
        inp = _kept(keys[1], x, outputs[:3]) if needs_wgrad else None
        return outputs[-1], (inp, _kept(keys[3], weight, outputs[-4:-1]) if needs_dgrad else None)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """``dx = dy @ weight`` and ``dw = dy.T @ x``, each in its dtype, if what it needs was kept.

        Args:
            grad_output: [M, N].
            kept: from :meth:`forward`; one operand at least.
            rng: int64 [2], the draw of a stochastic cast.
            memory: of ``grad_output``, where delayed scaling scales it.
        """
        casts, kernels, (inp, weight) = self.casts, _kernels(), kept
        grad_output = as_it_is(grad_output)
        shapes = (inp and (inp.rows, inp.cols), weight and (weight.rows, weight.cols))
        stream = casts.streams[2] if rng is None else casts.streams[2] | rank_bits()
        keys = (*casts.grad_output, casts.inp[1], casts.weight[1])
        asked = (kernels.facts(grad_output), grad_output.device, shapes, keys, rng is not None, stream, dtypes)
        tensors = (inp.tensors if inp else _ABSENT) + (weight.tensors if weight else _ABSENT)
        outputs = kernels.resolve_backward(*asked)(grad_output, *tensors, rng)
        backends.record("quantize", "triton")
        backends.record("gemm", "triton", len(outputs))
        return outputs[0] if weight else None, outputs[-1] if inp else None


_ABSENT = (None, None, None)


class LinearByFP8:
    """By PyTorch's FP8 products: casts, and the factors of the products that follow, are one launch each way."""

    def __init__(self, casts: Casts) -> None:
        self.casts = casts

    @staticmethod
    def takes(x: Tensor, weight: Tensor) -> bool:
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
        weight: Tensor,
        bias: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        memories: Memories | None = None,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        casts, kernels = self.casts, _kernels()
        x, weight = as_it_is(x), as_it_is(weight)
        keys = (casts.inp[0], casts.inp[1] * needs_wgrad, casts.weight[0], casts.weight[1] * needs_dgrad)
        past_x, values_x, amax_x = _recalled(memories[0]) if memories else _ABSENT
        past_w, values_w, amax_w = _recalled(memories[1]) if memories else _ABSENT
        asked = (kernels.facts(x), kernels.facts(weight), (past_x, past_w), x.device, keys)
        outputs = kernels.resolve_fp8_forward(*asked)(x, weight, values_x, amax_x, values_w, amax_w)
        backends.record("quantize", "triton", 2)
        backends.record("gemm", "fp8")
        right = outputs[3 if needs_wgrad else 1]  # behind x's outputs
        y = gemm_fp8.multiply(outputs[0], right, outputs[-2], outputs[-1], bias, x.dtype, casts.fast_accumulation[0])
        inp = _codes(keys[1], x, outputs[1:3]) if needs_wgrad else None
        return y, (inp, _codes(keys[3], weight, outputs[-4:-2]) if needs_dgrad else None)

    def backward(
        self,
        grad_output: Tensor,
        kept: Kept,
        rng: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: Memory | None = None,
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        casts, kernels, (inp, weight) = self.casts, _kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = (*casts.grad_output, casts.inp[1] if inp else "", casts.weight[1] if weight else "")
        past, values, amax = _recalled(memory)
        asked = (kernels.facts(grad_output), past, grad_output.device, keys)
        amaxes = (inp and inp.amax, weight and weight.amax)
        one, *outputs = kernels.resolve_fp8_backward(*asked)(grad_output, *amaxes, values, amax)
        backends.record("quantize", "triton")
        backends.record("gemm", "fp8", len(outputs) // 2)
        _, *fast = casts.fast_accumulation
        dx = dw = None
        if weight is not None:
            dx = gemm_fp8.multiply(outputs[0], weight.data, outputs[1], one, None, dtypes[0], fast[0])
        if inp is not None:
            dw = gemm_fp8.multiply(outputs[-2], inp.data, outputs[-1], one, None, dtypes[1], fast[1])
        return dx, dw


LinearAtOnce = LinearByValues | LinearByFP8


def linear_at_once(casts: Casts, x: Tensor, weight: Tensor) -> LinearAtOnce | None:
    """What computes ``x @ weight.T`` and its gradients with few launches; None where single operations have to.

    Args:
        x: of any rank; only a matrix is taken.
    """
    if x.ndim != 2 or not is_plain(x) or not is_plain(weight):
        return None
    found = _find(casts, x.dtype, weight.dtype, x.device)
    return found if found is not None and found.takes(x, weight) else None


@cache
def _find(casts: Casts, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> LinearAtOnce | None:
    for left, right, _ in casts.products(dtype, weight_dtype):
        if CastSpec.from_key(left).rotation != CastSpec.from_key(right).rotation:
            return None  # the product itself says what is wrong
    for kind in (LinearByValues, LinearByFP8):
        if kind.covers(casts, dtype, weight_dtype, device):
            return kind(casts)
    return None


def _kept(key: str, tensor: Tensor, outputs: list[Tensor]) -> Operand:
    """The columnwise operand of ``tensor`` [rows, cols]."""
    return Operand(CastSpec.from_key(key), tensor.shape[1], tensor.shape[0], *outputs)


def _codes(key: str, tensor: Tensor, outputs: list[Tensor]) -> Operand:
    """The columnwise operand of ``tensor`` [rows, cols], for a product that takes FP8 as it is: no block scales."""
    data, amax = outputs
    return Operand(CastSpec.from_key(key), tensor.shape[1], tensor.shape[0], data, None, amax)


def _recalled(memory: Memory | None) -> tuple[Any, Tensor | None, Tensor | None]:
    """What a launch is asked about a memory that it will recall, and its two tensors."""
    if memory is None:
        return _ABSENT
    kernels, (values, amax, choice) = _kernels(), memory
    backends.record("amax", "triton")
    if values is not None:
        backends.record("record_amax", "triton")
    return kernels.Past(kernels.facts(values), kernels.facts(amax), choice), values, amax


@cache
def _kernels() -> ModuleType:
    from fp4engine.kernels import linear

    return linear
