"""Many linear transformations of one size, each for its own rows, whose counts need not leave the device.

    y_e = x_e W_e^T + b_e      x = [x_0; x_1; ...; rows of no expert]

A loop of :func:`~fp4engine.functional.linear` over the slices x_e (:func:`grouped`) gives the same bytes, but its
counts (``m_splits``) are known to the host. The number of kernels grows with the number of experts only where weights
are quantized.

Legend: M rows in all, G experts, K in_features, N out_features.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import require_dense
from fp4engine.functional import program
from fp4engine.functional.call import Call
from fp4engine.functional.eager import Eager, Operands
from fp4engine.functional.linear import refuse_second_derivative, require_bias, require_features
from fp4engine.functional.main_grad import MainGrad
from fp4engine.functional.plan import ExecutedGemms, LinearPlan
from fp4engine.functional.program import CastWeight, LaterProduct, Needs, Request, cast_weight
from fp4engine.functional.record import restored, saved
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import WeightCache
from fp4engine.ops import Operand
from fp4engine.ops.grouped import (
    expert_offsets,
    grouped_gemm,
    grouped_quantize,
    grouped_supports,
    grouped_wgrad,
    grouped_wgrad_accumulate,
)
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
    quantizers = (plan.input, plan.weight, plan.grad_output)
    if plan.backward_override is not None:
        return "backward_override has no grouped kernels"
    if plan.accumulation != "fp32":
        return f"accumulation={plan.accumulation!r} has no grouped kernels"
    if any(q.columnwise_source != "original" or q.clipped_gradient or not q.only_casts for q in quantizers):
        return "a quantizer does more than cast"
    if plan.input.draws_in_forward or plan.weight.draws_in_forward:
        return "the forward draws random bits"
    rowwise = [spec and spec.rotation for spec in (q.rowwise_spec for q in quantizers)]
    columnwise = [spec and spec.rotation for spec in (q.columnwise_spec for q in quantizers)]
    if any(rowwise) or columnwise[1] is not None or columnwise[0] != columnwise[2]:
        return "only both operands of wgrad may be rotated"
    for quantizer in quantizers:
        for backend in (plan.backend, quantizer.backend):
            specs, dtypes = (quantizer.rowwise_spec, quantizer.columnwise_spec), (inp.dtype, weight.dtype)
            supported, reason = grouped_supports(specs, dtypes, inp.device, backend)
            if not supported:
                return reason
    return ""


class GroupedEager(Eager):
    """Verbs on the rows of all experts at once.

    Args:
        offsets: int64 [G + 2], of :func:`fp4engine.ops.grouped.expert_offsets`.
    """

    def __init__(self, plan: LinearPlan, offsets: Tensor) -> None:
        super().__init__(plan, offsets.device)
        self.offsets = offsets

    def draw(self, direction: ops.Direction, after: Tensor | None = None) -> Tensor:
        return ops.next_draw(self.device, self.offsets.shape[0] - 2, direction=direction, after=after)

    def cast(self, requests: Sequence[Request]) -> list[Operands]:
        return [
            grouped_quantize(
                tensor,
                self.offsets,
                quantizer.rowwise_spec if rowwise else None,
                quantizer.columnwise_spec if columnwise else None,
                rowwise_form="codes" if row_codes else "values",
                columnwise_form="codes" if col_codes else "values",
                rng=rng,
                stream=quantizer.stream if rng is None else quantizer.stream | ops.rank_bits(),
            )
            for _, quantizer, tensor, rowwise, columnwise, rng, (row_codes, col_codes) in requests
        ]

    def product(
        self,
        name: GemmName,
        left: Operand,
        right: Operand,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if name == "wgrad":
            return grouped_wgrad(left, right, self.offsets, out_dtype=dtype)
        return grouped_gemm(left, right, self.offsets, out_dtype=dtype, bias=bias)

    def column_sum(self, grad_output: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.column_sums(grad_output, self.offsets).to(dtype)


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
    require_features(inp, experts[0].weight)
    needs = Needs(False, False)
    if torch.is_grad_enabled():
        needs = Needs(inp.requires_grad, any(expert.weight.requires_grad for expert in experts))
    calls: list[Call] = []
    weights: list[Tensor] = []
    for index, (weight, bias, plan, executed, _, cache, main_grad) in enumerate(experts):
        if bias is not None:
            require_bias(bias, weight, f"bias{index}")
        dtypes = inp.dtype, weight.dtype, None if bias is None else bias.dtype
        calls.append(Call(plan, executed, None, cache, main_grad, needs, None, weight.shape[1], dtypes))
        weights.append(weight)
    biases = [expert.bias for expert in experts if expert.bias is not None]
    return GroupedLinearFunction.apply(inp, counts, calls, *weights, *biases)


class GroupedLinearFunction(torch.autograd.Function):
    """Autograd around the program of :mod:`fp4engine.functional.program`, with grouped products."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, counts: Tensor, calls: list[Call], *parameters: Tensor) -> Tensor:
        call, weights, biases = calls[0], parameters[: len(calls)], parameters[len(calls) :]
        matrix, outs = as_matrix(inp, "the input"), weights[0].shape[0]
        offsets = expert_offsets(counts, matrix.shape[0])
        b, bias = GroupedEager(call.plan, offsets), torch.stack(biases) if biases else None
        output, kept = program.forward(b, matrix, _stacked(weights, calls), bias, call.needs, inp.dtype)
        tensors, ctx.slots = saved((offsets, kept))
        ctx.save_for_backward(*tensors)
        ctx.calls, ctx.inp_shape = calls, inp.shape
        _record(calls, matrix.shape[0] * outs * call.cols, "fprop")
        if len(inp.shape) != 2:  # as in :func:`fp4engine.functional.linear`
            output = torch.ops.aten._unsafe_view(output, (*inp.shape[:-1], outs))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        calls: list[Call] = ctx.calls
        call, groups, is_needed = calls[0], len(calls), ctx.needs_input_grad[3:]
        offsets, kept = restored(ctx.slots, ctx.saved_tensors)
        matrix = as_matrix(grad_outputs[0])
        needs = Needs(call.needs.dgrad, call.needs.wgrad, any(is_needed[groups:]))
        later = needs.wgrad and any(own.main_grad is not None for own in calls)
        made = program.backward(GroupedEager(call.plan, offsets), matrix, kept, needs, call.cols, call.dtypes, later)
        grad_input, grad_weight, grad_bias = made
        names: tuple[GemmName, ...] = ("dgrad", "wgrad")
        _record(calls, matrix.shape[0] * matrix.shape[1] * call.cols, *names[not needs.dgrad : 1 + needs.wgrad])
        grads: list[Tensor | None] = [None] * len(is_needed)
        if isinstance(grad_weight, LaterProduct):
            for expert, own in enumerate(call.main_grad for call in calls):
                if own is not None and own.is_asked_for(ctx, 2 + expert):  # behind inp and counts
                    buffers = [own.buffer if other == expert else None for other in range(groups)]
                    own.add(partial(grouped_wgrad_accumulate, buffers, *grad_weight, offsets))
        elif grad_weight is not None:
            grads[:groups] = grad_weight.unbind()
        if grad_bias is not None:
            grads[groups:] = grad_bias.unbind()
        if grad_input is not None:
            grad_input = grad_input.view(ctx.inp_shape)
        return (
            grad_input,
            None,
            None,
            *(grad if needed else None for grad, needed in zip(grads, is_needed, strict=True)),
        )


def _stacked(weights: Sequence[Tensor], calls: Sequence[Call]) -> CastWeight:
    """The experts' weights, cast and stacked."""
    plan, needs = calls[0].plan, calls[0].needs
    rowwise: list[Operand] = []
    kept: list[Operand] = []
    for weight, call in zip(weights, calls, strict=True):
        b, cast = Eager(plan, weight.device), call.cast_weight(weight)
        row, col = cast_weight(b, as_matrix(weight, "the weight"), needs) if cast is None else cast[:2]
        if cast is not None and cast.seal is not None:
            b.compare(weight, cast.seal)
        rowwise.append(b.recall(plan.weight, row, False))
        if col is not None:
            kept.append(b.recall(plan.weight, col, True))
    return CastWeight(_stack(rowwise), _stack(kept) if kept else None, None)


def _stack(operands: Sequence[Operand]) -> Operand:
    """The experts' operands stacked into one, with an amax for each expert."""
    first = operands[0]
    data, scale_inv, amax = zip(*(operand.tensors for operand in operands), strict=True)
    scales = None if first.scale_inv is None else torch.cat(scale_inv)
    return Operand(first.spec, first.rows * len(operands), first.cols, torch.cat(data), scales, torch.cat(amax))


def _record(calls: Sequence[Call], products: int, *names: GemmName) -> None:
    """Count one product per expert, each with an equal share, since the host does not know the rows of an expert."""
    for call in calls:
        call.record(2 * products // len(calls), *names)


def require_counts(m_splits: Tensor, groups: int) -> None:
    """Raise a ValueError unless ``m_splits`` is a vector of ``groups`` integers, whose values are not read."""
    is_integral = not (m_splits.is_floating_point() or m_splits.is_complex() or m_splits.dtype == torch.bool)
    if m_splits.ndim != 1 or len(m_splits) != groups or not is_integral:
        raise ValueError(
            f"m_splits must be a vector of {groups} integers, got {m_splits.dtype} of shape {tuple(m_splits.shape)}"
        )


def split_sizes(m_splits: Sequence[int] | Tensor, groups: int, rows: int) -> list[int]:
    """``m_splits`` as a list of ints; a tensor is copied to the host, which waits for a device once.

    Raises:
        ValueError: not ``groups`` non-negative integers that add up to ``rows``.
    """
    if isinstance(m_splits, Tensor):
        require_counts(m_splits, groups)
        if m_splits.is_meta:
            raise ValueError("m_splits must have values, got a tensor on 'meta'")
        sizes: list[int] = m_splits.tolist()
    else:
        are_counts = isinstance(m_splits, Sequence) and not any(isinstance(size, bool) for size in m_splits)
        if not are_counts or not all(hasattr(size, "__index__") for size in m_splits):
            raise ValueError(f"m_splits must be a sequence of {groups} integers, or a tensor of them, got {m_splits!r}")
        sizes = [operator.index(size) for size in m_splits]
    if len(sizes) != groups or min(sizes, default=0) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"m_splits must be {groups} non-negative counts that add up to the {rows} rows of the input, got {sizes}"
        )
    return sizes


def grouped(inp: Tensor, m_splits: Sequence[int] | Tensor, transforms: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """``cat(transforms[i](inp_i))`` over the consecutive slices ``inp_i`` of ``m_splits[i]`` rows.

    Args:
        inp: [..., K], seen as [M, K].
        m_splits: rows of each slice; zeros anywhere. Every transform runs, so that a slice without rows still
            gives its weight a gradient, of zeros.

    Returns:
        [..., N].

    Raises:
        ValueError: ``inp`` is no dense tensor of at least one dimension, or ``m_splits`` are not its rows.
    """
    if not isinstance(inp, Tensor) or inp.ndim == 0:
        got = "a scalar tensor" if isinstance(inp, Tensor) else type(inp).__name__
        raise ValueError(f"the input must be a tensor of at least one dimension, got {got}")
    require_dense("the input", inp)
    matrix = inp.reshape(prod(inp.shape[:-1]), inp.shape[-1])
    slices = matrix.split(split_sizes(m_splits, len(transforms), matrix.shape[0]))
    outputs = [transform(rows) for transform, rows in zip(transforms, slices, strict=True)]
    output = torch.cat(outputs)
    return output.view(*inp.shape[:-1], output.shape[-1])
