"""Column sums of a matrix, or of each expert's rows in it, in one order of additions: what a bias gradient is.

    chunk[c] = the sum of rows 128 c .. 128 c + 127 as a binary tree over neighbours, rows past the end 0
    sum      = ((0 + chunk[0]) + chunk[1]) + ...                                               all in FP32

The order depends on a row's distance from its expert's first row and on nothing else, so a grouped sum has the bytes of
the sums of the parts. :func:`fp4engine.reference.column_sums` is the same in PyTorch.

Legend: x is [M, K], G experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import SUM_ROWS as _SUM_ROWS
from fp4engine.kernels.encode import narrow
from fp4engine.kernels.grouped import find, max_tiles, vector_size
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, device_facts, meta_of, resolver
from fp4engine.kernels.load import load_rows
from fp4engine.kernels.rotate import round_to

SUM_ROWS = tl.constexpr(_SUM_ROWS)
COLS = 64
"""Columns per program of the first kernel: a row's part is 128 bytes or more."""
FOLDED = 128
"""Columns per program of the second."""


@triton.jit
def rows_of(offsets_ptr, tile, M, groups, GROUPS: tl.constexpr):
    """As :func:`fp4engine.kernels.grouped.find`; without offsets one expert owns all M rows."""
    if offsets_ptr is None:
        return 0, tl.zeros([], tl.int64), M, tile * SUM_ROWS
    else:
        return find(offsets_ptr, tile, groups, GROUPS, SUM_ROWS)


@triton.jit
def tree(x, COLS: tl.constexpr):
    """[COLS]: the 128 rows of a :func:`fp4engine.kernels.load.load_rows` block, added neighbour to neighbour."""
    for stage in tl.static_range(4):
        y = ()
        for i in tl.static_range(0, 16 >> stage, 2):
            y = y + (x[i] + x[i + 1],)
        x = y
    total = x[0]
    for stage in tl.static_range(3):
        low, high = tl.split(tl.permute(tl.reshape(total, [4 >> stage, 2, COLS]), [0, 2, 1]))
        total = low + high
    return tl.reshape(total, [COLS])


@triton.jit(do_not_specialize=["M", "groups"])
def chunk_sums_kernel(
    x_ptr, offsets_ptr, chunks_ptr, M, K, stride_m, groups, GROUPS: tl.constexpr, COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(K, COLS)
    chunk = tl.program_id(0) // tiles
    col0 = (tl.program_id(0) % tiles) * COLS
    expert, first, rows, row0 = rows_of(offsets_ptr, chunk, M, groups, GROUPS)
    if (row0 >= rows) | (expert == groups):
        return
    x = load_rows(x_ptr + first * stride_m, stride_m, 1, rows, K, row0, col0, SUM_ROWS, COLS, False)
    col = col0 + tl.arange(0, COLS)
    # Added to 0, as the sum of the chunks begins: one chunk alone is the sum.
    dtype: tl.constexpr = chunks_ptr.dtype.element_ty
    total = narrow(round_to(tree(x, COLS) + 0.0, dtype, HARDWARE), dtype)
    tl.store(chunks_ptr + chunk.to(tl.int64) * K + col, total, mask=col < K)


@triton.jit(do_not_specialize=["M"])
def fold_chunks_kernel(chunks_ptr, offsets_ptr, out_ptr, M, K, COLS: tl.constexpr, HARDWARE: tl.constexpr):
    tiles = tl.cdiv(K, COLS)
    expert = tl.program_id(0) // tiles
    col = (tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS)
    chunks = tl.cdiv(M, SUM_ROWS)
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + expert)
        chunks = tl.cdiv(tl.load(offsets_ptr + expert + 1) - first, SUM_ROWS).to(tl.int32)
        chunks_ptr += (first // SUM_ROWS + expert) * K
    chunk_ptrs = chunks_ptr + col
    total = tl.zeros([COLS], tl.float32)
    for _ in range(0, chunks):
        total += tl.load(chunk_ptrs, mask=col < K, other=0.0)
        chunk_ptrs += K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = narrow(round_to(total, dtype, HARDWARE), dtype)
    tl.store(out_ptr + expert.to(tl.int64) * K + col, total, mask=col < K)


def add_column_sums(
    builder: LaunchBuilder, x: Matrix, out: Place, offsets: Place | None = None, groups: int | None = None
) -> None:
    """Write the sums to ``out`` [G, K], or [K] without offsets, of which there are none if ``groups`` is None."""
    rows, cols = x.shape
    count, (hardware, _) = groups or 1, device_facts(builder.device)
    chunks = -(-rows // _SUM_ROWS) if groups is None else max_tiles(rows, count, _SUM_ROWS)
    if groups is None and chunks == 1:  # one chunk is the sum: 0 + chunk[0]
        sums = out
    else:
        sums = builder.buffer((chunks, cols), torch.float32)
    programs = chunks * -(-cols // COLS)
    size = vector_size(count)
    builder.step(
        chunk_sums_kernel, programs, x.place, offsets, sums, rows, cols, x.meta.strides[0], count, size, COLS,
        hardware, num_warps=4,
    )  # fmt: skip
    if sums is not out:
        folds = count * -(-cols // FOLDED)
        builder.step(fold_chunks_kernel, folds, sums, offsets, out, rows, cols, FOLDED, hardware, num_warps=4)


@resolver
def resolve_column_sums(x: TensorMeta, device: torch.device, groups: int | None) -> Launch:
    """``(x, offsets) -> sums``; no ``groups``, no offsets."""
    builder = LaunchBuilder(device, inputs=2)
    place, offsets = builder.inputs
    out = builder.buffer((groups or 1, x.shape[1]), torch.float32)
    add_column_sums(builder, Matrix(place, x), out, None if groups is None else offsets, groups)
    return builder.launch(out)


def column_sums(x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """FP32 [G, K], or [1, K] without ``offsets``.

    Args:
        x: [M, K] BF16, FP16 or FP32, contiguous along K.
        offsets: of :func:`fp4engine.kernels.grouped.offsets`.
    """
    (out,) = resolve_column_sums(meta_of(x), x.device, None if offsets is None else len(offsets) - 2)(x, offsets)
    return out
