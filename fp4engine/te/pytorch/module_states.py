"""Recipe states and quantizers of one module: what ``fp8_meta`` and ``quantizers`` show, and let a script write."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fp4engine import state
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.recompute import followed_state
from fp4engine.quantizers.delayed import DelayedQuantizer
from fp4engine.recipe import CustomRecipe
from fp4engine.te.common.recipe import as_frozen
from fp4engine.te.pytorch.quantized_tensor import Quantizer
from fp4engine.te.pytorch.recipe_state import AnyRecipe, CustomRecipeState, DelayedScalingRecipeState, RecipeState
from fp4engine.te.pytorch.roles import QuantizerRole

MODES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
"""TransformerEngine's key of a state -> the pass that it is about."""

Roles = Mapping[str, list[QuantizerRole | None]]


class ModuleStates:
    """The states of one module by one recipe.

    Args:
        recipe: as it was given to the region.
        roles: of the tensors of both passes, by the keys of :data:`MODES`.
        earlier: the states that these replace; tensors that a script may hold stay what they are.

    Attributes:
        frozen: the recipe's values.
        meta: ``{"recipe": ..., "scaling_fwd": ..., "scaling_bwd": ...}``.
        quantizers: the quantizers of both states.
    """

    def __init__(self, recipe: AnyRecipe, roles: Roles, earlier: "ModuleStates | None" = None) -> None:
        self.frozen = as_frozen(recipe)
        self.meta: dict[str, Any] = {"recipe": recipe}
        self.quantizers: dict[str, list[Any]] = {}
        for key, mode in MODES.items():
            made = RecipeState.create(recipe, mode=mode, num_quantizers=len(roles[key]), roles=roles[key])
            if earlier is not None:
                made.inherit_state_from(earlier.meta[key])
            self.meta[key], self.quantizers[key] = made, made.make_quantizers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a pickle the quantizers have tensors of their own, and no parts of the states'."""
        vars(self).update(state)
        for key, slots, made in self._remembering():
            for slot, tied in zip(slots, made.make_quantizers(), strict=True):
                self.quantizers[key][slot].scale, self.quantizers[key][slot].amax = tied.scale, tied.amax

    def answers(self) -> dict[QuantizerRole, Any]:
        """What a custom recipe's factory has answered, by role; empty for other recipes."""
        given: dict[QuantizerRole, Any] = {}
        for key in MODES:
            made: RecipeState = self.meta[key]
            if isinstance(made, CustomRecipeState) and made.roles is not None:
                for role, answer in zip(made.roles, made.answers, strict=True):
                    if role is not None:
                        given.setdefault(role, answer)
        return given

    def own_product(self) -> tuple[Quantizer, Quantizer, Quantizer] | None:
        """Quantizers of input, weight and grad_output, if they have a product of their own (``qgemm``).

        Raises:
            ValueError: some of them do, and some do not.
        """
        if not isinstance(self.frozen, CustomRecipe):
            return None
        inp, weight, *_ = self.quantizers["scaling_fwd"]
        three = (inp, weight, self.quantizers["scaling_bwd"][0])
        custom = [bool(getattr(quantizer, "custom", False)) for quantizer in three]
        if any(custom) and not all(custom):
            raise ValueError(
                "quantizers of input, weight and grad_output must all have a qgemm() of their own, or none; "
                f"got {three}"
            )
        return three if all(custom) else None

    def _remembering(self) -> list[tuple[str, list[int], DelayedScalingRecipeState]]:
        """Key, slots and state of the tensors under delayed scaling."""
        found: list[tuple[str, list[int], DelayedScalingRecipeState]] = []
        for key in MODES:
            made: RecipeState = self.meta[key]
            if isinstance(made, DelayedScalingRecipeState):
                found.append((key, list(range(made.num_quantizers)), made))
            elif isinstance(made, CustomRecipeState) and made.delayed is not None:
                found.append((key, made.delayed_slots, made.delayed))
        return found

    @property
    def remembers(self) -> bool:
        """Whether scales depend on earlier steps."""
        return bool(self._remembering())

    def exchange(self, computed_by: Mapping[str, Sequence[Any]]) -> None:
        """Copy what a script has written into ``scale`` and ``amax_history`` to the histories, or else these to them.

        Args:
            computed_by: the quantizers that the module uses, one per slot, None where there is none.
        """
        for key, slots, made in self._remembering():
            columns = [computed_by[key][slot] for slot in slots]
            made.exchange([column if isinstance(column, DelayedQuantizer) else None for column in columns])


def recipe_in_force() -> state.Recipe | None:
    """The frozen recipe of the region in force, or of the one that is repeated; None where nothing is quantized."""
    current, _ = followed_state()  # and is stored for products in modules that are a checkpoint by themselves
    return current.recipe if current is not None and current.enabled else None


@contextmanager
def weights_as_recorded(parts: Iterable[Gemms], recipe: state.Recipe) -> Generator[None]:
    """Region in which delayed scaling keeps the scales of weights and notes no amax of them."""
    changed: list[tuple[Gemms, Any]] = []
    for part in parts:
        made = part._plan
        if made is not None and made.recipe == recipe and isinstance(weight := made.plan.weight, DelayedQuantizer):
            changed.append((part, made))
            part._plan = made._replace(plan=replace(made.plan, weight=weight.unrecorded()))
    try:
        yield
    finally:
        for part, made in changed:
            part._plan = made
