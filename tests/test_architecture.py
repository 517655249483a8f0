"""Layers: every import in the package points down the table below, function-level imports included.

Why each rule exists is told in docs/design.md. To add a top-level module, give it a rank here. Beside layers: who reads
the environment, who imports Triton, and that no tensor takes PyTorch's default dtype unawares.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "fp4engine"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

LAYERS = (
    # low to high; a module imports only from lower rows, and from its own sub-package
    "constants version arguments environment capability roles names positions private formats steps files",
    "recipe reference kernels",
    "ops",
    "tensor",
    "quantizers",
    "functional state",
    "modules",
    "accounting checkpoint_names",
    "convert checkpoint distributed frozen_weights inspect doctor export integrations optimizer_hooks qat",
    "testing estimate",
    "te compare",
    "quantization advice",
    "cli",
    "__main__",
)
RANKS = {name: rank for rank, row in enumerate(LAYERS) for name in row.split()}

SIDEWAYS = {
    ("integrations", "convert"),  # an integration is convert in another library's words
    ("export", "convert"),  # the command line converts the model whose files it exports
    ("qat", "convert"),  # quantization-aware training converts the model, and stores its weights in the end
    ("qat", "frozen_weights"),
    ("frozen_weights", "integrations"),  # stored weights of a model of transformers are for its save_pretrained
    ("formats", "arguments"),  # what a preset is asked is checked as everywhere
    ("formats", "constants"),  # formats are data about constants
    ("capability", "environment"),  # whether kernels run on the CPU is asked of TRITON_INTERPRET
    ("environment", "private"),  # whether flags count is a constant for torch.compile, which cannot trace a ContextVar
}
"""The only imports allowed between two modules of one row."""

ENVIRONMENT_READER = "environment"
TRITON_IMPORTER = "kernels"
FACTORIES = ("empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
"""Functions of PyTorch's whose result has the default dtype unless another is named."""


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    root: Path

    @property
    def module(self) -> str:
        parts = self.path.relative_to(self.root).with_suffix("").parts
        return ".".join((PACKAGE, *(part for part in parts if part != "__init__")))

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @property
    def top(self) -> str:
        """Name in the layer table; empty for the package's own __init__."""
        return [*self.module.split("."), ""][1]

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), str(self.path))

    def where(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(self.root.parent)}:{getattr(node, 'lineno', 0)}"


def sources(root: Path) -> list[Source]:
    return [Source(path, root) for path in sorted(root.rglob("*.py"))]


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names of everything imported anywhere in the file, `from a import b` as `a.b`."""
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = source.package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            callee = ast.unparse(node.func)
            first = node.args[0]
            literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if literal and callee.rpartition(".")[2] in ("import_module", "__import__"):
                yield node, first.value


def layer_faults(root: Path) -> list[str]:
    faults: list[str] = []
    for source in sources(root):
        if source.top == "":
            continue  # the package's __init__ gathers names from everywhere
        if source.top not in RANKS:
            faults.append(f"{source.path.name}: {source.top!r} has no rank; add it to LAYERS in {Path(__file__).name}")
            continue
        for node, name in imports(source):
            parts = name.split(".")
            if parts[0] != PACKAGE:
                continue
            target = parts[1] if len(parts) > 1 else ""
            if target == source.top or (source.top, target) in SIDEWAYS:
                continue
            if target not in RANKS:
                faults.append(f"{source.where(node)}: imports {name}, which belongs to no layer")
            elif RANKS[target] > RANKS[source.top]:
                faults.append(f"{source.where(node)}: {source.top} (row {RANKS[source.top]}) imports up: {name}")
            elif RANKS[target] == RANKS[source.top]:
                faults.append(f"{source.where(node)}: {source.top} imports its sibling: {name}")
    return faults


def environment_faults(root: Path) -> list[str]:
    faults: list[str] = []
    readers = ("environ", "environb", "getenv", "getenvb")
    for source in sources(root):
        if source.top == ENVIRONMENT_READER:
            continue
        for node in ast.walk(source.tree()):
            attribute = isinstance(node, ast.Attribute) and node.attr in readers and ast.unparse(node.value) == "os"
            imported = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in readers for a in node.names)
            )
            if attribute or imported:
                faults.append(f"{source.where(node)}: reads the process environment; ask {ENVIRONMENT_READER}.py")
    return faults


def triton_faults(root: Path) -> list[str]:
    return [
        f"{source.where(node)}: imports {name}; only {TRITON_IMPORTER}/ may"
        for source in sources(root)
        if source.top != TRITON_IMPORTER
        for node, name in imports(source)
        if name.split(".")[0] == "triton"
    ]


def default_dtype_faults(root: Path) -> list[str]:
    """Tensors made with the dtype that ``torch.set_default_dtype`` last set."""
    return [
        f"{source.where(node)}: {ast.unparse(node.func)} has the default dtype; name one"
        for source in sources(root)
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        if not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    ]


@pytest.mark.parametrize("rule", [layer_faults, environment_faults, triton_faults, default_dtype_faults])
def test_the_package_keeps_its_layers(rule) -> None:
    assert sources(ROOT)
    assert not (faults := rule(ROOT)), "\n".join(["", *faults])


@pytest.mark.parametrize(
    ("rule", "file", "code", "expected"),
    [
        (layer_faults, "ops/gemm.py", "from fp4engine.reference import gemm", None),
        (layer_faults, "ops/gemm.py", "from fp4engine.ops.registry import pick", None),
        (layer_faults, "ops/gemm.py", "from .registry import pick", None),
        (layer_faults, "formats/elements.py", "from fp4engine import constants", None),
        (layer_faults, "__init__.py", "from fp4engine.testing import x", None),
        (layer_faults, "ops/gemm.py", "from fp4engine.tensor import QuantizedTensor", "imports up"),
        (layer_faults, "ops/gemm.py", "from ..modules import Linear", "imports up"),
        (layer_faults, "ops/gemm.py", "def f():\n    import fp4engine.state", "imports up"),
        (layer_faults, "ops/gemm.py", "import importlib\nimportlib.import_module('fp4engine.state')", "imports up"),
        (layer_faults, "reference/cast.py", "from fp4engine.kernels import cast", "its sibling"),
        (layer_faults, "constants.py", "from fp4engine.formats import E2M1", "its sibling"),
        (layer_faults, "modules/linear.py", "from fp4engine import Linear", "belongs to no layer"),
        (layer_faults, "modules/linear.py", "import fp4engine", "belongs to no layer"),
        (layer_faults, "utils.py", "", "has no rank"),
        (environment_faults, "environment.py", "import os\nos.environ.get('X')", None),
        (environment_faults, "recipe/flags.py", "import os\nos.environ['X']", "reads the process environment"),
        (environment_faults, "recipe/flags.py", "from os import getenv", "reads the process environment"),
        (triton_faults, "kernels/cast.py", "import triton.language as tl", None),
        (triton_faults, "ops/gemm.py", "def f():\n    from triton import jit", "only kernels/ may"),
        (default_dtype_faults, "ops/gemm.py", "torch.ones(1, dtype=torch.float32)", None),
        (default_dtype_faults, "ops/gemm.py", "torch.empty(rows, cols, **place)", None),
        (default_dtype_faults, "ops/gemm.py", "torch.arange(8)", None),
        (default_dtype_faults, "ops/gemm.py", "scale = torch.tensor([amax], device=x.device)", "has the default dtype"),
    ],
)
def test_the_rules_see_what_they_should(rule, file: str, code: str, expected: str | None, tmp_path: Path) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    faults = rule(tmp_path / PACKAGE)
    assert (len(faults) == 1 and expected in faults[0]) if expected else not faults
