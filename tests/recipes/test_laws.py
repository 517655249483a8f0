"""The law that defines each published recipe, on the CPU: errors, and what the mean of many draws converges to."""

import pytest
import torch
from torch import Tensor

import fp4engine
from fp4engine import reference
from fp4engine.constants import HADAMARD_SIGNS
from fp4engine.formats import Correction, Outer, Rotation
from fp4engine.recipe import zoo
from fp4engine.reference import hadamard, philox
from tests.laws.test_yardsticks import EDEN128, FRESH, decoded, gaussian, relative_mse


def rng(draw: int) -> Tensor:
    return torch.tensor([2024, draw])


def test_corrections_stay_within_the_room_that_the_bound_leaves() -> None:
    x = gaussian(256, 1024)
    plain = reference.quantize(x, EDEN128.replace(correction=Correction.NONE), rng=rng(1))
    corrected = reference.quantize(x, EDEN128, rng=rng(1))
    assert torch.equal(plain.codes, corrected.codes), "only block scales change"
    y = hadamard.rotate(x, philox.rotation_signs(FRESH, rng(1), 0, x.device), torch.float32).view(256, 64, 16)
    block_scale = plain.scale_inv.float()[..., None] * (plain.amax / EDEN128.numerator)
    v = (y / block_scale).view(256, 8, 128)
    q = reference.decode(plain.codes, torch.ones_like(plain.scale_inv), EDEN128).view(256, 8, 128)
    shrinkage = (v * v).sum(-1) / (v * q).sum(-1)
    assert shrinkage.min() > 0.96 and shrinkage.max() < 1.06
    ratio = (corrected.scale_inv.float() / plain.scale_inv.float()).view(256, 8, 8).mean(-1)
    assert (ratio - shrinkage).mean().abs() < 1e-3


@pytest.mark.parametrize("size", [32, 64, 128])
def test_larger_fixed_rotations_spread_what_rows_have_in_common(size: int) -> None:
    """Signs that repeat every 16 would leave a constant row with 16 values of ``sqrt(size / 16)`` times its length."""

    def rotated(signs: Tensor) -> Tensor:
        return hadamard.rotate(torch.full((1, size), 4.0), signs, torch.float32).abs().max()

    own = philox.rotation_signs(Rotation(size), rng(1), 0, torch.device("cpu"))
    assert torch.equal(own, philox.rotation_signs(Rotation(size), rng(2), 7, torch.device("cpu")))
    repeated = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32).repeat(size // 16)
    assert own.abs().eq(1).all() and rotated(own) < rotated(repeated)


def test_double_blocks_hold_amplitudes_that_one_tensor_scale_loses() -> None:
    x = gaussian(16, 512) * torch.tensor([1e-9, 1.0, 1e9, 1e-12]).repeat_interleave(128)
    block = x[:, :128]
    assert 1e3 * relative_mse(decoded(x, zoo.NEAREST.replace(outer=Outer.BLOCK128))[:, :128], block) < 10
    assert 1e3 * relative_mse(decoded(x, zoo.NEAREST)[:, :128], block) > 900


@pytest.mark.parametrize(
    "name",
    [
        "quartet2",
        "quartet2_scale_search",
        "quartet2_eden16",
        "rht128_4over6_scalar",
        "tetrajet2",
        "tetrajet2_simplified",
        "tetrajet",
        "mxfp4_tseng",
    ],
)
def test_gradients_are_unbiased_about_the_saved_operands(name: str) -> None:
    """E[dx] = dy W^, E[dw] = dy^T X^ with W^ and X^ what the forward pass multiplied."""
    fp4engine.manual_seed(11)
    recipe = zoo.make(name)
    layer = fp4engine.Linear(128, 128, bias=False)
    inp = gaussian(128, 128, 1).requires_grad_()
    grad = gaussian(128, 128, 2)
    saved = [
        value.detach() if spec is None else decoded(value.detach(), spec)
        for value, spec in ((inp, recipe.input.rowwise), (layer.weight, recipe.weight.rowwise))
    ]
    want = (grad @ saved[1], grad.T @ saved[0])
    totals = [torch.zeros_like(inp), torch.zeros_like(layer.weight)]
    errors = {}
    for n in range(1, 65):
        with fp4engine.autocast(recipe=recipe):
            output = layer(inp)
        for total, got in zip(totals, torch.autograd.grad(output, (inp, layer.weight), grad), strict=True):
            total += got
        errors[n] = [1e3 * relative_mse(total / n, exact) for total, exact in zip(totals, want, strict=True)]
    for gemm in range(2):
        assert 10 < errors[1][gemm] < 80
        assert errors[64][gemm] < 1.4 * errors[8][gemm] / 8


def test_an_input_that_is_saved_as_it_is_is_rotated_anew_in_every_backward_pass() -> None:
    """E[dw] = dy^T X, of the input and not of what the forward pass multiplied, up to what nearest rounding leaves."""
    fp4engine.manual_seed(11)
    recipe = zoo.make("nvfp4_fresh")
    layer = fp4engine.Linear(128, 128, bias=False)
    inp, grad = gaussian(128, 128, 1).requires_grad_(), gaussian(128, 128, 2)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        fp4engine.autocast(recipe=recipe),
    ):
        output = layer(inp)
    assert any(tensor.data_ptr() == inp.data_ptr() for tensor in kept)
    draws = [torch.autograd.grad(output, layer.weight, grad, retain_graph=True)[0] for _ in range(64)]
    assert not torch.equal(draws[0], draws[1])
    mean = torch.stack(draws).mean(0)
    exact = 1e3 * relative_mse(mean, grad.T @ inp.detach())
    assert exact < 1.4 * 1e3 * relative_mse(draws[0], grad.T @ inp.detach()) / 64 + 0.1
    assert exact < 0.2 * 1e3 * relative_mse(mean, grad.T @ decoded(inp.detach(), recipe.input.rowwise))


def test_the_backward_operands_come_from_what_the_forward_saved() -> None:
    """Four-bit codes and scales are all that a Quartet II layer keeps: 4.5 bits per element, and the outer amax."""
    kept = []
    layer = fp4engine.Linear(256, 128, bias=False)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        fp4engine.autocast(recipe=zoo.make("quartet2")),
    ):
        layer(gaussian(64, 256).requires_grad_())
    assert sum(t.nbytes for t in kept) == (64 + 128) * 256 * 9 // 16 + 2 * 4


def test_forty_five_percent_of_gaussian_blocks_choose_four() -> None:
    x = gaussian(512, 1024)
    chosen = reference.quantize(x, zoo.FOUR_OVER_SIX).scale_inv.float()
    six = reference.quantize(x, zoo.NEAREST.replace(scale_bound=256.0)).scale_inv.float()
    assert float((chosen != six).float().mean()) == pytest.approx(0.452, abs=0.005)


@pytest.mark.parametrize(
    ("amplitude", "two_level", "one_level"),
    [(1.0, 9.05, 9.05), (1e-2, 9.05, 15.8), (1e-4, 9.05, 1000), (1e4, 9.05, 638)],
)
def test_without_an_outer_scale_small_and_large_tensors_are_lost(
    amplitude: float, two_level: float, one_level: float
) -> None:
    x = gaussian(256, 1024) * amplitude
    assert 1e3 * relative_mse(decoded(x, zoo.NEAREST), x) == pytest.approx(two_level, rel=0.02)
    assert 1e3 * relative_mse(decoded(x, zoo.NEAREST.replace(outer=Outer.NONE)), x) == pytest.approx(
        one_level, rel=0.02
    )
