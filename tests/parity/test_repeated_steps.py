"""Every step of a layer is the first step: the same inputs and weights give the same bytes, whichever backend runs.

The products of FP4 tensor cores run as a stand-in kernel, which computes in NumPy and which PyTorch's dispatcher, like
that of any kernel on a GPU, does not see. ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import ctypes
import math
from functools import partial

import numpy as np
import pytest
import torch

import fp4engine
from fp4engine import capability, ops
from fp4engine.formats import CastSpec, Outer
from fp4engine.kernels import gemm_native
from fp4engine.recipe import NVFP4BlockScaling, zoo

BF16 = torch.bfloat16
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def memory(tensor: torch.Tensor, *shape: int) -> np.ndarray:
    """The memory that begins where the tensor does, without an operator of PyTorch."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[tensor.element_size()]
    nbytes = math.prod(shape) * tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()), kind).reshape(shape)


def e4m3(bits: np.ndarray) -> np.ndarray:
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def floats(tensor: torch.Tensor, *shape: int) -> np.ndarray:
    bits = memory(tensor, *shape)
    return (bits.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == BF16 else bits


def values(codes: torch.Tensor, scales: torch.Tensor, rows: int, cols: int) -> np.ndarray:
    packed = memory(codes, rows, cols // 2)
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(rows, cols)
    return E2M1[nibbles] * np.repeat(e4m3(memory(scales, rows, cols // 16)), 16, axis=1)


class DotScaled:
    """``gemm_dot_scaled_kernel[grid](...)`` on the CPU, in NumPy."""

    def __getitem__(self, grid):
        return self.run

    def run(
        self, left, left_scale, right, right_scale, out, left_amax, right_amax, bias, numerator, M, N, K, stride_out,
        LEFT_ROWS, RIGHT_ROWS, HAS_BIAS, ACCUMULATE, *_, **__,
    ):  # fmt: skip
        product = values(left, left_scale, M, K) @ values(right, right_scale, N, K).T
        outer = memory(left_amax, M if LEFT_ROWS else 1, 1) * memory(right_amax, 1, N if RIGHT_ROWS else 1)
        result = product.astype(np.float32) * (outer / np.float32(numerator))
        result = result + floats(bias, N) if HAS_BIAS else result
        result = result + floats(out, M, N) if ACCUMULATE else result
        if out.dtype == BF16:
            bits = np.ascontiguousarray(result, np.float32).view(np.uint32)
            memory(out, M, N)[...] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        else:
            memory(out, M, N)[...] = result


@pytest.fixture
def fp4_units(monkeypatch, forget_answers):
    """FP4 tensor cores, as far as this package can tell."""
    monkeypatch.setattr(capability, "fp4_units", lambda device: (True, "mocked"))
    monkeypatch.setattr(gemm_native, "supports", lambda path, *_, **__: (path == "dot_scaled", "mocked"))
    monkeypatch.setattr(gemm_native, "check_first_use", lambda path, device: None)
    monkeypatch.setattr(gemm_native, "gemm_dot_scaled_kernel", DotScaled())
    forget_answers()


def steps(layer, x, recipe, count):
    """Output and gradients of ``count`` equal steps."""
    results = []
    for _ in range(count):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        if hasattr(layer.weight, "main_grad"):
            layer.weight.main_grad.zero_()
        with fp4engine.autocast(recipe=recipe):
            y = layer(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        grad = layer.weight.grad if layer.weight.grad is not None else layer.weight.main_grad.clone()
        results.append((y.detach(), leaf.grad, grad))
    return results


QUIET = partial(NVFP4BlockScaling, disable_stochastic_rounding=True)
LAYERS = {
    "bias": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "main_grad": ({"bias": False, "fuse_wgrad_accumulation": True}, {}),
    "row scaling": ({}, {"row_scaled_activation": True, "disable_rht": True}),
    "N % 16": ({"out_features": 24}, {}),
    "K % 32": ({"in_features": 48}, {}),
}


def layer_and_input(arguments, device="cpu"):
    torch.manual_seed(5)
    layer = fp4engine.Linear(**{"in_features": 64, "out_features": 32, "dtype": BF16, "device": device, **arguments})
    if layer.fuse_wgrad_accumulation:
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device=device)
    return layer, torch.randn(16, layer.in_features).to(device, BF16)


@pytest.mark.parametrize("kind", LAYERS)
def test_products_of_fp4_tensor_cores(kernel_device, fp4_units, kind):
    if kernel_device != "cpu":
        pytest.skip("a GPU's own units, or their absence, are not to be mocked")
    arguments, options = LAYERS[kind]
    layer, x = layer_and_input(arguments)
    (expected,) = steps(layer, x, QUIET(backend="reference", **options), 1)
    ops.reset_executed_paths()
    results = steps(layer, x, QUIET(**options), 4)
    assert ops.executed_paths()["gemm/native"] == 4 * 3
    for result in results:
        for actual, first, wanted in zip(result, results[0], expected, strict=True):
            assert torch.equal(actual, first)
            torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("kind", ["main_grad", "row scaling"])
def test_steps_of_every_backend(kernel_device, backend, kind):
    arguments, options = LAYERS[kind]
    layer, x = layer_and_input(arguments, kernel_device)
    results = steps(layer, x, QUIET(backend=backend, **options), 4)
    for result in results[1:]:
        assert all(torch.equal(actual, first) for actual, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("outer_amax", [None, 3.0])
def test_fp4_tensor_cores_take_operands_whose_outer_scale_is_a_constant(kernel_device, fp4_units, outer_amax):
    if kernel_device != "cpu":
        pytest.skip("a GPU's own units, or their absence, are not to be mocked")
    spec = CastSpec(outer=Outer.NONE, outer_amax=outer_amax)
    left, right = (ops.quantize(torch.randn(rows, 96), spec, None)[0] for rows in (40, 24))
    ops.reset_executed_paths()
    got = ops.gemm(left, right, out_dtype=torch.float32)
    assert ops.executed_paths() == {"gemm/native": 1}
    want = left.dequantize().double() @ right.dequantize().double().T
    torch.testing.assert_close(got.double(), want, rtol=2**-18, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=str)
def test_two_terms_are_two_products_of_fp4_tensor_cores(kernel_device, fp4_units, out_dtype):
    if kernel_device != "cpu":
        pytest.skip("a GPU's own units, or their absence, are not to be mocked")
    recipe = zoo.make("nvfp4_two_term_input")
    specs = [recipe.casts(role).rowwise for role in ("input", "weight")]
    left, right = (
        ops.quantize(torch.randn(rows, 96), spec, None)[0] for rows, spec in zip((40, 24), specs, strict=True)
    )
    bias, buffer = torch.randn(24), torch.randn(40, 24).to(out_dtype)
    exact = left.dequantize().double() @ right.dequantize().double().T
    ops.reset_executed_paths()
    for operands, want in (((left, right), exact), ((right, left), exact.T)):
        got = ops.gemm(*operands, out_dtype=out_dtype)
        torch.testing.assert_close(got, want.to(out_dtype), rtol=2**-7, atol=1e-4)
    got = ops.gemm(left, right, out_dtype=out_dtype, bias=bias)
    torch.testing.assert_close(got, (exact + bias).to(out_dtype), rtol=2**-7, atol=1e-4)
    want = (exact + buffer).to(out_dtype)
    ops.gemm(left, right, out_dtype=out_dtype, out=buffer)
    torch.testing.assert_close(buffer, want, rtol=2**-7, atol=1e-4)
    assert ops.executed_paths() == {"gemm/native": 4}
