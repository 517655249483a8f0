"""The small examples run and learn."""

import importlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
