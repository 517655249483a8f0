"""The law that defines each published recipe, on the CPU: errors, and what the mean of many draws converges to."""

import pytest
import torch
from torch import Tensor

import fp4engine
from fp4engine import reference
from fp4engine.constants import HADAMARD_SIGNS
from fp4engine.formats import E2M1, CastSpec, Correction, Outer, Rotation, RoundingMode, ScaleRule, Signs, mx
from fp4engine.recipe import zoo
from fp4engine.reference import hadamard, philox

FRESH = Rotation(128, Signs.WGRAD)
EDEN128 = zoo.EDEN.replace(rotation=FRESH)
EDEN16 = EDEN128.replace(correction=Correction.EDEN16)
SCALAR = zoo.SCALAR.replace(rotation=FRESH)
BIASED = zoo.FOUR_OVER_SIX.replace(rounding=RoundingMode.STOCHASTIC)


def gaussian(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def rng(draw: int) -> Tensor:
    return torch.tensor([2024, draw])


def rotated_back(y: Tensor, spec: CastSpec, draw: int, stream: int = 0) -> Tensor:
    """``y H^T diag(signs)``: the matrix is orthogonal and symmetric but for the signs."""
    if spec.rotation is None:
        return y
    signs = philox.rotation_signs(spec.rotation, rng(draw), stream, y.device)
    unsigned = hadamard.rotate(y, torch.ones(spec.rotation.size), torch.float32)
    return unsigned * signs.repeat(y.shape[1] // spec.rotation.size)


def decoded(x: Tensor, spec: CastSpec, draw: int = 1, stream: int = 0) -> Tensor:
    """What ``x`` comes back as, rotation undone."""
    cast = reference.quantize(x, spec, rng=rng(draw), stream=stream)
    values = reference.dequantize(*cast, spec, x.shape[1], torch.float32)
    return rotated_back(values, spec, draw, stream)


def thousandths(got: Tensor, want: Tensor) -> float:
    return 1e3 * float((got.double() - want).square().sum() / want.double().square().sum())


@pytest.mark.parametrize(
    ("spec", "expected", "tolerance"),
    [
        pytest.param(EDEN16, 9.31, 0.08, id="MS-EDEN, one correction per 16"),
        pytest.param(EDEN128, 9.74, 0.08, id="MS-EDEN, one correction per 128"),
        pytest.param(SCALAR, 7.6, 0.08, id="4over6 with one scalar"),
        pytest.param(zoo.NEAREST.replace(outer=Outer.BLOCK128), 9.01, 0.08, id="1x128 outer scales"),
        pytest.param(zoo.LOCAL, 9.05, 0.08, id="outer scale for 128 rows"),
        pytest.param(zoo.NEAREST.replace(outer=Outer.ROW), 9.05, 0.08, id="outer scale per row"),
        pytest.param(zoo.NEAREST.replace(rotation=FRESH), 9.06, 0.08, id="rotation changes nothing on a Gaussian"),
        pytest.param(zoo.MXFP4_TSENG, 28.21, 0.3, id="MXFP4 floor times 3/4, stochastic"),
    ],
)
def test_relative_mse(spec: CastSpec, expected: float, tolerance: float) -> None:
    x = gaussian(512, 1024)
    assert thousandths(decoded(x, spec), x) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(zoo.GUARDED, 13.23, id="guarded x guarded"),
        pytest.param(EDEN128, 17.06, id="MS-EDEN x MS-EDEN"),
        pytest.param(mx(E2M1, ScaleRule.FLOOR), 15.80, id="MXFP4 floor x floor"),
    ],
)
def test_decibels_of_a_product(spec: CastSpec, expected: float) -> None:
    x, w = gaussian(512, 1024, 1), gaussian(512, 1024, 2)
    product = decoded(x, spec, stream=4) @ decoded(w, spec, stream=2).T
    noise = thousandths(product, x.double() @ w.double().T) / 1e3
    assert -10 * torch.tensor(noise).log10() == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("spec", "one", "sixty_four"),
    [
        pytest.param(zoo.GUARDED, 23.6, 0.359, id="guarded"),
        pytest.param(zoo.MXFP4_TSENG, 28.4, 0.453, id="Tseng"),
        pytest.param(EDEN128, 9.7, 0.152, id="MS-EDEN"),
        pytest.param(SCALAR, 7.6, 0.120, id="4over6 with one scalar"),
    ],
)
def test_the_mean_of_n_draws_closes_on_x_as_one_over_n(spec: CastSpec, one: float, sixty_four: float) -> None:
    """Signs are drawn again inside the mean; averaging over the rest alone converges to something else."""
    x = gaussian(64, 1024)
    total = torch.zeros_like(x)
    errors = {}
    for draw in range(1, 65):
        total += decoded(x, spec, draw)
        errors[draw] = thousandths(total / draw, x)
    assert errors[1] == pytest.approx(one, rel=0.05)
    assert errors[64] == pytest.approx(sixty_four, rel=0.10)
    assert errors[64] < 1.15 * errors[16] / 4


def test_four_over_six_with_stochastic_rounding_has_a_floor() -> None:
    x = gaussian(16, 512)
    biased, guarded = (
        thousandths(torch.stack([decoded(x, spec, draw) for draw in range(1, 513)]).mean(0), x)
        for spec in (BIASED, zoo.GUARDED)
    )
    assert guarded < 0.06 < 0.18 < biased


def test_the_correction_undoes_the_shrinkage() -> None:
    """``<y, q> = <y, y>`` after the scalar; nearest rounding alone falls short by 0.3%."""
    x = gaussian(128, 1024)
    for spec, shortfall in ((SCALAR, 0.0), (SCALAR.replace(correction=Correction.NONE), 0.0034)):
        q = decoded(x, spec)
        assert 1 - float((x * q).sum() / (x * x).sum()) == pytest.approx(shortfall, abs=5e-4)


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


@pytest.mark.parametrize("signs", Signs)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_rotations_cancel_between_the_operands_of_a_product(size: int, signs: Signs) -> None:
    """Each operand has a stream of its own, and takes the signs of the GEMM."""
    rotation = Rotation(size, signs)
    x, y = gaussian(8, 256, 1), gaussian(4, 256, 2)
    left, right = (
        hadamard.rotate(value, philox.rotation_signs(rotation, rng(3), stream, x.device), torch.float32)
        for value, stream in ((x, 5), (y, 1))
    )
    torch.testing.assert_close(left @ right.T, x @ y.T, rtol=0, atol=1e-4)
    assert not torch.allclose(left, x)


def test_fresh_signs_differ_by_draw_and_gemm_and_fixed_signs_are_the_recipe_s() -> None:
    def signs(rotation: Rotation, draw: int) -> Tensor:
        return philox.rotation_signs(rotation, rng(draw), 0, torch.device("cpu"))

    drawn = [signs(Rotation(128, gemm), draw) for gemm in (Signs.DGRAD, Signs.WGRAD) for draw in (1, 2)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert signs(Rotation(16), 1).tolist() == list(HADAMARD_SIGNS)
    assert signs(Rotation(32, Signs.NONE), 1).tolist() == [1] * 32


@pytest.mark.parametrize("size", [32, 64, 128])
def test_larger_fixed_rotations_spread_what_rows_have_in_common(size: int) -> None:
    """Signs that repeat every 16 would leave a constant row with 16 values of ``sqrt(size / 16)`` times its length."""

    def rotated(signs: Tensor) -> Tensor:
        return hadamard.rotate(torch.full((1, size), 4.0), signs, torch.float32).abs().max()

    own = philox.rotation_signs(Rotation(size), rng(1), 0, torch.device("cpu"))
    assert torch.equal(own, philox.rotation_signs(Rotation(size), rng(2), 7, torch.device("cpu")))
    repeated = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32).repeat(size // 16)
    assert own.abs().eq(1).all() and rotated(own) < rotated(repeated)


def test_a_row_s_own_outer_scale_makes_its_codes_independent_of_the_batch() -> None:
    spec = zoo.NEAREST.replace(outer=Outer.ROW)
    x = gaussian(32, 256) * torch.logspace(-20, 20, 32)[:, None]
    together, alone = reference.quantize(x, spec), reference.quantize(x[7:8], spec)
    assert torch.equal(together.codes[7:8], alone.codes)
    assert torch.equal(together.amax[7:8], alone.amax)


def test_double_blocks_hold_amplitudes_that_one_tensor_scale_loses() -> None:
    x = gaussian(16, 512) * torch.tensor([1e-9, 1.0, 1e9, 1e-12]).repeat_interleave(128)
    block = x[:, :128]
    assert thousandths(decoded(x, zoo.NEAREST.replace(outer=Outer.BLOCK128))[:, :128], block) < 10
    assert thousandths(decoded(x, zoo.NEAREST)[:, :128], block) > 900


@pytest.mark.parametrize(
    "name",
    [
        "quartet2",
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
        errors[n] = [thousandths(total / n, exact) for total, exact in zip(totals, want, strict=True)]
    for gemm in range(2):
        assert 10 < errors[1][gemm] < 80
        assert errors[64][gemm] < 1.4 * errors[8][gemm] / 8


@pytest.mark.parametrize("name", ["nvfp4_qat", "mxfp4_qat", "nvfp4_4over6_forward_high_precision_backward"])
def test_gradients_of_aware_training_are_those_of_what_the_forward_multiplied(name: str) -> None:
    """dx = dy W^, dw = dy^T X^, by the chain rule straight through the casts."""
    recipe = zoo.make(name)
    layer = fp4engine.Linear(128, 128, bias=False)
    inp, grad = gaussian(64, 128, 1).requires_grad_(), gaussian(64, 128, 2)
    saved = [
        decoded(value.detach(), spec)
        for value, spec in ((inp, recipe.input.rowwise), (layer.weight, recipe.weight.rowwise))
    ]
    with fp4engine.autocast(recipe=recipe):
        output = layer(inp)
    dx, dw = torch.autograd.grad(output, (inp, layer.weight), grad)
    torch.testing.assert_close(output, saved[0] @ saved[1].T)
    torch.testing.assert_close(dx, grad @ saved[1])
    torch.testing.assert_close(dw, grad.T @ saved[0])


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
    exact = thousandths(mean, grad.T @ inp.detach())
    assert exact < 1.4 * thousandths(draws[0], grad.T @ inp.detach()) / 64 + 0.1
    assert exact < 0.2 * thousandths(mean, grad.T @ decoded(inp.detach(), recipe.input.rowwise))


def test_gradients_of_quest_stop_where_its_casts_saturated() -> None:
    """FP-Quant's backward pass: the gradient of what was rotated, where it was below 6, rotated back."""
    spec = zoo.QUEST
    layer = fp4engine.Linear(64, 32, bias=False)
    inp, grad = (gaussian(32, 64, 1) * 3).requires_grad_(), gaussian(32, 32, 2)
    signs = torch.ones(32)
    rotated, casts = {}, {}
    for name, value in (("x", inp.detach()), ("w", layer.weight.detach())):
        rotated[name] = hadamard.rotate(value, signs, torch.float32)
        casts[name] = reference.quantize(value, spec)
    hat = {name: reference.dequantize(*cast, spec, 64, torch.float32) for name, cast in casts.items()}
    within = {
        name: rotated[name].abs() < 6 * cast.scale_inv.float().repeat_interleave(32, 1) for name, cast in casts.items()
    }
    assert all(0.5 < float(mask.float().mean()) < 1 for mask in within.values())
    with fp4engine.autocast(recipe=zoo.make("mxfp4_quest")):
        output = layer(inp)
    dx, dw = torch.autograd.grad(output, (inp, layer.weight), grad)
    torch.testing.assert_close(output, hat["x"] @ hat["w"].T)
    for got, want in ((dx, grad @ hat["w"] * within["x"]), (dw, grad.T @ hat["x"] * within["w"])):
        torch.testing.assert_close(got, hadamard.rotate(want, signs, torch.float32))


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
    assert thousandths(decoded(x, zoo.NEAREST), x) == pytest.approx(two_level, rel=0.02)
    assert thousandths(decoded(x, zoo.NEAREST.replace(outer=Outer.NONE)), x) == pytest.approx(one_level, rel=0.02)
