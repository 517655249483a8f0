"""Products of each expert's operands, with the experts' row counts on the device.

    y[m]  = round(alpha[e] * sum_k left[m, k] * right[e][:, k] + bias[e])    m a row of expert e       forward, dgrad
    dw[e] = round(alpha[e] * sum_m left[e][:, m] * right[e][:, m])           m over the rows of e      wgrad

A tile is one of :mod:`fp4engine.kernels.gemm`: the same epilogue, the K steps in the same order. So on one GPU an
expert's product has the bytes of a GEMM on its rows alone. Where that splits K (:mod:`fp4engine.kernels.gemm_split`), a
program here adds up the same parts, one after another. :mod:`fp4engine.kernels.grouped` says where things lie.

Legend: M rows of all experts, G experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.kernels import gemm_split
from fp4engine.kernels.dequantize import Codes, add_decode
from fp4engine.kernels.gemm import GROUP_M, INTERPRETED, SMALL_TILES, Tiles, product, stages_for
from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.grouped import find, max_tiles, vector_size
from fp4engine.kernels.launch import (
    Launch,
    LaunchBuilder,
    Place,
    TensorMeta,
    capability_of,
    device_facts,
    meta_of,
    resolver,
)

SPLIT_M, SPLIT_N, SPLIT_K, SHORTEST_K, SHORTEST_PART = (
    tl.constexpr(gemm_split.BLOCK_M), tl.constexpr(gemm_split.BLOCK_N), tl.constexpr(gemm_split.BLOCK_K),
    tl.constexpr(gemm_split.SHORTEST_K), tl.constexpr(gemm_split.SHORTEST_PART),
)  # fmt: skip


@triton.jit
def split_product(
    left_ptr, right_ptr, rows, cols, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """:func:`fp4engine.kernels.gemm.product` of matrices [M, K] and [N, K], contiguous, in as many parts as alone.

    ``SPLIT``: the number of multiprocessors, which decides that; 0 where no product can be long enough.
    """
    if SPLIT == 0:
        return product(left_ptr, right_ptr, rows, cols, M, N, K, K, K, BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED)
    else:
        tiles = tl.cdiv(M, SPLIT_M) * tl.cdiv(N, SPLIT_N)  # the rest is gemm_split.parts_for
        parts = tl.where(K < SHORTEST_K, 1, tl.maximum(tl.minimum(SPLIT // tiles, K // SHORTEST_PART), 1))
        each = tl.cdiv(tl.cdiv(K, SPLIT_K), parts) * SPLIT_K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(0, parts):
            begin = part * each
            depth = tl.multiple_of(tl.minimum(K - begin, each), 16)
            total += product(
                left_ptr + begin,
                right_ptr + begin,
                rows,
                cols,
                M,
                N,
                depth,
                K,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                INTERPRETED,
            )
        return total


@triton.jit(do_not_specialize=["groups", "tiles_m"])
def grouped_gemm_kernel(
    left_ptr, right_ptr, out_ptr, offsets_ptr, left_amax_ptr, right_amax_ptr, bias_ptr, numerator,
    N, K, groups, tiles_m,
    HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``left`` [M, K], ``right`` [G N, K], ``out`` [M, N], contiguous. Rows of no expert become NaN."""
    tile_m, tile_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, first, count, row0 = find(offsets_ptr, tile_m, groups, GROUPS, BLOCK_M)
    if row0 >= count:
        return
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptr += first * N
    if expert == groups:
        nothing = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        pointers = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(pointers, nothing, mask=(rows < count)[:, None] & (cols < N)[None, :])
        return
    left_ptr += first * K
    right_ptr += expert.to(tl.int64) * N * K
    acc = split_product(left_ptr, right_ptr, rows, cols, count, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, INTERPRETED)
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * N
    finish(
        acc, rows, cols, out_ptr, left_amax_ptr + expert, right_amax_ptr + expert, bias_ptr, numerator, count, N, N,
        False, False, HAS_BIAS, False, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["expert0"])
def grouped_wgrad_kernel(
    left_ptr, right_ptr, out_ptr, offsets_ptr, left_amax_ptr, right_amax_ptr, numerator, M, N, stride_out, expert0,
    ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Columnwise operands ``left`` [M, P] and ``right`` [N, P]; ``out`` holds [M, N] of expert ``expert0`` and on."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    expert = expert0 + index
    first = tl.load(offsets_ptr + expert)
    blocks = (tl.load(offsets_ptr + expert + 1) - first + 15) // 16
    K = blocks.to(tl.int32) * 16
    begin = (first // 16 + expert) * 16
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    left_ptr += begin * M
    right_ptr += begin * N
    acc = split_product(left_ptr, right_ptr, rows, cols, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, INTERPRETED)
    finish(
        acc, rows, cols, out_ptr + index.to(tl.int64) * M * stride_out, left_amax_ptr + expert, right_amax_ptr + expert,
        None, numerator, M, N, stride_out, False, False, False, ACCUMULATE, INTERPRETED,
    )  # fmt: skip


class Operand(NamedTuple):
    """Values, and the amax of each expert, in a launch; decoded from codes where it needs to be."""

    values: Place
    rows: int
    width: int
    amax: Place


def _operand(builder: LaunchBuilder, tensors: tuple[TensorMeta, ...], first: int) -> tuple[Operand, Codes | None]:
    """The operand ``(values, amax)`` or ``(codes, scale_inv, amax)`` from input ``first`` on, and what to decode."""
    if len(tensors) == 2:
        return Operand(builder.inputs[first], *tensors[0].shape, builder.inputs[first + 1]), None
    rows, blocks = tensors[1].shape
    values = builder.buffer((rows, blocks * BLOCK_SIZE), torch.bfloat16)
    codes = Codes(builder.inputs[first], builder.inputs[first + 1], rows, blocks)
    return Operand(values, rows, blocks * BLOCK_SIZE, builder.inputs[first + 2]), codes


def _operands(
    builder: LaunchBuilder, left: tuple[TensorMeta, ...], right: tuple[TensorMeta, ...]
) -> tuple[Operand, Operand]:
    """Both operands, the first inputs of a launch."""
    made = (_operand(builder, left, 0), _operand(builder, right, len(left)))
    decoded = [(codes, operand.values) for operand, codes in made if codes is not None]
    if decoded:
        codes, outs = zip(*decoded, strict=True)
        add_decode(builder, codes, outs)
    return made[0][0], made[1][0]


@resolver
def resolve_grouped_gemm(
    left: tuple[TensorMeta, ...],
    right: tuple[TensorMeta, ...],
    bias: TensorMeta | None,
    device: torch.device,
    groups: int,
    numerator: float,
    out_dtype: torch.dtype,
) -> Launch:
    """``(*left, *right, offsets, bias) -> y``."""
    builder = LaunchBuilder(device, inputs=len(left) + len(right) + 2)
    offsets, bias_place = builder.inputs[-2:]
    first, second = _operands(builder, left, right)
    rows, depth, cols = first.rows, first.width, second.rows // groups
    out = builder.buffer((rows, cols), out_dtype)
    tiles, options = _tiles(device, rows // groups)
    tiles_m = max_tiles(rows, groups, tiles.block_m)
    builder.step(
        grouped_gemm_kernel, tiles_m * -(-cols // tiles.block_n), first.values, second.values, out, offsets,
        first.amax, second.amax, bias_place if bias else None, numerator, cols, depth, groups, tiles_m,
        bias is not None, vector_size(groups), tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M,
        _split(device, 1, cols, depth), INTERPRETED, **options,
    )  # fmt: skip
    return builder.launch(out)


Tensors = Sequence[Tensor]
"""``(values, amax)`` or ``(codes, scale_inv, amax)``: contiguous BF16, or what it decodes from, and FP32 [G]."""


def grouped_gemm(
    left: Tensors, right: Tensors, offsets: Tensor, bias: Tensor | None, numerator: float, out_dtype: torch.dtype
) -> Tensor:
    """[M, N]: the rows of each expert times its matrix, and NaN in rows of none.

    Args:
        left: [M, K].
        right: [G N, K]: the experts' matrices below each other.
        offsets: of :func:`fp4engine.kernels.grouped.offsets`.
        bias: [G, N] or None, contiguous.
        numerator: product of the operands' numerators.
        out_dtype: BF16, FP16 or FP32.
    """
    question = (tuple(map(meta_of, left)), tuple(map(meta_of, right)), meta_of(bias), left[0].device, len(offsets) - 2)
    (out,) = resolve_grouped_gemm(*question, numerator, out_dtype)(*left, *right, offsets, bias)
    return out


@resolver
def resolve_grouped_wgrad(
    left: tuple[TensorMeta, ...],
    right: tuple[TensorMeta, ...],
    outs: tuple[TensorMeta, ...],
    device: torch.device,
    groups: int,
    experts: tuple[int, ...],
    numerator: float,
    out_dtype: torch.dtype,
) -> Launch:
    """``(*left, *right, offsets, *outs) -> dw`` of all experts, or nothing where ``experts`` have an out."""
    builder = LaunchBuilder(device, inputs=len(left) + len(right) + 1 + len(outs))
    offsets = builder.inputs[len(left) + len(right)]
    first, second = _operands(builder, left, right)
    rows, cols = first.rows, second.rows
    tiles, options = _tiles(device, rows)
    programs = -(-rows // tiles.block_m) * -(-cols // tiles.block_n)
    split = _split(device, rows, cols, first.width)
    if outs:
        places = builder.inputs[len(left) + len(right) + 1 :]
        work = [(place, out.strides[0], expert, 1) for place, out, expert in zip(places, outs, experts, strict=True)]
    else:
        work = [(builder.buffer((groups, rows, cols), out_dtype), cols, 0, groups)]
    for out, stride, expert, count in work:
        builder.step(
            grouped_wgrad_kernel, count * programs, first.values, second.values, out, offsets, first.amax, second.amax,
            numerator, rows, cols, stride, expert, bool(outs), tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M,
            split, INTERPRETED, **options,
        )  # fmt: skip
    return builder.launch(*([] if outs else [work[0][0]]))


def grouped_wgrad(left: Tensors, right: Tensors, offsets: Tensor, numerator: float, out_dtype: torch.dtype) -> Tensor:
    """[G, M, N], zeros for an expert without rows.

    Args:
        left, right: columnwise operands [M, P] and [N, P], one expert after another.
        offsets, numerator, out_dtype: as in :func:`grouped_gemm`.
    """
    question = (tuple(map(meta_of, left)), tuple(map(meta_of, right)), (), left[0].device, len(offsets) - 2, ())
    (out,) = resolve_grouped_wgrad(*question, numerator, out_dtype)(*left, *right, offsets)
    return out


def grouped_wgrad_accumulate(
    outs: dict[int, Tensor], left: Tensors, right: Tensors, offsets: Tensor, numerator: float
) -> None:
    """Add :func:`grouped_wgrad`'s products of some experts to ``outs[expert]``, in FP32 before the one rounding.

    Raises:
        ValueError: a buffer is not contiguous along N.
    """
    for expert, out in outs.items():
        if out.shape[1] > 1 and out.stride(1) != 1:
            raise ValueError(f"the buffer of expert {expert} must be contiguous along N, got strides {out.stride()}")
    buffers = list(outs.values())
    question = (tuple(map(meta_of, left)), tuple(map(meta_of, right)), tuple(map(meta_of, buffers)), left[0].device)
    launch = resolve_grouped_wgrad(*question, len(offsets) - 2, tuple(outs), numerator, torch.float32)
    launch(*left, *right, offsets, *buffers)


def _split(device: torch.device, rows: int, cols: int, depth: int) -> int:
    """SPLIT of :func:`split_product` for at least ``rows`` by ``cols`` numbers, sums of at most ``depth`` terms."""
    if INTERPRETED or capability_of(device) < (9, 0):
        return 0
    _, multiprocessors = device_facts(device)
    return multiprocessors if gemm_split.parts_for(rows, cols, depth, multiprocessors) > 1 else 0


LARGE_TILES = Tiles(128, 128, 64, 8, 4, 1.0)
TILES = Tiles(64, 128, 64, 4, 4, 0.6)


def _tiles(device: torch.device, rows: int) -> tuple[Tiles, dict[str, int]]:
    """The tiles for about ``rows`` rows, and launch options. The interpreter has one choice: its sums depend on it."""
    if INTERPRETED:
        return SMALL_TILES, {}
    tiles = LARGE_TILES if rows >= LARGE_TILES.block_m else TILES
    major, minor = capability_of(device)
    return tiles, {"num_warps": tiles.num_warps, "num_stages": stages_for(tiles, 10 * major + minor)}
