"""y = x W^T + b, with each of its three GEMMs on quantized operands.

    fprop  y[M, N]  = x[M, K]  . w[N, K]     contracts K    rowwise    x rowwise
    dgrad  dx[M, K] = dy[M, N] . w^T[K, N]   contracts N    rowwise    x columnwise
    wgrad  dw[N, K] = dy^T[N, M] . x^T[K, M] contracts M    columnwise x columnwise

Legend: M tokens, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4engine import ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.functional.activation import Activation
from fp4engine.functional.deferred import Deferred
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import GemmName, LinearPlan, operand_formats
from fp4engine.functional.weight_cache import Operands, WeightCache
from fp4engine.kernels.tape import Result
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
        output = _forward(inp, weight, bias, plan, weight_cache, False, False)[0][0]
        assert output is not None
        return output
    function, x, parameters, dtype = (None, inp, (), inp.dtype) if isinstance(inp, Tensor) else inp
    needs_dgrad = any(t is not None and t.requires_grad for t in (x, *parameters))
    needs = (needs_dgrad, weight.requires_grad)
    call = (plan, weight_cache, main_grad, *needs, function, dtype)
    return LinearFunction.apply(x, weight, bias, call, *parameters)


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


Kept = tuple[CastSpec | None, int, int] | None
"""``(spec, rows, cols)`` of an operand whose tensors are kept elsewhere; None for no operand."""


def _forward(
    inp: Tensor | Deferred,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    weight_cache: WeightCache | None,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> tuple[tuple[Tensor | None, ...], tuple[Kept, Kept]]:
    """``((y, *tensors), kept)``: what backward needs.

    Three tensors each of inp's and the weight's operand, which ``kept`` describes; then what inp's function asks for.
    """
    function, x, parameters, dtype = (None, inp, (), inp.dtype) if isinstance(inp, Tensor) else inp
    if weight_cache is None:
        problem = ("forward", function, dtype, needs_dgrad, needs_wgrad, None)
        return _run(plan, problem, _compute_forward, (x, bias, *parameters, weight))
    rowwise, weight_kept = weight_operands(weight, plan, weight_cache, needs_dgrad)
    problem = ("forward", function, dtype, needs_dgrad, needs_wgrad, _kept(rowwise))
    tensors, (inp_kept, _) = _run(plan, problem, _compute_forward, (x, bias, *parameters, *rowwise.tensors()))
    return (*tensors[:4], *_tensors(weight_kept), *tensors[7:]), (inp_kept, _kept(weight_kept))


def _run(
    plan: LinearPlan,
    problem: tuple[Any, ...],
    compute: Callable[..., Result],
    tensors: tuple[Tensor | None, ...],
) -> Result:
    """``compute(plan, *problem[1:], *tensors)``, from ``plan``'s tapes where it is on one."""
    arguments = (plan, *problem[1:])
    if plan.tapes is None or torch.compiler.is_compiling():
        return compute(*arguments, *tensors)
    return plan.tapes.run(problem, tensors, compute, arguments)


def _compute_forward(
    plan: LinearPlan,
    function: Norm | Activation | None,
    dtype: torch.dtype,
    needs_dgrad: bool,
    needs_wgrad: bool,
    quantized: Kept,
    x: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[tuple[Tensor | None, ...], tuple[Kept, Kept]]:
    """As :func:`_forward`; ``others`` are the function's parameters, then the weight, or its operand's tensors."""
    parameters, stored = (others[:-1], others[-1:]) if quantized is None else (others[:-3], others[-3:])
    inp = x if function is None else Deferred(function, x, parameters, dtype)
    inp_rowwise, inp_kept, saved = _quantize_forward(inp, plan.input, plan, needs_wgrad)
    if quantized is None:
        weight_rowwise, weight_kept = weight_operands(stored[0], plan, None, needs_dgrad)
    else:
        weight_rowwise, weight_kept = Operand(*quantized, *stored), None
    output = linear_fprop(inp_rowwise, weight_rowwise, bias, plan, dtype)
    if len(inp.shape) != 2:  # as nn.Linear reshapes: autograd forbids to change a view that a Function returns in place
        output = torch.ops.aten._unsafe_view(output, (*inp.shape[:-1], weight_rowwise.rows))
    return (output, *_tensors(inp_kept), *_tensors(weight_kept), *saved), (_kept(inp_kept), _kept(weight_kept))


def _tensors(operand: Operand | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if operand is None else operand.tensors()


def _kept(operand: Operand | None) -> Kept:
    return None if operand is None else operand[:3]


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
        call: tuple[Any, ...],
        *parameters: Tensor | None,
    ) -> Tensor:
        plan, weight_cache, main_grad, needs_dgrad, needs_wgrad, function, dtype = call
        value = inp if function is None else Deferred(function, inp, parameters, dtype)
        tensors, ctx.kept = _forward(value, weight, bias, plan, weight_cache, needs_dgrad, needs_wgrad)
        output, saved = tensors[0], tensors[1:7]
        assert output is not None
        ctx.plan, ctx.main_grad, ctx.function = plan, main_grad, function
        ctx.inp_shape, ctx.inp_dtype, ctx.weight_dtype = inp.shape, dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if function is not None and needs_dgrad:
            saved += (inp, *parameters, *tensors[7:])
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        if not torch.is_grad_enabled():
            return _backward(ctx, grad_output)
        if not torch.compiler.is_compiling():
            # once_differentiable lets a constant gradient pass, whose second derivative by the weight is missing too
            grad_output = grad_output.detach().requires_grad_()
        return _backward_once(ctx, grad_output)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    plan: LinearPlan = ctx.plan
    needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
    needs_dgrad = needs_dgrad or any(ctx.needs_input_grad[4:])
    grad_input = grad_weight = grad_bias = None
    grad_parameters: list[Tensor | None] = []
    if needs_dgrad or needs_wgrad:
        draws = plan.draws_in_backward
        problem = (
            "backward", needs_dgrad, needs_wgrad, ctx.kept, ctx.inp_shape, ctx.inp_dtype, ctx.weight_dtype,
            ctx.function, ops.rank_bits() if draws else 0,
        )  # fmt: skip
        rng = ops.next_draw(grad_output.device) if draws else None
        tensors = (grad_output, ctx.main_grad, rng, *ctx.saved_tensors)
        (grad_input, grad_weight, *grad_parameters), _ = _run(plan, problem, _compute_backward, tensors)
    if needs_bias:
        grad_bias = linear_bgrad(as_matrix(grad_output), plan, ctx.bias_dtype)
    unread = len(ctx.needs_input_grad) - 3 - len(grad_parameters)
    return grad_input, grad_weight, grad_bias, *(None,) * unread, *grad_parameters


_backward_once = once_differentiable(_backward)


def _compute_backward(
    plan: LinearPlan,
    needs_dgrad: bool,
    needs_wgrad: bool,
    kept: tuple[Kept, Kept],
    inp_shape: torch.Size,
    inp_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    function: Norm | Activation | None,
    rank_bits: int,
    grad_output: Tensor,
    main_grad: Tensor | None,
    rng: Tensor | None,
    *saved: Any,
) -> Result:
    """Gradients of inp, weight and the parameters of inp's function; ``rank_bits`` go into every stream id."""
    inp_kept, weight_kept = (
        None if which is None else Operand(*which, *saved[place : place + 3])
        for which, place in zip(kept, (0, 3), strict=True)
    )
    grad_input = grad_weight = None
    grad_parameters: list[Tensor | None] = []
    left, left_t = _quantize_grad(as_matrix(grad_output), plan, needs_dgrad, needs_wgrad, rng)
    if needs_dgrad:
        assert left is not None and weight_kept is not None
        weight = _columnwise(weight_kept, plan.weight, plan, inp_dtype, rng)
        grad_input = linear_dgrad(left, weight, plan, inp_dtype)
        if function is not None:
            grad_input, *grad_parameters = function.gradients(grad_input, as_matrix(saved[6]), *saved[7:])
        if len(inp_shape) != 2:
            assert grad_input is not None
            grad_input = grad_input.view(inp_shape)
    if needs_wgrad:
        assert left_t is not None and inp_kept is not None
        inp = _columnwise(inp_kept, plan.input, plan, inp_dtype, rng)
        grad_weight = linear_wgrad(left_t, inp, plan, weight_dtype, main_grad)
        if main_grad is not None:
            grad_weight = None
    return (grad_input, grad_weight, *grad_parameters), None


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
