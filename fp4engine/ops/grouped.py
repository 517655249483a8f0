"""The casts and products of many experts at once, with their row counts on the device: no host waits for them.

The reference of these operators is a loop over the single ones, whose bytes they give where :func:`grouped_supports`
says yes. The device alone knows which rows belong to no expert; those come out NaN.

Legend: x is [M, K], G experts, P columns of all columnwise operands together, see :mod:`fp4engine.kernels.grouped`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.constants import BLOCK_SIZE, KEY_STEP
from fp4engine.formats import CastSpec, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops.cast import Form, as_it_is, fused_casts_supported, transient_form
from fp4engine.ops.operand import Operand
from fp4engine.ops.operation import Output, define, is_plain
from fp4engine.private import constant_when_traced


def grouped_supports(
    specs: Sequence[CastSpec | None], dtypes: Sequence[torch.dtype], device: torch.device, backend: str
) -> tuple[bool, str]:
    """Whether casts of these specs and products of their operands have grouped kernels; if not, why.

    Args:
        specs: of every operand.
        dtypes: of every tensor that is cast or made.
        device: where they are.
        backend: of casts and products.
    """
    for spec in specs:
        if spec is None:
            return False, "an operand is not quantized"
        if transient_form(spec.key, device, backend) != "values":
            return False, "products run on packed codes, or without kernels"
        ok, reason = _casts(spec.key, tuple(dtypes))
        if not ok:
            return False, reason
    return True, ""


@constant_when_traced
def _casts(key: str, dtypes: tuple[torch.dtype, ...]) -> tuple[bool, str]:
    outer = CastSpec.from_key(key).outer
    if outer is not Outer.TENSOR:
        return False, f"outer={outer.value} has no grouped kernel"
    answers = [fused_casts_supported(key, dtype) for dtype in dtypes]
    return next((answer for answer in answers if not answer[0]), (True, ""))


def expert_offsets(counts: Tensor, rows: int) -> Tensor:
    """int64 [G + 2]: the first row of each expert, the first row of none, ``rows``.

    Args:
        counts: integers [G]. If one is negative, or they add up to more than ``rows``, no expert owns a row.
    """
    return (_expert_offsets if is_plain(counts) else torch.ops.fp4engine.expert_offsets)(counts, rows)[0]


def grouped_quantize(
    x: Tensor,
    offsets: Tensor,
    rowwise: CastSpec | None,
    columnwise: CastSpec | None,
    *,
    rowwise_form: Form = "codes",
    columnwise_form: Form = "codes",
    rng: Tensor | None = None,
    stream: int = 0,
) -> tuple[Operand | None, Operand | None]:
    """As :func:`fp4engine.ops.quantize` for each expert's rows: operands [M, K] and [K, P] with outer amaxes [G].

    Args:
        x: [M, K], any strides.
        offsets: of :func:`expert_offsets`.
        rowwise, columnwise: what :func:`grouped_supports`; rowwise without a rotation.
        rng: int64 [2] ``(key, draw)``, the draw of expert 0; expert e has ``draw - e``.
    """
    x = as_it_is(x)
    run = _grouped_quantize if is_plain(x) else torch.ops.fp4engine.grouped_quantize
    row_key, col_key = "" if rowwise is None else rowwise.key, "" if columnwise is None else columnwise.key
    tensors = iter(run(x, offsets, row_key, col_key, rowwise_form, columnwise_form, rng, stream))
    rows, cols = x.shape
    padded = _padded_rows(rows, offsets.shape[0] - 2)
    row, col = (
        None
        if spec is None
        else Operand(spec, *shape, next(tensors), next(tensors) if form == "codes" else None, next(tensors))
        for spec, shape, form in ((rowwise, (rows, cols), rowwise_form), (columnwise, (cols, padded), columnwise_form))
    )
    return row, col


def _padded_rows(rows: int, groups: int) -> int:
    """P, as :func:`fp4engine.kernels.grouped.padded_rows` has it."""
    return rows // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE * groups


def grouped_gemm(
    left: Operand, right: Operand, offsets: Tensor, *, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y[m] = left[m] @ right[e].T + bias[e]`` for the expert e of row m: [M, N], NaN in rows of none.

    Args:
        left: rowwise operand [M, K] of :func:`grouped_quantize`.
        right: the experts' operands [N, K] below each other, with their outer amaxes [G].
        bias: [G, N] or None.
    """
    run = _grouped_gemm if is_plain(left.data) else torch.ops.fp4engine.grouped_gemm
    return run(left.parts, right.parts, offsets, _numerator(left, right), bias, out_dtype)[0]


def grouped_wgrad(left: Operand, right: Operand, offsets: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """``left[e] @ right[e].T`` of columnwise operands [N, P] and [K, P]: [G, N, K], zeros where there are no rows."""
    run = _grouped_wgrad if is_plain(left.data) else torch.ops.fp4engine.grouped_wgrad
    return run(left.parts, right.parts, offsets, _numerator(left, right), out_dtype)[0]


def grouped_wgrad_accumulate(outs: Sequence[Tensor | None], left: Operand, right: Operand, offsets: Tensor) -> None:
    """:func:`grouped_wgrad`, each product added to its buffer [N, K] in FP32 before the one rounding, or not made."""
    buffers = [out for out in outs if out is not None]
    experts = [expert for expert, out in enumerate(outs) if out is not None]
    run = _grouped_wgrad_accumulate if is_plain(left.data) else torch.ops.fp4engine.grouped_wgrad_accumulate
    run(buffers, experts, left.parts, right.parts, offsets, _numerator(left, right))


def column_sums(x: Tensor, offsets: Tensor | None = None, backend: str = "auto") -> Tensor:
    """``sum(x, 0)`` in FP32 and in the order of the reference: of all rows [1, K], or of each expert's [G, K]."""
    x = as_it_is(x)
    return (_column_sums if is_plain(x) else torch.ops.fp4engine.column_sums)(x, offsets, backend)[0]


def _numerator(left: Operand, right: Operand) -> float:
    assert left.spec is not None and right.spec is not None
    return left.spec.numerator * right.spec.numerator


def _expert_offsets(counts: Tensor, rows: int) -> list[Tensor]:
    from fp4engine.kernels import grouped

    return [grouped.offsets(counts.contiguous(), rows)]


def _grouped_quantize(
    x: Tensor,
    offsets: Tensor,
    rowwise: str,
    columnwise: str,
    rowwise_form: str,
    columnwise_form: str,
    rng: Tensor | None,
    stream: int,
) -> list[Tensor]:
    from fp4engine.kernels import grouped

    backends.record("grouped_quantize/triton")
    draws = None if rng is None else _draws(rng, offsets.shape[0] - 2)
    forms = (rowwise_form, columnwise_form)
    return grouped.grouped_cast(_along_rows(x), offsets, (rowwise, columnwise), forms, draws, stream)


def _draws(rng: Tensor, groups: int) -> Tensor:
    """int64 [G, 2]: ``(key, draw - e)`` for expert e, with the key of that draw, see :func:`fp4engine.ops.rng.advance`.

    Four launches: the upper halves of the draws are read in place.
    """
    draws = rng.new_empty(groups, 2)
    torch.sub(rng[1], torch.arange(groups, device=rng.device), out=draws[:, 1])
    upper = draws.view(torch.int32)[:, 3]
    torch.add(rng[:1], upper - upper[:1], alpha=KEY_STEP, out=draws[:, 0])
    return draws


def _along_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _grouped_gemm(
    left: list[Tensor],
    right: list[Tensor],
    offsets: Tensor,
    numerator: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    from fp4engine.kernels.grouped_gemm import grouped_gemm

    backends.record("grouped_gemm/triton")
    return [grouped_gemm(left, right, offsets, bias, numerator, out_dtype)]


def _grouped_wgrad(
    left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float, out_dtype: torch.dtype
) -> list[Tensor]:
    from fp4engine.kernels.grouped_gemm import grouped_wgrad

    backends.record("grouped_gemm/triton")
    return [grouped_wgrad(left, right, offsets, numerator, out_dtype)]


def _grouped_wgrad_accumulate(
    outs: list[Tensor], experts: list[int], left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float
) -> None:
    from fp4engine.kernels.grouped_gemm import grouped_wgrad_accumulate

    backends.record("grouped_gemm/triton")
    grouped_wgrad_accumulate(dict(zip(experts, outs, strict=True)), left, right, offsets, numerator)


def _column_sums(x: Tensor, offsets: Tensor | None, backend: str) -> list[Tensor]:
    if offsets is None and backends.choose("column_sums", x.device, backend, (x.dtype,), backends.takes) == "reference":
        return [reference.column_sums(x)[None]]
    from fp4engine.kernels import column_sums as kernels

    return [kernels.column_sums(_along_rows(x), offsets)]


def _grouped_quantize_outputs(
    x: Tensor, offsets: Tensor, rowwise: str, columnwise: str, rowwise_form: str, columnwise_form: str
) -> list[Output]:
    rows, cols = x.shape
    groups = offsets.shape[0] - 2
    sides = (
        (rowwise, rowwise_form, rows, -(-cols // BLOCK_SIZE)),
        (columnwise, columnwise_form, cols, _padded_rows(rows, groups) // BLOCK_SIZE),
    )
    outputs: list[Output] = []
    for spec, form, height, blocks in sides:
        if not spec:
            continue
        if form == "values":
            outputs.append(Output((height, blocks * BLOCK_SIZE), torch.bfloat16))
        else:
            outputs.append(Output((height, blocks * BLOCK_SIZE // 2), torch.uint8))
            outputs.append(Output((height, blocks), torch.float8_e4m3fn))
        outputs.append(Output((groups,), torch.float32))
    return outputs


def _grouped_gemm_outputs(left: list[Tensor], right: list[Tensor], out_dtype: torch.dtype) -> list[Output]:
    return [Output((left[0].shape[0], right[0].shape[0] // right[-1].shape[0]), out_dtype)]


def _grouped_wgrad_outputs(left: list[Tensor], right: list[Tensor], out_dtype: torch.dtype) -> list[Output]:
    return [Output((left[-1].shape[0], left[0].shape[0], right[0].shape[0]), out_dtype)]


def _column_sums_outputs(x: Tensor, offsets: Tensor | None) -> list[Output]:
    return [Output((1 if offsets is None else offsets.shape[0] - 2, x.shape[1]), torch.float32)]


def _expert_offsets_outputs(counts: Tensor) -> list[Output]:
    return [Output((counts.shape[0] + 2,), torch.int64)]


define(_expert_offsets, _expert_offsets_outputs)
define(_grouped_quantize, _grouped_quantize_outputs, any_strides=True)
define(_grouped_gemm, _grouped_gemm_outputs)
define(_grouped_wgrad, _grouped_wgrad_outputs)
define(_grouped_wgrad_accumulate, None, mutates_args=("outs",))
define(_column_sums, _column_sums_outputs, any_strides=True)
