"""A recipe as data: the casts of all six operands of a linear layer.

| GEMM | left | right |
|---|---|---|
| fprop | input.rowwise | weight.rowwise |
| dgrad | grad_output.rowwise | weight.columnwise |
| wgrad | grad_output.columnwise | input.columnwise |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fp4engine.arguments import require_integer, require_one_of, shown
from fp4engine.formats import UE5M3, CastSpec, Correction, Outer, OwnScaleRule, RoundingMode, Signs
from fp4engine.recipe.base import Recipe, require_object, require_recipes
from fp4engine.recipe.casts import Casts, unsummable
from fp4engine.roles import TENSOR_TYPES

GEMM_OPERANDS = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}
"""The two operands that each GEMM contracts."""

NO_CASTS = Casts()
SIDES = ("rowwise", "columnwise")
_FRESH = {"dgrad": Signs.DGRAD, "wgrad": Signs.WGRAD}


@dataclass(frozen=True)
class LinearRecipe(Recipe):
    """Any 4-bit or 8-bit recipe as six casts; no arguments leave everything in high precision.

    Attributes:
        input, weight, grad_output: casts of each role.
        allow_biased: accept casts that are known to be biased: 4over6 with stochastic rounding (the choice depends
            on the draw), a correction of shrinkage without freshly drawn signs (it corrects one rotation only).

    Raises:
        ValueError: the two operands of a GEMM are rotated differently, fresh signs where the operands could not share
            them, or a biased cast without ``allow_biased=True``.
    """

    input: Casts = NO_CASTS
    weight: Casts = NO_CASTS
    grad_output: Casts = NO_CASTS
    allow_biased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in TENSOR_TYPES:
            if not isinstance(getattr(self, role), Casts):
                raise ValueError(f"{role} must be a Casts, got {getattr(self, role)!r}")
        roles = role_complaints(self.input, self.weight, self.grad_output)
        sums = sum_complaints(self.accumulation, self.backward_override, self.input, self.weight, self.grad_output)
        if complaints := [*self._rotation_complaints(), *roles, *sums, *self._bias_complaints()]:
            raise ValueError(complaints[0])

    def casts(self, tensor_type: str) -> Casts:
        """The casts of a role."""
        require_one_of("tensor_type", tensor_type, TENSOR_TYPES)
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}[tensor_type]

    def operands(self) -> Iterator[tuple[str, str, CastSpec | None]]:
        """``(gemm, "role.side", spec)`` of all six operands."""
        for gemm, pair in GEMM_OPERANDS.items():
            for role, side in pair:
                yield gemm, f"{role}.{side}", getattr(self.casts(role), side)

    def _rotation_complaints(self) -> Iterator[str]:
        for gemm, pair in GEMM_OPERANDS.items():
            specs = [getattr(self.casts(role), side) for role, side in pair]
            left, right = (spec.rotation if spec else None for spec in specs)
            names = " and ".join(".".join(operand) for operand in pair)
            if left != right:
                yield f"{gemm} needs {names} rotated alike, or H H^T does not cancel: got {left} and {right}"

    def _bias_complaints(self) -> Iterator[str]:
        if self.allow_biased:
            return
        for _, name, spec in self.operands():
            if spec is None:
                continue
            if spec.scale_rule.is_four_over_six and spec.rounding is RoundingMode.STOCHASTIC:
                yield f"{name} has 4over6 with stochastic rounding, which is biased; allow_biased=True accepts it"
            if isinstance(spec.scale_rule, OwnScaleRule) and spec.rounding is RoundingMode.STOCHASTIC:
                yield (
                    f"{name} has scale_rule={spec.scale_rule.value} with stochastic rounding, which is biased if the "
                    "rule lets an element saturate, as nobody can tell beforehand; allow_biased=True accepts it"
                )
            fresh = spec.rotation is not None and spec.rotation.signs.is_fresh
            if spec.correction is not Correction.NONE and not fresh:
                yield (
                    f"{name} has correction={spec.correction.value} without freshly drawn signs "
                    f"(rotation={spec.rotation}), which is biased; allow_biased=True accepts it"
                )

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        if name not in TENSOR_TYPES:
            return super()._from_plain(name, value)
        given = require_object(name, value, (*SIDES, "columnwise_source", "clipped_gradient"))
        for side in SIDES:
            if side not in given:
                raise ValueError(f"{name} has no {side}; null leaves the operand in high precision")
        sides = {side: given[side] if given[side] is None else CastSpec.from_key(given[side]) for side in SIDES}
        clipped = given.get("clipped_gradient", False)
        if not isinstance(clipped, bool):
            raise ValueError(f"{name}.clipped_gradient must be true or false, got {clipped!r}")
        source = given.get("columnwise_source", "original")
        return Casts(**sides, columnwise_source=source, clipped_gradient=clipped)


@dataclass(frozen=True)
class HeldScaling(LinearRecipe):
    """Casts with one outer amax per tensor, which is sampled at every ``hold``-th optimizer step and held in between.

    A module samples the amax of each of its tensors when it first casts it, and again when ``hold`` optimizer steps are
    over. Microbatches between two optimizer steps do not count, and take the sample of the first; steps of every
    optimizer in the process count, of another model's too. Both casts of a tensor share its amax. Block scales are
    UE5M3, whose range leaves room for tensors that have grown since: 256 times with ``scale_bound=448``. Beyond that
    elements saturate. An Inf or a NaN in a tensor still makes its product non-finite, and is no sample. Zeros are
    none either.

    Amaxes belong to the modules; see :func:`fp4engine.get_amax_history`.

    Attributes:
        hold: optimizer steps.

    Raises:
        ValueError: ``hold`` is no integer from 1 to 2^62; or a tensor that is cast on one side alone, a cast that has
            other block scales, no outer scale per tensor, a rotation or a correction, or is made of another one.

    Source: arXiv 2609.02846; ue5m3-fp4 815651b.
    """

    is_delayed: ClassVar[bool] = True

    hold: int = 50

    def __post_init__(self) -> None:
        object.__setattr__(self, "hold", require_integer("hold", self.hold, 1, 1 << 62))  # counts are int64
        super().__post_init__()
        for role in TENSOR_TYPES:
            if wrong := _unheld(role, self.casts(role)):
                raise ValueError(wrong)


def _unheld(role: str, casts: Casts) -> str:
    """Why the amax of a role cannot be held; empty if it can, or if the role is not quantized."""
    if casts.rowwise is None and casts.columnwise is None:
        return ""
    if casts.columnwise_source != "original":
        return f"HeldScaling needs {role}.columnwise_source='original', got {casts.columnwise_source!r}"
    for side in SIDES:
        spec: CastSpec | None = getattr(casts, side)
        holds = spec is not None and (spec.scale, spec.outer) == (UE5M3, Outer.TENSOR)
        if spec is None or not holds or spec.rotation is not None or spec.correction is not Correction.NONE:
            got = "high precision" if spec is None else spec.key
            return (
                "HeldScaling needs scale=ue5m3 and outer=tensor without rotation and correction on both sides of a "
                f"tensor, got {role}.{side}={got}"
            )
    return ""


def role_complaints(inp: Casts, weight: Casts, grad_output: Casts) -> Iterator[str]:
    """What no layer can compute by these casts, even if both operands of each GEMM are rotated alike."""
    roles = {"input": inp, "weight": weight, "grad_output": grad_output}
    for gemm, pair in GEMM_OPERANDS.items():
        allowed = [signs for signs in (Signs.FIXED, Signs.REPEATED, Signs.NONE, _FRESH.get(gemm)) if signs]
        for role, side in pair:
            signs = _signs(getattr(roles[role], side))
            if signs is not None and signs not in allowed:
                yield f"{gemm} takes signs {', '.join(map(str, allowed))}, got {signs} on {role}.{side}"
    if grad_output.columnwise_source != "original":
        yield (
            "grad_output.columnwise_source must be 'original', for both its operands are made of the gradient at once, "
            f"got {grad_output.columnwise_source!r}"
        )
    if grad_output.clipped_gradient:
        yield "grad_output.clipped_gradient must be False, for no gradient of it is taken"
    if weight.columnwise_source == "saved_original":
        yield (
            "weight.columnwise_source='saved_original' is for inputs; a weight's is 'original' or 'rowwise_dequantized'"
        )
    for role, casts, other in (("input", inp, weight), ("weight", weight, inp)):
        is_rotated = _signs(casts.rowwise) is not None
        if casts.clipped_gradient and is_rotated and other.columnwise_source != "rowwise_dequantized":
            yield (
                f"{role}.clipped_gradient tells which rotated elements saturated, so the gradient has to come rotated: "
                f"the other tensor's columnwise_source must be 'rowwise_dequantized', got {other.columnwise_source!r}"
            )
        signs = _signs(casts.columnwise)
        if signs is not None and signs.is_fresh and casts.columnwise_source == "original":
            saved = " or 'saved_original'" if role == "input" else ""
            yield (
                f"{role}.columnwise has freshly drawn signs, which it shares with grad_output in backward: "
                f"columnwise_source must be 'rowwise_dequantized'{saved}, got 'original'"
            )


def sum_complaints(
    accumulation: str, backward_override: str | None, inp: Casts, weight: Casts, grad_output: Casts
) -> Iterator[str]:
    """Quantized GEMMs of these casts that ``accumulation`` does not sum."""
    roles = {"input": inp, "weight": weight, "grad_output": grad_output}
    for gemm, pair in GEMM_OPERANDS.items():
        specs = {f"{role}.{side}": getattr(roles[role], side) for role, side in pair}
        if any(specs.values()) and (gemm == "fprop" or backward_override is None):
            yield from filter(None, (unsummable(accumulation, *operand) for operand in specs.items()))


def _signs(spec: CastSpec | None) -> Signs | None:
    return None if spec is None or spec.rotation is None else spec.rotation.signs


def combine(forward: Recipe, backward: Recipe) -> LinearRecipe:
    """The fprop of ``forward``, the dgrad and wgrad of ``backward``: hybrid recipes by GEMM.

    ``combine(LinearRecipe(), recipe)`` runs fprop in high precision. The backward recipe says what its operands are
    made of; with ``rowwise_dequantized`` that is what ``forward`` saved. ``allow_biased`` of either holds.

    Raises:
        ValueError: no recipe, one whose casts depend on the module or the step, or that scales by earlier steps; two
            different backends or accumulations.
    """
    require_recipes(forward=forward, backward=backward)
    for name, recipe in (("forward", forward), ("backward", backward)):
        if recipe.reads_modules:
            raise ValueError(f"{name} must be a recipe that casts alike in all modules, got {shown(recipe)}")
    if forward.is_delayed or backward.is_delayed:
        raise ValueError(
            "combine takes recipes without memory: use Float8CurrentScaling in place of DelayedScaling, and "
            "LinearRecipe in place of HeldScaling"
        )
    for name in ("backend", "accumulation"):
        values = getattr(forward, name), getattr(backward, name)
        if values[0] != values[1]:
            raise ValueError(f"combine takes recipes of one {name}, got {values[0]!r} and {values[1]!r}")

    def role(name: str) -> Casts:
        front, back = forward.casts(name), backward.casts(name)
        return Casts(front.rowwise, back.columnwise, back.columnwise_source, front.clipped_gradient)

    return LinearRecipe(
        input=role("input"),
        weight=role("weight"),
        grad_output=backward.casts("grad_output"),
        backend=forward.backend,
        accumulation=forward.accumulation,
        backward_override=backward.backward_override,
        allow_biased=any(isinstance(recipe, LinearRecipe) and recipe.allow_biased for recipe in (forward, backward)),
    )
