"""Reading a matrix as blocks: 16 FP32 tensors, one per position along the contracted axis.

    y = x, or y = round(f(x)) with a norm or an activation f, see :class:`Prologue`; y is in registers only

Legend: y is [M, K], a tile's first element ``(row0, col0)``; elements outside y are 0. x is [M, K], or [M, 2K] under a
gated activation. Kernels let Triton specialize K: only where it knows that K is a multiple of 16 does it read 16 bytes
at once under a mask, or K elements further on.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.kernels.activation import activated
from fp4engine.kernels.encode import narrow, round_block, stack, unstack8, wide
from fp4engine.kernels.launch import Place, TensorMeta

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, eq=False)
class Prologue:
    """What a kernel does to x while it reads it, at compile time. Compared by identity, as from :meth:`of`.

    Attributes:
        kind: ``"LayerNorm"``, ``"RMSNorm"``, or a kind of :func:`fp4engine.kernels.activation.activated`.
        dtype: Triton's dtype of y, which every value is rounded to; torch_dtype: PyTorch's.
        gated: whether an activation's value is multiplied by the second half of its row.
    """

    kind: str
    dtype: Any
    torch_dtype: torch.dtype
    is_norm: bool
    gated: bool

    @staticmethod
    @cache
    def of(kind: str, dtype: torch.dtype, gated: bool = False) -> "Prologue":
        return Prologue(kind, _TRITON_DTYPES[dtype], dtype, kind in ("LayerNorm", "RMSNorm"), gated)


class Reading(NamedTuple):
    """How a launch reads y.

    Attributes:
        x: metadata of what lies in memory.
        prologue: what y is of it; None for y = x.
        place: of x.
        vectors: of a norm the places of statistics, gamma and beta.
    """

    x: TensorMeta
    prologue: Prologue | None
    place: Place
    vectors: tuple[Place | None, Place | None, Place | None] = (None, None, None)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.x.shape
        return rows, cols // 2 if self.prologue is not None and self.prologue.gated else cols

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of y, the tensor that is cast."""
        return self.x.dtype if self.prologue is None else self.prologue.torch_dtype

    @property
    def places(self) -> tuple[Place | None, ...]:
        """The kernels' arguments ``x, statistics, gamma, beta``."""
        return self.place, *self.vectors


@triton.jit
def unknown(length):
    """``length``; where Triton has made a constant of a 1, a number of which no compiler knows anything.

    Behind a length of 1 every other element is 0. If ptxas 12.8 knows that of one half of a pair of FP16 numbers, it
    takes maxima of the pair's magnitudes without removing the sign of the other half.
    """
    if isinstance(length, tl.tensor):
        return length
    else:
        return tl.program_id(1) + length  # grids have one dimension


@triton.jit
def load_rows(
    x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr
):
    """Blocks down the columns: FP32 tensors [TILE_M / 16, TILE_K], the i-th holding row i of every group of 16 rows."""
    row = tl.arange(0, TILE_M // 16)[:, None] * 16
    col = tl.arange(0, TILE_K)[None, :]
    x_ptr += row0.to(tl.int64) * stride_m + col0.to(tl.int64) * stride_k
    x_ptr += row * stride_m + col * stride_k
    x = ()
    for i in tl.static_range(16):
        if EVEN:
            x = x + (wide(tl.load(x_ptr + i * stride_m)),)
        else:
            mask = (col < K - col0) & (row + i < M - row0)
            x = x + (wide(tl.load(x_ptr + i * stride_m, mask=mask, other=0.0)),)
    return x


@triton.jit
def load_blocks(
    x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr
):
    """Blocks along the rows: FP32 tensors [TILE_M * TILE_K / 16], blocks in row-major order.

    Two 16-byte loads (for 16-bit dtypes) give one thread a whole block.
    """
    BLOCKS: tl.constexpr = TILE_K // 16
    index = tl.arange(0, TILE_M * BLOCKS)[:, None]
    j = tl.arange(0, 8)[None, :]
    row = index // BLOCKS
    col = (index % BLOCKS) * 16 + j
    x_ptr += row0.to(tl.int64) * stride_m + col0.to(tl.int64) * stride_k
    low = x_ptr + (row * stride_m + col * stride_k)
    high = low + 8 * stride_k
    if EVEN:
        return unstack8(wide(tl.load(low))) + unstack8(wide(tl.load(high)))
    else:
        inside = row < M - row0
        low_x = tl.load(low, mask=inside & (col < K - col0), other=0.0)
        high_x = tl.load(high, mask=inside & (col + 8 < K - col0), other=0.0)
        return unstack8(wide(low_x)) + unstack8(wide(high_x))


@triton.jit
def sixteen(x):
    """One tensor as a block that is the same at every position."""
    return x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x


@triton.jit
def load_vector(x_ptr, index, limit):
    return wide(tl.load(x_ptr + index, mask=index < limit, other=0.0))


@triton.jit
def normalized(x, mean, rstd, gamma, beta, PROLOGUE: tl.constexpr):
    """``(x - mean) * rstd * gamma + beta``, each operation rounded; all arguments are blocks."""
    y = ()
    for i in tl.static_range(16):
        if PROLOGUE.kind == "LayerNorm":
            y = y + ((x[i] - mean[i]) * rstd[i] * gamma[i] + beta[i],)
        else:
            y = y + (x[i] * rstd[i] * gamma[i],)
    return y


@triton.jit
def activated_block(x, gate, PROLOGUE: tl.constexpr):
    KIND: tl.constexpr = PROLOGUE.kind  # Triton 3.6 hands a constant's attribute on as a plain string
    y = ()
    for i in tl.static_range(16):
        value, _ = activated(x[i], KIND)
        y = y + (value * gate[i] if PROLOGUE.gated else value,)
    return y


@triton.jit
def masked_block(y, inside):
    """0 outside: a norm gives its bias there. ``inside``: a block of masks."""
    z = ()
    for i in tl.static_range(16):
        z = z + (tl.where(inside[i], y[i], 0.0),)
    return z


@triton.jit
def read_rows(
    source, M, K, row0, col0, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Blocks of y as :func:`load_rows` lays them out, from ``(x, statistics, gamma, beta, stride_m, stride_k)``."""
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr, stride_m, stride_k = source
    K = unknown(K)
    x = load_rows(x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
    if PROLOGUE is None:
        return x
    else:
        if PROLOGUE.is_norm:
            col = col0 + tl.arange(0, TILE_K)[None, :]
            gamma = sixteen(load_vector(gamma_ptr, col, K))
            rstd = load_rows(statistics_ptr, 1, 0, M, 1, row0, row0 * 0, TILE_M, 1, EVEN)
            mean = rstd
            beta = gamma
            if PROLOGUE.kind == "LayerNorm":
                mean = load_rows(statistics_ptr + M, 1, 0, M, 1, row0, row0 * 0, TILE_M, 1, EVEN)
                beta = sixteen(load_vector(beta_ptr, col, K))
            y = normalized(x, mean, rstd, gamma, beta, PROLOGUE)
        else:
            gate = x
            if PROLOGUE.gated:
                half = x_ptr + K * stride_k
                gate = load_rows(half, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            y = activated_block(x, gate, PROLOGUE)
        y = round_block(y, PROLOGUE.dtype, HARDWARE)
        if EVEN:
            return y
        else:
            row = tl.arange(0, TILE_M // 16)[:, None] * 16
            inside = ()
            for i in tl.static_range(16):
                inside = inside + ((tl.arange(0, TILE_K)[None, :] < K - col0) & (row + i < M - row0),)
            return masked_block(y, inside)


@triton.jit
def read_blocks(
    source, M, K, row0, col0, PROLOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Blocks of y as :func:`load_blocks` lays them out."""
    x_ptr, statistics_ptr, gamma_ptr, beta_ptr, stride_m, stride_k = source
    K = unknown(K)
    x = load_blocks(x_ptr, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
    if PROLOGUE is None:
        return x
    else:
        BLOCKS: tl.constexpr = TILE_K // 16
        index = tl.arange(0, TILE_M * BLOCKS)
        row = row0 + index // BLOCKS
        if PROLOGUE.is_norm:
            rstd = sixteen(load_vector(statistics_ptr, row, M))
            gamma = load_blocks(gamma_ptr, 0, 1, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            mean = rstd
            beta = gamma
            if PROLOGUE.kind == "LayerNorm":
                mean = sixteen(load_vector(statistics_ptr + M, row, M))
                beta = load_blocks(beta_ptr, 0, 1, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            y = normalized(x, mean, rstd, gamma, beta, PROLOGUE)
        else:
            gate = x
            if PROLOGUE.gated:
                half = x_ptr + K * stride_k
                gate = load_blocks(half, stride_m, stride_k, M, K, row0, col0, TILE_M, TILE_K, EVEN)
            y = activated_block(x, gate, PROLOGUE)
        y = round_block(y, PROLOGUE.dtype, HARDWARE)
        if EVEN:
            return y
        else:
            inside = ()
            for i in tl.static_range(16):
                inside = inside + (((index % BLOCKS) * 16 + i < K - col0) & (row < M),)
            return masked_block(y, inside)


@triton.jit
def store_rows(y_ptr, y, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr):
    """Write a block of :func:`read_rows` to the row-major matrix y [M, K]."""
    row = tl.arange(0, TILE_M // 16)[:, None] * 16
    col = tl.arange(0, TILE_K)[None, :]
    y_ptr += row0.to(tl.int64) * K + col0
    for i in tl.static_range(16):
        value = narrow(y[i], y_ptr.dtype.element_ty)
        if EVEN:
            tl.store(y_ptr + ((row + i) * K + col), value)
        else:
            tl.store(y_ptr + ((row + i) * K + col), value, mask=(col < K - col0) & (row + i < M - row0))


@triton.jit
def store_blocks(y_ptr, y, M, K, row0, col0, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr):
    """Write a block of :func:`read_blocks` to the row-major matrix y [M, K]."""
    BLOCKS: tl.constexpr = TILE_K // 16
    index = tl.arange(0, TILE_M * BLOCKS)[:, None]
    row = index // BLOCKS
    col = (index % BLOCKS) * 16 + tl.arange(0, 8)[None, :]
    y_ptr += row0.to(tl.int64) * K + col0
    for j in tl.static_range(0, 16, 8):
        words = (y[j], y[j + 1], y[j + 2], y[j + 3], y[j + 4], y[j + 5], y[j + 6], y[j + 7])
        value = narrow(stack(words), y_ptr.dtype.element_ty)
        if EVEN:
            tl.store(y_ptr + (row * K + col + j), value)
        else:
            tl.store(y_ptr + (row * K + col + j), value, mask=(col + j < K - col0) & (row < M - row0))
