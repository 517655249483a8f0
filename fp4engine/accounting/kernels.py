"""Which casts and products of a recipe kernels would take on a GPU, which need not be here, and why not the others."""

from collections.abc import Iterator

import torch

from fp4engine import capability
from fp4engine.accounting.table import table
from fp4engine.formats import CastSpec
from fp4engine.ops import gemm_fp8
from fp4engine.ops.cast import kernels
from fp4engine.ops.gemm import product_path
from fp4engine.recipe import Recipe, RuledRecipe, ScheduledRecipe
from fp4engine.recipe.linear import GEMM_OPERANDS

DTYPE = torch.bfloat16
"""Dtype of the tensors that are cast, and of the products' results."""


def kernels_of(recipe: Recipe, major: int, minor: int) -> str:
    """A table of the six casts and the three products of ``recipe`` on a GPU of that compute capability, in BF16.

    Raises:
        ValueError: Triton is not installed, which has the kernels; or the casts depend on a function.
    """
    available, reason = capability.triton_available()
    if not available:
        raise ValueError(f"which kernels there are is asked of the kernels, and {reason}")
    lines = [f"on sm_{major}{minor}, of BF16 tensors:"]
    for what, part in _parts("", recipe):
        rows = [row for gemm in GEMM_OPERANDS for row in _rows(part, gemm, capability.stand_in(major, minor))]
        lines += [what, table(("", "", "by"), rows)] if what else [table(("", "", "by"), rows)]
    return "\n".join(lines)


def _parts(what: str, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The recipes that a recipe of recipes consists of, each with where it is in force."""
    if isinstance(recipe, ScheduledRecipe):
        for step, part in recipe.phases:
            yield from _parts(f"{what} from step {step} on", part)
    elif isinstance(recipe, RuledRecipe):
        for rule in recipe.rules:
            yield from _parts(f"{what} by the rule {rule!r}", rule.recipe)
        yield from _parts(f"{what} elsewhere", recipe.default)
    else:
        yield what.strip(), recipe


def _rows(recipe: Recipe, gemm: str, device: torch.device) -> Iterator[tuple[str, str, str]]:
    specs: list[CastSpec | None] = []
    for role, side in GEMM_OPERANDS[gemm]:
        casts = recipe.casts(role)
        spec = casts.rowwise if side == "rowwise" else casts.columnwise
        if recipe.backward_override is not None and gemm != "fprop":
            spec = None  # the product reads the tensor, or what its rowwise operand decodes to
        specs.append(spec)
        able, reason = (True, "") if spec is None else kernels().supports(spec, DTYPE)
        runs, older = capability.triton_runs_on(device)
        by = "no cast" if spec is None else _by("a kernel", able and runs, reason or older)
        yield gemm, f"{role} {side}: {'high precision' if spec is None else spec.label}", by
    left, right = ("" if spec is None else spec.key for spec in specs)
    yield gemm, "product", _product(left, right, device, recipe.backend)


def _product(left: str, right: str, device: torch.device, backend: str) -> str:
    if not left and not right:
        return "PyTorch"
    fp8, _ = gemm_fp8.supports(left, right, device)
    if fp8 and backend in ("auto", "native"):
        return "FP8 tensor cores"
    if backend in ("auto", "native") and left and right and gemm_fp8.multiplies_blocks(left, right, device):
        return "FP8 tensor cores"
    plain = None if left and right else DTYPE
    path, reason, _, _ = product_path(left, right, True, DTYPE, device, backend, plain)
    if path == "native":
        return "FP4 tensor cores"
    return _by("a kernel on BF16 or FP16 tensor cores", path == "triton", reason)


def _by(kernel: str, able: bool, reason: str) -> str:
    return kernel if able else f"the reference: {reason}"
