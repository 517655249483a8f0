"""The part that all modules with a weight have in common: they run their three GEMMs by the recipe in force."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import require_bool, require_one_of
from fp4engine.functional import ExecutedGemms, LinearPlan, WeightCache, linear, make_linear_plan
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.grouped_linear import Expert
from fp4engine.functional.main_grad import MainGrad, require_main_grad
from fp4engine.functional.shards import Shards, Wholes
from fp4engine.functional.weight_cache import microbatch_cache
from fp4engine.modules.identity import plain_path
from fp4engine.modules.inputs import cast_by_autocast, unusable_devices
from fp4engine.modules.plans import Planned, Remembering
from fp4engine.modules.quantized_weight import QuantizedWeight, stored_operands
from fp4engine.modules.recompute import note_scales
from fp4engine.modules.sharded import (
    is_distributed,
    layout_of,
    place_of,
    require_same_layer,
    rows_in_order,
    sharing_groups,
)
from fp4engine.modules.shared_weight import SharedWeight, WeightAmaxes, amaxes_needed, found_for, with_amaxes
from fp4engine.recipe import LinearRecipe, Recipe
from fp4engine.state import AutocastState

_UNQUANTIZED = LinearRecipe(backward_override=None, backend="auto")  # both given: an import reads no flag
"""High precision, bit for bit, but by a plan, which a gradient that goes to ``main_grad`` needs."""


Listener = Callable[[Tensor | FusedInput, Tensor], Callable[[Tensor], None]]
"""Called with input and weight before each product. It returns a function, which is called with the output."""

Missed = Callable[[str], None]
"""Called with a reason when a product takes place that the listener cannot be told of."""


class Gemms(Planned):
    """The three GEMMs of one linear transformation.

    This class has no parameters of its own. A layer with one weight inherits from it. A layer with several weights has
    a child of this class for each.

    Args:
        name: the module's name, which recipes may match, as long as no ``convert`` finds its path in a model; None is
            the empty name.
        recipe: recipe to follow where no autocast region is active; None means high precision there.
        fuse_wgrad_accumulation: wgrad adds to the buffer ``weight.main_grad`` (FP32, BF16 or FP16, shaped like the
            weight) in its epilogue, and ``weight.grad`` stays None.
        module_type, shape: see :class:`~fp4engine.modules.plans.Planned`.

    Attributes:
        executed: the GEMMs that ran, see :class:`~fp4engine.functional.ExecutedGemms`.
        draws_as: name and replica of the module's own random stream, see
            :func:`fp4engine.distributed.draw_by_layer`; None if it draws from the process's stream.
        overwrites: a function of weight, ``is_first_microbatch`` and ``training`` that says whether a gradient replaces
            what ``weight.main_grad`` holds; None if it never does.
        later: a list to which a backward pass appends a function that adds the gradient to ``weight.main_grad``; None
            if the backward pass adds it itself.
    """

    overwrites: Callable[[Tensor, bool, bool], Any] | None = None
    later: list[Callable[[], None]] | None = None

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
        require_bool("fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        self._configure_plans(name, recipe, module_type, shape)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.executed = ExecutedGemms()
        self.draws_as: tuple[str, int] | None = None
        self._listeners: tuple[tuple[Listener, Missed | None], ...] = ()
        self._share: tuple[Any, Shards, Wholes, str] | None = None
        self._weight_amaxes: WeightAmaxes | None = None
        self._weight_caches: tuple[WeightCache, ...] = ()
        self._microbatch_cache: WeightCache | None = None

    @property
    def unseen(self) -> str:
        """Why listeners get other tensors and casts than this module multiplies by; empty if they get the same."""
        return ""

    def _renamed(self, before: str | None) -> None:
        """Compiled code asks anew for the plan of a module with a new name, by which nothing has run yet."""
        self._plans_for_tracing.clear()
        if before is not None and before != self._name:
            self.executed = ExecutedGemms()

    def multiply(
        self, inp: Tensor | FusedInput, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """``inp @ weight.T + bias``: [..., K] -> [..., N].

        Args:
            is_first_microbatch: True quantizes the weight and keeps its operands; False reuses kept operands while the
                weight is unchanged; None does neither. It has no effect on gradients, except that they overwrite
                ``main_grad`` in a module with ``overwrites``. See also :func:`fp4engine.weight_cache`.

        Raises:
            ValueError: ``is_first_microbatch`` is none of these.
        """
        if is_first_microbatch is not None:
            require_one_of("is_first_microbatch", is_first_microbatch, (None, False, True))
        hear_output = [listener(inp, weight) for listener, _ in self._listeners] if self._listeners else ()
        output = self._multiply(inp, weight, bias, is_first_microbatch)
        for hear in hear_output:
            hear(output)
        return output

    @contextmanager
    def heard_by(self, listener: Listener, missed: Missed | None = None) -> Generator[None]:
        """Region in which ``listener`` is called for every :meth:`multiply` of this module, but not of its copies.

        Such regions may be nested, and may end in any order.

        Args:
            missed: called for products of this module that another module computes together with its own.
        """
        heard = listener, missed
        self._listeners = (*self._listeners, heard)
        try:
            yield
        finally:
            left = list(vars(self).get("_listeners", ()))  # a module that was reverted in the region has none
            if heard in left:
                left.remove(heard)
                self._listeners = tuple(left)

    def multiplied_elsewhere(self, reason: str) -> None:
        """Tell listeners that a product took place without :meth:`multiply`, and why."""
        for _, missed in self._listeners:
            if missed is not None:
                missed(reason)

    def _multiply(
        self, inp: Tensor | FusedInput, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        """As :meth:`multiply`, without calling listeners."""
        state = self._state_in_force()
        plan = self._plan_under(state, weight)
        main_grad = self._main_grad(weight, is_first_microbatch) if self.fuse_wgrad_accumulation else None
        if plan is None:
            if isinstance(weight, QuantizedWeight):
                weight = weight.dequantize()
            if main_grad is None:
                # Without a bias, PyTorch multiplies values by a weight on meta and returns memory that nobody wrote.
                if weight.is_meta and getattr(inp, "device", weight.device) != weight.device:
                    raise unusable_devices(inp, weight)
                inp = inp.tensor() if isinstance(inp, FusedInput) else inp
                output = F.linear(inp, weight, bias)
                self.executed.record_high_precision(inp, weight.shape[0], weight.requires_grad)
                return output
        if getattr(inp, "device", None) != getattr(weight, "device", "") or weight.is_meta:
            raise unusable_devices(inp, weight)
        inp = cast_by_autocast(inp)
        group, cp_group = (None, None) if state is None else (state.amax_reduction_group, state.cp_group)
        computed_by = plan or make_linear_plan(_UNQUANTIZED, self.module_type)
        if is_distributed(inp, weight, bias):
            inp = inp if isinstance(inp, Tensor) else inp.tensor()
            output = self._multiply_share(inp, weight, bias, computed_by, group, cp_group)
        else:
            alone = self.draws_as is None and group is None and cp_group is None
            shards = None if alone else self._shards(inp, weight, computed_by, state)
            if isinstance(inp, FusedInput) and (plan is None or shards is not None or not inp.fuses(plan)):
                inp = inp.tensor()
            output = linear(
                inp,
                weight,
                bias,
                computed_by,
                executed=self.executed,
                shards=shards,
                weight_cache=self._cache(weight, computed_by, group, is_first_microbatch),
                main_grad=main_grad,
            )
        if computed_by.is_stateful and not torch.compiler.is_dynamo_compiling():
            note_scales(self.amax_histories)
        return output

    def _multiply_share(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, group: Any, cp_group: Any
    ) -> Tensor:
        """This rank's share of a linear transformation of DTensors, as the DTensor of all shares.

        In eager mode the layout is kept until something that it depends on changes.
        """
        share = asked = None
        if not torch.compiler.is_dynamo_compiling():
            asked = (plan, place_of(inp), place_of(weight), place_of(bias), cp_group, group, self.draws_as)
            share = self._share  # read once: a thread with another input may replace it meanwhile
        if share is None or share[0] != asked:
            layout = layout_of(plan, inp, weight, bias, self._label(), cp_group)
            shards = self._completed(layout.shards, inp, weight, plan, group)
            share = asked, shards, layout, amaxes_needed(shards, plan)
            if asked is not None:
                self._share = share
        _, shards, layout, needed = share
        if (found := self._weight_amaxes) is not None:  # read once, since another thread may take them away
            shards = with_amaxes(shards, weight, found, needed)
        if asked is not None:
            return linear(inp, weight, bias, plan, executed=self.executed, shards=shards, wholes=layout)
        x, w, b = layout.parts(inp, weight, bias)
        assert x is not None and w is not None
        return layout.output(linear(x, w, b, plan, executed=self.executed, shards=shards))

    def shared_weight(self, state: AutocastState | None, known: SharedWeight | None) -> SharedWeight | None:
        """The weight, if ranks share all of its amaxes in one way in a forward under ``state``; else None.

        It is also None if the weight is computed from other parameters, since each forward multiplies by a new one.

        Args:
            known: what this method returned last time, which is returned again while it is valid.
        """
        weight: Any = self._parameters.get("weight")
        plan, group = self.plan(state), None if state is None else state.amax_reduction_group
        if known is not None and known.weight is weight and known.plan is plan and known.group is group:
            return known
        if plan is None or not plan.shares_amaxes or not is_distributed(weight):
            return None
        groups = (*sharing_groups(weight), *(() if group is None else (group,)))
        return SharedWeight(weight, plan, group, groups, found_for(plan.key, ops.names_of(groups))) if groups else None

    def leave_weight_amaxes(self, left: WeightAmaxes | None) -> None:
        """Let the next forwards use these amaxes; None lets each find its own."""
        vars(self)["_weight_amaxes"] = left  # an assignment to a module's attribute is a long call of Python

    def _label(self) -> str:
        """The module's name in errors; in compiled code its type, since equal modules share a graph."""
        kind = type(self).__name__
        return kind if torch.compiler.is_dynamo_compiling() else self.name or kind

    def _shards(
        self, inp: Tensor | FusedInput, weight: Tensor, plan: LinearPlan, state: AutocastState | None
    ) -> Shards | None:
        """This rank's parts of the matrices, and the draws by which they are cast; None if the matrices are whole.

        Raises:
            NotImplementedError: experts under ``cp_group``, whose number of rows differs between ranks.
        """
        group, cp_group = (None, None) if state is None else (state.amax_reduction_group, state.cp_group)
        if cp_group is None:
            alone = group is None and self.draws_as is None
            return None if alone else self._completed(Shards(), inp, weight, plan, group)
        if self.module_type == "grouped_linear":
            raise NotImplementedError(
                f"{self.name or 'GroupedLinear'}: cp_group says that every rank has equally many rows, but that "
                "is not so for the rows of an expert; enter autocast without cp_group around experts"
            )
        return self._completed(rows_in_order(plan, cp_group, inp, weight, self._label()), inp, weight, plan, group)

    def _completed(
        self, shards: Shards, inp: Tensor | FusedInput, weight: Tensor, plan: LinearPlan, group: Any
    ) -> Shards:
        """``shards`` over the region's ``amax_reduction_group`` as well, and by the module's own random stream.

        Raises:
            ValueError: as :func:`require_same_layer`, of the ranks of the group.
        """
        if group is not None:
            require_same_layer(plan, group, inp, weight, self._label())
            shards = shards.and_over(group, plan.in_group)
        if self.draws_as is not None:
            layer, replica = self.draws_as
            shards = shards._replace(layer=layer, rank=replica)
        return shards

    def expert(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None = None
    ) -> Expert | None:
        """This module's product as data, for :func:`grouped_linear` to compute with others; None in high precision."""
        if is_first_microbatch is not None:
            require_one_of("is_first_microbatch", is_first_microbatch, (None, False, True))
        state = self._state_in_force()
        plan = self._plan_under(state, weight)
        if plan is None:
            return None
        if is_distributed(weight, bias):
            raise NotImplementedError(
                f"{self._label()}: experts that are DTensors are not implemented; give each rank whole experts of its "
                "own"
            )
        group = None if state is None else state.amax_reduction_group
        shards = self._shards(inp, weight, plan, state)
        cache = self._cache(weight, plan, group, is_first_microbatch)
        main_grad = self._main_grad(weight, is_first_microbatch) if self.fuse_wgrad_accumulation else None
        return Expert(weight, bias, plan, self.executed, shards, cache, main_grad)

    def _cache(
        self, weight: Tensor, plan: LinearPlan, group: Any, is_first_microbatch: bool | None
    ) -> WeightCache | None:
        """The cache of the weight's operands, if there is one.

        There is none in compiled code, which cannot hold tensors between calls, and none for a weight that is put
        together anew for each call.
        """
        if isinstance(weight, QuantizedWeight):
            return stored_operands(weight, plan, group)
        caches = self._weight_caches  # read once, since a region on another thread may end
        if is_first_microbatch is None and not caches:
            return None
        if torch.compiler.is_dynamo_compiling() or not isinstance(weight, torch.nn.Parameter):
            return None
        if is_first_microbatch is None:
            return caches[-1]
        cache = self._microbatch_cache
        if cache is None:
            cache = self._microbatch_cache = microbatch_cache(self._label())
        elif is_first_microbatch:
            cache.begin_microbatches()
        return cache

    def _main_grad(self, weight: Tensor, is_first_microbatch: bool | None) -> MainGrad | None:
        says = self.overwrites
        overwrites = False if says is None else says(weight, bool(is_first_microbatch), self.training)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        if is_distributed(weight):
            raise NotImplementedError(
                f"{self._label()}: fuse_wgrad_accumulation is not implemented for a weight that is a DTensor"
            )
        return MainGrad(weight, require_main_grad(weight), overwrites, self.later)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for copies, without what ran and who listened, and without plans: factories may not pickle."""
        derived = {
            "executed": ExecutedGemms(),
            "_listeners": (),
            "_plan": None,
            "_plans_for_tracing": {},
            "_remembering": None,
            "_share": None,
            "_weight_amaxes": None,
            "_weight_caches": (),
            "_microbatch_cache": None,
        }
        return {**vars(self), **derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remembering = Remembering(self)


def require_layers(model: torch.nn.Module) -> dict[str, Gemms]:
    """Every layer of ``model`` that multiplies by a weight, by its path there.

    Raises:
        ValueError: there is none.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Gemms)}
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no layer of fp4engine's; call fp4engine.convert first")
    return layers


def layers_by_plain_path(model: torch.nn.Module) -> dict[str, Gemms]:
    """The layers of ``model``, of which there may be none, by their paths there without what wrappers add.

    Where that is the path of two, as of what PEFT has copied, each has its whole path.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Gemms)}
    times = Counter(map(plain_path, layers))
    return {path if times[plain_path(path)] > 1 else plain_path(path): layer for path, layer in layers.items()}
