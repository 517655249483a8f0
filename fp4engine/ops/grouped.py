"""The casts and products of many experts at once, with their row counts on the device: no host waits for them.

There is no reference for these operators: a loop of the single ones is. :func:`grouped_supports` says whether they give
the loop's bytes, and which rows no expert owns is known to the device alone; those come out NaN.

Legend: x is [M, K], G experts, P columns of all columnwise operands together, see :mod:`fp4engine.kernels.grouped`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import CastSpec, Outer
from fp4engine.ops import backend as backends
from fp4engine.ops.backend import call
from fp4engine.ops.gemm import transient_form
from fp4engine.ops.operator import operator
from fp4engine.ops.quantize import Form, Side
from fp4engine.tracing import constant_when_traced


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
        if transient_form(spec, device, backend) != "values":
            return False, "products run on packed codes, or without kernels"
        ok, reason = _casts(spec.key, tuple(dtypes))
        if not ok:
            return False, reason
    return True, ""


@constant_when_traced
def _casts(key: str, dtypes: tuple[torch.dtype, ...]) -> tuple[bool, str]:
    from fp4engine.kernels import quantize as kernels

    spec = CastSpec.from_key(key)
    if spec.outer is not Outer.TENSOR:
        return False, f"outer={spec.outer.value} has no grouped kernel"
    answers = [kernels.supports(spec, dtype) for dtype in dtypes]
    return next((answer for answer in answers if not answer[0]), (True, ""))


def expert_offsets(counts: Tensor, rows: int) -> Tensor:
    """int64 [G + 2]: the first row of each expert, the first row of none, ``rows``.

    Args:
        counts: integers [G]. If one is negative, or they add up to more than ``rows``, no expert owns a row.
    """
    return call(torch.ops.fp4engine.expert_offsets, _expert_offsets, counts, counts, rows)


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
) -> tuple[Side | None, Side | None]:
    """As :func:`fp4engine.ops.quantize` for each expert's rows: operands [M, K] and [K, P] with outer amaxes [G].

    Args:
        x: [M, K], any strides.
        offsets: of :func:`expert_offsets`.
        rowwise, columnwise: what :func:`grouped_supports`; rowwise without a rotation.
        rng: int64 [2] ``(seed, draw)``, the draw of expert 0; expert e has ``draw - e``.
    """
    specs, forms = (rowwise, columnwise), (rowwise_form, columnwise_form)
    keys = ["" if spec is None else spec.key for spec in specs]
    operator = torch.ops.fp4engine.grouped_quantize
    tensors = iter(call(operator, _grouped_quantize, x, x.detach(), offsets, *keys, *forms, rng, stream))
    row, col = (
        None if spec is None else Side(next(tensors), next(tensors) if form == "codes" else None, next(tensors))
        for spec, form in zip(specs, forms, strict=True)
    )
    return row, col


def grouped_gemm(
    left: Side,
    right: Side,
    specs: tuple[CastSpec, CastSpec],
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``y[m] = left[m] @ right[e].T + bias[e]`` for the expert e of row m: [M, N], NaN in rows of none.

    Args:
        left: rowwise operand [M, K] of :func:`grouped_quantize`.
        right: the experts' operands [N, K] below each other, with their outer amaxes [G].
        specs: of left and right.
        bias: [G, N] or None.
    """
    arguments = (_tensors(left), _tensors(right), offsets, _numerator(specs), bias, out_dtype)
    return call(torch.ops.fp4engine.grouped_gemm, _grouped_gemm, left.data, *arguments)


def grouped_wgrad(
    left: Side, right: Side, specs: tuple[CastSpec, CastSpec], offsets: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """``left[e] @ right[e].T`` of columnwise operands [N, P] and [K, P]: [G, N, K], zeros where there are no rows."""
    arguments = (_tensors(left), _tensors(right), offsets, _numerator(specs), out_dtype)
    return call(torch.ops.fp4engine.grouped_wgrad, _grouped_wgrad, left.data, *arguments)


def grouped_wgrad_accumulate(
    outs: Sequence[Tensor | None], left: Side, right: Side, specs: tuple[CastSpec, CastSpec], offsets: Tensor
) -> None:
    """:func:`grouped_wgrad`, each product added to its buffer [N, K] in FP32 before the one rounding, or not made."""
    buffers = [out for out in outs if out is not None]
    experts = [expert for expert, out in enumerate(outs) if out is not None]
    arguments = (buffers, experts, _tensors(left), _tensors(right), offsets, _numerator(specs))
    call(torch.ops.fp4engine.grouped_wgrad_accumulate, _grouped_wgrad_accumulate, left.data, *arguments)


def column_sums(x: Tensor, offsets: Tensor | None = None, backend: str = "auto") -> Tensor:
    """``sum(x, 0)`` in FP32 and in the order of the reference: of all rows [1, K], or of each expert's [G, K]."""
    return call(torch.ops.fp4engine.column_sums, _column_sums, x, x.detach(), offsets, backend)


def _tensors(side: Side) -> list[Tensor]:
    """``[values, amax]`` or ``[codes, scale_inv, amax]``: the length tells which."""
    return [tensor for tensor in side if tensor is not None]


def _numerator(specs: tuple[CastSpec, CastSpec]) -> float:
    return specs[0].numerator * specs[1].numerator


def _values(tensors: list[Tensor]) -> Tensor:
    """The BF16 values of an operand of either form."""
    if len(tensors) == 2:
        return tensors[0]
    from fp4engine.kernels.dequantize import decode

    return decode(*tensors[:2])


def _expert_offsets(counts: Tensor, rows: int) -> Tensor:
    from fp4engine.kernels import grouped

    return grouped.offsets(counts.contiguous(), rows)


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

    backends.record("grouped_quantize", "triton")
    x = _along_rows(x)
    specs = [CastSpec.from_key(key) if key else None for key in (rowwise, columnwise)]
    amaxes = grouped.grouped_amax(x, offsets, *specs)
    outputs = grouped.grouped_quantize(
        x,
        offsets,
        *specs,
        rowwise_amax=amaxes[0],
        columnwise_amax=amaxes[1],
        rng=None if rng is None else _draws(rng, len(offsets) - 2),
        stream=stream,
        rowwise_output=rowwise_form,
        columnwise_output=columnwise_form,
    )
    tensors: list[Tensor] = []
    for side, form in enumerate((rowwise_form, columnwise_form)):
        data, scale_inv = outputs[2 * side : 2 * side + 2]
        kept = (data, scale_inv if form == "codes" else None, amaxes[side])
        tensors += [tensor for tensor in kept if tensor is not None]
    return tensors


def _draws(rng: Tensor, groups: int) -> Tensor:
    """int64 [G, 2]: ``(seed, draw - e)`` for expert e."""
    seed, draw = rng.unbind()
    return torch.stack((seed.expand(groups), draw - torch.arange(groups, device=rng.device)), 1)


def _along_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _grouped_gemm(
    left: list[Tensor],
    right: list[Tensor],
    offsets: Tensor,
    numerator: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    from fp4engine.kernels import grouped_gemm as kernels

    backends.record("grouped_gemm", "triton")
    operands = (_values(left), _values(right), left[-1], right[-1])
    return kernels.grouped_gemm(*operands, offsets, numerator, bias=bias, out_dtype=out_dtype)


def _grouped_wgrad(
    left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float, out_dtype: torch.dtype
) -> Tensor:
    from fp4engine.kernels import grouped_gemm as kernels

    backends.record("grouped_gemm", "triton")
    operands = (_values(left), _values(right), left[-1], right[-1])
    return kernels.grouped_wgrad(*operands, offsets, numerator, out_dtype=out_dtype)


def _grouped_wgrad_accumulate(
    outs: list[Tensor], experts: list[int], left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float
) -> None:
    from fp4engine.kernels import grouped_gemm as kernels

    backends.record("grouped_gemm", "triton")
    operands = (_values(left), _values(right), left[-1], right[-1])
    kernels.grouped_wgrad_accumulate(dict(zip(experts, outs, strict=True)), *operands, offsets, numerator)


def _column_sums(x: Tensor, offsets: Tensor | None, backend: str) -> Tensor:
    if offsets is None and backends.choose("column_sums", x.device, backend, (x.dtype,), _sums) == "reference":
        return reference.column_sums(x)[None]
    from fp4engine.kernels import column_sums as kernels

    return kernels.column_sums(_along_rows(x), offsets)


def _sums(dtype: torch.dtype) -> tuple[bool, str]:
    return dtype in (torch.bfloat16, torch.float16, torch.float32), f"the Triton kernels do not sum {dtype}"


@operator("expert_offsets", _expert_offsets)
def _(counts: Tensor, rows: int) -> Tensor:
    return counts.new_empty(counts.shape[0] + 2, dtype=torch.int64)


@operator("grouped_quantize", _grouped_quantize)
def _(
    x: Tensor,
    offsets: Tensor,
    rowwise: str,
    columnwise: str,
    rowwise_form: str,
    columnwise_form: str,
    rng: Tensor | None,
    stream: int,
) -> list[Tensor]:
    rows, cols = x.shape
    groups = offsets.shape[0] - 2
    padded = rows // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE * groups
    sides = (
        (rowwise, rowwise_form, rows, -(-cols // BLOCK_SIZE)),
        (columnwise, columnwise_form, cols, padded // BLOCK_SIZE),
    )
    tensors: list[Tensor] = []
    for spec, form, height, blocks in sides:
        if not spec:
            continue
        if form == "values":
            tensors.append(x.new_empty((height, blocks * BLOCK_SIZE), dtype=torch.bfloat16))
        else:
            tensors.append(x.new_empty((height, blocks * BLOCK_SIZE // 2), dtype=torch.uint8))
            tensors.append(x.new_empty((height, blocks), dtype=torch.float8_e4m3fn))
        tensors.append(x.new_empty(groups, dtype=torch.float32))
    return tensors


@operator("grouped_gemm", _grouped_gemm)
def _(
    left: list[Tensor],
    right: list[Tensor],
    offsets: Tensor,
    numerator: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return left[0].new_empty((left[0].shape[0], right[0].shape[0] // right[-1].shape[0]), dtype=out_dtype)


@operator("grouped_wgrad", _grouped_wgrad)
def _(left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float, out_dtype: torch.dtype) -> Tensor:
    return left[0].new_empty((left[-1].shape[0], left[0].shape[0], right[0].shape[0]), dtype=out_dtype)


@operator("grouped_wgrad_accumulate", _grouped_wgrad_accumulate, mutates_args=("outs",))
def _(
    outs: list[Tensor], experts: list[int], left: list[Tensor], right: list[Tensor], offsets: Tensor, numerator: float
) -> None:
    return None


@operator("column_sums", _column_sums)
def _(x: Tensor, offsets: Tensor | None, backend: str) -> Tensor:
    groups = 1 if offsets is None else offsets.shape[0] - 2
    return x.new_empty((groups, x.shape[1]), dtype=torch.float32)
