"""Tokens sent to the ranks of their experts and back, as codes and scales if a quantizer is given.

A token travels as one row of bytes: its codes, its block scales and its outer amaxes. None of these depends on other
tokens, so ranks need no collective but the one that sends the rows. In NVFP4 a row has 9/16 of a byte for each element,
and four bytes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp4engine import ops
from fp4engine.arguments import require_integer, shown
from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.ops.cast import amax_shape
from fp4engine.ops.reduce import digest_of, ranges
from fp4engine.private import constant_when_traced
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import FLOATS
from fp4engine.tensor import Operand


def all_to_all_tokens(
    tokens: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | None = None,
    grad_quantizer: Quantizer | None = None,
) -> Tensor:
    """Send rows to all ranks of ``group``, and receive theirs, rank after rank; gradients go the way back.

    With a quantizer, codes and scales travel, in one collective, and the values that they decode to are returned. The
    gradient passes straight through the cast.

    Args:
        tokens: [M, K], a token in each row.
        output_splits: how many rows come from each rank, as in that rank's ``input_splits``.
        input_splits: how many rows go to each rank; they add up to M.
        group: None is all ranks.
        quantizer: how tokens are cast for the way; None sends them uncast. Every token has to be cast by itself,
            as ``NVFP4Quantizer(row_scaled_nvfp4=True)`` does. All ranks give an equal one, and tokens of one dtype and
            K: they compare these at the first call with such tokens and quantizers.
        grad_quantizer: the same for their gradients, which ``stochastic_rounding=True`` suits. Random bits are
            this process's.

    Returns:
        [sum(output_splits), K], in the dtype of ``tokens``.

    Raises:
        ValueError: ``tokens`` are no plain matrix of floating-point numbers; splits are not one count for each rank of
            ``group``, or do not add up to M; this process is not in ``group``; a quantizer is something else, or does
            not cast every token by itself; the ranks give other dtypes, K or quantizers.
    """
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in FLOATS:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else shown(tokens)
        raise ValueError(f"tokens must be a matrix [M, K] of float16, bfloat16, float32 or float64, got {got}")
    if isinstance(tokens, DTensor):
        raise ValueError("tokens must be a plain tensor, got a DTensor; its rows on this rank are tokens.to_local()")
    for name, cast in (("quantizer", quantizer), ("grad_quantizer", grad_quantizer)):
        if cast is not None and (reason := _why_not_by_token(name, cast)):
            raise ValueError(f"{name} must cast every token by itself: {reason}")
    ranks = _ranks(group)
    received = _counts("output_splits", output_splits, ranks)
    sent = _counts("input_splits", input_splits, ranks)
    if sum(sent) != tokens.shape[0]:
        raise ValueError(f"input_splits must add up to the {tokens.shape[0]} rows of tokens, got {sent}")
    specs = [None if cast is None else cast.rowwise_spec for cast in (quantizer, grad_quantizer)]
    width = None if torch.compiler.is_dynamo_compiling() else tokens.shape[1]  # which may be traced for many
    group = dist.group.WORLD if group is None else group
    keys = ["none" if spec is None else spec.key for spec in specs]
    _require_same_rows(ops.names_of((group,)), tokens.device.type, str(tokens.dtype), width, keys[0], keys[1])
    return _AllToAll.apply(tokens, received, sent, group, quantizer, grad_quantizer)


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose backward pass is another, with splits and quantizers swapped."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup | None,
        quantizer: Quantizer | None,
        grad_quantizer: Quantizer | None,
    ) -> Tensor:
        ctx.way_back = sent, received, group, grad_quantizer, quantizer
        return _send(tokens, received, sent, group, quantizer)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad_outputs[0], *ctx.way_back), None, None, None, None, None


def _send(
    tokens: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | None, quantizer: Quantizer | None
) -> Tensor:
    """Exchange rows, cast for the way, and return those that arrive, decoded."""
    spec = None if quantizer is None else quantizer.rowwise_spec
    if quantizer is None or spec is None:
        return _exchange(tokens, received, sent, group)
    operand = quantizer.quantize(tokens, columnwise=False).rowwise
    assert operand is not None
    arrived = unpack(_exchange(pack(operand), received, sent, group), spec, tokens.shape[1])
    return arrived.tensor(tokens.dtype, quantizer.backend)


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | None) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def pack(operand: Operand) -> Tensor:
    """Each row's codes, block scales and outer amaxes: uint8 [rows, bytes of a row]."""
    spec, scale_inv, amax = operand.spec, operand.scale_inv, operand.amax
    assert spec is not None and scale_inv is not None and amax is not None
    parts = [operand.data, scale_inv]
    if spec.outer is not Outer.NONE:
        parts.append(amax.view(operand.rows, _outer_amaxes(spec, operand.cols)))
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def unpack(rows: Tensor, spec: CastSpec, cols: int) -> Operand:
    """The operand [M, cols] whose rows were packed as bytes [M, bytes of a row]."""
    codes, scale_inv, amax = rows.split(_row_bytes(spec, cols), 1)
    if spec.outer is Outer.NONE:
        outer = torch.full((1,), spec.constant_amax, dtype=torch.float32, device=rows.device)
    else:
        outer = _of_bytes(amax, torch.float32).view(amax_shape(spec, rows.shape[0], cols))
    scales = _of_bytes(scale_inv, spec.scale.torch_dtype)
    return Operand(spec, rows.shape[0], cols, _of_bytes(codes, torch.uint8), scales, outer)


def bytes_of_token(quantizer: Quantizer, cols: int) -> int:
    """How many bytes a token with ``cols`` features that ``quantizer`` casts has on the wire."""
    assert quantizer.rowwise_spec is not None
    return sum(_row_bytes(quantizer.rowwise_spec, cols))


def _of_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the bytes of ``rows``, aligned for ``dtype``, as a tensor of it."""
    values = torch.empty(rows.shape[0], rows.shape[1] // dtype.itemsize, dtype=dtype, device=rows.device)
    values.view(torch.uint8).copy_(rows)
    return values


def _row_bytes(spec: CastSpec, cols: int) -> list[int]:
    """Bytes of one row's codes, block scales and outer amaxes."""
    codes = spec.padded_cols(cols) * spec.element.storage_bits // 8
    amaxes = 0 if spec.outer is Outer.NONE else 4 * _outer_amaxes(spec, cols)
    return [codes, spec.num_blocks(cols) * spec.scale.torch_dtype.itemsize, amaxes]


def _outer_amaxes(spec: CastSpec, cols: int) -> int:
    return prod(amax_shape(spec, 1, cols))


_known: WeakKeyDictionary[Any, set[tuple[str, str, str]]] = WeakKeyDictionary()
"""``group -> the dtypes and casts`` by which its ranks were found to send rows alike. It goes with the group."""


@constant_when_traced
def _require_same_rows(names: str, device: str, dtype: str, width: int | None, cast: str, grad_cast: str) -> None:
    """Compare what makes a row among the ranks of the group ``names`` when they first send rows of such a kind.

    Rows of different sizes make gloo abort a process, or arrive as other numbers. The width is no part of what is
    remembered: a rank that runs eagerly what the others have compiled would wait for them.

    Raises:
        ValueError: on every rank, if they differ.
    """
    (group,) = ops.groups_named(names)
    known = _known.setdefault(group, set())
    if (dtype, cast, grad_cast) in known:
        return
    facts = {"dtype": dtype, "width": width, "quantizer": cast, "grad_quantizer": grad_cast}
    found = ranges([digest_of(fact) for fact in facts.values()], (group,), device)
    odd = [name for name, (least, most) in zip(facts, found, strict=True) if least != most]
    if odd:
        raise ValueError(
            f"the ranks {dist.get_process_group_ranks(group)} exchange tokens, and not all of them give the same "
            f"{' and '.join(odd)}. Here: {', '.join(f'{name} {fact}' for name, fact in facts.items())}"
        )
    known.add((dtype, cast, grad_cast))


def _why_not_by_token(name: str, quantizer: Quantizer) -> str:
    """Why the argument ``name`` does not cast every token by itself; empty if it does.

    Raises:
        ValueError: it is no quantizer.
    """
    if not isinstance(quantizer, Quantizer):
        raise ValueError(f"{name} must be a Quantizer or None, got {shown(quantizer)}")
    spec = quantizer.rowwise_spec
    if quantizer.is_stateful or not quantizer.only_casts:
        return f"{type(quantizer).__name__} needs more than its values"
    if spec is None:
        return ""
    if spec.outer is Outer.ROWS128:
        return "its outer scales are those of 128 rows; NVFP4Quantizer(row_scaled_nvfp4=True) has one for each row"
    if spec.outer is Outer.TENSOR:
        return "its outer scale is that of all rows of a rank; NVFP4Quantizer(row_scaled_nvfp4=True) has one for each"
    if spec.block[0] > 1:
        return f"blocks of {spec.block[0]}x{spec.block[1]} are of several tokens"
    if spec.rotation is not None and spec.rotation.signs.is_fresh:
        return "its rotation draws signs, which do not travel"
    if spec.correction is Correction.SCALAR:
        return "its correction is that of all rows of a rank"
    if quantizer.clipped_gradient:
        return "clipped_gradient=True needs to know what saturated, which the gradient's way back does not tell"
    return ""


def _ranks(group: dist.ProcessGroup | None) -> int:
    """How many ranks ``group`` has, with this process among them."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not in group; only those that dist.new_group was given may send to it")
        raise ValueError(f"group must be a ProcessGroup or None, got {shown(group)}; of a mesh, mesh.get_group()")
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; call init_process_group first")
    return dist.get_world_size(group)


def _counts(name: str, splits: Sequence[int], ranks: int) -> list[Any]:
    if isinstance(splits, Tensor):
        raise ValueError(f"{name} must be a list, which the collective reads on the host, got a tensor; call tolist()")
    counts = list(map(_count, splits)) if isinstance(splits, Sequence) else []
    if len(counts) != ranks or None in counts:
        raise ValueError(f"{name} must be {ranks} counts, one for each rank of group, got {shown(splits)}")
    return counts


def _count(value: Any) -> Any:
    """``value`` as an int, or as compiled code has one; None if it is no count."""
    if isinstance(value, torch.SymInt):
        return value if value >= 0 else None
    try:
        return require_integer("count", value, least=0)
    except ValueError:
        return None
