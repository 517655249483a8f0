"""y = x W^T + b, with each of its three GEMMs on quantized operands.

    fprop  y[M, N]  = x[M, K]  . w[N, K]     contracts K    rowwise    x rowwise
    dgrad  dx[M, K] = dy[M, N] . w^T[K, N]   contracts N    rowwise    x columnwise
    wgrad  dw[N, K] = dy^T[N, M] . x^T[K, M] contracts M    columnwise x columnwise

Legend: M tokens, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4engine import ops
from fp4engine.formats import Outer
from fp4engine.functional.activation import Activation
from fp4engine.functional.deferred import Deferred
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import GemmName, LinearPlan, operand_formats
from fp4engine.functional.weight_cache import Operands, WeightCache
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix
from fp4engine.tensor import Operand, QuantizedTensor


def linear(
    inp: Tensor | Deferred,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    *,
    weight_cache: WeightCache | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Linear transformation by ``plan``, differentiable once.

    Args:
        inp: [..., K], any rank >= 1, stride and number of rows; or a function that :meth:`Deferred.fuses`.
        weight: [N, K]; bias: [N] or None.
        weight_cache: where to look for the weight's operands, and to leave them; None quantizes anew.
        main_grad: FP32 or BF16 [N, K] to which wgrad adds; the weight then gets no gradient of its own.

    Returns:
        [..., N] in ``inp.dtype``.

    Raises:
        ValueError: the last dimension of ``inp`` is not K.
    """
    require_features(inp, weight)
    if not torch.is_grad_enabled():
        return _forward(inp, weight, bias, plan, weight_cache, False, False)[0]
    function, x, parameters, dtype = (None, inp, (), inp.dtype) if isinstance(inp, Tensor) else inp
    needs_dgrad = any(t is not None and t.requires_grad for t in (x, *parameters))
    needs = (needs_dgrad, weight.requires_grad)
    return LinearFunction.apply(x, weight, bias, plan, weight_cache, main_grad, *needs, function, dtype, *parameters)


def require_features(inp: Tensor | Deferred, weight: Tensor) -> None:
    """Raise a ValueError unless ``inp`` is [..., K] for a weight [N, K]."""
    if len(inp.shape) == 0 or inp.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"inp must have shape [..., in_features={weight.shape[1]}], got {tuple(inp.shape)} "
            f"for weight {tuple(weight.shape)}"
        )


def linear_fprop(inp: Operand, weight: Operand, bias: Tensor | None, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """``y[M, N] = x[M, K] @ w[N, K].T + b``."""
    return _gemm("fprop", inp, weight, plan, dtype, bias)


def linear_dgrad(grad_output: Operand, weight: Operand, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """``dx[M, K] = dy[M, N] @ w[N, K]``: grad_output rowwise, weight columnwise."""
    return _gemm("dgrad", grad_output, weight, plan, dtype)


def linear_wgrad(
    grad_output: Operand, inp: Operand, plan: LinearPlan, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor:
    """``dw[N, K] = dy[M, N].T @ x[M, K]``: both operands columnwise; in ``dtype``, or added to ``main_grad``."""
    return _gemm("wgrad", grad_output, inp, plan, dtype, out=main_grad)


def linear_bgrad(grad_output: Tensor, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """``db[N] = sum of dy[M, N] over M``, in FP32 and in the order of :func:`fp4engine.reference.column_sums`.

    Where the gradient is not quantized, it is summed as ``nn.Linear`` would.
    """
    if plan.grad_output.is_identity or plan.backward_override is not None or grad_output.dtype == torch.float64:
        accumulation = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
        return grad_output.sum(0, dtype=accumulation).to(dtype)
    return ops.column_sums(grad_output, backend=plan.backend)[0].to(dtype)


def _gemm(
    name: GemmName,
    left: Operand,
    right: Operand,
    plan: LinearPlan,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    plan.executed.record(name, operand_formats(left.spec, right.spec), 2 * left.rows * right.rows * left.cols)
    return ops.gemm(
        left,
        right,
        out_dtype=dtype,
        bias=bias,
        out=out,
        backend=plan.backend,
        fast_accumulation=name in plan.fast_accumulation,
    )


def _forward(
    inp: Tensor | Deferred,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    weight_cache: WeightCache | None,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> tuple[Tensor, Operand | None, Operand | None, tuple[Tensor, ...]]:
    """``(y, what wgrad needs of inp, what dgrad needs of weight, what the gradients of inp's function need)``."""
    inp_rowwise, inp_kept, saved = _quantize_forward(inp, plan.input, plan, needs_wgrad)
    weight_rowwise, weight_kept = weight_operands(weight, plan, weight_cache, needs_dgrad)
    output = linear_fprop(inp_rowwise, weight_rowwise, bias, plan, inp.dtype)
    if len(inp.shape) != 2:  # as nn.Linear reshapes: autograd forbids to change a view that a Function returns in place
        output = torch.ops.aten._unsafe_view(output, (*inp.shape[:-1], weight.shape[0]))
    return output, inp_kept, weight_kept, saved


def weight_operands(weight: Tensor, plan: LinearPlan, weight_cache: WeightCache | None, needs_dgrad: bool) -> Operands:
    """What fprop and dgrad need of ``weight``, from the cache where there is one."""
    if weight_cache is None:
        return _quantize_forward(weight, plan.weight, plan, needs_dgrad)[:2]
    return weight_cache.get(
        (weight, plan, needs_dgrad), lambda: _quantize_forward(weight, plan.weight, plan, needs_dgrad)[:2]
    )


def _quantize_forward(
    value: Tensor | Deferred, quantizer: Quantizer, plan: LinearPlan, needs_backward: bool
) -> tuple[Operand, Operand | None, tuple[Tensor, ...]]:
    """The operand of fprop, and what to keep for backward: never a byte that nobody reads."""
    from_rowwise = plan.backward_override == "dequantized" or (
        plan.backward_override is None and quantizer.columnwise_source == "rowwise_dequantized"
    )
    keep_rowwise = needs_backward and from_rowwise
    keep_columnwise = needs_backward and not from_rowwise and plan.backward_override is None
    form = "codes" if keep_rowwise else ops.transient_form(quantizer.rowwise_spec, value.device, plan.backend)
    saved: tuple[Tensor, ...] = ()
    if isinstance(value, Tensor):
        matrix = as_matrix(value)
        quantized = _reduced(quantizer, matrix, plan, columnwise=keep_columnwise, rowwise_form=form)
    else:
        matrix, (rowwise_amax, columnwise_amax), saved = value.read(quantizer, keep_columnwise)
        quantized = quantizer.quantize(
            matrix,
            columnwise=keep_columnwise,
            rowwise_form=form,
            rowwise_amax=rowwise_amax,
            columnwise_amax=columnwise_amax,
        )
    rowwise = quantized.rowwise
    assert rowwise is not None
    if keep_rowwise:
        return rowwise, rowwise, saved
    if needs_backward and plan.backward_override == "high_precision":
        assert isinstance(matrix, Tensor)
        return rowwise, Operand.dense(matrix), saved
    return rowwise, quantized.columnwise, saved


def _reduced(quantizer: Quantizer, matrix: Tensor, plan: LinearPlan, **arguments: Any) -> QuantizedTensor:
    """Quantize with outer amaxes reduced over the plan's process group, where it has one."""
    if plan.amax_reduction_group is None or quantizer.is_identity:
        return quantizer.quantize(matrix, **arguments)
    asked = {name: arguments[name] for name in ("rowwise", "columnwise", "rng") if name in arguments}
    rowwise, columnwise = quantizer.amax(matrix, **asked)
    for amax, spec in ((rowwise, quantizer.rowwise_spec), (columnwise, quantizer.columnwise_spec)):
        if amax is not None and spec is not None and spec.outer is Outer.TENSOR:  # a row is one rank's own
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, plan.amax_reduction_group)
    return quantizer.quantize(matrix, rowwise_amax=rowwise, columnwise_amax=columnwise, **arguments)


class LinearFunction(torch.autograd.Function):
    """Autograd around the three GEMMs. Saves plain tensors, and only those that the needed GEMMs read."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        weight_cache: WeightCache | None,
        main_grad: Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        function: Norm | Activation | None,
        dtype: torch.dtype,
        *parameters: Tensor | None,
    ) -> Tensor:
        value = inp if function is None else Deferred(function, inp, parameters, dtype)
        output, inp_kept, weight_kept, kept = _forward(
            value, weight, bias, plan, weight_cache, needs_dgrad, needs_wgrad
        )
        ctx.plan, ctx.main_grad, ctx.function = plan, main_grad, function
        ctx.inp_shape, ctx.inp_dtype, ctx.weight_dtype = inp.shape, value.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved: list[Tensor | None] = []
        ctx.kept = []
        for operand in (inp_kept, weight_kept):
            ctx.kept.append(None if operand is None else (operand.spec, operand.rows, operand.cols))
            saved += (None, None, None) if operand is None else operand.tensors()
        if function is not None and needs_dgrad:
            saved += (inp, *parameters, *kept)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # once_differentiable lets a constant gradient pass, whose second derivative by the weight is missing too
            grad_output = grad_output.detach().requires_grad_()
        return _backward(ctx, grad_output)


@once_differentiable
def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    plan: LinearPlan = ctx.plan
    needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
    needs_dgrad = needs_dgrad or any(ctx.needs_input_grad[8:])
    grad_matrix = as_matrix(grad_output)
    inp_kept, weight_kept, read = _restore(ctx)
    grad_input = grad_weight = grad_bias = None
    grad_parameters: list[Tensor | None] = []
    if needs_dgrad or needs_wgrad:
        rng = ops.next_draw(grad_output.device) if draws_in_backward(plan) else None
        left, left_t = _quantize_grad(grad_matrix, plan, needs_dgrad, needs_wgrad, rng)
        if needs_dgrad:
            assert left is not None and weight_kept is not None
            weight = _columnwise(weight_kept, plan.weight, plan, ctx.inp_dtype, rng)
            grad_input = linear_dgrad(left, weight, plan, ctx.inp_dtype)
            if ctx.function is not None:
                grad_input, *grad_parameters = ctx.function.gradients(grad_input, as_matrix(read[0]), *read[1:])
            if len(ctx.inp_shape) != 2:
                grad_input = grad_input.view(ctx.inp_shape)
        if needs_wgrad:
            assert left_t is not None and inp_kept is not None
            inp = _columnwise(inp_kept, plan.input, plan, ctx.inp_dtype, rng)
            grad_weight = linear_wgrad(left_t, inp, plan, ctx.weight_dtype, ctx.main_grad)
            if ctx.main_grad is not None:
                grad_weight = None
    if needs_bias:
        grad_bias = linear_bgrad(grad_matrix, plan, ctx.bias_dtype)
    unread = len(ctx.needs_input_grad) - 3 - len(grad_parameters)
    return grad_input, grad_weight, grad_bias, *(None,) * unread, *grad_parameters


def _restore(ctx: Any) -> tuple[Operand | None, Operand | None, tuple[Any, ...]]:
    saved = ctx.saved_tensors
    inp, weight = ctx.kept
    return (
        None if inp is None else Operand(*inp, *saved[:3]),
        None if weight is None else Operand(*weight, *saved[3:6]),
        saved[6:],
    )


def draws_in_backward(plan: LinearPlan) -> bool:
    """Whether a backward pass takes a draw; one draw serves both GEMMs, whose streams differ by role and side."""
    if plan.backward_override is not None:
        return False
    sources = [q for q in (plan.input, plan.weight) if q.columnwise_source == "rowwise_dequantized"]
    return any(q.is_stochastic for q in (plan.grad_output, *sources))


def _quantize_grad(
    grad_matrix: Tensor, plan: LinearPlan, needs_dgrad: bool, needs_wgrad: bool, rng: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """Both operands of the gradient, in one pass where it is quantized."""
    if plan.backward_override is not None:
        return Operand.dense(grad_matrix), Operand.dense(grad_matrix.T)
    quantizer = plan.grad_output
    quantized = _reduced(
        quantizer,
        grad_matrix,
        plan,
        rowwise=needs_dgrad,
        columnwise=needs_wgrad,
        rng=rng,
        rowwise_form=ops.transient_form(quantizer.rowwise_spec, grad_matrix.device, plan.backend),
        columnwise_form=ops.transient_form(quantizer.columnwise_spec, grad_matrix.device, plan.backend),
    )
    return quantized.rowwise, quantized.columnwise


def _columnwise(
    kept: Operand, quantizer: Quantizer, plan: LinearPlan, dtype: torch.dtype, rng: Tensor | None
) -> Operand:
    """The backward GEMM's operand, from whatever of the tensor was kept."""
    if plan.backward_override is not None:
        return Operand.dense(kept.dequantize(dtype, plan.backend).T)
    if quantizer.columnwise_source == "rowwise_dequantized":
        form = ops.transient_form(quantizer.columnwise_spec, kept.data.device, plan.backend)
        return quantizer.requantize(kept, rng, form)
    return kept
