"""A linear layer, forward and backward, written once.

    fprop  y[M, N]  = x[M, K]  . w[N, K]     contracts K    rowwise    x rowwise
    dgrad  dx[M, K] = dy[M, N] . w^T[K, N]   contracts N    rowwise    x columnwise
    wgrad  dw[N, K] = dy^T[N, M] . x^T[K, M] contracts M    columnwise x columnwise

The program speaks to a builder ``b`` with a handful of verbs. :class:`fp4engine.functional.eager.Eager` does at once
what a verb says; :class:`fp4engine.functional.fused.Fused` collects kernels, which one launch starts in a row. So a
tensor of the program is a tensor, or the place of one in a launch. Both have the layer's plan, ``b.plan``.

    draw         the next draw of the random stream
    cast         operands of tensors, of which ranks may share the outer amaxes
    compare      whether a matrix still has the bytes that were cast; what was made of others is spoiled
    recall       the operand of a product, from what was kept for it
    dense        an operand that is not quantized; in_dtype: in the layer's dtype, as under torch.autocast
    decode       the values of an operand
    within       where a cast did not saturate
    product      left . right^T + bias, or the same added to a buffer
    undo         a gradient, clipped where a cast saturated, and rotated back
    column_sum   the gradient of the bias

Legend: M tokens, K in_features, N out_features.
"""

from typing import Any, NamedTuple

import torch

from fp4engine.functional.plan import LinearPlan
from fp4engine.quantizers import Quantizer
from fp4engine.roles import GemmName, TensorType

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]
"""Of input, weight and bias."""


class Needs(NamedTuple):
    """Which gradients a backward pass may be asked for: of the input, of the weight, and of the bias."""

    dgrad: bool
    wgrad: bool
    bgrad: bool = False


class Request(NamedTuple):
    """A tensor to be cast.

    Attributes:
        tensor: a matrix, or the source of one that the cast computes.
        rowwise, columnwise: the sides that are asked for.
        rng: the draw of a cast that is stochastic.
        in_codes: for each side whether codes are asked for, since it is kept; a product reads any form.
    """

    role: TensorType
    quantizer: Quantizer
    tensor: Any
    rowwise: bool
    columnwise: bool
    rng: Any = None
    in_codes: tuple[bool, bool] = (False, False)


class CastWeight(NamedTuple):
    """A weight that was cast before.

    Attributes:
        rowwise: the operand of fprop, or what it is recalled from.
        kept: what dgrad's operand is recalled from; None if it is not needed.
        values: the matrix that was cast, by which a gradient is clipped.
        seal: what a device compares ``values`` with, see :class:`fp4engine.ops.checksum.Seal`, or None.
    """

    rowwise: Any
    kept: Any
    values: Any
    seal: Any = None


class Kept(NamedTuple):
    """What a forward keeps for its backward: only what the needed GEMMs read.

    Attributes:
        inp: the columnwise operand of the input, for wgrad, or the operand from which backward makes it.
        weight: the same for the weight, for dgrad.
        inp_within, weight_within: bits of what the casts did not saturate, where that clips gradients.
        statistics: of the rows, where the input is a norm that the cast computes.
    """

    inp: Any = None
    weight: Any = None
    inp_within: Any = None
    weight_within: Any = None
    statistics: Any = None


class LaterProduct(NamedTuple):
    """The operands of a wgrad that is computed after the backward pass, see ``main_grad.py``."""

    left: Any
    right: Any


def forward(b: Any, x: Any, weight: Any, bias: Any, needs: Needs, dtype: torch.dtype) -> tuple[Any, Kept]:
    """``y = x . w^T + bias`` in ``dtype``, and what backward needs.

    Args:
        weight: a matrix [N, K], or a :class:`CastWeight`.
    """
    plan: LinearPlan = b.plan
    requests = [_request(b, "input", x, needs.wgrad, needs.dgrad)]
    if not isinstance(weight, CastWeight):
        requests.append(_request(b, "weight", weight, needs.dgrad, needs.wgrad))
    operands = b.cast(requests)
    inp, inp_t = operands[0]
    inp_kept = _kept(b, requests[0], inp, inp_t) if needs.wgrad else None
    inp_within = b.within(x, inp) if needs.dgrad and plan.clips(plan.input) else None
    if isinstance(weight, CastWeight):
        if weight.seal is not None:
            b.compare(weight.values, weight.seal)
        rowwise, weight_kept, weight = b.recall(plan.weight, weight.rowwise, False), weight.kept, weight.values
    else:
        rowwise, weight_t = operands[1]
        weight_kept = _kept(b, requests[1], rowwise, weight_t) if needs.dgrad else None
    weight_within = b.within(weight, rowwise) if needs.wgrad and plan.clips(plan.weight) else None
    y = b.product("fprop", inp, b.in_dtype(rowwise, dtype), dtype, bias)
    return y, Kept(inp_kept, weight_kept, inp_within, weight_within)


def cast_weight(b: Any, weight: Any, needs: Needs) -> tuple[Any, Any]:
    """The first two fields of a :class:`CastWeight`."""
    request = _request(b, "weight", weight, needs.dgrad, needs.wgrad)
    ((rowwise, columnwise),) = b.cast([request])
    return rowwise, _kept(b, request, rowwise, columnwise) if needs.dgrad else None


def backward(
    b: Any, grad_output: Any, kept: Kept, needs: Needs, cols: int, dtypes: Dtypes, later: bool = False, out: Any = None
) -> tuple[Any, Any, Any]:
    """Gradients of input, weight and bias; None for those that are not needed.

    Args:
        cols: K.
        dtypes: of input, weight and bias.
        later: whether wgrad is left to :func:`accumulate`; its :class:`LaterProduct` then takes the gradient's place.
        out: what wgrad is added to, in FP32 and with one rounding; the gradient is then None.
    """
    plan: LinearPlan = b.plan
    grad_input = grad_weight = grad_bias = None
    if needs.dgrad or needs.wgrad:
        rng = b.draw("backward", grad_output) if plan.draws_in_backward else None
        if plan.backward_override is not None:
            left, left_t = b.dense(grad_output), b.dense(b.transposed(grad_output))
        else:
            request = Request("grad_output", plan.grad_output, grad_output, needs.dgrad, needs.wgrad, rng)
            ((left, left_t),) = b.cast([request])
        if needs.dgrad:
            weight = b.in_dtype(_recalled(b, "weight", kept.weight, dtypes[0], rng), dtypes[0])
            grad_input = _gradient(b, "dgrad", left, weight, plan.weight, kept.inp_within, cols, dtypes[0])
        if needs.wgrad:
            inp = _recalled(b, "input", kept.inp, dtypes[0], rng)
            if later:
                grad_weight = LaterProduct(left_t, inp)
            else:
                dtype = dtypes[1] if out is None else out.dtype
                gradient = _gradient(b, "wgrad", left_t, inp, plan.input, kept.weight_within, cols, dtype, out)
                grad_weight = gradient if out is None else None
    if needs.bgrad:
        grad_bias = b.column_sum(grad_output, dtypes[2])
    return grad_input, grad_weight, grad_bias


def accumulate(b: Any, product: LaterProduct, within: Any, cols: int, out: Any) -> None:
    """Add wgrad to ``out`` [N, K] in FP32, with one rounding."""
    _gradient(b, "wgrad", product.left, product.right, b.plan.input, within, cols, out.dtype, out)


def _request(b: Any, role: TensorType, tensor: Any, is_read_later: bool, clips: bool) -> Request:
    """The cast of a tensor in a forward pass."""
    plan: LinearPlan = b.plan
    quantizer: Quantizer = getattr(plan, role)
    columnwise = is_read_later and plan.backward_override is None and quantizer.columnwise_source == "original"
    rng = b.draw("forward") if plan.draws_in_forward and quantizer.takes_draw(columnwise=columnwise) else None
    in_codes = (is_read_later and plan.keeps_rowwise(quantizer)) or (clips and plan.clips(quantizer))
    return Request(role, quantizer, tensor, True, columnwise, rng, (in_codes, True))


def _kept(b: Any, request: Request, rowwise: Any, columnwise: Any) -> Any:
    """What backward reads of a tensor: one of three things that a recipe may ask for."""
    if b.plan.keeps_original(request.quantizer):
        return b.dense(request.tensor)
    return rowwise if b.plan.keeps_rowwise(request.quantizer) else columnwise


def _recalled(b: Any, role: TensorType, kept: Any, dtype: torch.dtype, rng: Any) -> Any:
    """The operand of a backward product, from what forward kept of a tensor."""
    plan: LinearPlan = b.plan
    quantizer: Quantizer = getattr(plan, role)
    is_columnwise = plan.backward_override is None and quantizer.columnwise_source == "original"
    operand = b.recall(quantizer, kept, is_columnwise)
    if is_columnwise:
        return operand
    if plan.backward_override is not None:
        return b.dense(b.transposed(b.decode(operand, dtype, plan.backend)))
    is_saved = quantizer.columnwise_source == "saved_original"
    values = operand.data if is_saved else values_of(b, quantizer, operand, dtype)
    ((_, columnwise),) = b.cast([Request(role, quantizer, values, False, True, rng)])
    return columnwise


def values_of(b: Any, quantizer: Quantizer, operand: Any, dtype: torch.dtype) -> Any:
    """The matrix of which backward makes the columnwise operand of a tensor, from the rowwise one.

    Args:
        dtype: of the activations.
    """
    if quantizer.columnwise_spec is not None:  # a rotation rounds to the dtype of what it rotates
        return b.decode(operand, torch.float32, quantizer.backend)
    if operand.spec is None:
        return operand.data
    # What is not cast again is multiplied in the dtype of BF16 activations; FP16 may be too narrow for rotated values.
    return b.decode(operand, dtype if dtype == torch.bfloat16 else torch.float32, quantizer.backend)


def _gradient(
    b: Any,
    name: GemmName,
    left: Any,
    right: Any,
    other: Quantizer,
    within: Any,
    cols: int,
    dtype: torch.dtype,
    out: Any = None,
) -> Any:
    """A product; clipped where the forward cast saturated, and rotated back if forward rotated what ``right`` is of."""
    spec = other.rowwise_spec
    rotated = spec.key if spec is not None and spec.rotation is not None and b.plan.keeps_rowwise(other) else ""
    if not rotated and within is None:
        return b.product(name, left, right, dtype, None, out)
    values = b.product(name, left, right, torch.float32)
    return b.undo(values, within, rotated, cols, dtype, out)
