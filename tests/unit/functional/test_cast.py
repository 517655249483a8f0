"""``cast`` and ``upcast``: TensorCast's vocabulary as immutable values."""

from functools import partial

import pytest
import torch

import fp4engine
from fp4engine import capability, cast, upcast
from fp4engine.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    CastSpec,
    ElementFormat,
    Outer,
    Rotation,
    RoundingMode,
    ScaleRule,
    fp8,
    fp8_block,
    mx,
)
from fp4engine.recipe import zoo

SPECS = {
    "nvfp4": CastSpec(),
    "nvfp4 tiles": zoo.TILES,
    "nvfp4 4over6": zoo.FOUR_OVER_SIX,
    "nvfp4 1x128 outer": zoo.NEAREST.replace(outer=Outer.BLOCK128),
    "nvfp4 stochastic": zoo.STOCHASTIC,
    "mxfp4": mx(E2M1),
    "mxfp4 times 3/4": zoo.MXFP4_TSENG,
    "mxfp6 e2m3": mx(E2M3),
    "mxfp6 e3m2": mx(E3M2),
    "mxfp8 e4m3": mx(E4M3),
    "mxfp8 e5m2": mx(E5M2),
    "fp8": fp8(E4M3),
    "fp8 power of two": fp8(E5M2, power_of_two=True),
    "fp8 1x128": fp8_block(E4M3, 1, power_of_two=False),
}


@pytest.fixture(params=SPECS)
def spec(request) -> CastSpec:
    return SPECS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 70), (70,), (1, 1), (0, 16)])
def test_three_modes_hold_the_same_values(spec: CastSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    before, rng = x.clone(), torch.tensor([1, 2])
    virtual = cast(x, spec, rng=rng)
    assert (virtual.shape, virtual.dtype) == (x.shape, dtype)
    for mode in ("actual", "compress"):
        stored = cast(x, spec, mode, rng=rng)
        assert torch.equal(upcast(stored), virtual)
        assert upcast(stored, torch.float64).dtype == torch.float64
    assert torch.equal(x, before)


def test_a_cast_is_idempotent_where_the_scale_stands_still() -> None:
    for spec in (mx(E2M1), mx(E4M3), mx(E3M2, ScaleRule.TOPBINADE)):
        once = cast(torch.randn(8, 96), spec)
        assert torch.equal(cast(once, spec), once)


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("mxfp4", torch.uint8, 4.25),
        ("mxfp6 e2m3", torch.uint8, 6.25),
        ("mxfp8 e4m3", torch.float8_e4m3fn, 8.25),
        ("mxfp8 e5m2", torch.float8_e5m2, 8.25),
        ("nvfp4", torch.uint8, 4.5),
        ("fp8", torch.float8_e4m3fn, 8),
    ],
)
def test_storage(name: str, dtype: torch.dtype, bits: float) -> None:
    x = torch.randn(64, 256)
    actual, compressed = cast(x, SPECS[name], "actual"), cast(x, SPECS[name], "compress")
    assert actual.data.dtype == dtype and actual.data.shape == x.shape
    assert (compressed.nbytes - compressed.amax.nbytes) * 8 / x.numel() == bits


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (RoundingMode.EVEN, [0.0, 1.0, 1.0, 2.0, 2.0, -4.0, 4.0, 6.0]),
        (RoundingMode.AWAY, [0.5, 1.0, 1.5, 2.0, 3.0, -4.0, 6.0, 6.0]),
        (RoundingMode.ZERO, [0.0, 0.5, 1.0, 1.5, 2.0, -3.0, 4.0, 6.0]),
    ],
)
def test_rounding_of_ties(rounding: RoundingMode, expected: list[float]) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 7.0])
    assert cast(ties, mx(E2M1, rounding=rounding)).tolist() == expected


def test_ties_toward_zero_are_not_truncation() -> None:
    x = torch.tensor([2.9, -2.9, 2.5, 6.0])
    assert cast(x, mx(E2M1, rounding=RoundingMode.ZERO)).tolist() == [3.0, -3.0, 2.0, 6.0]
    assert cast(x, mx(E2M1, rounding=RoundingMode.TRUNCATE)).tolist() == [2.0, -2.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("rule", "thresholds"),
    [
        (ScaleRule.FLOOR, [0, 0, 0, 0, 0]),
        (ScaleRule.TOPBINADE, [0, 0, 1, 1, 1]),
        (ScaleRule.MIDMAX, [0, 0, 0, 0, 1]),
        (ScaleRule.OPTION3, [0, 0, 0, 1, 1]),
        (ScaleRule.CEIL, [0, 1, 1, 1, 1]),
    ],
)
def test_scale_rules_differ_by_where_they_step_up(rule: ScaleRule, thresholds: list[int]) -> None:
    """Block maxima 4, 6, 6.5, 7 and 7.5 under E2M1, whose largest value is 6 and whose largest binade starts at 4."""
    for amax, up in zip((4, 6, 6.5, 7, 7.5), thresholds, strict=True):
        scale_inv = cast(torch.tensor([float(amax)]), mx(E2M1, rule), "actual").scale_inv
        assert float(scale_inv.float()) == 2.0**up


@pytest.mark.parametrize(
    ("element", "turns"), [(E2M1, 7.0), (E2M3, 7.75), (E3M2, 30.0), (E4M3, 464.0), (E5M2, 61440.0)]
)
def test_midmax_turns_halfway_to_the_value_that_would_follow(element: ElementFormat, turns: float) -> None:
    at, above = torch.tensor([turns]), torch.tensor([turns]).nextafter(torch.tensor([1e9]))
    for amax, up in ((at, 0), (above, 1)):
        assert float(cast(amax, mx(element, ScaleRule.MIDMAX), "actual").scale_inv.float()) == 2.0**up
    assert float(cast(torch.tensor([472.0]), mx(E4M3, ScaleRule.MIDMAX))) == 480, "448 if it saturated"


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "triton_runs_on", lambda device: (False, f"no Triton on {device}"))
    with pytest.raises(
        RuntimeError, match="compute='triton' cannot cast x: no Triton on cpu; compute='auto' takes torch"
    ):
        cast(torch.randn(2, 32), mx(E2M1), compute="triton")
    x = torch.randn(2, 32)
    assert torch.equal(cast(x, mx(E2M1)), cast(x, mx(E2M1), compute="torch"))


def test_what_neither_can_do_raises() -> None:
    with pytest.raises(NotImplementedError, match=r"does not rotate .*rht16-fixed"):
        cast(torch.randn(2, 32), CastSpec(rotation=Rotation()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": E2M1}, "spec must be an fp4engine.formats.CastSpec or one of 'mxfp4', .*, got ElementFormat"),
        ({"cast": "real"}, "cast must be one of 'virtual', 'actual', 'compress', got 'real'"),
        ({"compute": "gpu"}, "compute must be one of 'auto', 'torch', 'triton', got 'gpu'"),
    ],
)
def test_wrong_words(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cast(torch.randn(2, 32), **{"spec": CastSpec(), **arguments})


@pytest.mark.parametrize(
    "rng",
    [
        3,
        (1, 2),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([1]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2]]),
        torch.tensor([1, 2], device="meta"),
    ],
    ids=str,
)
def test_what_is_no_draw_is_refused(rng) -> None:
    """An int32 draw would round by other bits, and one of other sizes or without values by whatever is there."""
    quantizer = fp4engine.Quantizer(zoo.STOCHASTIC, zoo.STOCHASTIC)
    for function in (partial(cast, spec=zoo.STOCHASTIC), quantizer.quantize, quantizer.amax):
        with pytest.raises(ValueError, match=r"rng must be torch.int64 \[2\], .*, got "):
            function(torch.randn(2, 32), rng=rng)


def test_upcast_takes_cast_tensors_and_floating_point_dtypes() -> None:
    with pytest.raises(ValueError, match=r"x must be a CastTensor, .* got Tensor"):
        upcast(torch.randn(2, 32))  # pyright: ignore[reportArgumentType]
    for dtype in ("float32", float, torch.int32):
        with pytest.raises(ValueError, match=r"dtype must be a floating-point torch\.dtype or None, got"):
            upcast(cast(torch.randn(2, 32), CastSpec(), "actual"), dtype)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nothing_non_finite_comes_back_finite(spec: CastSpec, value: float) -> None:
    x = torch.randn(4, 64)
    x[1, 5] = value
    fp4engine.manual_seed(3)
    assert not cast(x, spec)[1, 5].isfinite()
