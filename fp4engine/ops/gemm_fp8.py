"""FP8 products on the tensor cores of Ada, Hopper and Blackwell, through PyTorch's ``_scaled_mm``.

    y = round(alpha * (left @ right.T) + bias),   alpha = (A_left * A_right) / (numerator_left * numerator_right)

Only operands with one scale per tensor: their codes are FP8 values as they are.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine import capability, reference
from fp4engine.formats import E4M3, E5M2, CastSpec, Outer

_MULTIPLE = 16
"""``_scaled_mm`` takes multiples of 16 as K and N; codes are padded along K already."""


@cache
def supports(left: str, right: str, device: torch.device) -> tuple[bool, str]:
    """Whether FP8 tensor cores multiply operands of these specs' keys (empty: unquantized), and if not, why."""
    specs = [CastSpec.from_key(key) if key else None for key in (left, right)]
    for spec in specs:
        if spec is None or spec.block != (0, 0) or spec.outer is not Outer.TENSOR or spec.rotation is not None:
            return False, f"FP8 products take one scale per tensor and no rotation, got {spec and spec.label}"
        if spec.element not in (E4M3, E5M2):
            return False, f"FP8 products take e4m3 and e5m2, got {spec.element}"
    if all(spec is not None and spec.element == E5M2 for spec in specs):
        return False, "the tensor cores do not multiply e5m2 with e5m2"
    return capability.fp8_units(device)


def multiply(
    left: Tensor,
    right: Tensor,
    alpha: Tensor,
    one: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """``alpha * (left @ right.T) + bias``, rounded once to ``out_dtype``: [M, N].

    Args:
        left: [M, K] and right: [N, K], ``float8_e4m3fn`` or ``float8_e5m2``, K a multiple of 16.
        alpha, one: FP32 [1, 1]; the product's two scales.
        fast_accumulation: keep the sums in the tensor core's own accumulator instead of adding them up in FP32.
    """
    rows, columns = left.shape[0], right.shape[0]
    if 0 in (rows, columns, left.shape[1]):
        return reference.gemm(left, right, alpha, bias, out_dtype)
    if columns % _MULTIPLE:
        right = pad(right.view(torch.uint8), (0, 0, 0, -columns % _MULTIPLE)).view(right.dtype)
    fused = bias is not None and out_dtype != torch.float32
    product = torch._scaled_mm(
        left,
        right.T,
        scale_a=alpha,
        scale_b=one,
        bias=pad(bias.to(out_dtype), (0, -columns % _MULTIPLE)) if bias is not None and fused else None,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    if product.shape[1] != columns:
        product = product[:, :columns]
    return product if bias is None or fused else product + bias.float()
