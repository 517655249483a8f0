"""Every test that docs/checklist.md names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def test_named_tests_exist() -> None:
    named = NAMED.findall((TESTS.parent / "docs" / "checklist.md").read_text())
    assert len(named) > 60
    for file, function in named:
        assert f"def {function}(" in (TESTS / file).read_text() or not function, f"{file}::{function}"
