"""FP8 products on the tensor cores of Ada, Hopper and Blackwell: which are a kernel's, and PyTorch's scaled products.

    y = round(alpha * (left @ right.T) + bias),   alpha = (A_left * A_right) / (numerator_left * numerator_right)

Operands with one scale per tensor, whose codes are FP8 values for tensor cores. On Hopper also E4M3 with one scale
for 128 terms of a row, or of 128 rows: tensor cores then add up 128 terms, and FP32 adds these sums times their scales.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from fp4engine import capability, private, reference
from fp4engine.constants import FP8_TILE
from fp4engine.formats import E4M3, E5M2, E8M0, FP32, CastSpec, Outer
from fp4engine.private import constant_when_traced

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
    if private.scaled_mm is None:
        return False, f"torch {torch.__version__} has no _scaled_mm"
    return capability.fp8_units(device)


LONGEST = 256
"""The largest M, N and K of a product that a kernel computes on any GPU; a multiple of what K is padded to."""
STEPS = 128
"""The most steps of :data:`FP8_TILE` terms that a multiprocessor of a Hopper takes one after the other: 50 us or so."""


def is_small(rows: int, columns: int, terms: int, backend: str, device: torch.device) -> bool:
    """Whether a product with one scale per tensor is a kernel's, which can be part of a launch, and not PyTorch's.

    A call of PyTorch's takes the host 40 us or more, and its operands are tensors of their own; a kernel more in a
    launch takes about 5. So the GPU waits for the host in a layer whose products are all this small. The answer is the
    same for all three products of a layer: it does not depend on the order of the sizes.
    """
    if backend != "auto":
        return False
    if rows <= LONGEST and columns <= LONGEST and terms <= LONGEST:
        return True
    multiprocessors = _multiprocessors(device)
    if multiprocessors == 0 or rows % _MULTIPLE or columns % _MULTIPLE or terms % _MULTIPLE:
        return False
    products = ((rows, columns, terms), (rows, terms, columns), (columns, terms, rows))
    return all(_steps(*sizes, multiprocessors) <= STEPS for sizes in products)


def _steps(m: int, n: int, k: int, multiprocessors: int) -> int:
    """Steps that a multiprocessor takes one after the other."""
    tiles = -(-m // FP8_TILE) * -(-n // FP8_TILE)
    return -(-tiles // multiprocessors) * -(-k // FP8_TILE)


@constant_when_traced
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU with a kernel that multiplies FP8 codes on FP8 tensor cores; 0 for any other device."""
    return _hopper(device)


@cache
def _hopper(device: torch.device) -> int:
    if not (capability.is_hopper(device) and capability.triton_runs_on(device)[0]):
        return 0
    from fp4engine.kernels.gemm import gluon_kernel
    from fp4engine.kernels.launch import device_facts

    return device_facts(device)[1] if gluon_kernel("gemm_hopper", device) else 0


TERMS = 128
"""Terms that share a block scale."""


@cache
def multiplies_blocks(left: str, right: str, device: torch.device) -> bool:
    """Whether FP8 tensor cores multiply operands of these specs' keys by block scales, where :func:`fits_blocks`."""
    if not all(key and has_blocks(key, device) for key in (left, right)):
        return False
    heights = CastSpec.from_key(left).block[0], CastSpec.from_key(right).block[0]
    return heights in ((1, 1), (1, TERMS))


@cache
def has_blocks(key: str, device: torch.device) -> bool:
    """Whether codes of this spec are what a product by block scales on ``device`` reads."""
    spec = CastSpec.from_key(key)
    blocks = spec.block in ((1, TERMS), (TERMS, TERMS)) and spec.scale in (E8M0, FP32) and spec.outer is Outer.NONE
    if not blocks or spec.element != E4M3 or spec.rotation is not None:
        return False
    return capability.is_hopper(device) and _cuda_version() >= (12, 9)


def _cuda_version() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0").split(".")))


def fits_blocks(left: Tensor, right: Tensor) -> bool:
    """Whether :func:`multiply_blocks` takes codes [M, K] and [N, K]: M a multiple of 4, N one of 16, K over 128.

    Both are contiguous. The scales of a single group are a vector, and PyTorch cannot see on which side its neighbours
    lie.
    """
    rows, columns = left.shape[0], right.shape[0]
    fits = min(rows, columns) > 0 and rows % 4 == 0 and columns % _MULTIPLE == 0 and left.shape[1] > TERMS
    return fits and left.is_contiguous() and right.is_contiguous()


def block_scales(left: Tensor, right: Tensor, height: int) -> list[Tensor]:
    """The scales of both operands as :func:`multiply_blocks` takes them.

    cuBLAS reads 1x128 scales with neighbouring rows side by side, and tiles' scales with neighbouring groups side by
    side, padded to four.

    Args:
        left: [M, K / 128]; right: [N, K / 128], the same in each ``height`` rows. E8M0 or FP32.
        height: 1 or 128.
    """
    if capability.triton_runs_on(left.device)[0]:
        from fp4engine.kernels.block_scales import block_scales as by_kernel

        return by_kernel(left, right, height)
    rows = left.float().t().contiguous()
    if height == 1:
        return [rows, right.float().t().contiguous()]
    tiles = right[::height].float()
    return [rows, pad(tiles, (0, -tiles.shape[1] % 4))]


def multiply_blocks(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    height: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``sum over groups of (left @ right.T) * scales + bias``, in FP32 and rounded once to ``out_dtype``: [M, N].

    Args:
        left: [M, K] and right: [N, K], codes of E4M3, uint8, K a multiple of 128; see :func:`fits_blocks`.
        left_scales, right_scales: from :func:`block_scales`.
        height: of the right operand's blocks, 1 or 128.
    """
    left, right = left.view(torch.float8_e4m3fn), right.view(torch.float8_e4m3fn).t()
    of_rows = ScalingType.BlockWise1x128
    of_right = of_rows if height == 1 else ScalingType.BlockWise128x128
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 and bias is None else torch.float32
    product = scaled_mm(left, right, left_scales.t(), of_rows, right_scales.t(), of_right, output_dtype=dtype)
    if bias is not None:
        product = product + bias.float()
    return product if product.dtype == out_dtype else product.to(out_dtype)


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
    columns = right.shape[0]
    if left.numel() == 0 or columns == 0:
        return reference.gemm(left, right, alpha, bias, out_dtype)
    fused = bias if out_dtype != torch.float32 else None
    if columns % _MULTIPLE:
        right = pad(right.view(torch.uint8), (0, 0, 0, -columns % _MULTIPLE)).view(right.dtype)
        fused = fused if fused is None else pad(fused, (0, -columns % _MULTIPLE))
    assert private.scaled_mm is not None
    product = private.scaled_mm(
        left,
        right.T,
        scale_a=alpha,
        scale_b=one,
        bias=fused if fused is None else fused.to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    if columns % _MULTIPLE:
        product = product[:, :columns]
    return product if bias is None or fused is not None else product + bias.float()
