"""The weight that a module multiplies by after an all-gather of codes, and which plans it can serve."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine import ops
from fp4engine.formats import CastSpec, Correction, Outer, ScaleRule
from fp4engine.functional import LinearPlan
from fp4engine.modules.quantized_weight import QuantizedWeight, casts_of, in_words
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import Operand, is_transposable

aten = torch.ops.aten


def why_not_codes(plan: LinearPlan) -> str:
    """Why ``plan`` cannot do with the codes that ranks make of their shards; empty if it can."""
    quantizer, spec = plan.weight, plan.weight.rowwise_spec
    if spec is None:
        return "the recipe keeps the weight in high precision"
    if spec.element.storage_bits != 4:
        return f"the recipe casts the weight to {spec.label}, which is not FP4"
    if quantizer.is_stateful or not quantizer.only_casts:
        return f"{type(quantizer).__name__} needs more than the weight"
    if spec.outer not in (Outer.TENSOR, Outer.NONE):
        return f"{spec.label} has many outer scales, and one is brought"
    plain = spec.rotation is None and spec.correction is Correction.NONE and spec.scale_rule is not ScaleRule.ALIGNED
    if spec.is_stochastic or not plain:
        return f"the codes of {spec.label} need more than a shard and the largest magnitude of the weight"
    if plan.backward_override == "high_precision":
        return NO_VALUES
    return "" if plan.backward_override is not None else why_not_dgrad(quantizer)


NO_VALUES = "backward_override='high_precision' multiplies the weight itself"


def why_not_dgrad(quantizer: Quantizer) -> str:
    """Why the codes of the weight do not make dgrad's operand; empty if they do."""
    row, column = quantizer.rowwise_spec, quantizer.columnwise_spec
    if quantizer.columnwise_source == "rowwise_dequantized":
        return ""
    if column is None:
        return "dgrad multiplies the weight in high precision"
    if column != row or not is_transposable(column):
        return f"dgrad's operand, {column.label}, is cast from the weight in high precision"
    return ""


def is_transposed(plan: LinearPlan) -> bool:
    """Whether dgrad reads the transposed codes, where :func:`why_not_codes` has nothing to say."""
    return plan.backward_override is None and plan.weight.columnwise_source == "original"


class GatheredWeight(QuantizedWeight):
    """A weight [N, K] between FSDP2's unshard and reshard: the operands that were gathered, and no values.

    Attributes:
        name: of the parameter in its model.
        ranks: of the mesh over which ``fully_shard`` spreads the weight; all of them have these codes.
        why_not_dgrad: why its codes serve only recipes with a ``backward_override``; empty if they serve others.
    """

    name: str = ""
    ranks: frozenset[int] = frozenset()
    why_not_dgrad: str = ""

    def made(self) -> dict[str, Tensor]:
        """What was made here of what was gathered, by name: memory that FSDP2 frees and allocates with the codes."""
        return {name: vars(self)[name] for name in MADE if name in vars(self)}

    def require(self, plan: LinearPlan, group: Any) -> None:
        """As :meth:`QuantizedWeight.require`; amaxes may be shared by ranks that have the same weight.

        Raises:
            ValueError: ``plan`` asks for other operands than those that were gathered.
            NotImplementedError: the group has ranks with other weights.
        """
        reason = ""
        if casts_of(plan.weight) != casts_of(self.quantizer) or not plan.weight.only_casts:
            reason = f"the recipe in force multiplies {in_words(plan.weight)} of {type(plan.weight).__name__}"
        elif plan.backward_override is None:
            reason = self.why_not_dgrad
        elif plan.backward_override == "high_precision":
            reason = NO_VALUES
        if reason:
            raise ValueError(
                f"{self.name} was gathered as codes, {in_words(self.quantizer)}, and {reason}; give "
                f"fp4_all_gather(recipe=...) the recipe in force: {plan.recipe!r}"
            )
        if group is not None and not self.ranks.issuperset(dist.get_process_group_ranks(group)):
            raise NotImplementedError(
                f"amax_reduction_group has ranks beyond the mesh of {self.name}, which was gathered as codes; its "
                "weights there are others, and their amaxes are not shared"
            )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Refuse: the values that were quantized stayed in the shards.

        Raises:
            ValueError: always.
        """
        self._values()
        raise AssertionError

    def _values(self) -> NoReturn:
        raise ValueError(
            f"{self.name or 'a weight'} was gathered as codes, and its values in high precision are asked for; run the "
            "model under autocast with the recipe that fp4_all_gather was given, load its state_dict into a model "
            "without fp4_all_gather for high precision, or leave the module out of fp4_all_gather"
        )

    def _write(self, values: Tensor) -> NoReturn:
        raise ValueError(f"{self.name} was gathered as codes; write to the shard, after model.reshard()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, GatheredWeight):
            if func is aten.as_strided.default and tuple(args[1]) == tuple(first.shape):  # FSDP2 does so to each
                return first._like(lambda tensor: tensor)
            if func is aten.zeros_like.default:  # what FSDP2 reduces where there is no gradient
                return torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "GatheredWeight":
        quantizer, dtype, _ = context  # linear modules hold [N, K], which is never transposed
        return GatheredWeight.of(quantizer, size, dtype, inner.values())

    @classmethod
    def of(cls, quantizer: Quantizer, shape: Any, dtype: torch.dtype, tensors: Any) -> "GatheredWeight":
        """Wrap ``tensors``, three or six in the order of :data:`~fp4engine.modules.quantized_weight.STORED`."""
        weight: Any = cls(quantizer, shape, dtype, tensors)
        weight.why_not_dgrad = why_not_dgrad(quantizer)
        return weight

    @classmethod
    def gathered(
        cls,
        quantizer: Quantizer,
        shape: tuple[int, int],
        dtype: torch.dtype,
        is_transposed: bool,
        codes: Tensor,
        scales: Tensor,
        amax: Tensor,
    ) -> "GatheredWeight":
        """What all ranks' codes, scales and amax are; ``is_transposed`` makes the columnwise operand too."""
        spec, (rows, cols) = quantizer.rowwise_spec, shape
        assert spec is not None
        tensors = [codes, _scales(spec, rows, cols, codes), amax]
        if is_transposed:
            turned = codes.new_empty(cols, spec.padded_cols(rows) // 2)
            tensors += [turned, _scales(spec, cols, rows, codes), amax]
        weight = cls.of(quantizer, shape, dtype, tensors)
        weight.refill(codes, scales, amax)
        return weight

    def refill(self, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
        """Become what was gathered anew. Memory that graphs refer to is written, and its version stays.

        FSDP2 has written the codes, which are its own memory. All of this is the stream's that computes.
        """
        made, spec = vars(self), self.quantizer.rowwise_spec
        assert spec is not None
        turned = (made["columnwise_codes"], made["columnwise_scale_inv"]) if "columnwise_codes" in made else None
        ops.spread_tiles(codes, scales, spec, self.shape[1], made["scale_inv"], turned, self.quantizer.backend)
        vars(self).update({name: amax for name in ("amax", "columnwise_amax") if name in made})


MADE = ("scale_inv", "columnwise_codes", "columnwise_scale_inv")
"""Tensors of a gathered weight that are made of what was gathered."""


def _scales(spec: CastSpec, rows: int, cols: int, like: Tensor) -> Tensor:
    """Memory for the block scales of an operand [rows, cols]."""
    return like.new_empty((rows, spec.num_blocks(cols)), dtype=spec.scale.torch_dtype)


def scales_on_the_wire(operand: Operand) -> Tensor:
    """Bytes of the block scales of ``operand``, one of each block: uint8 [rows / block rows, blocks]."""
    assert operand.spec is not None and operand.scale_inv is not None
    return operand.scale_inv[:: operand.spec.block[0]].contiguous().view(torch.uint8)
