"""Random stories of delayed scaling beside its memory written out by hand.

A story has two layers. Regions are entered and left, layers run forward in several ways, backward passes come in any
order, and layers are replaced by copies. After each event the amax histories are those by hand, and each output and
gradient has the bytes of the casts by their amaxes.
"""

import copy
import math
import pickle
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp4engine
from fp4engine import reference
from fp4engine.recipe import DelayedScaling, Float8CurrentScaling, Format, LinearRecipe, NVFP4BlockScaling, Recipe
from tests.fuzz.straight_line import ROLES, Side, product, side

OTHERS = (NVFP4BlockScaling(), Float8CurrentScaling(), LinearRecipe())
TRAINED = {
    "plainly": lambda layer, x: layer(x),
    "reentrant": fp4engine.checkpoint,
    "not reentrant": partial(fp4engine.checkpoint, use_reentrant=False),
    "torch": partial(checkpoint, use_reentrant=False),
    "torch, told": partial(checkpoint, use_reentrant=False, context_fn=fp4engine.recompute_contexts),
}


class Memory:
    """What is remembered of one tensor: amaxes of steps, newest first, and the amax that scales the running step."""

    def __init__(self, length: int, amax: float) -> None:
        self.values, self.amax, self.ended = [0.0] * length, amax, False

    def _steps(self, recipe: DelayedScaling) -> list[float]:
        return (self.values + [0.0] * recipe.amax_history_len)[: recipe.amax_history_len]

    def coming(self, recipe: DelayedScaling) -> float:
        """What the next forward is scaled by."""
        steps = self._steps(recipe)
        if recipe.amax_compute_algo == "max":
            steps = [max(amax for amax in (0.0, *steps) if not math.isnan(amax))]
        return steps[0] if self.ended and math.isfinite(steps[0]) and steps[0] > 0 else self.amax

    def note(self, current: float, recipe: DelayedScaling) -> float:
        """Take ``current`` for the running step, and return what it is scaled by."""
        self.amax, steps = self.coming(recipe), self._steps(recipe)
        if self.ended:
            self.ended, steps = False, [0.0, *steps[:-1]]
        either = (steps[0], current)
        self.values = [math.nan if any(map(math.isnan, either)) else max(either), *steps[1:]]
        return self.amax


class Pending(NamedTuple):
    """A forward whose backward pass has not run: the layer, its input and output, and its operands for backward."""

    index: int
    layer: fp4engine.Linear
    x: Tensor
    y: Tensor
    x_col: Side
    w_col: Side
    recipe: DelayedScaling


class Story:
    """The story of a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.log, self.wrong = random.Random(seed), [], []
        torch.manual_seed(seed)
        fp4engine.manual_seed(seed)
        self.layers = [fp4engine.Linear(*sizes, bias=False) for sizes in ((19, 24), (16, 35))]
        self.memories: list[dict[str, Memory]] = [{} for _ in self.layers]
        self.recipes = [self._recipe() for _ in range(2)]
        self.open: list[tuple[Any, Recipe, bool]] = []
        self.used: set[int] = set()
        self.is_step = False
        self.pending: list[Pending] = []

    def _recipe(self) -> DelayedScaling:
        pick = self.random.choice
        return DelayedScaling(
            margin=pick((0, 0, 2)),
            fp8_format=pick((Format.HYBRID, Format.HYBRID, Format.E4M3)),
            amax_history_len=pick((1, 2, 4)),
            amax_compute_algo=pick(("max", "most_recent")),
        )

    def run(self) -> list[str]:
        """What differs at the first event after which anything does."""
        events = {self.enter: 3, self.leave: 4, self.forward: 8, self.backward: 5, self.replace: 1}
        try:
            for event in self.random.choices(list(events), list(events.values()), k=self.random.randint(10, 40)):
                event()
                self._compare()
                if self.wrong:
                    return [f"{', '.join(self.log)}: {wrong}" for wrong in self.wrong]
            return []
        finally:
            while self.open:
                self.leave()

    def enter(self) -> None:
        if len(self.open) < 3:
            recipe, enabled = self.random.choice((*self.recipes * 3, *OTHERS)), self.random.random() > 0.1
            region = fp4engine.autocast(enabled, recipe=recipe)
            region.__enter__()
            self.open.append((region, recipe, enabled))
            self.is_step |= recipe.is_delayed
            self.log.append(f"enter {recipe!r}" + " disabled" * (not enabled))

    def leave(self) -> None:
        if not self.open:
            return
        region, *_ = self.open.pop()
        region.__exit__(None, None, None)
        self.log.append("leave")
        if not self.open:
            for memory in (memory for index in self.used for memory in self.memories[index].values()):
                memory.ended = True
            self.used, self.is_step = set(), False

    def forward(self) -> None:
        if not self.open:
            return
        index, (_, recipe, enabled) = self.random.randrange(len(self.layers)), self.open[-1]
        layer, how = self.layers[index], self.random.choice((*TRAINED, "no_grad", "eval", "inference"))
        x = torch.randn(self.random.choice((1, 3, 8)), layer.in_features) * 10 ** self.random.uniform(-2, 3)
        if self.random.random() < 0.05:
            x[0, 0] = self.random.choice((math.inf, math.nan))
        evaluates = how == "eval" or (how in TRAINED and self.random.random() < 0.3)
        self.log.append(f"layer {index} {how}" + " in eval" * evaluates)
        layer.train(not evaluates)
        is_delayed = enabled and isinstance(recipe, DelayedScaling)
        sides = self._sides(index, x, recipe, how in ("eval", "inference")) if is_delayed else None
        if how in TRAINED:
            x.requires_grad_()
            y = TRAINED[how](layer, x)
        else:
            with torch.inference_mode() if how == "inference" else torch.no_grad():
                y = layer(x)
        if sides is not None:
            x_row, x_col, w_row, w_col = sides
            self._same("y", y, product(x_row, w_row, None, torch.float32))
            if how in TRAINED:
                self.pending.append(Pending(index, layer, x, y, x_col, w_col, recipe))

    def _sides(self, index: int, x: Tensor, recipe: DelayedScaling, evaluates: bool) -> list[Side]:
        memories = self.memories[index]
        for role in ROLES:
            spec = recipe.casts(role).rowwise
            memories.setdefault(role, Memory(recipe.amax_history_len, spec.numerator))
        if not evaluates:
            self.used.add(index)
        made: list[Side] = []
        for role, matrix in (("input", x), ("weight", self.layers[index].weight)):
            made += self._cast(memories[role], role, matrix.detach(), recipe, evaluates)
        return made

    def _cast(self, memory: Memory, role: str, matrix: Tensor, recipe: DelayedScaling, evaluates=False) -> list[Side]:
        """Both operands of ``matrix``, scaled by ``memory``."""
        spec = recipe.casts(role).rowwise
        current = float(reference.amax(matrix, spec, None, 0))
        amax = memory.coming(recipe) if evaluates else memory.note(current, recipe)
        given = torch.tensor([amax if math.isfinite(current) else current])
        return [side(m, spec, role, m is not matrix, None, 0, lambda _: given) for m in (matrix, matrix.T)]

    def backward(self) -> None:
        if not self.pending:
            return
        index, layer, x, y, x_col, w_col, recipe = self.pending.pop(self.random.randrange(len(self.pending)))
        self.log.append(f"backward of layer {index}")
        dy = torch.randn_like(y) * 10 ** self.random.uniform(-3, 3)
        row, col = self._cast(self.memories[index]["grad_output"], "grad_output", dy, recipe)
        if self.is_step:
            self.used.add(index)
        layer.weight.grad = None
        y.backward(dy)
        self._same("dx", x.grad, product(row, w_col, None, torch.float32))
        self._same("dw", layer.weight.grad, product(col, x_col, None, torch.float32))

    def replace(self) -> None:
        """Go on with a copy of a layer, or outside regions with a layer that was saved and restored."""
        index = self.random.randrange(len(self.layers))
        layer, way = self.layers[index], "copy" if self.open else self.random.choice(("copy", "pickle", "resume"))
        self.log.append(f"{way} of layer {index}")
        if way == "resume":
            new = torch.nn.ModuleDict({"fc": fp4engine.Linear(layer.in_features, layer.out_features, bias=False)})
            old = torch.nn.ModuleDict({"fc": layer})
            new.load_state_dict(old.state_dict())
            fp4engine.set_amax_history(new, fp4engine.get_amax_history(old))
            self.layers[index] = new["fc"]
        else:
            self.layers[index] = copy.deepcopy(layer) if way == "copy" else pickle.loads(pickle.dumps(layer))
        self.pending = [pending for pending in self.pending if pending.index != index]

    def _same(self, name: str, got: Tensor | None, want: Tensor) -> None:
        if got is None or not torch.allclose(got, want, rtol=0, atol=0, equal_nan=True):
            self.wrong.append(f"{name} differs")

    def _compare(self) -> None:
        for index, (layer, memories) in enumerate(zip(self.layers, self.memories, strict=True)):
            for role, memory in memories.items():
                history = layer.amax_histories.get(role)
                got = None if history is None else history.state()
                want = {"values": memory.values, "amax": memory.amax, "open": not memory.ended}
                if str(got) != str(want):
                    self.wrong.append(f"history of layer {index}'s {role} is {got}, and {want} by hand")


def failures(first: int, count: int) -> Iterator[str]:
    """What is wrong with each of these stories."""
    for seed in range(first, first + count):
        yield from (f"story {seed}: {text}" for text in Story(seed).run())
