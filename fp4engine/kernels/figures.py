"""Statistics of tensors and of their operands, each in one read; see :mod:`fp4engine.inspect.statistics`.

    x -> rotate -> compare with decoded codes -> sums, histograms, the blocks with the largest errors

A program walks over tiles and keeps its counts in registers: sums as FP64, histograms of 256 bytes, and for each block
of its tile the largest errors that it has met there. A second kernel adds the counts of all programs in a fixed order,
so that equal runs have equal figures. One launch counts several tensors and operands, each by kernels of its own, into
two vectors, since most of the time goes into the host's work between kernels.

Legend: x is [R, C], at any strides; its codes are [R, width], padded, of which the first ``cols`` columns are counted.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.block_cast import decode_tile, largest_of_groups, magnitudes, prepared, repeat, times_scale
from fp4engine.kernels.block_decode import load_factor, load_scales
from fp4engine.kernels.blocks import TILE_C, BlockCast, as_bytes
from fp4engine.kernels.channel_figures import PARTS, TILE_R, Target, add_channels
from fp4engine.kernels.encode import block_amax, from_bits
from fp4engine.kernels.launch import Block, Launch, LaunchBuilder, Place, TensorMeta, device_facts, meta_of, resolver

RANKED = 4
"""Blocks with the largest errors that are kept; four ranks are spelt out below."""
SUMS = 8
"""What a program adds up: numbers that are not finite, values and decoded values that are not zero, saturated ones,
signal, error, scales that underflow and that overflow."""
NUMBERS = tl.constexpr(13)
"""Entries before the histograms, as :mod:`fp4engine.inspect.statistics` names them."""
BINS = tl.constexpr(256)
BINS_FOLDED = tl.constexpr(64)
"""Histogram entries per program of the second kernel."""
PROGRAMS_PER_SM = 2
NARROW = 16
"""Columns of a block where a cast has no block scales."""


@triton.jit
def rank(e, s, p, e0, s0, p0, e1, s1, p1, e2, s2, p2, e3, s3, p3):
    """Put ``(error, signal, place)`` where it belongs among four, sorted by falling errors; element by element."""
    over0, over1, over2, over3 = e > e0, e > e1, e > e2, e > e3
    e3, s3, p3 = (
        tl.where(over2, e2, tl.where(over3, e, e3)),
        tl.where(over2, s2, tl.where(over3, s, s3)),
        tl.where(over2, p2, tl.where(over3, p, p3)),
    )
    e2, s2, p2 = (
        tl.where(over1, e1, tl.where(over2, e, e2)),
        tl.where(over1, s1, tl.where(over2, s, s2)),
        tl.where(over1, p1, tl.where(over2, p, p2)),
    )
    e1, s1, p1 = (
        tl.where(over0, e0, tl.where(over1, e, e1)),
        tl.where(over0, s0, tl.where(over1, s, s1)),
        tl.where(over0, p0, tl.where(over1, p, p1)),
    )
    e0, s0, p0 = tl.where(over0, e, e0), tl.where(over0, s, s0), tl.where(over0, p, p0)
    return e0, s0, p0, e1, s1, p1, e2, s2, p2, e3, s3, p3


@triton.jit
def over_block(t, HEIGHT: tl.constexpr, SHARE: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums of FP32 [sixteenths], of ``BLOCKS * SHARE`` in a row of the tile, over blocks ``HEIGHT`` rows tall."""
    if SHARE > 1:
        t = tl.sum(tl.reshape(t, [t.numel // SHARE, SHARE]), axis=1)
    if HEIGHT > 1:
        t = tl.sum(tl.reshape(t, [t.numel // (HEIGHT * BLOCKS), HEIGHT, BLOCKS]), axis=1)
        t = tl.reshape(t, [t.numel])
    return t


@triton.jit
def largest_of_rows(t, HEIGHT: tl.constexpr, BLOCKS: tl.constexpr):
    """Of [rows * BLOCKS] the largest of each ``HEIGHT`` rows."""
    if HEIGHT > 1:
        t = tl.max(tl.reshape(t, [t.numel // (HEIGHT * BLOCKS), HEIGHT, BLOCKS]), axis=1)
        t = tl.reshape(t, [t.numel])
    return t


@triton.jit
def load_codes(codes_ptr, row, group, inside, width, CAST: tl.constexpr):
    """Codes of sixteen neighbours: uint32 words, eight codes in a word or four; 0 where not ``inside``."""
    WORDS: tl.constexpr = 2 if CAST.packed else 4  # pyright: ignore[reportAssignmentType]
    place = (row.to(tl.int64) * (width // 16) + group) * WORDS
    pointer = codes_ptr.to(tl.pointer_type(tl.uint32)) + place
    words = ()
    for i in tl.static_range(WORDS):
        words = words + (tl.load(pointer + i, mask=inside, other=0),)
    return words


@triton.jit
def add_histogram(
    of_codes,
    codes_ptr,
    row0,
    col0,
    R,
    width,
    cols,
    CAST: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    BINS: tl.constexpr,
):
    """``of_codes`` plus how often each code is in a tile; what is outside of the operand counts as 0."""
    SHARE: tl.constexpr = 1 + CAST.packed  # codes in a byte
    BYTES: tl.constexpr = TILE_C // SHARE
    index = tl.arange(0, TILE_R * BYTES)
    row, byte = row0 + index // BYTES, col0 // SHARE + index % BYTES
    there = (row < R) & (byte < width // SHARE)
    codes = tl.load(codes_ptr + (row.to(tl.int64) * (width // SHARE) + byte), mask=there, other=0).to(tl.int32)
    if CAST.packed:
        of_codes += tl.histogram(tl.where(2 * byte < cols, codes & 15, 0), BINS)
        of_codes += tl.histogram(tl.where(2 * byte + 1 < cols, codes >> 4, 0), BINS)
    else:
        of_codes += tl.histogram(tl.where(byte < cols, codes, 0), BINS)
    return of_codes


@triton.jit
def figures_kernel(
    x_ptr, rng_ptr, codes_ptr, scale_ptr, amax_ptr, sums_ptr, histogram_ptr, ranked_ptr, place_ptr, R, C, stride_r,
    stride_c, width, cols, stream, programs, BOUND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Sums FP64 [programs, 8], histograms of codes and of scales int32 [programs, 512], and per program the four
    largest errors with their signals, FP32 [programs, 4, 2], and places: rows of blocks times blocks, plus block.
    """
    GRID: tl.constexpr = CAST.grid
    BLOCKS: tl.constexpr = TILE_C // WIDTH
    SHARE: tl.constexpr = WIDTH // 16
    GROUPS: tl.constexpr = TILE_C // 16
    BITS: tl.constexpr = 4 if CAST.packed else 8  # pyright: ignore[reportAssignmentType]
    PER_WORD: tl.constexpr = 32 // BITS
    CODES: tl.constexpr = 16 if CAST.packed else BINS  # pyright: ignore[reportAssignmentType]
    across = tl.cdiv(width, TILE_C)
    blocks = width // WIDTH
    tiles = tl.cdiv(R, TILE_R) * across
    sixteenth = tl.arange(0, TILE_R * GROUPS)
    of_row = tl.arange(0, TILE_R * BLOCKS)
    of_block = tl.arange(0, TILE_R // HEIGHT * BLOCKS)
    without_end = tl.zeros([TILE_R * GROUPS], tl.int32)
    some, some_kept, too_large = without_end, without_end, without_end
    signals = tl.zeros([TILE_R // HEIGHT * BLOCKS], tl.float64)
    errors = signals
    under = tl.zeros([TILE_R // HEIGHT * BLOCKS], tl.int32)
    over = under
    of_codes = tl.zeros([CODES], tl.int32)
    of_scales = tl.zeros([BINS], tl.int32)
    e0 = tl.full([TILE_R // HEIGHT * BLOCKS], -1.0, tl.float32)
    s0 = tl.zeros_like(e0)
    p0 = tl.zeros_like(under)
    e1, s1, p1, e2, s2, p2, e3, s3, p3 = e0, s0, p0, e0, s0, p0, e0, s0, p0
    for tile in range(tl.program_id(0), tiles, programs):
        row0 = (tile // across) * TILE_R
        col0 = (tile % across) * TILE_C
        row = row0 + sixteenth // GROUPS
        group = col0 // 16 + sixteenth % GROUPS
        here = (row < R) & (group < width // 16)
        x = prepared(x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST, TILE_R, TILE_C, HARDWARE)
        words = load_codes(codes_ptr, row, group, here, width, CAST)
        factor = load_factor(amax_ptr, (row0 + tl.arange(0, TILE_R))[:, None], col0, R, width, CAST)
        factor = tl.reshape(factor, [factor.numel])
        limit = repeat(factor, GROUPS) * GRID.largest
        scale_of_sixteenth = limit * 0 + 1.0
        if scale_ptr is not None:
            block_row = row0 + of_row // BLOCKS
            block = col0 // WIDTH + of_row % BLOCKS
            there = (block_row < R) & (block < blocks)
            scale = load_scales(scale_ptr, block_row, block, there, blocks, CAST, HARDWARE)
            scale_of_sixteenth = repeat(scale, SHARE)
            scale = tl.abs(scale)
            limits = scale * GRID.largest * repeat(factor, BLOCKS)
            limit = repeat(limits, SHARE)
            largest = largest_of_rows(magnitudes(largest_of_groups(block_amax(x), SHARE)), HEIGHT, BLOCKS)
            largest = from_bits(largest.to(tl.uint32, bitcast=True))
            limits = tl.where(block_row % HEIGHT == 0, limits, 0.0)  # of the first row: outer amaxes may be of rows
            limits = largest_of_rows(limits, HEIGHT, BLOCKS)
            stored = largest_of_rows(scale, HEIGHT, BLOCKS)
            under += ((stored == 0) & (largest > 0)).to(tl.int32)
            over += ((stored >= BOUND) & (largest > limits * 1.0625)).to(tl.int32)
            raw = tl.load(scale_ptr + (block_row.to(tl.int64) * blocks + block), mask=there, other=0)
            raw = tl.where(there & (block_row % HEIGHT == 0), raw.to(tl.uint8, bitcast=True).to(tl.int32), 0)
            of_scales += tl.histogram(raw, BINS)
        limit = tl.where(limit > 0, limit, float("inf"))
        signal = tl.zeros([TILE_R * GROUPS], tl.float32)
        error = signal
        for i in tl.static_range(16):
            code = (words[i // PER_WORD] >> (BITS * (i % PER_WORD))) & ((1 << BITS) - 1)
            x_hat = times_scale(decode_tile(code, CAST), scale_of_sixteenth, CAST) * repeat(factor, GROUPS)
            x_hat = tl.where((row < R) & (group * 16 + i < cols), x_hat, 0.0)
            beyond = tl.abs(x[i]) > limit * 1.0009765625
            if CAST.correction != "none":  # the scale that elements met is not the one that was stored
                beyond = beyond & (tl.abs(x_hat) >= limit * 0.9990234375)
            too_large += beyond.to(tl.int32)
            without_end += (magnitudes(x[i]) >= 0x7F800000).to(tl.int32)
            some += (x[i] != 0).to(tl.int32)
            some_kept += (x_hat != 0).to(tl.int32)
            signal += x[i] * x[i]
            error += (x_hat - x[i]) * (x_hat - x[i])
        of_codes = add_histogram(of_codes, codes_ptr, row0, col0, R, width, cols, CAST, TILE_R, TILE_C, CODES)
        signal = over_block(signal, HEIGHT, SHARE, BLOCKS)
        error = over_block(error, HEIGHT, SHARE, BLOCKS)
        is_finite = (magnitudes(signal) < 0x7F800000) & (magnitudes(error) < 0x7F800000)
        signal = tl.where(is_finite, signal, 0.0)
        error = tl.where(is_finite, error, 0.0)
        signals += signal.to(tl.float64)
        errors += error.to(tl.float64)
        high = row0 // HEIGHT + of_block // BLOCKS
        block = col0 // WIDTH + of_block % BLOCKS
        error = tl.where((high < tl.cdiv(R, HEIGHT)) & (block < blocks), error, -1.0)
        e0, s0, p0, e1, s1, p1, e2, s2, p2, e3, s3, p3 = rank(
            error, signal, high * blocks + block, e0, s0, p0, e1, s1, p1, e2, s2, p2, e3, s3, p3
        )
    program = tl.program_id(0)
    one = tl.arange(0, 1)
    sums_ptr += program * 8
    tl.store(sums_ptr + one, tl.sum(without_end, keep_dims=True).to(tl.float64))
    tl.store(sums_ptr + 1 + one, tl.sum(some, keep_dims=True).to(tl.float64))
    tl.store(sums_ptr + 2 + one, tl.sum(some_kept, keep_dims=True).to(tl.float64))
    tl.store(sums_ptr + 3 + one, tl.sum(too_large, keep_dims=True).to(tl.float64))
    tl.store(sums_ptr + 4 + one, tl.sum(signals, keep_dims=True))
    tl.store(sums_ptr + 5 + one, tl.sum(errors, keep_dims=True))
    tl.store(sums_ptr + 6 + one, tl.sum(under, keep_dims=True).to(tl.float64))
    tl.store(sums_ptr + 7 + one, tl.sum(over, keep_dims=True).to(tl.float64))
    tl.store(histogram_ptr + program * (2 * BINS) + tl.arange(0, CODES), of_codes)
    tl.store(histogram_ptr + program * (2 * BINS) + BINS + tl.arange(0, BINS), of_scales)
    for position in tl.static_range(4):
        most = tl.max(e0, axis=0)
        chosen = tl.min(tl.where(e0 == most, of_block, TILE_R * BLOCKS), axis=0)
        hit = of_block == chosen
        tl.store(ranked_ptr + program * 8 + 2 * position, most)
        tl.store(ranked_ptr + program * 8 + 2 * position + 1, tl.sum(tl.where(hit, s0, 0.0), axis=0))
        tl.store(place_ptr + program * 4 + position, tl.sum(tl.where(hit, p0, 0), axis=0))
        e0, s0, p0 = tl.where(hit, e1, e0), tl.where(hit, s1, s0), tl.where(hit, p1, p0)
        e1, s1, p1 = tl.where(hit, e2, e1), tl.where(hit, s2, s1), tl.where(hit, p2, p1)
        e2, s2, p2 = tl.where(hit, e3, e2), tl.where(hit, s3, s2), tl.where(hit, p3, p2)
        e3 = tl.where(hit, -1.0, e3)


@triton.jit
def column(sums_ptr, index: tl.constexpr, programs, COUNT: tl.constexpr):
    """What all programs have added up of one sum, FP64 [1]."""
    program = tl.arange(0, COUNT)
    return tl.sum(tl.load(sums_ptr + (program * 8 + index), mask=program < programs, other=0.0), keep_dims=True)


@triton.jit
def fold_histograms(
    histogram_ptr, out_ptr, part, programs, codes_outside, scales_outside, CODES: tl.constexpr, SCALES: tl.constexpr
):
    """Write part ``part`` of the two histograms, of codes and of scales, one behind the other.

    What tiles have ``outside`` of the operand was counted as byte 0.
    """
    index = part * BINS_FOLDED + tl.arange(0, BINS_FOLDED)
    of_scales = index >= BINS
    target = tl.where(of_scales, index - BINS + CODES, index)
    wanted = tl.where(of_scales, index < BINS + SCALES, index < CODES)  # nobody has written the others
    found = tl.zeros([BINS_FOLDED], tl.int64)
    for first in range(0, programs, PARTS):
        program = first + tl.arange(0, PARTS)[:, None]
        counted = histogram_ptr + (program * (2 * BINS) + index[None, :])
        found += tl.sum(tl.load(counted, mask=(program < programs) & wanted[None, :], other=0).to(tl.int64), axis=0)
    found -= tl.where(index == 0, codes_outside, tl.where(index == BINS, scales_outside, 0))
    tl.store(out_ptr + target, found.to(tl.float64), mask=wanted)


@triton.jit
def fold_worst(
    ranked_ptr, place_ptr, out_ptr, programs, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr
):
    """Write ``(row, col, error, signal)`` of the four blocks with the largest errors; zeros where there are fewer."""
    candidate = tl.arange(0, 4 * COUNT)
    error = tl.load(ranked_ptr + 2 * candidate, mask=candidate < 4 * programs, other=-1.0)
    for position in tl.static_range(4):
        largest = tl.max(error, axis=0)
        chosen = tl.min(tl.where(error == largest, candidate, 4 * COUNT), axis=0)
        there = largest >= 0
        place = tl.load(place_ptr + chosen)
        signal = tl.load(ranked_ptr + 2 * chosen + 1)
        target = out_ptr + 4 * position
        tl.store(target, tl.where(there, (place // blocks) * HEIGHT, 0).to(tl.float64))
        tl.store(target + 1, tl.where(there, (place % blocks) * WIDTH, 0).to(tl.float64))
        tl.store(target + 2, tl.where(there, largest, 0.0).to(tl.float64))
        tl.store(target + 3, tl.where(there, signal, 0.0).to(tl.float64))
        error = tl.where(candidate == chosen, -1.0, error)


@triton.jit
def largest_finite(amax_ptr, amaxes):
    """FP64 [1]: the largest outer amax that is finite, 0 if none is."""
    most = tl.zeros([1024], tl.float32)
    for first in range(0, amaxes, 1024):
        index = first + tl.arange(0, 1024)
        amax = tl.load(amax_ptr + index, mask=index < amaxes, other=0.0)
        most = tl.maximum(most, tl.where(magnitudes(amax) < 0x7F800000, amax, 0.0))
    return tl.max(most, keep_dims=True).to(tl.float64)


@triton.jit(do_not_specialize=["first", "first_maximum"])
def fold_figures_kernel(
    sums_ptr, histogram_ptr, ranked_ptr, place_ptr, amax_ptr, out_ptr, maxima_ptr, first, first_maximum, programs,
    elements, scales, codes_outside, scales_outside, amaxes, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The figures of an operand. Program 0 writes all but the histograms, of which the others write parts.

    Args:
        first, first_maximum: where the figures begin in the two vectors.
        COUNT: a power of two, at least ``programs``.
        CODES, SCALES: how long the two histograms are.
    """
    out_ptr += first
    maxima_ptr += first_maximum
    if tl.program_id(0) > 0:
        fold_histograms(
            histogram_ptr, out_ptr + NUMBERS, tl.program_id(0) - 1, programs, codes_outside, scales_outside,
            CODES, SCALES,
        )  # fmt: skip
    else:
        one = tl.arange(0, 1)
        none = tl.zeros([1], tl.float64)
        count = none + elements
        nonzero = column(sums_ptr, 1, programs, COUNT)
        tl.store(out_ptr + one, count)
        tl.store(out_ptr + 1 + one, column(sums_ptr, 0, programs, COUNT))
        tl.store(out_ptr + 2 + one, count - nonzero)
        tl.store(out_ptr + 3 + one, nonzero - column(sums_ptr, 2, programs, COUNT))
        for entry in tl.static_range(3):  # saturated, signal, error
            tl.store(out_ptr + 4 + entry + one, column(sums_ptr, 3 + entry, programs, COUNT))
        tl.store(out_ptr + 7 + one, none + scales)
        for entry in tl.static_range(2):  # underflow, overflow
            tl.store(out_ptr + 8 + entry + one, column(sums_ptr, 6 + entry, programs, COUNT))
        for entry in tl.static_range(3):  # follow from the histogram of scales
            tl.store(out_ptr + 10 + entry + one, none)
        tl.store(maxima_ptr + one, largest_finite(amax_ptr, amaxes))
        tl.store(maxima_ptr + 1 + tl.arange(0, 2), tl.full([2], float("-inf"), tl.float64))
        worst_ptr = out_ptr + (NUMBERS + CODES + SCALES)
        fold_worst(ranked_ptr, place_ptr, worst_ptr, programs, blocks, HEIGHT, WIDTH, COUNT)


def supports(spec: CastSpec, dtype: torch.dtype, rows: int) -> tuple[bool, str]:
    """Whether the kernels count operands of ``spec`` made of values of ``dtype``, and if not, why."""
    height, width = spec.block
    if width and spec.scale.torch_dtype.itemsize != 1:
        return False, f"figures of {spec.label}, whose scales are no bytes, have no kernel"
    if height > TILE_R or dtype == torch.float64 or not rows:
        return False, f"figures of {spec.label} of {rows} rows in {dtype} have no kernel"
    return True, ""


class Counted(NamedTuple):
    """An operand to be counted, of tensors or of their metadata.

    Attributes:
        x: [R, C], BF16, FP16 or FP32, any strides: the matrix that was cast.
        rng: of the cast; None unless its rotation draws.
        codes, scale_inv, amax: of the operand.
        key: of its spec.
        stream: of the cast.
    """

    x: Any
    rng: Any
    codes: Any
    scale_inv: Any
    amax: Any
    key: str
    stream: int


@resolver
def resolve_figures(tensors: tuple[TensorMeta, ...], operands: tuple[Counted, ...], device: torch.device) -> Launch:
    """``(*tensors, *(x, rng, codes, scale_inv, amax of each operand)) -> numbers, maxima``, both FP64.

    Of each tensor: two sums, and the maxima of its columns. Of each operand: its sums, its histograms and its worst
    blocks, and three maxima.
    """
    builder = LaunchBuilder(device, inputs=len(tensors) + 5 * len(operands))
    specs = [CastSpec.from_key(operand.key) for operand in operands]
    numbers = [2] * len(tensors) + [int(NUMBERS) + sum(_histograms(spec)) + 4 * RANKED for spec in specs]
    maxima = [x.shape[1] for x in tensors] + [3] * len(operands)
    out = builder.buffer((sum(numbers),), torch.float64), builder.buffer((sum(maxima),), torch.float64)
    targets = [Target(*out, sum(numbers[:i]), sum(maxima[:i])) for i in range(len(numbers))]
    for i, x in enumerate(tensors):
        add_channels(builder, x, builder.inputs[i], targets[i])
    for i, operand in enumerate(operands, len(tensors)):
        inputs = builder.inputs[len(tensors) + 5 * (i - len(tensors)) :][:5]
        _add_operand(builder, operand, inputs, targets[i])
    return builder.launch(*out)


def _histograms(spec: CastSpec) -> tuple[int, int]:
    """How long an operand's histograms of codes and of scales are."""
    return 1 << spec.element.bits, int(BINS) if spec.block[1] else 0


def _add_operand(builder: LaunchBuilder, operand: Counted, inputs: tuple[Place, ...], target: Target) -> None:
    """Count an operand whose tensors are ``inputs``."""
    spec = CastSpec.from_key(operand.key)
    (rows, cols), has_scales = operand.x.shape, bool(spec.block[1])
    width = spec.padded_cols(cols)
    counted = cols if spec.rotation is None else width
    height, block = max(spec.block[0], 1), spec.block[1] or NARROW
    hardware, multiprocessors = device_facts(builder.device)
    tiles = -(-rows // TILE_R) * -(-width // TILE_C)
    programs = min(tiles, PROGRAMS_PER_SM * multiprocessors)
    codes, scales = _histograms(spec)
    blocks = -(-rows // height) * (width // block) if has_scales else 0
    sums = builder.buffer((programs, SUMS), torch.float64)
    histogram = builder.buffer((programs, 2 * int(BINS)), torch.int32)
    ranked = builder.buffer((programs, RANKED, 2), torch.float32)
    places = builder.buffer((programs, RANKED), torch.int32)
    parts = (sums, histogram, ranked, places)
    x, rng, data, scale_inv, amax = inputs
    source = (x, None if operand.rng is None else rng, data, Block(scale_inv, as_bytes) if has_scales else None, amax)
    builder.step(
        figures_kernel, programs, *source, *parts, rows, cols, *operand.x.strides, width, counted, operand.stream,
        programs, spec.largest_scale, height, block, BlockCast.of(spec, "codes", 0), TILE_R, TILE_C, hardware,
        num_warps=8,
    )  # fmt: skip
    builder.step(
        fold_figures_kernel, 1 + 2 * int(BINS) // int(BINS_FOLDED), *parts, amax, *target, programs, rows * counted,
        blocks, tiles * TILE_R * TILE_C - rows * counted, tiles * TILE_R * (TILE_C // block) - blocks,
        math.prod(operand.amax.shape), width // block, height, block, codes, scales,
        triton.next_power_of_2(programs), num_warps=4,
    )  # fmt: skip


def figures(tensors: Sequence[Tensor], operands: Sequence[Counted]) -> list[Tensor]:
    """``numbers`` and ``maxima`` of :class:`fp4engine.inspect.statistics.Figures`, of tensors and then of operands.

    Args:
        tensors: [R, C], neither 0; BF16, FP16 or FP32, any strides.
        operands: on the same device.
    """
    asked = tuple([Counted(*map(meta_of, operand[:5]), operand.key, operand.stream) for operand in operands])
    device = (tensors[0] if tensors else operands[0].x).device
    launch = resolve_figures(tuple(map(meta_of, tensors)), asked, device)
    return launch(*tensors, *chain.from_iterable([operand[:5] for operand in operands]))
