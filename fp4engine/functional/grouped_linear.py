"""Many linear transformations of one size, each for its own rows, whose counts never leave the device.

    y_e = x_e W_e^T + b_e      x = [x_0; x_1; ...; rows of no expert]

The bytes of a loop of :func:`~fp4engine.functional.linear` over the slices x_e, in a number of kernels that grows with
the number of experts only where weights are quantized.

Legend: M rows in all, G experts, K in_features, N out_features.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4engine import ops
from fp4engine.formats import CastSpec
from fp4engine.functional.linear import require_features, weight_operands
from fp4engine.functional.plan import GemmName, LinearPlan
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops import Side
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix


class Expert(NamedTuple):
    """One of the transformations.

    Attributes:
        weight: [N, K].
        bias: [N] or None.
        plan: how to compute.
        weight_cache, main_grad: see :func:`fp4engine.functional.linear`.
    """

    weight: Tensor
    bias: Tensor | None
    plan: LinearPlan
    weight_cache: WeightCache | None
    main_grad: Tensor | None


def grouped_refusal(inp: Tensor, experts: Sequence[Expert]) -> str:
    """Why :func:`grouped_linear` cannot give the bytes of the loop; empty if it does."""
    weight, _, plan = experts[0][:3]
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
    return _plan_refusal(plan) or _kernel_refusal(plan, (inp.dtype, weight.dtype), inp.device)


def _plan_refusal(plan: LinearPlan) -> str:
    quantizers = (plan.input, plan.weight, plan.grad_output)
    if plan.backward_override is not None or plan.amax_reduction_group is not None:
        return "neither backward_override nor amax_reduction_group has grouped kernels"
    if any(q.columnwise_source != "original" or not q.only_casts for q in quantizers):
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
            past their sum are no expert's; if one is negative or the sum exceeds M, no row is an expert's.

    Returns:
        [..., N] in ``inp.dtype``; NaN in the rows that are no expert's, and so is the gradient of ``inp`` there.

    Raises:
        ValueError: the last dimension of ``inp`` is not K.
    """
    weights, biases, plans, caches, main_grads = zip(*experts, strict=True)
    require_features(inp, weights[0])
    needs = (False, False)
    if torch.is_grad_enabled():
        needs = (inp.requires_grad, any(weight.requires_grad for weight in weights))
    if biases[0] is None:
        biases = ()
    return GroupedLinearFunction.apply(inp, counts, plans, caches, main_grads, *needs, *weights, *biases)


class GroupedLinearFunction(torch.autograd.Function):
    """Autograd around the three products of every expert. Saves codes and scales only."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        counts: Tensor,
        plans: tuple[LinearPlan, ...],
        caches: tuple[WeightCache | None, ...],
        main_grads: tuple[Tensor | None, ...],
        needs_dgrad: bool,
        needs_wgrad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        plan, groups = plans[0], len(plans)
        weights, biases = parameters[:groups], parameters[groups:]
        matrix = as_matrix(inp)
        offsets = ops.expert_offsets(counts, matrix.shape[0])
        rowwise_spec, columnwise_spec = _specs(plan.input)
        rowwise, columnwise = ops.grouped_quantize(
            matrix, offsets, rowwise_spec, columnwise_spec if needs_wgrad else None, rowwise_form="values"
        )
        assert rowwise is not None
        operands = [
            weight_operands(weight, own, cache, needs_dgrad)
            for weight, own, cache in zip(weights, plans, caches, strict=True)
        ]
        stacked = _stack(row.tensors() for row, _ in operands)
        bias = torch.stack(biases) if biases else None
        specs = (rowwise_spec, _specs(plan.weight)[0])
        _record("fprop", plans, matrix.shape[0] * weights[0].numel())
        output = ops.grouped_gemm(rowwise, stacked, specs, offsets, out_dtype=inp.dtype, bias=bias)
        kept = [*(columnwise or (None,) * 3)]
        for _, columnwise_weight in operands:
            kept += (None,) * 3 if columnwise_weight is None else columnwise_weight.tensors()
        ctx.save_for_backward(offsets, *kept)
        ctx.plans, ctx.main_grads, ctx.inp_shape, ctx.inp_dtype = plans, main_grads, inp.shape, inp.dtype
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        if len(inp.shape) != 2:  # as in :func:`fp4engine.functional.linear`
            output = torch.ops.aten._unsafe_view(output, (*inp.shape[:-1], weights[0].shape[0]))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grad_output = grad_output.detach().requires_grad_()  # as in LinearFunction
        return _backward(ctx, grad_output)


@once_differentiable
def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    plans: tuple[LinearPlan, ...] = ctx.plans
    plan, groups = plans[0], len(plans)
    needs_dgrad, needs_parameters = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
    needs_wgrad = any(needs_parameters[:groups])
    offsets, *kept = ctx.saved_tensors
    grad_matrix = as_matrix(grad_output)
    grad_input = None
    grads: list[Tensor | None] = [None] * len(needs_parameters)
    if needs_dgrad or needs_wgrad:
        rowwise_spec, columnwise_spec = _specs(plan.grad_output)
        rowwise, columnwise = ops.grouped_quantize(
            grad_matrix,
            offsets,
            rowwise_spec if needs_dgrad else None,
            columnwise_spec if needs_wgrad else None,
            rowwise_form="values",
            columnwise_form="values",
            rng=ops.next_draw(grad_output.device, groups) if plan.draws_in_backward else None,
            stream=plan.grad_output.stream | ops.rank_bits(),
        )
        flops = grad_matrix.shape[0] * grad_matrix.shape[1] * ctx.inp_shape[-1]
        if rowwise is not None:
            weights = _stack(kept[first : first + 3] for first in range(3, len(kept), 3))
            specs = (rowwise_spec, _specs(plan.weight)[1])
            _record("dgrad", plans, flops)
            grad_input = ops.grouped_gemm(rowwise, weights, specs, offsets, out_dtype=ctx.inp_dtype)
            grad_input = grad_input.view(ctx.inp_shape)
        if columnwise is not None:
            specs = (columnwise_spec, _specs(plan.input)[1])
            operands = (columnwise, Side(*kept[:3]), specs, offsets)
            _record("wgrad", plans, flops)
            if any(main_grad is not None for main_grad in ctx.main_grads):
                needed = zip(ctx.main_grads, needs_parameters, strict=False)
                ops.grouped_wgrad_accumulate([grad if needs else None for grad, needs in needed], *operands)
            else:
                grads[:groups] = ops.grouped_wgrad(*operands, out_dtype=ctx.dtypes[0]).unbind()
    if any(needs_parameters[groups:]):
        sums = ops.column_sums(grad_matrix, offsets).unbind()
        grads[groups:] = [total.to(dtype) for total, dtype in zip(sums, ctx.dtypes[groups:], strict=True)]
    grads = [grad if needs else None for grad, needs in zip(grads, needs_parameters, strict=True)]
    return grad_input, *(None,) * 6, *grads


def _specs(quantizer: Quantizer) -> tuple[CastSpec, CastSpec]:
    """Both specs, which :func:`grouped_refusal` has found."""
    rowwise, columnwise = quantizer.rowwise_spec, quantizer.columnwise_spec
    assert rowwise is not None and columnwise is not None
    return rowwise, columnwise


def _stack(operands: Iterable[Sequence[Tensor | None]]) -> Side:
    """The experts' operands below each other."""
    data, scale_inv, amax = zip(*operands, strict=True)
    return Side(torch.cat(data), None if scale_inv[0] is None else torch.cat(scale_inv), torch.cat(amax))


def _record(name: GemmName, plans: Sequence[LinearPlan], products: int) -> None:
    """Count one product per expert. Their rows are not known here, so each is given its share of all."""
    for plan in plans:
        plan.executed.record(name, plan.formats[name], 2 * products // len(plans))
