"""Many linear transformations of one size, each for its own rows; the counts of rows never leave the device.

    y_e = x_e W_e^T + b_e      x = [x_0; x_1; ...; rows of no expert]

The bytes are those of a loop of :func:`~fp4engine.functional.linear` over the slices x_e. The number of kernels grows
with the number of experts only where weights are quantized.

Legend: M rows in all, G experts, K in_features, N out_features.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.call import Call
from fp4engine.functional.linear import refuse_second_derivative, require_bias, require_features
from fp4engine.functional.main_grad import Accumulate, MainGrad, no_gradient
from fp4engine.functional.operands import weight_operands
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.saved import flatten, unflatten
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops import Operand
from fp4engine.quantizers.base import as_matrix
from fp4engine.roles import GemmName


class Expert(NamedTuple):
    """One of the linear transformations.

    Attributes:
        weight: [N, K].
        bias: [N] or None.
        plan, executed, shards, weight_cache, main_grad: see :func:`fp4engine.functional.linear`.
    """

    weight: Tensor
    bias: Tensor | None
    plan: LinearPlan
    executed: ExecutedGemms
    shards: Shards | None
    weight_cache: WeightCache | None
    main_grad: MainGrad | None


def grouped_refusal(inp: Tensor, experts: Sequence[Expert]) -> str:
    """Why :func:`grouped_linear` cannot give the bytes of a loop over the experts; empty if it can."""
    weight, plan = experts[0].weight, experts[0].plan
    if any(expert.plan is not plan and expert.plan != plan for expert in experts):
        return "experts follow different recipes"
    if any(expert.weight.dtype != weight.dtype for expert in experts):
        return "experts have weights of different dtypes"
    if len({type(expert.weight) in (Tensor, torch.nn.Parameter) for expert in experts}) > 1:
        return "only some weights are stored as codes"
    if len({expert.bias is None for expert in experts}) > 1:
        return "only some experts have a bias"
    if 0 in weight.shape:
        return "the weights are empty"
    trained = [expert for expert in experts if expert.weight.requires_grad]
    if torch.is_grad_enabled() and not inp.requires_grad and 0 < len(trained) < len(experts):
        return "experts whose weight is frozen take no draw, since inp needs no gradient"
    if len({expert.main_grad is None for expert in trained}) > 1:
        return "only some weights have a main_grad"
    if experts[0].shards is not None:
        return "amaxes that ranks share, and experts that draw by their own names, have no grouped kernels"
    return _plan_refusal(plan) or _kernel_refusal(plan, (inp.dtype, weight.dtype), inp.device)


def _plan_refusal(plan: LinearPlan) -> str:
    quantizers = (plan.input, plan.weight, plan.grad_output)
    if plan.backward_override is not None:
        return "backward_override has no grouped kernels"
    if any(q.columnwise_source != "original" or q.clipped_gradient or not q.only_casts for q in quantizers):
        return "a quantizer does more than cast"
    if plan.input.draws_in_forward or plan.weight.draws_in_forward:
        return "the forward draws random bits"
    rowwise = [spec and spec.rotation for spec in (q.rowwise_spec for q in quantizers)]
    columnwise = [spec and spec.rotation for spec in (q.columnwise_spec for q in quantizers)]
    if any(rowwise) or columnwise[1] is not None or columnwise[0] != columnwise[2]:
        return "only both operands of wgrad may be rotated"
    return ""


def _kernel_refusal(plan: LinearPlan, dtypes: tuple[torch.dtype, ...], device: torch.device) -> str:
    for quantizer in (plan.input, plan.weight, plan.grad_output):
        for backend in (plan.backend, quantizer.backend):
            specs = (quantizer.rowwise_spec, quantizer.columnwise_spec)
            supported, reason = ops.grouped_supports(specs, dtypes, device, backend)
            if not supported:
                return reason
    return ""


def grouped_linear(inp: Tensor, counts: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Every expert's transformation of its rows, differentiable once.

    Args:
        inp: [..., K], seen as [M, K]; what :func:`grouped_refusal` accepts.
        counts: integers [G] on the device of ``inp``: rows of each expert, in order. The host never reads them. Rows
            past the sum of the counts belong to no expert. If a count is negative or the sum exceeds M, no row belongs
            to an expert.

    Returns:
        [..., N] in ``inp.dtype``. In rows that belong to no expert, the output and the gradient of ``inp`` are NaN.

    Raises:
        ValueError: the last dimension of ``inp`` is not K, or :func:`require_bias` refuses a bias.
    """
    first = experts[0]
    require_features(inp, first.weight)
    needs = (False, False)
    if torch.is_grad_enabled():
        needs = (inp.requires_grad, any(expert.weight.requires_grad for expert in experts))
    calls: list[Call] = []
    weights: list[Tensor] = []
    for index, (weight, bias, plan, executed, _, cache, main_grad) in enumerate(experts):
        if bias is not None:
            require_bias(bias, weight, f"bias{index}")
        stored = None if cache is None else partial(cache.get, weight)
        call = Call(plan, executed, None, stored, main_grad, *needs, None, inp.dtype)
        calls.append(call)
        weights.append(weight if main_grad is None else Accumulate.apply(weight, main_grad))
    biases = [expert.bias for expert in experts if expert.bias is not None]
    return GroupedLinearFunction.apply(inp, counts, calls, *weights, *biases)


class Saved(NamedTuple):
    """What a forward keeps for its backward.

    Attributes:
        offsets: of the experts' rows.
        inp: columnwise operand of all rows.
        weight: columnwise operands of the weights, stacked.
    """

    offsets: Tensor
    inp: Operand | None
    weight: Operand | None


class GroupedLinearFunction(torch.autograd.Function):
    """Autograd around the three products of every expert. Saves codes and scales only."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, counts: Tensor, calls: list[Call], *parameters: Tensor) -> Tensor:
        call, plan = calls[0], calls[0].plan
        weights, biases = parameters[: len(calls)], parameters[len(calls) :]
        matrix = as_matrix(inp, "the input")
        offsets = ops.expert_offsets(counts, matrix.shape[0])
        columnwise_spec = plan.input.columnwise_spec if call.needs_wgrad else None
        rowwise, columnwise = ops.grouped_quantize(
            matrix, offsets, plan.input.rowwise_spec, columnwise_spec, rowwise_form="values"
        )
        assert rowwise is not None
        operands = [weight_operands(weight, own) for weight, own in zip(weights, calls, strict=True)]
        bias = torch.stack(biases) if biases else None
        _record("fprop", calls, matrix.shape[0] * weights[0].numel())
        stacked = _stack([row for row, _ in operands])
        output = ops.grouped_gemm(rowwise, stacked, offsets, out_dtype=inp.dtype, bias=bias)
        kept = [
            kept.columnwise(plan.weight.backend) if isinstance(kept, ops.TiledOperand) else kept
            for _, kept in operands
            if kept is not None
        ]
        tensors, ctx.structure = flatten(Saved(offsets, columnwise, _stack(kept) if kept else None))
        ctx.save_for_backward(*tensors)
        ctx.calls, ctx.inp_shape = calls, inp.shape
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        if len(inp.shape) != 2:  # as in :func:`fp4engine.functional.linear`
            output = torch.ops.aten._unsafe_view(output, (*inp.shape[:-1], weights[0].shape[0]))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        calls: list[Call] = ctx.calls
        call, plan, groups = calls[0], calls[0].plan, len(calls)
        needs_parameters = ctx.needs_input_grad[3:]
        saved = unflatten(Saved, ctx.structure, ctx.saved_tensors)
        matrix = as_matrix(grad_outputs[0])
        grad_input = None
        grads: list[Tensor | None] = [None] * len(needs_parameters)
        if call.needs_dgrad or call.needs_wgrad:
            rng = None
            if plan.draws_in_backward:
                rng = ops.next_draw(matrix.device, groups, direction="backward", after=matrix)
            rowwise, columnwise = ops.grouped_quantize(
                matrix,
                saved.offsets,
                plan.grad_output.rowwise_spec if call.needs_dgrad else None,
                plan.grad_output.columnwise_spec if call.needs_wgrad else None,
                rowwise_form="values",
                columnwise_form="values",
                rng=rng,
                stream=plan.grad_output.stream | ops.rank_bits(),
            )
            products = matrix.shape[0] * matrix.shape[1] * ctx.inp_shape[-1]
            if rowwise is not None:
                assert saved.weight is not None
                _record("dgrad", calls, products)
                grad_input = ops.grouped_gemm(rowwise, saved.weight, saved.offsets, out_dtype=call.dtype)
                grad_input = grad_input.view(ctx.inp_shape)
            if columnwise is not None:
                assert saved.inp is not None
                _record("wgrad", calls, products)
                grads[:groups] = _weight_gradients(columnwise, saved.inp, saved.offsets, calls, ctx.dtypes[0])
        if any(needs_parameters[groups:]):
            sums = ops.column_sums(matrix, saved.offsets).unbind()
            grads[groups:] = [total.to(dtype) for total, dtype in zip(sums, ctx.dtypes[groups:], strict=True)]
        grads = [grad if needs else None for grad, needs in zip(grads, needs_parameters, strict=True)]
        return grad_input, None, None, *grads


def _weight_gradients(
    left: Operand, right: Operand, offsets: Tensor, calls: list[Call], dtype: torch.dtype
) -> list[Tensor | None]:
    """The experts' weight gradients; a placeholder for a gradient that is added to ``main_grad``."""
    if all(call.main_grad is None for call in calls):
        return list(ops.grouped_wgrad(left, right, offsets, out_dtype=dtype).unbind())
    shape = torch.Size((left.rows, right.rows))
    grads: list[Tensor | None] = []
    for expert, call in enumerate(calls):
        if call.main_grad is not None:
            buffers = [call.main_grad.buffer if other == expert else None for other in range(len(calls))]
            call.main_grad.product = partial(ops.grouped_wgrad_accumulate, buffers, left, right, offsets)
        grads.append(None if call.main_grad is None else no_gradient(shape, dtype, left.data.device))
    return grads


def _stack(operands: Sequence[Operand]) -> Operand:
    """The experts' operands stacked into one, with an amax for each expert."""
    first = operands[0]
    data, scale_inv, amax = zip(*(operand.tensors for operand in operands), strict=True)
    scales = None if first.scale_inv is None else torch.cat(scale_inv)
    return Operand(first.spec, first.rows * len(operands), first.cols, torch.cat(data), scales, torch.cat(amax))


def _record(name: GemmName, calls: Sequence[Call], products: int) -> None:
    """Count one product per expert, each with an equal share, since the host does not know the rows of an expert."""
    for call in calls:
        call.executed.record(call.plan.formats, 2 * products // len(calls), name)
