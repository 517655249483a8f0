"""Weights that are stored as codes, from shards of their master weights: what distributed optimizers do after a step.

A shard is a range of the flat weight. A block that a shard boundary cuts has one scale, so ranks share amaxes first.
Each rank then casts its own elements among others of the blocks' shared amaxes, which gives its elements the codes, and
every block the scale, that the whole weight would have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4engine.arguments import require_member
from fp4engine.formats import Correction
from fp4engine.reference.scaling import block_amax
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.layout import matrix_shape
from fp4engine.te.pytorch.quantizer import Quantizer, spec_of
from fp4engine.te.pytorch.tensor.block_storage import SIDES
from fp4engine.te.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensorStorage
from fp4engine.te.pytorch.tensor.float8_tensor import Float8TensorStorage, share_amaxes
from fp4engine.te.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from fp4engine.te.pytorch.tensor.identity_tensor import IdentityTensorStorage
from fp4engine.te.pytorch.tensor.mxfp8_tensor import MXFP8TensorStorage
from fp4engine.te.pytorch.tensor.nvfp4_tensor import NVFP4TensorStorage
from fp4engine.tensor import QuantizedTensor as Operands


class _Part(NamedTuple):
    """What this rank writes into one weight, or into one side of a hybrid one.

    Attributes:
        weight: the storage.
        values: [M, K] in the weight's dtype, zeros where other ranks write; None if this rank writes nothing.
        start, stop: the range of the flat weight that is this rank's.
        target: where codes go instead of the weight: a flat shard, a pair of them for both sides of MXFP8, or None.
    """

    weight: Any
    values: Tensor
    start: int
    stop: int
    target: Any


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write shards of master weights into the weights, which ranks all-gather afterwards.

    Args:
        model_weights: whole weights, stored as codes, the same on every rank.
        master_weights: this rank's shard of each; None where it has none.
        start_offsets: where each shard begins in the flat weight.
        group: process group whose ranks have the other shards.
        fsdp_shard_model_weights: where codes go instead of the weights: flat shards, pairs of them for MXFP8.
        manual_post_all_gather_processing: without effect: columnwise codes are made of gathered ones when they are
            needed, or by :func:`post_all_gather_processing`.

    Raises:
        ValueError: a shard that does not lie in its weight, or weights that have no codes.
        NotImplementedError: a format whose codes cannot be made of a part of the weight.
    """
    targets = [None] * len(model_weights) if fsdp_shard_model_weights is None else fsdp_shard_model_weights
    given = list(zip(model_weights, master_weights, start_offsets, targets, strict=True))
    parts = [part for one in given for part in _parts(*one)]
    if group is not None:
        require_member("group", group)
    with torch.no_grad():
        for weight, *_ in given:
            if hasattr(weight, "clear_high_precision_init_val"):
                weight.clear_high_precision_init_val()
        amaxes = [_amaxes(part) for part in parts]
        if torch.distributed.is_initialized():
            share_amaxes([amax for of_part in amaxes for amax in of_part.values()], group)
        for part, of_part in zip(parts, amaxes, strict=True):
            _write(part, of_part)


cast_master_weights_to_fp8 = quantize_master_weights  # the older name


def _parts(weight: Any, master: Tensor | None, start: int | None, target: Any) -> list[_Part]:
    """What this rank writes into ``weight``: one part, or one for each side of a hybrid weight."""
    if not isinstance(weight, QuantizedTensorStorage):
        raise ValueError(f"model_weights must be quantized tensors, got {type(weight).__name__}")
    if master is not None and start is None:
        raise ValueError("start_offsets must have an offset, not None, where there is a master weight")
    first, count = start or 0, weight.shape.numel()
    stop = first + (0 if master is None else master.numel())
    if not 0 <= first <= stop <= count:
        raise ValueError(
            f"a master weight of {stop - first} elements from {first} on is no part of a weight of {count}"
        )
    values = torch.zeros(count, dtype=weight._dtype, device=weight.device)
    if master is not None:
        values[first:stop] = master.detach().reshape(-1)
    values = values.view(matrix_shape(weight.shape))
    if not isinstance(weight, HybridQuantizedTensorStorage):
        _require_castable(weight)
        return [_Part(weight, values, first, stop, target)]
    sides = [(side, getattr(weight, f"_{side}_storage")) for side in SIDES if weight.has(side)]
    if not sides:
        raise ValueError(
            "quantize_master_weights got a hybrid weight of which both rowwise and columnwise sides have been dropped"
        )
    if weight.has("columnwise") and weight._get_quantizer().columnwise_source == "rowwise_dequantized":
        raise NotImplementedError(
            "quantize_master_weights is not implemented for columnwise_source='rowwise_dequantized', whose columnwise "
            "side follows after the rowwise update/all-gather (TransformerEngine's #3158)"
        )
    for side, storage in sides:
        if not isinstance(storage, Float8TensorStorage | IdentityTensorStorage):
            made_by = type(storage._get_quantizer()).__name__
            raise NotImplementedError(
                f"quantize_master_weights for HybridQuantizer with {made_by} {side} sub-quantizer is not supported: "
                "its codes cannot be gathered beside the other side's"
            )
    both = isinstance(target, HybridQuantizedTensorStorage)
    if len(sides) == 2 and master is not None and stop - first < count and not both:
        raise ValueError(
            "quantize_master_weights got a partial master shard of a hybrid weight with columnwise_source='original', "
            "which needs full-master data; or drop the columnwise side"
        )
    return [
        _Part(storage, values, first, stop, getattr(target, f"_{side}_storage") if both else target)
        for side, storage in sides
    ]


def _require_castable(weight: Any) -> None:
    """Refuse formats whose codes depend on more of the other elements than their amaxes."""
    squares = isinstance(weight, NVFP4TensorStorage | Float8BlockwiseQTensorStorage)
    if squares and not weight._is_square():
        raise NotImplementedError(
            f"quantize_master_weights of a {type(weight).__name__} needs square blocks, whose columnwise codes can be "
            "made of gathered rowwise ones: with_2d_quantization=True, or block_scaling_dim=2"
        )
    spec = spec_of(weight._get_quantizer(), "rowwise")
    if spec is not None and (spec.scale_rule.is_four_over_six or spec.correction is not Correction.NONE):
        raise NotImplementedError(f"quantize_master_weights is not implemented for {spec.label}, which sums errors")


def _cast_sides(weight: Any) -> list[str]:
    """The sides that are cast of values; what is their transpose is made of them."""
    if isinstance(weight, MXFP8TensorStorage):
        return [side for side in SIDES if weight.has(side)]
    return ["rowwise" if weight.has("rowwise") else "columnwise"]


def _amaxes(part: _Part) -> dict[str, Tensor]:
    """The amaxes by which each side is scaled, of what is this rank's, in the weight's dtype."""
    found: dict[str, Tensor] = {}
    for side in _cast_sides(part.weight):
        spec = spec_of(part.weight._get_quantizer(), side)
        if spec is None:
            continue
        matrix = part.values.T if side == "columnwise" else part.values
        if not spec.block[1]:
            found[side] = matrix.abs().amax().view(1)
            continue
        padded = pad(matrix.float(), (0, spec.padded_cols(matrix.shape[1]) - matrix.shape[1]))
        found[side] = block_amax(padded.contiguous(), spec.block).to(part.values.dtype)
    return found


def _write(part: _Part, amaxes: dict[str, Tensor]) -> None:
    """Write this rank's codes, and all scales."""
    weight, own = part.weight, torch.zeros(part.values.numel(), dtype=torch.bool, device=part.values.device)
    own[part.start : part.stop] = True
    own = own.view(part.values.shape)
    if isinstance(weight, IdentityTensorStorage):
        place = weight._hp_data.view(-1)[part.start : part.stop] if part.target is None else part.target.view(-1)
        place.copy_(part.values.view(-1)[part.start : part.stop])
        return
    for side in _cast_sides(weight):
        is_turned = side == "columnwise"
        matrix, mine = (part.values.T, own.T) if is_turned else (part.values, own)
        amax, spec = amaxes[side], spec_of(part.weight._get_quantizer(), side)
        assert spec is not None
        among = amax if not spec.block[1] else amax.repeat_interleave(spec.block[1], 1)[:, : matrix.shape[1]]
        values = torch.where(mine, matrix, among)
        made = _encoded(weight, values.T if is_turned else values, side)
        for name in weight._SIDES[side]:
            there: Tensor = getattr(weight, name)
            if name != weight._SIDES[side][0]:
                there.copy_(made[name].view(there.shape))
        _write_codes(part, side, made[weight._SIDES[side][0]], mine)
    weight._wrote(_cast_sides(weight))


def _encoded(weight: Any, values: Tensor, side: str) -> dict[str, Any]:
    """One side of ``values`` by attributes of the weight."""
    quantizer: Quantizer = weight._get_quantizer()
    made = quantizer.sides(values, side == "rowwise", side == "columnwise")
    return type(weight)._encoded(Operands(weight.shape, weight._dtype, made.rowwise, made.columnwise), quantizer)


def _write_codes(part: _Part, side: str, codes: Tensor, mine: Tensor) -> None:
    """Write this rank's codes of ``side`` to the weight, or to its flat shard."""
    weight, name = part.weight, part.weight._SIDES[side][0]
    turned = side == "columnwise" and not isinstance(weight, MXFP8TensorStorage)
    target = part.target
    if target is not None:
        flat = target[SIDES.index(side)] if isinstance(target, tuple | list) else target
        flat = flat if not isinstance(flat, QuantizedTensorStorage) else getattr(flat, name)
        per_byte = part.values.numel() // max(codes.numel(), 1)
        whole = codes.movedim(0, -1) if turned else codes
        flat.view(-1).copy_(whole.reshape(-1)[part.start // per_byte : -(-part.stop // per_byte)].view(flat.dtype))
        return
    there: Tensor = getattr(weight, name)
    if there.numel() == part.values.numel():
        kept = (mine if turned else mine.T if side == "columnwise" else mine).reshape(there.shape)
        there.copy_(torch.where(kept, codes.view(there.shape), there))
        return
    low, high = mine[:, ::2], pad(mine, (0, mine.shape[1] % 2))[:, 1::2]  # two codes share a byte
    mask = low * 0x0F + high * 0xF0
    mask = pad(mask, (0, there.shape[-1] - mask.shape[1])).view(there.shape).to(torch.uint8)
    there.copy_((there & ~mask) | (codes.view(there.shape) & mask))


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Let the rowwise codes of ``tensor`` lie in ``new_raw_data``, which takes their values.

    Raises:
        ValueError: it has another dtype or another number of elements, or ``tensor`` is no quantized one.
        NotImplementedError: of MXFP8, whose codes are two.
    """
    if isinstance(tensor, MXFP8TensorStorage):
        raise NotImplementedError("replace_raw_data is not implemented for MXFP8, whose two sides are stored")
    if isinstance(tensor, HybridQuantizedTensorStorage):
        if not tensor.has("rowwise"):
            raise NotImplementedError("replace_raw_data needs the rowwise side of a hybrid tensor, which is not there")
        replace_raw_data(tensor._rowwise_storage, new_raw_data)
        return
    if not isinstance(tensor, QuantizedTensorStorage):
        raise ValueError(f"replace_raw_data takes a quantized tensor, got {type(tensor).__name__}")
    name = tensor._SIDES["rowwise"][0]
    old: Tensor = getattr(tensor, name)
    if old.dtype != new_raw_data.dtype or old.numel() != new_raw_data.numel():
        raise ValueError(
            f"new_raw_data must be {old.dtype} of {old.numel()} elements, got {new_raw_data.dtype} of "
            f"{new_raw_data.numel()}"
        )
    new_raw_data.detach().copy_(old.view(new_raw_data.shape))
    setattr(tensor, name, new_raw_data)


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise codes of weights whose rowwise ones have been gathered."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if isinstance(weight, HybridQuantizedTensorStorage):
            post_all_gather_processing(weight._stored())
            continue
        is_stored = isinstance(weight, QuantizedTensorStorage) and weight.has("rowwise")
        if is_stored and not isinstance(weight, MXFP8TensorStorage | IdentityTensorStorage):
            weight._wrote(["rowwise"])
            if weight._get_quantizer().columnwise_usage:
                weight.update_usage(columnwise_usage=True)


def clear_columnwise_cache(tensor: QuantizedTensorStorage) -> None:
    """Drop the columnwise side."""
    tensor.update_usage(columnwise_usage=False)


def is_custom(x: Any = None) -> bool:
    """Whether a quantizer or a storage brings its own product, ``qgemm``.

    Raises:
        AssertionError: it is neither, and no tensor.
    """
    if x is None or isinstance(x, torch.Tensor):
        return False
    if not isinstance(x, Quantizer | QuantizedTensorStorage):
        raise AssertionError(f"is_custom takes a quantizer or a storage, got {type(x).__name__}")
    return bool(getattr(x, "custom", False))
