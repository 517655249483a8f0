"""Who a layer is: its path within the model that was given to ``convert``, checked whenever a rule asks for it."""

import warnings
import weakref
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from fp4engine.names import EndOfName
from fp4engine.recipe import CustomRecipe, Recipe, RuledRecipe
from fp4engine.state import on_entering

_WRAPPERS = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "original_module", "module")
)
"""Names under which ``torch.compile``, FSDP, checkpoints, PEFT and DDP hold the module that they wrap."""
_COPIES = "modules_to_save"
"""Name under which PEFT's wrapper has copies of what it wraps, by the names of adapters."""
_ANCHOR = "_fp4engine_root"
"""Attribute of a model that was given to ``convert``."""


_kinds = count()
_roots: "weakref.WeakSet[Root]" = weakref.WeakSet()


class Root:
    """A model that was given to ``convert``, which is referred to weakly.

    A deep copy of the whole model, also below a wrapper, is a root of its own. A deep copy of a part goes on referring
    to the model, where the copy has no place.

    Attributes:
        names: all names of each linear module that the model had when it was converted.
        kind: the same of a model and its copies, and another of a copied part, or once the model has other modules. A
            compiled graph of layers is for one kind, so that it is not used for layers that have not been checked.
    """

    def __init__(
        self, names: Iterable[tuple[str, ...]], model: nn.Module | None = None, kind: str | None = None
    ) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.kind = str(next(_kinds)) if kind is None else kind
        self._model = None if model is None else weakref.ref(model)
        self._fits: set[str] = set()
        self._children: list[int] = []
        self._asked: set[int] = set()
        _roots.add(self)

    @property
    def model(self) -> nn.Module | None:
        """The model; None if there was none, or if it has been freed."""
        return None if self._model is None else self._model()

    def require_rules(self, recipe: Recipe, layer: nn.Module) -> None:
        """Check that the recipe's rules are about layers of this model, that no layer has two places, and none a second
        one in another model where rules are about it; once for each recipe, until the model has other modules.

        Whether it has is looked at once a forward: whenever ``layer``, which asks, has asked since the last look.

        Raises:
            ValueError: it is not so.

        Warns:
            UserWarning: all layers that a rule matched have been taken out of the model since it was converted.
        """
        model = self.model
        assert model is not None
        if id(layer) in self._asked or not self._asked:
            self._asked.clear()
            self.look(model)
        self._asked.add(id(layer))
        if recipe.number in self._fits:
            return
        for path, module in model.named_modules(remove_duplicate=False):
            own = vars(module).get("_identity")
            if isinstance(own, Identity) and own.root is self and plain_path(path) not in map(plain_path, own.paths):
                raise ValueError(
                    f"{own.name!r} is at {path!r} too since its model was converted, and recipes see a layer by one "
                    f"name: {_WAYS_OUT}"
                )
        require_paths(recipe, model)
        try:
            require_rules(recipe, self.names)
        except ValueError as error:
            raise ValueError(
                f"{error} (of the {type(model).__name__} that was given to convert). Give each model a recipe of its "
                "own, or convert models that share one, or the parts of one, together, below one module"
            ) from None
        self._fits.add(recipe.number)
        if isinstance(recipe, RuledRecipe):
            try:
                recipe.check(name for names in self.names_left() for name in names)
            except ValueError as error:  # no more than a warning, since a stage of a pipeline lacks others' layers
                warnings.warn(
                    f"{error}. What they matched when this {type(model).__name__} was converted is not in it any more; "
                    "unless another stage of a pipeline has it, write rules about the layers that are left",
                    stacklevel=2,
                )

    def names_left(self) -> list[tuple[str, ...]]:
        """Those of :attr:`names` by which the model still has a layer; all of them where there is no model."""
        if (model := self.model) is None:
            return list(self.names)
        here = {
            module.name
            if isinstance(module, Named) and module._identity is None
            else _name_at(module, plain_path(path))
            for path, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, Named | nn.Linear)
        }
        left = (tuple(name for name in names if plain_path(name) in here) for names in self.names)
        return [names for names in left if names]

    def look(self, model: nn.Module) -> None:
        """Forget what was found if ``model``, which this is the root of, has other modules now."""
        children = _children(model)
        if children != self._children:
            self.kind = str(next(_kinds)) if self._children else self.kind
            self._fits, self._children = set(), children

    def look_when_called(self) -> None:
        """From now on look at the model, too, whenever it is called: no region is entered for a recipe of its own."""
        model = self.model
        if model is not None and _look_at not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_look_at)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Root":
        copied = memo.get(id(self.model))
        return Root(self.names, copied, self.kind) if isinstance(copied, nn.Module) else Root(self.names, self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        return Root, (self.names,)


def expect_traces() -> None:
    """From now on look at models whenever a region is entered: compiled code does not, but has a guard on the kind."""
    if _look_again not in on_entering:
        on_entering.append(_look_again)


def _look_again(recipe: Recipe) -> None:
    for root in list(_roots) if recipe.reads_names else ():
        if (model := root.model) is not None:
            root.look(model)


def _look_at(model: nn.Module, inputs: Any) -> None:
    """Forward hook; the code of a model that is compiled as a whole has guards on what modules it has."""
    if not torch.compiler.is_compiling() and _look_again in on_entering and (anchor := vars(model).get(_ANCHOR)):
        anchor.root.look(model)


def _children(model: nn.Module) -> list[int]:
    """The ids of all modules below ``model``, in an order that tells where each is; faster than ``named_modules``."""
    found, above = [], [model]
    while above:
        children = [child for child in above.pop()._modules.values() if child is not None]
        found += map(id, children)
        above += children
    return found


class _Anchor:
    """What a model that was given to ``convert`` has: in pickles it tells the root of the layers what the model is."""

    def __init__(self, root: Root) -> None:
        self.root = root

    def __reduce__(self) -> tuple[Any, ...]:
        model = self.root.model
        # A class with another way to be pickled may not know the model yet, and would begin to pickle it again.
        is_plain = type(model).__reduce_ex__ is object.__reduce_ex__ and type(model).__reduce__ is object.__reduce__
        return _anchored, (self.root, model if is_plain else None)


def _anchored(root: Root, model: nn.Module | None) -> _Anchor:
    if model is not None:
        root._model = weakref.ref(model)
    return _Anchor(root)


class Identity(NamedTuple):
    """What a layer is called.

    Attributes:
        root: the model that was given to ``convert``.
        name: what recipes see.
        paths: where the layer was in the model when that was converted; several if several modules held it.
        now: where it was found last.
    """

    root: Root
    name: str
    paths: tuple[str, ...]
    now: tuple[str, ...]

    def checked(self, layer: nn.Module) -> "Identity":
        """This identity, if ``layer`` is where it was when its model was converted, or in a wrapper there.

        Raises:
            ValueError: it is not, or the model does not exist.
        """
        model = self.root.model
        kind = type(layer).__name__
        if model is None:
            raise ValueError(
                f"this {kind} was {self.name!r} of a model that does not exist any more, so a recipe cannot tell which "
                f"of its rules are about it: {_WAYS_OUT}"
            )
        if any(_at(model, path) is layer for path in self.now):
            return self
        now = tuple(path for path, module in model.named_modules(remove_duplicate=False) if module is layer)
        if any(plain_path(path) in map(plain_path, self.paths) for path in now):
            return self._replace(now=now)
        where = f"is at {now[0]!r} now" if now else f"is not in that {type(model).__name__}"
        raise ValueError(
            f"this {kind} is a copy of {self.name!r}, or was that when its model was converted, and {where}, so a "
            f"recipe cannot tell which of its rules are about it: {_WAYS_OUT}"
        )


_WAYS_OUT = (
    "call fp4engine.convert on the model that has it, which finds all names anew, or set the layer's attribute name"
)


class Named(nn.Module):
    """A layer that recipes see by a name: the one that it was given, or its path in the model given to ``convert``.

    Attributes:
        seen_as: how the name follows from the path: how many of its last parts are left out, and what replaces them.
    """

    seen_as: tuple[int, str] = (0, "")
    _name: str
    _is_whole: bool
    _identity: Identity | None
    _replica_of: "Named | None" = None

    @property
    def name(self) -> str:
        """The name that recipes see; empty if there is none. It may have become wrong, see :meth:`name_for`."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"name must be a string or None, got {name!r}")
        vars(self).pop("_replica_of", None)
        before = vars(self).get("_name")
        self._name, self._is_whole, self._identity = str(name or ""), not isinstance(name, EndOfName), None
        self._renamed(before)

    def _renamed(self, before: str | None) -> None:
        """Forget what was made for another name, and what ran under the name ``before``; None as the layer is made."""

    def name_for(self, recipe: Recipe) -> str:
        """The name by which ``recipe`` sees this layer, checked if the recipe reads names.

        Raises:
            ValueError: the recipe reads names, and the layer is not where it was when its model was converted; it is
                there twice; or a rule matches no layer of that model.
        """
        if not recipe.reads_names:
            return self._name
        name = self.true_name()
        if self._identity is not None:
            self._identity.root.require_rules(recipe, self)
        return name

    def true_name(self) -> str:
        """The name, which is an :class:`~fp4engine.names.EndOfName` if only a part of it is known.

        Raises:
            ValueError: the layer is not where it was when its model was converted.
        """
        if self._identity is not None:
            found = self._identity.checked(self if self._replica_of is None else self._replica_of)
            if found is not self._identity:
                self._identity = found
        return self._name if self._is_whole else EndOfName(self._name)

    def _replicate_for_data_parallel(self) -> "Named":
        replica = super()._replicate_for_data_parallel()
        vars(replica)["_replica_of"] = self
        return replica


def seen_names(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """``layer -> all names by which recipes see it``, once ``model`` is given to ``convert``; of ``nn.Linear`` too."""
    found: dict[nn.Module, dict[str, None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Named | nn.Linear):
            found.setdefault(module, {})[_name_at(module, path)] = None
    return {module: tuple(names) for module, names in found.items()}


def identify(model: nn.Module) -> None:
    """Let every layer of ``model`` be known by its path there, from now on."""
    paths: dict[Named, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Named) and path:
            paths.setdefault(module, []).append(path)
    root = Root(seen_names(model).values(), model)
    vars(model)[_ANCHOR] = _Anchor(root)
    for layer, own in paths.items():
        layer.name = name = _name_at(layer, own[0])
        layer._identity = Identity(root, name, tuple(own), tuple(own))


def known_names(model: nn.Module) -> list[tuple[str, ...]]:
    """All names by which recipes see the layers of ``model``, and all that the models have now which were converted."""
    found: dict[tuple[str, ...], None] = {}
    roots: dict[int, Root] = {}
    for path, module in model.named_modules():
        if isinstance(module, Named) and module._identity is not None:
            roots[id(module._identity.root)] = module._identity.root
        elif isinstance(module, Named | nn.Linear):
            found[(module.name if isinstance(module, Named) else path,)] = None
    return [*found, *(names for root in roots.values() for names in root.names_left())]


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """``name -> all names`` of each layer below ``model`` that is at several places of the model that was converted."""
    layers = (module for module in model.modules() if isinstance(module, Named))
    roots = {id(layer._identity.root): layer._identity.root for layer in layers if layer._identity is not None}
    return {names[0]: names for root in roots.values() for names in root.names if len(names) > 1}


def wrapped_at(model: nn.Module) -> str:
    """The path in ``model`` of what was given to ``convert``, if only wrappers are around it; empty otherwise."""
    path = next((path for path, module in model.named_modules() if _ANCHOR in vars(module)), "")
    return "" if plain_path(path) else path


def forget_root(model: nn.Module) -> None:
    """Undo :func:`identify`, but for names."""
    vars(model).pop(_ANCHOR, None)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _look_at:
            del model._forward_pre_hooks[key]


def require_rules(recipe: Recipe, names: Iterable[tuple[str, ...]]) -> None:
    """Check the rules of ``recipe``, if it has some, against all names of each layer of a model.

    Raises:
        ValueError: a rule matches no name, or one name of a layer and not another; ``recipe`` was made by
            :func:`~fp4engine.export.share_amax` for layers of other names.
    """
    names = list(names)
    known = {name for of_one in names for name in of_one}
    if missing := [names for names in _layers_of(recipe) if known.isdisjoint(names)]:
        raise ValueError(
            f"share_amax made the recipe for a layer called {missing[0][0]!r}, and the layers are "
            f"{', '.join(sorted(known)[:8])}: make one for this model, as it is now"
        )
    if not isinstance(recipe, RuledRecipe):
        return
    recipe.check(name for of_one in names for name in of_one)
    for first, *others in names:
        for other in others:
            if recipe.rules_about(first) != recipe.rules_about(other):
                raise ValueError(
                    f"{first!r} and {other!r} are one module, and the recipe's rules for these names differ; "
                    "write rules that match both or neither"
                )


def require_paths(recipe: Recipe, model: nn.Module) -> None:
    """Check that ``model`` does not hold layers of another model at paths where rules of ``recipe`` mean others.

    Blocks that were cut out of a model that still exists go on being known by their names there.

    Raises:
        ValueError: a rule is about the path of a layer in ``model``, and not about its name.
    """
    if not isinstance(recipe, RuledRecipe):
        return
    for path, layer in model.named_modules():
        if not isinstance(layer, Named) or layer._identity is None or not path:
            continue
        here, name = _name_at(layer, plain_path(path)), layer._identity.name
        is_part = f".{here}".endswith(f".{name}") or f".{name}".endswith(f".{here}")
        if not is_part and not set(recipe.rules_about(here)) <= set(recipe.rules_about(name)):
            raise ValueError(
                f"a rule of the recipe is about {here!r}, and the layer there is {name!r} of the model that was given "
                f"to convert, by which name recipes see it: {_WAYS_OUT}"
            )


def _layers_of(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """The names of each layer that ``recipe`` was made for, if it was made for some."""
    if isinstance(recipe, RuledRecipe):
        for part in (recipe.default, *(rule.recipe for rule in recipe.rules)):
            yield from _layers_of(part)
    elif isinstance(recipe, CustomRecipe):
        yield from getattr(recipe.qfactory, "layers", ())


def _name_at(module: nn.Module, path: str) -> str:
    """What recipes call ``module`` at ``path``; the name that it was given where it is the model itself."""
    if not isinstance(module, Named):
        return path
    if not path:
        return module.name
    if module.seen_as == (0, ""):
        return path
    left_out, part = module.seen_as
    parts = path.split(".")
    return ".".join([*parts[: len(parts) - left_out], *([part] if part else [])])


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """What is at ``path`` in ``model``; faster than ``get_submodule``, as it runs in forwards by recipes with rules."""
    module: nn.Module | None = model
    for part in path.split("."):
        if module is None:
            return None
        module = module._modules.get(part)
    return module


def plain_path(path: str) -> str:
    """``path`` without what wrappers add."""
    parts = path.split(".")
    copies = {index + 1 for index, part in enumerate(parts) if part == _COPIES}
    kept = [part for i, part in enumerate(parts) if part not in _WRAPPERS and part != _COPIES and i not in copies]
    return ".".join(kept)
