"""One pass over x that casts it rowwise, columnwise, or both: the kernel and its launchers.

    rowwise:    codes, scale_inv = cast(x)        columnwise:    codes, scale_inv = cast(x.T)

A program owns a tile of 16 G rows and C columns. The rowwise half reads it as blocks along the columns, two 16-byte
loads per block and one block per thread; the columnwise half reads it again, from L1, as 16 row vectors per group of 16
rows, so that a thread holds whole columns of blocks. Only the columnwise output is transposed, through shared memory
and after packing, 8 times smaller than x.

Legend: x is [M, K]; rowwise operand [M, K], columnwise operand [K, M].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import E2M1, E4M3, CastSpec, Correction, Outer, RoundingMode
from fp4engine.kernels.cast import Side, cast_block, products_stay_normal
from fp4engine.kernels.encode import stack
from fp4engine.kernels.launch import Launch, is_column_major
from fp4engine.kernels.load import read_blocks, read_rows
from fp4engine.kernels.overlap import let_next_begin, overlapping, wait_for_previous
from fp4engine.kernels.source import Source
from fp4engine.kernels.tape import Tapes


@triton.jit
def load_amax(amax_ptr, index, limit, SIDE: tl.constexpr):
    if SIDE.per_row:
        return tl.load(amax_ptr + index, mask=index < limit, other=0.0)
    else:
        return tl.load(amax_ptr)


@triton.jit
def cast_rowwise(
    x, amax, out_ptr, scale_ptr, rng_ptr, stream, M, K, row0, col0, DTYPE: tl.constexpr, SIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks that lie along the rows, each position a tensor [TILE_M * TILE_K / 16]."""
    BLOCKS: tl.constexpr = TILE_K // 16
    index = tl.arange(0, TILE_M * BLOCKS)
    row = index // BLOCKS
    block = index % BLOCKS
    scale, words = cast_block(
        x, amax, rng_ptr, col0 // 16 + block, row0 + row, stream, DTYPE, SIDE, TILE_M // 16, BLOCKS, FUSED, HARDWARE
    )
    blocks = (K + 15) // 16
    first = row0.to(tl.int64) * blocks + col0 // 16
    where = row * blocks + block
    word = tl.arange(0, SIDE.words)[None, :]
    target = out_ptr.to(tl.pointer_type(tl.uint32)) + first * SIDE.words + (where[:, None] * SIDE.words + word)
    scale_target = scale_ptr.to(tl.pointer_type(tl.uint8)) + first + where
    if EVEN:
        tl.store(target, stack(words))
        tl.store(scale_target, scale)
    else:
        inside = (row < M - row0) & (block * 16 < K - col0)
        tl.store(target, stack(words), mask=inside[:, None])
        tl.store(scale_target, scale, mask=inside)


@triton.jit
def cast_columnwise(
    x, amax, out_ptr, scale_ptr, rng_ptr, stream, M, K, row0, col0, DTYPE: tl.constexpr, SIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store blocks that lie down the columns, each position a tensor [TILE_M / 16, TILE_K]."""
    GROUPS: tl.constexpr = TILE_M // 16
    group = tl.arange(0, GROUPS)[:, None]
    col = tl.arange(0, TILE_K)[None, :]
    scale, words = cast_block(
        x, amax, rng_ptr, row0 // 16 + group, col0 + col, stream, DTYPE, SIDE, GROUPS * TILE_K // 16, 1, FUSED, HARDWARE
    )
    groups = (M + 15) // 16
    first = col0.to(tl.int64) * groups + row0 // 16
    packed = tl.reshape(tl.permute(stack(words), [1, 0, 2]), [TILE_K, GROUPS * SIDE.words])
    out_col = tl.arange(0, TILE_K)[:, None]
    word = tl.arange(0, GROUPS * SIDE.words)[None, :]
    out_group = tl.arange(0, GROUPS)[None, :]
    target = out_ptr.to(tl.pointer_type(tl.uint32)) + first * SIDE.words + (out_col * (groups * SIDE.words) + word)
    scale_target = scale_ptr.to(tl.pointer_type(tl.uint8)) + first + (out_col * groups + out_group)
    if EVEN:
        tl.store(target, packed)
        tl.store(scale_target, tl.trans(scale))
    else:
        groups_left = groups - row0 // 16
        tl.store(target, packed, mask=(out_col < K - col0) & (word < groups_left * SIDE.words))
        tl.store(scale_target, tl.trans(scale), mask=(out_col < K - col0) & (out_group < groups_left))


@triton.jit(do_not_specialize=["M", "K", "stream"])
def quantize_kernel(
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr,
    row_amax_ptr, row_out_ptr, row_scale_ptr, col_amax_ptr, col_out_ptr, col_scale_ptr, rng_ptr,
    M, K, stride_m, stride_k, stream,
    ROW: tl.constexpr, COL: tl.constexpr, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid``, tiles counted along K first so that neighbours complete each other's sectors of the scales."""
    let_next_begin(HARDWARE)
    wait_for_previous(HARDWARE)
    tiles = tl.cdiv(K, TILE_K)
    row0 = (tl.program_id(0) // tiles) * TILE_M
    col0 = (tl.program_id(0) % tiles) * TILE_K
    dtype: tl.constexpr = x_ptr.dtype.element_ty if PROLOGUE is None else PROLOGUE.dtype
    source = (x_ptr, statistics_ptr, gamma_ptr, beta_ptr, stride_m, stride_k)
    if ROW is not None:
        x = read_blocks(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
        row = row0 + tl.arange(0, TILE_M * TILE_K // 16) // (TILE_K // 16)
        amax = load_amax(row_amax_ptr, row, M, ROW)
        if products_stay_normal(amax, ROW, dtype):
            cast_rowwise(x, amax, row_out_ptr, row_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, True, EVEN, HARDWARE)  # fmt: skip
        else:
            cast_rowwise(x, amax, row_out_ptr, row_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                         dtype, ROW, TILE_M, TILE_K, False, EVEN, HARDWARE)  # fmt: skip
    if COL is not None:
        x = read_rows(source, M, K, row0, col0, PROLOGUE, TILE_M, TILE_K, EVEN, HARDWARE)
        amax = load_amax(col_amax_ptr, col0 + tl.arange(0, TILE_K)[None, :], K, COL)
        if products_stay_normal(amax, COL, dtype):
            cast_columnwise(x, amax, col_out_ptr, col_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, True, EVEN, HARDWARE)  # fmt: skip
        else:
            cast_columnwise(x, amax, col_out_ptr, col_scale_ptr, rng_ptr, stream, M, K, row0, col0,
                            dtype, COL, TILE_M, TILE_K, False, EVEN, HARDWARE)  # fmt: skip


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether these kernels cover ``spec`` on inputs of ``x_dtype``, and if not, why."""
    rotation = spec.rotation
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.element == E2M1, f"element={spec.element}"),
        (spec.scale == E4M3, f"scale={spec.scale}"),
        (spec.block in ((1, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE)), f"block={spec.block}"),
        (spec.rounding in (RoundingMode.EVEN, RoundingMode.STOCHASTIC), f"rounding={spec.rounding.value}"),
        (spec.outer in (Outer.TENSOR, Outer.ROW), f"outer={spec.outer.value}"),
        (rotation is None or (rotation.size == 16 and not rotation.signs.is_fresh), f"rotation={rotation}"),
        (spec.correction is Correction.NONE, f"correction={spec.correction.value}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the Triton kernels do not cover {what}"
    return True, ""


def _options(x: Source, *sides: Side | None) -> dict[str, int]:
    """80 registers per thread, so that 24 warps fit an SM and not 20, where it costs no spill: 3% on an H200."""
    light = all(s is None or not (s.random_bits or s.error or s.per_row or s.words != 2) for s in sides)
    return {"maxnreg": 80} if light and x.x.element_size() == 2 else {}


def allocate(
    side: Side | None, rows: int, cols: int, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Where a side of ``rows`` by ``cols`` goes: codes or values, and block scales."""
    if side is None:
        return None, None
    blocks = -(-cols // BLOCK_SIZE)
    if side.words == 2:
        out = torch.empty(rows, blocks * BLOCK_SIZE // 2, dtype=torch.uint8, device=device)
    else:
        out = torch.empty(rows, blocks * BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    return out, torch.empty(rows, blocks, dtype=torch.float8_e4m3fn, device=device)


def tile_shape(row: Side | None, col: Side | None, small: bool = False) -> tuple[int, int]:
    """Rows and columns of a program's tile, whole 16x16 tiles where a side has them.

    512 blocks of 16 either way; 128, one per thread, in a ``small`` problem, where latency is all.
    """
    if col:
        return (32, 64) if small else (128, 64)
    rows = 16 if row and row.tiled else 8
    return rows, (128 if small else 512) * 16 // rows


def quantize(
    x: Tensor | Source,
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    *,
    rowwise_amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    rng: Tensor | None = None,
    stream: int = 0,
    rowwise_output: str = "codes",
    columnwise_output: str = "codes",
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast the sides whose spec is given, with outer amaxes that :func:`fp4engine.kernels.amax.amax` gave.

    Args:
        x: [M, K] BF16, FP16 or FP32, any strides.
        rowwise, columnwise: what :func:`supports` covers.
        rowwise_amax, columnwise_amax: FP32 [1], or [operand rows] under ``Outer.ROW``.
        rng: int64 [2] ``(seed, draw)`` on x's device; needed if a side is stochastic.
        stream: stream id of the role; the columnwise side uses ``stream | 1``.
        rowwise_output, columnwise_output: "codes", or "values" for BF16 ``element * block scale``.

    Returns:
        ``(rowwise out, rowwise scale_inv, columnwise out, columnwise scale_inv)``; codes uint8 [rows, ceil(cols/16)*8]
        or values BF16 [rows, ceil(cols/16)*16], scale_inv float8_e4m3fn [rows, ceil(cols/16)].
    """
    arguments = (rowwise, columnwise, stream, rowwise_output, columnwise_output)
    if not isinstance(x, Tensor):
        return _quantize(*arguments, x, rowwise_amax, columnwise_amax, rng)[0]
    return _tapes.run(arguments, (x, rowwise_amax, columnwise_amax, rng), _quantize, arguments)[0]


_tapes = Tapes(most=1024)

Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _quantize(
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    stream: int,
    rowwise_output: str,
    columnwise_output: str,
    x: Tensor | Source,
    rowwise_amax: Tensor | None,
    columnwise_amax: Tensor | None,
    rng: Tensor | None,
) -> tuple[Outputs, None]:
    source = Source.of(x)
    row = Side.of(rowwise, rowwise_output, 0) if rowwise else None
    col = Side.of(columnwise, columnwise_output, 1) if columnwise else None
    row_out, row_scale = allocate(row, *source.shape, source.device)
    col_out, col_scale = allocate(col, *source.shape[::-1], source.device)
    if all(source.shape) and (row or col):
        sides = ((rowwise_amax, row_out, row_scale), (columnwise_amax, col_out, col_scale))
        if isinstance(x, Tensor) and is_column_major(x):
            source, sides, row, col = Source.of(x.T), sides[::-1], col, row
        launch = Launch.of(source, *tile_shape(row, col))
        if launch.tiles < launch.multiprocessors:
            launch = Launch.of(source, *tile_shape(row, col, small=True))
        pointers = (*source.pointers, *sides[0], *sides[1], rng)
        integers = (*source.shape, *source.x.stride(), stream)
        parts = (row, col, source.prologue)
        options = _options(source, row, col) | overlapping(launch.hardware)
        launch(quantize_kernel, launch.tiles, pointers, integers, parts, **options)
    return (row_out, row_scale, col_out, col_scale), None
