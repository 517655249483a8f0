"""A linear layer's forward, and its backward, with one launch for all of its casts: where the host is the limit.

The bytes are those of :mod:`fp4engine.ops.cast` and :mod:`fp4engine.ops.gemm`, whose kernels run. Legend: x is [M, K],
weight [N, K].
"""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine import capability
from fp4engine.formats import CastSpec
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.cast import as_it_is, decode_supported, transient_form
from fp4engine.ops.gemm import product_path
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import is_plain
from fp4engine.ops.rng import rank_bits

MOST_HELD = 16 << 20
"""Bytes of values that one launch may hold longer than single operations would."""

Gradients = tuple[Tensor | None, Tensor | None]
Kept = tuple[Operand | None, Operand | None]


class Casts(NamedTuple):
    """The six casts of a linear layer and what else its products depend on.

    Attributes:
        inp, weight, grad_output: keys of the rowwise and the columnwise spec of each role.
        streams: stream ids of the roles.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: of fprop, dgrad and wgrad, see :func:`fp4engine.ops.gemm`.
    """

    inp: tuple[str, str]
    weight: tuple[str, str]
    grad_output: tuple[str, str]
    streams: tuple[int, int, int]
    backend: str
    fast_accumulation: tuple[bool, bool, bool]

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
        if any(transient_form(key, device, casts.backend) != "values" for key in transient):
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
        self, x: Tensor, weight: Tensor, bias: Tensor | None, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[Tensor, Kept]:
        """``y = x @ weight.T + bias``, and the operands that backward needs: of x for wgrad, of weight for dgrad."""
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
        self, grad_output: Tensor, kept: Kept, rng: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> Gradients:
        """``dx = dy @ weight`` and ``dw = dy.T @ x``, each in its dtype, if what it needs was kept.

        Args:
            grad_output: [M, N].
            kept: from :meth:`forward`; one operand at least.
            rng: int64 [2], the draw of a stochastic cast.
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
        self, x: Tensor, weight: Tensor, bias: Tensor | None, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[Tensor, Kept]:
        """As :meth:`LinearByValues.forward`."""
        casts, kernels = self.casts, _kernels()
        x, weight = as_it_is(x), as_it_is(weight)
        keys = (casts.inp[0], casts.inp[1] * needs_wgrad, casts.weight[0], casts.weight[1] * needs_dgrad)
        asked = (kernels.facts(x), kernels.facts(weight), x.device, keys)
        outputs = kernels.resolve_fp8_forward(*asked)(x, weight)
        backends.record("quantize", "triton", 2)
        right = 4 if needs_wgrad else 1  # behind x's outputs
        y = self._multiply(0, outputs[0], outputs[right], outputs[-2:], bias, x.dtype)
        inp = _kept(keys[1], x, outputs[1:4]) if needs_wgrad else None
        return y, (inp, _kept(keys[3], weight, outputs[-5:-2]) if needs_dgrad else None)

    def backward(
        self, grad_output: Tensor, kept: Kept, rng: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> Gradients:
        """As :meth:`LinearByValues.backward`."""
        casts, kernels, (inp, weight) = self.casts, _kernels(), kept
        grad_output = as_it_is(grad_output)
        keys = (*casts.grad_output, casts.inp[1] if inp else "", casts.weight[1] if weight else "")
        asked = (kernels.facts(grad_output), grad_output.device, keys)
        amaxes = (inp and inp.amax, weight and weight.amax)
        outputs = kernels.resolve_fp8_backward(*asked)(grad_output, *amaxes)
        backends.record("quantize", "triton")
        dx = dw = None
        if weight is not None:
            dx = self._multiply(1, outputs[0], weight.data, outputs[1:3], None, dtypes[0])
        if inp is not None:
            dw = self._multiply(2, outputs[-3], inp.data, outputs[-2:], None, dtypes[1])
        return dx, dw

    def _multiply(
        self, which: int, left: Tensor, right: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """fprop, dgrad or wgrad, of codes; ``factors``: alpha and one."""
        backends.record("gemm", "fp8")
        left_type, right_type = _element_types(self.casts)[which]
        alpha, one = factors
        fast = self.casts.fast_accumulation[which]
        return gemm_fp8.multiply(left.view(left_type), right.view(right_type), alpha, one, bias, dtype, fast)


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


@cache
def _element_types(casts: Casts) -> list[tuple[torch.dtype, torch.dtype]]:
    """PyTorch's dtypes of the codes of each product."""
    return [
        (CastSpec.from_key(left).element.torch_dtype, CastSpec.from_key(right).element.torch_dtype)
        for left, right, _ in casts.products(torch.float32, torch.float32)
    ]


def _kept(key: str, tensor: Tensor, outputs: list[Tensor]) -> Operand:
    """The columnwise operand of ``tensor`` [rows, cols]."""
    return Operand(CastSpec.from_key(key), tensor.shape[1], tensor.shape[0], *outputs)


@cache
def _kernels() -> ModuleType:
    from fp4engine.kernels import linear

    return linear
