"""What a model multiplies by, and in which formats it is to do so.

Legend: N out_features, K in_features of a linear module's weight [N, K].
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from fp4engine.accounting.table import collapsed, table
from fp4engine.formats import E2M1, TWO_E2M1
from fp4engine.functional import make_linear_plan
from fp4engine.functional.plan import HIGH_PRECISION
from fp4engine.modules import Gemms, GroupedLinear, LayerNormMLP
from fp4engine.modules.borrowed import BorrowedGroupedLinear, BorrowedLinear
from fp4engine.modules.learned_scales import parametrization_of
from fp4engine.modules.torch_attention import TorchMultiheadAttention
from fp4engine.recipe import Recipe
from fp4engine.roles import GEMMS
from fp4engine.state import get_default_recipe

FP4_FORMATS = frozenset(f"{left} x {right}" for left in (E2M1, TWO_E2M1) for right in (E2M1, TWO_E2M1))
"""Formats of a GEMM that is one product of FP4 operands, or the sum of several."""

_ADDED = re.compile(r"(?:^|_)pos(?:ition|itional)?_?(?:emb|enc)|position_bias|(?:^|_)tokens?$")
"""Names of parameters that a model adds, such as ``pos_embed`` and ``position_embeddings`` of vision transformers."""


@dataclass(frozen=True)
class PlannedModule:
    """One linear module of a :class:`ConversionPlan`.

    Attributes:
        name: dotted name in the model; a ``GroupedLinear`` is one module, since a token sees one of its weights.
        shape: (N, K); empty if it has none yet.
        formats: what fprop, dgrad and wgrad multiply, e.g. ``"e2m1 x e2m1"`` or ``"high_precision"``.
        reason: why the module was left alone; empty if it was converted, or is fp4engine's anyway.
    """

    name: str
    shape: tuple[int, ...]
    formats: tuple[str, str, str]
    reason: str = ""

    @property
    def flops_per_token(self) -> int:
        """``2 N K`` for each of the three GEMMs."""
        return 2 * math.prod(self.shape) * len(GEMMS) if self.shape else 0

    @property
    def fp4_flops_per_token(self) -> int:
        """The part of :attr:`flops_per_token` whose operands are both FP4."""
        return self.flops_per_token * sum(formats in FP4_FORMATS for formats in self.formats) // len(GEMMS)


@dataclass(frozen=True)
class PlannedMatrix:
    """A parameter with two dimensions or more, larger than one, that no linear module owns.

    Attributes:
        name: dotted name of the parameter in the model.
        shape: of the parameter; empty if it has none yet.
        reason: why nothing was planned for it.
    """

    name: str
    shape: tuple[int, ...]
    reason: str

    @property
    def flops_per_token(self) -> int:
        """``2 prod(shape)`` for each of the three GEMMs, as if every token were multiplied by all of it."""
        return 2 * math.prod(self.shape) * len(GEMMS) if self.shape else 0


@dataclass(frozen=True)
class ConversionPlan:
    """What :func:`~fp4engine.convert` did, module by module; ``print(plan)`` shows it as a table with a row per kind.

    Attributes:
        modules: every linear module of the model, in the model's order, those inside ``LayerNormMLP`` and its like too.
        matrices: every other parameter that the model may multiply by, such as the experts of a mixture that are one
            parameter [experts, N, K]. Left out are an ``nn.Embedding`` that no linear module shares, which is looked
            up, and what is called a position embedding, a relative position bias or a token, which is added.
    """

    modules: tuple[PlannedModule, ...]
    matrices: tuple[PlannedMatrix, ...] = ()

    @property
    def converted(self) -> tuple[PlannedModule, ...]:
        """The modules that follow the recipe."""
        return tuple(module for module in self.modules if not module.reason)

    @property
    def left_alone(self) -> tuple[PlannedModule, ...]:
        """The modules that stayed what they were, each with its reason."""
        return tuple(module for module in self.modules if module.reason)

    @property
    def fp4_share(self) -> float:
        """FLOPs of FP4 GEMMs over FLOPs of all GEMMs with weights, every module and matrix seeing every token once.

        A parameter does not tell how many of its experts a token sees, so :attr:`matrices` count whole: the share is
        then a lower bound. ``executed_gemms(model, step)`` counts what really runs. NaN without FLOPs, or if a module
        or a matrix has no shape yet.
        """
        total = sum(item.flops_per_token for item in (*self.modules, *self.matrices))
        if not total or not all(item.shape for item in (*self.modules, *self.matrices)):
            return math.nan
        return sum(module.fp4_flops_per_token for module in self.modules) / total

    @property
    def summary(self) -> str:
        """One line: how many modules, how many matrices outside them, and the share of FLOPs in FP4."""
        begin = f"{len(self.converted)} of {len(self.modules)} linear modules converted, "
        share = f"{self.fp4_share:.1%} of"
        if math.isnan(self.fp4_share):
            share = "an unknown share of" if any(module.fp4_flops_per_token for module in self.modules) else "no"
        if not self.matrices:
            return f"{begin}{share} linear FLOPs planned in FP4"
        return (
            f"{begin}{len(self.matrices)} other matrices left alone, "
            f"{share} FLOPs planned in FP4 if every token meets every matrix"
        )

    def __str__(self) -> str:
        rows = [(m.name, " x ".join(map(str, m.shape)), *m.formats, m.reason) for m in self.modules]
        text = table(("module", "N x K", *GEMMS, "left alone because"), collapsed(rows))
        if self.matrices:
            others = [(m.name, " x ".join(map(str, m.shape)), m.reason) for m in self.matrices]
            text += "\n" + table(("other matrix", "shape", "left alone because"), collapsed(others))
        return f"{text}\n{self.summary}"


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear | Gemms]]:
    """What multiplies by a weight, by its name in the model; of a ``GroupedLinear``, the first of its equals."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            first = module.gemms[0]
            assert isinstance(first, Gemms)
            yield name, first
        elif isinstance(module, nn.Linear) or (isinstance(module, Gemms) and module.module_type == "linear"):
            yield name, module


def other_matrices(model: nn.Module) -> dict[str, PlannedMatrix]:
    """Every parameter by which the model may multiply outside its linear modules, by name."""
    owned: set[int] = set()
    modules = list(model.named_modules())  # walked once: at each walk PEFT's attention makes its parameters anew
    for _, module in modules:
        if isinstance(module, (nn.Linear, Gemms, GroupedLinear, LayerNormMLP, nn.Embedding, nn.EmbeddingBag)):
            owned.update(id(parameter) for parameter in module.parameters(recurse=False))
        if isinstance(module, (BorrowedLinear, BorrowedGroupedLinear)):
            owned.update(id(parameter) for parameter in module.borrowed())
        if isinstance(module, (nn.Linear, Gemms)) and (chain := parametrization_of(module)) is not None:
            owned.update(id(parameter) for parameter in chain.parameters(recurse=False))  # its weight is computed from
    found: dict[str, PlannedMatrix] = {}
    parameters = (pair for prefix, module in modules for pair in module.named_parameters(prefix, recurse=False))
    for name, parameter in parameters:
        if id(parameter) in owned:
            continue
        owned.add(id(parameter))
        lazy = is_lazy(parameter)
        shape = () if lazy else tuple(parameter.shape)
        if (not lazy and sum(size > 1 for size in shape) < 2) or _ADDED.search(name.rpartition(".")[2]):
            continue
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        found[name] = PlannedMatrix(name, shape, f"{kind} is no nn.Linear")
    return found


def linear_shape(module: nn.Linear | Gemms) -> tuple[int, int]:
    """(N, K)."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    rows, cols = module.shape
    return rows, cols


def plan_module(
    name: str, module: nn.Linear | Gemms, reason: str, recipe: Recipe | None, seen_as: str | None = None
) -> PlannedModule:
    """What ``module`` multiplies under ``recipe``, its own recipe, or the default one.

    Args:
        seen_as: the name that recipes are about to see; None is the one that they see now.

    Raises:
        ValueError: as :meth:`fp4engine.modules.Gemms.name_for`, where recipes see the name that the module has.
    """
    formats = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)
    weight = module._parameters.get("weight")
    if weight is not None and is_lazy(weight):
        return PlannedModule(name, (), formats, reason)
    shape = linear_shape(module)
    if isinstance(module, Gemms):
        recipe = recipe or module.recipe or get_default_recipe()
        called = module.name_for(recipe) if seen_as is None else seen_as
        plan = make_linear_plan(recipe, module.module_type, called, shape).formats
        formats = (plan["fprop"], plan["dgrad"], plan["wgrad"])
    return PlannedModule(name, shape, formats, reason)


def is_never_called(model: nn.Module) -> set[nn.Module]:
    """Linear modules whose weight another module reads without calling them: forward hooks do not see them."""
    attention = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return {module.out_proj for module in attention if not isinstance(module, TorchMultiheadAttention)}
