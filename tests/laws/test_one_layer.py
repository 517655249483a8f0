"""What a linear layer means, on one page: six casts and three products. ``fp4engine.Linear`` has its bytes."""

import pytest
import torch
from torch import Tensor

import fp4engine
from fp4engine import ops
from fp4engine.functional import make_linear_plan
from fp4engine.ops import Operand
from fp4engine.recipe import zoo

ROWS = [name for name in zoo.ZOO if not zoo.make(name).is_delayed]
SETTINGS = {
    "bfloat16": (torch.bfloat16, True, True),
    "float32": (torch.float32, True, True),
    "frozen input": (torch.bfloat16, False, True),
    "frozen weight": (torch.bfloat16, True, False),
}


class OneLayer(torch.autograd.Function):
    """``y = x W^T + b`` for one recipe. x: [M, K], weight: [N, K], bias: [N]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, plan) -> Tensor:
        ctx.plan, ctx.cols, ctx.dtypes = plan, x.shape[1], (x.dtype, weight.dtype, bias.dtype)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        ctx.kept, ctx.within, rowwise = [], [], []
        for quantizer, tensor, is_read_later, has_gradient in (
            (plan.input, x, needs_wgrad, needs_dgrad),
            (plan.weight, weight, needs_dgrad, needs_wgrad),
        ):
            is_plain = plan.backward_override is None
            columnwise = is_read_later and is_plain and quantizer.columnwise_source == "original"
            draws = plan.draws_in_forward and quantizer.takes_draw(columnwise=columnwise)
            rng = ops.next_draw(tensor.device, direction="forward") if draws else None
            made = quantizer.quantize(tensor, columnwise=columnwise, rng=rng)
            rowwise.append(made.rowwise)
            clips = quantizer.clipped_gradient and is_plain and has_gradient
            ctx.within.append(ops.within_range(tensor, made.rowwise, plan.backend) if clips else None)
            if plan.keeps_original(quantizer):
                ctx.kept.append(Operand.dense(tensor))
            else:
                ctx.kept.append(made.rowwise if plan.keeps_rowwise(quantizer) else made.columnwise)
        return product(plan, "fprop", *rowwise, x.dtype, bias)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        plan, dx, dw = ctx.plan, None, None
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        rng = None
        if plan.draws_in_backward:
            rng = ops.next_draw(grad_output.device, direction="backward", after=grad_output)
        if plan.backward_override is None:
            made = plan.grad_output.quantize(grad_output, rowwise=needs_dgrad, columnwise=needs_wgrad, rng=rng)
            rowwise, columnwise = made.rowwise, made.columnwise
        else:
            rowwise, columnwise = Operand.dense(grad_output), Operand.dense(grad_output.T)
        if needs_dgrad:
            other = recalled(plan, plan.weight, ctx.kept[1], ctx.dtypes[0], rng)
            dx = gradient(ctx, "dgrad", rowwise, other, plan.weight, ctx.within[0], ctx.dtypes[0])
        if needs_wgrad:
            other = recalled(plan, plan.input, ctx.kept[0], ctx.dtypes[0], rng)
            dw = gradient(ctx, "wgrad", columnwise, other, plan.input, ctx.within[1], ctx.dtypes[1])
        is_quantized = not plan.grad_output.is_identity and plan.backward_override is None
        sums = ops.column_sums(grad_output)[0] if is_quantized else grad_output.sum(0, dtype=torch.float32)
        return dx, dw, sums.to(ctx.dtypes[2]), None


def recalled(plan, quantizer, kept: Operand, dtype: torch.dtype, rng: Tensor | None) -> Operand:
    """The operand of a backward product, from what forward kept of a tensor."""
    if plan.backward_override is not None:
        return Operand.dense(kept.dequantize(dtype, plan.backend).T)
    if quantizer.columnwise_source == "original":
        return kept
    values = kept.data if quantizer.columnwise_source == "saved_original" else quantizer.decoded(kept)
    return quantizer.quantize(values, rowwise=False, rng=rng).columnwise


def product(plan, name: str, left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    if right.spec is None and name != "wgrad":  # a weight in high precision is one in the layer's dtype
        right = Operand.dense(right.data.to(left.data.dtype if left.spec is None else dtype))
    fast = name in plan.fast_accumulation
    return ops.gemm(left, right, out_dtype=dtype, bias=bias, backend=plan.backend, fast_accumulation=fast)


def gradient(ctx, name: str, left: Operand, right: Operand, other, within: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A product; clipped where the forward cast saturated, and rotated back if forward had rotated ``other``."""
    plan, spec = ctx.plan, other.rowwise_spec
    rotated = spec.key if plan.keeps_rowwise(other) and spec is not None and spec.rotation is not None else ""
    if not rotated and within is None:
        return product(plan, name, left, right, dtype)
    values = product(plan, name, left, right, torch.float32)
    return ops.clip_and_rotate_back(values, within, rotated, ctx.cols, dtype, plan.backend)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ROWS)
def test_a_layer_is_six_casts_and_three_products(name: str, setting: str) -> None:
    dtype, x_trains, weight_trains = SETTINGS[setting]
    torch.manual_seed(1)
    layer = fp4engine.Linear(48, 32, dtype=dtype)
    layer.weight.requires_grad_(weight_trains)
    x = torch.randn(33, 48).to(dtype).requires_grad_(x_trains)
    grad_output = torch.randn(33, 32).to(dtype)
    recipe, steps = zoo.make(name), []
    plan = make_linear_plan(recipe, "linear", "", tuple(layer.weight.shape))
    for one in (layer, lambda x: OneLayer.apply(x, layer.weight, layer.bias, plan)):
        fp4engine.manual_seed(7)
        layer.zero_grad()
        x.grad = None
        with fp4engine.autocast(recipe=recipe):
            y = one(x)
        y.backward(grad_output)
        steps.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for ours, law in zip(*steps, strict=True):
        assert (ours is None) == (law is None) and (law is None or torch.equal(ours, law))
