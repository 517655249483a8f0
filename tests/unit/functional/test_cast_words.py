"""``cast`` in TensorCast's words, against their definitions in float64, and the scope that sets defaults."""

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import fp4engine
from fp4engine import cast, cast_defaults, upcast
from fp4engine.formats import E2M1, E2M3, E3M2, E4M3, E5M2, CastSpec, RoundingMode, ScaleRule, fp8, mx

GRIDS = {  # mantissa bits, least and greatest exponent, largest value
    "mxfp4": (1, 0, 2, 6.0),
    "mxfp6": (3, 0, 2, 7.5),
    "mxbf6": (2, -2, 4, 28.0),
    "mxfp8": (3, -6, 8, 448.0),
    "mxbf8": (2, -14, 15, 57344.0),
}
ALIASES = {"mxfp4": "mxfp4e2", "mxfp6": "mxfp6e2", "mxbf6": "mxfp6e3", "mxfp8": "mxfp8e4", "mxbf8": "mxfp8e5"}
SQUARES = {"mxfp4s": E2M1, "mxfp6s": E2M3, "mxbf6s": E3M2, "mxfp8s": E4M3}
ROUNDS, SCALES = ("even", "away", "zero"), ("floor", "ceil", "midmax", "option3", "topbinade")


def exponent(x: Tensor) -> Tensor:
    return torch.frexp(x).exponent - 1


def rounded(x: Tensor, name: str, word: str) -> Tensor:
    """``x`` (float64) on the grid of a format, saturated."""
    bits, least, _, largest = GRIDS[name]
    step = 2.0 ** (exponent(x).clamp_min(least) - bits)
    steps = x.abs() / step
    nearest = {"even": steps.round(), "away": (steps + 0.5).floor(), "zero": (steps - 0.5).ceil()}[word]
    return torch.copysign((nearest * step).clamp_max(largest), x)


def block_scales(blocks: Tensor, name: str, word: str) -> Tensor:
    """The powers of two of ``blocks`` [..., 32] (float64), by the formulas of TensorCast's docs/modes.md."""
    bits, _, greatest, largest = GRIDS[name]
    amax = blocks.abs().amax(-1, keepdim=True)
    floor = exponent(amax)
    scaled = amax / 2.0**floor
    midmax = (largest + 2.0 ** (greatest - bits) / 2) / 2.0**greatest
    up = {
        "floor": torch.zeros_like(floor),
        "ceil": scaled > 1,
        "midmax": scaled > midmax,
        "option3": exponent((scaled * 2**bits).round()) - bits,
        "topbinade": scaled > largest / 2.0**greatest,
    }[word]
    return 2.0 ** (floor + up - greatest)


def numbers(*shape: int) -> Tensor:
    """Values with ties of every format and all mantissas of a block's largest, over many binades."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.randint(0, 512, shape, generator=generator) / 32
    binades = torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)
    return magnitudes * 2.0**binades * (1 - 2 * torch.randint(0, 2, shape, generator=generator))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", GRIDS)
def test_words_of_microscaling_mean_what_tensorcast_says(name: str, scale: Any) -> None:
    x = numbers(60, 96)
    blocks = x.double().view(60, 3, 32)
    scales = block_scales(blocks, name, scale)
    for word in ROUNDS:
        got = cast(x, name, "actual", round=word, scale=scale)
        assert torch.equal(got.scale_inv.double(), scales.squeeze(-1))
        expected = (rounded(blocks / scales, name, word) * scales).view_as(x)
        assert torch.equal(upcast(got, torch.float64), expected)
        assert torch.equal(cast(x, name, "virtual", round=word, scale=scale), expected.float())
        assert torch.equal(cast(x, ALIASES[name], "virtual", round=word, scale=scale), expected.float())


@pytest.mark.parametrize("word", ROUNDS)
def test_words_round_in_formats_of_one_level_and_two(word: Any) -> None:
    """Where every scale is a power of two, and exact: amaxes are the largest value times one."""
    for name, grid in (("fp8_F", "mxfp8"), ("bf8_F", "mxbf8")):
        amax = GRIDS[grid][3] / 8
        x = numbers(16, 32).clamp(-amax, amax)
        x[0, 0] = amax
        assert torch.equal(cast(x, name, "virtual", round=word), (rounded(x.double() * 8, grid, word) / 8).float())
    blocks = numbers(28, 16).sign() * torch.randint(0, 49, (28, 16)) / 8
    blocks[:, 0] = 6
    scales = 2.0 ** torch.arange(-5, 9).repeat(2)[:, None]
    blocks[-1, 0], scales[-1] = 6 * 448 / 256, 256  # the tensor's: an outer scale of one
    inner = scales.clone()
    inner[-1] = 448
    expected = rounded(blocks * scales / inner, "mxfp4", word) * inner
    assert torch.equal(cast((blocks * scales).float(), "nvfp4", "virtual", round=word), expected.float())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "fp8_F"])
def test_stochastic_goes_up_as_often_as_a_number_is_far(name: str) -> None:
    is_fp4 = name in ("mxfp4", "nvfp4")
    value, largest, lower, upper = (4.75, 6.0, 4.0, 6.0) if is_fp4 else (4.0625, 448.0, 4.0, 4.5)
    x = torch.full((256, 64), value)
    x[:, ::16] = largest
    if name == "nvfp4":
        x[0] = 6 * 448  # an outer scale of one
    draws = [cast(x, name, "virtual", round="stochastic", rng=torch.tensor([1, draw])) for draw in (2, 2, 3)]
    got = draws[0][x == value]
    assert set(got.tolist()) == {lower, upper}
    assert abs((got == upper).double().mean().item() - (value - lower) / (upper - lower)) < 0.02
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_names_are_specs_of_the_algebra() -> None:
    x, rng = torch.randn(40, 70), torch.tensor([1, 2])
    named = {"nvfp4": CastSpec(), "fp8_F": fp8(E4M3), "bf8_F": fp8(E5M2)}
    named |= {name: mx(element, rows=32) for name, element in SQUARES.items()}
    for name, spec in named.items():
        for word in RoundingMode:
            if word is not RoundingMode.TRUNCATE:
                expected = cast(x, spec.replace(rounding=word), "actual", rng=rng)
                got = cast(x, name, "actual", round=word.value, rng=rng)  # pyright: ignore[reportArgumentType]
                assert got.spec == expected.spec
                for part in ("data", "scale_inv", "amax"):
                    assert torch.equal(*(getattr(stored, part).view(torch.uint8) for stored in (got, expected)))
    squares = cast(x, "mxfp4s", "actual", scale="midmax")
    assert squares.spec == mx(E2M1, ScaleRule.MIDMAX, rows=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["mxfp4", "mxbf6", "mxfp8e5", "mxfp6s", "fp8_F", "nvfp4"])
def test_any_shape_and_layout(name: str, dtype: torch.dtype) -> None:
    wide = numbers(36, 6, 70).to(dtype)
    for x in (wide, wide[0, 0], wide[:0], wide[..., :0], wide.mT, wide[:, ::2, 1::3], wide[:1, :1, :1]):
        before = x.clone()
        virtual = cast(x, name)
        assert isinstance(virtual, Tensor) and (virtual.shape, virtual.dtype) == (x.shape, dtype)
        assert torch.equal(virtual, cast(x.contiguous(), name, "virtual")) and torch.equal(x, before)
        for word in ("actual", "compress"):
            assert torch.equal(upcast(cast(x, name, word)), virtual)


def test_bad_words_are_refused_by_name() -> None:
    words = {
        "round": ("nearest", "'even', 'away', 'zero', 'stochastic', got 'nearest'"),
        "scale": ("max", "'floor', 'ceil', 'midmax', 'option3', 'topbinade', got 'max'"),
        "cast": ("upcast", "'virtual', 'actual', 'compress', got 'upcast'"),
        "compute": (True, "'auto', 'torch', 'triton', got True"),
    }
    for name, (wrong, message) in words.items():
        for function in (lambda **said: cast(torch.ones(32), "mxfp4", **said), cast_defaults):
            with pytest.raises(ValueError, match=f"{name} must be one of {message}"):
                function(**{name: wrong})


@pytest.mark.parametrize("name", ["mxint8", "mxfp4m", "nvf4", "fp8n_F", "e2m1", "MXFP4", ""])
def test_a_format_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"spec must be .*CastSpec or one of 'mxfp4', .*'nvfp4', got '{name}'"):
        cast(torch.ones(32), name)


def test_words_that_do_not_go_together() -> None:
    x: Any = torch.ones(32)
    for name in ("nvfp4", "fp8_F", "bf8_F"):
        with pytest.raises(ValueError, match=f"scale is for formats .* powers of two, 'mxfp4', .*; got '{name}'"):
            cast(x, name, scale="floor")
    anyhow: Any = cast
    with pytest.raises(
        ValueError, match=r"round is for a format by its name.*spec\.replace\(rounding.*got round='even'"
    ):
        anyhow(x, CastSpec(), round="even")
    with pytest.raises(ValueError, match=r"scale is for a format by its name.*spec\.replace\(scale_rule.*scale='ceil'"):
        anyhow(x, mx(E2M1), scale="ceil")


def test_a_scope_sets_defaults_and_the_inner_one_wins() -> None:
    x = numbers(4, 64)

    def made(**said: Any) -> CastSpec:
        stored = cast(x, "mxfp4", "actual", **said)
        return stored.spec

    with cast_defaults(round="away", scale="ceil", cast="compress", compute="torch"):
        stored = cast(x, "mxfp4")
        assert isinstance(stored, fp4engine.CastTensor) and stored.mode == "compress"
        assert stored.spec == mx(E2M1, ScaleRule.CEIL, RoundingMode.AWAY)
        with cast_defaults(scale="midmax"):
            assert made() == mx(E2M1, ScaleRule.MIDMAX, RoundingMode.AWAY)
        assert made(round="zero") == mx(E2M1, ScaleRule.CEIL, RoundingMode.ZERO)
        assert cast(x, "nvfp4", "actual").spec == CastSpec(rounding=RoundingMode.AWAY)
        assert torch.equal(cast(x, mx(E2M1)), cast(x, "mxfp4", "virtual", round="even", scale="floor"))
    assert made() == mx(E2M1)


def test_a_scope_ends_with_its_block_after_an_exception_too() -> None:
    with pytest.raises(KeyError), cast_defaults(cast="actual"):
        with pytest.raises(ValueError, match="round must be one of"), cast_defaults(round="up"):  # type: ignore[arg-type]
            pass
        assert not isinstance(cast(torch.ones(32), "mxfp4"), Tensor)
        raise KeyError
    assert isinstance(cast(torch.ones(32), "mxfp4"), Tensor)


def test_a_scope_is_of_its_thread() -> None:
    seen: list[str] = []

    def look() -> None:
        seen.append(cast(torch.ones(32), "mxfp4", "actual").spec.scale_rule.value)

    entered, leave = Event(), Event()

    def hold_another() -> None:
        look()
        with cast_defaults(scale="option3"):
            entered.set()
            leave.wait(60)

    with cast_defaults(scale="ceil"):
        thread = Thread(target=hold_another)
        thread.start()
        entered.wait(60)
        look()
        leave.set()
        thread.join()
    assert seen == ["floor", "ceil"]


def test_compiled_code_follows_the_scope() -> None:
    x = numbers(4, 64)
    run = torch.compile(lambda x: cast(x, "mxfp4") * 2, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(run(x), cast(x, mx(E2M1)) * 2)
        with cast_defaults(scale="ceil"):
            assert torch.equal(run(x), cast(x, mx(E2M1, ScaleRule.CEIL)) * 2)
