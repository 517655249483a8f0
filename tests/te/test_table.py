"""docs/coming-from-te.md says what there is, name by name and argument by argument."""

import inspect
import re
from pathlib import Path

import pytest

from fp4engine.te import pytorch
from fp4engine.te.common import recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-te.md"
ROW = re.compile(r"^\| `(?P<name>[\w.]+)(?:\((?P<arguments>[\w, ]*)\))?` \| (?P<verdict>.+) \|$", re.MULTILINE)
VERDICTS = ("same", "same name, differs ", "no, ")
PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ROWS = [match.groupdict() for match in ROW.finditer(PAGE.read_text())]


def found(name: str) -> object:
    place, _, rest = name.rpartition(".")
    room = {"": pytorch, "recipe": recipe}.get(place) or getattr(pytorch, place)
    return getattr(room, rest, None)


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 101
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["verdict"] == "same" or row["verdict"].startswith(VERDICTS[1:]), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_what_is_the_same_is_there_with_its_arguments(row) -> None:
    thing = found(row["name"])
    if row["verdict"].startswith("no, "):
        with pytest.raises(AttributeError, match=f"has no '{row['name']}', since {pytorch.ABSENT[row['name']]}"):
            getattr(pytorch, row["name"])
        return
    assert thing is not None
    if row["arguments"] is not None:
        theirs = row["arguments"].split(", ") if row["arguments"] else []
        given = inspect.signature(thing).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in given.values())
        missing = [name for name in theirs if name not in given]
        assert not missing or (takes_any and "raise" in row["verdict"]), missing
        positional = [
            name for name in theirs if name in given and given[name].kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        assert [name for name in given if name in positional] == positional
        if row["name"].startswith("recipe."):
            assert [name for name, parameter in given.items() if parameter.kind in PLACED] == theirs


def test_what_is_exported_is_in_the_table() -> None:
    listed = {row["name"] for row in ROWS}
    assert set(pytorch.__all__) - {"common"} <= listed
    assert {f"recipe.{name}" for name in recipe.__all__} - {"recipe.as_frozen"} <= listed
