"""A linear layer's forward, and its backward, as one launch each: casts, decodes and products in a row.

    forward     x, w cast both ways; y = x . w^T + b              x^T, w^T kept as codes
    backward    dy cast both ways; x^T, w^T decoded; dx = dy . w;  dw = dy^T . x

A weight that is given as codes with a scale for each tile is not cast. One kernel decodes it (forward), or transposes
codes and scales, which are then decoded with those of x (backward). Small products of FP8 codes with one
scale per tensor (:func:`fp4engine.ops.gemm_fp8.is_small`) are kernels of the launch. PyTorch multiplies other FP8 codes
after the launch. The launch then casts, and writes the factors that those products need, or their block scales in the
order in which PyTorch reads them.

The kernels are those of the single operations, so the bytes are the same. A single launch saves time of the host: it
asks one question in place of one per operation, and makes one allocation for all buffers that only its kernels see. All
that an FP4 layer keeps from forward to backward is one buffer of bytes (:func:`_stored`), so it is one more allocation.

Legend: x is [M, K], w [N, K], y and dy [M, N].
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fp4engine.constants import AMAX_STRIDE, BLOCK_SIZE
from fp4engine.formats import CastSpec
from fp4engine.formats.one_buffer import offsets
from fp4engine.kernels import blocks, cast_fp8
from fp4engine.kernels.amax import add_fold, add_folded_amax, amax_size
from fp4engine.kernels.amax_history import History, Past
from fp4engine.kernels.block_scales import Scales, add_block_scales
from fp4engine.kernels.cast import Side
from fp4engine.kernels.cast_fp8_blocks import add_casts
from fp4engine.kernels.dequantize import Codes, add_decode, add_decode_tiles
from fp4engine.kernels.draw import add_draw
from fp4engine.kernels.factor import Factor
from fp4engine.kernels.gemm import add_gemm
from fp4engine.kernels.gemm_launch import Matrix
from fp4engine.kernels.launch import Block, Draft, Facts, Launch, Place, facts, part_of, resolver
from fp4engine.kernels.load import Reading
from fp4engine.kernels.quantize import Target, add_cast, data_of, scales_of
from fp4engine.kernels.tiles import Spread, Tiles, add_spread

__all__ = [
    "Past",
    "facts",
    "resolve_amaxes",
    "resolve_backward",
    "resolve_blocks_backward",
    "resolve_blocks_forward",
    "resolve_forward",
    "resolve_fp8_backward",
    "resolve_fp8_forward",
    "resolve_tiled_forward",
]

Shape = tuple[int, int]


class Values(NamedTuple):
    """An operand as a product reads it: BF16 values or FP8 codes, and their outer factor ``amax / numerator``.

    Attributes:
        by_rows: whether each row has an amax.
    """

    matrix: Matrix
    amax: Place | Block
    by_rows: bool
    numerator: float


class Stored(NamedTuple):
    """An operand in codes."""

    shape: Shape
    key: str
    data: Place | Block
    scale_inv: Place | Block
    amax: Place | Block


@resolver
def resolve_forward(
    x: Facts,
    weight: Facts,
    bias: Facts | None,
    device: torch.device,
    keys: tuple[str, str, str, str],
    streams: tuple[int, int],
    dtype: torch.dtype,
    shared: tuple[bool, bool] = (False, False),
    is_given: bool = False,
) -> Launch:
    """``(x, w, bias, amaxes, amaxes of w) -> [x^T and w^T as they are kept,] y``.

    Args:
        keys: of the specs of x, x^T, w and w^T; empty for a transposed operand that backward does not need.
        streams: stream ids of x and w.
        dtype: of y.
        shared: for x and for w, whether ``amaxes`` has the outer amaxes of its casts. ``amaxes`` is in the order of
            ``keys``, as :func:`resolve_amaxes` makes it. What backward needs of them is copied.
        is_given: whether the input ``amaxes of w`` has the outer amaxes of w and w^T, likewise.
    """
    draft = Draft(device, inputs=5)
    amaxes = _rows(draft.inputs[3], [shared[index // 2] and key != "" for index, key in enumerate(keys)])
    if is_given:
        amaxes[2:] = _rows(draft.inputs[4], (True, True))
    kept = _stored(draft.output, [(x.shape[::-1], keys[1]), (weight.shape[::-1], keys[3])])
    left = _cast_forward(draft, x, draft.inputs[0], keys[0], kept[0], streams[0], amaxes[:2])
    right = _cast_forward(draft, weight, draft.inputs[1], keys[2], kept[1], streams[1], amaxes[2:])
    of_x, of_w = (None if operand is None else operand.amax for operand in kept)
    add_fold(draft, (of_x and amaxes[1], of_w and amaxes[3]), (of_x, of_w), 1)
    _multiply(draft, left, right, dtype, draft.inputs[2] if bias else None)
    return draft.launch()


@resolver
def resolve_tiled_forward(
    x: Facts,
    tiles: Facts,
    bias: Facts | None,
    device: torch.device,
    keys: tuple[str, str, str],
    stream: int,
    dtype: torch.dtype,
    outs: int,
    parts: int,
) -> Launch:
    """``(x, w's tiles, bias) -> [x^T as it is kept,] y``.

    Args:
        tiles: facts of w as it was cast before: all but its alignment follows from ``outs`` and ``parts``.
        keys: of the specs of x, x^T and w; x^T's is empty if backward does not need it.
        stream: stream id of x.
        dtype: of y.
        outs, parts: N, and of how many parts w's tiles consist.
    """
    draft = Draft(device, inputs=3)
    (kept,) = _stored(draft.output, [(x.shape[::-1], keys[1])])
    left = _cast_forward(draft, x, draft.inputs[0], keys[0], kept, stream)
    _, packed, bias_place = draft.inputs
    weight = Tiles(packed, CastSpec.from_key(keys[2]), outs, x.shape[1], parts)
    right = _room_for_values(draft, (outs, x.shape[1]), keys[2], weight.amax)
    add_decode_tiles(draft, weight, right.matrix.place)
    _multiply(draft, left, right, dtype, bias_place if bias else None)
    return draft.launch()


@resolver
def resolve_backward(
    grad: Facts,
    ins: int,
    device: torch.device,
    keys: tuple[str, str, str, str],
    has_rng: bool,
    stream: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    tiles: tuple[Facts, int] | None = None,
    shared: bool = False,
    place: tuple[int, int] | None = None,
    live: Facts | None = None,
) -> Launch:
    """``(dy, rng, amaxes[, x^T and w^T as they are kept][, w's tiles]) -> [dx][, dw]``.

    Args:
        ins: K.
        keys: of the specs of dy, dy^T, x^T and w^T; x^T's or w^T's is empty if that operand was not kept, and then the
            product that reads it is not computed.
        has_rng: whether ``rng`` is given: a draw, which says where dy begins if dy is a part of a matrix.
        stream: stream id of dy.
        dtypes: of dx and dw.
        tiles: facts of w's tiles, not transposed, and their number of parts, if these are there in place of w^T.
        shared: whether ``amaxes`` has the outer amaxes of dy's casts, as :func:`resolve_amaxes` makes them.
        place: row and column at which dy begins in the whole matrix; None if it is whole.
        live: facts of the random stream's state, if ``rng`` is that state and the launch takes the draw from it.
    """
    (rows, outs), (row_key, col_key, inp_key, weight_key) = grad.shape, keys
    in_buffer = [((ins, rows), inp_key), ((ins, outs), "" if tiles else weight_key)]
    is_kept, placed = any(key for _, key in in_buffer), place is not None
    draft = Draft(device, inputs=3 + is_kept + (tiles is not None))
    _, drawn, amaxes, *others = draft.inputs
    of_row, of_col = _rows(amaxes, [shared and weight_key != "", shared and inp_key != ""])
    row = _scratch_side(draft, row_key, 0, (rows, outs), of_row, placed) if weight_key else None
    col = _scratch_side(draft, col_key, 1, (outs, rows), of_col, placed) if inp_key else None
    rng = drawn if has_rng else None
    if live is not None:
        rng = draft.scratch((2 if place is None else 4,), torch.int64)
        add_draw(draft, drawn, 1, rng, place)
    add_cast(draft, Reading(grad), row, col, rng, stream)
    inp, weight = _stored(lambda *_: others[0], in_buffer)
    if tiles:
        of_w = Tiles(others[-1], CastSpec.from_key(weight_key), outs, ins, tiles[1])
        weight = Stored((ins, outs), weight_key, *_transposed(draft, of_w), of_w.amax)
    operands = _decoded(draft, [operand for operand in (weight, inp) if operand is not None])
    for target, shape, key, dtype, other in (
        (row, (rows, outs), row_key, dtypes[0], operands[0]),
        (col, (outs, rows), col_key, dtypes[1], operands[-1]),
    ):
        if target is not None:
            _multiply(draft, _values(target, key, shape), other, dtype)
    return draft.launch()


@resolver
def resolve_amaxes(tensors: tuple[Facts, ...], device: torch.device, keys: tuple[str, ...]) -> Launch:
    """``(*tensors) -> amaxes``: FP32 [sides, AMAX_STRIDE], whose first column has the outer amax of each side.

    The other columns are not read.

    Args:
        keys: of the rowwise and the columnwise spec of each tensor; empty for a side that is not asked for.
    """
    draft = Draft(device, inputs=len(tensors))
    rows = _rows(draft.output((sum(map(bool, keys)), AMAX_STRIDE), torch.float32), [key != "" for key in keys])
    for i, tensor in enumerate(tensors):
        sides = [Side.of_key(key, "codes", bit) for bit, key in enumerate(keys[2 * i : 2 * i + 2])]
        add_folded_amax(draft, Reading(tensor, None, draft.inputs[i]), *sides, (rows[2 * i], rows[2 * i + 1]))
    return draft.launch()


def _rows(amaxes: Place, given: Iterable[bool]) -> list[Block | None]:
    """For each side its row of ``amaxes`` [sides, AMAX_STRIDE]; None for a side that has none there."""
    index = itertools.count()
    return [_row(amaxes, next(index)) if is_given else None for is_given in given]


def _row(amaxes: Place, index: int) -> Block:
    return Block(amaxes, lambda tensor: tensor[index], index * AMAX_STRIDE * torch.float32.itemsize)


def _stored(
    make: Callable[[tuple[int], torch.dtype], Place], operands: Sequence[tuple[Shape, str]]
) -> list[Stored | None]:
    """Operands as a layer keeps them: codes, block scales and amax of each in turn, in one buffer, made by ``make``.

    Block scales are bytes, which is how kernels read them. Where nothing is kept there is no buffer.

    Args:
        operands: shape of each, and the key of its spec; empty for one that is not kept.
    """
    sizes: list[int] = []
    for shape, key in operands:
        if key:
            side = Side.of(CastSpec.from_key(key), "codes", 1)
            (rows, width), (_, blocks) = data_of(side, *shape)[0], scales_of(*shape)[0]
            sizes += rows * width, rows * blocks, amax_size(side, rows) * torch.float32.itemsize
    if not sizes:
        return [None] * len(operands)
    starts, total = offsets(sizes)
    buffer, dtypes = make((total,), torch.uint8), (torch.uint8, torch.uint8, torch.float32) * (len(sizes) // 3)
    parts = (Block(buffer, partial(part_of, *part), part[0]) for part in zip(starts, sizes, dtypes, strict=True))
    return [Stored(shape, key, next(parts), next(parts), next(parts)) if key else None for shape, key in operands]


def _cast_forward(
    draft: Draft,
    tensor: Facts,
    place: Place,
    key: str,
    kept: Stored | None,
    stream: int,
    amaxes: Sequence[Block | None] = (None, None),
) -> Values:
    """Cast a tensor: its rowwise operand to values for the next product, its columnwise one to codes.

    Args:
        key: of the rowwise operand's spec.
        kept: where the columnwise operand goes; None if it is not asked for.
        amaxes: outer amaxes of both sides; None lets a side find its own.
    """
    of_row, amax = amaxes
    row = _scratch_side(draft, key, 0, tensor.shape, of_row)
    col = None
    if kept is not None:
        side = Side.of(CastSpec.from_key(kept.key), "codes", 1)
        col = Target(side, kept.amax if amax is None else amax, amax is not None, kept.data, kept.scale_inv)
    add_cast(draft, Reading(tensor, None, place), row, col, None, stream)
    return _values(row, key, tensor.shape)


def _scratch_side(
    draft: Draft, key: str, bit: int, shape: Shape, amax: Block | None = None, placed: bool = False
) -> Target:
    """A side that is cast to values in scratch buffers, by its own outer amax or by ``amax``."""
    side = Side.of(CastSpec.from_key(key), "values", bit, placed)
    data, scale_inv = draft.scratch(*data_of(side, *shape)), draft.scratch(*scales_of(*shape))
    own = draft.scratch((amax_size(side, shape[0]),), torch.float32) if amax is None else amax
    return Target(side, own, amax is not None, data, scale_inv)


def _values(target: Target, key: str, shape: Shape) -> Values:
    (rows, width), dtype = data_of(target.side, *shape)
    matrix = Matrix(target.data, Facts((rows, width), (width, 1), dtype, True))
    return Values(matrix, target.amax, amax_size(target.side, rows) > 1, CastSpec.from_key(key).numerator)


def _transposed(draft: Draft, tiles: Tiles) -> Spread:
    """Codes and scales of the operand w^T [K, N], made from the tiles of w."""
    side, shape = Side.of(tiles.spec, "codes", 1), (tiles.cols, tiles.rows)
    made = Spread(draft.scratch(*data_of(side, *shape)), draft.scratch(*scales_of(*shape)))
    add_spread(draft, tiles, made, transposed=True)
    return made


def _decoded(draft: Draft, stored: list[Stored]) -> list[Values]:
    """Decode operands to values, all by one kernel."""
    codes = [Codes(data, scale_inv, rows, -(-cols // BLOCK_SIZE)) for (rows, cols), _, data, scale_inv, _ in stored]
    values = [_room_for_values(draft, shape, key, amax) for shape, key, _, _, amax in stored]
    add_decode(draft, codes, [operand.matrix.place for operand in values])
    return values


def _room_for_values(draft: Draft, shape: Shape, key: str, amax: Place | Block) -> Values:
    """A scratch buffer for the decoded values of an operand."""
    rows, width = shape[0], -(-shape[1] // BLOCK_SIZE) * BLOCK_SIZE
    facts_of = Facts((rows, width), (width, 1), torch.bfloat16, True)
    matrix = Matrix(draft.scratch((rows, width), torch.bfloat16), facts_of)
    spec = CastSpec.from_key(key)
    return Values(matrix, amax, amax_size(Side.of(spec, "codes", 1), rows) > 1, spec.numerator)


def _multiply(draft: Draft, left: Values, right: Values, dtype: torch.dtype, bias: Place | None = None) -> None:
    add_gemm(
        draft, left.matrix, right.matrix, left.amax, right.amax, bias, left.numerator * right.numerator,
        (left.by_rows, right.by_rows), None, dtype,
    )  # fmt: skip


Pasts = tuple[Past | None, ...]
"""For each tensor the memory of delayed scaling; None if it is scaled by its own amax; empty if all of them are."""


@resolver
def resolve_fp8_forward(
    x: Facts,
    weight: Facts,
    bias: Facts | None,
    pasts: Pasts,
    device: torch.device,
    keys: tuple[str, str, str, str],
    dtype: torch.dtype | None,
) -> Launch:
    """``(x, w, bias, memory of x, memory of w) -> [x^T's codes, amax][, w^T's codes, amax], y``.

    If PyTorch multiplies, the outputs begin with x's codes, w's, alpha and one, and there is no y. Codes are PyTorch's
    FP8; their product is multiplied by alpha and one. A memory is two tensors, the values and the amax of delayed
    scaling.

    Args:
        keys: as in :func:`resolve_forward`; FP8 with one scale per tensor.
        dtype: of y; None where PyTorch multiplies.
    """
    draft = Draft(device, inputs=7)
    make = draft.output if dtype is None else draft.scratch
    specs = [CastSpec.from_key(key) for key in keys[::2]]
    rowwise = [_codes(make, spec, tensor.shape) for tensor, spec in zip((x, weight), specs, strict=True)]
    factors = [make((1, 1), torch.float32) for _ in range(2)] if dtype is None else []
    operands: list[Values] = []
    for i, (tensor, spec, codes) in enumerate(zip((x, weight), specs, rowwise, strict=True)):
        col_key, col, factor = keys[2 * i + 1], None, None
        if col_key:
            col_spec = CastSpec.from_key(col_key)
            kept = _codes(draft.output, col_spec, tensor.shape[::-1])
            amax = draft.output((1,), torch.float32)
            col = cast_fp8.Target(col_spec, amax, False, kept.place)
        else:
            amax = draft.scratch((1,), torch.float32)
        operands.append(Values(codes, amax, False, spec.numerator))
        if i == 1 and dtype is None:
            factor = Factor(operands[0].amax, operands[0].numerator * spec.numerator, *factors)
        row = cast_fp8.Target(spec, amax, False, codes.place, factor)
        cast_fp8.add_cast(draft, Reading(tensor, None, draft.inputs[i]), row, col, _history(draft, pasts, i, 3))
    if dtype is not None:
        _multiply(draft, *operands, dtype, draft.inputs[2] if bias else None)
    return draft.launch()


@resolver
def resolve_fp8_backward(
    grad: Facts,
    ins: int,
    pasts: Pasts,
    device: torch.device,
    keys: tuple[str, str, str, str],
    dtypes: tuple[torch.dtype, torch.dtype] | None,
) -> Launch:
    """``(dy, x^T's codes, amax, w^T's codes, amax, memory of dy) -> [dx][, dw]``.

    If PyTorch multiplies, the outputs are ``one[, dy's codes, alpha][, dy^T's codes, alpha]``.

    Args:
        ins: K.
        keys: as in :func:`resolve_backward`.
        dtypes: of dx and dw; None if PyTorch multiplies.
    """
    draft = Draft(device, inputs=7)
    make = draft.output if dtypes is None else draft.scratch
    one = make((1, 1), torch.float32)
    amax = draft.scratch((1,), torch.float32)
    targets: list[cast_fp8.Target | None] = [None, None]
    products: list[tuple[Values, Values, torch.dtype]] = []
    for side, (other_key, shape, first) in enumerate(((keys[3], grad.shape, 3), (keys[2], grad.shape[::-1], 1))):
        if other_key:
            spec, other_spec = CastSpec.from_key(keys[side]), CastSpec.from_key(other_key)
            codes, factor = _codes(make, spec, shape), None
            other, other_amax = draft.inputs[first : first + 2]
            if dtypes is None:
                factor = Factor(other_amax, spec.numerator * other_spec.numerator, make((1, 1), torch.float32), one)
            else:
                left = Values(codes, amax, False, spec.numerator)
                kept = _codes(lambda *_, place=other: place, other_spec, (ins, shape[1]))
                products.append((left, Values(kept, other_amax, False, other_spec.numerator), dtypes[side]))
            targets[side] = cast_fp8.Target(spec, amax, False, codes.place, factor)
    cast_fp8.add_cast(draft, Reading(grad), *targets, _history(draft, pasts, 0, 5))
    for left, right, dtype in products:
        _multiply(draft, left, right, dtype)
    return draft.launch()


def _history(draft: Draft, pasts: Pasts, index: int, first: int) -> History | None:
    """The history of tensor ``index``, if it has one. From input ``first`` on, each tensor has values and an amax."""
    past, place = pasts[index] if pasts else None, first + 2 * index
    return None if past is None else History(past, draft.inputs[place : place + 2])


def _codes(make: Callable[[Shape, torch.dtype], Place], spec: CastSpec, shape: Shape) -> Matrix:
    """FP8 codes of an operand of ``shape``, in the buffer that ``make`` declares."""
    stored, dtype = (shape[0], spec.padded_cols(shape[1])), spec.element.torch_dtype
    return Matrix(make(stored, dtype), Facts(stored, (stored[1], 1), dtype, True))


@resolver
def resolve_blocks_forward(x: Facts, weight: Facts, device: torch.device, keys: tuple[str, str, str, str]) -> Launch:
    """``(x, w) -> x's codes[, x^T's codes, scale_inv, amax], w's codes[, w^T's, scale_inv, amax], x's scales, w's``.

    Codes are uint8; the scales at the end are those of :mod:`fp4engine.kernels.block_scales`.

    Args:
        keys: as in :func:`resolve_forward`; FP8 in blocks of 128 columns.
    """
    draft = Draft(device, inputs=2)
    scales: list[Scales] = []
    for i, tensor in enumerate((x, weight)):
        row, col = keys[2 * i : 2 * i + 2]
        scales += _cast_blocks(draft, tensor, draft.inputs[i], (row, col), (False, True))[:1]
    add_block_scales(draft, *scales, CastSpec.from_key(keys[2]).block[0])
    return draft.launch()


@resolver
def resolve_blocks_backward(
    grad: Facts, ins: int, device: torch.device, keys: tuple[str, str, str, str], has_rng: bool, stream: int
) -> Launch:
    """``(dy, x^T's scale_inv, w^T's, rng) -> [dy's codes][, dy^T's][, dy's scales, w^T's][, dy^T's scales, x^T's]``.

    Args:
        ins: K.
        keys, has_rng, stream: as in :func:`resolve_backward`.
    """
    draft = Draft(device, inputs=4)
    rng = draft.inputs[3] if has_rng else None
    others = ((keys[3], draft.inputs[2]), (keys[2], draft.inputs[1]))
    row, col = (key if other else "" for key, (other, _) in zip(keys[:2], others, strict=True))
    lefts = iter(_cast_blocks(draft, grad, draft.inputs[0], (row, col), (False, False), rng, stream))
    for side, (other, place) in enumerate(others):
        if other:
            spec = CastSpec.from_key(other)
            right = Scales(place, ins, spec.num_blocks(spec.padded_cols(grad.shape[1 - side])))
            add_block_scales(draft, next(lefts), right, spec.block[0])
    return draft.launch()


def _cast_blocks(
    draft: Draft,
    tensor: Facts,
    place: Place,
    keys: tuple[str, str],
    is_kept: tuple[bool, bool],
    rng: Place | None = None,
    stream: int = 0,
) -> list[Scales]:
    """Cast both sides, or the one whose key is not empty, to codes in blocks, which are outputs; return their scales.

    If an operand is kept, scales and amax are outputs too.
    """
    targets: list[blocks.Target | None] = [None, None]
    scales: list[Scales] = []
    for side, (key, kept) in enumerate(zip(keys, is_kept, strict=True)):
        if key:
            spec = CastSpec.from_key(key)
            rows, cols = tensor.shape[::-1] if side else tensor.shape
            width = spec.padded_cols(cols)
            count = spec.num_blocks(width)
            data = draft.output((rows, width), torch.uint8)
            scale_inv = (draft.output if kept else draft.scratch)((rows, count), spec.scale.torch_dtype)
            amax = draft.output((1,), torch.float32) if kept else None
            targets[side] = blocks.Target(spec, "codes", side, False, None, amax, data, scale_inv)
            scales.append(Scales(scale_inv, rows, count))
    add_casts(draft, tensor, place, targets[0], targets[1], rng, stream)
    return scales
