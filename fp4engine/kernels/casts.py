"""From specs to kernels: which kernel casts a side, and both sides in as few launches as they allow.

The one place that says whether a kernel covers a cast (:func:`supports`).
"""

from functools import cache

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, Correction, Outer, RoundingMode, ScaleRule
from fp4engine.kernels import blocks, cast_fp8, cast_fp8_blocks, quantize
from fp4engine.kernels.amax import amax_size, resolve_amax
from fp4engine.kernels.cast import Side
from fp4engine.kernels.launch import Draft, Facts, Launch, Place, facts, resolver
from fp4engine.kernels.load import Prologue, Reading
from fp4engine.kernels.quantize import Target
from fp4engine.kernels.source import Asked

Keys = tuple[str, str]
"""Keys of the rowwise and the columnwise spec, empty for a side that is not asked for."""


COVERED = {
    "scale_rule": (
        *(ScaleRule.AMAX, ScaleRule.FOUR_OVER_SIX_MAE, ScaleRule.FOUR_OVER_SIX_MSE, ScaleRule.ALIGNED, ScaleRule.STD),
        *(ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.MIDMAX, ScaleRule.OPTION3, ScaleRule.TOPBINADE),
    ),
    "rounding": (
        *(RoundingMode.EVEN, RoundingMode.AWAY, RoundingMode.ZERO, RoundingMode.TRUNCATE, RoundingMode.STOCHASTIC),
    ),
    "outer": (Outer.TENSOR, Outer.ROW, Outer.BLOCK128, Outer.NONE),
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


@resolver
def resolve_cast(
    tensors: tuple[Facts | None, ...],
    device: torch.device,
    asked: Asked,
    shared: bool,
    stream: int,
) -> Launch:
    """``(x, row_amax, col_amax, rng[, statistics, gamma, beta]) -> (data[, scale_inv][, amax])`` of each side.

    A side in the form ``"codes"`` has block scales, and one whose amax is not given returns it. Two FP8 sides whose
    amaxes are not given have one, which the rowwise side returns.

    Args:
        tensors: facts of the inputs; those that are not there are None.
        asked: with keys of what :func:`supports`.
        shared: whether both given amaxes are one tensor.
        stream: stream id of the role.
    """
    x = tensors[0]
    assert x is not None
    draft = Draft(device, len(tensors))
    reading = Reading(x, Prologue.of(asked.kind, asked.dtype, asked.gated) if asked.kind else None)
    rows, cols = reading.shape
    fp4: list[Target | None] = [None, None]
    fp8: list[cast_fp8.Target | None] = [None, None]
    others: list[blocks.Target | None] = [None, None]
    sharded = tensors[3] is not None and tensors[3].shape == (4,)
    for bit, ((key, form), shape) in enumerate(zip(asked.sides, ((rows, cols), (cols, rows)), strict=True)):
        if not key:
            continue
        spec, given = CastSpec.from_key(key), tensors[1 + bit] is not None
        if spec.block[1] and not fuses(spec, reading.dtype)[0]:
            others[bit] = _block_target(draft, spec, form, bit, sharded, Place(1 + bit) if given else None, shape)
        elif spec.block[1]:
            side = Side.of(spec, form, bit, sharded)
            data = draft.output(*quantize.data_of(side, *shape))
            scale_inv = (draft.output if form == "codes" else draft.scratch)(*quantize.scales_of(*shape))
            amax = Place(1 + bit) if given else draft.output((amax_size(side, shape[0]),), torch.float32)
            fp4[bit] = Target(side, amax, given, data, scale_inv)
        else:
            data = draft.output((shape[0], spec.padded_cols(shape[1])), torch.uint8)
            if form == "codes":
                draft.output((shape[0], 0), spec.scale.torch_dtype)
            if fp8[0] is not None and (shared if given else not fp8[0].is_given):
                amax = fp8[0].amax  # the largest magnitude is that of the transposed matrix too
            else:
                amax = Place(1 + bit) if given else draft.output((1,), torch.float32)
            fp8[bit] = cast_fp8.Target(spec, amax, given, data)
    rng = None if tensors[3] is None else Place(3)
    if any(fp4):
        quantize.add_cast(draft, reading, fp4[0], fp4[1], rng, stream)
    if any(fp8):
        cast_fp8.add_cast(draft, reading, fp8[0], fp8[1])
    if any(others):
        cast_fp8_blocks.add_casts(draft, x, reading.place, others[0], others[1], rng, stream)
    return draft.launch()


def _block_target(
    draft: Draft, spec: CastSpec, form: str, side: int, sharded: bool, given: Place | None, shape: tuple[int, int]
) -> blocks.Target:
    """Outputs of the operand [rows, cols] of one side."""
    rows, cols = shape
    width = spec.padded_cols(cols)
    scale_inv = amax = None
    if form == "codes":
        data = draft.output((rows, width * spec.element.storage_bits // 8), torch.uint8)
        scale_inv = draft.output((rows, width // spec.block[1]), spec.scale.torch_dtype)
    else:
        data = draft.output((rows, width), spec.values_dtype)
    if given is None or spec.correction is Correction.SCALAR:
        outer = {Outer.ROW: (rows,), Outer.BLOCK128: (rows, width // 128)}
        amax = draft.output(outer.get(spec.outer, (1,)), torch.float32)
    return blocks.Target(spec, form, side, sharded, given, amax, data, scale_inv)


def amaxes(x: Tensor, keys: Keys, rng: Tensor | None, stream: int) -> list[Tensor]:
    """Outer amax of the sides asked for, unrounded: that of FP8 is the tensor's own.

    In one read of x where :func:`fuses`; otherwise a side that may draw signs, or whose amax follows from its elements,
    is cast for it.
    """
    if _all_fuse(keys, x.dtype):
        return resolve_amax(facts(x), x.device, *_with_blocks(keys))(x)
    found: list[Tensor] = []
    inputs = (x, None, None, rng)
    tensors = tuple(None if tensor is None else facts(tensor) for tensor in inputs)
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
