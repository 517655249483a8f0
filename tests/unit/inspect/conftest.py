"""The model with planted faults, by the path of its file: tests are imported one by one."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def planted():
    """The module, whose ``make_run`` makes each run once for all tests."""
    spec = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made, make_run = {}, module.make_run

    def make_once(recipe):
        key = recipe.to_json()
        if key not in made:
            made[key] = make_run(recipe)
        return made[key]

    module.make_run = make_once
    return module
