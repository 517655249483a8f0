"""python tools/mutate.py --mutants 30 --seed 1      does a test fall when a line of the middle is wrong?

Changes one place at a time, drawn at random, in a copy of the tree: an operator, a constant, a condition, the order of
two arguments, or a statement that goes. Then tests are run until one falls, those that should fall first. A mutant that
survives is printed: either it means the same, or a test is missing.
"""

import argparse
import ast
import difflib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import hypothesis  # noqa: F401  # imported once, so that a mutant costs seconds; not Triton, which a flag changes
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
MIDDLE = (
    "fp4engine/functional",
    "fp4engine/ops",
    "fp4engine/quantizers",
    "fp4engine/modules/gemms.py",
    "fp4engine/modules/recompute.py",
    "fp4engine/modules/shared_weight.py",
    "fp4engine/modules/plans.py",
    "fp4engine/kernels/launch.py",
)
MODULES = [
    *(f"tests/modules/test_{name}.py" for name in ("stale_weights", "weight_cache", "devices", "linear_backward")),
    *("tests/unit/test_regions.py", "tests/unit/quantizers", "tests/unit/recipe/test_fp8.py", "tests/unit/functional"),
    *("tests/modules/test_checkpoint.py",),
]
OPERATIONS = [
    "tests/unit/ops",
    "tests/unit/tensor",
    "tests/unit/test_state.py",
    "tests/modules/test_linear_backward.py",
]
KERNELS = ["tests/unit/kernels/test_launch.py", "tests/parity/test_draw_kernel.py"]
REST: list[tuple[str, list[str]]] = [
    (
        "interpret",
        [f"tests/parity/test_{name}.py" for name in ("linear_kernel", "grouped_kernels", "fused_modules_on_kernels")],
    ),
    ("pytest", ["-m", "not slow", "tests/distributed/test_two_processes.py", "tests/modules", "tests/unit"]),
]
"""Minutes, for what survives the tests of its own place."""
SWAPS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Mod: ast.FloorDiv,
}  # fmt: skip


def mutations(tree: ast.Module) -> list[tuple[ast.AST, Callable[[], None]]]:
    """Every place that can be changed, and what changes it in ``tree``."""
    found: list[tuple[ast.AST, Callable[[], None]]] = []

    def replace(node: ast.AST, field: str, value: object) -> None:
        found.append((node, lambda: setattr(node, field, value)))

    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS and not is_annotation(node):
            replace(node, "op", SWAPS[type(node.op)]())
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            replace(node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]])
        elif isinstance(node, ast.If | ast.IfExp):
            replace(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            replace(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
            replace(node, "args", [node.args[1], node.args[0], *node.args[2:]])
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            for place, statement in enumerate(statements if isinstance(statements, list) else []):
                call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
                if call or isinstance(statement, ast.AugAssign | ast.Raise):
                    found.append((statement, lambda s=statements, p=place: s.__setitem__(p, ast.Pass())))
    return [(node, change) for node, change in found if hasattr(node, "lineno")]


def is_annotation(node: ast.BinOp | ast.BoolOp) -> bool:
    """``A | None``: a type, not an operation."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and "None" in ast.unparse(node)


def mutated(source: str, rng: Random) -> tuple[str, str]:
    """The source with one change, and the change in words."""
    tree = ast.parse(source)
    before = ast.unparse(tree)
    node, change = rng.choice(mutations(tree))
    change()
    after = ast.unparse(ast.fix_missing_locations(tree))
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    return after, "\n      ".join([f"{getattr(node, 'lineno', 0)}:", *changed])


def stages(path: str) -> list[tuple[str, list[str]]]:
    """What may fail if ``path`` is wrong, the quickest first: ``("fuzz" | "pytest" | "interpret", arguments)``."""
    interpreted = ("interpret", KERNELS)
    if path.startswith("fp4engine/kernels"):
        return [interpreted, *REST]
    fuzz = ("fuzz", ["--cases", "80"])
    if "grouped" in path:
        return [fuzz, ("interpret", ["tests/parity/test_grouped_kernels.py"]), *REST]
    plain = ("pytest", ["-m", "not slow", *(OPERATIONS if path.startswith("fp4engine/ops") else MODULES)])
    return [fuzz, plain, *([interpreted] if "ops" in path else []), *REST]


def run_stage(copy: Path, stage: str, arguments: list[str], output: Path) -> int:
    """The exit code of a stage, in a process that was forked for it and has not imported fp4engine yet."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if stage == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    if stage == "fuzz":
        from tests.fuzz.__main__ import main

        return main(arguments)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def falls(copy: Path, tried: Iterable[tuple[str, list[str]]], seconds: float) -> str:
    """Which of the stages fails, or hangs; empty if none does."""
    output = copy / "output.txt"
    for stage, arguments in tried:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                code = run_stage(copy, stage, arguments, output)
            finally:
                sys.stdout.flush()
                os._exit(code)
        end, status = time.monotonic() + seconds, None
        while status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            if status is None and time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)  # with the processes that a test started
                os.waitpid(child, 0)
                return f"{stage} hangs"
            time.sleep(0.02)
        if status:
            lines = [line for line in output.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
            return lines[0].split(" - ")[0] if lines else stage
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="number of the first that is tried (default: 1)")
    parser.add_argument("--seconds", type=float, default=900, help="after which a stage counts as hanging")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rng, survivors = Random(arguments.seed), 0
    places = [ROOT / place for place in MIDDLE]
    files = [file for place in places for file in ([place] if place.is_file() else place.glob("*.py"))]
    files = sorted(file for file in files if file.name != "__init__.py")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "_build", "runs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        unlike = (
            "fp4engine/functional",
            "fp4engine/ops",
            "fp4engine/kernels",
            "fp4engine/functional/grouped_linear.py",
        )
        tried = [stage for path in unlike for stage in stages(path) if stage not in REST]
        if fallen := falls(copy, [*tried, *REST], arguments.seconds):
            print(f"{fallen} falls without a change")
            return 1
        for number in range(1, arguments.first + arguments.mutants):
            file = rng.choices(files, [len(file.read_text()) for file in files])[0]
            path, source = str(file.relative_to(ROOT)), file.read_text()
            text, words = mutated(source, rng)
            if number < arguments.first:
                continue
            (copy / path).write_text(text)
            began = time.monotonic()
            verdict = falls(copy, stages(path), arguments.seconds)
            survivors += not verdict
            took = time.monotonic() - began
            print(f"{number:3} {path}:{words}\n    {verdict or 'SURVIVES'} ({took:.0f} s)", flush=True)
            (copy / path).write_text(source)
    print(f"{arguments.mutants} mutants of seed {arguments.seed}, {survivors} survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
