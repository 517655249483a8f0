"""What a linear module needs to know for one forward and its backward, resolved once."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.roles import QuantizerRole

GemmName = Literal["fprop", "dgrad", "wgrad"]
HIGH_PRECISION = "high_precision"


class ExecutedGemms:
    """How often each GEMM of one module ran, by the formats of its operands; eager mode only.

    Attributes:
        counts: ``(gemm, formats) -> times``, e.g. ``("fprop", "e2m1 x e2m1")``; formats is ``"high_precision"``
            where neither operand was quantized.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def record(self, gemm: GemmName, formats: str) -> None:
        """Count one run. Does nothing while ``torch.compile`` traces."""
        if not torch.compiler.is_compiling():
            self.counts[gemm, formats] = self.counts.get((gemm, formats), 0) + 1


@dataclass(frozen=True)
class LinearPlan:
    """Frozen answer to "how does this module compute?".

    Attributes:
        recipe: what it was made from; a module rebuilds its plan when the recipe in force differs by value.
        input, weight, grad_output: the quantizer of each role.
        backward_override: see :class:`~fp4engine.recipe.Recipe`.
        backend: backend of the GEMMs.
        executed: the module's counter.
    """

    recipe: Recipe
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: str | None
    backend: str
    executed: ExecutedGemms = field(compare=False)


def make_linear_plan(recipe: Recipe, module_type: str, name: str, executed: ExecutedGemms) -> LinearPlan:
    """Ask ``recipe`` for the quantizers of a module's three roles, once each."""

    def quantizer(tensor_type: str) -> Quantizer:
        return make_quantizer(recipe, QuantizerRole(module_type, tensor_type, name))

    return LinearPlan(
        recipe,
        quantizer("input"),
        quantizer("weight"),
        quantizer("grad_output"),
        recipe.backward_override,
        recipe.backend,
        executed,
    )
