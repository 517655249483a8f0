"""What is installed with the package is what its parts import, and what type checkers see is what they return."""

import ast
import re
import tomllib
import typing
from pathlib import Path

import pytest
from torch import Tensor

import fp4engine

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_library_of_an_integration_is_in_its_extra() -> None:
    imported: set[str] = set()
    for path in (ROOT / "fp4engine" / "integrations").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported.update(name.partition(".")[0] for name in names)
    libraries = imported & {"accelerate", "lightning", "torchao", "transformers"}
    assert {"lightning", "transformers"} <= libraries <= set(PROJECT["optional-dependencies"]["integrations"])


def test_a_bare_install_has_what_pytorch_asks_for_at_import() -> None:
    assert "numpy" in PROJECT["dependencies"]


def test_a_source_distribution_has_what_tests_and_pages_refer_to() -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert set(target) == {"exclude"}, "a list of what goes in would leave out benchmarks, tools and the Makefile"
    assert not [name for name in target["exclude"] if name.strip("/").split("/")[0] in ("benchmarks", "tools", "tests")]


def test_the_changelog_begins_with_the_version_that_is_built() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = re.escape(fp4engine.__version__)
    assert re.fullmatch(rf"Unreleased \({version}\)|{version} \(\d{{4}}-\d\d-\d\d\)", headings[0])


@pytest.mark.parametrize(
    "module", [fp4engine.Linear, fp4engine.LayerNorm, fp4engine.RMSNorm, fp4engine.TransformerLayer]
)
def test_a_module_called_is_a_tensor_to_a_type_checker(module: type) -> None:
    assert typing.get_args(typing.get_type_hints(module)["__call__"])[-1] is Tensor
