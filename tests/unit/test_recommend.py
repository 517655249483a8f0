"""Advice: the published table, row by row, and what measurements and estimates say about it."""

import json

import pytest

import fp4engine
from fp4engine import advice
from fp4engine.cli import main
from fp4engine.estimate import GPUS
from fp4engine.recipe import zoo


@pytest.fixture
def board(monkeypatch, tmp_path):
    """Replaces the leaderboard, and the estimate by a speed of one's own."""

    def replace(gaps: dict[str, str], speed: float = 2.0) -> None:
        (tmp_path / "board.json").write_text(json.dumps({"10m": gaps}), encoding="utf-8")
        monkeypatch.setattr(advice, "LEADERBOARD", tmp_path / "board.json")
        monkeypatch.setattr(advice, "_speed", lambda gpu, parameters, recipe, kept: speed if recipe else 1.0)

    return replace


@pytest.mark.parametrize(
    ("gpu", "parameters", "risk", "experience", "precision"),
    [
        ("V100", 70e9, "some", "advanced", "fp16"),
        ("T4", 1e6, "zero", "basic", "fp16"),
        ("A100", 400e9, "some", "advanced", "bf16"),
        ("H100", 400e9, "zero", "advanced", "bf16"),
        ("H100", 13e9, "low", "advanced", "fp8"),
        ("h200", 13e9, "some", "advanced", "fp8"),
        ("H200", 12.9e9, "some", "advanced", "bf16"),
        ("H100", 400e9, "some", "basic", "bf16"),
        ("B100", 70e9, "some", "advanced", "fp4"),
        ("B200", 69e9, "some", "advanced", "fp8"),
        ("B200", 70e9, "some", "basic", "fp8"),
        ("B200", 13e9, "low", "basic", "fp8"),
        ("B200", 12e9, "some", "advanced", "bf16"),
        ("B200", 70e9, "zero", "advanced", "bf16"),
        ("GB300", 70e9, "some", "advanced", "fp4"),
        ("RTX-5090", 70e9, "some", "advanced", "bf16"),
        ("Instinct MI300", 70e9, "some", "advanced", "bf16"),
    ],
)
def test_the_table_answers_first(gpu, parameters, risk, experience, precision, board) -> None:
    board({})
    found = fp4engine.recommend(gpu, parameters, risk, experience)
    assert found.precision == precision
    assert (
        (found.recipe in zoo.ZOO)
        == (precision in ("fp8", "fp4"))
        == (found.speed == 2.0)
        == bool(found.last_blocks or found.keep_high_precision)
    )
    assert found.reasons[0][1] == advice.SOURCE
    assert f": {precision.upper()}\n" in str(found)


def test_a_measured_gap_speaks_against_the_table_and_a_low_risk_heeds_it(board) -> None:
    board({"nvfp4": "+4.81 ± 0.04", "mxfp8": "+0.33 ± 0.08"})
    some = fp4engine.recommend("B200", 70e9, risk="some", experience="advanced")
    low = fp4engine.recommend("B200", 70e9, risk="low", experience="advanced")
    assert (some.recipe, low.recipe) == ("nvfp4", "mxfp8")
    assert some.gap == {"10m": "+4.81 ± 0.04"} and low.gap == {"10m": "+0.33 ± 0.08"}
    for found in (some, low):
        ((statement, source),) = found.contradictions
        assert "nvfp4 ended +4.81 ± 0.04 % (10m) above" in statement and source == "docs/research/leaderboard.md"
    assert (some.last_blocks, low.last_blocks) == (0.15, 0)
    board({"nvfp4": "+4.81 ± 0.04", "mxfp8": "+1.33 ± 0.08"})
    assert fp4engine.recommend("B200", 70e9, risk="low", experience="advanced").precision == "bf16"


def test_an_estimate_speaks_against_the_table(board) -> None:
    board({"fp8_current": "+0.32 ± 0.25"}, speed=1.02)
    (slow,) = fp4engine.recommend("H100", 13e9, experience="advanced").contradictions
    assert "1.02 times as fast as in BF16: no gain" in slow[0]
    assert not fp4engine.recommend("H100", 1e9).contradictions
    board({"fp8_current": "+0.32 ± 0.25"}, speed=1.3)
    (missed,) = fp4engine.recommend("H100", 1e9).contradictions
    assert "fp8_current would be 1.30 times as fast" in missed[0] and "+0.32 ± 0.25 % at 10m" in missed[0]
    assert not fp4engine.recommend("H100", 1e9, risk="zero").contradictions


def test_the_speed_is_an_estimate_of_a_whole_model() -> None:
    kept, all_cast = (advice._speed("B200", 30e6, "nvfp4", kept) for kept in (0.15, 0.0))
    assert kept != all_cast and kept > 0
    assert advice._speed("B200", 30e6, "nvfp4", 1.0) != all_cast


def test_the_command_prints_the_recommendation(capsys) -> None:
    assert main(["recommend", "A100", "7B"]) == 0
    assert capsys.readouterr().out.startswith("7,000,000,000 parameters on A100, low risk, basic experience: BF16\n")
    assert main(["recommend", "H100", "125M", "--risk", "zero", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16"


def test_the_board_has_the_recipes_that_are_recommended() -> None:
    known = {advice._recipe(gpu, precision) for gpu in GPUS for precision in ("fp8", "fp4")}
    assert known - {None} <= set(advice._board())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("H100", 0), "parameters must be a number from 1"),
        (("H100", "8B"), "parameters must be a number from 1"),
        ((None, 1e9), "gpu must be the name of a GPU"),
        (("H100", 1e9, "none"), "risk must be one of 'zero', 'low', 'some', got 'none'"),
        (("H100", 1e9, "low", "expert"), "experience must be one of"),
    ],
)
def test_arguments_outside_their_words_are_named(arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        fp4engine.recommend(*arguments)
