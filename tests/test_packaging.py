"""What is installed with the package is what its parts import, and what type checkers see is what they return."""

import ast
import re
import tomllib
import typing
from pathlib import Path

import pytest
import yaml
from torch import Tensor

import fp4engine

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, HATCH = PYPROJECT["project"], PYPROJECT["tool"]["hatch"]


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
    assert set(HATCH["build"]["targets"]) == {"wheel"}, "a list for the sdist would leave out what a test or page names"
    ignored = set((ROOT / ".gitignore").read_text().split())
    assert {".venv", "runs/", "dist/", "build/", "docs/_build/", "__pycache__/"} <= ignored


def test_a_wheel_has_the_package_and_its_marker_of_types_alone() -> None:
    assert HATCH["build"]["targets"]["wheel"] == {"packages": ["fp4engine"]}
    assert (ROOT / "fp4engine" / "py.typed").exists()


def test_version_date_and_licence_are_said_alike_everywhere() -> None:
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = re.escape(fp4engine.__version__)
    said = re.fullmatch(rf"Unreleased \({version}\)|{version} \((\d{{4}}-\d\d-\d\d)\)", heading[1] if heading else "")
    assert said, "the changelog begins with the version that is built"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = citation.get("date-released")
    assert (str(released) if released else None) == said[1]
    assert (citation["title"], citation["version"]) == (PROJECT["name"], fp4engine.__version__)
    assert (citation["license"], citation["keywords"]) == (PROJECT["license"], PROJECT["keywords"])
    assert citation["abstract"].rstrip(".") == PROJECT["description"]
    assert citation["authors"] == PROJECT["authors"]


def test_the_example_that_a_release_has_to_run_is_the_readmes_only_one() -> None:
    assert re.findall(r"^```(\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE).count("python") == 1


@pytest.mark.parametrize(
    "module", [fp4engine.Linear, fp4engine.LayerNorm, fp4engine.RMSNorm, fp4engine.TransformerLayer]
)
def test_a_module_called_is_a_tensor_to_a_type_checker(module: type) -> None:
    assert typing.get_args(typing.get_type_hints(module)["__call__"])[-1] is Tensor
