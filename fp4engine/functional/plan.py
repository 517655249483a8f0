"""What a linear module needs to know for one forward and its backward, found once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp4engine.formats import CastSpec, Correction, Outer
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import Recipe
from fp4engine.recipe.linear import role_complaints, sum_complaints
from fp4engine.roles import GEMMS, TENSOR_TYPES, GemmName, QuantizerRole

HIGH_PRECISION = "high_precision"
_HIGH_PRECISION = dict.fromkeys(GEMMS, HIGH_PRECISION)


class ExecutedGemms:
    """How often each GEMM of one module ran, by the formats of its operands; eager mode only.

    Attributes:
        counts: ``(gemm, formats) -> times``, e.g. ``("fprop", "e2m1 x e2m1")``; see :func:`operand_formats`.
        flops: ``(gemm, formats) -> 2 M N K``, summed over those times.
        by_torch: ``gemm -> FLOPs`` that :meth:`record_high_precision` counted; PyTorch's counter counts them as well.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.flops: dict[tuple[str, str], int] = {}
        self.by_torch: dict[str, int] = {}

    def record(self, formats: Mapping[GemmName, str], flops: int, *gemms: GemmName) -> None:
        """Count one run of each of ``gemms``, of ``flops`` FLOPs each.

        Does nothing while ``torch.compile`` traces, nor where ``torch.export`` or ``make_fx`` traces symbolic sizes.
        """
        if torch.compiler.is_dynamo_compiling() or not isinstance(flops, int):
            return
        for gemm in gemms:
            key = (gemm, formats[gemm])
            self.counts[key] = self.counts.get(key, 0) + 1
            self.flops[key] = self.flops.get(key, 0) + flops

    def record_high_precision(self, inp: Tensor, out_features: int, trains: bool) -> None:
        """Count the fprop of ``inp [..., K] @ weight [N, K].T``, and the GEMMs that autograd will run for it.

        Args:
            out_features: N.
            trains: whether the weight needs a gradient.
        """
        flops = 2 * inp.numel() * out_features
        if torch.compiler.is_dynamo_compiling() or not isinstance(flops, int):
            return
        backward = torch.is_grad_enabled()
        needs = {"dgrad": backward and inp.requires_grad, "wgrad": backward and trains}
        for gemm in GEMMS:
            if needs.get(gemm, True):
                self.record(_HIGH_PRECISION, flops, gemm)
                self.by_torch[gemm] = self.by_torch.get(gemm, 0) + flops


def operand_formats(left: CastSpec | None, right: CastSpec | None) -> str:
    """Element formats of a GEMM's operands, e.g. ``"e2m1 x e2m1"``; ``"high_precision"`` if neither is quantized."""
    if left is None and right is None:
        return HIGH_PRECISION
    return " x ".join("high" if spec is None else spec.element.name for spec in (left, right))


@dataclass(frozen=True)
class LinearPlan:
    """Frozen answer to "how does this module compute?": a value, shared by all modules that get the same answer.

    Attributes:
        recipe: the module's recipe, after the rules of the recipe in force; None for a plan made of a key.
        input, weight, grad_output: the quantizer of each role.
        backward_override: see :class:`~fp4engine.recipe.Recipe`.
        backend: backend of the GEMMs.
        fast_accumulation: FP8 GEMMs that may use the tensor core's shorter accumulator.
        accumulation: how FP4 GEMMs are summed.
        draws_in_forward: whether casts of a forward pass take draws of the random stream.
        draws_in_backward: whether a backward pass takes a draw. One draw serves all of its casts, since their stream
            ids differ by role and side.
        formats: the element formats of each GEMM, as :func:`operand_formats` names them.
        key: a string from which :func:`plan_of` makes the plan; empty unless casts make operands directly from their
            tensors, take no draw in a forward pass, and do nothing else.
        is_fused: whether a direction may be one launch: each quantizer only casts, by kernels.
        sums_in_order: whether the bias gradient is summed in the order of :func:`fp4engine.reference.column_sums`.
        shares_amaxes: whether ranks can share all outer amaxes: each is one number that belongs to a whole tensor.
        is_stateful: whether scales depend on earlier steps; :meth:`remembering_in` then makes a plan for one module.
        is_identity: whether all six operands stay in high precision.
        in_group: the roles whose amaxes are shared over an ``amax_reduction_group``.
        described: all of the plan in which ranks that share tensors have to agree, in one string.
    """

    recipe: Recipe | None
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: str | None
    backend: str
    fast_accumulation: frozenset[GemmName] = frozenset()
    accumulation: str = "fp32"
    draws_in_forward: bool = field(init=False, repr=False, compare=False)
    draws_in_backward: bool = field(init=False, repr=False, compare=False)
    is_stateful: bool = field(init=False, repr=False, compare=False)
    is_identity: bool = field(init=False, repr=False, compare=False)
    formats: dict[GemmName, str] = field(init=False, repr=False, compare=False)
    key: str = field(init=False, repr=False, compare=False)
    is_fused: bool = field(init=False, repr=False, compare=False)
    sums_in_order: bool = field(init=False, repr=False, compare=False)
    shares_amaxes: bool = field(init=False, repr=False, compare=False)
    in_group: tuple[str, ...] = field(init=False, repr=False, compare=False)
    described: str = field(init=False, repr=False, compare=False)
    _hash: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        roles = (self.input, self.weight, self.grad_output)
        casts = [quantizer.casts for quantizer in roles]
        sums = sum_complaints(self.accumulation, self.backward_override, *casts)
        for wrong in (*role_complaints(*casts), *sums):
            raise ValueError(wrong)
        # Fields and not properties: torch.compile reads them where it does not follow a frozen value's properties.
        cast_in_backward = [self.grad_output, *(q for q in roles if q.columnwise_source != "original")]
        draws_in_backward = self.backward_override is None and any(q.is_stochastic for q in cast_in_backward)
        vars(self).update(
            draws_in_forward=self.input.draws_in_forward or self.weight.draws_in_forward,
            draws_in_backward=draws_in_backward,
            is_stateful=any(q.is_stateful for q in roles),
            is_identity=all(q.is_identity and q.only_casts for q in roles),
            formats=_gemm_formats(self),
            in_group=tuple(role for role, q in zip(TENSOR_TYPES, roles, strict=True) if q.joins_group),
            described=_described(self),
        )
        vars(self).update(
            key=_key(self),
            is_fused=self.backend != "reference" and all(q.is_composable and q.backend != "reference" for q in roles),
            sums_in_order=not self.grad_output.is_identity and self.backward_override is None,
        )
        try:
            vars(self)["_hash"] = hash(roles)
        except TypeError:  # of a user's quantizer
            vars(self)["_hash"] = None
        vars(self)["shares_amaxes"] = self.key != "" and all(map(_is_shared, _specs(roles)))

    def __hash__(self) -> int:
        """Found once: a plan is part of what every launch of its layers is looked up by."""
        if self._hash is None:
            raise TypeError("a plan with a quantizer that has no hash has none")
        return self._hash

    def clips(self, quantizer: Quantizer) -> bool:
        """Whether the tensor of a role gets no gradient where its forward cast saturated."""
        return quantizer.clipped_gradient and self.backward_override is None

    def keeps_original(self, quantizer: Quantizer) -> bool:
        """Whether the backward pass reads the tensor of a role as it was in the forward pass."""
        if self.backward_override is None:
            return quantizer.columnwise_source == "saved_original"
        return self.backward_override == "high_precision"

    def keeps_rowwise(self, quantizer: Quantizer) -> bool:
        """Whether the backward pass reads the rowwise operand of a role, which the forward pass multiplied."""
        if self.backward_override is None:
            return quantizer.columnwise_source == "rowwise_dequantized"
        return self.backward_override == "dequantized"

    def remembering_in(self, memory: dict[str, Any]) -> "LinearPlan":
        """The plan of one module, which keeps in ``memory`` what its quantizers remember between steps."""
        return replace(
            self,
            input=self.input.remembering_in(memory, "input"),
            weight=self.weight.remembering_in(memory, "weight"),
            grad_output=self.grad_output.remembering_in(memory, "grad_output"),
        )

    def evaluating(self) -> "LinearPlan":
        """The same plan for a forward whose amaxes are not entered into histories."""
        return replace(self, input=self.input.evaluating(), weight=self.weight.evaluating())

    def repeating(self, noted: Any) -> "LinearPlan":
        """The same plan for a forward that is recomputed, see :meth:`Quantizer.repeating`."""
        return replace(self, input=self.input.repeating(noted), weight=self.weight.repeating(noted))


def _gemm_formats(plan: LinearPlan) -> dict[GemmName, str]:
    inp, weight, grad_output = plan.input, plan.weight, plan.grad_output
    fprop = operand_formats(inp.rowwise_spec, weight.rowwise_spec)
    if plan.backward_override is not None:
        return {"fprop": fprop, "dgrad": HIGH_PRECISION, "wgrad": HIGH_PRECISION}
    return {
        "fprop": fprop,
        "dgrad": operand_formats(grad_output.rowwise_spec, weight.columnwise_spec),
        "wgrad": operand_formats(grad_output.columnwise_spec, inp.columnwise_spec),
    }


def _specs(roles: Iterable[Quantizer]) -> list[CastSpec | None]:
    return [spec for quantizer in roles for spec in (quantizer.rowwise_spec, quantizer.columnwise_spec)]


def _is_shared(spec: CastSpec | None) -> bool:
    """Whether the outer amax of a cast is one number of the whole tensor, which the cast does not change."""
    if spec is None or spec.outer is not Outer.TENSOR:
        return False
    return spec.block[1] > 0 and spec.correction is not Correction.SCALAR


def _key(plan: LinearPlan) -> str:
    roles = (plan.input, plan.weight, plan.grad_output)
    if plan.backward_override is not None or plan.draws_in_forward or plan.is_stateful:
        return ""
    for q in roles:
        is_direct = q.columnwise_source == "original" and q.only_casts and q.backend == plan.backend
        if not is_direct or q.clipped_gradient or q.rowwise_spec is None or q.columnwise_spec is None:
            return ""
    keys = [spec.key for spec in _specs(roles) if spec is not None]
    streams = ",".join(str(quantizer.stream) for quantizer in roles)
    return " ".join([*keys, streams, ",".join(sorted(plan.fast_accumulation)) or "-", plan.backend, plan.accumulation])


@lru_cache(maxsize=1024)
def plan_of(key: str) -> LinearPlan:
    """The plan that has this ``key``, but for its recipe."""
    *keys, streams, fast, backend, accumulation = key.split(" ")
    specs = [CastSpec.from_key(word) for word in keys]
    inp, weight, grad_output = (
        Quantizer(specs[2 * i], specs[2 * i + 1], stream=int(stream), backend=backend)
        for i, stream in enumerate(streams.split(","))
    )
    fast_gemms: frozenset[GemmName] = frozenset(gemm for gemm in GEMMS if gemm in fast.split(","))
    return LinearPlan(None, inp, weight, grad_output, None, backend, fast_gemms, accumulation)


def _described(plan: LinearPlan) -> str:
    roles: list[str] = []
    for role in TENSOR_TYPES:
        own: Quantizer = getattr(plan, role)
        sides = [HIGH_PRECISION if spec is None else spec.key for spec in (own.rowwise_spec, own.columnwise_spec)]
        clipped = " clipped" if own.clipped_gradient else ""
        roles.append(f"{role} {' '.join(dict.fromkeys(sides))} {own.columnwise_source}{clipped} {type(own).__name__}")
    told = f"{', '.join(roles)}, backward_override={plan.backward_override!r}"
    return told if plan.accumulation == "fp32" else f"{told}, accumulation={plan.accumulation!r}"


def make_linear_plan(recipe: Recipe, module_type: str, name: str = "", shape: tuple[int, ...] = ()) -> LinearPlan:
    """Ask ``recipe`` for the quantizers of a module's three roles, once each. Equal plans are one object.

    Args:
        name, shape: the module's name and its weight's shape, for recipes whose rules read them.
    """
    own = recipe.of(QuantizerRole(module_type, "", name, shape))
    inp, weight, grad_output = (
        make_quantizer(own, QuantizerRole(module_type, role, name, shape)) for role in TENSOR_TYPES
    )
    fast: frozenset[GemmName] = frozenset(gemm for gemm in GEMMS if not own.mm_params(gemm).use_split_accumulator)
    plan = LinearPlan(own, inp, weight, grad_output, own.backward_override, own.backend, fast, own.accumulation)
    try:
        return _first_equal(plan)
    except TypeError:  # a custom recipe or quantizer without a hash equals nothing but itself
        return plan


@lru_cache(maxsize=1024)
def _first_equal(plan: LinearPlan) -> LinearPlan:
    """The first of all plans equal to ``plan``, so that equal plans are one object where identity is compared."""
    return plan
