import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files that no test changes."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox; " * (number + 5))
    return folder


@pytest.fixture
def texts(shared_texts: Path, tmp_path: Path) -> Path:
    """Text files of the test's own."""
    return shutil.copytree(shared_texts, tmp_path / "texts")
