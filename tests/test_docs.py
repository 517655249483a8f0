"""Every code block in README.md and docs/ works.

Each ```python block runs alone, as a reader would paste it. One whose first line names a file, `# model.py`, is saved
as that, and blocks below it may import it. ```bash blocks are not run; the files and make targets they name must exist.
So must the files that a page links to, the names of this package that it quotes, and all that is public on the page
that is made from docstrings.
"""

import importlib
import inspect
import linecache
import os
import pkgutil
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from fp4engine import recipe

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [
    REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("research/*.md")),
]  # fmt: skip
SAVED = re.compile(r"# (?P<stem>\w+)\.py\n")
"""First line of a block that is a module of its page's others."""
PUBLIC = (
    "fp4engine", "fp4engine.recipe", "fp4engine.inspect", "fp4engine.estimate", "fp4engine.export", "fp4engine.formats",
    "fp4engine.integrations", "fp4engine.testing", "fp4engine.accounting", "fp4engine.compare", "fp4engine.distributed",
)  # fmt: skip
"""Modules all of whose names are public."""
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^`\n]*)$")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|md|toml|lock|txt|json|sh|yaml)")
MADE_BY_RUNNING = ("runs/", "docs/_build/")
OF_THE_READER = ("config.json", "mine.json")
"""Files that a reader brings along."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
QUOTED_PATH = re.compile(r"`((?:fp4engine|tests|docs|examples|benchmarks|tools)/[\w./-]*)`")
QUOTED_NAME = re.compile(r"`(fp4engine(?:\.\w+)+)[`(]")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of code, from 1."""

    language: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    opened: re.Match[str] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, body = fence, []
        elif fence and fence["ticks"] == opened["ticks"] and not fence["language"].strip():
            yield Block(opened["language"].strip(), "\n".join(body) + "\n", number - len(body))
            opened = None
        else:
            body.append(line.removeprefix(opened["indent"]))
    assert opened is None, "a code fence is never closed"


def run_page(path: Path, text: str) -> None:
    """Run the page's python blocks; tracebacks name the page and its own line numbers."""
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    names = {"__docs_page__"}
    try:
        for block in blocks(text):
            if block.language != "python":
                continue
            saved = SAVED.match(block.code)
            module = types.ModuleType(saved["stem"] if saved else "__docs_page__")
            names.add(module.__name__)
            sys.modules[module.__name__] = module  # dataclasses and pickling look their module up
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
    finally:
        for name in names:
            sys.modules.pop(name, None)


def missing_names(block: Block, targets: set[str]) -> list[str]:
    """Files and make targets that a bash block names and the repository lacks."""
    missing: list[str] = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            missing += [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word) and word not in targets]
        files = [word for word in words if FILE.fullmatch(word) and not word.startswith(MADE_BY_RUNNING)]
        missing += [word for word in files if word not in OF_THE_READER and not (REPOSITORY / word).exists()]
    return missing


def missing_paths(path: Path, text: str) -> list[str]:
    """Files that a page links to, or quotes by their path in the repository, and that are not there.

    To Sphinx a link to a Markdown file is one to another page of the documentation, so a page in docs may only quote
    the path of Markdown that lies elsewhere.
    """
    links = [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    if path.is_relative_to(DOCS):
        pages = [(path.parent / link).resolve() for link in LINK.findall(text) if link.endswith(".md")]
        links += [os.path.relpath(page, path.parent) for page in pages if not page.is_relative_to(DOCS)]
    quoted = [name for name in QUOTED_PATH.findall(text) if not name.startswith(MADE_BY_RUNNING)]
    return links + [name for name in quoted if not (REPOSITORY / name).exists()]


def missing_attributes(text: str) -> list[str]:
    """Quoted names `fp4engine.…` that are neither a module of the package nor something inside one."""
    missing: list[str] = []
    for name in QUOTED_NAME.findall(text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.no_poison  # a page may trace a model or capture a graph
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    for block in blocks(text):
        assert block.language not in ("py", "python3", "pycon"), (
            f"{path}:{block.line}: write ```python, so that it runs"
        )
        if block.language in ("bash", "sh", "console"):
            assert not (missing := missing_names(block, make_targets())), f"{path}:{block.line}: no such {missing}"
    assert not (missing := missing_paths(path, text)), f"{path}: no such file {missing}"
    assert not (missing := missing_attributes(text)), f"{path}: no such name {missing}"
    monkeypatch.chdir(tmp_path)  # a page may write files
    monkeypatch.setattr(recipe.zoo, "ZOO", dict(recipe.zoo.ZOO))  # and add a row
    run_page(path, text)


def test_blocks_run_alone_but_for_saved_ones_and_keep_line_numbers(tmp_path: Path) -> None:
    first, second = "# saved.py\nx = 1", "  from saved import x\n  raise ValueError(x)"
    page = f"one\n```python\n{first}\n```\ntwo\n\n  ```python\n{second}\n  ```\n"
    path = tmp_path / "page.md"
    with pytest.raises(ValueError, match="1") as raised:
        run_page(path, page)
    assert (str(raised.traceback[-1].path), raised.traceback[-1].lineno + 1) == (str(path), 10)
    assert "saved" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="saved"):
        run_page(path, page.replace("# saved.py", "# a comment"))
    with pytest.raises(NameError, match="'x'"):
        run_page(path, page.replace("from saved import x", "# nothing is imported"))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_the_reference_page_and_says_what_it_raises(module: str) -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text()
    owner = importlib.import_module(module)
    for name in owner.__all__:
        if name == "__version__" or inspect.ismodule(getattr(owner, name)):
            continue
        assert re.search(rf"\b{name}\b", page), f"{module}.{name} is not in docs/reference.md"
        value = getattr(owner, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, f"{module}.{name} has no docstring"
        if inspect.isfunction(value) and re.search(r"^\s+raise ", inspect.getsource(value), re.MULTILINE):
            assert "Raises:" in (value.__doc__ or ""), f"{module}.{name} does not say what it raises"


def test_the_table_of_flags_has_every_argument_that_a_flag_sets() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    written = set(re.findall(r"^\| `(\w+)` \| `(NVTE_\w+)` \|", page, re.MULTILINE))
    recipes = [value for value in vars(recipe).values() if isinstance(value, type) and issubclass(value, recipe.Recipe)]
    read = {(f.name, f.metadata["flag"]) for kind in recipes for f in fields(kind) if "flag" in f.metadata}
    assert written == read


def test_missing_names_are_found() -> None:
    block = Block(
        "bash", "make train ARGS='--help'\nmake nothing -j2  # make this\npython gone/away.py --data runs/a.json\n", 1
    )
    assert missing_names(block, {"train"}) == ["nothing", "gone/away.py"]


def test_missing_paths_and_attributes_are_found() -> None:
    page = "[a](docs/index.md#x) [b](gone.md) [c](https://d.e) `fp4engine/gone.py` `runs/x` `fp4engine/ops/gemm.py`"
    assert missing_paths(REPOSITORY / "README.md", page) == ["gone.md", "fp4engine/gone.py"]
    assert missing_paths(DOCS / "index.md", "[a](../README.md) [b](index.md)") == ["../README.md"]
    assert missing_paths(DOCS / "research/index.md", "[a](../../README.md) [b](../index.md)") == ["../../README.md"]
    assert missing_attributes("`fp4engine.ops.gemm` `fp4engine.Linear(3)` `fp4engine.gone.x`") == ["fp4engine.gone.x"]


def test_the_two_commands_of_the_readme_are_there() -> None:
    bash = "".join(block.code for block in blocks(PAGES[0].read_text()) if block.language == "bash")
    assert "make train" in bash and "make test" in bash
