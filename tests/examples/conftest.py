from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox; " * (number + 5))
    return folder
