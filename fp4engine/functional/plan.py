"""What a linear module needs to know for one forward and its backward, resolved once."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fp4engine.formats import CastSpec
from fp4engine.kernels.tape import Tapes, note
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.roles import QuantizerRole

GemmName = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[GemmName, ...] = get_args(GemmName)
HIGH_PRECISION = "high_precision"


class ExecutedGemms:
    """How often each GEMM of one module ran, by the formats of its operands; eager mode only.

    Attributes:
        counts: ``(gemm, formats) -> times``, e.g. ``("fprop", "e2m1 x e2m1")``; see :func:`operand_formats`.
        flops: ``(gemm, formats) -> 2 M N K``, summed over those times.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.flops: dict[tuple[str, str], int] = {}

    def record(self, gemm: GemmName, formats: str, flops: int) -> None:
        """Count one run. Does nothing while ``torch.compile`` traces."""
        if not torch.compiler.is_compiling():
            note(self._count, (gemm, formats), flops)
            self._count((gemm, formats), flops)

    def _count(self, key: tuple[str, str], flops: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1
        self.flops[key] = self.flops.get(key, 0) + flops

    def record_high_precision(self, inp: Tensor, weight: Tensor) -> None:
        """Count the fprop of ``inp [..., K] @ weight [N, K].T``, and the GEMMs that autograd will run for it."""
        flops = 2 * inp.numel() * weight.shape[0]
        self.record("fprop", HIGH_PRECISION, flops)
        if torch.is_grad_enabled():
            if inp.requires_grad:
                self.record("dgrad", HIGH_PRECISION, flops)
            if weight.requires_grad:
                self.record("wgrad", HIGH_PRECISION, flops)


def operand_formats(left: CastSpec | None, right: CastSpec | None) -> str:
    """Element formats of a GEMM's operands, e.g. ``"e2m1 x e2m1"``; ``"high_precision"`` if neither is quantized."""
    if left is None and right is None:
        return HIGH_PRECISION
    return " x ".join("high" if spec is None else spec.element.name for spec in (left, right))


@dataclass(frozen=True)
class LinearPlan:
    """Frozen answer to "how does this module compute?".

    Attributes:
        recipe: what it was made from; a module rebuilds its plan when the recipe in force differs by value.
        input, weight, grad_output: the quantizer of each role.
        backward_override: see :class:`~fp4engine.recipe.Recipe`.
        backend: backend of the GEMMs.
        executed: the module's counter.
        amax_reduction_group: process group whose ranks share outer amaxes, or None.
        fast_accumulation: FP8 GEMMs that may use the tensor core's shorter accumulator.
        tapes: what its forwards and backwards launched, by problem; None if the same problem may launch something else.
        draws_in_backward: whether a backward pass takes a draw; one serves both GEMMs, whose streams differ by role
            and side.
    """

    recipe: Recipe
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: str | None
    backend: str
    executed: ExecutedGemms = field(compare=False)
    amax_reduction_group: Any = None
    fast_accumulation: frozenset[GemmName] = frozenset()
    tapes: Tapes | None = field(default=None, compare=False, repr=False)
    draws_in_backward: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sources = [q for q in (self.input, self.weight) if q.columnwise_source == "rowwise_dequantized"]
        stochastic = any(quantizer.is_stochastic for quantizer in (self.grad_output, *sources))
        object.__setattr__(self, "draws_in_backward", stochastic and self.backward_override is None)

    @property
    def formats(self) -> dict[GemmName, str]:
        """What each GEMM multiplies, in the words of :func:`operand_formats`."""
        inp, weight, grad_output = self.input, self.weight, self.grad_output
        fprop = operand_formats(inp.rowwise_spec, weight.rowwise_spec)
        if self.backward_override is not None:
            return {"fprop": fprop, "dgrad": HIGH_PRECISION, "wgrad": HIGH_PRECISION}
        return {
            "fprop": fprop,
            "dgrad": operand_formats(grad_output.rowwise_spec, weight.columnwise_spec),
            "wgrad": operand_formats(grad_output.columnwise_spec, inp.columnwise_spec),
        }


def make_linear_plan(
    recipe: Recipe,
    module_type: str,
    name: str,
    executed: ExecutedGemms,
    amax_reduction_group: Any = None,
    shape: tuple[int, ...] = (),
    memory: dict[str, Any] | None = None,
) -> LinearPlan:
    """Ask ``recipe`` for the quantizers of a module's three roles, once each.

    Args:
        shape: shape of the module's weight, which rules may ask for.
        memory: the module's own, for quantizers that remember earlier steps.
    """
    own = recipe.of(QuantizerRole(module_type, "", name, shape))

    def quantizer(tensor_type: str) -> Quantizer:
        made = make_quantizer(own, QuantizerRole(module_type, tensor_type, name, shape))
        return made if memory is None else made.remembering_in(memory, tensor_type)

    quantizers = (quantizer("input"), quantizer("weight"), quantizer("grad_output"))
    repeats = amax_reduction_group is None and all(made.only_casts for made in quantizers)
    return LinearPlan(
        recipe,
        *quantizers,
        own.backward_override,
        own.backend,
        executed,
        amax_reduction_group,
        frozenset(gemm for gemm in GEMMS if not own.mm_params(gemm).use_split_accumulator),
        Tapes(most=64) if repeats else None,
    )
