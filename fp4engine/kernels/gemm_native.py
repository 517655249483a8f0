"""TN GEMM on FP4 tensor cores, straight from codes and block scales. Untested on hardware.

    y[m, n] = round_out(fl(fl(alpha * sum_k left[m, k] * right[n, k]) + bias[n]) (+ out[m, n]))
    left[m, k] = e2m1(left_codes[m, k]) * left_scale_inv[m, k // 16],   right likewise

Two paths with one contract: ``dot_scaled``, a Triton kernel that compiles to ``tcgen05.mma`` on sm_100 and to
``mma.sync`` on sm_120, both of kind ``mxf4nvf4``; and ``scaled_mm``, PyTorch's operator over cuBLASLt, which is the
faster one by reputation but takes no row-wise ``A``, adds bias in the output dtype and wants K a multiple of 32.

No machine with FP4 units has run either. So the first call of a path on a device multiplies a small problem whose exact
product is known and raises if any bit differs; there is no silent fallback and no tolerance.

Dims: M rows of left, N rows of right, K the contracted axis (padded to a multiple of 16), two codes to a byte.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.launch import Launch, LaunchBuilder, TensorMeta, meta_of, resolver
from fp4engine.kernels.swizzle import swizzle_scales

PATHS = ("dot_scaled", "scaled_mm")

NATIVE_MAJORS = (10, 12)
"""Compute capability majors with FP4 tensor cores: B200/B300 and RTX 50."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 128, 128, 256, 8
NUM_WARPS, NUM_STAGES = 4, 3
"""tcgen05 wants 128 rows and at least 128 along K; nothing here has been tuned on hardware."""


class Codes(NamedTuple):
    """One operand: uint8 ``[rows, K / 2]``, float8_e4m3fn ``[rows, K / 16]``, FP32 ``[1]`` or ``[rows]``."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor


@triton.jit
def gemm_dot_scaled_kernel(
    left_ptr, left_scale_ptr, right_ptr, right_scale_ptr, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    M, N, K, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    block = tl.arange(0, BLOCK_K // 16)[None, :]
    in_m = (rows < M)[:, None]
    in_n = (cols < N)[:, None]
    row = rows.to(tl.int64)[:, None]
    col = cols.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_bytes = start // 2 + byte < K // 2
        in_blocks = start // 16 + block < K // 16
        left = tl.load(left_ptr + row * (K // 2) + start // 2 + byte, mask=in_m & in_bytes, other=0)
        right = tl.load(right_ptr + col * (K // 2) + start // 2 + byte, mask=in_n & in_bytes, other=0)
        left_scale = tl.load(left_scale_ptr + row * (K // 16) + start // 16 + block, mask=in_m & in_blocks, other=0.0)
        right_scale = tl.load(right_scale_ptr + col * (K // 16) + start // 16 + block, mask=in_n & in_blocks, other=0.0)
        acc = tl.dot_scaled(left, left_scale, "e2m1", right.T, right_scale, "e2m1", acc)
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE,
    )  # fmt: skip


def supports(
    path: str,
    left: Codes,
    right: Codes,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> tuple[bool, str]:
    """Whether :func:`gemm` can take these arguments by ``path``, and if not, why."""
    if path not in PATHS:
        return False, f"path must be one of {PATHS}, got {path!r}"
    for name, operand in (("left", left), ("right", right)):
        rows, half = operand.codes.shape
        blocks = (rows, half // (BLOCK_SIZE // 2))
        if operand.codes.dtype != torch.uint8 or not operand.codes.is_contiguous() or half % (BLOCK_SIZE // 2):
            return False, f"{name} codes must be contiguous uint8 [rows, a multiple of 8], got {operand.codes.shape}"
        if operand.scale_inv.dtype != torch.float8_e4m3fn or operand.scale_inv.shape != blocks:
            return False, f"{name} scale_inv must be float8_e4m3fn {blocks}, got {operand.scale_inv.shape}"
        if not operand.scale_inv.is_contiguous():
            return False, f"{name} scale_inv must be contiguous"
        if operand.amax.dtype != torch.float32 or operand.amax.numel() not in (1, rows):
            return False, f"{name} amax must be float32 of 1 or {rows} elements, got {tuple(operand.amax.shape)}"
    if left.codes.shape[1] != right.codes.shape[1]:
        return False, f"operands must share K, got codes {left.codes.shape} and {right.codes.shape}"
    device = left.codes.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in NATIVE_MAJORS:
        return False, f"needs FP4 tensor cores (compute capability 10.x or 12.x), got {device}"
    return (True, "") if path == "dot_scaled" else _scaled_mm_supports(left, right, bias, out_dtype, out)


def _scaled_mm_supports(
    left: Codes, right: Codes, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> tuple[bool, str]:
    if left.amax.numel() != 1 or right.amax.numel() != 1:
        return False, "scaled_mm takes one A per operand, not one per row"
    if bias is not None or out is not None:
        return False, "scaled_mm would round before the bias or the buffer is added"
    if left.codes.shape[1] % 16 or right.codes.shape[0] % 16:
        k = 2 * left.codes.shape[1]
        return False, f"scaled_mm needs K divisible by 32 and N by 16, got K={k}, N={right.codes.shape[0]}"
    if 0 in left.codes.shape or 0 in right.codes.shape:
        return False, "scaled_mm is not asked for empty products"
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False, f"scaled_mm writes bfloat16, float16 or float32, got {out_dtype}"
    if not hasattr(torch.nn.functional, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
        return False, f"torch {torch.__version__} has no scaled_mm for FP4"
    return True, ""


def gemm(
    left: Codes,
    right: Codes,
    numerator: float,
    *,
    path: str = "auto",
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """The product on FP4 tensor cores: ``[M, N]``.

    Args:
        left, right: operands with M and N rows and the same K.
        numerator: product of the operands' numerators.
        path: ``dot_scaled``, ``scaled_mm``, or ``auto``: scaled_mm where it keeps the contract.
        bias: ``[N]`` of any float dtype, added in FP32.
        out_dtype: BF16, FP16 or FP32; ignored when ``out`` is given.
        out: accumulate into this ``[M, N]`` buffer and return it.

    Raises:
        ValueError: the path does not take these arguments.
        RuntimeError: the path gave a wrong product when first used on this device.
    """
    if path == "auto":
        path = path_of(left, right, bias, out_dtype, out)
    ok, reason = supports(path, left, right, bias=bias, out_dtype=out_dtype, out=out)
    if not ok:
        raise ValueError(f"native gemm: {reason}")
    check_first_use(path, left.codes.device)
    return _run(path, left, right, numerator, bias, out_dtype, out)


def path_of(left: Codes, right: Codes, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None) -> str:
    """What ``path="auto"`` is."""
    usable = supports("scaled_mm", left, right, bias=bias, out_dtype=out_dtype, out=out)[0]
    return "scaled_mm" if usable else "dot_scaled"


def _run(
    path: str,
    left: Codes,
    right: Codes,
    numerator: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    if path == "scaled_mm":
        return torch.nn.functional.scaled_mm(**scaled_mm_arguments(left, right, numerator, out_dtype))
    return _dot_scaled(left, right, numerator, bias, out_dtype, out)


def scaled_mm_arguments(left: Codes, right: Codes, numerator: float, out_dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``torch.nn.functional.scaled_mm`` for two-level NVFP4.

    The right operand goes in as ``[K, N]`` column-major, which is ``[N, K]`` as stored. ``alpha`` takes the place of
    left's global scale and one that of right's: their product is ``alpha`` exactly. PyTorch copies that product into
    one buffer per device before the call, so calls on two streams at once would share it: keep to one stream.

    Source: PyTorch ``torch/nn/functional.py`` ``scaled_mm``; ``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
    """
    from torch.nn.functional import ScalingType, SwizzleType  # absent from older torch

    alpha = left.amax.view(1) * right.amax.view(1) / torch.full_like(left.amax.view(1), numerator)
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    layout = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return dict(
        mat_a=left.codes.view(torch.float4_e2m1fn_x2),
        mat_b=right.codes.view(torch.float4_e2m1fn_x2).t(),
        scale_a=[swizzle_scales(left.scale_inv), alpha],
        scale_recipe_a=recipe,
        scale_b=[swizzle_scales(right.scale_inv), torch.ones_like(alpha)],
        scale_recipe_b=recipe,
        swizzle_a=layout,
        swizzle_b=layout,
        output_dtype=out_dtype,
    )


def _dot_scaled(
    left: Codes, right: Codes, numerator: float, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    tensors = (*left, *right, bias, out)
    launch = resolve_dot_scaled(tuple(map(meta_of, tensors)), left.codes.device, numerator, out_dtype)
    return launch(*tensors)[0] if out is None else (launch(*tensors), out)[1]


@resolver
def resolve_dot_scaled(
    tensors: tuple[TensorMeta | None, ...], device: torch.device, numerator: float, out_dtype: torch.dtype
) -> Launch:
    """``(*left, *right, bias, out) -> y``, or nothing where ``out`` is given."""
    left, _, left_amax, right, _, right_amax, bias, out = tensors
    assert left is not None and right is not None and left_amax is not None and right_amax is not None
    m, n, k = left.shape[0], right.shape[0], 2 * left.shape[1]
    builder = LaunchBuilder(device, inputs=8)
    codes, scale, amax, other_codes, other_scale, other_amax, bias_place, out_place = builder.inputs
    target = out_place if out else builder.buffer((m, n), out_dtype)
    flags = (left_amax.shape[0] > 1, right_amax.shape[0] > 1, bias is not None, out is not None)
    builder.step(
        gemm_dot_scaled_kernel, -(-m // BLOCK_M) * -(-n // BLOCK_N), codes, scale, other_codes, other_scale, target,
        amax, other_amax, bias_place if bias else None, numerator, m, n, k, out.strides[0] if out else n, *flags,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return builder.launch(*([] if out else [target]))


@cache
def check_first_use(path: str, device: torch.device) -> None:
    """Compare ``path`` with an exact product once per device.

    Every code of E2M1 and block scales of 1, 2 and 4 (which differ from row to row and block to block, so that a wrong
    swizzle shows) sum exactly in FP32 at K = 512: any order gives the same bits, and so must the device.

    Raises:
        RuntimeError: a bit differs.
    """
    left, right = _probe(160, 512, 1, device), _probe(144, 512, 2, device)
    numerator = 2.0
    exact = _decode(left) @ _decode(right).T / numerator
    actual = _run(path, left, right, numerator, None, torch.float32, None)
    wrong = int((actual.double() != exact).sum())
    if wrong:
        raise RuntimeError(
            f"native GEMM path {path!r} gives a wrong product on {device}: {wrong} of {exact.numel()} elements differ "
            "from the exact one. Use backend='triton' or 'reference', and please report the GPU and the versions of "
            f"torch ({torch.__version__}) and triton ({triton.__version__})."
        )


def _probe(rows: int, cols: int, seed: int, device: torch.device) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    exponent = torch.randint(0, 3, (rows, cols // BLOCK_SIZE), generator=generator)
    scale_inv = (2.0**exponent).to(torch.float8_e4m3fn)
    return Codes(codes.to(device), scale_inv.to(device), torch.ones(1, dtype=torch.float32, device=device))


def _decode(operand: Codes) -> Tensor:
    """The operand's values without the outer factor, in float64."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=operand.codes.device)
    nibbles = torch.stack((operand.codes & 15, operand.codes >> 4), dim=-1).flatten(1)
    return table[nibbles.long()] * operand.scale_inv.double().repeat_interleave(BLOCK_SIZE, dim=1)
