"""y = x W^T + b by a plan, differentiable once: autograd around :mod:`fp4engine.functional.program`.

Legend: M tokens, K in_features, N out_features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional import operators
from fp4engine.functional.call import Call
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.program import Needs
from fp4engine.functional.record import Layout, restored
from fp4engine.functional.shards import Shards, Wholes
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.quantizers.base import FLOATS, as_matrix


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
    needs = Needs(False, False)
    # The first run of a reentrant checkpoint has no gradients, but has to take the draws that the second run repeats.
    if torch.is_grad_enabled() or (plan.draws_in_forward and ops.is_replaying()):
        needs_dgrad = x.requires_grad or any(t is not None and t.requires_grad for t in parameters)
        needs = Needs(needs_dgrad, weight.requires_grad)
    executed = ExecutedGemms() if executed is None else executed
    dtypes = dtype, weight.dtype, None if bias is None else bias.dtype
    call = Call(plan, executed, shards, weight_cache, main_grad, needs, function, weight.shape[1], dtypes)
    if wholes is not None:
        return PartFunction.apply(x, weight, bias, call, wholes)
    return LinearFunction.apply(x, weight, bias, call, *parameters)


def require_features(inp: Tensor | FusedInput, weight: Tensor) -> None:
    """Accept ``inp`` [..., K] for a weight [N, K].

    Raises:
        ValueError: one of them has another shape.
        RuntimeError: ``torch.jit.trace`` records the call; the recording would be wrong for other values.
    """
    shape: tuple[Any, ...] = inp.shape
    if shape and isinstance(shape[-1], Tensor):  # while torch.jit.trace records, sizes are tensors
        raise RuntimeError(
            "torch.jit.trace cannot record a module that computes by a recipe; use torch.compile or torch.export, or "
            "trace inside autocast(enabled=False)"
        )
    if weight.ndim != 2:
        raise ValueError(f"the weight must have shape [out_features, in_features], got {tuple(weight.shape)}")
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


class LinearFunction(torch.autograd.Function):
    """Autograd around a layer's program. Saves plain tensors, and only those that the needed GEMMs read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *parameters: Any) -> Tensor:
        rows, cols = weight.shape
        ctx.call, ctx.inp_shape = call, x.shape
        matrix, added = as_matrix(x, "the input"), bias if call.adds_bias else None
        if torch.compiler.is_dynamo_compiling() and operators.take(call, weight):
            output, kept, ctx.layout = operators.run_forward(call, matrix, weight, added)
        else:
            output, kept, ctx.layout = call.forward(matrix, weight, added, call.cast_weight(weight), parameters)
        call.record(2 * output.shape[0] * rows * cols, "fprop")
        ctx.count = len(kept)
        if call.function is not None and call.needs.dgrad:
            kept = [*kept, x, *parameters]
        ctx.save_for_backward(*kept)
        if x.ndim != 2:  # not a view, since autograd forbids in-place changes of a view that a Function returns
            output = torch.ops.aten._unsafe_view(output, (*x.shape[:-1], rows))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: Call = ctx.call
        needs = Needs(call.needs.dgrad, call.needs.wgrad, ctx.needs_input_grad[2])
        grad_output, main_grad = as_matrix(grad_outputs[0]), call.main_grad if needs.wgrad else None
        if main_grad is not None and not main_grad.is_asked_for(ctx, 1):
            main_grad, needs = None, needs._replace(wgrad=False)
            if call.plan.draws_in_backward and not needs.dgrad:  # as a layer does that has no main_grad
                call.eager(grad_output.device).draw("backward", grad_output)
        tensors = ctx.saved_tensors  # to be asked for once: a checkpoint may recompute them for it
        kept, rest = tensors[: ctx.count], tensors[ctx.count :]
        if main_grad is not None and main_grad.later is None:
            main_grad.begin()
        run: Any = Call.backward if isinstance(ctx.layout, Layout) else operators.run_backward
        grad_input, grad_weight, grad_bias = run(call, ctx.layout, grad_output, kept, needs)
        flops = 2 * grad_output.shape[0] * grad_output.shape[1] * call.cols
        if main_grad is not None and main_grad.later is None:
            main_grad.end()
        elif main_grad is not None:
            main_grad.add(partial(_counted, call, flops, grad_weight, main_grad.buffer))
            grad_weight, needs = None, needs._replace(wgrad=False)
        call.record(flops, *("dgrad", "wgrad")[not needs.dgrad : 1 + needs.wgrad])
        grad_parameters: tuple[Tensor | None, ...] = (None,) * (len(ctx.needs_input_grad) - 4)
        if grad_input is not None:
            if call.function is not None:
                statistics = restored(ctx.layout.slots.statistics, kept)
                gradients = call.function.gradients(grad_input, as_matrix(rest[0]), rest[1:], statistics)
                grad_input, grad_parameters = gradients[0], gradients[1:]
            if grad_input is not None and len(ctx.inp_shape) != 2:
                grad_input = grad_input.view(ctx.inp_shape)
        return grad_input, grad_weight, grad_bias, None, *grad_parameters


def _counted(call: Call, flops: int, add: Callable[[Tensor], None], buffer: Tensor) -> None:
    """Add wgrad to ``buffer``, and count it."""
    add(buffer)
    call.record(flops, "wgrad")


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
