"""Products: the TN GEMM of two operands, in whichever form each is stored.

    y[m, n] = round(alpha * sum_k left[m, k] * right[n, k] + bias[n])

The outer scales are not multiplied into the operands; ``alpha`` is made from them and multiplied in the epilogue.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4engine import capability, reference
from fp4engine.arguments import require_one_of
from fp4engine.formats import E2M1, E4M3, SECOND_TERM, CastSpec, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops import gemm_fp8
from fp4engine.ops.cast import decode_supported
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, define, is_plain
from fp4engine.ops.sum_model import native_comparison
from fp4engine.private import constant_when_traced
from fp4engine.recipe.base import ACCUMULATIONS
from fp4engine.recipe.casts import unsummable

if TYPE_CHECKING:
    from fp4engine.kernels import gemm_native


def gemm(
    left: Operand,
    right: Operand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    fast_accumulation: bool = False,
    accumulation: str = "fp32",
) -> Tensor:
    """``left @ right.T`` with FP32 accumulation and one rounding: [left.rows, right.rows].

    Two unquantized operands multiply as ``torch.nn.functional.linear`` in ``out_dtype`` would, bit for bit, except that
    tensor cores sum 16-bit operands whose result is FP32.

    Args:
        left, right: operands, whose last axes are contracted; their ``cols`` must be equal.
        out_dtype: dtype of the result; ignored when ``out`` is given.
        bias: [right.rows] or None, added in FP32 before the rounding.
        out: gradient buffer [left.rows, right.rows] to add the product to, in FP32 before the one rounding.
        backend: see :func:`fp4engine.ops.backend.choose`.
        fast_accumulation: whether FP8 tensor cores may keep their sums in their shorter accumulator.
        accumulation: ``"fp32"`` sums in any order; ``"blackwell"`` sums products of quantized operands, which must be
            NVFP4, as :mod:`fp4engine.reference.blackwell` does.
    """
    if left.cols != right.cols:
        raise ValueError(
            f"gemm contracts the last axis of both operands, got left [{left.rows}, {left.cols}] "
            f"and right [{right.rows}, {right.cols}]"
        )
    if left.spec is None and right.spec is None:
        product = _dense(left.data, right.data, bias, out_dtype if out is None else torch.float32)
        return product if out is None else out.add_(product)
    if accumulation != "fp32":
        require_nvfp4(left.key, right.key, accumulation)
    device = left.data.device
    if _multiplies_fp8(left.key, right.key, device) and backend in ("auto", "native"):
        is_small = gemm_fp8.is_small(left.rows, right.rows, left.cols, backend, device)
        if not (is_small and _kernels_run(device)):
            product = _fp8(left, right, bias, out_dtype if out is None else torch.float32, fast_accumulation)
            return product if out is None else out.add_(product)
    if is_plain(left.data):
        return _product(left, right, bias, out_dtype, out, backend, accumulation)
    operands = (left.parts, left.key, right.parts, right.key)
    if out is not None:
        torch.ops.fp4engine.gemm_accumulate(out, *operands, bias, backend, accumulation)
        return out
    return torch.ops.fp4engine.gemm(*operands, bias, out_dtype, backend, accumulation)[0]


@constant_when_traced
def require_nvfp4(left: str, right: str, accumulation: str) -> bool:
    """True if ``accumulation`` sums products of operands of these specs' keys.

    Raises:
        ValueError: it does not, or there is no such word.
    """
    require_one_of("accumulation", accumulation, ACCUMULATIONS)
    for name, key in (("left", left), ("right", right)):
        if complaint := unsummable(accumulation, name, CastSpec.from_key(key) if key else None):
            raise ValueError(complaint)
    return True


@constant_when_traced
def _multiplies_fp8(left: str, right: str, device: torch.device) -> bool:
    """Whether FP8 tensor cores multiply operands of these specs' keys.

    Raises:
        ValueError: the operands are not rotated alike.
    """
    return _pair(left, right, device)


@constant_when_traced
def _kernels_run(device: torch.device) -> bool:
    return capability.triton_runs_on(device)[0]


@cache
def _pair(left: str, right: str, device: torch.device) -> bool:
    rotations = [CastSpec.from_key(key).rotation if key else None for key in (left, right)]
    if rotations[0] != rotations[1]:
        raise ValueError(
            "both operands of a GEMM must be rotated alike, or H H^T does not cancel: "
            f"left has {rotations[0]}, right has {rotations[1]}"
        )
    return gemm_fp8.supports(left, right, device)[0]


def _fp8(left: Operand, right: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    assert left.spec is not None and right.spec is not None and left.amax is not None and right.amax is not None
    plain = is_plain(left.amax)
    if plain:
        backends.record("gemm/fp8")
    alpha, one = (_scales if plain else torch.ops.fp4engine.scales)(
        left.amax, right.amax, left.spec.numerator * right.spec.numerator
    )
    return gemm_fp8.multiply(_codes(left).data, _codes(right).data, alpha, one, bias, dtype, fast_accumulation)


def _dense(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    are_16_bit = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(left.device.type, enabled=False):  # the dtype is the caller's, also in a backward pass
        # NVIDIA's tensor cores sum in FP32, in which products of 16-bit numbers are exact.
        if dtype == torch.float32 and are_16_bit and left.is_cuda and torch.version.hip is None:
            product = torch.mm(left, right.t(), out_dtype=torch.float32)
            return product if bias is None else product.add_(bias)
        added = bias if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(left.to(dtype), right.to(dtype), added)


@cache
def _supports(left: str, right: str, out_dtype: torch.dtype, plain: torch.dtype | None) -> tuple[bool, str]:
    """Whether the tensor-core product in BF16 or FP16 is exact for operands of these specs and roundings."""
    if out_dtype not in backends.KERNEL_DTYPES:
        return False, f"output dtype {out_dtype}"
    specs = [CastSpec.from_key(key) for key in (left, right) if key]
    if values_dtype(left, right) == torch.float16:
        for spec in specs:
            if not spec.is_exact_in_fp16:
                return False, f"one operand needs FP16, and values of {spec.key} are not exact there"
        if len(specs) == 1:
            return False, f"one operand needs FP16, and the other is {plain} that is not quantized"
        return True, ""
    for spec in specs:
        if not spec.is_exact_in_bf16 and not spec.factor_group:
            return False, f"values of {spec.key} are not exact in BF16"
    if not (left and right) and plain != torch.bfloat16:
        return False, f"a {plain} operand that is not quantized is not BF16"
    return True, ""


@cache
def values_dtype(left: str, right: str) -> torch.dtype:
    """The dtype in which kernels multiply values of operands of these specs' keys: FP16 if one of them needs it."""
    dtypes = {CastSpec.from_key(key).values_dtype for key in (left, right) if key}
    return torch.float16 if torch.float16 in dtypes else torch.bfloat16


@cache
def product_path(
    left: str,
    right: str,
    are_codes: bool,
    out_dtype: torch.dtype,
    device: torch.device,
    backend: str,
    plain: torch.dtype | None = None,
) -> tuple[str, str, float, bool]:
    """How two operands are multiplied.

    Returns:
        The implementation, empty if ``backend`` allows none; why a faster one is not used; the product of the operands'
        numerators; whether it is Triton's kernel for operands with FP32 factors.

    Args:
        left, right: keys of the operands' specs, empty for an unquantized one.
        are_codes: whether both operands are codes.
        plain: dtype of an unquantized operand.
    """
    specs = [CastSpec.from_key(key) if key else None for key in (left, right)]
    numerator = 1.0
    for spec in specs:
        numerator *= 1.0 if spec is None or spec.outer is Outer.BLOCK128 else spec.numerator
    if backend in ("auto", "native"):
        able, reason = _native_supports(specs, device)
        if able and are_codes:
            return "native", "", numerator, False
        if backend == "native":
            return "", reason or "an operand holds values, not codes", numerator, False
    path, reason = backends.decide(device, backend, (left, right, out_dtype, plain), _supports)
    return path, reason, numerator, path == "triton" and any(spec is not None and spec.factor_group for spec in specs)


def _native_supports(specs: list[CastSpec | None], device: torch.device) -> tuple[bool, str]:
    """Whether FP4 tensor cores multiply operands of these specs on ``device``."""
    units, reason = capability.fp4_units(device)
    if not units:
        return False, reason
    for spec in specs:
        is_fp4 = spec is not None and (spec.element.term, spec.scale) == (E2M1, E4M3)
        if spec is None or not is_fp4 or spec.outer is Outer.BLOCK128:
            what = "an unquantized operand" if spec is None else spec.key
            return False, f"FP4 tensor cores multiply E2M1 with E4M3 block scales, got {what}"
    return True, ""


def _ready(operand: Operand, path: str, dtype: torch.dtype) -> Operand:
    """The operand as the product of ``path`` reads it: values (FP32 for the reference), or codes that kernels decode.

    Args:
        dtype: of the values that kernels multiply.
    """
    spec, _, _, data, scale_inv, amax = operand
    if spec is not None and path == "triton":
        if scale_inv is not None and dtype == torch.bfloat16 and decode_supported(spec.key)[0]:
            return operand
        if scale_inv is None and data.dtype == dtype and data.stride(1) == 1:
            return operand
    if spec is None:
        data = data.to(dtype) if path == "triton" else data
        amax = torch.ones(1, dtype=torch.float32, device=data.device)
    elif scale_inv is not None and path == "triton":
        data, scale_inv = _decoded(data, scale_inv, spec.key, dtype), None
    elif path == "triton":
        data = data.to(dtype)
    elif scale_inv is not None:
        data, scale_inv = reference.decode(data, scale_inv, spec), None
    if spec is not None and spec.outer is Outer.BLOCK128:
        assert amax is not None
        data = data * reference.outer_factor(amax, spec)
        amax = torch.ones(1, dtype=torch.float32, device=data.device)
    if data.shape[1] > 1 and data.stride(1) != 1:
        data = data.contiguous()
    return operand._replace(data=data, scale_inv=scale_inv, amax=amax)


def _codes(operand: Operand) -> Operand:
    """An operand of FP8 with one scale per tensor, as the kernels read its codes."""
    assert operand.spec is not None
    return operand._replace(data=operand.data.view(operand.spec.element.torch_dtype), scale_inv=None)


def _decoded(data: Tensor, scale_inv: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """The values that codes decode to, in ``dtype`` and without FP32 factors."""
    from fp4engine.kernels.block_decode import block_decode

    return block_decode(data, scale_inv, key, dtype)


def _product(
    left: Operand,
    right: Operand,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    backend: str,
    accumulation: str,
) -> Tensor:
    left_key, right_key, device = left.key, right.key, left.data.device
    are_codes = left.scale_inv is not None and right.scale_inv is not None
    by_blocks = backend in ("auto", "native") and are_codes and gemm_fp8.multiplies_blocks(left_key, right_key, device)
    if by_blocks and gemm_fp8.fits_blocks(left.data, right.data):
        product = _fp8_blocks(left, right, bias, out_dtype if out is None else torch.float32)
        return product if out is None else out.add_(product)
    plain = None if left_key and right_key else right.data.dtype if left_key else left.data.dtype
    asked = (left_key, right_key, are_codes, out_dtype, device, backend, plain)
    path, reason, numerator, factored = product_path(*asked)
    backends.enter("gemm", path, reason, backend)
    if path == "native":
        return _native(left, right, numerator, bias, out_dtype, out, accumulation)
    if path == "triton" and bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if factored:
        return _factored(left, right, numerator, bias, out_dtype, out)
    dtype = values_dtype(left_key, right_key)
    if path == "triton" and backend == "auto" and gemm_fp8.supports(left_key, right_key, device)[0]:
        left, right = _codes(left), _codes(right)  # of a small product, or PyTorch would multiply
    else:
        left, right = _ready(left, path, dtype), _ready(right, path, dtype)
    if path == "triton":
        from fp4engine.kernels.launch import meta_of

        if accumulation == "fp32":
            from fp4engine.kernels.gemm import resolve_product as resolve
        else:
            from fp4engine.kernels.gemm_blackwell import resolve_blackwell as resolve
        inputs = (left.data, left.scale_inv, left.amax, right.data, right.scale_inv, right.amax, bias, out)
        asked = tuple([None if tensor is None else meta_of(tensor) for tensor in inputs])
        made = resolve(asked, device, numerator, out_dtype)(*inputs)
        return made[0] if out is None else out
    assert left.amax is not None and right.amax is not None
    width = min(left.data.shape[1], right.data.shape[1])  # the columns that only one of them has are padding
    values = (left.data[:, :width], right.data[:, :width])
    alpha = reference.gemm_factor(left.amax, right.amax, numerator)
    product = reference.gemm(*values, alpha, bias, out_dtype if out is None else torch.float32, accumulation)
    return product if out is None else out.add_(product)


def _native(
    left: Operand,
    right: Operand,
    numerator: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    accumulation: str,
) -> Tensor:
    """Multiply on FP4 tensor cores: one product for each pair of terms, added in FP32 and rounded once.

    ``accumulation="blackwell"`` is what these tensor cores do. How it compares with the model is found out first.
    """
    from fp4engine.kernels import gemm_native

    pairs = itertools.product(_terms(left), _terms(right))
    products = [(a, b, factor * other) for (a, factor), (b, other) in pairs]
    first, second, _ = products[0]
    if len(products) == 1:
        if accumulation == "blackwell":
            native_comparison(gemm_native.path_of(first, second, bias, out_dtype, out), left.data.device)
        return gemm_native.gemm(first, second, numerator, bias=bias, out_dtype=out_dtype, out=out)
    total = gemm_native.gemm(first, second, numerator, out_dtype=torch.float32)
    for first, second, factor in products[1:]:
        gemm_native.gemm(first, second, numerator * factor, out=total)
    if bias is not None:
        total += bias
    return total.to(out_dtype) if out is None else out.add_(total)


def _terms(operand: Operand) -> Iterator[tuple["gemm_native.Codes", float]]:
    """The codes of each term, and the number by which products with them are divided."""
    from fp4engine.kernels import gemm_native

    spec, _, _, data, scale_inv, amax = operand
    assert spec is not None and scale_inv is not None and amax is not None
    if spec.element.terms == 1:
        yield gemm_native.Codes(data, scale_inv, amax), 1.0
    else:
        yield gemm_native.Codes(reference.pack(data & 0xF), scale_inv, amax), 1.0
        yield gemm_native.Codes(reference.pack(data >> 4), scale_inv, amax), float(SECOND_TERM)


def _fp8_blocks(left: Operand, right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A product of FP8 codes with block scales, which multiply sums of 128 terms; the outer factor is 1."""
    backends.record("gemm/fp8")
    assert left.scale_inv is not None and right.scale_inv is not None and right.spec is not None
    height = right.spec.block[0]
    scales = gemm_fp8.block_scales(left.scale_inv, right.scale_inv, height)
    return gemm_fp8.multiply_blocks(left.data, scales[0], right.data, scales[1], height, bias, dtype)


def _factored(
    left: Operand, right: Operand, numerator: float, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """A product in which one operand or both have an FP32 factor for every few terms."""
    from fp4engine.kernels import gemm_factors
    from fp4engine.kernels.launch import meta_of

    inputs: list[Tensor | None] = []
    factors_of: list[gemm_factors.Factors] = []
    for operand in (left, right):
        spec, factors, numerator_of_factors = operand.spec, None, 1.0
        if spec is not None and spec.factor_group:
            factors = operand.scale_inv
            if spec.outer is Outer.BLOCK128:
                factors, numerator_of_factors = operand.amax, spec.numerator
                operand = operand._replace(amax=torch.ones(1, dtype=torch.float32, device=operand.data.device))
            assert factors is not None, "values with FP32 block scales have been rounded"
        if operand.scale_inv is not None:
            values = _decoded(operand.data, operand.scale_inv, operand.key, torch.bfloat16)
            operand = operand._replace(data=values, scale_inv=None)
        operand = _ready(operand, "triton", torch.bfloat16)
        inputs += [operand.data, factors, operand.amax]
        factors_of.append(gemm_factors.Factors(spec.factor_group if spec else 0, numerator_of_factors))
    inputs += [bias, out]
    asked = tuple([None if tensor is None else meta_of(tensor) for tensor in inputs])
    left_factors, right_factors = factors_of
    launch = gemm_factors.resolve_factored(asked, left.data.device, left_factors, right_factors, numerator, out_dtype)
    made = launch(*inputs)
    return made[0] if out is None else out


def _operand(key: str, parts: list[Tensor]) -> Operand:
    """An operand for a product, which does not need its logical width."""
    data, scale_inv, amax = parts if len(parts) == 3 else (parts[0], None, parts[1] if key else None)
    return Operand(CastSpec.from_key(key) if key else None, data.shape[0], data.shape[1], data, scale_inv, amax)


def _gemm(
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    accumulation: str,
) -> list[Tensor]:
    operands = _operand(left_spec, left), _operand(right_spec, right)
    return [_product(*operands, bias, out_dtype, None, backend, accumulation)]


def _gemm_accumulate(
    out: Tensor,
    left: list[Tensor],
    left_spec: str,
    right: list[Tensor],
    right_spec: str,
    bias: Tensor | None,
    backend: str,
    accumulation: str,
) -> None:
    operands = _operand(left_spec, left), _operand(right_spec, right)
    _product(*operands, bias, out.dtype, out, backend, accumulation)


def _scales(left_amax: Tensor, right_amax: Tensor, numerator: float) -> list[Tensor]:
    """``alpha`` [1, 1] and one [1, 1]: the two scales that an FP8 product takes."""
    if capability.triton_runs_on(left_amax.device)[0]:
        from fp4engine.kernels.factor import factor

        return factor(left_amax, right_amax, numerator)
    alpha = reference.gemm_factor(left_amax, right_amax, numerator)
    return [alpha, torch.ones_like(alpha)]


def _gemm_outputs(left: list[Tensor], right: list[Tensor], out_dtype: torch.dtype) -> list[Output]:
    return [Output((left[0].shape[0], right[0].shape[0]), out_dtype)]


define(_gemm, _gemm_outputs)
define(_gemm_accumulate, None, mutates_args=("out",))
define(_scales, lambda: [Output((1, 1), torch.float32)] * 2)
