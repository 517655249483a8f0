"""The small examples run and learn."""

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("finetune", ["--steps=25"]),
        ("finetune", ["--steps=25", "--adapters"]),
        ("transformer_layer", ["--steps=12"]),
    ],
)
def test_learns(example: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = importlib.import_module(example).main(arguments)
    assert after < 0.8 * before
    assert "of FLOPs in FP4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "argument"),
    [
        ("finetune", "--steps=0"),
        ("transformer_layer", "--layers=0"),
        ("dispatch_errors", "--tokens=3"),
        ("serve", "--seeds=0"),
        ("serve", f"--output={Path(__file__).parent}"),
        ("serve", "--output=/dev/null"),
        ("recipe_errors", "--output=/dev/null"),
        ("convergence.tensors", "--at=2"),
        ("convergence.tensors", "--draws=0"),
        ("convergence.tensors", "--tokens=0"),
        ("convergence.tensors", "--data=/dev/null"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    example: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(example).main([argument])
    assert re.search(rf"error: .*{argument.partition('=')[0]}.* must be ", capsys.readouterr().err)


@pytest.mark.filterwarnings("ignore")  # transformers' note that decoded weights were asked for
def test_what_is_served_is_what_trained(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra `export`")
    losses, differences = importlib.import_module("serve").main(["--steps=24", "--seeds=1", f"--output={tmp_path}"])
    assert all(difference < 1e-6 for difference in differences)
    assert set(losses[0]) == {"BF16", "NVFP4", "exported", "longer, exported", "after QAT"}
    assert all(loss < 3.4 for loss in losses[0].values())  # log(32) is 3.47
    assert "loads and agrees: its logits in FP32 differ by 0.0e+00" in capsys.readouterr().out
    assert (tmp_path / "loss.png").stat().st_size > 10_000
