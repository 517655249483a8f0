"""Errors every implementation of these casts must show on N(0, 1): numerics.md, section "Yardsticks"."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp4engine import reference
from fp4engine.constants import SR_GUARD
from fp4engine.formats import (
    E4M3,
    E8M0,
    FP32,
    UE5M3,
    CastSpec,
    Correction,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    Signs,
)
from fp4engine.recipe import zoo
from fp4engine.reference import hadamard, philox
from fp4engine.tensor import Operand
from fp4engine.testing import assert_scales_adjacent

NVFP4 = CastSpec()
TILES = NVFP4.replace(block=(16, 16))
FOUR_OVER_SIX = NVFP4.replace(scale_rule=ScaleRule.FOUR_OVER_SIX_MSE, scale_bound=256.0)
STOCHASTIC = NVFP4.replace(rounding=RoundingMode.STOCHASTIC)
GUARDED = STOCHASTIC.replace(target=6 * SR_GUARD)
WIDE = NVFP4.replace(scale=UE5M3, scale_bound=UE5M3.max_value, outer=Outer.NONE)
EVERY = zoo.SEARCHED.replace(search=(-2, -1, 1, 2, 3, 4, 5, 6))
CLIPPED = zoo.ENCLOSED.replace(block=(32, 32), scale_rule=ScaleRule.CEIL87)
FRESH = Rotation(128, Signs.WGRAD)
EDEN128 = zoo.EDEN.replace(rotation=FRESH)
SCALAR = zoo.SCALAR.replace(rotation=FRESH)
FP8 = CastSpec(element=E4M3, block=(0, 0), scale=FP32, scale_bound=1.0, target=448.0)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def mxfp4(rule: ScaleRule) -> CastSpec:
    return CastSpec(block=(1, 32), scale=E8M0, scale_rule=rule, scale_bound=1.0, outer=Outer.NONE)


def gaussian(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def decoded(x: Tensor, spec: CastSpec, draw: int = 1, stream: int = 0) -> Tensor:
    """What ``x`` comes back as, rotation undone: its matrix is orthogonal and symmetric but for the signs."""
    rng = torch.tensor([2024, draw])
    values = reference.dequantize(*reference.quantize(x, spec, rng=rng, stream=stream), spec, x.shape[1], torch.float32)
    if spec.rotation is None:
        return values
    signs = philox.rotation_signs(spec.rotation, rng, stream, x.device)
    unsigned = hadamard.rotate(values, torch.ones(spec.rotation.size), torch.float32)
    return unsigned * signs.repeat(x.shape[1] // spec.rotation.size)


def relative_mse(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().sum() / want.double().square().sum())


@pytest.mark.parametrize(
    ("spec", "expected", "tolerance"),
    [
        pytest.param(NVFP4, 9.05, 0.05, id="nearest 1x16"),
        pytest.param(FOUR_OVER_SIX, 7.57, 0.05, id="4over6 mse"),
        pytest.param(FOUR_OVER_SIX.replace(scale_rule=ScaleRule.FOUR_OVER_SIX_MAE), 7.80, 0.05, id="4over6 mae"),
        pytest.param(TILES, 12.40, 0.05, id="nearest 16x16"),
        pytest.param(zoo.SEARCHED, 6.70, 0.01, id="searched scales"),
        pytest.param(zoo.RAZER, 6.22, 0.01, id="razer"),
        pytest.param(zoo.RAZER.replace(block=(16, 16)), 10.87, 0.05, id="razer 16x16"),
        pytest.param(zoo.SEARCHED_TILES, 11.39, 0.05, id="searched scales 16x16"),
        pytest.param(EVERY, 6.60, 0.02, id="every scale that ever wins"),
        pytest.param(STOCHASTIC, 18.87, 0.15, id="stochastic"),
        pytest.param(GUARDED, 23.53, 0.15, id="stochastic, guarded"),
        pytest.param(WIDE, 9.05, 0.05, id="ue5m3 scales, no outer scale"),
        pytest.param(mxfp4(ScaleRule.FLOOR), 13.23, 0.05, id="mxfp4 floor"),
        pytest.param(mxfp4(ScaleRule.MIDMAX), 12.52, 0.05, id="mxfp4 midmax"),
        pytest.param(mxfp4(ScaleRule.OPTION3), 12.52, 0.05, id="mxfp4 option3"),
        pytest.param(mxfp4(ScaleRule.TOPBINADE), 13.33, 0.05, id="mxfp4 topbinade"),
        pytest.param(mxfp4(ScaleRule.CEIL), 20.81, 0.15, id="mxfp4 ceil"),
        pytest.param(zoo.ENCLOSED, 13.89, 0.05, id="mxfp4, held by a power of two"),
        pytest.param(CLIPPED, 17.31, 0.05, id="the same in 32x32 tiles, clipped"),
        pytest.param(FP8, 0.70, 0.01, id="fp8 per tensor"),
        pytest.param(EDEN128.replace(correction=Correction.EDEN16), 9.31, 0.08, id="MS-EDEN, one correction per 16"),
        pytest.param(EDEN128, 9.74, 0.08, id="MS-EDEN, one correction per 128"),
        pytest.param(SCALAR, 7.6, 0.08, id="4over6 with one scalar"),
        pytest.param(NVFP4.replace(outer=Outer.BLOCK128), 9.01, 0.08, id="1x128 outer scales"),
        pytest.param(zoo.LOCAL, 9.05, 0.08, id="outer scale for 128 rows"),
        pytest.param(NVFP4.replace(outer=Outer.ROW), 9.05, 0.08, id="outer scale per row"),
        pytest.param(NVFP4.replace(rotation=FRESH), 9.06, 0.08, id="rotation changes nothing on a Gaussian"),
        pytest.param(zoo.MXFP4_TSENG, 28.21, 0.3, id="MXFP4 floor times 3/4, stochastic"),
    ],
)
def test_relative_mse_in_thousandths(spec: CastSpec, expected: float, tolerance: float) -> None:
    x = gaussian(1024, 1024)
    assert relative_mse(decoded(x, spec), x) * 1e3 == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("amplitude", "expected"), [(1e4, 9.05), (1e-2, 9.05), (1e-4, 9.9), (1e-6, 1000.0)])
def test_the_range_of_ue5m3_scales_without_an_outer_one(amplitude: float, expected: float) -> None:
    x = gaussian(1024, 1024) * amplitude
    assert relative_mse(decoded(x, WIDE), x) * 1e3 == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param(FP8, FP8, 28.5, id="fp8 x fp8"),
        pytest.param(FOUR_OVER_SIX, FOUR_OVER_SIX, 18.2, id="4over6 x 4over6"),
        pytest.param(NVFP4, NVFP4, 17.4, id="nearest x nearest"),
        pytest.param(NVFP4, TILES, 16.7, id="nearest x 16x16, fprop"),
        pytest.param(STOCHASTIC, TILES, 15.0, id="stochastic x 16x16, dgrad"),
        pytest.param(GUARDED, GUARDED, 13.23, id="guarded x guarded"),
        pytest.param(EDEN128, EDEN128, 17.06, id="MS-EDEN x MS-EDEN"),
        pytest.param(mxfp4(ScaleRule.FLOOR), mxfp4(ScaleRule.FLOOR), 15.80, id="MXFP4 floor x floor"),
    ],
)
def test_decibels_of_a_product(left: CastSpec, right: CastSpec, expected: float) -> None:
    """K = 1024; one decimal is what the contract states."""
    x, w = gaussian(512, 1024, 1), gaussian(512, 1024, 2)
    noise = relative_mse(decoded(x, left, stream=4) @ decoded(w, right, stream=2).T, x.double() @ w.double().T)
    assert -10 * torch.tensor(noise).log10() == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("spec", "floor"),
    [
        pytest.param(GUARDED, 0.0, id="guarded"),
        pytest.param(STOCHASTIC, 0.12e-3, id="unguarded"),
        pytest.param(zoo.MXFP4_TSENG, 0.0, id="Tseng"),
        pytest.param(EDEN128, 0.0, id="MS-EDEN"),
        pytest.param(SCALAR, 0.0, id="4over6 with one scalar"),
        pytest.param(FOUR_OVER_SIX.replace(rounding=RoundingMode.STOCHASTIC), 0.2e-3, id="4over6, stochastic"),
    ],
)
def test_the_mean_of_n_draws_closes_as_one_over_n(spec: CastSpec, floor: float) -> None:
    """``error(n) = variance / n + floor``: the guard leaves no floor, without it saturated block maxima do.

    Signs are drawn again inside the mean; averaging over the rest alone converges to something else.
    """
    x = gaussian(512, 512)
    total = torch.zeros_like(x, dtype=torch.float64)
    errors = {}
    for draw in range(1, 65):
        total += decoded(x, spec, draw)
        errors[draw] = relative_mse(total / draw, x)
    measured_floor = (64 * errors[64] - errors[1]) / 63
    assert measured_floor == pytest.approx(floor, abs=0.03e-3)
    for draw in (4, 16):
        assert errors[draw] == pytest.approx((errors[1] - measured_floor) / draw + measured_floor, rel=0.01)


def test_no_element_is_biased() -> None:
    """z-test per element under the guard: no mean is further than chance allows, and the z-scores spread by one."""
    x = gaussian(32, 64)
    samples = torch.stack([decoded(x, GUARDED, draw) for draw in range(1, 401)]).double()
    error = samples.mean(0) - x
    deviation = samples.std(0)
    z = error[deviation > 0] / (deviation[deviation > 0] / 20)
    assert z.abs().max() < 5
    assert abs(z.mean()) < 5 / z.numel() ** 0.5
    assert z.std() == pytest.approx(1.0, abs=0.1)
    assert (error[deviation == 0].abs() < 0.02).all(), "an element that never moved lies on its grid"


def test_the_guard_changes_scales_by_no_more_than_the_guard() -> None:
    x = gaussian(64, 64)
    plain, guarded = (
        Operand(spec, 64, 64, *reference.quantize(x, spec, rng=torch.tensor([1, 1]))) for spec in (STOCHASTIC, GUARDED)
    )
    assert_scales_adjacent(guarded, plain)
    assert (guarded.scale_inv.float() >= plain.scale_inv.float()).all()


def test_what_splitting_means_off_is_worth_is_what_the_page_says() -> None:
    """Averis, docs/recipes.md: ``Q(X) Q(W)^T``, ``Q(R) Q(W)^T + 1 Q(m) Q(W)^T``, and the latter with an exact mean."""
    (numbers,) = re.findall(r"is ([\d.]+) without the split, ([\d.]+) with it, and ([\d.]+)", PAGE.read_text())
    errors = torch.zeros(3)
    for seed in range(0, 12, 3):
        x = gaussian(512, 1024, seed) + 10 * gaussian(1, 1024, seed + 1)
        w = gaussian(256, 1024, seed + 2)
        y, mean, weight = x @ w.T, x.mean(0, keepdim=True), decoded(w, TILES)
        exact, whole, cast_mean = mean @ w.T, decoded(x, NVFP4) @ weight.T, decoded(mean, NVFP4) @ weight.T
        rest = decoded(x - mean, NVFP4) @ weight.T
        outputs = torch.stack([whole, rest + cast_mean, rest + exact])
        errors += (outputs - y).norm(dim=(1, 2)) / (y - y.mean(0)).norm() / 4
    assert list(map(float, numbers)) == pytest.approx(errors.tolist(), rel=0.06)
