"""y = x W^T + b, with each of its three GEMMs on quantized operands.

    fprop  y[M, N]  = x[M, K]  . w[N, K]     contracts K    rowwise    x rowwise
    dgrad  dx[M, K] = dy[M, N] . w^T[K, N]   contracts N    rowwise    x columnwise
    wgrad  dw[N, K] = dy^T[N, M] . x^T[K, M] contracts M    columnwise x columnwise

Legend: M tokens, K in_features, N out_features.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.at_once import at_once, backward_at_once, draw, forward_at_once
from fp4engine.functional.call import Call
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.main_grad import Accumulate, MainGrad, add_rounded, no_gradient
from fp4engine.functional.operands import (
    forward_operands,
    quantize_grad,
    quantize_source,
    saved_operands,
    weight_operands,
)
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.saved import flatten, unflatten
from fp4engine.functional.shards import Shards, Wholes
from fp4engine.functional.through_cast import gradient, rotated_by, within
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops import Operand, TiledOperand
from fp4engine.quantizers.base import FLOATS, as_matrix
from fp4engine.roles import GemmName


class Saved(NamedTuple):
    """What a forward keeps for its backward: only what the needed GEMMs read.

    Attributes:
        inp: the columnwise operand of the input, for wgrad, or the operand from which backward makes it.
        weight: the same for the weight, for dgrad.
        x, parameters, statistics: of the norm or activation that makes the input.
        inp_within, weight_within: where the cast did not saturate, see :mod:`fp4engine.functional.through_cast`.
    """

    inp: Operand | None
    weight: Operand | TiledOperand | None
    x: Tensor | None = None
    parameters: tuple[Tensor | None, ...] = ()
    statistics: Tensor | None = None
    inp_within: Tensor | None = None
    weight_within: Tensor | None = None


def linear(
    inp: Tensor | FusedInput,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    *,
    executed: ExecutedGemms | None = None,
    shards: Shards | None = None,
    weight_cache: WeightCache | None = None,
    main_grad: MainGrad | None = None,
    wholes: Wholes | None = None,
) -> Tensor:
    """Linear transformation by ``plan``, differentiable once.

    Args:
        inp: [..., K], any rank >= 1, stride and number of rows; or a function that :meth:`FusedInput.fuses`.
        weight: [N, K]; bias: [N] or None.
        executed, shards: see :class:`Call`.
        weight_cache: holds the weight's operands; None quantizes the weight anew.
        main_grad: the buffer to which wgrad is added; the weight then gets no gradient of its own.
        wholes: if ``inp``, ``weight`` and ``bias`` are whole tensors of several ranks, takes this rank's parts of them
            and makes a whole output; None for plain tensors.

    Returns:
        [..., N] in ``inp.dtype``.

    Raises:
        ValueError: the last dimension of ``inp`` is not K, ``inp`` is nested, sparse or in MKL-DNN's layout, or
            :func:`require_bias` refuses the bias.
    """
    function, x, parameters, dtype = (None, inp, (), inp.dtype) if isinstance(inp, Tensor) else inp
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"the input must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")
    require_features(inp, weight)
    if bias is not None:
        require_bias(bias, weight)
    needs_dgrad = needs_wgrad = False
    # The first run of a reentrant checkpoint has no gradients, but has to take the draws that the second run repeats.
    if torch.is_grad_enabled() or (plan.draws_in_forward and ops.is_replaying()):
        needs_dgrad = x.requires_grad or any(t is not None and t.requires_grad for t in parameters)
        needs_wgrad = weight.requires_grad
    executed = ExecutedGemms() if executed is None else executed
    stored = tiles = None
    if weight_cache is not None:
        stored, tiles = partial(weight_cache.get, weight), weight_cache.tiles(weight)
    call = Call(plan, executed, shards, stored, main_grad, needs_dgrad, needs_wgrad, function, dtype, tiles)
    if main_grad is not None:
        weight = Accumulate.apply(weight, main_grad)
    if wholes is not None:
        return PartFunction.apply(x, weight, bias, call, wholes)
    return LinearFunction.apply(x, weight, bias, call, *parameters)


def require_features(inp: Tensor | FusedInput, weight: Tensor) -> None:
    """Accept ``inp`` [..., K] for a weight [N, K].

    Raises:
        ValueError: it has another shape.
        RuntimeError: ``torch.jit.trace`` records the call; the recording would be wrong for other values.
    """
    shape: tuple[Any, ...] = inp.shape
    if shape and isinstance(shape[-1], Tensor):  # while torch.jit.trace records, sizes are tensors
        raise RuntimeError(
            "torch.jit.trace cannot record a module that computes by a recipe; use torch.compile or torch.export, or "
            "trace inside autocast(enabled=False)"
        )
    if len(shape) == 0 or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"the input must have shape [..., in_features={weight.shape[1]}], got {tuple(shape)} "
            f"for weight {tuple(weight.shape)}"
        )


def require_bias(bias: Tensor, weight: Tensor, name: str = "bias") -> None:
    """Accept ``bias`` [N] for a weight [N, K].

    Raises:
        ValueError: it has another shape, lies elsewhere, or holds no floating-point numbers.
    """
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"{name} must have shape [out_features={weight.shape[0]}], got {list(bias.shape)}")
    if bias.device != weight.device:
        raise ValueError(f"{name} must be on the weight's device, {weight.device}, got one on {bias.device}")
    if bias.dtype not in FLOATS:
        raise ValueError(f"{name} must be {', '.join(str(dtype)[6:] for dtype in FLOATS)}, got {str(bias.dtype)[6:]}")


def linear_fprop(inp: Operand, weight: Operand, bias: Tensor | None, call: Call, dtype: torch.dtype) -> Tensor:
    """``y[M, N] = x[M, K] @ w[N, K].T + b``."""
    return _gemm("fprop", inp, computed_in(weight, dtype), call, dtype, bias)


def linear_dgrad(grad_output: Operand, weight: Operand, call: Call, dtype: torch.dtype) -> Tensor:
    """``dx[M, K] = dy[M, N] @ w[N, K]``: grad_output rowwise, weight columnwise."""
    return _gemm("dgrad", grad_output, computed_in(weight, call.dtype), call, dtype)


def linear_wgrad(
    grad_output: Operand, inp: Operand, call: Call, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor:
    """``dw[N, K] = dy[M, N].T @ x[M, K]``: both operands columnwise; in ``dtype``, or added to ``main_grad``."""
    return _gemm("wgrad", grad_output, inp, call, dtype, out=main_grad)


def linear_bgrad(grad_output: Tensor, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """``db[N] = sum of dy[M, N] over M``, in FP32 and in the order of :func:`fp4engine.reference.column_sums`.

    A gradient that is not quantized, or is in FP64, is summed in PyTorch's order, FP64 in FP64.
    """
    is_quantized = not plan.grad_output.is_identity and plan.backward_override is None
    if not is_quantized or grad_output.dtype == torch.float64:
        accumulation = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
        return grad_output.sum(0, dtype=accumulation).to(dtype)
    return ops.column_sums(grad_output, backend=plan.backend)[0].to(dtype)


def computed_in(weight: Operand, dtype: torch.dtype) -> Operand:
    """The weight; if it is not quantized, in the layer's dtype, as ``nn.Linear`` casts it under ``torch.autocast``."""
    return weight if weight.spec is not None else Operand.dense(weight.data.to(dtype))


def _gemm(
    name: GemmName,
    left: Operand,
    right: Operand,
    call: Call,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    plan = call.plan
    call.record(2 * left.rows * right.rows * left.cols, name)
    fast = name in plan.fast_accumulation
    return ops.gemm(left, right, out_dtype=dtype, bias=bias, out=out, backend=plan.backend, fast_accumulation=fast)


class LinearFunction(torch.autograd.Function):
    """Autograd around the three GEMMs. Saves plain tensors, and only those that the needed GEMMs read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *parameters: Any) -> Tensor:
        ctx.call, ctx.inp_shape, ctx.weight_dtype = call, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        matrix = as_matrix(x, "the input")
        ctx.at_once = way = at_once(matrix, weight, call)
        if way is None:
            output, saved = _forward_by_operations(x, weight, bias, call, parameters)
            tensors, ctx.structure = flatten(saved)
        else:
            output, tensors = forward_at_once(way, matrix, weight, bias, call)
            call.record(2 * x.numel() * weight.shape[0], "fprop")
        ctx.save_for_backward(*tensors)
        if x.ndim != 2:  # not a view, since autograd forbids in-place changes of a view that a Function returns
            output = torch.ops.aten._unsafe_view(output, (*x.shape[:-1], weight.shape[0]))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: Call = ctx.call
        plan, function = call.plan, call.function
        needs_dgrad, needs_wgrad, needs_bias = call.needs_dgrad, call.needs_wgrad, ctx.needs_input_grad[2]
        grad_output = as_matrix(grad_outputs[0])
        grad_input = grad_weight = grad_bias = None
        grad_parameters: tuple[Tensor | None, ...] = (None,) * (len(ctx.needs_input_grad) - 4)
        if needs_dgrad or needs_wgrad:
            if ctx.at_once is not None:
                ins, dtypes = ctx.inp_shape[-1], (call.dtype, ctx.weight_dtype)
                grad_input, grad_weight = backward_at_once(
                    ctx.at_once, grad_output, ctx.saved_tensors, ins, dtypes, call
                )
                names = ("dgrad", "wgrad")[not needs_dgrad : 1 + needs_wgrad]
                call.record(2 * grad_output.numel() * ctx.inp_shape[-1], *names)
            else:
                saved = unflatten(Saved, ctx.structure, ctx.saved_tensors)
                rng = draw(call, grad_output)
                grad_input, grad_weight = _gradients(grad_output, saved, call, rng, ctx.inp_shape[-1], ctx.weight_dtype)
                if function is not None and grad_input is not None:
                    assert saved.x is not None
                    gradients = function.gradients(grad_input, as_matrix(saved.x), saved.parameters, saved.statistics)
                    grad_input, grad_parameters = gradients[0], gradients[1:]
            if grad_input is not None and len(ctx.inp_shape) != 2:
                grad_input = grad_input.view(ctx.inp_shape)
        if needs_bias:
            grad_bias = linear_bgrad(grad_output, plan, ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, *grad_parameters


class PartFunction(torch.autograd.Function):
    """:class:`LinearFunction` on a rank's parts of whole tensors, with one autograd node for all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, wholes: Wholes) -> Tensor:
        ctx.wholes = wholes
        part = wholes.part
        return wholes.output(
            LinearFunction.forward(ctx, part(x), part(weight), bias if bias is None else part(bias), call)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wholes: Wholes = ctx.wholes
        gradients = LinearFunction.backward(ctx, wholes.part_of_grad(grad_outputs[0]))
        return *wholes.gradients(*gradients[:3]), None, None


def _forward_by_operations(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, parameters: tuple[Any, ...]
) -> tuple[Tensor, Saved]:
    """The output as a matrix, and what backward needs, by single operations."""
    plan, function = call.plan, call.function
    statistics = inp_within = weight_within = None
    if function is None:
        (inp, inp_kept), (rowwise, weight_kept) = forward_operands(x, weight, call)
    else:
        source, statistics = function.source(as_matrix(x), call.dtype, *parameters)
        inp, inp_kept = quantize_source(source, plan.input, call, call.needs_wgrad)
        rowwise, weight_kept = weight_operands(weight, call)
    if call.needs_dgrad:
        inp_within = within(x, inp, plan.input, plan)
    if call.needs_wgrad:
        weight_within = within(weight, rowwise, plan.weight, plan)
    added = bias if call.shards is None or call.shards.adds_bias else None
    output = linear_fprop(inp, rowwise, added, call, call.dtype)
    assert not isinstance(inp_kept, TiledOperand), "an input is cast here"
    saved = Saved(inp_kept, weight_kept, inp_within=inp_within, weight_within=weight_within)
    if function is not None and call.needs_dgrad:
        saved = saved._replace(x=x, parameters=parameters, statistics=statistics)
    return output, saved


def _gradients(
    grad_output: Tensor, saved: Saved, call: Call, rng: Tensor | None, in_features: int, weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input and of the weight, by single operations."""
    grad_input, grad_weight, backend = None, None, call.plan.backend
    left, left_t = quantize_grad(grad_output, call, rng)
    weight, inp = saved_operands(saved.weight, saved.inp, call, rng)
    if call.needs_dgrad:
        assert left is not None and weight is not None
        rotated = rotated_by(call.plan.weight, call.plan)
        dgrad = partial(linear_dgrad, left, weight, call)
        grad_input = gradient(dgrad, rotated, saved.inp_within, in_features, call.dtype, backend)
    if call.needs_wgrad:
        assert left_t is not None and inp is not None
        rotated = rotated_by(call.plan.input, call.plan)
        wgrad = partial(linear_wgrad, left_t, inp, call)
        undone = partial(gradient, wgrad, rotated, saved.weight_within, in_features, backend=backend)
        if call.main_grad is None:
            grad_weight = undone(weight_dtype)
        else:
            buffer = call.main_grad.buffer
            if not rotated and saved.weight_within is None:
                call.main_grad.product = partial(wgrad, buffer.dtype, buffer)
            else:
                call.main_grad.product = partial(add_rounded, buffer, partial(undone, torch.float32))
            grad_weight = no_gradient(buffer.shape, weight_dtype, grad_output.device)
    return grad_input, grad_weight


def refuse_second_derivative() -> None:
    """Refuse to compute gradients that are to be differentiated again.

    Quantized GEMMs have no second derivative, and PyTorch would silently leave out the part that goes through weights.

    Raises:
        RuntimeError: the backward pass was asked for with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "quantized GEMMs are differentiable once, and this backward pass has create_graph=True; compute what needs "
            "a second derivative outside autocast, or under autocast(enabled=False)"
        )
