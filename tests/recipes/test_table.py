"""The table in docs/recipes.md says what the recipe book says."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "recipe_table.py"


def test_the_page_has_the_table_of_the_book() -> None:
    spec = importlib.util.spec_from_file_location("recipe_table", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.BEGIN + tool.table() + tool.END in tool.PAGE.read_text(), "run python tools/recipe_table.py --write"
