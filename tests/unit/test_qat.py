"""Fake quantization: the forward is the cast, the gradient passes straight through."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import fp4engine
from fp4engine import NVFP4Quantizer, cast, fake_quantize, linear_ste, qat, ste_weight
from fp4engine.formats import E4M3, CastSpec, mx
from fp4engine.recipe import zoo


@pytest.mark.parametrize("spec", [CastSpec(), zoo.TILES, mx(E4M3)])
def test_forward_is_the_cast_and_backward_the_identity(spec: CastSpec) -> None:
    x = torch.randn(3, 40, requires_grad=True)
    grad = torch.randn(3, 40)
    y = fake_quantize(x, spec)
    assert torch.equal(y, cast(x.detach(), spec))
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_linear_ste_is_a_dense_product_of_the_quantized_values() -> None:
    x, w = torch.randn(5, 48, requires_grad=True), torch.randn(16, 48, requires_grad=True)
    bias, grad = torch.randn(16, requires_grad=True), torch.randn(5, 16)
    y = linear_ste(x, w, bias, input_spec=CastSpec())
    qx, qw = cast(x.detach(), CastSpec()), cast(w.detach(), CastSpec())
    assert torch.equal(y, torch.nn.functional.linear(qx, qw, bias))
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ qw)
    torch.testing.assert_close(w.grad, grad.T @ qx)
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_either_side_may_stay_in_high_precision() -> None:
    x, w = torch.randn(5, 48), torch.randn(16, 48)
    assert torch.equal(linear_ste(x, w), torch.nn.functional.linear(x, ste_weight(w)))
    assert torch.equal(linear_ste(x, w, weight_spec=None), torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_dtype_is_what_sums_are_rounded_to_once(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, w = (torch.randn(rows, 48, dtype=dtype, requires_grad=True) for rows in (5, 16))
    bias = torch.randn(16, dtype=dtype, requires_grad=True)
    y = linear_ste(x, w, bias, input_spec=CastSpec(), out_dtype=out_dtype)
    sums = torch.float64 if out_dtype == torch.float64 else torch.float32
    qx, qw = (cast(operand.detach(), CastSpec()).to(sums) for operand in (x, w))
    expected = torch.nn.functional.linear(qx, qw, bias.detach().to(sums)).to(out_dtype)
    if dtype == out_dtype and dtype != torch.float32:
        expected = linear_ste(x, w, bias, input_spec=CastSpec())
    assert y.dtype == out_dtype and torch.equal(y, expected)
    grad = torch.randn(5, 16).to(out_dtype)
    y.backward(grad)
    grad = grad.to(sums)
    for operand, exact in ((x, grad @ qw), (w, grad.T @ qx), (bias, grad.sum(0))):
        assert operand.grad is not None and operand.grad.dtype == dtype
        torch.testing.assert_close(operand.grad, exact.to(dtype))


def test_out_dtype_holds_under_torch_autocast() -> None:
    x, w = torch.randn(5, 48), torch.randn(16, 48)
    qx, qw = (operand.bfloat16().float() for operand in (x, cast(w, CastSpec())))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_ste(x, w, out_dtype=torch.float32)
    assert torch.equal(y, qx @ qw.T), "BF16 operands as autocast makes them, and no BF16 sum"


@pytest.mark.parametrize("wrong", ["float32", float, torch.int32, torch.float8_e4m3fn])
def test_out_dtype_is_one_of_four(wrong: Any) -> None:
    allowed = r"torch\.float16, torch\.bfloat16, torch\.float32, torch\.float64"
    with pytest.raises(ValueError, match=rf"out_dtype must be one of {allowed}, got {re.escape(repr(wrong))}"):
        linear_ste(torch.randn(5, 48), torch.randn(16, 48), out_dtype=wrong)


def test_out_dtype_needs_operands_of_one_dtype() -> None:
    with pytest.raises(
        ValueError, match=r"out_dtype needs .* one floating-point dtype, got torch\.float32, torch\.bfl"
    ):
        linear_ste(torch.randn(5, 48), torch.randn(16, 48).bfloat16(), out_dtype=torch.float32)


def test_the_weight_only_recipe_is_linear_ste_with_a_high_precision_input() -> None:
    layer = fp4engine.Linear(48, 16)
    x = torch.randn(5, 48, requires_grad=True)
    grad = torch.randn(5, 16)
    with fp4engine.autocast(recipe=zoo.make("nvfp4_weight_only")):
        y = layer(x)
    got = torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
    expected = linear_ste(x, layer.weight, layer.bias)
    want = torch.autograd.grad(expected, (x, layer.weight, layer.bias), grad)
    torch.testing.assert_close(y, expected)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_is_tuned_for_four_bit_inference() -> None:
    """After tuning, the quantized weights serve the task better than the quantized weights of the dense solution."""
    generator = torch.Generator().manual_seed(5)
    x, target = torch.randn(256, 32, generator=generator), torch.randn(256, 8, generator=generator)
    dense = torch.linalg.lstsq(x, target).solution.T.contiguous()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(linear_ste(x, weight), target)

    weight = dense.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.05)
    best = float("inf")
    for _ in range(60):
        optimizer.zero_grad()
        value = loss(weight)
        value.backward()
        optimizer.step()
        best = min(best, float(value.detach()))
    assert best < float(loss(dense))


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: fake_quantize(x, zoo.STOCHASTIC),
        lambda x: x * cast(x.detach(), zoo.STOCHASTIC),
        lambda x: x * NVFP4Quantizer(stochastic_rounding=True)(x.detach()).dequantize(),
    ],
)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_repeats_the_draw_of_a_cast_or_refuses_to(
    draws: Callable[[torch.Tensor], torch.Tensor], use_reentrant: bool, compiled: bool
) -> None:
    """Another draw in the recomputation would give the gradient of another product than the forward's."""
    weight = torch.randn(16, 48)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(draws(x).square(), weight)

    run = torch.compile(product, backend="aot_eager") if compiled else product
    gradients: list[torch.Tensor] = []
    for checkpoint in (None, fp4engine.checkpoint):
        fp4engine.manual_seed(7)
        x = torch.linspace(-3, 3, 240).view(5, 48).requires_grad_()
        y = run(x) if checkpoint is None else checkpoint(run, x, use_reentrant=use_reentrant)
        y.sum().backward()  # which alone reaches into a reentrant checkpoint
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    x = torch.randn(5, 48, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match=r"use fp4engine\.checkpoint"):
        y.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_may_be_cast_in_a_backward_pass_of_ones_own(compiled: bool) -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return fake_quantize(cast(grads[0], zoo.STOCHASTIC), zoo.STOCHASTIC)

    x = torch.randn(5, 48, requires_grad=True)
    (torch.compile(Noisy.apply, backend="aot_eager") if compiled else Noisy.apply)(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_weight_has_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[out_features, in_features\], got shape \(16,\)"):
        ste_weight(torch.randn(16))
    with pytest.raises(ValueError, match="weight must be a tensor, got list"):
        ste_weight([1.0])  # pyright: ignore[reportArgumentType]


def test_what_a_recipe_says_already_is_refused_by_name() -> None:
    for given, got in (({"clip": 0.5}, "0.5, True"), ({"inputs": False}, "1.0, False")):
        with pytest.raises(
            ValueError, match=rf"clip must be 1, inputs True and tiles False .* got {got}, False and NVFP4"
        ):
            qat.prepare(torch.nn.Sequential(torch.nn.Linear(16, 16)), zoo.make("nvfp4"), **given)


def test_distillation_over_many_positions_is_finite_in_fp16() -> None:
    student, teacher = (torch.tensor([row]).half().expand(10_000, 2) for row in ([0.0, 12.0], [12.0, 0.0]))
    loss = qat.distillation_loss(student, teacher, 1.5)
    assert torch.equal(loss, qat.distillation_loss(student.float(), teacher.float(), 1.5)) and loss.isfinite()
