"""What every module with a weight does: run its three GEMMs by the recipe in force."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import ops
from fp4engine.functional import ExecutedGemms, LinearPlan, WeightCache, linear, make_linear_plan
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.grouped_linear import Expert
from fp4engine.functional.shards import Shards
from fp4engine.functional.weight_cache import microbatch_cache
from fp4engine.modules.quantized_weight import QuantizedWeight, stored_operands
from fp4engine.modules.recompute import handed_over, remember
from fp4engine.modules.sharded import WholesOf, is_distributed, layout_of, place_of, rows_in_order
from fp4engine.modules.shared_weight import SharedWeight, WeightAmaxes, shared_weight, weight_amaxes_for, with_amaxes
from fp4engine.modules.traced import refuse_stray_recomputation, traced_plan
from fp4engine.recipe import LinearRecipe, Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.state import AutocastState, current_state, in_backward, is_recomputed

_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""What ``torch.autocast`` casts; it leaves float64 and integers as they are."""

_UNQUANTIZED = LinearRecipe(backward_override=None, backend="auto")  # both given: an import reads no flag
"""High precision, bit for bit, by a plan: for a gradient that goes to ``main_grad``."""


Listener = Callable[[Tensor | FusedInput, Tensor], Callable[[Tensor], None]]
"""Who hears of products: called with input and weight before one. What it returns is called with the output."""

Missed = Callable[[str], None]
"""Who is told why a product that took place was not heard of."""


class Gemms(torch.nn.Module):
    """The three GEMMs of one linear transformation. Has no parameters: a module is one, or owns some, beside its own.

    Args:
        name: the module's name, which recipes may match; None is the empty name.
        recipe: recipe to follow where no autocast region is active; None means high precision there.
        fuse_wgrad_accumulation: wgrad adds to the buffer ``weight.main_grad`` (FP32, BF16 or FP16, shaped like the
            weight) in its epilogue, and ``weight.grad`` stays None.
        module_type: what recipes see as :attr:`QuantizerRole.module_type`.
        shape: (N, K) of the weight, where the module has none of its own.

    Attributes:
        executed: what really ran, see :class:`~fp4engine.functional.ExecutedGemms`.
        draws_as: by which name, and as which replica, it draws; None: as the process does.
        amax_histories: what delayed scaling remembers of each role.
    """

    def __init__(
        self,
        name: str | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        module_type: str = "linear",
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self._configure(name, recipe, fuse_wgrad_accumulation, module_type, shape)

    def _configure(
        self,
        name: str | None,
        recipe: Recipe | None,
        fuse_wgrad_accumulation: bool,
        module_type: str = "linear",
        shape: tuple[int, ...] = (),
    ) -> None:
        require_own_recipe(recipe)
        self._answers: dict[tuple[int, tuple[int, ...]], LinearPlan] = {}
        self.name = name
        self.recipe = recipe
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.module_type = module_type
        self.shape = shape
        self.executed = ExecutedGemms()
        self.amax_histories: dict[str, Any] = {}
        self.draws_as: tuple[str, int] | None = None
        self._listeners: tuple[tuple[Listener, Missed | None], ...] = ()
        self._plan: MadePlan | None = None
        self._ran_by_recipe = False
        self._share: tuple[Any, Shards, WholesOf, str] | None = None
        self._weight_amaxes: WeightAmaxes | None = None
        self._weight_caches: tuple[WeightCache, ...] = ()
        self._microbatch_cache: WeightCache | None = None

    @property
    def unseen(self) -> str:
        """Why the operands of its products are not those of the input and the weight; empty if they are."""
        return ""

    @property
    def name(self) -> str:
        """What recipes see; another name is another question, so it forgets what compiled code reads as answers."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        self._name = name or ""
        self._answers.clear()

    def forget_plan(self) -> None:
        """Drop histories and the plan that uses them; the next forward makes a plan anew."""
        self.amax_histories.clear()
        self._plan = None

    def plan(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan under ``state``; None for high precision. Rebuilt when the recipe or what it reads is another.

        A recipe may read the module's name, and the shape of its weight.
        """
        recipe = self.recipe if state is None else state.recipe
        if recipe is None or (state is not None and not state.enabled):
            return None
        if torch.compiler.is_dynamo_compiling():
            return self._traced_plan(recipe)
        made = self._plan  # read once: a thread in another region may replace it meanwhile
        if (
            made is None
            or (made.recipe is not recipe and made.recipe != recipe)
            or (recipe.reads_modules and made.read != self._what_recipes_read())
        ):
            read = self._what_recipes_read()
            plan = make_linear_plan(recipe, self.module_type, self.name, self._shape())
            if recipe.reads_modules and not plan.is_stateful:
                self._answers[recipe.number, self._shape()] = plan
            plan = plan.remembering_in(self.amax_histories) if plan.is_stateful else plan
            made = self._plan = MadePlan(recipe, plan, read)
        return made.plan

    def _what_recipes_read(self) -> tuple[str, Any]:
        """Name, and shape of the weight where that is a parameter: one that is computed is not computed for this."""
        weight = self._parameters.get("weight")
        return self.name, None if weight is None else weight.shape

    def _shape(self) -> tuple[int, ...]:
        weight = getattr(self, "weight", None)
        return self.shape or (() if weight is None else tuple(weight.shape))

    def _traced_plan(self, recipe: Recipe) -> LinearPlan:
        """The plan for ``torch.compile``, which reads the plan and not how it is made.

        Equal modules share it, and so one graph: the trace depends on nothing of the module but its type. A recipe that
        asks for more makes a graph for each name, or, for modules that have run by it in eager mode, for each answer.
        """
        if not recipe.reads_modules:
            return traced_plan(recipe, self.module_type, "", ())
        shape = self._shape()
        if (recipe.number, shape) in self._answers:
            return self._answers[recipe.number, shape]
        return traced_plan(recipe, self.module_type, self.name, shape)

    def multiply(
        self, inp: Tensor | FusedInput, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """``inp @ weight.T + bias``: [..., K] -> [..., N].

        Args:
            is_first_microbatch: True quantizes the weight and keeps its operands, False reuses them while the weight
                is unchanged, None neither; says nothing about gradients. See also :func:`fp4engine.weight_cache`.
        """
        told = [listener(inp, weight) for listener, _ in self._listeners] if self._listeners else ()
        output = self._multiply(inp, weight, bias, is_first_microbatch)
        for tell in told:
            tell(output)
        return output

    @contextmanager
    def heard_by(self, listener: Listener, missed: Missed | None = None) -> Generator[None]:
        """Region in which ``listener`` hears of every :meth:`multiply` of this module, and not of its copies'.

        Such regions may lie within each other, and end in any order.

        Args:
            missed: is told why products are not heard of that take place elsewhere, with those of other modules.
        """
        heard = listener, missed
        self._listeners = (*self._listeners, heard)
        try:
            yield
        finally:
            left = list(vars(self).get("_listeners", ()))  # a module that was reverted meanwhile has none
            if heard in left:
                left.remove(heard)
                self._listeners = tuple(left)

    def multiplied_elsewhere(self, reason: str) -> None:
        """Tell who listens why they have not heard of a product."""
        for _, missed in self._listeners:
            if missed is not None:
                missed(reason)

    def _multiply(
        self, inp: Tensor | FusedInput, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        """What :meth:`multiply` returns, with nobody told."""
        state = self._state_in_force()
        plan = self._plan_under(state)
        main_grad = self._main_grad(weight) if self.fuse_wgrad_accumulation else None
        if plan is None:
            if isinstance(weight, QuantizedWeight):
                weight = weight.dequantize()
            if main_grad is None:
                inp = inp.tensor() if isinstance(inp, FusedInput) else inp
                output = F.linear(inp, weight, bias)
                self.executed.record_high_precision(inp, weight)
                return output
        if getattr(inp, "device", None) != weight.device or weight.is_meta:
            raise unusable_devices(inp, weight)
        inp = cast_by_autocast(inp)
        group = None if state is None else state.amax_reduction_group
        computed_by = plan or make_linear_plan(_UNQUANTIZED, self.module_type)
        if is_distributed(inp, weight, bias):
            inp = inp if isinstance(inp, Tensor) else inp.tensor()
            return self._multiply_share(inp, weight, bias, computed_by, state)
        alone = self.draws_as is None and (state is None or (group is None and state.cp_group is None))
        shards = None if alone else self._shards(inp, computed_by, state)
        if isinstance(inp, FusedInput) and (plan is None or shards is not None or not inp.fuses(plan)):
            inp = inp.tensor()
        return linear(
            inp,
            weight,
            bias,
            computed_by,
            executed=self.executed,
            shards=shards,
            weight_cache=self._cache(weight, computed_by, group, is_first_microbatch),
            main_grad=main_grad,
        )

    def _multiply_share(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, state: AutocastState | None
    ) -> Tensor:
        """This rank's share of a linear transformation of DTensors, as the DTensor of all shares.

        In eager mode the layout is kept until something changes that it depends on.
        """
        cp_group = None if state is None else state.cp_group
        if torch.compiler.is_dynamo_compiling():
            layout = layout_of(plan, inp, weight, bias, self._label(), cp_group)
            x, w, b = layout.parts(inp, weight, bias)
            assert x is not None and w is not None
            shards = self._told(layout.shards, plan, state)
            if self._weight_amaxes is not None:
                shards = with_amaxes(shards, weight, self._weight_amaxes, weight_amaxes_for(shards, plan))
            return layout.whole(linear(x, w, b, plan, executed=self.executed, shards=shards))
        group = None if state is None else state.amax_reduction_group
        asked = (plan, place_of(inp), place_of(weight), place_of(bias), cp_group, group, self.draws_as)
        share = self._share  # read once: a thread with another input may replace it meanwhile
        if share is None or share[0] != asked:
            layout = layout_of(plan, inp, weight, bias, self._label(), cp_group)
            shards = self._told(layout.shards, plan, state)
            share = self._share = asked, shards, WholesOf(layout), weight_amaxes_for(shards, plan)
        _, shards, wholes, needed = share
        if self._weight_amaxes is not None:
            shards = with_amaxes(shards, weight, self._weight_amaxes, needed)
        return linear(inp, weight, bias, plan, executed=self.executed, shards=shards, wholes=wholes)

    def shared_weight(self, state: AutocastState | None, known: SharedWeight | None) -> SharedWeight | None:
        """The weight, if ranks share its amaxes in a forward under ``state``, and all in one way; else None.

        Args:
            known: what this was last time; what of it holds is not asked for again.
        """
        group = None if state is None else state.amax_reduction_group
        return shared_weight(getattr(self, "weight", None), self.plan(state), group, known)

    def leave_weight_amaxes(self, left: WeightAmaxes | None) -> None:
        """Leave amaxes here for the forwards that come; None takes them away."""
        self._weight_amaxes = left

    def _label(self) -> str:
        """What errors call it; equal modules share one graph."""
        kind = type(self).__name__
        return kind if torch.compiler.is_dynamo_compiling() else self.name or kind

    def _shards(self, inp: Tensor | FusedInput, plan: LinearPlan, state: AutocastState | None) -> Shards | None:
        """What other ranks have of the matrices, and whose draws cast them; None where nobody else has anything.

        Raises:
            NotImplementedError: experts under ``cp_group``, whose rows are as many as tokens have chosen them.
        """
        cp_group = None if state is None else state.cp_group
        if cp_group is None:
            shared = state is not None and state.amax_reduction_group is not None
            return self._told(Shards(), plan, state) if shared or self.draws_as is not None else None
        if self.module_type == "grouped_linear":
            raise NotImplementedError(
                f"{self.name or 'GroupedLinear'}: cp_group says that every rank has as many rows, and of an expert it "
                "has those of the tokens that chose it; enter autocast without cp_group around experts"
            )
        rows = prod(inp.shape[:-1])
        return self._told(rows_in_order(plan, cp_group, rows, inp.device, self._label()), plan, state)

    def _told(self, shards: Shards, plan: LinearPlan, state: AutocastState | None) -> Shards:
        """``shards``, with what the region and the module say beside."""
        if state is not None and state.amax_reduction_group is not None:
            shards = shards.and_over(state.amax_reduction_group, plan.in_group)
        if self.draws_as is not None:
            layer, replica = self.draws_as
            shards = shards._replace(layer=layer, rank=replica)
        return shards

    def expert(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None
    ) -> Expert | None:
        """What :meth:`multiply` would compute by, as one of many for :func:`grouped_linear`; None in high precision."""
        state = self._state_in_force()
        plan = self._plan_under(state)
        if plan is None:
            return None
        if is_distributed(weight, bias):
            raise NotImplementedError(
                f"{self.name or type(self).__name__}: experts that are DTensors are not implemented; give each rank "
                "whole experts of its own"
            )
        group = None if state is None else state.amax_reduction_group
        shards = self._shards(inp, plan, state)
        cache = self._cache(weight, plan, group, is_first_microbatch)
        main_grad = self._main_grad(weight) if self.fuse_wgrad_accumulation else None
        return Expert(weight, bias, plan, self.executed, shards, cache, main_grad)

    def _state_in_force(self) -> AutocastState | None:
        """The region's state; in a forward that is recomputed, what the forward that it repeats has handed over.

        Raises:
            RuntimeError: this runs inside a backward pass, and nobody says by which recipe.
        """
        state = current_state()
        if torch.compiler.is_dynamo_compiling():
            refuse_stray_recomputation()
            return state
        if not is_recomputed():
            remember(state)
            return state
        told = handed_over()
        if told is not None:
            return told.state
        if self._ran_by_recipe or state is not None:
            raise RuntimeError(
                f"{self.name or type(self).__name__} runs inside a backward pass, outside any autocast region that was "
                "entered there, and it is not known by which recipe. If activation checkpointing recomputes it, use "
                "fp4engine.checkpoint, or give torch.utils.checkpoint use_reentrant=False and "
                "context_fn=fp4engine.recompute_contexts, or put the region inside the checkpointed function; "
                "elsewhere, enter autocast(recipe=...) or autocast(enabled=False) around the call"
            )
        return None

    def _plan_under(self, state: AutocastState | None) -> LinearPlan | None:
        """The plan of this forward.

        Raises:
            RuntimeError: a recomputation cannot repeat its draws.
            ValueError: the module's own recipe has delayed scaling, and there is no region.
        """
        plan = self.plan(state)
        if plan is None or torch.compiler.is_dynamo_compiling():
            return plan
        if not self._ran_by_recipe:  # an assignment to a module's attribute is a call of Python
            self._ran_by_recipe = True
        if in_backward():
            if plan.draws_in_forward and not ops.is_replaying():
                raise RuntimeError(
                    f"the forward of {plan.recipe!r} draws random bits, which torch.utils.checkpoint does not repeat; "
                    "use fp4engine.checkpoint"
                )
            return plan.repeating() if plan.is_stateful else plan
        if plan.is_stateful and state is None:
            raise no_step(plan.recipe)
        return plan.repeating() if plan.is_stateful and not self._is_remembered() else plan

    def _is_remembered(self) -> bool:
        """Whether this forward changes what delayed scaling remembers: not in evaluation, which leaves no trace.

        Without gradients a module in train mode may still be trained: reentrant checkpointing runs it so.
        """
        return not torch.is_inference_mode_enabled() and (self.training or torch.is_grad_enabled())

    def _cache(
        self, weight: Tensor, plan: LinearPlan, group: Any, is_first_microbatch: bool | None
    ) -> WeightCache | None:
        """The cache to use; none while tracing, since a compiled region cannot hold tensors between calls.

        None either for a weight that was put together for this call.
        """
        if isinstance(weight, QuantizedWeight):
            return stored_operands(weight, plan, group)
        caches = self._weight_caches  # read once: a region on another thread may end meanwhile
        if is_first_microbatch is None and not caches:
            return None
        if torch.compiler.is_dynamo_compiling() or not isinstance(weight, torch.nn.Parameter):
            return None
        if is_first_microbatch is None:
            return caches[-1]
        if is_first_microbatch or self._microbatch_cache is None:
            self._microbatch_cache = microbatch_cache()
        return self._microbatch_cache

    def _main_grad(self, weight: Tensor) -> Tensor | None:
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        if is_distributed(weight):
            name = self.name or type(self).__name__
            raise NotImplementedError(
                f"{name}: fuse_wgrad_accumulation is not implemented for a weight that is a DTensor"
            )
        main_grad = getattr(weight, "main_grad", None)
        if (
            not isinstance(main_grad, Tensor)
            or main_grad.shape != weight.shape
            or main_grad.dtype not in (torch.float32, torch.bfloat16, torch.float16)
            or main_grad.device != weight.device
            or main_grad.is_neg()
        ):
            got = main_grad
            if isinstance(main_grad, Tensor):
                kind = "a negated view" if main_grad.is_neg() else "a tensor"
                got = f"{kind} {tuple(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}"
            raise ValueError(
                "fuse_wgrad_accumulation=True needs weight.main_grad, an FP32, BF16 or FP16 tensor of shape "
                f"{tuple(weight.shape)} on {weight.device} set before the forward pass; got {got}"
            )
        return main_grad

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what is derived, who listens to this module, and factories that cannot be pickled."""
        derived = {
            "_listeners": (),
            "_plan": None,
            "_answers": {},
            "_share": None,
            "_weight_amaxes": None,
            "_weight_caches": (),
            "_microbatch_cache": None,
        }
        return {**vars(self), **derived}


class MadePlan(NamedTuple):
    """The plan that a module keeps until something changes that it was made from.

    Attributes:
        read: of the module, what the recipe may have read.
    """

    recipe: Recipe
    plan: LinearPlan
    read: tuple[str, Any]


Input = TypeVar("Input", Tensor, Tensor | FusedInput)


def cast_by_autocast(inp: Input) -> Input:
    """``inp`` in the dtype of ``torch.autocast`` where that is on."""
    if torch.is_autocast_enabled(inp.device.type) and inp.dtype in _CAST_BY_AUTOCAST:
        return inp.to(torch.get_autocast_dtype(inp.device.type))
    return inp


def unusable_devices(inp: Tensor | FusedInput, weight: Tensor) -> ValueError:
    """What to raise where ``inp`` and ``weight`` lie on two devices, or on ``meta``, where there are no values."""
    if not isinstance(inp, Tensor | FusedInput):  # NumPy's arrays have a device, too
        return ValueError(f"the input must be a tensor, got {type(inp).__name__}")
    devices = f"got the input on {str(inp.device)!r} and the weight on {str(weight.device)!r}"
    if weight.is_meta:
        remedy = "give the layer values with .to_empty(device=...) and load_state_dict"
    elif inp.device.type == "meta":
        remedy = "give it an input with values"
    else:
        remedy = f"move the layer with .to({str(inp.device)!r}), or the input with .to({str(weight.device)!r})"
    return ValueError(f"input and weight must be on one device that has values, {devices}; {remedy}")


def require_own_recipe(recipe: Recipe | None) -> None:
    """Accept what a module may follow outside autocast regions.

    Raises:
        ValueError: not a recipe, or one with delayed scaling.
    """
    require_recipe(recipe)
    if recipe is not None and recipe.is_delayed:
        raise no_step(recipe)


def no_step(recipe: Recipe) -> ValueError:
    """What to raise where a module would follow ``recipe`` outside regions, with quantizers that remember."""
    return ValueError(
        "delayed scaling chooses scales when an autocast region closes, so a module cannot follow it outside; "
        f"use autocast(recipe=...) instead of recipe={recipe!r}"
    )


def dotted(*parts: str | None) -> str:
    """The parts that are there, joined by dots."""
    return ".".join(part for part in parts if part)
