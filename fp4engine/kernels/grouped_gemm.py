"""Products of each expert's operands, with the experts' row counts on the device.

    y[m]  = round(alpha[e] * sum_k left[m, k] * right[e][:, k] + bias[e])    m a row of expert e       forward, dgrad
    dw[e] = round(alpha[e] * sum_m left[e][:, m] * right[e][:, m])           m over the rows of e      wgrad

A tile is one of :mod:`fp4engine.kernels.gemm`: the same epilogue, the K steps in the same order. So on one GPU an
expert's product has the bytes of a GEMM on its rows alone. Where that splits K (:mod:`fp4engine.kernels.gemm_split`), a
program here adds up the same parts, one after another. :mod:`fp4engine.kernels.grouped` says where things lie.

Legend: M rows of all experts, G experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.kernels import gemm_split
from fp4engine.kernels.gemm import GROUP_M, INTERPRETED, SMALL_TILES, Tiles, product, stages_for
from fp4engine.kernels.gemm_epilogue import finish, tile_of
from fp4engine.kernels.gemm_launch import capability_of
from fp4engine.kernels.grouped import find, max_tiles, vector_size
from fp4engine.kernels.launch import device_facts
from fp4engine.kernels.start import start

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
        False, False, HAS_BIAS, False,
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
        None, numerator, M, N, stride_out, False, False, False, ACCUMULATE,
    )  # fmt: skip


def grouped_gemm(
    left: Tensor,
    right: Tensor,
    left_amax: Tensor,
    right_amax: Tensor,
    offsets: Tensor,
    numerator: float,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[M, N]: the rows of each expert times its matrix, and NaN in rows of none.

    Args:
        left: BF16 values [M, K], contiguous.
        right: BF16 values [G N, K], contiguous: the experts' matrices below each other.
        left_amax, right_amax: FP32 [G].
        offsets: of :func:`fp4engine.kernels.grouped.offsets`.
        numerator: product of the operands' numerators.
        bias: [G, N] or None, contiguous.
        out_dtype: BF16, FP16 or FP32.
    """
    rows, depth = left.shape
    groups = len(offsets) - 2
    cols = right.shape[0] // groups
    # The interpreter truncates FP32 -> BF16, so there it writes FP32 and torch rounds.
    out = torch.empty(rows, cols, dtype=torch.float32 if INTERPRETED else out_dtype, device=left.device)
    tiles, options = _tiles(left.device, rows // groups)
    split = _split(left.device, 1, cols, depth)
    tiles_m = max_tiles(rows, groups, tiles.block_m)
    start(
        grouped_gemm_kernel, tiles_m * -(-cols // tiles.block_n),
        (left, right, out, offsets, left_amax, right_amax, bias), (numerator, cols, depth, groups, tiles_m),
        (bias is not None, vector_size(groups), tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M, split,
         INTERPRETED),
        **options,
    )  # fmt: skip
    return out.to(out_dtype)


def grouped_wgrad(
    left: Tensor,
    right: Tensor,
    left_amax: Tensor,
    right_amax: Tensor,
    offsets: Tensor,
    numerator: float,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[G, M, N], zeros for an expert without rows.

    Args:
        left, right: BF16 values [M, P] and [N, P], columnwise operands, one expert after another.
        left_amax, right_amax, offsets, numerator, out_dtype: as in :func:`grouped_gemm`.
    """
    groups = len(offsets) - 2
    dtype = torch.float32 if INTERPRETED else out_dtype
    out = torch.empty(groups * left.shape[0], right.shape[0], dtype=dtype, device=left.device)
    _start_wgrad(left, right, out, (offsets, left_amax, right_amax), numerator, 0, groups, False)
    return out.view(groups, left.shape[0], right.shape[0]).to(out_dtype)


def grouped_wgrad_accumulate(
    outs: dict[int, Tensor],
    left: Tensor,
    right: Tensor,
    left_amax: Tensor,
    right_amax: Tensor,
    offsets: Tensor,
    numerator: float,
) -> None:
    """Add :func:`grouped_wgrad`'s products of some experts to ``outs[expert]``, in FP32 before the one rounding.

    Args:
        outs: buffers [M, N] of BF16, FP16 or FP32, contiguous along N.

    Raises:
        ValueError: a buffer is not contiguous along N.
    """
    for expert, out in outs.items():
        if out.shape[1] > 1 and out.stride(1) != 1:
            raise ValueError(f"the buffer of expert {expert} must be contiguous along N, got strides {out.stride()}")
        buffer = out.float() if INTERPRETED else out
        _start_wgrad(left, right, buffer, (offsets, left_amax, right_amax), numerator, expert, 1, True)
        if INTERPRETED:
            out.copy_(buffer)


def _start_wgrad(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    rest: tuple[Tensor, ...],
    numerator: float,
    expert0: int,
    experts: int,
    accumulate: bool,
) -> None:
    rows, cols = left.shape[0], right.shape[0]
    tiles, options = _tiles(left.device, rows)
    programs = experts * -(-rows // tiles.block_m) * -(-cols // tiles.block_n)
    scalars = (numerator, rows, cols, out.stride(0), expert0)
    split = _split(left.device, rows, cols, left.shape[1])
    constants = (accumulate, tiles.block_m, tiles.block_n, tiles.block_k, GROUP_M, split, INTERPRETED)
    start(grouped_wgrad_kernel, programs, (left, right, out, *rest), scalars, constants, **options)


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
