"""Normalisation of the last axes, with TransformerEngine's zero-centred gamma."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import is_number, require_bool, require_one_of
from fp4engine.ops.fused_input import row_statistics

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class LayerNormFunction(torch.autograd.Function):
    """``F.layer_norm`` of a 16-bit tensor on a CPU, with gradients that are summed in FP32 and rounded once.

    On CPUs PyTorch's kernel sums the gradients of the parameters in 16 bits. As the sum grows, it rounds away the terms
    of further rows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, gamma.shape, gamma, beta, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta = ctx.saved_tensors
        x, gamma, beta = x.float(), gamma.float(), None if beta is None else beta.float()
        grad, shape, wanted = grad_outputs[0].float(), gamma.shape, ctx.needs_input_grad[:3]
        _, mean, rstd = torch.native_layer_norm(x, shape, gamma, beta, ctx.eps)
        grads = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, gamma, beta, wanted)
        dtype = grad_outputs[0].dtype
        return *(part.to(dtype) if needed else None for part, needed in zip(grads, wanted, strict=True)), None


@dataclass(frozen=True)
class Norm:
    """How to normalise.

        LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * g + b
        RMSNorm    y =  x / sqrt(mean(x^2) + eps) * g                 g = gamma, or 1 + gamma if zero-centred

    Attributes:
        kind: one of :data:`NORMALIZATIONS`.
        eps: added under the root.
        zero_centered_gamma: whether gamma is stored less one.

    Raises:
        ValueError: unknown kind, an ``eps`` that is no number of at least 0, or a flag that is no bool.
    """

    kind: str
    eps: float
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        require_one_of("normalization", self.kind, NORMALIZATIONS)
        if not (is_number(self.eps) and 0 <= self.eps < math.inf):
            raise ValueError(f"eps must be a finite number of at least 0, got {self.eps!r}")
        require_bool("zero_centered_gamma", self.zero_centered_gamma)

    @property
    def has_bias(self) -> bool:
        return self.kind == "LayerNorm"

    @property
    def initial_gamma(self) -> float:
        """The initial gamma, by which the norm scales by 1: 0 if gamma is zero-centred, else 1."""
        return 0.0 if self.zero_centered_gamma else 1.0

    def __call__(self, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        """Normalise x [..., *gamma.shape].

        If x and gamma have one dtype and gamma is not zero-centred, the bits equal those of PyTorch's own function.

        Raises:
            ValueError: x is no tensor, or holds integers, booleans or FP8, to which the result would be rounded; gamma
                or beta does not fit it.
        """
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor, got {type(x).__name__}")
        dtype = x.dtype
        if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
            raise ValueError(f"x must be floating point, of 16 bits or more, got {dtype}")
        _require_parameters(x, gamma, beta)
        if self.zero_centered_gamma or dtype != gamma.dtype:
            # In BF16, 1 + gamma would keep eight bits of gamma.
            wide = torch.promote_types(torch.promote_types(dtype, gamma.dtype), torch.float32)
            x, gamma, beta = x.to(wide), gamma.to(wide), None if beta is None else beta.to(wide)
        if self.zero_centered_gamma:
            gamma = gamma + 1
        if self.kind == "LayerNorm":
            if x.dtype in (torch.bfloat16, torch.float16) and not x.is_cuda and torch.is_grad_enabled():
                return LayerNormFunction.apply(x, gamma, beta, self.eps)
            return F.layer_norm(x, gamma.shape, gamma, beta, self.eps).to(dtype)
        return F.rms_norm(x, gamma.shape, gamma, self.eps).to(dtype)

    @property
    def kernel(self) -> str:
        """The norm's name in :mod:`fp4engine.kernels`."""
        return self.kind

    is_gated = False

    def vectors(self, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The factor and the addend that kernels apply, FP32 if gamma is zero-centred."""
        return gamma.float() + 1 if self.zero_centered_gamma else gamma, beta

    def is_fusable(self, dtype: torch.dtype) -> bool:
        """Whether kernels compute this norm for an input in ``dtype``."""
        return True

    def source(self, x: Tensor, dtype: torch.dtype, gamma: Tensor, beta: Tensor | None) -> tuple[ops.Source, Tensor]:
        """The norm of x [M, K] as a source for the cast to ``dtype``, and the rows' statistics for backward.

        Raises:
            ValueError: gamma or beta does not fit x.
        """
        _require_parameters(x, gamma, beta)
        statistics = row_statistics(x, self.eps, self.has_bias)
        return ops.Source(x, dtype, self.kind, False, statistics, *self.vectors(gamma, beta)), statistics

    def gradients(
        self, grad: Tensor, x: Tensor, parameters: tuple[Tensor | None, ...], statistics: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x [M, K], gamma and beta from ``grad``, the gradient of the norm's output [M, K]."""
        gamma, beta = parameters
        assert gamma is not None and statistics is not None
        given = (x, gamma) if beta is None else (x, gamma, beta)
        if x.is_cuda:
            grads = self._gradients_by_statistics(grad, given, statistics)
        else:  # on CPUs PyTorch has no kernel for RMSNorm, and sums the gradients of parameters in their own dtype
            dtypes = [t.dtype for t in given]
            wide = torch.promote_types(torch.promote_types(x.dtype, gamma.dtype), torch.float32)
            given = tuple(t.detach().to(wide).requires_grad_() for t in given)
            with torch.enable_grad():
                output = self(*given, *([None] if beta is None else []))
            grads = torch.autograd.grad(output, given, grad.to(wide))
            grads = tuple(t.to(dtype) for t, dtype in zip(grads, dtypes, strict=True))
        return (*grads, None) if beta is None else grads

    def _gradients_by_statistics(
        self, grad: Tensor, given: tuple[Tensor, ...], statistics: Tensor
    ) -> tuple[Tensor, ...]:
        dtypes = [t.dtype for t in given]
        is_wide = self.zero_centered_gamma or set(dtypes) != {grad.dtype}
        if is_wide:
            grad, given = grad.float(), tuple(t.float() for t in given)
        x, gamma, *beta = given
        if self.zero_centered_gamma:
            gamma = gamma + 1
        shape, (rstd, mean) = gamma.shape, statistics.unbind()
        if beta:
            wanted = [True, True, True]
            grads = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, gamma, *beta, wanted)
        else:
            grads = torch.ops.aten._fused_rms_norm_backward(grad, x, shape, rstd, gamma, [True, True])
        return tuple(t.to(dtype) for t, dtype in zip(grads, dtypes, strict=True)) if is_wide else tuple(grads)


def _require_parameters(x: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    """Raise a ValueError unless gamma and beta, which users know as weight and bias, fit the last dimensions of x."""
    for name, parameter in (("weight", gamma), ("bias", beta)):
        if parameter is None:
            continue
        if parameter.shape != x.shape[x.ndim - gamma.ndim :] or not gamma.ndim:
            shape = f"the last dimensions of an input {list(x.shape)}"
            raise ValueError(f"the {name} of a norm must have the shape of {shape}, got {list(parameter.shape)}")
        if not parameter.is_floating_point() and not x.is_complex():
            raise ValueError(f"the {name} of a norm must be floating point, got {parameter.dtype}")
