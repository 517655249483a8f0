"""From specs to kernels: which kernel casts a side, and both sides in as few launches as they allow.

The one place that says whether a kernel covers a cast (:func:`supports`).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.kernels import blocks, cast_fp8, cast_fp8_blocks, quantize
from fp4engine.kernels.amax import resolve_amax
from fp4engine.kernels.amax_history import History
from fp4engine.kernels.cast import Side
from fp4engine.kernels.launch import Launch, LaunchBuilder, Matrix, Place, TensorMeta, meta_of, resolver
from fp4engine.kernels.load import Prologue, Reading
from fp4engine.kernels.quantize import Target
from fp4engine.kernels.source import Asked

Keys = tuple[str, str]
"""Keys of the rowwise and the columnwise spec, empty for a side that is not asked for."""


COVERED = {
    "scale_rule": (
        *(ScaleRule.AMAX, ScaleRule.FOUR_OVER_SIX_MAE, ScaleRule.FOUR_OVER_SIX_MSE, ScaleRule.ALIGNED, ScaleRule.STD),
        *(ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.MIDMAX, ScaleRule.OPTION3, ScaleRule.TOPBINADE),
        ScaleRule.CEIL87,
    ),
    "rounding": (
        *(RoundingMode.EVEN, RoundingMode.AWAY, RoundingMode.ZERO, RoundingMode.TRUNCATE, RoundingMode.STOCHASTIC),
    ),
    "outer": (Outer.TENSOR, Outer.ROW, Outer.ROWS128, Outer.BLOCK128, Outer.NONE),
    "correction": (Correction.NONE, Correction.EDEN16, Correction.EDEN128, Correction.SCALAR),
}
"""What kernels compute, by the field of a spec. A member that is new to its enumeration is to be added here with its
kernel; until then the reference casts by it."""


def supports(spec: CastSpec, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether kernels cast matrices of ``dtype`` by ``spec``, and if not, why."""
    for field, words in COVERED.items():
        if (word := getattr(spec, field)) not in words:
            return False, f"the Triton kernels do not cover {field}={word.value}"
    return blocks.supports(spec, dtype) if spec.block[1] else cast_fp8.supports(spec, dtype)


def fuses(spec: CastSpec, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernels that cast both sides of a matrix in one pass cover ``spec``, and if not, why.

    They alone read what a norm or an activation makes of a matrix, and the experts of a grouped pass.
    """
    return (quantize if spec.block[1] else cast_fp8).supports(spec, dtype)


class Wanted(NamedTuple):
    """A side of a cast that is asked for.

    Attributes:
        spec: what :func:`supports`.
        form: ``"codes"`` or ``"values"``.
        amax: the outer amax to cast by; None takes the operand's own.
    """

    spec: CastSpec
    form: str
    amax: Place | None = None


class Made(NamedTuple):
    """An operand in a launch: codes or values; block scales, None beside values; and the outer amax of the cast."""

    data: Matrix
    scale_inv: Matrix | None
    amax: Matrix


def add_casts(
    builder: LaunchBuilder,
    reading: Reading,
    row: Wanted | None,
    col: Wanted | None,
    rng: Place | None,
    stream: int,
    is_placed: bool = False,
    history: History | None = None,
) -> tuple[Made | None, Made | None]:
    """Cast the sides of a matrix that are asked for, in as few kernels as cover them.

    Args:
        rng, stream: the draw and the stream id of the role.
        is_placed: whether ``rng`` tells of the matrix's place in a whole one.
        history: of delayed scaling, by which FP8 sides are scaled.
    """
    rows, cols = reading.shape
    made: list[Made | None] = [None, None]
    fp4: list[Target | None] = [None, None]
    fp8: list[cast_fp8.Target | None] = [None, None]
    others: list[blocks.Target | None] = [None, None]
    for side, (wanted, (height, width)) in enumerate(((row, (rows, cols)), (col, (cols, rows)))):
        if wanted is None:
            continue
        spec, form, given = wanted
        padded = spec.padded_cols(width)
        data = builder.matrix(*_data(spec, form, height, padded))
        scale_inv = (
            builder.matrix((height, spec.num_blocks(padded)), spec.scale.torch_dtype) if form == "codes" else None
        )
        amax = Matrix(given, TensorMeta((1,), (1,), torch.float32, True)) if given else None
        if amax is None or spec.correction is Correction.SCALAR:
            if not spec.block[1] and fp8[0] is not None and not fp8[0].is_given:
                amax = Matrix(fp8[0].amax, TensorMeta((1,), (1,), torch.float32, True))  # one for x and its transpose
            else:
                shape = (height,) if spec.outer.is_by_rows else (1,)
                shape = (height, padded // 128) if spec.outer is Outer.BLOCK128 else shape
                amax = Matrix(builder.buffer(shape, torch.float32), TensorMeta(shape, (1,), torch.float32, True))
        if not spec.block[1]:
            fp8[side] = cast_fp8.Target(spec, amax.place, given is not None, data.place)
        elif fuses(spec, reading.dtype)[0]:
            scales = scale_inv or builder.matrix(*quantize.scales_of(height, width))
            kind = Side.of(spec, form, side, is_placed)
            fp4[side] = Target(kind, amax.place, given is not None, data.place, scales.place)
        else:
            written = None if given and spec.correction is not Correction.SCALAR else amax.place
            scales = scale_inv.place if scale_inv else None
            others[side] = blocks.Target(spec, form, side, is_placed, given, written, data.place, scales)
        made[side] = Made(data, scale_inv, amax)
    if any(fp4):
        quantize.add_cast(builder, reading, fp4[0], fp4[1], rng, stream)
    if any(fp8):
        cast_fp8.add_cast(builder, reading, fp8[0], fp8[1], history)
    if any(others):
        cast_fp8_blocks.add_casts(builder, reading.x, reading.place, others[0], others[1], rng, stream)
    return made[0], made[1]


def _data(spec: CastSpec, form: str, rows: int, width: int) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of the codes or values of an operand [rows, width], padded."""
    if form == "values":
        return (rows, width), spec.values_dtype
    return (rows, width * spec.element.storage_bits // 8), torch.uint8


@resolver
def resolve_cast(
    tensors: tuple[TensorMeta | None, ...],
    device: torch.device,
    asked: Asked,
    shared: bool,
    stream: int,
) -> Launch:
    """``(x, row_amax, col_amax, rng[, statistics, gamma, beta]) -> (data[, scale_inv][, amax])`` of each side.

    A side in the form ``"codes"`` has block scales, and one whose amax is not given returns it. Two FP8 sides whose
    amaxes are not given have one, which the rowwise side returns.

    Args:
        tensors: metadata of the inputs; those that are not there are None.
        asked: with keys of what :func:`supports`.
        shared: whether both given amaxes are one tensor.
        stream: stream id of the role.
    """
    x, row_amax, col_amax, rng = tensors[:4]
    assert x is not None
    builder = LaunchBuilder(device, len(tensors))
    _, row_place, col_place, rng_place = builder.inputs[:4]
    given = (row_place if row_amax else None, (row_place if shared else col_place) if col_amax else None)
    prologue = Prologue.of(asked.kind, asked.dtype, asked.gated) if asked.kind else None
    vectors = [place if told else None for place, told in zip(builder.inputs[4:], tensors[4:], strict=True)]
    reading = Reading(x, prologue, builder.inputs[0], tuple(vectors) or (None, None, None))
    wanted = [
        Wanted(CastSpec.from_key(key), form, amax) if key else None
        for (key, form), amax in zip(asked.sides, given, strict=True)
    ]
    is_placed = rng is not None and rng.shape == (4,)
    made = add_casts(builder, reading, *wanted, rng_place if rng else None, stream, is_placed)
    outputs: list[Place] = []
    for side, own in zip(wanted, made, strict=True):
        if side is not None and own is not None:
            outputs += [own.data.place] if own.scale_inv is None else [own.data.place, own.scale_inv.place]
            if own.amax.place not in (side.amax, *outputs):
                outputs.append(own.amax.place)
    return builder.launch(*outputs)


def amaxes(x: Tensor, keys: Keys, rng: Tensor | None, stream: int) -> list[Tensor]:
    """Outer amaxes of the sides that have a key, unrounded; under FP8 this is the tensor's own amax.

    In one read of x where :func:`fuses`; otherwise a side that may draw signs, or whose amax follows from its elements,
    is cast for it.
    """
    if _all_fuse(keys, x.dtype):
        return resolve_amax(meta_of(x), x.device, *_with_blocks(keys))(x)
    found: list[Tensor] = []
    inputs = (x, None, None, rng)
    tensors = tuple(None if tensor is None else meta_of(tensor) for tensor in inputs)
    for bit, key in enumerate(keys):
        if key:
            spec = CastSpec.from_key(key)
            if spec.correction is Correction.SCALAR:  # what it corrects by is folded in by the cast itself
                spec = spec.replace(correction=Correction.NONE)
            alone = (spec.key, "") if bit == 0 else ("", spec.key)
            asked = Asked(*alone, "codes", "codes", "", "", False, x.dtype)
            found.append(resolve_cast(tensors, x.device, asked, False, stream)(*inputs)[-1])
    return found


@cache
def _all_fuse(keys: Keys, dtype: torch.dtype) -> bool:
    """Whether :func:`fuses` says yes of every side."""
    return all(not key or fuses(CastSpec.from_key(key), dtype)[0] for key in keys)


@cache
def _with_blocks(keys: Keys) -> Keys:
    """The keys, with one of the amax of x itself in place of those without block scales, which have the same amax."""
    row, col = (CastSpec().key if key and not CastSpec.from_key(key).block[1] else key for key in keys)
    return row, col
