"""Weights that are multiplied as NVFP4 under scales that train::

    q = e * s * (A / numerator),   e = E2M1(w / (s * A / numerator)),   s = E4M3(2^block),   A = 2^outer

``block`` and ``outer`` are parameters, one number for each block and one for the weight. Gradients are as in
learned step sizes (LSQ): with ``g = dL/dq``, and ``v`` the quotient that ``e`` was rounded from::

    dL/dw = g                where |v| <= 6, else 0
    dL/d(2^block)  ~  g * (q - w)   where |v| <= 6, else g * q

summed over a block, or over the weight for ``outer``, and divided by ``sqrt(6 n)`` for ``n`` elements. The logarithm
keeps a scale positive, and makes a step of an optimizer a share of the scale, whatever its size.

Source: Esser et al., arXiv 1902.08153, equations 3 and 5, and section 2.2 for the division.

Legend: N out_features, K in_features.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from fp4engine.constants import E2M1_MAX, E4M3_MAX
from fp4engine.formats import E2M1, CastSpec, RoundingMode
from fp4engine.reference import pack
from fp4engine.reference.rounding import decode, encode
from fp4engine.reference.scaling import divide, element_encode_scale, encode_scale
from fp4engine.state import current_state
from fp4engine.tensor import Operand

LEAST_SCALE = 2.0**-9
"""The smallest positive E4M3 number: below it a block would be zero for good."""


class LearnedScales(nn.Module):
    """A parametrization of a weight [N, K]: what it decodes to under scales that train.

    Args:
        operand: the weight, cast to NVFP4, which the scales start from.
        learn: ``"block"``, ``"outer"`` or both; the others stay what they were.
        outer: the parameter of a sibling that shares the outer scale; None makes one.

    Attributes:
        block: logarithms to base 2 of the block scales, FP32 [N / block rows, K / 16].
        outer: logarithm to base 2 of the outer amax, FP32 [1].
        recipe: what the module follows once the scales have been learned; set from outside.
    """

    recipe: Any = None

    def __init__(self, operand: Operand, learn: tuple[str, ...], outer: nn.Parameter | None = None) -> None:
        super().__init__()
        assert operand.spec is not None and operand.scale_inv is not None and operand.amax is not None
        self.spec: CastSpec = operand.spec
        stored = operand.scale_inv[:: self.spec.block[0]].float().clamp(min=LEAST_SCALE)
        self.block = nn.Parameter(stored.log2(), requires_grad="block" in learn)
        if outer is None:
            amax = torch.where(operand.amax > 0, operand.amax, self.spec.numerator)
            outer = nn.Parameter(amax.log2(), requires_grad="outer" in learn)
        self.outer = outer

    def forward(self, weight: Tensor) -> Tensor:
        """[N, K] -> [N, K], in the weight's dtype.

        Raises:
            RuntimeError: an autocast region is in force, by whose recipe the result would be cast a second time.
        """
        state = current_state()
        if state is not None and state.enabled:
            raise RuntimeError(
                "a weight that learns its scales has its own recipe, and autocast would cast what it decodes to a "
                f"second time by {state.recipe!r}; leave the region, or enter autocast(enabled=False)"
            )
        return _Learned.apply(weight, self.block, self.outer, self.spec)

    @torch.no_grad()
    def operand(self, weight: Tensor) -> Operand:
        """Codes and scales of a weight [N, K]: what :meth:`forward` decodes."""
        codes, scales, _ = _cast(weight, self.block, self.outer, self.spec)
        amax = self.outer.float().exp2()
        rows, cols = weight.shape
        return Operand(self.spec, rows, cols, pack(codes), scales.to(torch.float8_e4m3fn), amax)


def scales_of(module: nn.Module) -> LearnedScales | None:
    """Those that the weight of ``module`` learns; None if it learns none."""
    chain = parametrization_of(module)
    last = None if chain is None else chain[-1]
    return last if isinstance(last, LearnedScales) else None


def parametrization_of(module: nn.Module) -> ParametrizationList | None:
    """What computes the weight of ``module`` at each use; None if it is a parameter."""
    if not is_parametrized(module, "weight"):
        return None
    chain: Any = module.parametrizations
    return chain["weight"]


def _cast(weight: Tensor, block: Tensor, outer: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Unpacked codes [N, K], block scales [N, K / 16] as E4M3's FP32 values, and ``v`` [N, K]."""
    rows, cols = weight.shape
    stored = block.float().exp2().clamp(LEAST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn).float()
    scales = stored.repeat_interleave(spec.block[0], dim=0)[:rows]
    factor = element_encode_scale(scales, encode_scale(outer.float().exp2(), spec.numerator))
    quotient = (weight.float().view(rows, -1, spec.block[1]) * factor[..., None]).view(rows, cols)
    return encode(quotient, E2M1, RoundingMode.EVEN, None, 0), scales, quotient


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, block: Tensor, outer: Tensor, spec: CastSpec) -> Tensor:
        codes, scales, quotient = _cast(weight, block, outer, spec)
        elements = decode(codes, E2M1).view(*scales.shape, -1)
        values = elements * scales[..., None] * divide(outer.float().exp2(), spec.numerator)
        ctx.spec, ctx.rows = spec, block.shape
        inside = quotient.abs() <= E2M1_MAX
        ctx.save_for_backward(weight, values.view_as(weight), inside)
        return values.view_as(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (grad,) = grad_outputs
        weight, values, inside = ctx.saved_tensors
        by_weight = torch.where(inside, grad, 0) if ctx.needs_input_grad[0] else None
        by_block = by_outer = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            of_scale = grad.float() * torch.where(inside, values - weight.float(), values) * math.log(2)
            height, width = ctx.spec.block
            padded = nn.functional.pad(of_scale, (0, 0, 0, -weight.shape[0] % height))
            sums = padded.view(ctx.rows[0], height, ctx.rows[1], width).sum((1, 3))
            by_block = sums / (E2M1_MAX * height * width) ** 0.5 if ctx.needs_input_grad[1] else None
            by_outer = sums.sum().reshape(1) / (E2M1_MAX * weight.numel()) ** 0.5
        return by_weight, by_block, by_outer, None
