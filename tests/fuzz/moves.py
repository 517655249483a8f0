"""What happens around a case's module: a model that it is put in, copies, cuts and names, seeds, and hidden writes."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp4engine
from fp4engine import ops
from fp4engine.recipe import LinearRecipe, Recipe, Rule, RuledRecipe

MOVES = ("deepcopy", "pickle", "cut", "insert", "reverse", "wrap", "convert again", "part", "rename", "tie and untie")
"""What is done to the model that holds a module, before it runs by a rule about it."""
COPIES = ("deepcopy", "pickle")
"""Those that leave other parameters, without attributes of their own, in their own layout."""
SEEDINGS = ("told", "told", "torch", "torch after draws", "torch twice", "forked", "restored")
WRITES = ("data", "fused", "numpy", "swapped")
"""Writes that change neither a weight's version nor its memory."""

HIGH = LinearRecipe(backward_override=None, backend="auto")
X = torch.ones(2, 4)


@dataclass(frozen=True)
class Placed:
    """A module in a model, and a recipe that has a rule about it and leaves all else in high precision."""

    model: nn.ModuleList
    module: nn.Module
    recipe: Recipe


def draw_moves(rng: Random, can_be_copied: bool) -> tuple[str, ...]:
    """A few moves; none for a module that is in no model."""
    if rng.random() < 0.5:
        return ()
    moves = [rng.choice(MOVES) for _ in range(rng.randint(1, 4))]
    return ("convert", *(move for move in moves if can_be_copied or move not in COPIES))


def place(module: nn.Module, recipe: Recipe, moves: tuple[str, ...]) -> Placed:
    """Put ``module`` in a model, convert that, and make the moves. Names that are not true have to be refused."""
    model = nn.ModuleList([nn.Linear(4, 4), module, nn.Linear(4, 4)])
    placed = Placed(model, module, recipe)
    for move in moves:
        placed = MOVE[move](placed, recipe)
    return placed


def _rule(model: nn.ModuleList, recipe: Recipe, name: str) -> Recipe:
    """The rule in the way of a typing error too: a pattern that is about no other layer."""
    return RuledRecipe(HIGH, (Rule(recipe, name),)) if len(model) else recipe


def _converted(placed: Placed, recipe: Recipe) -> Placed:
    fp4engine.convert(placed.model)
    index = next(i for i, each in enumerate(placed.model) if any(m is placed.module for m in each.modules()))
    path = next(path for path, module in placed.model.named_modules() if module is placed.module)
    assert path.split(".")[0] == str(index)
    return replace(placed, recipe=_rule(placed.model, recipe, path))


def _is_linear(module: nn.Module) -> bool:
    return type(module) is fp4engine.Linear


def _copied(way: Callable[[nn.ModuleList], nn.ModuleList]) -> Callable[[Placed, Recipe], Placed]:
    def move(placed: Placed, recipe: Recipe) -> Placed:
        path = next(path for path, module in placed.model.named_modules() if module is placed.module)
        model = way(placed.model)
        return replace(placed, model=model, module=model.get_submodule(path))

    return move


def _moved(change: Callable[[nn.ModuleList], object]) -> Callable[[Placed, Recipe], Placed]:
    def move(placed: Placed, recipe: Recipe) -> Placed:
        change(placed.model)
        _require_refusal(placed.module, placed.recipe)
        return _converted(placed, recipe)

    return move


def _require_refusal(module: nn.Module, recipe: Recipe) -> None:
    """A layer of ``module`` cannot tell which rules are about it, and says so, unless it was told its name."""
    layer = next(each for each in module.modules() if isinstance(each, fp4engine.modules.Gemms))
    if layer._identity is None:
        return
    try:
        layer.plan_by(recipe)
    except ValueError as error:
        assert "fp4engine.convert" in str(error) or "rules that match no module" in str(error), error
    else:
        raise AssertionError(f"{layer.name!r} follows a rule by a name that is not true: {recipe!r}")


def _cut(model: nn.ModuleList) -> None:
    if len(model) == 1 or model[0].__class__ is not fp4engine.Linear or model[0].in_features != 4:
        model.insert(0, nn.Linear(4, 4))
    else:
        del model[0]


def _wrapped(placed: Placed, recipe: Recipe) -> Placed:
    index = next(i for i, each in enumerate(placed.model) if any(m is placed.module for m in each.modules()))
    placed.model[index] = checkpoint_wrapper(placed.model[index])
    return placed


def _part(placed: Placed, recipe: Recipe) -> Placed:
    """A copy of the module alone belongs to no model."""
    _require_refusal(pickle.loads(pickle.dumps(nn.Sequential(nn.Linear(4, 4), _skeleton(placed)))), placed.recipe)
    return placed


def _skeleton(placed: Placed) -> nn.Module:
    return copy.copy(next(each for each in placed.module.modules() if isinstance(each, fp4engine.modules.Gemms)))


def _renamed(placed: Placed, recipe: Recipe) -> Placed:
    for layer in placed.module.modules():
        if isinstance(layer, fp4engine.modules.Gemms):
            layer.name = "told"
    return replace(placed, recipe=_rule(placed.model, recipe, "told"))


def _tied(placed: Placed, recipe: Recipe) -> Placed:
    """A layer at a second place has two names, until it is taken away from there; a recipe that is new finds out."""
    if not _is_linear(placed.module) or placed.module._identity is None:
        return placed
    placed.model.append(placed.module)
    _require_refusal(placed.module, RuledRecipe(HIGH, (*_rules(placed.recipe), Rule(HIGH, "*", None, 1))))
    del placed.model[len(placed.model) - 1]
    return placed


def _rules(recipe: Recipe) -> tuple[Rule, ...]:
    assert isinstance(recipe, RuledRecipe)
    return recipe.rules


MOVE: dict[str, Callable[[Placed, Recipe], Placed]] = {
    "convert": _converted,
    "convert again": _converted,
    "deepcopy": _copied(copy.deepcopy),
    "pickle": _copied(lambda model: pickle.loads(pickle.dumps(model))),
    "cut": _moved(_cut),
    "insert": _moved(lambda model: model.insert(0, nn.Linear(4, 4))),
    "reverse": _moved(lambda model: [model.insert(0, nn.Linear(4, 4)), model.insert(0, model[-1])]),
    "wrap": _wrapped,
    "part": _part,
    "rename": _renamed,
    "tie and untie": _tied,
}


def seed(way: str, number: int, place: str = "cpu") -> None:
    """Let the random stream begin at draw 0 of the seed ``number``, in one of :data:`SEEDINGS`."""
    device = torch.device(place)
    if way == "told":
        fp4engine.manual_seed(number)
        torch.manual_seed(number + 1)
        return
    fp4engine.set_rng_state({"seed": 1, "draws": {}, "follows_torch": True})
    if way != "torch":
        torch.manual_seed(number)
    if way in ("torch after draws", "torch twice"):
        ops.next_draw(device, 3)
    if way == "forked":
        with torch.random.fork_rng():
            torch.manual_seed(number + 1)
            ops.next_draw(device, 3)
    elif way == "restored":
        state, theirs = fp4engine.get_rng_state(), torch.get_rng_state()
        fp4engine.manual_seed(number + 1)
        fp4engine.set_rng_state(state)
        torch.set_rng_state(theirs)
    else:
        torch.manual_seed(number)


def halve_unseen(weight: nn.Parameter, way: str, is_usual: bool) -> None:
    """Halve ``weight`` in place by one of :data:`WRITES`; what is not ``is_usual`` takes the plainest of them."""
    if way == "fused" and is_usual:
        settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
        with torch.no_grad():
            torch._fused_sgd_([weight], [weight.detach().clone()], [], **settings, maximize=False, is_first_step=True)
    elif way == "numpy" and is_usual and weight.is_cpu:
        weight.detach().numpy()[:] *= 0.5
    elif way == "swapped":
        home = weight.data
        weight.data = torch.zeros_like(home)
        home.mul_(0.5)
        weight.data = home
    else:
        weight.data.mul_(0.5)
