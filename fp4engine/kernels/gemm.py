"""TN GEMM with the two-level epilogue, on GPUs without FP4 units.

    alpha[m, n] = fl(fl(A_left[m] * A_right[n]) / numerator)
    y[m, n]     = round_out(fl(fl(alpha[m, n] * sum_k left[m, k] * right[n, k]) + bias[n]))

The operands are BF16 *values*, ``e2m1(code) * block_scale`` without the tensor factor. Such a value has at most six
significant bits, so it is exact in BF16 and a product of two is exact in FP32: up to the order of the FP32 sum, this
is what an FP4 tensor core computes.

Dims: M rows of left, N rows of right, K the contracted (last) axis of both.

Kernels with one epilogue, fastest first; :func:`gemm` takes the first that fits.

- :mod:`fp4engine.kernels.gemm_split`: sm_90 and newer, a small output and at least 16,384 terms per sum.
- :mod:`fp4engine.kernels.gemm_hopper`: sm_90, 16-byte aligned rows, enough output for its 128x256 tiles.
- ``_gemm_tma_kernel``: sm_90 and newer, persistent, operands through the bulk tensor copy engine.
- ``_gemm_plain_kernel``: masked loads; from sm_80 on, any stride, and in Triton's CPU interpreter.

Codes of FP8 with one scale per tensor are values of FP8. ``gemm_hopper`` multiplies them without decoding, if the
output is a new one of more than a tile or two; ``_gemm_plain_kernel`` in BF16, in which they are exact.
"""

import logging
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine import capability
from fp4engine.constants import BLOCK_SIZE
from fp4engine.kernels import gemm_split
from fp4engine.kernels.dequantize import Codes, add_decode
from fp4engine.kernels.gemm_epilogue import finish, store_tile, tile_of
from fp4engine.kernels.gemm_launch import Flags, Product, block_of
from fp4engine.kernels.launch import (
    Launch,
    LaunchBuilder,
    Matrix,
    Place,
    TensorMeta,
    capability_of,
    device_facts,
    meta_of,
    resolver,
)

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Output dtypes; each is reached from the FP32 sum by one rounding."""


class Tiles(NamedTuple):
    """One launch configuration: the output tile, the K step, and its share of a multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    cost: float
    """Time of one tile relative to one of 128x128 at the same K, measured on an H200 at M = 16 to 4096."""


@triton.jit
def _gemm_tma_kernel(
    left_desc, right_desc, out_desc, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    M, N, K, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    TMA_STORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    # The epilogue's tile index is carried apart from the loop's, so that the flattened loop may already
    # load the next tile while this one is stored.
    done = first - PROGRAMS
    for tile in tl.range(first, tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            left = left_desc.load([row, step * BLOCK_K])
            right = right_desc.load([col, step * BLOCK_K])
            acc = tl.dot(left, right.T, acc)
        done += PROGRAMS
        tile_m, tile_n = tile_of(done, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        store_tile(
            acc, row, col, out_desc, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
            LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, TMA_STORE, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def load_values(ptrs, mask):
    """Values as they are stored; codes of FP8 in BF16, where each is exact."""
    values = tl.load(ptrs, mask=mask, other=0.0)
    return values.to(tl.bfloat16) if values.dtype.is_fp8() else values


@triton.jit
def product(
    left_ptr, right_ptr, rows, cols, M, N, K, stride_left, stride_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The FP32 sum of one output tile, by masked loads."""
    k = tl.arange(0, BLOCK_K)
    left_ptrs = left_ptr + rows.to(tl.int64)[:, None] * stride_left + k[None, :]
    right_ptrs = right_ptr + cols.to(tl.int64)[:, None] * stride_right + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(0, K, BLOCK_K):
        in_k = k[None, :] < K - done
        left = load_values(left_ptrs, (rows < M)[:, None] & in_k)
        right = load_values(right_ptrs, (cols < N)[:, None] & in_k)
        if INTERPRETED:  # the interpreter's dot multiplies BF16 bit patterns
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
        left_ptrs += BLOCK_K
        right_ptrs += BLOCK_K
    return acc


@triton.jit
def _gemm_plain_kernel(
    left_ptr, right_ptr, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    M, N, K, stride_left, stride_right, stride_out,
    LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product(
        left_ptr, right_ptr, rows, cols, M, N, K, stride_left, stride_right, BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED
    )
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator, M, N, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, INTERPRETED,
    )  # fmt: skip


INTERPRETED = not isinstance(_gemm_plain_kernel, triton.JITFunction)
"""True under ``TRITON_INTERPRET=1``: kernels run on the CPU, on CPU tensors."""


def supports(
    left: torch.Tensor,
    right: torch.Tensor,
    left_amax: torch.Tensor,
    right_amax: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> tuple[bool, str]:
    """Whether :func:`gemm` takes these arguments, and if not, why: ``(True, "")`` or ``(False, reason)``."""
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
        return False, f"left [M, K] and right [N, K] must share K, got {tuple(left.shape)} and {tuple(right.shape)}"
    for name, values in (("left", left), ("right", right)):
        if values.dtype != torch.bfloat16:
            return False, f"{name} must be bfloat16 values, got {values.dtype}"
    for name, amax, rows in (("left_amax", left_amax, left.shape[0]), ("right_amax", right_amax, right.shape[0])):
        if amax.dtype != torch.float32 or amax.numel() not in (1, rows) or not amax.is_contiguous():
            return False, f"{name} must be contiguous float32 of 1 or {rows} elements, got {amax.dtype} {amax.shape}"
    if bias is not None and (bias.shape != (right.shape[0],) or not bias.is_contiguous()):
        return False, f"bias must be contiguous [{right.shape[0]}], got {tuple(bias.shape)}"
    dtype = out_dtype if out is None else out.dtype
    if dtype not in OUT_DTYPES:
        return False, f"output dtype must be one of {OUT_DTYPES}, got {dtype}"
    if out is not None:
        if out.shape != (left.shape[0], right.shape[0]):
            return False, f"out must be [{left.shape[0]}, {right.shape[0]}], got {tuple(out.shape)}"
        if out.shape[1] > 1 and out.stride(1) != 1:
            return False, f"out must be contiguous along N, got strides {out.stride()}"
    for tensor in (right, left_amax, right_amax, bias, out):
        if tensor is not None and tensor.device != left.device:
            return False, f"all tensors must be on one device, got {left.device} and {tensor.device}"
    return capability.triton_runs_on(left.device)


def gemm(
    left: torch.Tensor,
    right: torch.Tensor,
    left_amax: torch.Tensor,
    right_amax: torch.Tensor,
    numerator: float,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``round_out(alpha * left @ right.T + bias)``, or the same added to ``out`` in FP32 before the one rounding.

    Args:
        left: BF16 ``[M, K]``; any M >= 0 and K >= 0. Copied if not contiguous along K.
        right: BF16 ``[N, K]``; likewise.
        left_amax, right_amax: FP32, one element or one per row of the operand. NaN makes the output NaN.
        numerator: product of the two operands' numerators, e.g. ``2688.0 * 2688.0``; exact in FP32.
        bias: ``[N]`` of any float dtype, added in FP32.
        out_dtype: BF16, FP16 or FP32; ignored when ``out`` is given.
        out: accumulate into this ``[M, N]`` buffer and return it.

    Returns:
        ``[M, N]``. The same arguments give the same bytes.

    Raises:
        ValueError: :func:`supports` says no; the message is its reason.
    """
    ok, reason = supports(left, right, left_amax, right_amax, bias=bias, out_dtype=out_dtype, out=out)
    if not ok:
        raise ValueError(f"gemm: {reason}")
    tensors = (_along_k(left), _along_k(right), left_amax, right_amax, bias, out)
    launch = resolve_gemm(tuple(map(meta_of, tensors)), left.device, float(numerator), out_dtype)
    return launch(*tensors)[0] if out is None else (launch(*tensors), out)[1]


def _along_k(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(1) == 1 or values.shape[1] <= 1 else values.contiguous()


@resolver
def resolve_gemm(
    tensors: tuple[TensorMeta | None, ...], device: torch.device, numerator: float, out_dtype: torch.dtype
) -> Launch:
    """``(left, right, left_amax, right_amax, bias, out) -> y``, or nothing where ``out`` is given."""
    left, right, left_amax, right_amax, bias, out = tensors
    assert left is not None and right is not None and left_amax is not None and right_amax is not None
    builder = LaunchBuilder(device, inputs=6)
    places = builder.inputs
    by_rows = (left_amax.shape[0] > 1, right_amax.shape[0] > 1)
    made = add_gemm(
        builder, Matrix(places[0], left), Matrix(places[1], right), places[2], places[3], places[4] if bias else None,
        numerator, by_rows, Matrix(places[5], out) if out else None, out_dtype,
    )  # fmt: skip
    return builder.launch(*([] if out else [made.place]))


@resolver
def resolve_product(
    tensors: tuple[TensorMeta | None, ...], device: torch.device, numerator: float, out_dtype: torch.dtype
) -> Launch:
    """``(*left, *right, bias, out) -> y``, or nothing where ``out`` is given, of operands ``(data, scale_inv, amax)``.

    Operands with block scales are codes and decoded first, both at once.
    """
    builder = LaunchBuilder(device, inputs=8)
    product = product_of(builder, tensors, numerator, out_dtype)
    add_product(builder, product)
    return builder.launch(*([] if tensors[7] else [product.out.place]))


def product_of(
    builder: LaunchBuilder, tensors: tuple[TensorMeta | None, ...], numerator: float, out_dtype: torch.dtype
) -> Product:
    """The product of ``tensors``, as in :func:`resolve_product`, with operands decoded and the output declared."""
    matrices: list[Matrix] = []
    decoded: list[tuple[Codes, Place]] = []
    for first in (0, 3):
        data, scale_inv = tensors[first : first + 2]
        assert data is not None
        place = builder.inputs[first]
        if scale_inv is not None:
            rows, blocks = scale_inv.shape
            shape = (rows, blocks * BLOCK_SIZE)
            values = builder.buffer(shape, torch.bfloat16)
            decoded.append((Codes(place, builder.inputs[first + 1], rows, blocks), values))
            place, data = values, TensorMeta(shape, (shape[1], 1), torch.bfloat16, True)
        matrices.append(Matrix(place, data))
    if decoded:
        codes, outs = zip(*decoded, strict=True)
        add_decode(builder, codes, outs)
    left_amax, right_amax, bias, out = tensors[2], tensors[5], tensors[6], tensors[7]
    assert left_amax is not None and right_amax is not None
    return declared(
        builder, *matrices, builder.inputs[2], builder.inputs[5], builder.inputs[6] if bias else None, numerator,
        (left_amax.shape[0] > 1, right_amax.shape[0] > 1), Matrix(builder.inputs[7], out) if out else None, out_dtype,
    )  # fmt: skip


def add_gemm(builder: LaunchBuilder, *question: Any) -> Matrix:
    """Multiply in a launch what :func:`declared` takes; the product, or ``out``."""
    product = declared(builder, *question)
    add_product(builder, product)
    return product.out


def declared(
    builder: LaunchBuilder,
    left: Matrix,
    right: Matrix,
    left_amax: Place,
    right_amax: Place,
    bias: Place | None,
    numerator: float,
    by_rows: tuple[bool, bool],
    out: Matrix | None,
    out_dtype: torch.dtype,
) -> Product:
    """A product of a launch, into a new matrix or added to ``out``.

    Args:
        left, right: values; or codes of FP8. What one has more along K than the other is padding.
        by_rows: whether left and right have an outer amax for each row.
    """
    width = min(left.meta.shape[1], right.meta.shape[1])
    left, right = left.narrowed(width), right.narrowed(width)
    flags = Flags(*by_rows, bias is not None, out is not None)
    if out is None:
        out = builder.matrix((left.meta.shape[0], right.meta.shape[0]), out_dtype)
    return Product(left, right, out, left_amax, right_amax, bias, numerator, flags)


def add_product(builder: LaunchBuilder, product: Product) -> None:
    """Multiply in a launch, by the first kernel that fits."""
    (m, n, k), (left, right, out) = product.shape, product[:3]
    if 0 in (m, n):
        return
    copied = k > 0 and capability_of(builder.device) >= (9, 0) and left.is_aligned and right.is_aligned
    if copied and not _is_tiny(m, n, k):
        if left.meta.dtype.itemsize > 1:
            return _add_copied(builder, product)
        hopper = gluon_kernel("gemm_hopper", builder.device) if out.is_aligned else None
        if hopper is not None:
            return hopper.add_hopper(builder, product, device_facts(builder.device)[1])
    _add_plain(builder, product, _TINY_TILES if copied else _PLAIN_TILES if min(m, n) >= 128 else SMALL_TILES)


GROUP_M = 8
"""Tile rows walked together, so that programs that run at the same time share operands in L2."""

HOPPER_TILES = Tiles(128, 256, 64, 12, 4, 1.75)
_TMA_TILES = (Tiles(128, 128, 64, 4, 4, 1.0), Tiles(64, 128, 128, 4, 4, 0.6), Tiles(64, 64, 128, 4, 4, 0.5))
_PLAIN_TILES = Tiles(128, 128, 32, 8, 3, 1.0)
_TINY_TILES = Tiles(64, 64, 64, 4, 3, 0.5)
SMALL_TILES = Tiles(32, 32, 32, 4, 3, 0.3)


@cache
def choose_tiles(m: int, n: int, multiprocessors: int, hopper: bool) -> Tiles:
    """The configuration whose last wave ends first: least ``ceil(tiles / multiprocessors) * cost``; ties: larger."""
    choices = ((HOPPER_TILES,) if hopper else ()) + _TMA_TILES
    return min(choices, key=lambda tiles: -(-_count(m, n, tiles) // multiprocessors) * tiles.cost)


@cache
def gluon_kernel(module: str, device: torch.device) -> Any:
    """The module of a kernel for sm_90; None elsewhere, and, said once, if Triton's experimental Gluon has moved on."""
    if capability_of(device)[0] != 9:
        return None
    try:
        return import_module(f"fp4engine.kernels.{module}")
    except ImportError as error:
        logging.getLogger("fp4engine").warning("%s needs another Gluon (%s); a slower kernel runs", module, error)
        return None


def stages_for(tiles: Tiles, capability: int) -> int:
    """Pipeline depth: consumer Blackwell has 99 KiB of shared memory per program, the data-centre parts 227."""
    return tiles.num_stages if capability // 10 in (9, 10) else 2


def _count(m: int, n: int, tiles: Tiles) -> int:
    return -(-m // tiles.block_m) * -(-n // tiles.block_n)


def _is_tiny(m: int, n: int, k: int) -> bool:
    """Whether the product takes less time than describing its matrices to the copy engine, about 10 us on the host."""
    return m <= 128 and n <= 128 and k <= 512


def _add_copied(builder: LaunchBuilder, product: Product) -> None:
    """Add the product, computed by a kernel that reads operands through the bulk tensor copy engine."""
    m, n, k = product.shape
    aligned = product.out.is_aligned
    major, minor = capability_of(builder.device)
    _, multiprocessors = device_facts(builder.device)
    parts = gemm_split.parts_for(m, n, k, multiprocessors)
    if parts > 1:
        stages = stages_for(_TMA_TILES[0], 10 * major + minor)
        return gemm_split.add_split(builder, product, parts, num_warps=4, num_stages=stages)
    hopper = gluon_kernel("gemm_hopper", builder.device) if aligned else None
    tiles = choose_tiles(m, n, multiprocessors, hopper is not None)
    if hopper is not None and tiles is HOPPER_TILES:
        return hopper.add_hopper(builder, product, multiprocessors)
    tma_store = aligned and not product.flags.accumulate
    programs = min(multiprocessors, _count(m, n, tiles))
    builder.step(
        _gemm_tma_kernel, programs, block_of(product.left, tiles.block_m, tiles.block_k),
        block_of(product.right, tiles.block_n, tiles.block_k),
        block_of(product.out, tiles.block_m, tiles.block_n) if tma_store else None, product.out.place,
        *product.scales, m, n, k, product.out.meta.strides[0], *product.flags, tma_store,
        tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M, programs,
        num_warps=tiles.num_warps, num_stages=stages_for(tiles, 10 * major + minor),
    )  # fmt: skip


def _add_plain(builder: LaunchBuilder, product: Product, tiles: Tiles) -> None:
    m, n, k = product.shape
    strides = [matrix.meta.strides[0] for matrix in (product.left, product.right, product.out)]
    builder.step(
        _gemm_plain_kernel, _count(m, n, tiles), product.left.place, product.right.place, product.out.place,
        *product.scales, m, n, k, *strides, *product.flags, tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M,
        INTERPRETED, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
