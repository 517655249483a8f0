"""Norms and activations inside the amax and quantize kernels: bytes of an eager oracle, errors beside PyTorch's own.

Runs on a GPU, and on small shapes on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/parity``.
"""

import pytest
import torch
import torch.nn.functional as F

from fp4engine import ops, reference
from fp4engine.formats import CastSpec, Outer, Rotation, RoundingMode
from fp4engine.functional.activation import Activation
from fp4engine.kernels.source import Source
from fp4engine.reference.norm import normalize, row_statistics

PLAIN, ROTATED = CastSpec(), CastSpec(rotation=Rotation())
SIDES = {
    "default forward": (PLAIN, ROTATED),
    "rowwise": (PLAIN, None),
    "16x16": (CastSpec(block=(16, 16)),) * 2,
    "stochastic, row-scaled": (
        CastSpec(rounding=RoundingMode.STOCHASTIC),
        CastSpec(outer=Outer.ROW, rotation=Rotation()),
    ),
}
SHAPES = [(1, 1), (35, 70), (128, 64), (19, 1100)]
KINDS = ["RMSNorm", "LayerNorm"]
STREAM = 0x22


def assert_same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.view(torch.uint8).cpu(), want.view(torch.uint8).cpu())


def assert_casts(source, y, sides, rng):
    """Kernels on ``source`` give the reference's amaxes, scales and codes of ``y``."""
    operands = ops.quantize(source, *sides, rng=rng.to(y.device), stream=STREAM, backend="triton")
    for side, (ours, spec, operand) in enumerate(zip(operands, sides, (y, y.T), strict=True)):
        if spec is not None:
            want = reference.quantize(operand.cpu(), spec, rng=rng, stream=STREAM | side)
            assert_same(ours.amax, want.amax)
            assert_same(ours.scale_inv, want.scale_inv)
            assert_same(ours.data, want.codes)


def norm_problem(kind, shape, dtype, device, out_dtype=None):
    from fp4engine.kernels.norm import row_statistics as kernel

    x = (torch.randn(shape) * 3 + 0.5).to(dtype)
    gamma, beta = 1 + torch.randn(shape[1]).to(dtype) / 4, None
    if kind == "LayerNorm":
        beta = torch.randn(shape[1]).to(dtype)
    centered = kind == "LayerNorm"
    want = row_statistics(x, 1e-5, centered)
    statistics = kernel(x.to(device), 1e-5, centered)
    rows = slice(None) if centered else slice(1)
    assert_same(statistics[rows], want[rows])
    out_dtype = out_dtype or dtype
    place = [None if t is None else t.to(device) for t in (x, statistics, gamma, beta)]
    source = Source(place[0], out_dtype, kind, False, *place[1:])
    return source, normalize(x, want, gamma, beta, out_dtype)


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_casts_as_the_oracle(kernel_device, kind, shape, name):
    source, y = norm_problem(kind, shape, torch.bfloat16, kernel_device)
    assert_casts(source, y.to(kernel_device), SIDES[name], torch.tensor([5, 7]))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float16, torch.float16), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_other_dtypes(kernel_device, kind, dtype, out_dtype):
    source, y = norm_problem(kind, (35, 70), dtype, kernel_device, out_dtype)
    assert_casts(source, y.to(kernel_device), (PLAIN, ROTATED), torch.tensor([5, 7]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 4096), (2048, 1024), (257, 4100)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_at_size(kind, shape):
    source, y = norm_problem(kind, shape, torch.bfloat16, "cuda")
    assert_casts(source, y.cuda(), (PLAIN, ROTATED), torch.tensor([5, 7]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_oracles_norm_is_as_exact_as_pytorchs(device, kind, dtype):
    x = (torch.randn(64, 1100, device=device) * 3 + 0.5).to(dtype)
    gamma, beta = torch.randn(1100, device=device).to(dtype), None
    exact = F.rms_norm(x.double(), (1100,), gamma.double(), 1e-5)
    theirs = F.rms_norm(x, (1100,), gamma, 1e-5)
    if kind == "LayerNorm":
        beta = torch.randn(1100, device=device).to(dtype)
        exact = F.layer_norm(x.double(), (1100,), gamma.double(), beta.double(), 1e-5)
        theirs = F.layer_norm(x, (1100,), gamma, beta, 1e-5)
    ours = normalize(x, row_statistics(x, 1e-5, kind == "LayerNorm"), gamma, beta, dtype)
    assert (ours.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


def test_what_fuses(kernel_device):
    x, gamma = torch.ones(4, 32, device=kernel_device), torch.ones(32, device=kernel_device)
    specs = (PLAIN, ROTATED)
    assert ops.fuses([x, gamma], specs, torch.float32, "auto")
    assert ops.fuses([x, gamma], specs, torch.bfloat16, "auto")
    assert not ops.fuses([x.bfloat16(), gamma], specs, torch.float16, "auto")
    assert not ops.fuses([x, gamma.double()], specs, torch.float32, "auto")
    assert not ops.fuses([x.T, gamma], specs, torch.float32, "auto")
    assert not ops.fuses([x, gamma.to("meta")], specs, torch.float32, "auto")
    assert not ops.fuses([x, gamma], specs, torch.float32, "reference")


ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu")


def activation_problem(name, rows, cols, dtype, device):
    activation = Activation(name)
    width = 2 * cols if activation.is_gated else cols
    return activation, (torch.randn(rows, width) * 3).to(dtype).to(device)


def error(got, exact):
    return (got.double() - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_and_its_gradient_are_as_exact_as_pytorchs(activated, kernel_device, name, dtype):
    activation, x = activation_problem(name, 19, 70, dtype, kernel_device)
    assert activation.is_fusable(dtype)
    y = activated(activation, x, dtype)
    theirs, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    composed, exact = activation(theirs), activation(wide)
    assert error(y, exact) <= 2 * error(composed, exact)
    grad = torch.randn(y.shape).to(dtype).to(kernel_device)
    composed.backward(grad)
    exact.backward(grad.double())
    (ours,) = activation.gradients(grad, x, (), None)
    assert ours.dtype == dtype and error(ours, wide.grad) <= 2 * error(theirs.grad, wide.grad)


def test_gradients_of_more_and_fewer_rows_of_one_width(kernel_device):
    function, x = activation_problem("swiglu", 40, 1100, torch.bfloat16, kernel_device)
    grad = torch.randn(40, 1100).to(kernel_device, torch.bfloat16)
    parts = [function.gradients(grad[:rows], x[:rows], (), None)[0] for rows in (0, 3, 40, 17)]
    for part in parts:
        assert part.isfinite().all() and torch.equal(part, parts[2][: len(part)])


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activation_takes_the_amaxes_of_what_it_writes(activated, kernel_device, shape, activation, name):
    function, x = activation_problem(activation, *shape, torch.bfloat16, kernel_device)
    y = activated(function, x, torch.bfloat16, SIDES[name])
    assert_casts(function.source(x, torch.bfloat16)[0], y, SIDES[name], torch.tensor([5, 7]))
    assert torch.equal(activated(function, x, torch.bfloat16, (PLAIN, None)), y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 4096), (2048, 1024), (257, 4100)], ids=str)
def test_activation_at_size(activated, shape):
    function, x = activation_problem("swiglu", *shape, torch.bfloat16, "cuda")
    y = activated(function, x, torch.bfloat16)
    torch.testing.assert_close(y, function(x), rtol=2**-6, atol=1e-6)
    assert_casts(function.source(x, torch.bfloat16)[0], y, (PLAIN, ROTATED), torch.tensor([5, 7]))


@pytest.mark.parametrize("name", ["swiglu", "gelu", "reglu", "srelu"])
def test_activations_keep_nan_and_infinity(activated, kernel_device, name):
    activation, x = activation_problem(name, 16, 32, torch.bfloat16, kernel_device)
    x[3, 5], x[4, 6], x[5, 7], x[6, 8] = float("nan"), float("inf"), -float("inf"), -0.0
    y = activated(activation, x, torch.bfloat16)
    want = activation(x)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.isinf(), want.isinf())
