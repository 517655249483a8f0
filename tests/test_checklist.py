"""Every test that docs/research/checklist.md names is there, and no test of the suite is one that cannot fail."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
CHECKS = re.compile(r"assert|raises|warns|^fail$|^check|^refusal$|gradcheck|opcheck|set_sync_debug_mode")
"""Names of what fails by itself: pytest's and PyTorch's functions, and helpers that tests import."""


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def can_fail(function: ast.FunctionDef, others: dict[str, ast.FunctionDef], asked: frozenset[str]) -> bool:
    """Whether ``function`` asserts something, raises, or uses what does, among ``others`` or by its name."""
    used = {argument.arg for argument in function.args.args}  # fixtures
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            used.add(node.id if isinstance(node, ast.Name) else node.attr)
    if any(CHECKS.search(name) for name in used):
        return True
    return any(can_fail(others[name], others, asked | used) for name in used - asked if name in others)


def test_named_tests_are_there() -> None:
    named = NAMED.findall((TESTS.parent / "docs" / "research" / "checklist.md").read_text())
    assert len(named) > 60
    for file, function in named:
        assert not function or function in functions_of(TESTS / file), f"{file}::{function}"


def test_no_test_is_one_that_cannot_fail() -> None:
    """Of a test that only runs code, nobody knows what it holds."""
    hollow = []
    for path in sorted(TESTS.rglob("test_*.py")):
        functions = functions_of(path)
        for name, function in functions.items():
            if name.startswith("test_") and not can_fail(function, functions, frozenset({name})):
                hollow.append(f"{path.relative_to(TESTS)}::{name}")
    assert not hollow, "tests without an assertion: " + ", ".join(hollow)


def test_a_hollow_test_is_found() -> None:
    source = "def helper(x): return x\ndef test_a(): helper(1)\ndef check(x): assert x\ndef test_b(): check(1)\n"
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert [can_fail(functions[name], functions, frozenset()) for name in ("test_a", "test_b")] == [False, True]
