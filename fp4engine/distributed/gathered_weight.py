"""The weight that a module multiplies by after an all-gather of codes, and which plans it can serve."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fp4engine.formats import Correction, Outer, ScaleRule
from fp4engine.functional import LinearPlan
from fp4engine.modules.quantized_weight import QuantizedWeight, casts_of, in_words
from fp4engine.ops import TiledOperand
from fp4engine.quantizers import Quantizer
from fp4engine.tensor import Operand, is_transposable

aten = torch.ops.aten


def why_not_codes(plan: LinearPlan) -> str:
    """Why ``plan`` cannot run on codes that ranks make of their shards; empty if it can."""
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
    """Why dgrad's operand cannot be made from the weight's codes; empty if it can."""
    row, column = quantizer.rowwise_spec, quantizer.columnwise_spec
    if quantizer.columnwise_source == "rowwise_dequantized":
        return ""
    if column is None:
        return "dgrad multiplies the weight in high precision"
    if column != row or not is_transposable(column):
        return f"dgrad's operand, {column.label}, is cast from the weight in high precision"
    return ""


class GatheredWeight(QuantizedWeight):
    """A weight [N, K] between FSDP2's unshard and reshard: gathered codes and scales, without values.

    It has codes, one scale per block and the outer amax, in memory that FSDP2 frees and allocates. Products make their
    operands from these when they read them.

    Attributes:
        packed, parts: codes, scales and amax of each rank's rows, and of how many ranks; see :class:`TiledOperand`.
        name: of the parameter in its model.
        state: that the weight had when it was gathered.
        ranks: of the mesh over which ``fully_shard`` spreads the weight; all of them have these codes.
        why_not_dgrad: why only recipes with a ``backward_override`` can use the codes; empty if others can too.
        served: the last plan that used the codes.
    """

    packed: Tensor
    parts: int = 1
    name: str = ""
    state: Any = None
    ranks: frozenset[int] = frozenset()
    why_not_dgrad: str = ""
    served: LinearPlan | None = None
    _names = ("packed",)

    def tiles(self) -> TiledOperand:
        """The gathered codes, scales and amax, as products take them."""
        spec, (rows, cols) = self.quantizer.rowwise_spec, self.shape
        assert spec is not None
        return TiledOperand(spec, rows, cols, self.parts, self.packed)

    def make_rowwise(self) -> Operand:
        """The operand [N, K], made anew."""
        return self.tiles().rowwise(self.quantizer.backend)

    def make_columnwise(self) -> Operand:
        """The operand [K, N], made anew of the codes.

        Raises:
            ValueError: it cannot be made from the codes.
        """
        if self.why_not_dgrad or self.quantizer.columnwise_source != "original":
            self._values()
        return self.tiles().columnwise(self.quantizer.backend)

    def require(self, plan: LinearPlan, group: Any) -> None:
        """As :meth:`QuantizedWeight.require`; amaxes may be shared by ranks that have the same weight.

        Raises:
            ValueError: ``plan`` asks for other operands than those that were gathered.
            NotImplementedError: the group has ranks with other weights.
        """
        is_traced = torch.compiler.is_dynamo_compiling()
        if group is None and not is_traced and plan is self.served:
            return
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
        if not is_traced:
            self.served = plan

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

    def _refuse_view(self, operation: Any) -> NoReturn:
        self._values()

    def _write(self, values: Tensor) -> NoReturn:
        raise ValueError(f"{self.name} was gathered as codes; write to the shard, after model.reshard()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, GatheredWeight):
            if func is aten.as_strided.default and tuple(args[1]) == tuple(first.shape):  # called by FSDP2
                return first._like(lambda tensor: tensor)
            if func is aten.zeros_like.default:  # FSDP2 reduces it in place of a missing gradient
                return torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self._names), (self.quantizer, self.dtype, self.parts)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "GatheredWeight":
        quantizer, dtype, parts = context
        return GatheredWeight.of(quantizer, size, dtype, inner["packed"], parts)

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()} in {self.parts} parts"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved: the gathered codes are FSDP2's, and no file of them could be read."""
        self._values()

    @classmethod
    def of(cls, quantizer: Quantizer, shape: Any, dtype: torch.dtype, packed: Tensor, parts: int) -> "GatheredWeight":
        """Wrap ``packed``: codes, scales and amax in ``parts`` parts."""
        weight: Any = cls(quantizer, shape, dtype, (packed,))
        weight.why_not_dgrad, weight.parts = why_not_dgrad(quantizer), parts
        return weight

    def refill(self, state: Any) -> None:
        """Note a new gather, of a weight in this state, which FSDP2 has written into this weight's memory.

        A graph that has saved codes of another state raises in its backward pass, as after any write in place: FSDP2
        itself moves no version counter.
        """
        if state != self.state:
            torch.autograd.graph.increment_version(self.packed)
        self.state = state
