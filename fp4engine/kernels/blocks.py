"""Any cast into block scales, of one operand: what the reference does, tile by tile.

:mod:`fp4engine.kernels.block_cast` has what happens to a tile. :mod:`fp4engine.kernels.quantize` casts E2M1 with E4M3
scales faster, from the tensor instead of the operand, and :mod:`fp4engine.kernels.cast_fp8_blocks` FP8 in blocks of
128; what they do not cover comes here.

Two passes read x where an outer scale is of the whole tensor or a row: the largest magnitude, then the cast. A third
kernel has the last word where something is known only after the last tile: block scales that are aligned with each
other, and the correction of the outer scale.

Legend: the operand is [R, C], contracted along C, at any strides; its codes are [R, WIDTH], padded.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp4engine.constants import BLOCK_SIZE, CEIL87_TURN, HADAMARD_SIGNS
from fp4engine.formats import E2M1, E4M3, UE5M3, CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.kernels.amax import MOST_PARTS, add_sharing, add_zeros, store_amax_per_row, store_part
from fp4engine.kernels.block_cast import cast_tile, magnitudes, prepared, stochastic_e4m3
from fp4engine.kernels.dequantize import Codes, add_decode
from fp4engine.kernels.dots import neighbour_sums, shrinkage
from fp4engine.kernels.element import Grid
from fp4engine.kernels.encode import FLT_MAX, block_amax, outer_encode_scale, to_e4m3
from fp4engine.kernels.launch import Block, LaunchBuilder, Place, TensorMeta, device_facts

TILE_C = 128
SUMS = 2048
"""Neighbours that a program of :func:`fold_kernel` adds up."""
SCALES_PER_PROGRAM = 1024


@dataclass(frozen=True, eq=False)
class BlockCast:
    """A CastSpec at compile time. Compared by identity, as from :meth:`of`.

    Attributes:
        grid: of the elements; e4m3: whether they are E4M3.
        scale_grid: of block scales in UE5M3, and in E4M3 that are rounded stochastically.
        packed: whether two codes share a byte; values: whether values are written, not codes; half: in FP16, not BF16.
        height, width: of a block.
        scale: format of the block scales: ``"e4m3"``, ``"ue5m3"``, ``"e8m0"`` or ``"fp32"``.
        rule: value of the scale rule; search: offsets of the scales that a block tries beside its nominal one, or None.
        inverse_target: ``fl(1 / fl(target))``.
        turn, max_exponent, element_factor: of a power-of-two rule: a mantissa beyond this rounds up; exponent of the
            element's largest binade; what elements are multiplied by beside the power.
        carry: added to the bits of a number, adds 1 to its exponent where the mantissa is beyond ``turn``.
        outer, rounding, correction: values of the spec's.
        rotation: size, 0 for none; rotation_factor: the power of two in ``1 / sqrt(size)``, which comes first.
        signs: value of the rotation's, ``"none"`` without one; sixteen: those fixed for 16, set bits for minus.
        group: elements that share a correction, or one pair of partial sums of the scalar one.
        side: bit 0 of the stream.
        sharded: whether the random stream is told of the shard's place in a whole tensor.
    """

    grid: Grid
    e4m3: bool
    scale_grid: Grid
    packed: bool
    values: bool
    half: bool
    height: int
    width: int
    scale: str
    rule: str
    search: tuple[int, ...] | None
    numerator: float
    target: float
    inverse_target: float
    constant_amax: float
    turn: float
    carry: int
    max_exponent: int
    element_factor: float
    outer: str
    rounding: str
    random_bits: int
    rotation: int
    rotation_factor: float
    signs: str
    sixteen: int
    correction: str
    group: int
    side: int
    sharded: bool

    @staticmethod
    @cache
    def of(spec: CastSpec, form: str, side: int, sharded: bool = False) -> "BlockCast":
        """The cast by ``spec`` that writes ``form``, ``"codes"`` or ``"values"``."""
        rotation = spec.rotation
        scalar = spec.correction is Correction.SCALAR
        corrected = "scalar" if scalar else "eden" if spec.correction.group > 1 else "none"
        return BlockCast(
            grid=Grid.of(spec.element),
            e4m3=spec.element == E4M3,
            scale_grid=Grid.of(UE5M3 if spec.scale == UE5M3 else E4M3),
            packed=spec.element.storage_bits == 4,
            values=form == "values",
            half=spec.values_dtype == torch.float16,
            height=spec.block[0],
            width=spec.block[1],
            scale=spec.scale.name,
            rule=spec.scale_rule.value,
            search=spec.search or None,
            numerator=spec.numerator,
            target=spec.target,
            inverse_target=_inverse(spec.target),
            constant_amax=spec.constant_amax,
            turn=_turn(spec),
            carry=max(int((2 - _turn(spec)) * 2**23) - 1, 0),
            max_exponent=spec.element.max_exponent,
            element_factor=spec.target / spec.element.max_value,
            outer=spec.outer.value,
            rounding=spec.rounding.value,
            random_bits=spec.random_bits if spec.rounding is RoundingMode.STOCHASTIC else 0,
            rotation=rotation.size if rotation else 0,
            rotation_factor=2.0 ** -((rotation.size.bit_length() - 1) // 2) if rotation else 1.0,
            signs=rotation.signs.value if rotation else "none",
            sixteen=sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0),
            correction=corrected,
            group=spec.col_multiple if scalar else spec.correction.group,
            side=side,
            sharded=sharded,
        )


def _inverse(target: float) -> float:
    """``fl(1 / fl(target))``."""
    one = torch.ones((), dtype=torch.float32)
    return float(one / torch.tensor(target, dtype=torch.float32))


def _turn(spec: CastSpec) -> float:
    """The largest mantissa, in [1, 2), whose power of two is not rounded up; see the reference's ``power_of_two``."""
    element = spec.element
    largest = element.max_value / 2.0**element.max_exponent
    half = 2.0 ** -(element.mantissa_bits + 1)
    return {
        ScaleRule.MIDMAX: largest + half,
        ScaleRule.OPTION3: 2 - half - 2.0**-23,
        ScaleRule.TOPBINADE: largest,
        ScaleRule.CEIL: 1.0,
        ScaleRule.CEIL87: CEIL87_TURN - 2.0**-23,
    }.get(spec.scale_rule, 2.0)


@triton.jit(do_not_specialize=["stream"])
def block_amax_kernel(
    x_ptr, amax_ptr, whole_ptr, rng_ptr, R, C, stride_r, stride_c, stream, CAST: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row; or a part of the tensor's for each program, see :func:`whole_amax`."""
    tiles = tl.cdiv(C, TILE_C)
    most = tl.zeros([TILE_R * TILE_C // 16], tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, TILE_R) * tiles, tl.num_programs(0)):
        row0 = (tile // tiles) * TILE_R
        col0 = (tile % tiles) * TILE_C
        y = prepared(x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST, TILE_R, TILE_C, HARDWARE)
        largest = block_amax(y)
        if CAST.outer == "row" or CAST.outer == "rows128":
            largest = tl.reshape(largest, [TILE_R, TILE_C // 16])
            store_amax_per_row(amax_ptr, row0 + tl.arange(0, TILE_R), largest, R, 1)
        else:
            most = tl.maximum(most, magnitudes(largest))
    if CAST.outer == "tensor":
        store_part(amax_ptr, whole_ptr, tl.max(most, axis=0))


@triton.jit(do_not_specialize=["stream", "parts"])
def block_cast_kernel(
    x_ptr, amax_ptr, whole_ptr, data_ptr, scale_ptr, sums_ptr, largest_ptr, rng_ptr, R, C, stride_r, stride_c, width,
    stream, parts, CAST: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tile ``pid``, tiles counted along the row first.

    Args:
        amax_ptr: outer amaxes; or ``parts`` of a tensor's, if ``whole_ptr`` is there; None where the tile finds them.
        whole_ptr: where the outer amaxes go if they are not given.
        data_ptr: codes, two to a byte if ``CAST.packed``, or values.
        scale_ptr: stored block scales; FP32 scales that :func:`align_kernel` will store if aligned.
        sums_ptr: under a scalar correction, FP64 ``<y,y>`` of each group and then ``<y,q>``.
        largest_ptr: the largest block scale, if aligned.
    """
    tiles = tl.cdiv(width, TILE_C)
    row0 = (tl.program_id(0) // tl.maximum(tiles, 1)) * TILE_R
    col0 = (tl.program_id(0) % tl.maximum(tiles, 1)) * TILE_C
    y = prepared(x_ptr, rng_ptr, R, C, stride_r, stride_c, row0, col0, stream, CAST, TILE_R, TILE_C, HARDWARE)
    cast_tile(
        y, amax_ptr, whole_ptr, data_ptr, scale_ptr, sums_ptr, largest_ptr, rng_ptr, R, width, row0, col0, stream,
        parts, CAST, TILE_R, TILE_C, HARDWARE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stream", "blocks", "rows"])
def align_kernel(
    scale_ptr, largest_ptr, whole_ptr, out_ptr, rng_ptr, rows, blocks, stream, CAST: tl.constexpr, BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """FP32 block scales into the range of E4M3, by an outer amax that is given in ``whole_ptr`` or found here."""
    if largest_ptr is None:
        amax = tl.load(whole_ptr)
    else:
        amax = tl.load(largest_ptr) * CAST.target
        if tl.program_id(0) == 0:
            tl.store(whole_ptr, amax)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows.to(tl.int64) * blocks
    scaled = tl.load(scale_ptr + index, mask=inside, other=0.0) * outer_encode_scale(amax, CAST.numerator)
    if CAST.correction == "eden":
        row = index // blocks
        is_number = tl.abs(scaled) <= FLT_MAX
        stored = stochastic_e4m3(scaled, is_number, rng_ptr, index - row * blocks, row, stream, CAST, HARDWARE)
    else:
        stored = to_e4m3(scaled, HARDWARE)
    tl.store(out_ptr + index, stored, mask=inside)


@triton.jit(do_not_specialize=["count", "out_count"])
def fold_sums_kernel(sums_ptr, out_ptr, amax_ptr, count, out_count, SUMS: tl.constexpr):
    """Two vectors of ``count`` sums, one after the other, to a sum for each ``SUMS`` neighbours.

    The last program there is gives the amax times the correction instead, if ``amax_ptr`` is there.
    """
    index = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    yy = neighbour_sums(tl.load(sums_ptr + index, mask=index < count, other=0.0), SUMS)
    yq = neighbour_sums(tl.load(sums_ptr + count + index, mask=index < count, other=0.0), SUMS)
    one = tl.arange(0, 1)
    if amax_ptr is None:
        place = out_ptr + tl.program_id(0) + one
        tl.store(place, yy)
        tl.store(place + out_count, yq)
    else:
        tl.store(out_ptr + one, tl.load(amax_ptr + one) * shrinkage(yy, yq))


def supports(spec: CastSpec, x_dtype: torch.dtype) -> tuple[bool, str]:
    """Whether these kernels cover ``spec`` on inputs of ``x_dtype``, and if not, why."""
    aligned = spec.scale_rule is ScaleRule.ALIGNED
    four_over_six, scalar = spec.scale_rule.is_four_over_six, spec.correction is Correction.SCALAR
    checks = (
        (x_dtype in (torch.bfloat16, torch.float16, torch.float32), f"input dtype {x_dtype}"),
        (spec.block[1] > 0, f"element={spec.element} per {spec.outer.value}, as it is cast here"),
        (spec.block[0] in (1, 16, 32, 64, 128), f"block={spec.block}"),
        (not four_over_six or spec.block[1] == BLOCK_SIZE, f"4over6 in blocks of {spec.block}"),
        (not spec.search or spec.block[1] == BLOCK_SIZE, f"a search in blocks of {spec.block}"),
        (not aligned or spec.block[1] == BLOCK_SIZE, f"aligned scales of blocks of {spec.block}"),
        (not aligned or (spec.element == E2M1 and spec.outer is Outer.TENSOR), f"aligned scales of {spec.label}"),
        (not scalar or (spec.outer is Outer.TENSOR and not aligned), f"a scalar correction of {spec.label}"),
    )
    for covered, what in checks:
        if not covered:
            return False, f"the Triton kernels do not cover {what}"
    return True, ""


class Target(NamedTuple):
    """Where one operand of a cast goes.

    Attributes:
        spec: what :func:`supports`.
        form: ``"codes"`` or ``"values"``.
        side: bit 0 of the stream.
        sharded: whether ``rng`` tells of the operand's place in a whole tensor.
        given: the outer amax to cast by; None takes the operand's own.
        amax: where the cast's outer amax is written; None if it is given and does not change.
        data: codes or values; scale_inv: block scales, None under ``"values"``.
    """

    spec: CastSpec
    form: str
    side: int
    sharded: bool
    given: Place | None
    amax: Place | None
    data: Place
    scale_inv: Place | None


def tile_rows(spec: CastSpec, of_amax: bool = False) -> int:
    """Rows of a tile of the cast, or of its amax. A program keeps what it casts in registers; 16 rows are best."""
    return max(spec.block[0], 64 if of_amax else 16)


def warps_for(rows: int) -> int:
    """Warps of a program whose tile has so many rows."""
    return 4 if rows <= 32 else 8


def as_bytes(scale_inv: torch.Tensor) -> torch.Tensor:
    """Block scales as kernels see them: Triton has no type for E8M0."""
    return scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)


def add_cast(
    builder: LaunchBuilder, x: TensorMeta, place: Place, target: Target, rng: Place | None, stream: int
) -> None:
    """Cast one operand: ``x`` of metadata [R, C] at any strides."""
    spec = target.spec
    rows, cols = x.shape
    width = spec.padded_cols(cols)
    hardware, multiprocessors = device_facts(builder.device)
    aligned, scalar = spec.scale_rule is ScaleRule.ALIGNED, spec.correction is Correction.SCALAR
    scaled_by_all = spec.outer not in (Outer.BLOCK128, Outer.NONE) and not aligned
    cast = BlockCast.of(spec, "codes" if aligned else target.form, target.side, target.sharded)
    tile = (tile_rows(spec), TILE_C)
    tiles = -(-rows // tile[0]) * -(-width // TILE_C)
    amax, whole, parts = target.given, None, 0
    if target.given is None and not aligned:
        whole = builder.buffer((1,), torch.float32) if scalar else target.amax
        amax = None
    if target.given is None and scaled_by_all:
        if spec.outer.is_by_rows:
            assert whole is not None
            amax, whole = whole, None
            add_zeros(builder, [amax, None], [rows, 0])
            programs = min(tiles, 8 * multiprocessors)
        else:
            parts = programs = min(tiles, 8 * multiprocessors, MOST_PARTS)
            amax = builder.buffer((max(parts, 1),), torch.float32)
            if not parts:
                add_zeros(builder, [whole, None], [1, 0])
        builder.step(
            block_amax_kernel, programs, place, amax, whole, rng, rows, cols, *x.strides, stream, cast,
            tile_rows(spec, of_amax=True), TILE_C, hardware, num_warps=8,
        )  # fmt: skip
        if spec.outer is Outer.ROWS128:
            add_sharing(builder, amax, rows)
    sums = largest = None
    unaligned: Place | None = None
    scales = Block(target.scale_inv, as_bytes) if target.scale_inv else None
    groups = rows * width // cast.group
    if scalar:
        sums = builder.buffer((2, max(groups, 1)), torch.float64)
    if aligned:
        scales = unaligned = builder.buffer((rows, width // spec.block[1]), torch.float32)
        if target.given is None:
            largest = builder.buffer((1,), torch.float32)
            add_zeros(builder, [largest, None], [1, 0])
    codes = builder.buffer((rows, width // 2), torch.uint8) if aligned and target.form == "values" else target.data
    builder.step(
        block_cast_kernel, max(tiles, 1), place, None if aligned else amax, whole, codes, scales, sums, largest, rng,
        rows, cols, *x.strides, width, stream, parts, cast, *tile, hardware, num_warps=warps_for(tile[0]),
    )  # fmt: skip
    if unaligned:
        _add_alignment(builder, target, cast, rows, width, unaligned, largest, codes, rng, stream)
    if sums:
        assert target.amax is not None
        source = whole if target.given is None else target.given
        assert source is not None
        add_correction(builder, sums, groups, source, target.amax)


def _add_alignment(
    builder: LaunchBuilder,
    target: Target,
    cast: BlockCast,
    rows: int,
    width: int,
    scales: Place,
    largest: Place | None,
    codes: Place,
    rng: Place | None,
    stream: int,
) -> None:
    """Store the block scales, and the values if they are asked for."""
    blocks = width // cast.width
    hardware, _ = device_facts(builder.device)
    stored = target.scale_inv or builder.buffer((rows, blocks), torch.float8_e4m3fn)
    builder.step(
        align_kernel, max(-(-rows * blocks // SCALES_PER_PROGRAM), 1), scales, largest, target.given or target.amax,
        Block(stored, as_bytes), rng, rows, blocks, stream, cast, SCALES_PER_PROGRAM, hardware, num_warps=4,
    )  # fmt: skip
    if target.form == "values":
        add_decode(builder, [Codes(codes, stored, rows, blocks)], [target.data])


def add_correction(builder: LaunchBuilder, sums: Place, count: int, source: Place, amax: Place) -> None:
    """``amax = source * <y,y> / <y,q>``, from sums [2, count]; ``source`` itself without any."""
    while count > SUMS:
        folded = -(-count // SUMS)
        out = builder.buffer((2, folded), torch.float64)
        builder.step(fold_sums_kernel, folded, sums, out, None, count, folded, SUMS, num_warps=4)
        sums, count = out, folded
    builder.step(fold_sums_kernel, 1, sums, amax, source, count, 1, SUMS, num_warps=4)
