"""Sibling layers that train with one outer scale, because servers multiply them as one matrix."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4engine.arguments import require_model, shown
from fp4engine.formats import Outer
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.identity import seen_names
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.quantizers.shared import ModulePlace, SharedAmaxQuantizer, Siblings
from fp4engine.recipe import CustomRecipe, Recipe, RuledRecipe, ScheduledRecipe
from fp4engine.roles import QuantizerRole

SHARED_SCALES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""The last parts of names of sibling layers that servers multiply as one matrix, with one outer scale.

Without the first of them they are no siblings: RWKV's ``key`` and ``value`` read different inputs.
"""


def require_shared_scales(shared_scales: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """``shared_scales``, to be read as often as needed.

    Raises:
        ValueError: something else in place of sequences of names, such as a string.
    """
    if isinstance(shared_scales, str | torch.Tensor) or not isinstance(shared_scales, Iterable):
        raise ValueError(f"shared_scales must be sequences of names, got {shown(shared_scales)}")
    found: list[tuple[str, ...]] = []
    for siblings in shared_scales:
        given: Any = tuple(siblings) if isinstance(siblings, Iterable) and not isinstance(siblings, str) else None
        if given is None or not all(isinstance(sibling, str) for sibling in given):
            raise ValueError(f"shared_scales must be sequences of names, got {shown(siblings)} among them")
        found.append(given)
    return tuple(found)


def sibling_groups(names: Iterable[str], shared_scales: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """``name -> the names that share its scale``, itself included, for all ``names`` that have siblings.

    Args:
        names: dotted names of modules.
        shared_scales: names of siblings, below any one parent that has the first of them.

    Raises:
        ValueError: as :func:`require_shared_scales`.
    """
    known = dict.fromkeys(names)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in known)
    groups: dict[str, tuple[str, ...]] = {}
    for siblings in require_shared_scales(shared_scales):
        for parent in parents:
            together = [f"{parent}.{sibling}" if parent else sibling for sibling in siblings]
            found = [name for name in together if name in known]
            if len(found) > 1 and found[0] == together[0]:
                groups |= dict.fromkeys(found, tuple(found))
    return groups


@dataclass(frozen=True, eq=False)
class _SharingFactory:
    """``role -> quantizer`` of ``recipe``, whose weights share an amax with their siblings.

    Attributes:
        siblings: by the name of the role.
        layers: the names of each layer that has siblings, now and once its model is given to ``convert``.
    """

    recipe: Recipe
    siblings: dict[str, Siblings] = field(repr=False)
    layers: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def reads_names(self) -> bool:
        """Whether the recipe does. A name is the key to siblings here, and the module checks that these are its own."""
        return self.recipe.reads_names

    def __call__(self, role: QuantizerRole) -> Quantizer:
        made = make_quantizer(self.recipe, role)
        siblings = self.siblings.get(role.name)
        if role.tensor_type != "weight" or siblings is None or made.is_identity:
            return made
        return SharedAmaxQuantizer.of(made, siblings)


def share_amax(
    model: torch.nn.Module, recipe: Recipe, shared_scales: Sequence[Sequence[str]] = SHARED_SCALES
) -> Recipe:
    """``recipe`` for this ``model``, with the weights of sibling layers scaled by the largest of their amaxes.

    An exported checkpoint then has, bit for bit, the weights that trained. Give the result to ``convert``, or to
    ``autocast`` after it.

    Args:
        model: its weights are whole in every process, or gathered by FSDP2 for their products. The amax of a sibling
            that is sharded at that moment is reduced over its shards; siblings in one unit of FSDP2 need no such step.
            A copy of the model, such as an average of its weights, needs a recipe made for it, unless ``convert`` was
            given the recipe, which is copied then. Eager code refuses another model's recipe; compiled code does not.
        shared_scales: names of siblings, by the last part of their dotted names; groups without the first are none.

    Raises:
        ValueError: the model has no such siblings, or recipes see one by the name of another module; ``recipe`` has
            delayed scaling or a schedule, casts a sibling's weight without an outer scale of the whole tensor, by one
            of another bound than its siblings have, or by a quantizer that does more than cast.
    """
    require_model(model)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be an fp4engine.recipe.Recipe (zoo.make makes one), got {recipe!r}")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    shared_scales = require_shared_scales(shared_scales)
    groups = sibling_groups(linears, shared_scales)
    if not groups:
        raise ValueError(f"no linear modules of this {type(model).__name__} are siblings by {shared_scales}")
    if recipe.is_delayed or isinstance(recipe, ScheduledRecipe):
        raise ValueError(
            f"siblings share the amax that their weights have now: give a recipe of one step, not {recipe!r}"
        )
    called, converted = _names_in_roles(model, groups), seen_names(model)
    numerators: dict[str, float] = {}
    for name, siblings in groups.items():
        shape = (linears[name].out_features, linears[name].in_features)
        quantizer = make_quantizer(recipe, QuantizerRole("linear", "weight", called[name], shape))
        if not quantizer.only_casts and not isinstance(quantizer, SharedAmaxQuantizer):
            kind = type(quantizer).__name__
            raise ValueError(f"{name!r} has a {kind}, which does more than cast; sharing an amax would leave that out")
        spec = quantizer.rowwise_spec
        if spec is None:
            continue
        if spec.outer is not Outer.TENSOR:
            raise ValueError(f"{name!r} has outer scales by {spec.outer.value}, and siblings share one of the tensor")
        numerators[name] = spec.numerator
        for other in siblings:
            if numerators.get(other, spec.numerator) != spec.numerator:
                raise ValueError(
                    f"{name!r} has outer scales {spec.numerator:g} / amax and {other!r} {numerators[other]:g} / amax, "
                    "and siblings share one: give them one recipe"
                )
    places = {name: ModulePlace(model.get_submodule(name.rpartition(".")[0]), name) for name in groups}
    layers = {name: (called[name], converted[linears[name]][0]) for name in groups}
    siblings = {
        seen: Siblings(places[name], tuple(places[other] for other in together if other != name))
        for name, together in groups.items()
        for seen in layers[name]
    }
    return _sharing(recipe, siblings, tuple(layers.values()))


def _names_in_roles(model: torch.nn.Module, groups: Iterable[str]) -> dict[str, str]:
    """``dotted name -> the name that recipes see``, now or once it is converted, of each layer of ``model``.

    Raises:
        ValueError: recipes see a module in ``groups`` by the name of another one, or a module is not where it was when
            its model was converted.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Gemms)}
    called = {name: module.true_name() if isinstance(module, Gemms) else name for name, module in layers.items()}
    for name in groups:
        others = [other for other in called if other != name and called[name] in (other, called[other])]
        if others:
            raise ValueError(
                f"recipes see {name!r} and {others[0]!r} by one name, {called[name]!r}, as modules that were converted "
                "in parts or built by themselves: call fp4engine.convert on the whole model first"
            )
    return called


def without_sharing(recipe: Recipe) -> Recipe:
    """The recipe that :func:`share_amax` was given; a recipe without sharing is returned unchanged."""
    if isinstance(recipe, RuledRecipe):
        return recipe.over(without_sharing)
    if isinstance(recipe, CustomRecipe) and isinstance(recipe.qfactory, _SharingFactory):
        return recipe.qfactory.recipe
    return recipe


def _sharing(recipe: Recipe, siblings: dict[str, Siblings], layers: tuple[tuple[str, str], ...]) -> Recipe:
    if isinstance(recipe, RuledRecipe):
        return recipe.over(lambda own: _sharing(own, siblings, layers))
    factory = _SharingFactory(recipe, siblings, layers)
    same = {name: getattr(recipe, name) for name in ("backward_override", "backend", "accumulation")}
    return CustomRecipe(qfactory=factory, **same)
