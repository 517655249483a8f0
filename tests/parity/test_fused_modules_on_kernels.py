"""LayerNormLinear and LayerNormMLP whose casts compute the norm and the activation, against their plain parts.

Runs on a GPU, and on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4engine
from fp4engine.functional.activation import Activation
from fp4engine.functional.norm import Norm
from fp4engine.recipe import NVFP4BlockScaling
from fp4engine.reference.norm import normalize, row_statistics
from tests.modules.test_fused_modules import perturbed

RECIPE = NVFP4BlockScaling()
BF16 = torch.bfloat16


class OracleNorm(torch.autograd.Function):
    """The norm as the kernels compute it; its gradient is PyTorch's."""

    @staticmethod
    def forward(ctx, x, gamma, beta, norm):
        ctx.save_for_backward(*(t for t in (x, gamma, beta) if t is not None))
        ctx.norm = norm
        factor = gamma.float() + 1 if norm.zero_centered_gamma else gamma
        statistics = row_statistics(x.flatten(0, -2), norm.eps, norm.has_bias)
        return normalize(x.flatten(0, -2), statistics, factor, beta, x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.norm(*given, *([] if ctx.norm.has_bias else [None]))
        grads = torch.autograd.grad(output, given, grad)
        return *grads, *([] if ctx.norm.has_bias else [None]), None


def run(function, inp, parameters, recipe=RECIPE):
    """Output, input gradient and the parameters' gradients of one pass, with the draws of a fresh stream."""
    fp4engine.manual_seed(7)
    inp = inp.clone().requires_grad_()
    with fp4engine.autocast(recipe=recipe):
        output = function(inp)
    weights = torch.arange(output.numel(), dtype=torch.float32, device=inp.device).view_as(output).sin()
    wanted = [inp, *parameters]
    return [output.detach(), *torch.autograd.grad(output, wanted, weights.to(output.dtype))]


@pytest.fixture
def nothing_written(monkeypatch):
    """Neither the norm's value nor the activation's is computed by PyTorch while the context returned is open."""

    def refuse(*_):
        raise AssertionError("the value was written")

    @contextmanager
    def refusing():
        with monkeypatch.context() as patch:
            for function in (Norm, Activation):
                patch.setattr(function, "__call__", refuse)
            yield

    return refusing


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layernorm_linear_is_the_oracles_norm_then_linear(kernel_device, normalization, zero_centered, dtype):
    layer = perturbed(
        fp4engine.LayerNormLinear(
            40, 33, normalization=normalization, zero_centered_gamma=zero_centered, device=kernel_device,
            params_dtype=dtype,
        )
    )  # fmt: skip
    linear = fp4engine.Linear(40, 33, device=kernel_device, dtype=dtype)
    linear.weight, linear.bias = layer.weight, layer.bias

    def parts(x):
        return linear(OracleNorm.apply(x, layer.layer_norm_weight, layer.layer_norm_bias, layer.norm))

    inp, parameters = torch.randn(2, 9, 40).to(kernel_device, dtype), list(layer.parameters())
    ours, theirs = run(layer, inp, parameters), run(parts, inp, parameters)
    names = ["output", "inp", *(name for name, _ in layer.named_parameters())]
    for name, left, right in zip(names, ours, theirs, strict=True):
        assert left.dtype == right.dtype
        if name == "inp" or name.startswith("layer_norm"):  # PyTorch's own statistics differ in the last places
            torch.testing.assert_close(left, right, rtol=2**-7, atol=2**-7 * right.abs().max().item(), msg=name)
        else:
            assert torch.equal(left, right), name


def test_the_values_of_norm_and_activation_are_not_written(kernel_device, nothing_written):
    layer = fp4engine.LayerNormLinear(32, 32, device=kernel_device, params_dtype=BF16)
    mlp = fp4engine.LayerNormMLP(32, 48, activation="swiglu", device=kernel_device, params_dtype=BF16)
    inp = torch.randn(32, 32).to(kernel_device, BF16)
    with fp4engine.autocast(recipe=RECIPE), nothing_written():
        for module in (layer, mlp):
            trained = module(inp)
            with torch.no_grad():
                assert torch.equal(module(inp), trained)
            module.return_layernorm_output = True
            with pytest.raises(AssertionError, match="was written"):
                module(inp)


def test_what_is_fused_is_counted(kernel_device):
    mlp = fp4engine.LayerNormMLP(32, 48, activation="swiglu", device=kernel_device, params_dtype=BF16)
    fp4engine.ops.reset_executed_paths()
    with fp4engine.autocast(recipe=RECIPE):
        mlp(torch.randn(32, 32).to(kernel_device, BF16)).sum().backward()
    paths = fp4engine.ops.executed_paths()
    assert [paths[f"{name}/triton"] for name in ("row_statistics", "quantize", "activation_backward")] == [1, 6, 1]


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "reglu"])
def test_layernorm_mlp_is_its_parts(activated, kernel_device, activation):
    mlp = perturbed(
        fp4engine.LayerNormMLP(
            32, 48, normalization="RMSNorm", activation=activation, device=kernel_device, params_dtype=BF16
        )
    )
    fc1 = fp4engine.Linear(32, len(mlp.fc1_weight), device=kernel_device, dtype=BF16)
    fc2 = fp4engine.Linear(48, 32, device=kernel_device, dtype=BF16)
    fc1.weight, fc1.bias, fc2.weight, fc2.bias = mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias

    class Act(torch.autograd.Function):
        """The kernels' value and gradient, as a function of its own."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return activated(mlp.activation, x.flatten(0, -2), BF16).view(*x.shape[:-1], 48)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return mlp.activation.gradients(grad.flatten(0, -2), x.flatten(0, -2), (), None)[0].view(x.shape)

    def parts(x):
        return fc2(Act.apply(fc1(OracleNorm.apply(x, mlp.layer_norm_weight, None, mlp.norm))))

    inp, parameters = torch.randn(3, 7, 32).to(kernel_device, BF16), list(mlp.parameters())
    ours, theirs = run(mlp, inp, parameters), run(parts, inp, parameters)
    names = ["output", "inp", *(name for name, _ in mlp.named_parameters())]
    for name, left, right in zip(names, ours, theirs, strict=True):
        if name in ("inp", "layer_norm_weight"):
            torch.testing.assert_close(left, right, rtol=2**-7, atol=2**-7 * right.abs().max().item(), msg=name)
        else:
            assert torch.equal(left, right), name


@pytest.mark.parametrize(
    "checkpoint",
    [
        partial(torch_checkpoint, use_reentrant=False),
        partial(fp4engine.checkpoint, use_reentrant=False),
        partial(fp4engine.checkpoint, use_reentrant=True),
    ],
    ids=["torch", "fp4engine", "fp4engine, reentrant"],
)
def test_checkpointed_gradients_are_the_same(kernel_device, checkpoint):
    mlp = perturbed(fp4engine.LayerNormMLP(32, 48, activation="swiglu", device=kernel_device, params_dtype=BF16))
    inp, parameters = torch.randn(7, 32).to(kernel_device, BF16), list(mlp.parameters())

    def run_backward(function):
        fp4engine.manual_seed(7)
        x = inp.clone().requires_grad_()
        with fp4engine.autocast(recipe=RECIPE):
            output = function(x)
        output.float().square().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in parameters)]
        mlp.zero_grad()
        return [output.detach(), *grads]

    plain = run_backward(mlp)
    for left, right in zip(plain, run_backward(partial(checkpoint, mlp)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_under_torch_autocast_the_norm_rounds_once(kernel_device, normalization):
    layer = perturbed(fp4engine.LayerNormLinear(32, 16, normalization=normalization, device=kernel_device))
    inp = torch.randn(20, 32, device=kernel_device)
    statistics = row_statistics(inp, layer.norm.eps, layer.norm.has_bias)
    y = normalize(inp, statistics, layer.layer_norm_weight, layer.layer_norm_bias, BF16)
    with torch.autocast(kernel_device, BF16), fp4engine.autocast(recipe=RECIPE), torch.no_grad():
        output = layer(inp)
        linear = fp4engine.Linear(32, 16, device=kernel_device)
        linear.weight, linear.bias = layer.weight, layer.bias
        assert output.dtype == BF16 and torch.equal(output, linear(y))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_does_not_fuse_is_the_composition(kernel_device, dtype):
    """An input whose rows have no unit stride, and a recipe that keeps the input for backward."""
    layer = fp4engine.LayerNormLinear(32, 16, normalization="RMSNorm", device=kernel_device, params_dtype=dtype)
    linear = fp4engine.Linear(32, 16, device=kernel_device, dtype=dtype)
    linear.weight, linear.bias = layer.weight, layer.bias
    inp = torch.randn(32, 20).to(kernel_device, dtype).T

    def parts(x):
        return linear(F.rms_norm(x, (32,), layer.layer_norm_weight, 1e-5))

    kept = NVFP4BlockScaling(backward_override="high_precision")
    for x, recipe in ((inp, RECIPE), (inp.contiguous(), kept)):
        parameters = list(layer.parameters())
        ours, theirs = run(layer, x, parameters, recipe), run(parts, x, parameters, recipe)
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
